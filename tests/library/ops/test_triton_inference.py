"""The transform under the mixtures of the last T batches against the reference in fp64."""

import kernel_helpers as ops
import pytest
import torch
from triton_helpers import (
    DEVICE,
    DTYPES,
    FORMATS,
    FP32,
    LAYOUTS,
    assert_keeps_the_rule,
    large,
    make_points,
    parameters,
    rand,
)

from mixnorm.ops import reference

pytestmark = pytest.mark.usefixtures("poisoned")
MODES = ["ensemble", "mixture", "paper"]
ACTIVATIONS = [None, "relu", "leaky_relu", "silu", "gelu"]
AFFINE_MODES = ["output", "statistics"]
EPS = 1e-5
# (B, outer, inner, D, K, T)
SHAPES = [
    (1, 1, 1, 3, 2, 1),
    (2, 3, 1, 1, 1, 3),
    (1, 3, 64, 7, 2, 4),
    (1, 5, 13, 63, 3, 2),
    (1, 3, 35, 100, 2, 3),
    (1, 2, 7, 130, 1, 17),
    (1, 1, 5, 300, 1, 2),
    (2, 5, 7, 4, 5, 3),
    (1, 5, 7, 4, 8, 2),
    (1, 3, 7, 4, 16, 2),
    *(
        pytest.param(shape, marks=large)
        for shape in [
            (1, 64, 196, 256, 3, 10),
            (1, 256, 64, 448, 3, 10),
            (1, 64, 49, 2048, 2, 10),
            (64, 64, 49, 1, 3, 10),
            (1, 33, 127, 130, 16, 16),
            (1, 33, 127, 100, 3, 64),
        ]
    ),
]


def make_history(batch, outer, inner, dim, k, slots, *, dtype=FP32):
    """Points, and T mixtures that are about theirs: λ (B, T, K), μ and σ² (B, T, K, D), τ (B, T)."""
    x, mixture = make_points(batch, outer, inner, dim, k, dtype=dtype)
    weights, means, variances = (t.unsqueeze(1).repeat_interleave(slots, 1) for t in mixture)
    weights = torch.softmax(weights.log() + rand(batch, slots, k, seed=20).to(weights) / 4, -1)
    means = means + rand(batch, slots, k, dim, seed=21).to(means) * 0.2 / dim**0.5
    variances = variances * (1 + rand(batch, slots, k, dim, seed=22).to(means).tanh() / (4 * dim**0.5))
    tau = torch.softmax(rand(batch, slots, seed=23).to(weights), -1)
    return x, (weights, means, variances, tau)


def inference(mode="ensemble", activation=None, affine_mode="output", bounded=False):
    """A function of (backend, x, λ, μ, σ², τ, γ, β) to the output."""
    options = {"mode": mode, "bounded": bounded, "eps": EPS, "activation": activation, "affine_mode": affine_mode}
    return lambda backend, *tensors: {"y": ops.inference(*tensors, backend=backend, **options)}


def scale(x, history, gamma, beta, affine_mode):
    weights, _, variances, _ = (t.double() for t in history)
    gamma, beta = (torch.as_tensor(v if t is None else t.double()) for t, v in ((gamma, 1.0), (beta, 0.0)))
    if affine_mode == "statistics":
        slope = (gamma.clamp_min(0) * variances + EPS).rsqrt()
    else:
        slope = gamma.abs() * (variances + EPS).rsqrt()
    steepest = (reference.inverse_sqrt(weights).unsqueeze(-1) * slope).max()
    return {"y": (x.double().abs().max() + beta.abs().max()) * steepest + beta.abs().max()}


def check(x, history, gamma, beta, mode="ensemble", activation=None, affine_mode="output"):
    run = inference(mode, activation, affine_mode)
    assert_keeps_the_rule(run, x, *history, gamma, beta, scale=scale(x, history, gamma, beta, affine_mode))


@pytest.mark.parametrize(("activation", "mode"), [(None, "ensemble"), ("relu", "mixture")])
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape, layout, activation, mode):
    x, history = make_history(*shape)
    check(LAYOUTS[layout](x), history, *parameters(shape[3]), mode, activation)


