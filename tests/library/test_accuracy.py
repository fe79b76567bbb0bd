"""Right numbers on a CPU for inputs that are hard in fp32; ``ops/test_triton_accuracy`` has the same for a GPU."""

import pytest
from hard_inputs import DTYPES, INPUTS, errors_of


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_evaluation(name, dtype, activation):
    """The error is at most four times the reference's in the same dtype, plus the rounding of the result."""
    plain, found = errors_of(name, dtype, activation, "auto")
    assert found <= 4 * plain + DTYPES[dtype]
