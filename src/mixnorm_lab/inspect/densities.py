"""Densities of a norm's channels, before and after it, as plain arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

COLUMNS = 4  # channels to look at


@dataclass(frozen=True)
class Density:
    """The values of one channel as a histogram with an area of 1, and as components.

    Args:
        edges, heights: of the bins, (B + 1,) and (B,).
        weights, means, deviations: of the components in use, (K,), the largest weight first.
        mean, deviation, skewness: of all values.
    """

    edges: np.ndarray
    heights: np.ndarray
    weights: np.ndarray
    means: np.ndarray
    deviations: np.ndarray
    mean: float
    deviation: float
    skewness: float

    def under_mixture(self) -> float:
        """How much of the histogram lies under the density of the mixture: 1 where the two are the same."""
        return self._under(self.weights, self.means, self.deviations)

    def under_normal(self) -> float:
        """How much of it lies under the normal distribution with the values' mean and deviation."""
        return self._under(np.ones(1), np.array([self.mean]), np.array([self.deviation]))

    def _under(self, weights: np.ndarray, means: np.ndarray, deviations: np.ndarray) -> float:
        import torch  # for numpy has none of it, and who reads records alone does without

        standardized = (self.edges - means[:, None]) / deviations[:, None]
        below = torch.special.ndtr(torch.from_numpy(standardized)).numpy()  # exact even where a bin holds a whole component
        expected = weights @ np.diff(below, axis=1)
        return float(np.minimum(expected, self.heights * np.diff(self.edges)).sum())


@dataclass(frozen=True)
class Normalization:
    """One norm, "BN" or "MN:K", with a density for each channel of its input and of its output."""

    name: str
    before: tuple[Density, ...]
    after: tuple[Density, ...]


@dataclass(frozen=True)
class LayerDensities:
    """A layer's input on a batch, under several norms.

    Args:
        points: how many vectors of activations.
        left_out: whether other channels were chosen than usual, because some hardly vary.
    """

    layer: str
    channels: tuple[int, ...]
    points: int
    norms: tuple[Normalization, ...]
    left_out: bool = False


def weighted_densities(x: np.ndarray, weights: np.ndarray, means: np.ndarray, deviations: np.ndarray) -> np.ndarray:
    """λ_k N(x; μ_k, σ_k): of x (n,) under K components, (K, n)."""
    squares = ((x - means[:, None]) / deviations[:, None]) ** 2
    return (weights / deviations / np.sqrt(2 * np.pi))[:, None] * np.exp(-squares / 2)
