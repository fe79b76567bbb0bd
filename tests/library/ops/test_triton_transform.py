"""The transform of a batch and its gradients against the reference in fp64."""

import kernel_helpers as ops
import pytest
import torch
from triton_helpers import (
    BF16,
    DEVICE,
    DTYPES,
    EXPANDED,
    FORMATS,
    FP16,
    LAYOUTS,
    SHAPES,
    assert_keeps_the_rule,
    make_points,
    make_resp,
    parameters,
    rand,
)

from mixnorm.ops import reference

pytestmark = pytest.mark.usefixtures("poisoned")
ACTIVATIONS = [None, "relu", "leaky_relu", "silu", "gelu"]
AFFINE_MODES = ["output", "statistics"]
EPS = 1e-5


def moments(x, resp):
    """The statistics, known exactly: what is tested is what comes after them."""
    return reference.moments(x.double().flatten(1, 2), resp.double())


def transform(activation=None, affine_mode="output"):
    """A function of (backend, x, ν, γ, β, upstream gradient) to the output and its gradients."""

    def run(backend, x, resp, gamma, beta, upstream):
        statistics = tuple(t.to(resp.dtype) for t in moments(x, resp))
        leaves = {"x": x, "weight": gamma, "bias": beta}
        leaves = {name: t.detach().requires_grad_() for name, t in leaves.items() if t is not None}
        y = ops.normalize(
            leaves["x"], resp, leaves.get("weight"), leaves.get("bias"), statistics=statistics, backend=backend,
            eps=EPS, activation=activation, affine_mode=affine_mode,
        )  # fmt: skip
        found = torch.autograd.grad(y, list(leaves.values()), upstream)
        return {"y": y.detach(), **dict(zip(leaves, found, strict=True))}

    return run


def scales(x, resp, gamma, beta, upstream, affine_mode):
    """What is added up: x and the upstream gradient times the steepest slope, and that for every point."""
    weights, _, variances = moments(x, resp)
    gamma, beta = (torch.as_tensor(v if t is None else t.double()) for t, v in ((gamma, 1.0), (beta, 0.0)))
    if affine_mode == "statistics":
        slope = (gamma.clamp_min(0) * variances + EPS).rsqrt()
    else:
        slope = gamma.abs() * (variances + EPS).rsqrt()
    steepest = (reference.inverse_sqrt(weights).unsqueeze(-1) * slope).max()
    largest, shift, gradient = (t.abs().max().double() for t in (x, beta, upstream))
    root = (x.numel() / x.shape[-1]) ** 0.5
    return {
        "y": (largest + shift) * steepest + shift,
        "x": gradient * steepest,
        "weight": root * gradient * largest * steepest,
        "bias": root * gradient * steepest.clamp_min(1),
    }


def check(x, resp, gamma, beta, upstream, activation=None, affine_mode="output"):
    scale = scales(x, resp, gamma, beta, upstream, affine_mode)
    assert_keeps_the_rule(transform(activation, affine_mode), x, resp, gamma, beta, upstream, scale=scale)


def upstream_for(x, seed=9):
    return rand(*x.shape, seed=seed).to(x.dtype).to(DEVICE)


@pytest.mark.parametrize(("activation", "affine_mode"), [(None, "output"), ("silu", "statistics")])
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape, layout, activation, affine_mode):
    x, _ = make_points(*shape)
    resp, (gamma, beta) = make_resp(shape[0], shape[1] * shape[2], shape[4]), parameters(shape[3])
    x, upstream = LAYOUTS[layout](x), LAYOUTS[layout](upstream_for(x))
    check(x, resp, gamma.abs() if affine_mode == "statistics" else gamma, beta, upstream, activation, affine_mode)


