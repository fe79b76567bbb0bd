"""The random choices of the fit: k-means++ follows its distribution, and the sample is drawn evenly."""

import kernel_helpers as ops
import pytest
import torch
from scipy import stats
from triton_helpers import DEVICE, labels, rand

from mixnorm.ops import fit as reference_fit
from mixnorm.ops import reference

pytestmark = pytest.mark.usefixtures("poisoned")
ONLY_SEEDS = {"lloyd_iters": 0, "em_iters": 0, "min_variance": 1e-5, "min_weight": 0.0}
K = 3
MIXTURES = 20_000 if DEVICE == "cuda" else 120  # each takes the interpreter a tenth of a second
REFERENCE_MIXTURES = 100_000
LEAST_P = 1e-3  # the numbers are the same every time, so that a test which passes once passes always

# Ten points in five places on a line, at different distances. The means of the clusters, in the order of their seeds, tell
# which were chosen, except among places that lead to the same clusters.
LINE = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 3.0, 7.0, 7.0, 7.0, 12.0]).view(1, -1, 1)


def clusters_of_the_kernel(draws):
    """The clusters' means (B, K) of many mixtures of the line, each from seeds of its own."""
    points = LINE.to(DEVICE).expand(MIXTURES, -1, -1).unsqueeze(2)
    _, (_, means, _) = ops.sample_and_fit(points, LINE.shape[1], draws, K, backend="triton", **ONLY_SEEDS)
    return means.squeeze(-1).cpu()


def clusters_of_the_reference(uniforms):
    _, means, _ = reference_fit.fit(LINE.expand(len(uniforms), -1, -1), K, uniforms, reference_fit.Options(**ONLY_SEEDS))
    return means.squeeze(-1)


def p_value(found, expected):
    """Of the hypothesis that both rows of outcomes come from one distribution; outcomes that are rare count as one."""
    outcomes, which = torch.cat([found, expected]).mul(1000).round().unique(dim=0, return_inverse=True)
    table = torch.stack([part.bincount(minlength=len(outcomes)) for part in (which[: len(found)], which[len(found) :])])
    rare = table.sum(0) * len(found) / which.numel() < 5
    table = torch.cat([table[:, ~rare], table[:, rare].sum(1, keepdim=True)], 1)
    table = table[:, table.sum(0) > 0]
    assert table.shape[1] > 5, "too few outcomes to tell anything"
    return stats.chi2_contingency(table.numpy()).pvalue


@pytest.fixture(scope="module")
def expected():
    """Outcomes of the reference, from numbers that no other test uses."""
    generator = torch.Generator().manual_seed(99)
    return clusters_of_the_reference(torch.rand(REFERENCE_MIXTURES, reference_fit.num_uniforms(K), generator=generator))


def test_the_same_numbers_choose_the_same_seeds_and_these_follow_the_distribution(expected):
    count = LINE.shape[1] + 1
    draws = torch.rand(count + MIXTURES * reference_fit.num_uniforms(K), generator=torch.Generator().manual_seed(0))
    found = clusters_of_the_kernel(draws.to(DEVICE))
    torch.testing.assert_close(found, clusters_of_the_reference(draws[count:].view(MIXTURES, -1)), atol=1e-5, rtol=1e-5)
    assert p_value(found, expected) > LEAST_P


def test_numbers_from_a_counter_follow_the_distribution(expected):
    found = clusters_of_the_kernel((12345, torch.tensor(7, device=DEVICE)))
    assert p_value(found, expected) > LEAST_P


def test_other_ways_to_seed_would_not_pass(expected):
    """The tests above can tell: any points, and k-means++ without a choice of candidates, are other distributions."""
    generator = torch.Generator().manual_seed(1)
    points = LINE.expand(MIXTURES, -1, -1)
    any_points = torch.rand(MIXTURES, LINE.shape[1], generator=generator).argsort(1)[:, :K]
    resp = reference_fit.lloyd(points, points.gather(1, any_points.unsqueeze(-1)), 0)
    assert p_value(reference.moments(points, resp)[1].squeeze(-1), expected) < LEAST_P
    first, *others = torch.rand(MIXTURES, K, generator=generator).split(1, dim=1)
    one_candidate = torch.cat([first, *(u.expand(-1, reference_fit.num_candidates(K)) for u in others)], 1)
    assert p_value(clusters_of_the_reference(one_candidate), expected) < LEAST_P


@pytest.mark.parametrize(("k", "dim", "count"), [(2, 1, 300), (3, 16, 130), (5, 3, 200), (8, 130, 40), (16, 7, 100)])
def test_the_same_numbers_choose_the_same_seeds_of_any_points(k, dim, count):
    """Clusters of the same sizes and means come of the same seeds."""
    x = (rand(2, count, dim) + 2 * rand(2, k, dim, seed=1)[:, labels(count, k)]).float().to(DEVICE)
    number = count + 1 + 2 * reference_fit.num_uniforms(k)
    draws = torch.rand(number, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    found, expected = (
        ops.sample_and_fit(x.unsqueeze(2), count, draws, k, backend=backend, **ONLY_SEEDS)[1]
        for backend in ("triton", "reference")
    )
    torch.testing.assert_close(found[0] * count, expected[0] * count, atol=1e-3, rtol=0)
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-4)


def drawn(count, size, seed, counter):
    """Which of ``count`` points a seed and a counter choose."""
    x = torch.arange(float(count), device=DEVICE).view(1, 1, count, 1)
    draws = (seed, torch.tensor(counter, device=DEVICE))
    sample, _ = ops.sample_and_fit(x, size, draws, 1, backend="triton", **ONLY_SEEDS)
    return sample.flatten().long().cpu()


def test_the_places_of_a_counted_sample_are_uniform():
    """One of four in each of 512 stretches; and the next count's places do not follow from the last's."""
    places = torch.stack([drawn(2048, 512, 1, counter) for counter in range(8)]) - 4 * torch.arange(512)
    assert places.min() == 0
    assert places.max() == 3
    assert stats.chisquare(places.flatten().bincount(minlength=4)).pvalue > LEAST_P
    with_the_count_before = (places[1:] * 4 + places[:-1]).flatten()
    assert stats.chisquare(with_the_count_before.bincount(minlength=16)).pvalue > LEAST_P
    with_the_stretch_before = (places[:, 1:] * 4 + places[:, :-1]).flatten()
    assert stats.chisquare(with_the_stretch_before.bincount(minlength=16)).pvalue > LEAST_P


def test_where_the_stretches_begin_is_uniform():
    """50 of 57 points, which are distinct; the first is any of them."""
    samples = torch.stack([drawn(57, 50, 2, counter) for counter in range(40)])
    assert all(len(sample.unique()) == 50 for sample in samples)
    eighths = torch.arange(57) * 8 // 57
    expected = eighths.bincount().double() / 57 * 40
    assert stats.chisquare(eighths[samples[:, 0]].bincount(minlength=8), expected).pvalue > LEAST_P


def test_a_counted_sample_is_told_by_its_seed_and_its_count():
    first = drawn(2048, 512, 2**62 - 1, 0)
    assert torch.equal(first, drawn(2048, 512, 2**62 - 1, 0))
    assert not torch.equal(first, drawn(2048, 512, 2**62 - 1, 1))
    assert not torch.equal(first, drawn(2048, 512, 2**61, 0))
