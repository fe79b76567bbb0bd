"""Posteriors, an EM step and moments, as compiled loops.

The inner loops take four points at a time: with one, most of the work would be loading and storing. Where their weights are
all 0, as most responsibilities are, they are skipped. Sums are taken over a few points in the working precision and then
added up in fp64, so that their error does not grow with the batch. Elements are indexed one by one, because a view costs as
much as a short row.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mixnorm.ops.numba.points import load
from mixnorm.ops.numba.threads import entry, parallel_for, part, serial, stretch, stretches_of

FLUSH = 64  # points whose sums are added up before they go into the fp64 ones
HARD, SOFT, GIVEN = range(3)
FAR = 1e3  # (mean - centre)² / variance above which a variance about that centre has lost digits


@serial
def posterior(logits: Any, i: int) -> None:
    """Softmax of logits[i] in place."""
    top = logits[i, 0]
    for k in range(1, logits.shape[1]):
        if logits[i, k] > top:
            top = logits[i, k]
    total = logits.dtype.type(0)
    for k in range(logits.shape[1]):
        below = logits[i, k] - top
        # Most are the largest or nothing beside it, and the exponential function is slow.
        logits[i, k] = 1 if below == 0 else 0 if below < -110 else math.exp(below)
        total += logits[i, k]
    for k in range(logits.shape[1]):
        logits[i, k] /= total


@serial
def _nearest(logits: Any, i: int) -> None:
    """1 for the first of the largest logits[i] and 0 for the others, in place."""
    best = 0
    for k in range(1, logits.shape[1]):
        if logits[i, k] > logits[i, best]:
            best = k
    for k in range(logits.shape[1]):
        logits[i, k] = k == best


@serial
def _log_joint(tile: Any, count: int, log_norm: Any, means: Any, scale: Any, b: int, out: Any, i: int) -> None:
    """out[i + p, k] = log_norm_k - ½ Σ_d ((tile[p] - μ_k) · scale_k)² for the points of a tile.

    The differences are taken first: a component may be narrow beside its distance from 0 and from the others.
    """
    for k in range(scale.shape[1]):
        q0 = q1 = q2 = q3 = tile.dtype.type(0)
        for d in range(tile.shape[1]):
            z0 = (tile[0, d] - means[b, k, d]) * scale[b, k, d]
            z1 = (tile[1, d] - means[b, k, d]) * scale[b, k, d]
            z2 = (tile[2, d] - means[b, k, d]) * scale[b, k, d]
            z3 = (tile[3, d] - means[b, k, d]) * scale[b, k, d]
            q0 += z0 * z0
            q1 += z1 * z1
            q2 += z2 * z2
            q3 += z3 * z3
        for p in range(count):
            q = q0 if p == 0 else q1 if p == 1 else q2 if p == 2 else q3
            out[i + p, k] = log_norm[b, k] - tile.dtype.type(0.5) * q


@serial
def densities(log_weights: Any, variances: Any, floor: float) -> Any:
    """1/σ_k, and the constant of log λ_k + log p_k."""
    scale, log_norm = np.empty_like(variances), np.empty_like(log_weights)
    for b in range(variances.shape[0]):
        for k in range(variances.shape[1]):
            log_volume = 0.0
            for d in range(variances.shape[2]):
                variance = max(variances[b, k, d], floor)
                scale[b, k, d] = 1 / math.sqrt(variance)
                log_volume += math.log(variance)
            log_norm[b, k] = log_weights[b, k] - 0.5 * log_volume
    return scale, log_norm


@serial
def _em_stretch(
    item: int, x: Any, how: int, means: Any, scale: Any, log_norm: Any, all_resp: Any, totals: Any, firsts: Any,
    seconds: Any,
) -> None:  # fmt: skip
    """ν of a stretch of points, and its Σν, Σν z_k and Σν z_k² with z_k = (x - μ_k) / σ_k under the given mixture."""
    b, t, start, stop = stretch(item, totals.shape[1], all_resp.shape[1])
    resp, total, first, second = all_resp[b], totals[b, t], firsts[b, t], seconds[b, t]
    components, dim = scale.shape[1], x.dim
    tile, w = np.zeros((4, dim), scale.dtype), np.zeros(4, scale.dtype)
    f, s = np.zeros((components, dim), scale.dtype), np.zeros((components, dim), scale.dtype)
    for base in range(start, stop, FLUSH):
        for i in range(base, min(base + FLUSH, stop), 4):
            count = load(x, b, i, stop, tile)
            if how != GIVEN:
                _log_joint(tile, count, log_norm, means, scale, b, resp, i)
                for p in range(count):
                    if how == HARD:
                        _nearest(resp, i + p)
                    else:
                        posterior(resp, i + p)
            for k in range(components):
                for p in range(4):
                    w[p] = resp[i + p, k] if p < count else 0
                    total[k] += w[p]
                w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
                if w0 == 0 and w1 == 0 and w2 == 0 and w3 == 0:
                    continue
                for d in range(dim):
                    z0 = (tile[0, d] - means[b, k, d]) * scale[b, k, d]
                    z1 = (tile[1, d] - means[b, k, d]) * scale[b, k, d]
                    z2 = (tile[2, d] - means[b, k, d]) * scale[b, k, d]
                    z3 = (tile[3, d] - means[b, k, d]) * scale[b, k, d]
                    v0, v1, v2, v3 = w0 * z0, w1 * z1, w2 * z2, w3 * z3
                    f[k, d] += (v0 + v1) + (v2 + v3)
                    s[k, d] += (v0 * z0 + v1 * z1) + (v2 * z2 + v3 * z3)
        for k in range(components):
            for d in range(dim):
                first[k, d] += f[k, d]
                second[k, d] += s[k, d]
                f[k, d] = s[k, d] = 0


@part
def em_step(
    threads: int, x: Any, how: int, weights: Any, means: Any, variances: Any, floor: float, resp: Any, new_weights: Any,
    new_means: Any, new_variances: Any,
) -> None:  # fmt: skip
    """ν (B, m, K) under a mixture and λ, μ, σ² under that ν. The new mixture may be written over the old one.

    ``how``: SOFT is the posterior, HARD gives all of a point to its likeliest component, and with GIVEN ν is there already,
    the means are where its moments are taken about at first, and the weights say nothing.
    """
    batch, components, dim = means.shape
    stretches = stretches_of(threads, batch, resp.shape[1])
    for _ in range(2):
        scale, log_norm = densities(np.log(weights), variances, floor)
        total = np.zeros((batch, stretches, components))
        first, second = np.zeros((batch, stretches, components, dim)), np.zeros((batch, stretches, components, dim))
        parallel_for(batch * stretches, _em_stretch, (x, how, means, scale, log_norm, resp, total, first, second))
        farthest = 0.0
        for b in range(batch):
            for k in range(components):
                mass = 0.0
                for t in range(stretches):
                    mass += total[b, t, k]
                new_weights[b, k] = mass / resp.shape[1]
                for d in range(dim):
                    shift, square = 0.0, 0.0
                    for t in range(stretches):
                        shift += first[b, t, k, d]
                        square += second[b, t, k, d]
                    if mass == 0:
                        new_means[b, k, d] = new_variances[b, k, d] = 0
                        continue
                    shift /= mass
                    variance = max(square / mass - shift * shift, 0.0)
                    farthest = max(farthest, shift * shift / max(variance, 1e-30))
                    new_means[b, k, d] = means[b, k, d] + shift / scale[b, k, d]
                    new_variances[b, k, d] = variance / (scale[b, k, d] * scale[b, k, d])
        if farthest <= FAR:
            break
        # The old means were no good centre, as after a start far from the points: once more, about the new ones.
        how, means, variances = GIVEN, new_means.copy(), new_variances.copy()


@entry
def em(
    threads: int, x: Any, resp: Any, weights: Any, means: Any, variances: Any, is_given: bool, hard_steps: int,
    soft_steps: int, min_variance: float, min_weight: float, floor: float,
) -> None:  # fmt: skip
    """Steps of k-means and then of EM over a mixture, which changes in place, and the ν (B, m, K) of the last of them.

    k-means takes the means of the mixture alone, and its last step leaves the clusters that it found as a mixture. With
    ``is_given`` there is one step, with the ν that are there. In the end components under ``min_weight`` are dropped.
    """
    centers, ones, alike = means.copy(), np.ones_like(means), np.ones_like(weights)
    for step in range(1 if is_given else hard_steps + soft_steps):
        how, start = SOFT, (weights, means, variances)
        if is_given or step < hard_steps:
            how, start = (GIVEN if is_given else HARD), (alike, centers, ones)
        em_step(threads, x, how, start[0], start[1], start[2], floor, resp, weights, means, variances)
        for b in range(means.shape[0]):
            for k in range(means.shape[1]):
                for d in range(means.shape[2]):
                    if weights[b, k] > 0:  # an empty cluster stays where it is
                        centers[b, k, d] = means[b, k, d]
                    if step >= hard_steps - 1:
                        variances[b, k, d] = max(variances[b, k, d], min_variance)
    if min_weight > 0:
        _prune(weights, means, variances, min_weight)


@part
def _prune(weights: Any, means: Any, variances: Any, min_weight: float) -> None:
    """As ``fit.prune``, in place."""
    for b in range(weights.shape[0]):
        largest, kept = weights[b, 0], 0.0
        for k in range(weights.shape[1]):
            largest = max(largest, weights[b, k])
        threshold = min(largest, min_weight)
        for k in range(weights.shape[1]):
            if weights[b, k] >= threshold:
                kept += weights[b, k]
            else:
                weights[b, k] = 0
                for d in range(means.shape[2]):
                    means[b, k, d] = variances[b, k, d] = 0
        for k in range(weights.shape[1]):
            weights[b, k] /= kept