@pytest.mark.parametrize("affine_mode", AFFINE_MODES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_modes_and_activations(mode, activation, affine_mode):
    x, history = make_history(1, 3, 11, 5, 2, 3)
    check(x, history, *parameters(5), mode, activation, affine_mode)


@pytest.mark.parametrize("given", ["neither", "weight", "bias"])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("affine_mode", AFFINE_MODES)
def test_with_and_without_parameters(affine_mode, activation, given):
    x, history = make_history(1, 3, 11, 5, 2, 3)
    gamma, beta = parameters(5)
    gamma, beta = gamma if given == "weight" else None, beta if given == "bias" else None
    check(x, history, gamma, beta, "mixture", activation, affine_mode)


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize(
    "view", [lambda p: p.repeat_interleave(2)[::2], lambda p: p[:1].expand_as(p)], ids=["sliced", "expanded"]
)
def test_parameters_that_are_views(view, activation):
    x, history = make_history(1, 3, 11, 5, 2, 3)
    check(x, history, *(view(p) for p in parameters(5)), "ensemble", activation)


def test_a_history_that_is_a_view():
    x, history = make_history(2, 3, 11, 5, 2, 3)
    check(x, [t.transpose(0, -1).contiguous().transpose(0, -1) for t in history], *parameters(5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_dtypes(layout, dtype):
    x, history = make_history(2, 3, 11, 8, 2, 3, dtype=dtype)
    check(LAYOUTS[layout](x), history, *parameters(8))


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("mode", MODES)
def test_empty_slots_and_dropped_components(mode, activation):
    """A history that is partly filled, and a component that pruning has taken out: λ, μ and σ² of 0."""
    x, (weights, means, variances, _) = make_history(2, 3, 11, 5, 3, 4)
    weights[:, :2], means[:, :2], variances[:, :2] = 0, 0, 1
    weights[0, 2, 1], means[0, 2, 1], variances[0, 2, 1] = 0, 0, 0
    weights, tau = reference.slot_weights(weights / weights.sum(-1, keepdim=True).clamp_min(1e-9), 0.9)
    assert not tau[:, :2].any()
    check(x, (weights, means, variances, tau), *parameters(5), mode, activation)
    alone = (weights[:, 2:], means[:, 2:], variances[:, 2:], tau[:, 2:])
    for backend in ("triton", "reference"):  # it is as if the empty slots were not there
        histories = ((weights, means, variances, tau), alone)
        found, expected = (inference(mode, activation)(backend, x, *h, None, None)["y"] for h in histories)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_new_history_is_one_component_of_mean_0_and_variance_1(mode):
    x, _ = make_points(1, 3, 11, 5, 3)
    weights, means, variances = torch.zeros(1, 4, 3), torch.zeros(1, 4, 3, 5), torch.ones(1, 4, 3, 5)
    weights, tau = reference.slot_weights(weights, 0.9)
    history = [t.to(DEVICE) for t in (weights, means, variances, tau)]
    y = inference(mode)("triton", x, *history, None, None)["y"]
    torch.testing.assert_close(y, x / (1 + EPS) ** 0.5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_weight_that_is_zero_or_below_in_the_statistics(mode, activation):
    x, history = make_history(1, 3, 11, 5, 2, 3)
    gamma = torch.tensor([-1.0, 0.0, 1.0, 0.5, 2.0], device=DEVICE)
    check(x, history, gamma, None, mode, activation, "statistics")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_component_without_any_deviation(mode, activation):
    """Such as that of all the points where a channel is exactly 0, beside others that are wide."""
    x, (weights, means, variances, tau) = make_history(1, 3, 11, 5, 2, 3)
    variances[:, :, 0, 2], means[:, :, 0, 2] = 0, 0
    x[0, 1, :, 2] = 0
    check(x, (weights, means, variances, tau), *parameters(5), mode, activation)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_narrow_component_beside_a_wide_one(mode, activation):
    """A hundredth of the other's deviation, a few of the other's deviations away."""
    x, (weights, means, variances, tau) = make_history(1, 3, 11, 5, 2, 3)
    means[:, :, 0] = 3 + means[:, :, 0] / 100
    variances[:, :, 0] /= 100**2
    x[0, 1] = 3 + x[0, 1] / 100
    check(x, (weights, means, variances, tau), *parameters(5), mode, activation)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_far_from_the_origin(offset, activation, mode):
    x, (weights, means, variances, tau) = make_history(1, 3, 11, 5, 2, 3)
    check(x + offset, (weights, means + offset, variances, tau), *parameters(5), mode, activation)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("distance", [10.0, 1000.0])
def test_modes_far_apart(distance, activation, mode):
    """Components at many deviations from one another: the digits of each are kept, as the reference keeps them."""
    x, (weights, means, variances, tau) = make_history(1, 3, 11, 5, 2, 3)
    side = torch.tensor([-distance, distance], device=DEVICE)
    x = x + side[torch.arange(33, device=DEVICE) % 2].view(1, 3, 11, 1)
    means = means + side.view(1, 1, 2, 1)
    check(x, (weights, means, variances, tau), *parameters(5), mode, activation)


@pytest.mark.parametrize("mode", MODES)
def test_gradients(mode):
    """For models that are tuned with their statistics frozen."""
    x, history = make_history(1, 3, 11, 5, 2, 3)
    upstream = rand(*x.shape, seed=9).to(x)

    def run(backend, x, gamma, beta, upstream, *history):
        leaves = [t.detach().requires_grad_() for t in (x, gamma, beta)]
        y = inference(mode, "silu")(backend, leaves[0], *history, *leaves[1:])["y"]
        return dict(zip(("x", "weight", "bias"), torch.autograd.grad(y, leaves, upstream), strict=True))

    assert_keeps_the_rule(run, x, *parameters(5), upstream, *history)


def test_a_nan_stays_with_its_point():
    x, history = make_history(1, 3, 11, 5, 2, 3)
    x[0, 1, 2, 3] = torch.nan
    found, expected = (inference()(b, x, *history, None, None)["y"] for b in ("triton", "reference"))
    assert found[0, 1, 2].isnan().all()
    torch.testing.assert_close(found, expected, equal_nan=True)
