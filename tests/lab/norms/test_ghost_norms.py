"""Ghost batch norm and what is made of it, each against its definition written out in fp64, one group at a time."""

import pytest
import torch
from norm_helpers import SHAPE, affine, data, gradients, standardized, with_affine
from torch import nn

import mixnorm
from mixnorm_lab import norms
from mixnorm_lab.norms import GhostBatchNorm, GhostParabola

# --- ghost batch norm ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "size", "groups"),
    [(12, 4, (4, 4, 4)), (12, 12, (12,)), (12, 32, (12,)), (12, 1, (1,) * 12), (14, 4, (4, 4, 4, 2)), (13, 4, (4, 4, 5)),
     (5, 4, (5,)), (3, 4, (3,))],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(6, 4, 3), (6, 5), (6, 2, 2, 3)])
def test_ghost_batch_norm_is_batch_norm_of_each_group(images, size, groups, shape):
    x, norm = data(images, *shape), with_affine(GhostBatchNorm(6, size))
    dims = (0, *range(2, x.dim()))

    def by_hand(x):
        return affine(torch.cat([standardized(part, dims) for part in x.split(groups)]), norm)

    torch.testing.assert_close(norm(x), by_hand(x))
    for ours, right in zip(*(gradients(f, x, norm.parameters()) for f in (norm, by_hand)), strict=True):
        torch.testing.assert_close(ours, right)


def test_ghost_batch_norm_keeps_the_mean_of_its_groups_statistics():
    norm, mean, variance = with_affine(GhostBatchNorm(6, 4)), torch.zeros(6).double(), torch.ones(6).double()
    for seed in range(3):
        x = data(10, *SHAPE[1:], seed=seed)
        norm(x)
        parts = x.split((4, 4, 2))
        mean = 0.9 * mean + 0.1 * torch.stack([part.mean((0, 2, 3)) for part in parts]).mean(0)
        variance = 0.9 * variance + 0.1 * torch.stack([part.var((0, 2, 3)) for part in parts]).mean(0)
    torch.testing.assert_close(norm.running_mean, mean)
    torch.testing.assert_close(norm.running_var, variance)
    assert int(norm.num_batches_tracked) == 3
    x = data(3, *SHAPE[1:], seed=9)
    wide = (1, -1, 1, 1)
    expected = affine((x - mean.view(wide)) / (variance.view(wide) + 1e-5).sqrt(), norm)
    torch.testing.assert_close(norm.eval()(x), expected)


