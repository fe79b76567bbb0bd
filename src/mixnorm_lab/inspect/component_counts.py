"""How many components a norm's input wants: the likelihood of images that a mixture was not fitted to, BIC and modes.

The components of mixture norm have no covariances. Where channels are correlated it takes several of them to cover even a
cloud with one mode. So the same is asked of a normal distribution with the input's covariances, and of mixtures whose
components have covariances.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mixnorm.gmm import GaussianMixture, fit_mixture
from mixnorm_lab.inspect.densities import Normalization
from mixnorm_lab.inspect.likelihood import LayerLikelihoods, Likelihood
from mixnorm_lab.inspect.norm_inputs import density
from mixnorm_lab.internals import DEFAULT_MIN_VARIANCE

COMPONENTS = (1, 2, 3, 4, 5)
SHOWN = (1, 2, 3, 5)  # in a picture
EM_ITERS, RESTARTS = 100, 3
MAX_POINTS = 16_384  # of each half
ASCENT, ARRIVED = 500, 1e-2  # steps to a mode, and how many deviations apart two ends are the same one
GRID = 2001  # places at which a channel's density is looked at


@dataclass(frozen=True)
class Correlated:
    """A mixture of Gaussians with covariances.

    Args:
        weights: (K,).
        means: (K, D).
        covariances: (K, D, D).
    """

    weights: Tensor
    means: Tensor
    covariances: Tensor

    @property
    def variances(self) -> Tensor:
        return self.covariances.diagonal(dim1=1, dim2=2)

    def log_prob(self, x: Tensor) -> Tensor:
        return torch.logsumexp(self._joint(x), dim=1)

    def responsibilities(self, x: Tensor) -> Tensor:
        return torch.softmax(self._joint(x), dim=1)

    def _joint(self, x: Tensor) -> Tensor:
        parts = zip(self.weights.log(), self.means, torch.linalg.cholesky(self.covariances), strict=True)
        normal = torch.distributions.MultivariateNormal
        return torch.stack([weight + normal(mean, scale_tril=root).log_prob(x) for weight, mean, root in parts], dim=1)


Mixture = GaussianMixture | Correlated


def layer_likelihoods(
    batches: Iterable[Tensor],
    layer: str,
    *,
    epochs: int = 0,
    channels: Sequence[int] = (),
    components: Sequence[int] = COMPONENTS,
    eps: float = 1e-5,
    seed: int = 0,
    max_points: int = MAX_POINTS,
) -> tuple[LayerLikelihoods, tuple[Normalization, ...]]:
    """Mixtures that are fitted to one half of the images and tried on the other; and the density of the first half in a few
    ``channels``, with the mixtures of ``SHOWN``.

    Args:
        batches: points (m, C) each, which lie image by image. The first half of a batch is fitted to.
        epochs: of the training before.
        max_points: of each half.
    """
    generator = torch.Generator().manual_seed(seed)
    floor = max(eps, DEFAULT_MIN_VARIANCE)
    halves = first, second = _halves(batches, max_points, generator)
    plain = {count: _fit(first, count, floor, generator) for count in components}
    covariances = {count: _fit_covariances(first, plain[count], floor) for count in components}
    [cloud] = _covariances(first, torch.ones_like(first[:, :1]), floor)
    root, mean = torch.linalg.cholesky(cloud), first.mean(0)
    drawn = [torch.randn(half.shape, dtype=half.dtype, generator=generator) @ root.T + mean for half in halves]
    of_normal = {count: _fit(drawn[0], count, floor, generator) for count in components}
    found = LayerLikelihoods(
        layer,
        epochs,
        points=len(first),
        channels=first.shape[1],
        rows=tuple(_likelihood(mixture, first, second) for mixture in plain.values()),
        normal=tuple(_likelihood(mixture, *drawn) for mixture in of_normal.values()),
        covariances=tuple(_likelihood(mixture, first, second) for mixture in covariances.values()),
    )
    return found, tuple(_seen(plain[count], first, channels) for count in components if count in SHOWN)


def _halves(batches: Iterable[Tensor], most: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Both halves of the images, in fp64: of each batch as many points, and ``most`` in all."""
    halves: tuple[list[Tensor], list[Tensor]] = ([], [])
    for points in batches:
        half = len(points) // 2
        for found, part in zip(halves, (points[:half], points[half : 2 * half]), strict=True):
            found.append(part[torch.randperm(half, generator=generator)[:most]])
    first, second = (torch.cat([part[: -(-most // len(found))] for part in found])[:most] for found in halves)
    return first.double(), second.double()


def _fit(points: Tensor, count: int, min_variance: float, generator: torch.Generator) -> GaussianMixture:
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


def _fit_covariances(points: Tensor, start: GaussianMixture, floor: float) -> Correlated:
    """The more likely of two fits by EM: from the components of a mixture without covariances, which are apart, and from
    shells around the centre, which have one centre and differ in their widths."""
    count = start.num_components
    [cloud] = _covariances(points, torch.ones_like(points[:, :1]), floor)
    centred = (points - points.mean(0)).T
    radius = torch.linalg.solve_triangular(torch.linalg.cholesky(cloud), centred, upper=False).square().sum(0)
    shell = torch.argsort(torch.argsort(radius)) * count // len(points)
    found = []
    for resp in (start.responsibilities(points), torch.nn.functional.one_hot(shell, count).to(points.dtype)):
        for _ in range(EM_ITERS if count > 1 else 1):
            share = resp.sum(0).clamp_min(1e-9)
            mixture = Correlated(share / share.sum(), resp.T @ points / share[:, None], _covariances(points, resp, floor))
            resp = mixture.responsibilities(points)
        found.append(mixture)
    return max(found, key=lambda mixture: mixture.log_prob(points).mean().item())


def _covariances(points: Tensor, resp: Tensor, floor: float) -> Tensor:
    """Of the points (m, D) under responsibilities (m, K): (K, D, D)."""
    found = []
    for share in resp.T:
        total = share.sum().clamp_min(1e-9)
        centred = points - share @ points / total
        found.append((centred * share[:, None]).T @ centred / total + floor * torch.eye(points.shape[1], dtype=points.dtype))
    return torch.stack(found)


def _likelihood(mixture: Mixture, first: Tensor, second: Tensor) -> Likelihood:
    fitted, held_out = (mixture.log_prob(part).mean().item() for part in (first, second))
    count, channels = mixture.means.shape
    of_one = channels + (channels if isinstance(mixture, GaussianMixture) else channels * (channels + 1) // 2)
    between = mixture.weights @ (mixture.means - mixture.weights @ mixture.means) ** 2
    share = between / (between + mixture.weights @ mixture.variances)
    volumes = -_precisions(mixture)[mixture.weights > 0].logdet() / (2 * channels)
    return Likelihood(
        components=count,
        fitted=fitted,
        held_out=held_out,
        bic=(count - 1 + count * of_one) * math.log(len(first)) / len(first) - 2 * fitted,
        modes=len(modes(mixture)),
        one_mode=int((modes_of_channels(mixture) == 1).sum()),
        between=share.mean().item(),
        widths=math.exp(volumes.max() - volumes.min()),
    )


def _precisions(mixture: Mixture) -> Tensor:
    if isinstance(mixture, GaussianMixture):
        return torch.diag_embed(1 / mixture.variances)
    return torch.linalg.inv(mixture.covariances)


def modes(mixture: Mixture) -> Tensor:
    """The maxima (n, D) of a mixture's density: where the way up ends that begins at each of its means."""
    used = mixture.weights > 0
    means, inverse = mixture.means[used], _precisions(mixture)[used]
    pulls = torch.einsum("kij,kj->ki", inverse, means)
    x = means.clone()
    for _ in range(ASCENT):
        resp = mixture.responsibilities(x)[:, used]
        before, x = x, torch.linalg.solve(torch.einsum("nk,kij->nij", resp, inverse), resp @ pulls)
        if torch.equal(before, x):
            break
    found: list[Tensor] = []
    for end in x:
        apart = [torch.einsum("i,kij,j->k", end - other, inverse, end - other) / len(end) for other in found]
        if not any((distance.sqrt() < ARRIVED).any() for distance in apart):
            found.append(end)
    return torch.stack(found)


def modes_of_channels(mixture: Mixture) -> Tensor:
    """How many maxima (D,) the density of each channel by itself has: they all lie between its outermost means."""
    used = mixture.weights > 0
    means, deviations = mixture.means[used].T, mixture.variances[used].sqrt().T
    margin = deviations.amin(1)
    low, high = means.amin(1) - margin, means.amax(1) + margin
    grid = low[:, None] + (high - low)[:, None] * torch.linspace(0, 1, GRID, dtype=means.dtype)
    total = torch.zeros_like(grid)
    for k, weight in enumerate(mixture.weights[used]):
        mean, deviation = means[:, k, None], deviations[:, k, None]
        total += weight / deviation * torch.exp(-(((grid - mean) / deviation) ** 2) / 2)
    inside = total[:, 1:-1]
    return ((inside > total[:, :-2]) & (inside >= total[:, 2:])).sum(1)


def _seen(mixture: GaussianMixture, points: Tensor, channels: Sequence[int]) -> Normalization:
    """The density of the points in a few channels, with the components."""
    resp = mixture.responsibilities(points).numpy()
    seen = tuple(density(points[:, channel].numpy(), resp) for channel in channels)
    return Normalization(f"K = {mixture.num_components}", seen, ())
