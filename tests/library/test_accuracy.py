"""Right numbers on a CPU for inputs that are hard in fp32; ``ops/test_triton_accuracy`` has the same for a GPU."""

import pytest
import torch
from hard_inputs import DTYPES, INPUTS, beyond_four_times, errors_of, training_errors_of

from mixnorm.functional import mixture_normalize
from mixnorm.ops import reference


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_evaluation(name, dtype, activation):
    """The error is at most four times the reference's in the same dtype, plus the rounding of the result."""
    plain, found = errors_of(name, dtype, activation, "auto")
    assert found <= 4 * plain + DTYPES[dtype]


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_training(name, dtype, activation):
    """The same bound for the transform of a batch, its statistics and its gradients."""
    plain, found = training_errors_of(name, dtype, activation, "auto")
    assert not beyond_four_times(plain, found, dtype)


@pytest.mark.parametrize("count", [1024, 65536])
@pytest.mark.parametrize("value", [10, 100, 1000])
def test_a_background_of_zeros_in_plain_pytorch(value, count):
    """A component at exactly 0 beside one that is far from there: neither may lose its digits to the other."""
    g = torch.Generator().manual_seed(0)
    x = (torch.rand(count, 1, generator=g) > 0.5) * (value + torch.randn(count, 32, generator=g))
    resp = torch.stack([x[:, 0] == 0, x[:, 0] != 0], -1).float()
    found, exact = reference.moments(x, resp), reference.moments(x.double(), resp.double())
    deviation = (exact[2] + 1e-5).sqrt()
    rounding = torch.finfo(torch.float32).eps * value
    assert ((found[1] - exact[1]).abs() / deviation).max() < rounding
    assert ((found[2] - exact[2]).abs() / deviation.square()).max() < 1e-5
    y, expected = (mixture_normalize(t, resp.to(t.dtype), backend="reference") for t in (x, x.double()))
    assert (y - expected).abs().max() < 4 * rounding
