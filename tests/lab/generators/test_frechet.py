"""The Fréchet distance against closed forms and against scipy's square root of a matrix."""

import math

import numpy as np
import pytest
import torch

from mixnorm_lab.generators.frechet import Accumulator, Statistics, distance, statistics


def normal(mean, covariance):
    mean, covariance = (torch.as_tensor(value, dtype=torch.float64) for value in (mean, covariance))
    return Statistics(mean, covariance, 1000)


def random_covariance(size, rank, seed):
    factor = torch.randn(size, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return factor @ factor.T / rank


def draw(count, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, size, generator=generator) @ torch.randn(size, size, generator=generator) + 3


# --- closed forms -------------------------------------------------------------------------------------------------------


def test_one_dimension():
    """(μ₁ − μ₂)² + (σ₁ − σ₂)²."""
    assert distance(normal([1.0], [[4.0]]), normal([4.0], [[0.25]])) == pytest.approx(9 + 1.5**2)


def test_equal_covariances_leave_the_means():
    covariance = random_covariance(7, 9, seed=1)
    a, b = normal(torch.arange(7.0), covariance), normal(torch.zeros(7), covariance)
    assert distance(a, b) == pytest.approx(sum(i * i for i in range(7)))


@pytest.mark.parametrize("rotated", [False, True])
def test_commuting_covariances(rotated):
    """Of diagonal matrices, and of any with the same eigenvectors: Σ (σ₁ − σ₂)²."""
    first, second = torch.tensor([4.0, 1.0, 0.0, 9.0]).double(), torch.tensor([1.0, 0.0, 16.0, 9.0]).double()
    basis = torch.linalg.qr(random_covariance(4, 4, seed=2)).Q if rotated else torch.eye(4, dtype=torch.float64)
    a, b = (normal(torch.zeros(4), basis @ values.diag() @ basis.T) for values in (first, second))
    assert distance(a, b) == pytest.approx((1 + 1 + 16 + 0), abs=1e-7)


def test_covariances_that_share_no_direction():
    a, b = normal([0.0, 0.0], [[4.0, 0.0], [0.0, 0.0]]), normal([0.0, 0.0], [[0.0, 0.0], [0.0, 9.0]])
    assert distance(a, b) == pytest.approx(13)


def test_constant_features():
    a, b = normal([1.0, 2.0], torch.zeros(2, 2)), normal([1.0, 4.0], torch.zeros(2, 2))
    assert distance(a, b) == 4


# --- properties ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "rank"), [(3, 3), (40, 60), (40, 5), (64, 1)])
def test_against_scipy(size, rank):
    linalg = pytest.importorskip("scipy.linalg")
    a, b = random_covariance(size, rank, seed=3), random_covariance(size, rank + 3, seed=4)
    shift = 1e-9 * torch.eye(size, dtype=torch.float64)  # scipy's root needs it where a matrix is singular
    root = linalg.sqrtm((a + shift).numpy() @ (b + shift).numpy())
    expected = (a.trace() + b.trace()).item() - 2 * np.trace(root).real
    assert distance(normal(torch.zeros(size), a), normal(torch.zeros(size), b)) == pytest.approx(
        expected, rel=1e-3, abs=1e-3
    )


@pytest.mark.parametrize(("size", "rank"), [(5, 9), (30, 4)])
def test_zero_for_equal_and_symmetric(size, rank):
    a, b = (normal(torch.ones(size), random_covariance(size, rank, seed)) for seed in (5, 6))
    assert distance(a, a) == pytest.approx(0, abs=1e-9)
    assert distance(a, b) == pytest.approx(distance(b, a), rel=1e-9)
    assert distance(a, b) > 0.01


def test_scale_and_rotation():
    """Features k times as large are k² as far; those that are turned alike as far as before."""
    a, b = draw(500, 6, seed=1).double(), draw(400, 6, seed=2).double()
    basis = torch.linalg.qr(draw(6, 6, seed=3).double()).Q
    before = distance(statistics(a), statistics(b))
    assert distance(statistics(3 * a), statistics(3 * b)) == pytest.approx(9 * before)
    assert distance(statistics(a @ basis), statistics(b @ basis)) == pytest.approx(before)


def test_samples_of_one_distribution_come_closer_as_they_grow():
    found = [distance(statistics(torch.randn(n, 4)), statistics(torch.randn(n, 4))) for n in (20, 2_000)]
    assert found[1] < 0.1 * found[0]


# --- statistics that come batch by batch --------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_batches_give_what_the_whole_set_gives(offset):
    x = draw(301, 12) + offset
    seen = Accumulator(12)
    for batch in x.split(64):
        seen.add(batch)
    found = seen.statistics()
    np.testing.assert_allclose(found.mean.numpy(), x.double().numpy().mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.covariance.numpy(), np.cov(x.double().numpy().T), rtol=1e-9, atol=1e-9)
    assert found.count == 301


def test_too_few_samples_say_how_many():
    with pytest.raises(ValueError, match=r"8 samples are too few .* 8 features: use at least 9"):
        statistics(torch.randn(8, 8))
    with pytest.raises(ValueError, match="0 samples are too few"):
        Accumulator(4).statistics()
    assert math.isfinite(distance(statistics(torch.randn(9, 8)), statistics(torch.randn(9, 8))))


def test_mistakes():
    seen = Accumulator(4)
    with pytest.raises(ValueError, match=r"shape \(3, 5\), but must be \(N, 4\)"):
        seen.add(torch.zeros(3, 5))
    with pytest.raises(ValueError, match="4 and of 5 dimensions"):
        distance(statistics(torch.randn(9, 4)), statistics(torch.randn(9, 5)))
    with pytest.raises(ValueError, match="not all finite"):
        distance(normal([math.nan], [[1.0]]), normal([0.0], [[1.0]]))
