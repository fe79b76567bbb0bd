"""The Fréchet distance between two sets of features, each taken as a normal distribution; of which, the caller says."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Statistics:
    """``mean`` (D,) and ``covariance`` (D, D) of ``count`` features, in fp64 on the CPU."""

    mean: Tensor
    covariance: Tensor
    count: int


class Accumulator:
    """Mean and covariance of features that come batch by batch, in fp64.

    Example:
        >>> seen = Accumulator(256)
        >>> for batch in features:
        ...     seen.add(batch)
        >>> seen.statistics()
    """

    def __init__(self, dimensions: int) -> None:
        self.dimensions, self.count = dimensions, 0
        self._sum: Tensor | None = None

    def add(self, features: Tensor) -> None:
        """``features`` (N, D)."""
        if features.dim() != 2 or features.shape[1] != self.dimensions:
            raise ValueError(
                f"features are of the shape {tuple(features.shape)}, but must be (N, {self.dimensions}): use one feature "
                "network for all images"
            )
        x = features.detach().double() if features.device.type == "cuda" else features.detach().cpu().double()
        if self._sum is None:
            # All is counted from the first batch's mean: squares of features far from zero would leave no digits.
            self._origin = x.mean(0)
            self._sum = torch.zeros_like(self._origin)
            self._products = torch.zeros(self.dimensions, self.dimensions, dtype=torch.float64, device=x.device)
        x = x - self._origin
        self._sum += x.sum(0)
        self._products += _gram(x)
        self.count += len(x)

    def statistics(self) -> Statistics:
        needed = self.dimensions + 1
        if self._sum is None or self.count < needed:
            raise ValueError(
                f"{self.count:,} samples are too few for the covariance of {self.dimensions:,} features: use "
                f"at least {needed:,}"
            )
        mean = self._sum / self.count
        covariance = (self._products - self.count * torch.outer(mean, mean)) / (self.count - 1)
        return Statistics((self._origin + mean).cpu(), covariance.cpu(), self.count)


def statistics(features: Tensor) -> Statistics:
    """Of features (N, D)."""
    seen = Accumulator(features.shape[-1])
    seen.add(features)
    return seen.statistics()


def distance(a: Statistics, b: Statistics) -> float:
    """|μ₁ − μ₂|² + tr(C₁ + C₂ − 2 (C₁ C₂)^½), the squared Wasserstein distance of the two normal distributions.

    With C = F Fᵀ, the trace of (C₁ C₂)^½ is the sum of the singular values of F₁ᵀ F₂. Nothing there is a square root of a
    small difference, so that it stays finite, and true, for covariances that are singular.
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(
            f"features of {len(a.mean)} and of {len(b.mean)} dimensions have no distance: use one feature network for "
            "both sets"
        )
    for one in (a, b):
        if not (one.mean.isfinite().all() and one.covariance.isfinite().all()):
            raise ValueError("features are not all finite numbers: the images, or the feature network's weights, are broken")
    common = torch.linalg.svdvals(_factor(a.covariance).T @ _factor(b.covariance)).sum()
    means = (a.mean - b.mean).square().sum()
    total = means + a.covariance.trace() + b.covariance.trace() - 2 * common
    return max(0.0, total.item())  # rounding leaves a little less than nothing for equal sets


def _gram(x: Tensor) -> Tensor:
    """xᵀ x of (N, D). On a CPU by numpy, which computes one half of it: in half the time."""
    if x.device.type != "cpu":
        return x.T @ x
    array = x.numpy()
    return torch.from_numpy(array.T @ array)


def _factor(covariance: Tensor) -> Tensor:
    """F with F Fᵀ = C: the Cholesky factor or, where C is singular, that of its eigenvectors, which takes much longer."""
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if not failed:
        return factor
    values, vectors = torch.linalg.eigh(covariance)
    kept = values > values.abs().max() * len(values) * torch.finfo(values.dtype).eps
    return vectors[:, kept] * values[kept].sqrt()
