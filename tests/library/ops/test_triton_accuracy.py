"""Right numbers on a GPU for inputs that are hard in fp32; ``test_accuracy`` has the same for a CPU."""

import pytest
from hard_inputs import DTYPES, INPUTS, beyond_four_times, errors_of, training_errors_of
from triton_helpers import DEVICE


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_evaluation_of_hard_inputs(name, dtype, activation):
    """At most four times the reference's error. The interpreter cuts bf16 off where a GPU rounds: twice the error."""
    plain, found = errors_of(name, dtype, activation, "triton", device=DEVICE)
    assert found <= 4 * plain + DTYPES[dtype]


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_training_on_hard_inputs(name, dtype, activation):
    """The same bound for the transform of a batch, its statistics and its gradients."""
    plain, found = training_errors_of(name, dtype, activation, "triton", device=DEVICE)
    assert not beyond_four_times(plain, found, dtype)
