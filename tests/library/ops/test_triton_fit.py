"""The fit in one launch, given the same random numbers, against the reference in fp64."""

import itertools

import kernel_helpers as ops
import pytest
import torch
from triton_helpers import (
    BF16,
    DEVICE,
    DTYPES,
    FORMATS,
    FP32,
    LAYOUTS,
    assert_as_accurate,
    assert_keeps_the_rule,
    labels,
    large,
    make_points,
    rand,
)

from mixnorm.gmm import GaussianMixture
from mixnorm.ops import fit as reference_fit

pytestmark = pytest.mark.usefixtures("poisoned")
NAMES = ("weights", "means", "variances")
OPTIONS = {"lloyd_iters": 1, "em_iters": 1, "min_variance": 1e-5, "min_weight": 0.01}
# (B, outer, inner, D, K, size): all points, a part of them with and without a rest, more channels than one block.
SHAPES = [
    (1, 1, 2, 3, 2, 2),
    (2, 3, 7, 1, 1, 21),
    (3, 4, 9, 1, 3, 20),
    (1, 5, 13, 7, 2, 32),
    (1, 8, 16, 16, 5, 64),
    (1, 4, 40, 4, 8, 130),
    (1, 6, 30, 3, 16, 180),
    (1, 7, 11, 63, 3, 50),
    (2, 3, 11, 100, 2, 33),
    (1, 3, 7, 130, 2, 19),
    (1, 2, 5, 300, 2, 9),
    *(
        pytest.param(shape, marks=large)
        for shape in [
            (1, 64, 196, 256, 3, 4096),
            (1, 256, 64, 448, 3, 4096),
            (1, 64, 49, 2048, 2, 784),
            (300, 16, 49, 1, 3, 196),
            (1, 500, 1000, 8, 16, 500_000),
        ]
    ),
]


def clustered(batch, outer, inner, dim, k, *, dtype=FP32):
    """Points in K clear clusters, so that the fit does not hang on a rounding."""
    centers = rand(batch, k, dim, seed=30) * 3
    x = rand(batch, outer * inner, dim, seed=31) + centers[:, labels(outer * inner, k)]
    return x.view(batch, outer, inner, dim).to(dtype).to(DEVICE)


def uniforms(batch, k, size, *, seed=32):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(size + 1 + batch * reference_fit.num_uniforms(k), generator=generator).to(DEVICE)


def scales(sample):
    spread = (sample - sample.mean(1, keepdim=True)).double().square().max()
    return {"weights": 1, "means": sample.abs().max(), "variances": spread}


def check_fit(x, k, size, draws, **options):
    """The same sample, and a mixture that keeps the rule."""
    options = {**OPTIONS, **options}
    sample, plain = ops.sample_and_fit(x, size, draws, k, backend="reference", **options)
    same, found = ops.sample_and_fit(x, size, draws, k, backend="triton", **options)
    assert torch.equal(same, sample)
    seeding = draws[size + 1 :].view(x.shape[0], -1)
    exact = reference_fit.fit(sample.double(), k, seeding, reference_fit.Options(**options))
    results = (dict(zip(NAMES, mixture, strict=True)) for mixture in (found, plain, exact))
    assert_as_accurate(*results, scales(sample))
    return found


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sample_and_fit(shape, layout):
    batch, *_, k, size = shape
    check_fit(LAYOUTS[layout](clustered(*shape[:-1])), k, size, uniforms(batch, k, size))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_and_dtypes(layout, dtype):
    check_fit(LAYOUTS[layout](clustered(2, 5, 7, 8, 2, dtype=dtype)), 2, 22, uniforms(2, 2, 22))


@pytest.mark.parametrize(("lloyd_iters", "em_iters"), [(0, 0), (0, 1), (1, 0), (2, 3)])
def test_iterations(lloyd_iters, em_iters):
    check_fit(clustered(2, 5, 13, 4, 3), 3, 48, uniforms(2, 3, 48), lloyd_iters=lloyd_iters, em_iters=em_iters)


def test_components_under_the_least_weight_are_dropped():
    x = clustered(1, 5, 13, 4, 3)
    weights, means, variances = check_fit(x, 6, 65, uniforms(1, 6, 65), min_weight=0.2)
    dropped = weights[0] == 0
    assert 0 < dropped.sum() < 6
    assert not means[0, dropped].any()
    assert not variances[0, dropped].any()


def test_far_from_the_origin():
    check_fit(clustered(1, 5, 13, 4, 3) + 1e4, 3, 48, uniforms(1, 3, 48))


