"""How many components an input wants: held-out likelihood, BIC and modes of data whose answer is known."""

import math

import pytest
import torch

from mixnorm.gmm import GaussianMixture
from mixnorm_lab.inspect import likelihood
from mixnorm_lab.inspect.component_counts import layer_likelihoods, modes
from mixnorm_lab.reports.tables.likelihood import table

POINTS, CHANNELS = 2000, 8


def normal(seed=0):
    return torch.randn(POINTS, CHANNELS, generator=torch.Generator().manual_seed(seed))


def two_modes():
    return normal() + 4 * (torch.arange(POINTS) % 3 == 0)[:, None]


def long_tail():
    """One mode: a third of the points is four times as wide."""
    return normal() * (1 + 3 * (torch.arange(POINTS) % 3 == 0)[:, None])


def by_components(points, **options):
    return {row.components: row for row in layer_likelihoods(points, "norm", components=(1, 2, 3), **options).rows}


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


def test_it_is_kept_and_told(tmp_path):
    found = layer_likelihoods(two_modes(), "conv2.norm", components=(1, 2))
    path = likelihood.save(found, tmp_path / "new")
    assert path.name == "likelihood-conv2-norm.json"
    assert likelihood.read(path) == found
    rows = table(found).rows
    assert rows[0]["held_out"] == rows[0]["bic"] == 0
    assert rows[1]["fitted"] == pytest.approx(found.rows[1].fitted - found.rows[0].fitted)
    assert [row["modes"] for row in rows] == [1, 2]
