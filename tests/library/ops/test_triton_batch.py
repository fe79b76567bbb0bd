"""Posterior, statistics, history and transform of a batch at once, as a layer calls them in training, and the gradient."""

import kernel_helpers as ops
import pytest
import torch
from triton_helpers import (
    DEVICE,
    DTYPES,
    EXPANDED,
    FORMATS,
    LAYOUTS,
    SHAPES,
    assert_keeps_the_rule,
    make_points,
    parameters,
    rand,
)

from mixnorm.ops import reference

pytestmark = pytest.mark.usefixtures("poisoned")
EPS = 1e-5


def batch(activation=None, affine_mode="output"):
    """A function of (backend, x, upstream gradient, λ, μ, σ², γ, β) to the output, the statistics and the gradients."""

    def run(backend, x, upstream, weights, means, variances, gamma, beta):
        leaves = {"x": x, "weight": gamma, "bias": beta}
        leaves = {name: t.detach().requires_grad_() for name, t in leaves.items() if t is not None}
        y, statistics = ops.transform_batch(
            leaves["x"], (weights, means, variances), leaves.get("weight"), leaves.get("bias"), history=None,
            eps=EPS, activation=activation, affine_mode=affine_mode, backend=backend,
        )  # fmt: skip
        assert not any(t.requires_grad for t in statistics)
        found = torch.autograd.grad(y, list(leaves.values()), upstream)
        results = {"y": y.detach(), **dict(zip(leaves, found, strict=True))}
        return results | dict(zip(("weights", "means", "variances"), statistics, strict=True))

    return run


def scales(x, upstream, mixture, gamma, beta, affine_mode):
    """What is added up, as in the tests of each part.

    The kernel finds σ² from squares about the mixture's old mean: where a component moves by more than its new deviation,
    the digits that this costs σ² are missing in every slope.
    """
    flat, (weights, means, variances) = x.double().flatten(1, 2), (t.double() for t in mixture)
    _, used, moved, spread = reference.em_step(flat, weights, means, variances)
    gamma, beta = (torch.as_tensor(v if t is None else t.double()) for t, v in ((gamma, 1.0), (beta, 0.0)))
    slope = (
        (gamma.clamp_min(0) * spread + EPS).rsqrt() if affine_mode == "statistics" else gamma.abs() * (spread + EPS).rsqrt()
    )
    cost = 1 + (moved - means).square() / (spread + EPS)
    steepest = (reference.inverse_sqrt(used).unsqueeze(-1) * slope * cost).max()
    largest, shift, gradient = (t.abs().max().double() for t in (x, beta, upstream))
    root = flat.shape[:2].numel() ** 0.5
    return {
        "y": (largest + shift) * steepest + shift,
        "x": gradient * steepest,
        "weight": root * gradient * largest * steepest,
        "bias": root * gradient * steepest.clamp_min(1),
        "weights": 1,
        "means": largest,
        "variances": (flat.unsqueeze(1) - means.unsqueeze(2)).square().max(),
    }


def check(x, upstream, mixture, gamma, beta, activation=None, affine_mode="output"):
    scale = scales(x, upstream, mixture, gamma, beta, affine_mode)
    assert_keeps_the_rule(batch(activation, affine_mode), x, upstream, *mixture, gamma, beta, scale=scale)


def upstream_for(x):
    return rand(*x.shape, seed=9).to(x.dtype).to(DEVICE)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape, layout):
    x, mixture = make_points(*shape)
    check(LAYOUTS[layout](x), LAYOUTS[layout](upstream_for(x)), mixture, *parameters(shape[3]))


@pytest.mark.parametrize("affine_mode", ["output", "statistics"])
@pytest.mark.parametrize("activation", [None, "relu", "leaky_relu", "silu", "gelu"])
@pytest.mark.parametrize("given", ["neither", "both"])
def test_activations_and_parameters(activation, affine_mode, given):
    x, mixture = make_points(2, 3, 13, 6, 3)
    gamma, beta = parameters(6) if given == "both" else (None, None)
    check(x, upstream_for(x), mixture, gamma, beta, activation, affine_mode)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_dtypes(layout, dtype):
    x, mixture = make_points(2, 3, 7, 8, 2, dtype=dtype)
    check(LAYOUTS[layout](x), upstream_for(x), mixture, *parameters(8), "relu")


@pytest.mark.parametrize("of_gradient", EXPANDED)
def test_expanded_gradients(of_gradient):
    x, mixture = make_points(2, 3, 7, 8, 2)
    check(x, EXPANDED[of_gradient](upstream_for(x)), mixture, *parameters(8))


def test_a_component_that_is_not_in_use():
    x, (weights, means, variances) = make_points(2, 3, 7, 8, 3)
    weights[0, 1], means[0, 1], variances[0, 1] = 0, 0, 0
    check(x, upstream_for(x), (weights / weights.sum(-1, keepdim=True), means, variances), *parameters(8))


@pytest.mark.parametrize(("size", "k", "dim"), [(1, 3, 7), (1, 2, 35), (3, 2, 5)])
@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
def test_the_history_gets_the_statistics_if_they_are_finite(size, k, dim, value):
    x, mixture = make_points(size, 3, 11, dim, k)
    x[size - 1, 2, 10, dim - 1] = value
    shapes = ((size, 4, k), (size, 4, k, dim), (size, 4, k, dim))
    queues, tracked = tuple(rand(*shape).float().to(DEVICE) for shape in shapes), torch.tensor(41, device=DEVICE)
    before = [q.clone() for q in queues]
    options = {"eps": EPS, "activation": None, "affine_mode": "output", "backend": "triton"}
    _, statistics = ops.transform_batch(x, mixture, None, None, history=(queues, tracked), **options)
    finite = value == 1
    for queue, old, newest in zip(queues, before, statistics, strict=True):
        assert torch.equal(queue, torch.cat([old[:, 1:], newest.unsqueeze(1)], 1) if finite else old)
    assert tracked == 41 + finite


def test_without_a_gradient():
    x, mixture = make_points(1, 3, 13, 6, 3)
    options = {"history": None, "eps": EPS, "activation": None, "affine_mode": "output"}
    with torch.no_grad():
        y, _ = ops.transform_batch(x, mixture, *parameters(6), backend="triton", **options)
    expected, _ = ops.transform_batch(x, mixture, *parameters(6), backend="reference", **options)
    assert not y.requires_grad
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