@pytest.mark.parametrize("given", ["neither", "weight", "bias", "both"])
@pytest.mark.parametrize("affine_mode", AFFINE_MODES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_parameters(activation, affine_mode, given):
    x, _ = make_points(2, 3, 13, 6, 3)
    gamma, beta = parameters(6)
    gamma = gamma if given in ("weight", "both") else None
    beta = beta if given in ("bias", "both") else None
    check(x, make_resp(2, 39, 3), gamma, beta, upstream_for(x), activation, affine_mode)


@pytest.mark.parametrize("affine_mode", AFFINE_MODES)
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("layout", FORMATS)
def test_half_precision(layout, dtype, activation, affine_mode):
    x, _ = make_points(1, 4, 19, 10, 3, dtype=dtype)
    gamma, beta = parameters(10)
    x, upstream = LAYOUTS[layout](x), LAYOUTS[layout](upstream_for(x))
    check(x, make_resp(1, 76, 3), gamma.abs(), beta, upstream, activation, affine_mode)


@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("of_points", LAYOUTS)
def test_every_layout_of_points_with_every_other_of_the_gradient(of_points, of_gradient):
    x, _ = make_points(2, 3, 7, 8, 2)
    check(LAYOUTS[of_points](x), make_resp(2, 21, 2), *parameters(8), LAYOUTS[of_gradient](upstream_for(x)), "relu")


@pytest.mark.parametrize("of_points", FORMATS)
@pytest.mark.parametrize("of_gradient", EXPANDED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expanded_gradients(of_points, of_gradient, dtype):
    """As they come from a sum or a mean: with strides of 0."""
    x, _ = make_points(2, 3, 7, 8, 2, dtype=dtype)
    upstream = EXPANDED[of_gradient](upstream_for(x))
    check(LAYOUTS[of_points](x), make_resp(2, 21, 2), *parameters(8), upstream, "relu")


@pytest.mark.parametrize("of_points", EXPANDED)
def test_expanded_points(of_points):
    x, _ = make_points(2, 3, 7, 8, 2)
    x = EXPANDED[of_points](x)
    check(x, make_resp(2, 21, 2), *parameters(8), upstream_for(x))


@pytest.mark.parametrize("affine_mode", AFFINE_MODES)
@pytest.mark.parametrize(
    "view", [lambda p: p.repeat_interleave(2)[::2], lambda p: p[:1].expand_as(p)], ids=["sliced", "expanded"]
)
def test_parameters_that_are_views(view, affine_mode):
    x, _ = make_points(2, 3, 7, 8, 2)
    gamma, beta = (view(p) for p in parameters(8))
    assert gamma.stride() != (1,)
    check(x, make_resp(2, 21, 2), gamma.abs(), beta, upstream_for(x), "relu", affine_mode)
    check(x, make_resp(2, 21, 2), gamma, beta, upstream_for(x))


@pytest.mark.parametrize("affine_mode", AFFINE_MODES)
def test_a_component_without_points(affine_mode):
    x, _ = make_points(2, 3, 7, 8, 3)
    resp = make_resp(2, 21, 3)
    resp[0, :, 1] = 0
    resp = resp / resp.sum(-1, keepdim=True)
    gamma, beta = parameters(8)
    check(x, resp, gamma.abs(), beta, upstream_for(x), "relu", affine_mode)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_weight_that_is_zero_or_below_in_the_statistics(activation):
    x, _ = make_points(1, 3, 13, 6, 2)
    gamma = torch.tensor([0.0, -1.0, 1e-3, 1.0, -0.0, 2.0], device=DEVICE)
    check(x, make_resp(1, 39, 2), gamma, parameters(6)[1], upstream_for(x), activation, "statistics")


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_statistics_that_are_not_given_are_computed(layout, activation):
    x, _ = make_points(2, 3, 13, 6, 3)
    resp, (gamma, beta), upstream = make_resp(2, 39, 3), parameters(6), upstream_for(x)

    def run(backend, x, resp, gamma, beta, upstream):
        leaves = [t.detach().requires_grad_() for t in (x, gamma, beta)]
        y = ops.normalize(
            leaves[0], resp, *leaves[1:], backend=backend, eps=EPS, activation=activation, affine_mode="output"
        )
        return dict(zip(("y", "x", "weight", "bias"), (y.detach(), *torch.autograd.grad(y, leaves, upstream)), strict=True))

    scale = scales(x, resp, gamma, beta, upstream, "output")
    assert_keeps_the_rule(run, LAYOUTS[layout](x), resp, gamma, beta, upstream, scale=scale)


@pytest.mark.parametrize("offset", [1e2, 1e4])
@pytest.mark.parametrize("affine_mode", AFFINE_MODES)
def test_far_from_the_origin(offset, affine_mode):
    x, _ = make_points(1, 5, 13, 6, 3)
    gamma, beta = parameters(6)
    check(x + offset, make_resp(1, 65, 3), gamma.abs(), beta, upstream_for(x), "relu", affine_mode)


@pytest.mark.parametrize("wanted", [["x"], ["weight"], ["bias"], ["x", "bias"], ["weight", "bias"]], ids=" and ".join)
def test_only_the_gradients_that_are_wanted(wanted):
    x, _ = make_points(1, 3, 7, 5, 2)
    resp, (gamma, beta), upstream = make_resp(1, 21, 2), parameters(5), upstream_for(x)
    expected = transform("relu")("reference", x, resp, gamma, beta, upstream)
    leaves = {"x": x, "weight": gamma, "bias": beta}
    leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in leaves.items()}
    y = ops.normalize(
        leaves["x"],
        resp,
        leaves["weight"],
        leaves["bias"],
        backend="triton",
        eps=EPS,
        activation="relu",
        affine_mode="output",
    )
    found = torch.autograd.grad(y, [leaves[name] for name in wanted], upstream)
    torch.testing.assert_close(list(found), [expected[name] for name in wanted])


def test_responsibilities_that_several_mixtures_share():
    """ν of all mixtures in one place of memory, component by component, which is not how the kernels would lay them out."""
    x, upstream = rand(2, 1, 32, 4).float(), rand(2, 1, 32, 4, seed=1).float()
    shared = rand(1, 3, 32).float().softmax(1).mT.expand(2, -1, -1)
    found = [
        transform()(backend, x, resp, None, None, upstream)
        for backend, resp in (("triton", shared), ("reference", shared.contiguous()))
    ]
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-5)
