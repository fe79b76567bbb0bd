"""The E-step with its statistics, and the statistics under a given ν, against the reference in fp64."""

import kernel_helpers as ops
import pytest
import torch
from triton_helpers import (
    BF16,
    DTYPES,
    FORMATS,
    LAYOUTS,
    SHAPES,
    assert_as_accurate,
    assert_keeps_the_rule,
    make_points,
    make_resp,
)

from mixnorm.ops import reference
from mixnorm.ops.triton import statistics

pytestmark = pytest.mark.usefixtures("poisoned")


def step(backend, x, *mixture):
    resp, (weights, means, variances) = ops.em_step(x, mixture, backend=backend)
    return {"resp": resp, "weights": weights, "means": means, "variances": variances}


def scales(x, mixture):
    """σ² comes from squares about the means that there were."""
    flat, means = x.double().flatten(1, 2), mixture[1].double()
    squares = (flat.unsqueeze(1) - means.unsqueeze(2)).square()
    return {"resp": 1, "weights": 1, "means": flat.abs().max(), "variances": squares.max()}


def check_step(x, mixture):
    assert_keeps_the_rule(step, x, *mixture, scale=scales(x, mixture))


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_em_step(shape, layout):
    x, mixture = make_points(*shape)
    check_step(LAYOUTS[layout](x), mixture)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_em_step_of_every_layout_and_dtype(layout, dtype):
    x, mixture = make_points(2, 5, 7, 8, 3, dtype=dtype)
    check_step(LAYOUTS[layout](x), mixture)


@pytest.mark.parametrize("layout", FORMATS)
def test_em_step_with_components_that_are_not_in_use(layout):
    x, (weights, means, variances) = make_points(2, 5, 7, 6, 4)
    weights[0, 1] = weights[1, 0] = weights[1, 3] = 0
    means[0, 1], variances[0, 1] = 0, 0  # as pruning leaves them
    mixture = (weights / weights.sum(-1, keepdim=True), means, variances)
    found = step("triton", LAYOUTS[layout](x), *mixture)
    for name in ("weights", "means", "variances"):
        assert not found[name][0, 1].any(), name
    assert not found["resp"][0, :, 1].any()
    check_step(LAYOUTS[layout](x), mixture)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_em_step_far_from_the_origin(offset, layout):
    """The variances keep their digits where E[x²] - E[x]² would have none left."""
    x, (weights, means, variances) = make_points(1, 5, 13, 6, 3)
    check_step(LAYOUTS[layout](x + offset), (weights, means + offset, variances))


def test_em_step_of_a_point_far_from_every_component():
    """Its densities are all 0 in fp32, but not its posterior."""
    x, mixture = make_points(1, 5, 13, 6, 3)
    x[0, 2, 4] = 100
    found = step("triton", x, *mixture)["resp"]
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))
    check_step(x, mixture)


def test_em_step_shows_what_is_not_finite():
    x, mixture = make_points(1, 5, 13, 6, 3)
    x[0, 2, 4, 1] = torch.nan
    found = step("triton", x, *mixture)
    assert torch.equal(found["resp"].isnan(), step("reference", x, *mixture)["resp"].isnan())
    assert found["weights"].isnan().all()
    assert found["variances"].isnan().all()


def given(backend, x, resp):
    if backend == "triton":
        found = statistics.moments(x, resp.mT.contiguous().mT)
    else:
        found = reference.moments(x.to(resp.dtype).flatten(1, 2), resp)
    return dict(zip(("weights", "means", "variances"), found, strict=True))


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moments(shape, layout):
    x, mixture = make_points(*shape)
    resp = make_resp(shape[0], shape[1] * shape[2], shape[4])
    assert_keeps_the_rule(given, LAYOUTS[layout](x), resp, scale=scales(x, mixture))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moments_of_every_layout(layout):
    x, mixture = make_points(2, 5, 7, 8, 3, dtype=BF16)
    resp = make_resp(2, 35, 3)
    resp[1, :, 2] = 0  # a component without points
    assert_keeps_the_rule(given, LAYOUTS[layout](x), resp, scale=scales(x, mixture))


def test_statistics_of_hard_assignments_are_those_of_the_clusters():
    x, _ = make_points(1, 5, 13, 6, 3)
    label = torch.arange(65, device=x.device) % 3
    found = given("triton", x, torch.nn.functional.one_hot(label, 3).float().unsqueeze(0))
    clusters = [x.flatten(0, 2)[label == k].double() for k in range(3)]
    expected = {
        "weights": torch.stack([torch.as_tensor(len(c) / 65, dtype=torch.float64) for c in clusters]),
        "means": torch.stack([c.mean(0) for c in clusters]),
        "variances": torch.stack([c.var(0, correction=0) for c in clusters]),
    }
    found = {name: value[0].cpu() for name, value in found.items()}
    plain = {name: value.float().cpu() for name, value in expected.items()}
    assert_as_accurate(found, plain, {name: value.cpu() for name, value in expected.items()}, {"variances": 16})
