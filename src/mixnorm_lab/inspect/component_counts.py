"""How many components a norm's input wants: the likelihood of images that a mixture was not fitted to, BIC and modes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mixnorm.gmm import GaussianMixture, fit_mixture
from mixnorm_lab.inspect.likelihood import LayerLikelihoods, Likelihood
from mixnorm_lab.internals import DEFAULT_MIN_VARIANCE

COMPONENTS = (1, 2, 3, 4, 5)
EM_ITERS, RESTARTS = 100, 3
MAX_POINTS = 16_384  # of each half
ASCENT, ARRIVED = 500, 1e-2  # steps to a mode, and how many deviations apart two ends are the same one


def layer_likelihoods(
    points: Tensor, layer: str, *, components: Sequence[int] = COMPONENTS, eps: float = 1e-5, seed: int = 0
) -> LayerLikelihoods:
    """Mixtures that are fitted to the first half of the points (m, C), which lie image by image, and tried on the second."""
    generator = torch.Generator().manual_seed(seed)
    half = len(points) // 2
    halves = [
        part[torch.randperm(half, generator=generator)[:MAX_POINTS]] for part in (points[:half], points[half : 2 * half])
    ]
    first, second = (part.double() for part in halves)
    rows = []
    for count in components:
        mixture = _best_of(first, count, max(eps, DEFAULT_MIN_VARIANCE), generator)
        fitted, held_out = (mixture.log_prob(part).mean().item() for part in (first, second))
        numbers = count - 1 + 2 * count * first.shape[1]
        bic = numbers * math.log(len(first)) / len(first) - 2 * fitted
        rows.append(Likelihood(count, fitted, held_out, bic, len(modes(mixture))))
    return LayerLikelihoods(layer, len(first), first.shape[1], tuple(rows))


def _best_of(points: Tensor, count: int, min_variance: float, generator: torch.Generator) -> GaussianMixture:
    """The most likely of a few fits from other seeds."""
    found = [
        fit_mixture(
            points,
            count,
            em_iters=EM_ITERS,
            min_weight=0.0,
            min_variance=min_variance,
            generator=generator,
            backend="reference",
        )
        for _ in range(RESTARTS if count > 1 else 1)
    ]
    return max(found, key=lambda mixture: mixture.log_prob(points).mean().item())


def modes(mixture: GaussianMixture) -> Tensor:
    """The maxima (n, D) of a mixture's density: where the way up ends that begins at each of its means."""
    used = mixture.weights > 0
    means, inverse = mixture.means[used], 1 / mixture.variances[used]
    x = means.clone()
    for _ in range(ASCENT):
        share = mixture.responsibilities(x)[:, used] @ inverse
        x = (mixture.responsibilities(x)[:, used] @ (inverse * means)) / share
    found: list[Tensor] = []
    for end in x:
        if not any((((end - other) ** 2 * inverse).mean(-1).sqrt() < ARRIVED).any() for other in found):
            found.append(end)
    return torch.stack(found)
