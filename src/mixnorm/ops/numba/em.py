"""Posteriors, an EM step and moments, as compiled loops.

Sums over points are taken over a few tiles in the working precision and then added up in fp64, so that their error does not
grow with the batch. Components that no point of these tiles belongs to are skipped.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mixnorm.ops.numba.lanes import WIDTH, exp, has_any, larger, load, store, total, where, wide
from mixnorm.ops.numba.points import load_tile, load_weights
from mixnorm.ops.numba.threads import entry, inlined, parallel_for, part, serial, stretch, stretches_of

TILES = 4  # whose sums stay in the lanes
MEAN, INVERSE = range(2)  # what a table of densities has of each channel and component
HARD, SOFT, GIVEN = range(3)
FAR = 1e3  # (mean - centre)² / variance above which a variance about that centre has lost digits


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


@inlined
def table_of_densities(b: int, means: Any, inverse: Any) -> Any:
    """μ_k and 1/σ_k of a mixture, (D, K, 2), as the loops come to them."""
    components, dim = means.shape[1:]
    table = np.empty((dim, components, 2), means.dtype)
    for k in range(components):
        for d in range(dim):
            table[d, k, MEAN], table[d, k, INVERSE] = means[b, k, d], inverse[b, k, d]
    return table


@inlined
def squared_distances(tile: Any, at: int, table: Any, first: int, group: int, out: Any) -> None:
    """Σ_d ((x - μ_k) / σ_k)² of ``group`` components from ``first`` on, three of them at a time, for the points of a tile.

    The squares are of x - μ_k itself: about a common anchor, a component that is narrow beside its distance from the others
    would lose its digits.
    """
    last, zero = first + group - 1, table.dtype.type(0)
    for j in range(0, group, 3):
        k0, k1, k2 = first + j, min(first + j + 1, last), min(first + j + 2, last)
        q0, q1, q2 = wide(zero), wide(zero), wide(zero)
        for d in range(table.shape[0]):
            v = load(tile, at + WIDTH * d)
            z0 = (v - table[d, k0, MEAN]) * table[d, k0, INVERSE]
            z1 = (v - table[d, k1, MEAN]) * table[d, k1, INVERSE]
            z2 = (v - table[d, k2, MEAN]) * table[d, k2, INVERSE]
            q0, q1, q2 = q0 + z0 * z0, q1 + z1 * z1, q2 + z2 * z2
        store(out, WIDTH * (k0 - first), q0)
        store(out, WIDTH * (k1 - first), q1)
        store(out, WIDTH * (k2 - first), q2)


@inlined
def posterior(b: int, first: int, group: int, log_norm: Any, far: Any, resp: Any, at: int) -> None:
    """ν of ``group`` components from ``first`` on, from their squared distances."""
    top = log_norm[b, first] - load(far, 0) * 0.5
    for j in range(1, group):
        top = larger(top, log_norm[b, first + j] - load(far, WIDTH * j) * 0.5)
    mass = wide(far.dtype.type(0))
    for j in range(group):
        share = exp(log_norm[b, first + j] - load(far, WIDTH * j) * 0.5 - top)
        store(resp, at + WIDTH * j, share)
        mass = mass + share
    for j in range(group):
        store(resp, at + WIDTH * j, load(resp, at + WIDTH * j) / mass)


@inlined
def _nearest(b: int, components: int, log_norm: Any, far: Any, resp: Any, at: int) -> None:
    """1 for the first of the likeliest components, and 0 for the others."""
    top = log_norm[b, 0] - load(far, 0) * 0.5
    for k in range(1, components):
        top = larger(top, log_norm[b, k] - load(far, WIDTH * k) * 0.5)
    free = wide(far.dtype.type(1))
    for k in range(components):
        share = where(top - (log_norm[b, k] - load(far, WIDTH * k) * 0.5), 0.0, free)
        store(resp, at + WIDTH * k, share)
        free = free - share


@serial
def _em_stretch(
    item: int, x: Any, how: int, means: Any, scale: Any, log_norm: Any, resp: Any, totals: Any, firsts: Any, seconds: Any
) -> None:  # fmt: skip
    """ν of a stretch of points, and its Σν, Σν z_k and Σν z_k² with z_k = (x - μ_k) / σ_k under the given mixture."""
    b, t, start, stop = stretch(item, totals.shape[1], resp.shape[1])
    components, dim, zero = scale.shape[1], x.dim, scale.dtype.type(0)
    of_tile, of_weights = WIDTH * dim, WIDTH * components
    table = table_of_densities(b, means, scale)
    places, tiles = np.empty(WIDTH, np.int64), np.empty(TILES * of_tile, scale.dtype)
    weights, far = np.empty(TILES * of_weights, scale.dtype), np.empty(of_weights, scale.dtype)
    used = np.empty(components, np.int64)
    for base in range(start, stop, TILES * WIDTH):
        here = 0
        for i in range(base, min(base + TILES * WIDTH, stop), WIDTH):
            at = here * of_weights
            count = load_tile(x, b, i, stop, places, tiles, here * of_tile)
            if how == GIVEN:
                load_weights(resp, b, i, count, weights, at)
            else:
                squared_distances(tiles, here * of_tile, table, 0, components, far)
                if how == HARD:
                    _nearest(b, components, log_norm, far, weights, at)
                else:
                    posterior(b, 0, components, log_norm, far, weights, at)
                for k in range(components):
                    for p in range(count):
                        resp[b, i + p, k] = weights[at + WIDTH * k + p]
                    for p in range(count, WIDTH):
                        weights[at + WIDTH * k + p] = 0
            here += 1
        number = 0
        for k in range(components):
            mass = wide(zero)
            for n in range(here):
                mass = mass + load(weights, n * of_weights + WIDTH * k)
            if has_any(mass):
                totals[b, t, k] += total(mass)
                used[number] = k
                number += 1
        for d in range(dim):
            for k in used[:number]:
                first, second = wide(zero), wide(zero)
                for n in range(here):
                    z = (load(tiles, n * of_tile + WIDTH * d) - table[d, k, MEAN]) * table[d, k, INVERSE]
                    weighted = z * load(weights, n * of_weights + WIDTH * k)
                    first, second = first + weighted, second + weighted * z
                firsts[b, t, k, d] += total(first)
                seconds[b, t, k, d] += total(second)


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
        masses = np.zeros((batch, stretches, components))
        first, second = np.zeros((batch, stretches, components, dim)), np.zeros((batch, stretches, components, dim))
        parallel_for(batch * stretches, _em_stretch, (x, how, means, scale, log_norm, resp, masses, first, second))
        farthest = 0.0
        for b in range(batch):
            for k in range(components):
                mass = 0.0
                for t in range(stretches):
                    mass += masses[b, t, k]
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
    centers, ones, alike = means.copy(), means.copy(), weights.copy()
    ones[:], alike[:] = 1, 1
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
