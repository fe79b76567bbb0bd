"""A layer on images that lie in memory in any way, also where rows cannot be strung together without a copy."""

import pytest
import torch

from mixnorm import MixtureNorm2d
from mixnorm.ops.choose import HAS_TRITON

pytestmark = pytest.mark.usefixtures("poisoned")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["auto", *(["triton"] if HAS_TRITON else [])]
LAYOUTS = {  # all of (6, 4, 5, 7)
    "contiguous": lambda: torch.randn(6, 4, 5, 7),
    "channels last": lambda: torch.randn(6, 5, 7, 4).permute(0, 3, 1, 2),
    "transposed": lambda: torch.randn(6, 4, 7, 5).transpose(2, 3),
    "channels within rows": lambda: torch.randn(6, 5, 4, 7).permute(0, 2, 1, 3),
    "channels before images": lambda: torch.randn(4, 6, 5, 7).transpose(0, 1),
    "reversed axes": lambda: torch.randn(7, 5, 4, 6).permute(3, 2, 1, 0),
    "every other column": lambda: torch.randn(6, 4, 5, 14)[..., ::2],
    "every other channel": lambda: torch.randn(6, 8, 5, 7)[:, ::2],
    "one image many times": lambda: torch.randn(1, 4, 5, 7).expand(6, 4, 5, 7),
}


@pytest.mark.parametrize("population", ["batch", "instance", "layer", "group", "channel"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_as_of_a_contiguous_copy(backend, layout, population):
    torch.manual_seed(0)
    image, upstream = LAYOUTS[layout]().to(DEVICE), LAYOUTS[layout]().to(DEVICE)
    found = everything(backend, population, image, upstream)
    expected = everything(backend, population, image.contiguous(), upstream.contiguous())
    for result, of_copy in zip(found, expected, strict=True):
        torch.testing.assert_close(result, of_copy, atol=1e-4, rtol=1e-4)


def everything(backend, population, image, upstream):
    """The output of a training step, its gradients, and the output of an evaluation where there is one."""
    torch.manual_seed(1)  # of the fit
    groups = {"num_groups": 2} if population == "group" else {}
    layer = MixtureNorm2d(4, population=population, backend=backend, **groups).to(DEVICE)
    x = image.detach().requires_grad_()
    y = layer(x)
    results = [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], upstream)]
    if population in ("batch", "channel"):
        results.append(layer.eval()(image).detach())
    return results
