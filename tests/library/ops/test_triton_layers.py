"""The layers with backend="triton" against backend="reference", and against batch norm."""

import math

import kernel_helpers as ops
import pytest
import torch
from torch import nn
from triton_helpers import BF16, DEVICE, FP16, FP32, assert_as_accurate, rand

from mixnorm import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d, gmm
from mixnorm.ops import reference

SHAPE = (3, 4, 6, 5)  # N, C, H, W
pytestmark = pytest.mark.usefixtures("poisoned")
POPULATIONS = [
    {"population": "batch"},
    {"population": "instance"},
    {"population": "layer"},
    {"population": "group", "num_groups": 2},
    {"population": "channel"},
]
STEPS = 2


@pytest.fixture(autouse=True)
def same_numbers(monkeypatch):
    """The random numbers of fp32 in fp64 too, so that there is an exact result to compare with."""
    draw = gmm.draw

    def draws(size, points, *rest, **options):
        return draw(size, points.float(), *rest, **options).to(ops.compute_dtype(points.dtype))

    monkeypatch.setattr(gmm, "draw", draws)


def images(shape=SHAPE, seed=0):
    """Three modes, some deviations apart, one of them wider."""
    place = torch.arange(shape[0] * math.prod(shape[2:])).mul(5).remainder(3).view(shape[0], 1, *shape[2:])
    return rand(*shape, seed=seed) * (1 + (place == 2) / 2) + 4 * place


def steepest(layer):
    """The largest slope of a component of the last training batch."""
    mixture = layer.mixture
    slopes = reference.inverse_sqrt(mixture.weights).unsqueeze(-1) * (mixture.variances + layer.eps).rsqrt()
    return slopes.max().item() * (layer.weight.abs().max().item() if layer.affine else 1)


def run(backend, kind=MixtureNorm2d, dtype=FP32, exact=False, shape=SHAPE, memory_format=torch.contiguous_format, **options):
    """Everything that comes out of a layer in some training steps and in evaluation, and the scale of each.

    ``exact``: in fp64, of the same input, which is rounded to ``dtype``.
    """
    torch.manual_seed(0)
    layer = kind(shape[1], backend=backend, **options)
    if layer.affine:
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
    layer.to(DEVICE, torch.float64 if exact else None)
    results, scale = {}, {}
    for step in range(STEPS + 1):
        x, upstream = (t.to(dtype) for t in (images(shape, seed=step), rand(*shape, seed=100 + step)))
        x, upstream = (
            t.to(DEVICE, torch.float64 if exact else dtype).contiguous(memory_format=memory_format) for t in (x, upstream)
        )
        x.requires_grad_()
        torch.manual_seed(step)
        y = layer.train(step < STEPS)(x)
        assert y.is_contiguous(memory_format=memory_format)
        names = [f"{name} {step}" for name in ("y", "x", "weight", "bias", "within", "between", "deviation")]
        found = (y, *torch.autograd.grad(y, [x, *layer.parameters()], upstream))
        results |= {name: value.detach() for name, value in zip(names, found, strict=False)}
        if exact:
            slope, size, root = steepest(layer), x.abs().max().item(), (x.numel() / shape[1]) ** 0.5
            sizes = [size * slope, 4 * slope, root * size * slope, root * max(slope, 1), *[root * size * slope] * 3]
            if layer.deviation != 0:  # a parabola
                sizes = [number * size * slope for number in sizes]
            scale |= dict(zip(names, sizes, strict=True)) | {"history_means": size, "history_vars": size**2}
    if layer.keeps_history:
        assert layer.num_batches_tracked == (0 if layer.momentum == 0 else STEPS)
    # The samples of inference="pooled" are not finite where there are none yet.
    return results | {n: b.nan_to_num() for n, b in layer.named_buffers() if b.is_floating_point()}, scale


def check(**options):
    """The rule, for all of it."""
    exact, scale = run("reference", exact=True, **options)
    (found, _), (plain, _) = (run(backend, **options) for backend in ("triton", "reference"))
    assert found.keys() == plain.keys() == exact.keys()
    assert_as_accurate(found, plain, exact, scale)


AFFINE = ["output", "statistics"]


@pytest.mark.parametrize("affine_mode", AFFINE)
@pytest.mark.parametrize("options", POPULATIONS, ids=lambda o: o["population"])
def test_populations(options, affine_mode):
    check(affine_mode=affine_mode, **options)


@pytest.mark.parametrize("options", POPULATIONS, ids=lambda o: o["population"])
def test_populations_without_parameters(options):
    """Then "layer", "group" and "channel" are the kernels' as well."""
    check(affine=False, activation="silu", **options)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu", "gelu"])
def test_activations(activation):
    check(activation=activation)


@pytest.mark.parametrize("inference", ["mixture", "paper", "pooled"])
@pytest.mark.parametrize("options", [POPULATIONS[0], POPULATIONS[-1]], ids=lambda o: o["population"])
def test_inference(options, inference):
    check(inference=inference, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"seeding": "warm"},
        {"seeding": "warm", "population": "channel"},
        {"seeding": "warm", "shape": (1, 4, 10, 9), "sample_fraction": 1.0},
        {"track_running_stats": False},
        {"momentum": None, "history": 2},
        {"momentum": 1.0},
        {"momentum": 0.0},
        {"num_components": 1},
        {"num_components": 5, "em_iters": 4},
        {"em_iters": 0},
        {"sample_fraction": 0.5, "num_components": 2, "max_samples": 20},
        {"min_weight": 0.3},
        {"memory_format": torch.channels_last},
        {"memory_format": torch.channels_last, "population": "instance"},
        {"memory_format": torch.channels_last, "population": "channel", "affine": False},
        {"scale": "unit"},
        {"within": "learned", "between": "learned"},
        {"within": "learned", "between": "learned", "scale": "unit", "activation": "silu"},
        {"within": 0.5, "between": 0.7, "num_components": 5, "memory_format": torch.channels_last},
        {"between": "learned", "scale": "unit", "affine": False},
        {"deviation": "learned"},
        {"deviation": "learned", "activation": "relu", "memory_format": torch.channels_last},
        {"deviation": 0.5, "within": 0.5, "between": 0.7, "num_components": 5},
        {"deviation": "learned", "scale": "unit", "activation": "silu", "between": "learned"},
        {"component_affine": True, "seeding": "warm", "scale": "unit"},
        {"component_affine": True, "seeding": "warm", "scale": "unit", "deviation": 0.5},
        {"component_affine": True, "seeding": "warm", "activation": "relu", "memory_format": torch.channels_last},
    ],
    ids=str,
)
def test_options(options):
    check(**options)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_half_precision(dtype, memory_format):
    check(dtype=dtype, memory_format=memory_format)


@pytest.mark.parametrize(
    ("kind", "shape"), [(MixtureNorm1d, (60, 4)), (MixtureNorm1d, (6, 4, 11)), (MixtureNorm3d, (3, 4, 3, 3, 4))]
)
def test_other_ranks(kind, shape):
    check(kind=kind, shape=shape)
