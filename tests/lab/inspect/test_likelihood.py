"""How many components an input wants: held-out likelihood, BIC and modes of data whose answer is known."""

import math

import pytest
import torch

from mixnorm.gmm import GaussianMixture
from mixnorm_lab.inspect import likelihood
from mixnorm_lab.inspect.component_counts import layer_likelihoods, modes, modes_of_channels
from mixnorm_lab.reports.tables.likelihood import table

POINTS, CHANNELS = 2000, 8


def normal(seed=0):
    return torch.randn(POINTS, CHANNELS, generator=torch.Generator().manual_seed(seed))


def two_modes():
    return normal() + 4 * (torch.arange(POINTS) % 3 == 0)[:, None]


def long_tail():
    """One mode: a third of the points is four times as wide."""
    return normal() * (1 + 3 * (torch.arange(POINTS) % 3 == 0)[:, None])


def correlated():
    """One mode: all channels have most of their variance in common."""
    return 0.5 * normal() + normal(1)[:, :1]


def look(points, components=(1, 2, 3)):
    return layer_likelihoods([points], "norm", components=components)[0]


def by_components(points):
    return {row.components: row for row in look(points).rows}


@pytest.mark.parametrize(("points", "wanted", "maxima"), [(normal, 1, 1), (two_modes, 2, 2), (long_tail, 2, 1)])
def test_the_answer_is_that_of_the_data(points, wanted, maxima):
    """A long tail wants two components as two modes do; the modes of the density tell which it was."""
    found = by_components(points())
    assert max(found.values(), key=lambda row: row.held_out).components == wanted
    assert min(found.values(), key=lambda row: row.bic).components == wanted
    assert found[wanted].modes == maxima


def test_one_component_is_the_normal_distribution():
    points = two_modes()
    first, second = points[: POINTS // 2].double(), points[POINTS // 2 :].double()
    expected = torch.distributions.Normal(first.mean(0), first.std(0, correction=0))
    row = by_components(points)[1]
    assert row.fitted == pytest.approx(expected.log_prob(first).sum(1).mean().item(), abs=1e-4)
    assert row.held_out == pytest.approx(expected.log_prob(second).sum(1).mean().item(), abs=1e-4)
    assert row.bic == pytest.approx(2 * CHANNELS * math.log(len(first)) / len(first) - 2 * row.fitted)


def test_modes_are_maxima_of_the_density():
    mixture = GaussianMixture(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([[0.0, 0], [6, 0], [0, 0]]), torch.ones(3, 2))
    found = modes(GaussianMixture(*(t.double() for t in (mixture.weights, mixture.means, mixture.variances))))
    assert len(found) == 2
    for mode in found:
        around = mode + 0.01 * torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
        assert (mixture.log_prob(around.float()) < mixture.log_prob(mode.float())).all()


def test_correlation_is_told_from_modes():
    """Without covariances three components cover one correlated cloud, and have three modes, as those of a normal
    distribution do; with covariances they are for nothing. Two modes want two of these, and a long tail has one mode."""
    found = look(correlated())
    gains = [rows[-1].held_out - rows[0].held_out for rows in (found.rows, found.normal, found.covariances)]
    assert found.rows[-1].modes == found.normal[-1].modes == 3
    assert gains[0] > 3
    assert gains[1] == pytest.approx(gains[0], rel=0.1)
    assert gains[2] < 0
    assert min(found.covariances, key=lambda row: row.bic).components == 1
    covariance = 0.25 * torch.eye(CHANNELS) + 1
    expected = (CHANNELS * math.log(1.25) - torch.logdet(covariance).item()) / 2
    assert found.covariances[0].held_out - found.rows[0].held_out == pytest.approx(expected, rel=0.05)

    mix = torch.randn(CHANNELS, CHANNELS, generator=torch.Generator().manual_seed(2))
    for shape, maxima in ((two_modes(), 2), (long_tail(), 1)):
        rows = look(shape @ mix, components=(1, 2)).covariances
        assert rows[1].held_out > rows[0].held_out + 0.5
        assert rows[1].modes == maxima


def test_the_fits_are_those_of_scikit_learn():
    mixture = pytest.importorskip("sklearn.mixture").GaussianMixture
    mix = torch.randn(CHANNELS, CHANNELS, generator=torch.Generator().manual_seed(2))
    points = (long_tail() @ mix).double()
    first, second = points[: POINTS // 2].numpy(), points[POINTS // 2 :].numpy()
    found = look(points)
    for kind, rows in (("diag", found.rows), ("full", found.covariances)):
        for row in rows[:2]:
            theirs = mixture(row.components, covariance_type=kind, n_init=3, max_iter=300, tol=1e-5, random_state=0).fit(
                first
            )
            assert row.held_out == pytest.approx(theirs.score(second), abs=0.02)


def test_centres_and_widths():
    apart, wide = (look(points(), components=(2,)).rows[0] for points in (two_modes, long_tail))
    between = 16 * 2 / 9  # of means 0 and 4, the second of which a third of the points has
    assert apart.between == pytest.approx(between / (1 + between), abs=0.03)
    assert apart.widths == pytest.approx(1, abs=0.1)
    assert wide.between < 0.01
    assert wide.widths == pytest.approx(4, rel=0.05)


def test_modes_of_channels():
    """At a distance of 2 deviations and below, two equal components have one maximum between them."""
    means = torch.tensor([[0.0, 0, 0, 5], [1.9, 2.2, 0, 5], [0, 0, 0, 9]], dtype=torch.float64)
    mixture = GaussianMixture(torch.tensor([0.5, 0.5, 0], dtype=torch.float64), means, torch.ones_like(means))
    assert modes_of_channels(mixture).tolist() == [1, 2, 1, 1]


def test_each_batch_has_images_in_both_halves():
    """Of the batches, as many points each; of a batch's images those of the first half are fitted to."""
    batches = [torch.full((10, 2), number) + torch.arange(10.0)[:, None].ge(5) / 2 for number in (0.0, 10.0)]
    found, [seen] = layer_likelihoods(batches, "norm", epochs=7, channels=(1,), components=(1,), max_points=6)
    assert (found.epochs, found.points, found.channels) == (7, 6, 2)
    [density] = seen.before
    assert (seen.name, density.mean, density.deviation) == ("K = 1", 5, 5)


def test_it_is_kept_and_told(tmp_path):
    found, _ = layer_likelihoods([two_modes()], "conv2.norm", epochs=3, components=(1, 2))
    path = likelihood.save(found, tmp_path / "new")
    assert path.name == "likelihood-conv2-norm-epoch-3.json"
    assert likelihood.read(path) == found
    given, of_normal, covariances = table([found]).rows
    assert [row["kind"] for row in (given, of_normal, covariances)] == ["input", "normal", "covariances"]
    assert given["2"] == found.rows[1].held_out - found.rows[0].held_out
    assert of_normal["2"] == found.normal[1].held_out - found.normal[0].held_out
    assert (given["modes"], given["bic"], given["one_mode"], given["between"]) == ("1, 2", 2, 0, 100 * found.rows[1].between)
    assert [row["1"] for row in (given, of_normal)] == [0, 0]
    assert covariances["2"] == found.covariances[1].held_out - found.rows[0].held_out
    both = table([found, found])
    assert len(both.rows) == 6
    assert {"layer", "epochs"} <= {column.key for column in both.columns}