def test_ghost_batch_norms_gradient():
    norm = with_affine(GhostBatchNorm(2, 2))
    x = data(5, 2, 2, 2).requires_grad_()

    def function(x, weight, bias):
        return torch.func.functional_call(norm, {"weight": weight, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(function, (x, norm.weight, norm.bias))


def test_ghost_batch_norm_of_one_value_says_so():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        GhostBatchNorm(3, 1)(torch.randn(4, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ghost_batch_norm_is_as_accurate_as_pytorchs_batch_norm(dtype):
    x = (data(*SHAPE) + 100).to(dtype)
    ghost, batch = GhostBatchNorm(6, 4), nn.BatchNorm2d(6)
    y, grad = [], torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    for function in (ghost, lambda x: torch.cat([batch(part) for part in x.split(4)])):
        leaf = x.clone().requires_grad_()
        out = function(leaf)
        y.append((out.double(), *torch.autograd.grad(out, leaf, grad)))
    exact = x.double().requires_grad_()
    right = torch.cat([standardized(part, (0, 2, 3)) for part in exact.split(4)])
    rights = right.detach(), *torch.autograd.grad(right, exact, grad.double())
    for ours, theirs, best in zip(*y, rights, strict=True):
        allowed = 2 * (theirs.double() - best).abs().max() + 2 * torch.finfo(dtype).eps * best.abs().max()
        assert ours.dtype in (dtype, torch.float64)
        assert (ours.double() - best).abs().max() <= allowed


# --- ghost batch norm with a parabola -----------------------------------------------------------------------------------


def with_parabola(channels, size):
    norm = with_affine(GhostParabola(channels, size))
    norm.deviation_weight.data = torch.linspace(-0.5, 0.8, channels, dtype=torch.float64)
    return norm


def bent(x, norm):
    return x + norm.deviation_weight.view(1, -1, *[1] * (x.dim() - 2)) * (x.square() - 1) / 2**0.5


@pytest.mark.parametrize(("images", "groups"), [(12, (4, 4, 4)), (14, (4, 4, 4, 2)), (13, (4, 4, 5)), (3, (3,))])
@pytest.mark.parametrize("shape", [(6, 4, 3), (6, 5), (6, 2, 2, 3)])
def test_a_ghost_parabola_bends_what_each_group_is_standardized_to(images, groups, shape):
    x, norm = data(images, *shape), with_parabola(6, 4)
    dims = (0, *range(2, x.dim()))

    def by_hand(x):
        return affine(torch.cat([bent(standardized(part, dims), norm) for part in x.split(groups)]), norm)

    torch.testing.assert_close(norm(x), by_hand(x))
    for ours, right in zip(*(gradients(f, x, norm.parameters()) for f in (norm, by_hand)), strict=True):
        torch.testing.assert_close(ours, right)
    mean, variance = norm.running_mean, norm.running_var
    wide = (1, -1, *[1] * (x.dim() - 2))
    expected = affine(bent((x - mean.view(wide)) / (variance.view(wide) + 1e-5).sqrt(), norm), norm)
    torch.testing.assert_close(norm.eval()(x), expected)


def test_a_ghost_parabola_of_the_whole_batch_is_mixture_norm_of_one_component():
    norm, x = with_parabola(6, 12), data(*SHAPE)
    mixture = mixnorm.MixtureNorm2d(6, num_components=1, deviation="learned", dtype=torch.float64)
    for name in ("weight", "bias", "deviation_weight"):
        getattr(mixture, name).data = getattr(norm, name).data
    torch.testing.assert_close(norm(x), mixture(x))


def test_a_ghost_parabola_starts_as_ghost_batch_norm():
    ghost, parabola = with_affine(GhostBatchNorm(6, 4)), with_affine(GhostParabola(6, 4))
    for seed in range(3):
        x = data(*SHAPE, seed=seed)
        torch.testing.assert_close(parabola(x), ghost(x))
    torch.testing.assert_close(parabola.eval()(x), ghost.eval()(x))


# --- instance-enhanced batch norm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "groups"), [("enhanced", (12,)), ("enhanced-4", (4, 4, 4))])
@pytest.mark.parametrize("shape", [(6, 4, 3), (6, 5), (6, 2, 2, 3), (6,)])
def test_an_enhanced_batch_norm_gates_each_image_by_its_own_means(name, groups, shape):
    x, norm = data(12, *shape), with_affine(norms.make(name, 6))
    norm.gate_weight.data = torch.linspace(-1, 0.7, 6, dtype=torch.float64)
    norm.gate_bias.data = torch.linspace(-2, 1, 6, dtype=torch.float64)
    wide = (1, -1, *[1] * (x.dim() - 2))
    dims = (0, *range(2, x.dim()))

    def gated(normalized, x):
        means = torch.stack([torch.stack([channel.mean() for channel in image]) for image in x])
        gates = torch.sigmoid(norm.gate_weight * means + norm.gate_bias).view(*x.shape[:2], *wide[2:])
        return normalized * gates * norm.weight.view(wide) + norm.bias.view(wide)

    def by_hand(x):
        return gated(torch.cat([standardized(part, dims) for part in x.split(groups)]), x)

    torch.testing.assert_close(norm(x), by_hand(x))
    for ours, right in zip(*(gradients(f, x, norm.parameters()) for f in (norm, by_hand)), strict=True):
        torch.testing.assert_close(ours, right)
    mean, variance = norm.running_mean.view(wide), norm.running_var.view(wide)
    torch.testing.assert_close(norm.eval()(x), gated((x - mean) / (variance + 1e-5).sqrt(), x))


def test_an_enhanced_batch_norm_starts_as_published():
    norm, batch = norms.make("enhanced", 6).double(), nn.BatchNorm2d(6).double()
    x = data(*SHAPE)
    torch.testing.assert_close(norm(x), batch(x) / (1 + torch.tensor(1.0).double().exp()))
    torch.testing.assert_close(norm.running_var, batch.running_var)
