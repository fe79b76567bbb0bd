"""The mixture and its fit against scikit-learn, torch.distributions and the properties that define them."""

import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture as SklearnMixture

from mixnorm import gmm
from mixnorm.gmm import GaussianMixture, fit_mixture, kmeans_plus_plus, sample_size
from mixnorm.ops import fit as reference_fit
from mixnorm.ops.fit import sample_indices

BACKENDS = ["reference", "auto"]


def blobs(count: int, dim: int, clusters: int, *, spread: float = 10.0, seed: int = 0, dtype=torch.float64):
    """Points around ``clusters`` centers that are far apart, with the cluster of each point."""
    g = torch.Generator().manual_seed(seed)
    label = torch.arange(count) % clusters
    centers = spread * torch.stack([torch.arange(dim) * 0.3 + k for k in range(clusters)])
    return (centers[label] + torch.randn(count, dim, generator=g)).to(dtype), label


def start(x: torch.Tensor, components: int) -> GaussianMixture:
    means = x[torch.arange(components) * 7]
    return GaussianMixture(torch.full((components,), 1 / components, dtype=x.dtype), means, torch.ones_like(means) * 1.3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize(("count", "dim", "components"), [(200, 3, 2), (301, 7, 5), (64, 1, 3)])
def test_em_equals_scikit_learn(count, dim, components, steps, backend):
    x = torch.randn(count, dim, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    x[: count // 2] += 1.5
    first = start(x, components)
    theirs = SklearnMixture(
        components, covariance_type="diag", max_iter=steps, tol=0, reg_covar=0,
        weights_init=first.weights.numpy(), means_init=first.means.numpy(), precisions_init=1 / first.variances.numpy(),
    )  # fmt: skip
    with pytest.warns(Warning, match="did not converge"):
        theirs.fit(x.numpy())
    ours = fit_mixture(x, components, em_iters=steps, init=first, min_weight=0.0, min_variance=0.0, backend=backend)
    for mine, other in ((ours.weights, theirs.weights_), (ours.means, theirs.means_), (ours.variances, theirs.covariances_)):
        torch.testing.assert_close(mine, torch.from_numpy(other), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.log_prob(x), torch.from_numpy(theirs.score_samples(x.numpy())), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        ours.responsibilities(x), torch.from_numpy(theirs.predict_proba(x.numpy())), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("min_variance", [1e-6, 0.5])
def test_likelihood_never_falls(min_variance, backend):
    x, _ = blobs(300, 4, 3, spread=1.0)
    mixture = start(x, 4)
    mixture = GaussianMixture(mixture.weights, mixture.means, mixture.variances.clamp_min(min_variance))
    likelihood = [mixture.log_prob(x).sum()]
    for _ in range(25):
        mixture = fit_mixture(x, 4, em_iters=1, init=mixture, min_weight=0.0, min_variance=min_variance, backend=backend)
        likelihood.append(mixture.log_prob(x).sum())
    assert all(after >= before - 1e-9 * abs(before) for before, after in itertools.pairwise(likelihood))
    assert likelihood[-1] > likelihood[0]


def test_log_prob_equals_torch_distributions():
    g = torch.Generator().manual_seed(0)
    weights = torch.softmax(torch.randn(2, 3, generator=g, dtype=torch.float64), -1)
    means, variances = (torch.rand(2, 3, 5, generator=g, dtype=torch.float64) for _ in range(2))
    x = torch.randn(2, 40, 5, generator=g, dtype=torch.float64)
    d = torch.distributions
    theirs = d.MixtureSameFamily(d.Categorical(weights), d.Independent(d.Normal(means, variances.sqrt()), 1))
    ours = GaussianMixture(weights, means, variances)
    torch.testing.assert_close(ours.log_prob(x), theirs.log_prob(x.movedim(1, 0)).movedim(0, 1))
    torch.testing.assert_close(ours.responsibilities(x).sum(-1), torch.ones(2, 40, dtype=torch.float64))


def test_log_domain_holds_far_from_every_component():
    mixture = GaussianMixture(torch.tensor([0.5, 0.5]), torch.zeros(2, 200), torch.full((2, 200), 1e-4))
    x = torch.full((3, 200), 50.0)
    assert mixture.log_prob(x).isfinite().all()
    torch.testing.assert_close(mixture.responsibilities(x), torch.full((3, 2), 0.5))


def test_samples_have_the_moments_of_the_mixture():
    mixture = GaussianMixture(
        torch.tensor([[0.2, 0.8], [1.0, 0.0]]), torch.tensor([[[-3.0], [1.0]], [[5.0], [9.0]]]), torch.full((2, 2, 1), 0.25)
    )
    x = mixture.sample(100_000, generator=torch.Generator().manual_seed(0))
    mean = (mixture.weights.unsqueeze(-1) * mixture.means).sum(1)
    variance = 0.25 + (mixture.weights.unsqueeze(-1) * (mixture.means - mean.unsqueeze(1)).square()).sum(1)
    torch.testing.assert_close(x.mean(1), mean, atol=0.02, rtol=0)
    torch.testing.assert_close(x.var(1), variance, atol=0.05, rtol=0)


def test_a_dropped_component_is_never_drawn():
    """Although the weights' sum is a little less than 1."""
    mixture = GaussianMixture(torch.tensor([0.499, 0.5, 0.0]), torch.tensor([[-1.0], [1.0], [1e6]]), torch.ones(3, 1))
    assert mixture.sample(100_000, generator=torch.Generator().manual_seed(0)).max() < 10


@pytest.mark.parametrize("components", [1, 2, 3, 8])
def test_seeds_are_distinct_points_of_the_data(components):
    x = torch.randn(3, 40, 2, generator=torch.Generator().manual_seed(0))
    x[:, 20:] = x[:, :20]  # every point twice
    for seed in range(50):
        seeds = kmeans_plus_plus(x, components, generator=torch.Generator().manual_seed(seed))
        for points, found in zip(x, seeds, strict=True):
            assert all((points == s).all(-1).any() for s in found)
            assert len({tuple(s.tolist()) for s in found}) == components


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("clusters", [2, 3, 5])
def test_every_clear_cluster_gets_a_seed(clusters, backend):
    x, label = blobs(200, 3, clusters, dtype=torch.float32)
    hits = 0
    for seed in range(100):
        mixture = fit_mixture(x, clusters, em_iters=0, generator=torch.Generator().manual_seed(seed), backend=backend)
        nearest = torch.cdist(mixture.means, x).argmin(-1)
        hits += len(set(label[nearest].tolist())) == clusters
    assert hits >= 99


def test_seeding_follows_the_squared_distance():
    """Plain draws: with one candidate a round, the second seed is at x with probability ∝ |x - first|²."""
    x = torch.tensor([[0.0], [1.0], [2.0], [4.0]], dtype=torch.float64)
    first_is_zero, counts = 0, torch.zeros(4)
    g = torch.Generator().manual_seed(0)
    count = 20_000
    uniforms = torch.rand(count, reference_fit.num_uniforms(2), generator=g, dtype=torch.float64)
    uniforms[:, 2:] = uniforms[:, 1:2]  # all candidates are the same draw
    seeds = reference_fit.seed(x.expand(count, 4, 1), 2, uniforms)
    chosen = seeds[seeds[:, 0, 0] == 0][:, 1, 0]
    first_is_zero = len(chosen)
    for i, value in enumerate((1.0, 2.0, 4.0), start=1):
        counts[i] = (chosen == value).sum()
    expected = torch.tensor([0.0, 1.0, 4.0, 16.0]) / 21 * first_is_zero
    chi_square = ((counts - expected)[1:].square() / expected[1:]).sum()
    assert counts[0] == 0
    assert chi_square < 13.8  # 99.9% quantile with two degrees of freedom
    assert abs(first_is_zero - count / 4) < 4 * math.sqrt(count * 3 / 16)


def test_greedy_rounds_keep_the_best_candidate():
    x = torch.randn(1, 100, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniforms = torch.rand(1, reference_fit.num_uniforms(4), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    seeds = reference_fit.seed(x, 4, uniforms)[0]
    inertia = torch.cdist(x[0], seeds).square().amin(1).sum()
    best_last = min(
        torch.cdist(x[0], torch.cat((seeds[:3], x[0, i : i + 1]))).square().amin(1).sum()
        for i in _candidates(x, seeds, uniforms)
    )
    torch.testing.assert_close(inertia, best_last)


def _candidates(x, seeds, uniforms):
    """The last round's candidates, found by walking the cumulative distances."""
    closest = torch.cdist(x[0], seeds[:3]).square().amin(1)
    candidates = reference_fit.num_candidates(4)
    found = []
    for u in uniforms[0, -candidates:]:
        target, total = u * closest.sum(), 0.0
        for i, distance in enumerate(closest):
            total += distance
            if total > target:
                found.append(i)
                break
    return found


@pytest.mark.parametrize("dim", [1, 6])
@pytest.mark.parametrize("components", [1, 2, 3, 6])
def test_compiled_fit_equals_the_reference(components, dim):
    """From the same random numbers, the same mixture."""
    x, _ = blobs(500, dim, 3, spread=3.0)
    batch = torch.stack((x, x.flip(0) * 2, x + 100))
    found = [
        fit_mixture(batch, components, em_iters=4, generator=torch.Generator().manual_seed(3), backend=b) for b in BACKENDS
    ]
    for name in ("weights", "means", "variances"):
        torch.testing.assert_close(getattr(found[1], name), getattr(found[0], name), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dimensions_are_independent_fits(backend):
    x = torch.stack([blobs(90, 2, 3, seed=s)[0] for s in range(6)]).view(2, 3, 90, 2)
    first = start(x[0, 0], 3)
    init = GaussianMixture(*(t.expand(2, 3, *t.shape) for t in (first.weights, first.means, first.variances)))
    together = fit_mixture(x, 3, em_iters=5, init=init, backend=backend)
    for i in range(2):
        for j in range(3):
            alone = fit_mixture(x[i, j], 3, em_iters=5, init=first, backend=backend)
            torch.testing.assert_close(together.means[i, j], alone.means, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(together.weights[i, j], alone.weights, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_clear_clusters_are_found(backend):
    x, label = blobs(600, 4, 3, dtype=torch.float32)
    mixture = fit_mixture(x, 3, em_iters=6, generator=torch.Generator().manual_seed(0), backend=backend)
    order = mixture.means[:, 0].argsort()
    expected = torch.stack([x[label == k].mean(0) for k in range(3)])
    torch.testing.assert_close(mixture.means[order], expected, rtol=1e-4, atol=1e-4)
    assert mixture.effective_components() == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_components_are_dropped_without_a_trace(backend):
    x, _ = blobs(995, 3, 1)
    x = torch.cat((x, torch.full((5, 3), 1000.0, dtype=torch.float64)))  # half a percent, far away
    fit = fit_mixture(x, 2, em_iters=4, min_weight=0.01, generator=torch.Generator().manual_seed(0), backend=backend)
    assert fit.effective_components() == 1
    dropped = fit.weights == 0
    assert dropped.sum() == 1
    assert (fit.means[dropped] == 0).all()
    alone = GaussianMixture(fit.weights[~dropped], fit.means[~dropped], fit.variances[~dropped])
    torch.testing.assert_close(fit.log_prob(x), alone.log_prob(x), rtol=0, atol=0)
    assert (fit.responsibilities(x)[:, dropped] == 0).all()
    assert (fit.responsibilities(x)[:, ~dropped] == 1).all()
    kept = fit_mixture(x, 2, em_iters=4, min_weight=0.001, generator=torch.Generator().manual_seed(0), backend=backend)
    assert kept.effective_components() == 2


def test_the_largest_component_is_never_dropped():
    x = torch.rand(50, 2)
    assert fit_mixture(x, 3, min_weight=0.99).effective_components() == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_warm_start_places_unused_components_anew(backend):
    x, _ = blobs(300, 2, 2)
    stuck = GaussianMixture(
        torch.tensor([1.0, 0.0], dtype=torch.float64),
        x[:2] * torch.tensor([[1.0], [0.0]]),
        torch.ones(2, 2, dtype=torch.float64),
    )
    warm = fit_mixture(x, 2, em_iters=8, init=stuck, generator=torch.Generator().manual_seed(0), backend=backend)
    assert warm.effective_components() == 2
    torch.testing.assert_close(warm.weights, torch.full((2,), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_layout_of_a_start_does_not_matter(backend):
    x, _ = blobs(300, 3, 2)
    init = start(x, 2)
    columns = GaussianMixture(init.weights, init.means.T.contiguous().T, init.variances.T.contiguous().T)
    found, expected = (fit_mixture(x, 2, em_iters=3, init=i, min_weight=0, backend=backend) for i in (columns, init))
    torch.testing.assert_close(found.means, expected.means, rtol=0, atol=0)
    torch.testing.assert_close(found.variances, expected.variances, rtol=0, atol=0)
    assert not torch.equal(found.means, init.means)


@pytest.mark.parametrize("backend", BACKENDS)
def test_degenerate_points_give_finite_mixtures(backend):
    same = torch.ones(20, 3)
    few = torch.tensor([[0.0], [1.0]]).repeat(10, 1)
    for x, components in ((same, 3), (few, 4), (torch.randn(2, 3), 3), (torch.randn(1, 3), 2)):
        mixture = fit_mixture(x, components, em_iters=4, generator=torch.Generator().manual_seed(0), backend=backend)
        for t in (mixture.weights, mixture.means, mixture.variances, mixture.log_prob(x), mixture.responsibilities(x)):
            assert t.isfinite().all()
        torch.testing.assert_close(mixture.weights.sum(), torch.tensor(1.0))


def test_the_sample_is_distinct_spread_and_bounded():
    for count, size in ((100, 25), (101, 25), (7, 7), (1000, 999), (65536, 4096)):
        index = sample_indices(count, size, torch.rand(size + 1, generator=torch.Generator().manual_seed(0)))
        assert len(set(index.tolist())) == size
        assert index.min() >= 0
        assert index.max() < count
        assert index.diff().max() <= 2 * -(-count // size)
    assert sample_size(10_000, 3, 0.25, None) == 2500
    assert sample_size(10_000, 3, 0.25, 1000) == 1000
    assert sample_size(100, 3, 0.01, None) == 48  # never fewer than 16 a component
    assert sample_size(10, 3, 0.25, None) == 10


def test_a_size_is_rounded_for_export_as_it_is_otherwise():
    values = [fraction * count for fraction in (0.05, 0.1, 0.25, 0.3, 0.5, 1.0) for count in range(200)]
    assert [gmm._round(value) for value in values] == [round(value) for value in values]


@pytest.mark.parametrize(("count", "size"), [(41, 10), (64, 48), (50, 25), (30, 29)])
def test_each_point_is_sampled_equally_often(count, size):
    g, counts = torch.Generator().manual_seed(0), np.zeros(count)
    for _ in range(4000):
        counts[sample_indices(count, size, torch.rand(size + 1, generator=g)).numpy()] += 1
    share = size / count
    assert abs(counts / 4000 - share).max() < 4.5 * (share * (1 - share) / 4000) ** 0.5


def test_errors_name_the_value_and_the_remedy():
    x = torch.randn(10, 2)
    with pytest.raises(ValueError, match="num_components=0"):
        fit_mixture(x, 0)
    with pytest.raises(ValueError, match=r"sample_fraction=0.*\(0, 1\]"):
        fit_mixture(x, 2, sample_fraction=0)
    with pytest.raises(ValueError, match="max_samples=1"):
        fit_mixture(x, 2, max_samples=1)
    with pytest.raises(ValueError, match=r"init has means of shape \(3, 2\)"):
        fit_mixture(x, 2, init=GaussianMixture(torch.ones(3) / 3, torch.rand(3, 2), torch.ones(3, 2)))
    for shape in ((0, 2), (3, 0), (0, 5, 2)):
        with pytest.raises(ValueError, match="holds no points"):
            kmeans_plus_plus(torch.empty(shape), 2)
        with pytest.raises(ValueError, match="holds no points"):
            fit_mixture(torch.empty(shape), 2)
    with pytest.raises(ValueError, match="do not fit together"):
        GaussianMixture(torch.ones(2), torch.ones(2, 3), torch.ones(3, 3))
    with pytest.raises(ValueError, match="int64"):
        fit_mixture(torch.arange(10).view(5, 2), 2)