DEGENERATE = {
    "all points equal": lambda: torch.full((2, 4, 5, 3), -5.0),
    "all zero": lambda: torch.zeros(2, 4, 5, 3),
    "two distinct points": lambda: torch.tensor([0.0, 2.0])[torch.arange(20) % 2].view(1, 4, 5, 1).expand(2, 4, 5, 3),
    "fewer points than components": lambda: rand(2, 1, 2, 3).float(),
    "one point far away": lambda: rand(2, 4, 5, 3).float().index_put((torch.tensor(0),) * 3, torch.tensor(1e6)),
}


@pytest.mark.parametrize("k", [3, 5])
@pytest.mark.parametrize("batch", DEGENERATE)
def test_degenerate_points(batch, k):
    x = DEGENERATE[batch]().to(DEVICE)
    size = x.shape[1] * x.shape[2]
    weights, means, variances = check_fit(x, k, size, uniforms(2, k, size))
    assert all(t.isfinite().all() for t in (weights, means, variances))
    assert (variances[weights > 0] >= 0.99e-5).all()


@pytest.mark.parametrize(("count", "size"), [(50, 50), (50, 25), (53, 20), (100, 99), (7, 1), (130, 64)])
def test_the_sample_is_of_distinct_points(count, size):
    """Points that are their own number tell which were drawn."""
    x = torch.arange(float(count), device=DEVICE).view(1, 1, count, 1)
    sample, _ = ops.sample_and_fit(x, size, uniforms(1, 1, size), 1, backend="triton", **OPTIONS)
    numbers = sample.flatten().long()
    assert torch.equal(numbers, reference_fit.sample_indices(count, size, uniforms(1, 1, size)))
    assert numbers.unique().numel() == size


@pytest.mark.parametrize("draws", [0.0, 1 - 2**-24], ids=["least", "greatest"])
def test_the_ends_of_the_range_of_random_numbers(draws):
    check_fit(clustered(1, 5, 13, 4, 3), 3, 48, torch.full_like(uniforms(1, 3, 48), draws))


def em(iterations, min_weight=0.01):
    def run(backend, sample, *mixture):
        options = {"iterations": iterations, "min_variance": 1e-5, "min_weight": min_weight}
        return dict(zip(NAMES, ops.em(sample, mixture, backend=backend, **options), strict=True))

    return run


@pytest.mark.parametrize("iterations", [0, 1, 3])
@pytest.mark.parametrize("shape", [(1, 1, 3, 2), (3, 20, 1, 3), (1, 130, 7, 5), (2, 65, 16, 8), (1, 19, 130, 2)], ids=str)
def test_em_from_a_given_mixture(shape, iterations):
    batch, count, dim, k = shape
    x, mixture = make_points(batch, count, 1, dim, k)
    sample = x.squeeze(2)
    assert_keeps_the_rule(em(iterations), sample, *mixture, scale=scales(sample))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_em_of_a_sample_in_any_layout(layout):
    x, mixture = make_points(2, 5, 7, 4, 2)
    sample = LAYOUTS[layout](x)[:, 0]
    assert_keeps_the_rule(em(2), sample, *mixture, scale=scales(sample))


def test_em_drops_components_and_keeps_those_that_are_left():
    x, (weights, means, variances) = make_points(2, 60, 1, 5, 4)
    weights[0, 2] = 0
    weights /= weights.sum(-1, keepdim=True)
    sample = x.squeeze(2)
    assert em(2)("triton", sample, weights, means, variances)["weights"][0, 2] == 0
    assert_keeps_the_rule(em(2, min_weight=0.2), sample, weights, means, variances, scale=scales(sample))


@pytest.mark.parametrize(
    "offset",
    [
        1e2,
        pytest.param(1e4, marks=pytest.mark.xfail(strict=True, reason="the sums of ν·t and ν·t² cancel at 10⁴ deviations")),
    ],
)
def test_em_from_a_start_far_from_the_points(offset):
    """One step from means near the origin: the variances are not those of the rounding, which is d²·6e-8 at d deviations."""
    x, (weights, means, variances) = make_points(1, 200, 1, 4, 2)
    sample = x.squeeze(2) + offset
    found = em(1, 0)("triton", sample, weights, means, variances)
    exact = em(1, 0)("reference", sample.double(), weights.double(), means.double(), variances.double())
    in_use = exact["weights"] > 1e-3
    torch.testing.assert_close(found["variances"][in_use].double(), exact["variances"][in_use], rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_the_likelihood_does_not_fall(dtype):
    x = clustered(1, 6, 20, 3, 3, dtype=dtype)
    draws = uniforms(1, 3, 120)
    likelihoods = []
    for steps in range(4):
        _, mixture = ops.sample_and_fit(x, 120, draws, 3, backend="triton", **{**OPTIONS, "em_iters": steps})
        likelihoods.append(GaussianMixture(*mixture).log_prob(x.float().flatten(1, 2)).mean().item())
    assert all(b >= a - 1e-6 for a, b in itertools.pairwise(likelihoods)), likelihoods
