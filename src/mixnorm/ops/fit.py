"""Fitting a mixture as the paper does: greedy k-means++, Lloyd's iterations, then EM. Plain batched PyTorch.

Shapes: ``x`` is (B, m, D), B independent mixtures. All randomness comes in as ``uniforms``, so that a faster path given
the same numbers must find the same mixture. Nothing here reads a value back to the host.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mixnorm.ops import reference


class Options(NamedTuple):
    """How a mixture is fitted."""

    lloyd_iters: int
    em_iters: int
    min_variance: float
    min_weight: float


def num_candidates(num_components: int) -> int:
    """Candidates a round of greedy k-means++: 2 + ⌊ln K⌋."""
    return 2 + int(math.log(num_components))


def num_uniforms(num_components: int) -> int:
    """Random numbers that :func:`seed` uses for each mixture."""
    return 1 + (num_components - 1) * (2 + int(math.log(num_components)))  # a first seed, then rounds of candidates


def sample_indices(count: int, size: int, draws: Tensor) -> Tensor:
    """``size`` distinct indices below ``count``, each equally likely: a random one from each of as many stretches.

    Distinct without a permutation of all points, and no image of a batch is left out. ``draws`` are size + 1 uniform
    numbers: a place in each stretch, and where the first one begins. The points count as a circle there: stretches that
    cannot all be of one length may begin anywhere, and the last one goes on at the first point.
    """
    # Without a question about the sizes, which would hold an exported graph to the answer.
    begin = (draws[size].double() * size * count).long() * min(count % size, 1)
    ends = (torch.arange(size + 1, device=draws.device) * count + begin) // size
    lengths = ends[1:] - ends[:-1]
    index = ends[:-1] + torch.minimum((draws[:size] * lengths).long(), lengths - 1)
    return torch.where(index < count, index, index - count)


def squared_distances(x: Tensor, centers: Tensor) -> Tensor:
    """|x_i - c_k|², (B, K, m). The differences themselves are squared: a point is at exactly 0 from itself."""
    return torch.stack([(x - center.unsqueeze(1)).square_().sum(-1) for center in centers.unbind(1)], dim=1)


def seed(x: Tensor, num_components: int, uniforms: Tensor) -> Tensor:
    """Greedy k-means++: (B, K, D), rows of x.

    The first seed is any point. Each further round draws candidates with probability proportional to the squared distance
    to the nearest seed, and keeps the one that leaves the least sum of squared distances.
    """
    _, count, dim = x.shape
    first = (uniforms[:, :1] * count).long().clamp_max(count - 1)
    seeds = [_rows(x, first)]
    closest = squared_distances(x, seeds[0])  # (B, 1, m)
    rounds = uniforms[:, 1:].unflatten(1, (num_components - 1, num_candidates(num_components)))
    for draws in rounds.unbind(1):
        # In fp64, a point at distance zero has an interval of exactly no length and is never drawn again.
        cumulative = closest[:, 0].double().cumsum(-1)
        candidates = _rows(x, _draw(cumulative, draws))
        remaining = torch.minimum(closest, squared_distances(x, candidates))  # (B, candidates, m)
        best = remaining.sum(-1).argmin(-1)[:, None, None]
        closest = remaining.gather(1, best.expand(-1, 1, count))
        seeds.append(candidates.gather(1, best.expand(-1, 1, dim)))
    return torch.cat(seeds, dim=1)


def lloyd(x: Tensor, centers: Tensor, iterations: int) -> Tensor:
    """Lloyd's algorithm from the given centers; the hard responsibilities (B, m, K) to the final ones."""
    resp = _nearest(x, centers)
    for _ in range(iterations):
        weights, means, _ = reference.moments(x, resp)
        centers = torch.where((weights > 0).unsqueeze(-1), means, centers)  # an empty cluster stays where it is
        resp = _nearest(x, centers)
    return resp


def fit(x: Tensor, num_components: int, uniforms: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """λ (B, K), μ and σ² (B, K, D) from k-means++, Lloyd's iterations and EM, less the small components."""
    iterations = options.em_iters
    if num_components == 1:  # nothing to seed and nothing to iterate
        resp, iterations = torch.ones_like(x[..., :1]), 0
    else:
        resp = lloyd(x, seed(x, num_components, uniforms), options.lloyd_iters)
    weights, means, variances = reference.moments(x, resp)
    return em(x, weights, means, variances.clamp_min(options.min_variance), iterations, options)


def em(
    x: Tensor, weights: Tensor, means: Tensor, variances: Tensor, iterations: int, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """EM steps from a mixture. A variance stops at the floor, which is the M-step under that constraint."""
    for _ in range(iterations):
        _, weights, means, variances = reference.em_step(x, weights, means, variances)
        variances = variances.clamp_min(options.min_variance)
    return prune(weights, means, variances, options.min_weight)


def revive(x: Tensor, weights: Tensor, means: Tensor, variances: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gives each unused component of a warm start a new place: a point drawn as k-means++ draws it, with the spread of all.

    ``uniforms`` is (B, K). Without this a component that was once dropped would never come back.
    """
    dead = ~(weights > 0)  # a NaN too
    distances = squared_distances(x, means).masked_fill(dead.unsqueeze(-1), torch.inf).amin(1)
    cumulative = torch.where(dead.all(1, keepdim=True), 1.0, distances).double().cumsum(-1)
    means = torch.where(dead.unsqueeze(-1), _rows(x, _draw(cumulative, uniforms)), means)
    variances = torch.where(dead.unsqueeze(-1), x.var(1, correction=0).unsqueeze(1), variances)
    weights = torch.where(dead, 1 / weights.shape[1], weights)
    return weights / weights.sum(-1, keepdim=True), means, variances


def prune(weights: Tensor, means: Tensor, variances: Tensor, min_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """Drops the components under ``min_weight``: their weight becomes exactly 0 and their points go to the others."""
    keep = weights >= weights.amax(-1, keepdim=True).clamp_max(min_weight)
    kept = torch.where(keep, weights, 0.0)
    keep = keep.unsqueeze(-1)
    return kept / kept.sum(-1, keepdim=True), torch.where(keep, means, 0.0), torch.where(keep, variances, 0.0)


def gather(points: Tensor, index: Tensor) -> Tensor:
    """The points (B, outer, inner, D) with the given numbers, (B, count, D)."""
    inner = points.shape[2]
    return points[:, index // inner, index % inner]


def _nearest(x: Tensor, centers: Tensor) -> Tensor:
    labels = squared_distances(x, centers).argmin(1)
    # one_hot looks at the values first, which vmap cannot.
    return (labels.unsqueeze(-1) == torch.arange(centers.shape[1], device=x.device)).to(x.dtype)


def _draw(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """The points (B, n) that the uniform numbers (B, n) fall on, in intervals that end at ``cumulative`` (B, m)."""
    targets = uniforms.double() * cumulative[:, -1:]
    # What searchsorted(right=True) finds, in operations that ONNX has.
    index = (cumulative.unsqueeze(1) <= targets.unsqueeze(2)).sum(-1)
    return index.clamp_max(cumulative.shape[1] - 1)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
