"""Compiled CPU loops: the fit, the EM step, the transform and its gradient, each as one call.

Points (B, outer, inner, D) may lie in memory in any way, and are numbered o · inner + i. Four of them at a time are copied
into a tile and back, so that nothing else asks how they lie, and one compilation serves all. The points of a mixture are cut
into stretches, which run on all cores. Sums are taken over a few points in the working precision and then added up in fp64,
so that their error does not grow with the batch. The inner loops take four points, and some three components ("rows by
threes", padded with zeros), at a time: with one, most of the work would be loading and storing. Where their weights are all
0, as most responsibilities are, they are skipped. Elements are indexed one by one, because a view costs as much as a short
row.

All of it is in one file, because numba's cache notices changes to a function's own file only.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

FLUSH = 64  # points whose sums are added up before they go into the fp64 ones
# Sums may be reordered, which lets them be vectorized; NaN and Inf keep their meaning.
_serial = njit(fastmath={"reassoc", "contract", "arcp", "nsz"}, nogil=True, cache=True, error_model="numpy")
_inlined = njit(
    fastmath={"reassoc", "contract", "arcp", "nsz"}, nogil=True, cache=True, error_model="numpy", forceinline=True
)
_parallel = njit(parallel=True, nogil=True, cache=True, error_model="numpy")

FAR = 1e3  # (mean - centre)² / variance above which a variance about that centre has lost digits

NONE, RELU, LEAKY_RELU, SILU, GELU = range(5)
SQRT_HALF = math.sqrt(0.5)


class Points(NamedTuple):
    """Points (B, outer, inner, D), a view of memory."""

    memory: Any  # one-dimensional
    batch: int
    outer: int
    inner: int
    dim: int
    step_b: int  # strides, in elements
    step_o: int
    step_i: int
    step_d: int


@_serial
def _stretches(threads: int, batch: int, count: int) -> int:
    """Into how many stretches the points of each mixture are cut, so that every thread has work."""
    return min(count, (threads + batch - 1) // batch)


@_inlined
def _place(x: Any, b: int, point: int) -> Any:
    """Where a point begins in memory; without a sign, or every access would ask whether it counts from the end."""
    outer = point // x.inner
    return np.uint64(b * x.step_b + outer * x.step_o + (point - outer * x.inner) * x.step_i)


@_inlined
def _load(x: Any, b: int, first: int, stop: int, tile: Any) -> int:
    """tile[p] = x for the four points from ``first`` on, or for as many as there are; how many."""
    count, step = min(4, stop - first), np.uint64(x.step_d)
    if step == np.uint64(1):  # the compiler takes several at once
        for p in range(count):
            place = _place(x, b, first + p)
            for d in range(x.dim):
                tile[p, d] = x.memory[place + np.uint64(d)]
        return count
    # Neighbours together, because they are near each other in memory, and their channels are not.
    place0, place1 = _place(x, b, first), _place(x, b, min(first + 1, stop - 1))
    place2, place3 = _place(x, b, min(first + 2, stop - 1)), _place(x, b, min(first + 3, stop - 1))
    for d in range(x.dim):
        along = np.uint64(d) * step
        tile[0, d], tile[1, d] = x.memory[place0 + along], x.memory[place1 + along]
        tile[2, d], tile[3, d] = x.memory[place2 + along], x.memory[place3 + along]
    return count


@_inlined
def _store(tile: Any, count: int, y: Any, b: int, first: int) -> None:
    """The inverse of ``_load``."""
    step = np.uint64(y.step_d)
    if step == np.uint64(1) or count < 4:
        for p in range(count):
            place = _place(y, b, first + p)
            for d in range(y.dim):
                y.memory[place + np.uint64(d) * step] = tile[p, d]
        return
    place0, place1 = _place(y, b, first), _place(y, b, first + 1)
    place2, place3 = _place(y, b, first + 2), _place(y, b, first + 3)
    for d in range(y.dim):
        along = np.uint64(d) * step
        y.memory[place0 + along], y.memory[place1 + along] = tile[0, d], tile[1, d]
        y.memory[place2 + along], y.memory[place3 + along] = tile[2, d], tile[3, d]


# ---------------------------------------------------------------------------------------------------------------- EM


@_serial
def _posterior(logits: Any, i: int) -> None:
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


@_serial
def _nearest(logits: Any, i: int) -> None:
    """1 for the first of the largest logits[i] and 0 for the others, in place."""
    best = 0
    for k in range(1, logits.shape[1]):
        if logits[i, k] > logits[i, best]:
            best = k
    for k in range(logits.shape[1]):
        logits[i, k] = k == best


@_serial
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


@_serial
def _densities(log_weights: Any, variances: Any, floor: float) -> Any:
    """1/σ_k, and the constant of log_weights_k + log p_k."""
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


@_serial
def _em_stretch(
    x: Any, b: int, start: int, stop: int, hard: bool, means: Any, scale: Any, log_norm: Any, resp: Any,
    total: Any, first: Any, second: Any,
) -> None:  # fmt: skip
    """ν of a stretch of points, and its Σν, Σν z_k and Σν z_k² with z_k = (x - μ_k) / σ_k under the given mixture."""
    components, dim = log_norm.shape[1], x.dim
    tile, w = np.zeros((4, dim), scale.dtype), np.zeros(4, scale.dtype)
    f, s = np.zeros((components, dim), scale.dtype), np.zeros((components, dim), scale.dtype)
    for base in range(start, stop, FLUSH):
        for i in range(base, min(base + FLUSH, stop), 4):
            count = _load(x, b, i, stop, tile)
            _log_joint(tile, count, log_norm, means, scale, b, resp, i)
            for p in range(count):
                if hard:
                    _nearest(resp, i + p)
                else:
                    _posterior(resp, i + p)
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


@_parallel
def _em_stretches(
    x: Any, hard: bool, means: Any, scale: Any, log_norm: Any, resp: Any, total: Any, first: Any, second: Any
) -> None:
    batch, stretches, points = total.shape[0], total.shape[1], resp.shape[1]
    for item in prange(batch * stretches):
        b, t = np.int64(item) // stretches, np.int64(item) % stretches
        _em_stretch(
            x, b, points * t // stretches, points * (t + 1) // stretches, hard, means, scale, log_norm, resp[b],
            total[b, t], first[b, t], second[b, t],
        )  # fmt: skip


@_serial
def _moments_stretch(
    x: Any, b: int, start: int, stop: int, resp: Any, centre: Any, total: Any, first: Any, second: Any
) -> None:
    """Σν, Σν(x - centre_k) and Σν(x - centre_k)² of a stretch of points under given responsibilities."""
    components, dim = centre.shape[1], x.dim
    tile = np.zeros((4, dim), centre.dtype)
    for i in range(start, stop, 4):
        count = _load(x, b, i, stop, tile)
        for k in range(components):
            for p in range(count):
                w = resp[b, i + p, k]
                if w != 0:
                    total[k] += w
                    for d in range(dim):
                        v = tile[p, d] - centre[b, k, d]
                        first[k, d] += w * v
                        second[k, d] += w * v * v


@_parallel
def _moments_stretches(x: Any, resp: Any, centre: Any, total: Any, first: Any, second: Any) -> None:
    batch, stretches, points = total.shape[0], total.shape[1], resp.shape[1]
    for item in prange(batch * stretches):
        b, t = np.int64(item) // stretches, np.int64(item) % stretches
        start, stop = points * t // stretches, points * (t + 1) // stretches
        _moments_stretch(x, b, start, stop, resp, centre, total[b, t], first[b, t], second[b, t])


@_serial
def _moments_about(x: Any, resp: Any, centre: Any, stretches: int, weights: Any, means: Any, variances: Any) -> float:
    """λ, μ and σ² under ν from sums about a centre (B, K, D); the largest (μ - centre)²/σ², which tells what was lost."""
    batch, components, dim = centre.shape
    total = np.zeros((batch, stretches, components))
    first, second = np.zeros((batch, stretches, components, dim)), np.zeros((batch, stretches, components, dim))
    _moments_stretches(x, resp, centre, total, first, second)
    farthest = 0.0
    for b in range(batch):
        for k in range(components):
            mass = total[b, :, k].sum()
            weights[b, k] = mass / resp.shape[1]
            for d in range(dim):
                if mass == 0:
                    means[b, k, d] = variances[b, k, d] = 0
                    continue
                shift = first[b, :, k, d].sum() / mass
                variance = max(second[b, :, k, d].sum() / mass - shift * shift, 0.0)
                farthest = max(farthest, shift * shift / max(variance, 1e-30))
                means[b, k, d] = centre[b, k, d] + shift
                variances[b, k, d] = variance
    return farthest


@_serial
def moments(threads: int, x: Any, resp: Any, weights: Any, means: Any, variances: Any) -> None:
    """λ (B, K), μ and σ² (B, K, D) under given responsibilities (B, m, K)."""
    stretches = _stretches(threads, resp.shape[0], resp.shape[1])
    for b in range(means.shape[0]):
        for k in range(means.shape[1]):
            for d in range(means.shape[2]):
                means[b, k, d] = x.memory[b * x.step_b + d * x.step_d]
    if _moments_about(x, resp, means.copy(), stretches, weights, means, variances) > FAR:
        _moments_about(x, resp, means.copy(), stretches, weights, means, variances)


@_serial
def em_step(
    threads: int, x: Any, hard: bool, weights: Any, means: Any, variances: Any, floor: float, resp: Any, new_weights: Any,
    new_means: Any, new_variances: Any,
) -> None:  # fmt: skip
    """ν (B, m, K) under a mixture and λ, μ, σ² under that ν. ``hard`` gives all of a point to its likeliest component.

    The new mixture may be written over the old one.
    """
    batch, components, dim = means.shape
    stretches = _stretches(threads, batch, resp.shape[1])
    scale, log_norm = _densities(np.log(weights), variances, floor)
    total = np.zeros((batch, stretches, components))
    first, second = np.zeros((batch, stretches, components, dim)), np.zeros((batch, stretches, components, dim))
    _em_stretches(x, hard, means, scale, log_norm, resp, total, first, second)
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
                else:
                    shift /= mass
                    variance = max(square / mass - shift * shift, 0.0)
                    farthest = max(farthest, shift * shift / max(variance, 1e-30))
                    new_means[b, k, d] = means[b, k, d] + shift / scale[b, k, d]
                    new_variances[b, k, d] = variance / (scale[b, k, d] * scale[b, k, d])
    if farthest > FAR:  # the old means were no good centre, as after a start far from the points
        _moments_about(x, resp, new_means.copy(), stretches, new_weights, new_means, new_variances)


# --------------------------------------------------------------------------------------------------------------- fit


@_serial
def _remaining_stretch(rows: Any, b: int, index: Any, closest: Any, start: int, stop: int, out: Any) -> None:
    """The squared distance of each point to its nearest seed, if rows[index[c]] were one, into out (candidates, m)."""
    for i in range(start, stop):
        for c in range(out.shape[0]):
            q = rows.dtype.type(0)
            for d in range(rows.shape[2]):
                z = rows[b, i, d] - rows[b, index[c], d]
                q += z * z
            out[c, i] = min(closest[i], q)


@_parallel
def _remaining_stretches(rows: Any, b: int, index: Any, closest: Any, stretches: int, out: Any) -> None:
    points = rows.shape[1]
    for item in prange(stretches):
        t = np.int64(item)
        _remaining_stretch(rows, b, index, closest, points * t // stretches, points * (t + 1) // stretches, out)


@_serial
def _seed(rows: Any, b: int, uniforms: Any, candidates: int, stretches: int, centers: Any) -> None:
    """Greedy k-means++, as ``fit.seed``, of rows (B, m, D)."""
    points, dim, components = rows.shape[1], rows.shape[2], centers.shape[1]
    closest, index = np.full(points, np.inf), np.zeros(candidates, np.int64)
    remaining = np.empty((candidates, points))
    for k in range(components):
        count = candidates if k else 1
        for c in range(count):
            u = uniforms[b, 1 + (k - 1) * candidates + c if k else 0]
            index[c] = _draw(closest, u) if k else min(int(u * points), points - 1)
        if stretches > 1:
            _remaining_stretches(rows, b, index, closest, stretches, remaining[:count])
        else:
            _remaining_stretch(rows, b, index, closest, 0, points, remaining[:count])
        best, least = 0, np.inf
        for c in range(count):
            inertia = remaining[c].sum()
            if inertia < least:
                best, least = c, inertia
        for i in range(points):
            closest[i] = remaining[best, i]
        for d in range(dim):
            centers[b, k, d] = rows[b, index[best], d]


@_serial
def _draw(closest: Any, u: float) -> int:
    """The first point whose cumulative distance passes the share u of all; a point at distance 0 is never drawn."""
    target, cumulative = u * closest.sum(), 0.0
    for i in range(closest.shape[0]):
        cumulative += closest[i]
        if cumulative > target:
            return i
    return closest.shape[0] - 1


@_parallel
def _seed_mixtures(rows: Any, uniforms: Any, candidates: int, stretches: int, centers: Any) -> None:
    for b in prange(rows.shape[0]):
        _seed(rows, np.int64(b), uniforms, candidates, stretches, centers)


@_parallel
def _gather(x: Any, index: Any, stretches: int, out: Any) -> None:
    """The points with the given numbers into out (B, count, D)."""
    batch, count, step = x.batch, index.shape[0], np.uint64(x.step_d)
    for item in prange(batch * stretches):
        b, t = np.int64(item) // stretches, np.int64(item) % stretches
        for j in range(count * t // stretches, count * (t + 1) // stretches):
            place = _place(x, b, index[j])
            for d in range(x.dim):
                out[b, j, d] = x.memory[place + np.uint64(d) * step]


@_serial
def sample(threads: int, x: Any, draws: Any, out: Any) -> None:
    """``fit.sample_indices`` and ``fit.gather``: as many of the points as out (B, size, D) holds."""
    count, size = x.outer * x.inner, out.shape[1]
    begin = int(np.float64(draws[size]) * size * count) if count % size != 0 else 0
    one = draws.dtype.type
    index = np.empty(size, np.int64)
    for j in range(size):
        first = (j * count + begin) // size
        length = ((j + 1) * count + begin) // size - first
        place = first + min(int(draws[j] * one(length)), length - 1)
        index[j] = place if place < count else place - count
    _gather(x, index, _stretches(threads, x.batch, size), out)


@_serial
def _raise_to(variances: Any, floor: float) -> None:
    for b in range(variances.shape[0]):
        for k in range(variances.shape[1]):
            for d in range(variances.shape[2]):
                variances[b, k, d] = max(variances[b, k, d], floor)


@_serial
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


@_serial
def fit(
    threads: int, x: Any, uniforms: Any, lloyd_iters: int, em_iters: int, min_variance: float, min_weight: float,
    floor: float, weights: Any, means: Any, variances: Any,
) -> None:  # fmt: skip
    """k-means++, Lloyd's iterations and EM on points (B, m, 1, D) that lie row by row: λ (B, K), μ and σ² (B, K, D)."""
    batch, components, dim = means.shape
    stretches = _stretches(threads, batch, x.outer)
    candidates = (uniforms.shape[1] - 1) // max(components - 1, 1)  # of each round after the first seed
    centers, ones, flat = means.copy(), np.ones_like(means), np.ones_like(weights)
    rows = x.memory.reshape((batch, x.outer, dim))
    if stretches == 1:  # enough mixtures for all cores
        _seed_mixtures(rows, uniforms, candidates, stretches, centers)
    else:
        for b in range(batch):
            _seed(rows, b, uniforms, candidates, stretches, centers)
    resp = np.empty((batch, x.outer, components), means.dtype)
    hard = lloyd_iters >= 0  # always; but for a literal True numba would compile em_step a second time
    for step in range(lloyd_iters + 1):
        em_step(threads, x, hard, flat, centers, ones, floor, resp, weights, means, variances)
        if step < lloyd_iters:
            for b in range(batch):
                for k in range(components):
                    if weights[b, k] > 0:  # an empty cluster stays where it is
                        for d in range(dim):
                            centers[b, k, d] = means[b, k, d]
    _raise_to(variances, min_variance)
    em(threads, x, em_iters, min_variance, min_weight, floor, weights, means, variances)


@_serial
def em(
    threads: int,
    x: Any,
    iterations: int,
    min_variance: float,
    min_weight: float,
    floor: float,
    weights: Any,
    means: Any,
    variances: Any,
) -> None:
    """EM steps on points (B, m, 1, D), over the mixture that is given, and then the small components are dropped."""
    resp = np.empty((x.batch, x.outer, weights.shape[1]), means.dtype)
    hard = iterations < 0  # never; see fit
    for _ in range(iterations):
        em_step(threads, x, hard, weights, means, variances, floor, resp, weights, means, variances)
        _raise_to(variances, min_variance)
    _prune(weights, means, variances, min_weight)


# --------------------------------------------------------------------------------------------------------- transform


@_serial
def _act(z: Any, activation: int) -> Any:
    if activation == RELU:
        return z if z > 0 else 0 * z
    if activation == LEAKY_RELU:
        return z if z > 0 else 0.01 * z
    if activation == SILU:
        return z / (1 + math.exp(-z))
    return 0.5 * z * (1 + math.erf(z * SQRT_HALF))


@_serial
def _act_slope(z: Any, activation: int) -> float:
    if activation == RELU:
        return 1.0 if z > 0 else 0.0
    if activation == LEAKY_RELU:
        return 1.0 if z > 0 else 0.01
    if activation == SILU:
        sigmoid = 1 / (1 + math.exp(-z))
        return sigmoid * (1 + z * (1 - sigmoid))
    return 0.5 * (1 + math.erf(z * SQRT_HALF)) + z * math.exp(-0.5 * z * z) * 0.3989422804014327


@_serial
def _affine(
    inner: Any, means: Any, variances: Any, overall: Any, gamma: Any, beta: Any, within: Any, between: Any,
    deviation: Any, eps: float, in_statistics: bool, affine_inside: bool,
) -> Any:  # fmt: skip
    """x̂_k with γ and β as v · scale_k + v² · bend_k + offset_k, v = x - centre_k, and a shift behind the sum:
    ``reference.mix_components``.

    gamma and beta are (1, D), or (K, D) for each component, or empty; within, between and deviation (1, D) or empty, and if
    the first two are, overall is as well: μ and σ² of all points, (2·B, D). centre, scale and offset have rows by threes,
    and bend is empty where there is no deviation.
    """
    batch, components, dim = means.shape
    rows = (components + 2) // 3 * 3
    centre, scale = np.zeros((batch, rows, dim), means.dtype), np.zeros((batch, rows, dim), means.dtype)
    offset, shift = np.zeros((batch, rows, dim), means.dtype), np.zeros(dim, means.dtype)
    bend = np.zeros((batch, rows if deviation.size else 0, dim), means.dtype)
    one, zero = means.dtype.type(1), means.dtype.type(0)
    for b in range(batch):
        for k in range(components):
            for d in range(dim):
                weight = gamma[k % gamma.shape[0], d] if gamma.size else one
                bias = beta[k % beta.shape[0], d] if beta.size else zero
                if in_statistics:
                    centre[b, k, d] = means[b, k, d] + bias
                    scale[b, k, d] = 1 / math.sqrt(max(weight, zero) * variances[b, k, d] + eps)
                    continue
                centre[b, k, d] = means[b, k, d]
                slope = inner[b, k] / math.sqrt(variances[b, k, d] + eps)
                if overall.size:
                    of_all = 1 / math.sqrt(overall[2 * b + 1, d] + eps)
                    if within.size:
                        slope = within[0, d] * slope + (1 - within[0, d]) * of_all
                    if between.size:
                        offset[b, k, d] = weight * between[0, d] * (means[b, k, d] - overall[2 * b, d]) * of_all
                if deviation.size:
                    part = weight * deviation[0, d] * inner[b, k] * SQRT_HALF
                    bend[b, k, d] = part / (variances[b, k, d] + eps)
                    offset[b, k, d] -= part
                scale[b, k, d] = weight * slope
                if affine_inside:
                    offset[b, k, d] += bias
                else:
                    shift[d] = bias
    return centre, scale, offset, bend, shift


@_serial
def _mix_stretch(
    x: Any, b: int, start: int, stop: int, resp: Any, factor: Any, centre: Any, scale: Any, offset: Any, bend: Any,
    shift: Any, activation: int, y: Any,
) -> None:  # fmt: skip
    components, dim = factor.shape[1], x.dim
    tile, out = np.zeros((4, dim), scale.dtype), np.zeros((4, dim), scale.dtype)
    w = np.zeros((3, 4), scale.dtype)
    for i in range(start, stop, 4):
        count = _load(x, b, i, stop, tile)
        for d in range(dim):
            out[0, d] = out[1, d] = out[2, d] = out[3, d] = shift[d]
        for k in range(0, components, 3):
            w[:] = 0
            for j in range(min(3, components - k)):
                for p in range(count):
                    w[j, p] = resp[b, i + p, k + j] * factor[b, k + j]
            if activation == NONE and bend.size == 0:
                _add_three(tile, w, b, k, centre, scale, offset, out)
            else:
                for j in range(min(3, components - k)):
                    _add_component(tile, count, w[j], b, k + j, centre, scale, offset, bend, activation, out)
        _store(out, count, y, b, i)


@_inlined
def _add_three(tile: Any, w: Any, b: int, k: int, centre: Any, scale: Any, offset: Any, out: Any) -> None:
    """out += Σ w_j x̂_j of three components, for the points of a tile."""
    u0, u1, u2, u3 = w[0, 0], w[0, 1], w[0, 2], w[0, 3]
    v0, v1, v2, v3 = w[1, 0], w[1, 1], w[1, 2], w[1, 3]
    w0, w1, w2, w3 = w[2, 0], w[2, 1], w[2, 2], w[2, 3]
    for d in range(tile.shape[1]):
        c0, c1, c2 = centre[b, k, d], centre[b, k + 1, d], centre[b, k + 2, d]
        a0, a1, a2 = scale[b, k, d], scale[b, k + 1, d], scale[b, k + 2, d]
        o0, o1, o2 = offset[b, k, d], offset[b, k + 1, d], offset[b, k + 2, d]
        x0, x1, x2, x3 = tile[0, d], tile[1, d], tile[2, d], tile[3, d]
        out[0, d] += u0 * (a0 * (x0 - c0) + o0) + v0 * (a1 * (x0 - c1) + o1) + w0 * (a2 * (x0 - c2) + o2)
        out[1, d] += u1 * (a0 * (x1 - c0) + o0) + v1 * (a1 * (x1 - c1) + o1) + w1 * (a2 * (x1 - c2) + o2)
        out[2, d] += u2 * (a0 * (x2 - c0) + o0) + v2 * (a1 * (x2 - c1) + o1) + w2 * (a2 * (x2 - c2) + o2)
        out[3, d] += u3 * (a0 * (x3 - c0) + o0) + v3 * (a1 * (x3 - c1) + o1) + w3 * (a2 * (x3 - c2) + o2)


@_inlined
def _add_component(
    tile: Any, count: int, w: Any, b: int, k: int, centre: Any, scale: Any, offset: Any, bend: Any, activation: int, out: Any
) -> None:
    """out += w · act(x̂_k) for the points of a tile."""
    w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
    if w0 == 0 and w1 == 0 and w2 == 0 and w3 == 0:
        return
    if bend.size:
        for p in range(count):
            if w[p] != 0:
                for d in range(tile.shape[1]):
                    v = tile[p, d] - centre[b, k, d]
                    z = v * (scale[b, k, d] + v * bend[b, k, d]) + offset[b, k, d]
                    out[p, d] += w[p] * (z if activation == NONE else _act(z, activation))
        return
    if activation == NONE:
        for d in range(tile.shape[1]):
            c, a, o = centre[b, k, d], scale[b, k, d], offset[b, k, d]
            out[0, d] += w0 * (a * (tile[0, d] - c) + o)
            out[1, d] += w1 * (a * (tile[1, d] - c) + o)
            out[2, d] += w2 * (a * (tile[2, d] - c) + o)
            out[3, d] += w3 * (a * (tile[3, d] - c) + o)
        return
    if activation == RELU:
        zero = tile.dtype.type(0)
        for d in range(tile.shape[1]):
            c, a, o = centre[b, k, d], scale[b, k, d], offset[b, k, d]
            z0, z1 = (tile[0, d] - c) * a + o, (tile[1, d] - c) * a + o
            z2, z3 = (tile[2, d] - c) * a + o, (tile[3, d] - c) * a + o
            out[0, d] += w0 * (zero if z0 < 0 else z0)
            out[1, d] += w1 * (zero if z1 < 0 else z1)
            out[2, d] += w2 * (zero if z2 < 0 else z2)
            out[3, d] += w3 * (zero if z3 < 0 else z3)
        return
    for p in range(count):
        if w[p] != 0:
            for d in range(tile.shape[1]):
                z = (tile[p, d] - centre[b, k, d]) * scale[b, k, d] + offset[b, k, d]
                out[p, d] += w[p] * _act(z, activation)


@_parallel
def _mix_stretches(
    x: Any, resp: Any, factor: Any, centre: Any, scale: Any, offset: Any, bend: Any, shift: Any, activation: int,
    stretches: int, y: Any,
) -> None:  # fmt: skip
    batch, points = resp.shape[0], resp.shape[1]
    for item in prange(batch * stretches):
        b, t = np.int64(item) // stretches, np.int64(item) % stretches
        start, stop = points * t // stretches, points * (t + 1) // stretches
        _mix_stretch(x, b, start, stop, resp, factor, centre, scale, offset, bend, shift, activation, y)


@_serial
def factors(weights: Any, is_unit: bool, inside: bool, outer: Any, inner: Any) -> None:
    """a_k = 1/√λ_k, or 1 where ``is_unit``, and 0 for a component that is not in use: behind the activation, or inside."""
    for b in range(weights.shape[0]):
        for k in range(weights.shape[1]):
            a = 0.0 if weights[b, k] == 0 else 1.0 if is_unit else 1 / math.sqrt(weights[b, k])
            outer[b, k], inner[b, k] = (1.0, a) if inside else (a, 1.0)


@_serial
def mix(
    threads: int, x: Any, resp: Any, weights: Any, means: Any, variances: Any, overall: Any, gamma: Any, beta: Any,
    within: Any, between: Any, deviation: Any, is_unit: bool, inside: bool, eps: float, in_statistics: bool,
    affine_inside: bool, activation: int, y: Any,
) -> None:  # fmt: skip
    """y = Σ_k resp_k · a_k · act(x̂_k) with γ and β; resp is (B, m, K)."""
    outer, inner = np.empty_like(weights), np.empty_like(weights)
    factors(weights, is_unit, inside, outer, inner)
    centre, scale, offset, bend, shift = _affine(
        inner, means, variances, overall, gamma, beta, within, between, deviation, eps, in_statistics, affine_inside
    )
    stretches = _stretches(threads, resp.shape[0], resp.shape[1])
    _mix_stretches(x, resp, outer, centre, scale, offset, bend, shift, activation, stretches, y)


# ---------------------------------------------------------------------------------------------------------- gradient


@_serial
def _sums_stretch(
    x: Any, g: Any, b: int, start: int, stop: int, resp: Any, factor: Any, centre: Any, scale: Any, offset: Any, bend: Any,
    activation: int, of_scale: Any, of_z: Any, of_bend: Any, plain: Any,
) -> None:  # fmt: skip
    """Σ h_k v, Σ h_k, with a bend Σ h_k v², and Σ g over a stretch, with v = x - centre_k and h_k = g · w_k · act'(x̂_k)."""
    components, dim = factor.shape[1], x.dim
    tile, up = np.zeros((4, dim), scale.dtype), np.zeros((4, dim), scale.dtype)
    w = np.zeros(4, scale.dtype)
    s, h = np.zeros((components, dim), scale.dtype), np.zeros((components, dim), scale.dtype)
    q = np.zeros((components if bend.size else 0, dim), scale.dtype)
    total = np.zeros(dim, scale.dtype)
    for base in range(start, stop, FLUSH):
        for i in range(base, min(base + FLUSH, stop), 4):
            count = _load(x, b, i, stop, tile)
            _load(g, b, i, stop, up)
            for p in range(count, 4):
                for d in range(dim):
                    up[p, d] = 0
            for d in range(dim):
                total[d] += (up[0, d] + up[1, d]) + (up[2, d] + up[3, d])
            for k in range(components):
                for p in range(4):
                    w[p] = resp[b, i + p, k] * factor[b, k] if p < count else 0
                w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
                if w0 == 0 and w1 == 0 and w2 == 0 and w3 == 0:
                    continue
                if bend.size:
                    for p in range(count):
                        for d in range(dim):
                            v, through = tile[p, d] - centre[b, k, d], w[p] * up[p, d]
                            if activation != NONE:
                                z = v * (scale[b, k, d] + v * bend[b, k, d]) + offset[b, k, d]
                                through *= _act_slope(z, activation)
                            h[k, d] += through
                            s[k, d] += through * v
                            q[k, d] += through * v * v
                elif activation == NONE:
                    for d in range(dim):
                        c = centre[b, k, d]
                        h0, h1, h2, h3 = w0 * up[0, d], w1 * up[1, d], w2 * up[2, d], w3 * up[3, d]
                        h[k, d] += (h0 + h1) + (h2 + h3)
                        s[k, d] += (h0 * (tile[0, d] - c) + h1 * (tile[1, d] - c)) + (
                            h2 * (tile[2, d] - c) + h3 * (tile[3, d] - c)
                        )
                elif activation == RELU:
                    zero = scale.dtype.type(0)
                    for d in range(dim):
                        c, a, r = centre[b, k, d], scale[b, k, d], offset[b, k, d]
                        v0, v1, v2, v3 = tile[0, d] - c, tile[1, d] - c, tile[2, d] - c, tile[3, d] - c
                        h0 = w0 * up[0, d] if v0 * a + r > 0 else zero
                        h1 = w1 * up[1, d] if v1 * a + r > 0 else zero
                        h2 = w2 * up[2, d] if v2 * a + r > 0 else zero
                        h3 = w3 * up[3, d] if v3 * a + r > 0 else zero
                        h[k, d] += (h0 + h1) + (h2 + h3)
                        s[k, d] += (h0 * v0 + h1 * v1) + (h2 * v2 + h3 * v3)
                else:
                    for p in range(count):
                        for d in range(dim):
                            v = tile[p, d] - centre[b, k, d]
                            through = w[p] * up[p, d] * _act_slope(v * scale[b, k, d] + offset[b, k, d], activation)
                            h[k, d] += through
                            s[k, d] += through * v
        for d in range(dim):
            plain[d] += total[d]
            total[d] = 0
        for k in range(components):
            for d in range(dim):
                of_scale[k, d] += s[k, d]
                of_z[k, d] += h[k, d]
                s[k, d] = h[k, d] = 0
                if bend.size:
                    of_bend[k, d] += q[k, d]
                    q[k, d] = 0


@_parallel
def _sums_stretches(
    x: Any, g: Any, resp: Any, factor: Any, centre: Any, scale: Any, offset: Any, bend: Any, activation: int, of_scale: Any,
    of_z: Any, of_bend: Any, plain: Any,
) -> None:  # fmt: skip
    batch, points, stretches = resp.shape[0], resp.shape[1], of_scale.shape[1]
    for item in prange(batch * stretches):
        b, t = np.int64(item) // stretches, np.int64(item) % stretches
        _sums_stretch(
            x, g, b, points * t // stretches, points * (t + 1) // stretches, resp, factor, centre, scale, offset, bend,
            activation, of_scale[b, t], of_z[b, t], of_bend[b, t], plain[b, t],
        )  # fmt: skip


@_serial
def _points_stretch(
    x: Any, g: Any, b: int, start: int, stop: int, resp: Any, factor: Any, centre: Any, scale: Any, offset: Any, bend: Any,
    means: Any, slope: Any, intercept: Any, activation: int, grad: Any,
) -> None:  # fmt: skip
    """Σ_k w_k (g · act'(x̂_k) · (scale_k + 2 · v · bend_k) + (x - μ_k) · slope_k + intercept_k), with v = x - centre_k."""
    components, dim = factor.shape[1], x.dim
    tile, up, out = np.zeros((4, dim), scale.dtype), np.zeros((4, dim), scale.dtype), np.zeros((4, dim), scale.dtype)
    w = np.zeros(4, scale.dtype)
    for i in range(start, stop, 4):
        count = _load(x, b, i, stop, tile)
        _load(g, b, i, stop, up)
        out[:] = 0
        for k in range(components):
            for p in range(4):
                w[p] = resp[b, i + p, k] * factor[b, k] if p < count else 0
            w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
            if w0 == 0 and w1 == 0 and w2 == 0 and w3 == 0:
                continue
            if bend.size:
                for p in range(count):
                    for d in range(dim):
                        v, a, e = tile[p, d] - centre[b, k, d], scale[b, k, d], bend[b, k, d]
                        through = up[p, d] * (a + 2 * e * v)
                        if activation != NONE:
                            through *= _act_slope(v * (a + v * e) + offset[b, k, d], activation)
                        line = (tile[p, d] - means[b, k, d]) * slope[b, k, d] + intercept[b, k, d]
                        out[p, d] += w[p] * (through + line)
                continue
            if activation == NONE:
                for d in range(dim):
                    c, a, t, o = means[b, k, d], scale[b, k, d], slope[b, k, d], intercept[b, k, d]
                    out[0, d] += w0 * (up[0, d] * a + ((tile[0, d] - c) * t + o))
                    out[1, d] += w1 * (up[1, d] * a + ((tile[1, d] - c) * t + o))
                    out[2, d] += w2 * (up[2, d] * a + ((tile[2, d] - c) * t + o))
                    out[3, d] += w3 * (up[3, d] * a + ((tile[3, d] - c) * t + o))
                continue
            if activation == RELU:
                zero = scale.dtype.type(0)
                for d in range(dim):
                    c, a, r, t = centre[b, k, d], scale[b, k, d], offset[b, k, d], slope[b, k, d]
                    m, o = means[b, k, d], intercept[b, k, d]
                    g0 = up[0, d] * a if (tile[0, d] - c) * a + r > 0 else zero
                    g1 = up[1, d] * a if (tile[1, d] - c) * a + r > 0 else zero
                    g2 = up[2, d] * a if (tile[2, d] - c) * a + r > 0 else zero
                    g3 = up[3, d] * a if (tile[3, d] - c) * a + r > 0 else zero
                    out[0, d] += w0 * (g0 + ((tile[0, d] - m) * t + o))
                    out[1, d] += w1 * (g1 + ((tile[1, d] - m) * t + o))
                    out[2, d] += w2 * (g2 + ((tile[2, d] - m) * t + o))
                    out[3, d] += w3 * (g3 + ((tile[3, d] - m) * t + o))
                continue
            for p in range(count):
                if w[p] != 0:
                    for d in range(dim):
                        v = tile[p, d] - centre[b, k, d]
                        through = up[p, d] * scale[b, k, d]
                        through *= _act_slope(v * scale[b, k, d] + offset[b, k, d], activation)
                        line = (tile[p, d] - means[b, k, d]) * slope[b, k, d] + intercept[b, k, d]
                        out[p, d] += w[p] * (through + line)
        _store(out, count, grad, b, i)


@_parallel
def _points_stretches(
    x: Any, g: Any, resp: Any, factor: Any, centre: Any, scale: Any, offset: Any, bend: Any, means: Any, slope: Any,
    intercept: Any, activation: int, stretches: int, grad: Any,
) -> None:  # fmt: skip
    batch, points = resp.shape[0], resp.shape[1]
    for item in prange(batch * stretches):
        b, t = np.int64(item) // stretches, np.int64(item) % stretches
        _points_stretch(
            x, g, b, points * t // stretches, points * (t + 1) // stretches, resp, factor, centre, scale, offset, bend,
            means, slope, intercept, activation, grad,
        )  # fmt: skip


@_serial
def _chain(
    weights: Any, inner: Any, means: Any, variances: Any, overall: Any, gamma: Any, within: Any, between: Any,
    deviation: Any, eps: float, in_statistics: bool, affine_inside: bool, of_batch: bool, of_scale: Any, of_z: Any,
    of_bend: Any, plain: Any, grad_means: Any, grad_variances: Any, grad_gamma: Any, grad_beta: Any, grad_within: Any,
    grad_between: Any, grad_deviation: Any,
) -> None:  # fmt: skip
    """The gradients of μ, σ² and what is learned, from the sums: the derivative of ``_affine``, see docs/mathematics.md."""
    batch, components, dim = means.shape
    stretches = of_scale.shape[1]
    of_gamma, of_beta = np.zeros((components, dim)), np.zeros((components, dim))
    of_within, of_between, of_deviation = np.zeros(dim), np.zeros(dim), np.zeros(dim)
    for b in range(batch):
        for d in range(dim):
            root0 = 1 / math.sqrt(overall[2 * b + 1, d] + eps) if overall.size else 0.0
            mean0 = overall[2 * b, d] if overall.size else 0.0
            g = within[0, d] if within.size else 1.0
            place = between[0, d] if between.size else 0.0
            to_root0, to_mean0 = 0.0, 0.0
            for k in range(components):
                weight = gamma[k % gamma.shape[0], d] if gamma.size else 1.0
                scale_sum, z_sum = 0.0, 0.0
                for t in range(stretches):
                    scale_sum += of_scale[b, t, k, d]
                    z_sum += of_z[b, t, k, d]
                variance = variances[b, k, d]
                if in_statistics:
                    positive = max(weight, 0.0)
                    root = 1 / math.sqrt(positive * variance + eps)
                    of_square = -0.5 * root * root * root * scale_sum
                    grad_means[b, k, d] = -root * z_sum
                    grad_variances[b, k, d] = positive * of_square
                    of_gamma[k, d] += variance * of_square if weight >= 0 else 0.0
                    of_beta[k, d] -= root * z_sum
                    continue
                root, away = 1 / math.sqrt(variance + eps), means[b, k, d] - mean0
                own = inner[b, k] * root
                slope = g * own + (1 - g) * root0
                grad_means[b, k, d] = weight * (place * root0 - slope) * z_sum
                grad_variances[b, k, d] = -0.5 * weight * g * own * root * root * scale_sum
                of_gamma[k, d] += slope * scale_sum + place * away * root0 * z_sum
                of_within[d] += weight * (own - root0) * scale_sum
                of_between[d] += weight * away * root0 * z_sum
                to_root0 += weight * ((1 - g) * scale_sum + place * away * z_sum)
                to_mean0 -= weight * place * root0 * z_sum
                of_beta[k, d] += z_sum if affine_inside else 0.0
                if deviation.size:
                    bend_sum = 0.0
                    for t in range(stretches):
                        bend_sum += of_bend[b, t, k, d]
                    part, square = inner[b, k] * SQRT_HALF, root * root
                    beyond = part * (square * bend_sum - z_sum)
                    of_gamma[k, d] += deviation[0, d] * beyond
                    of_deviation[d] += weight * beyond
                    grad_means[b, k, d] -= 2 * weight * deviation[0, d] * part * square * scale_sum
                    grad_variances[b, k, d] -= weight * deviation[0, d] * part * square * square * bend_sum
            if not in_statistics and not affine_inside:
                for t in range(stretches):
                    of_beta[0, d] += plain[b, t, d]
            if overall.size and of_batch:  # μ = Σ λ_j μ_j, σ² = Σ λ_j (σ²_j + (μ_j - μ)²)
                to_variance0 = -0.5 * root0 * root0 * root0 * to_root0
                for k in range(components):
                    grad_means[b, k, d] += weights[b, k] * (2 * (means[b, k, d] - mean0) * to_variance0 + to_mean0)
                    grad_variances[b, k, d] += weights[b, k] * to_variance0
    _add_rows(of_gamma, grad_gamma)
    _add_rows(of_beta, grad_beta)
    for d in range(dim):
        if grad_within.size:
            grad_within[0, d] = of_within[d]
        if grad_between.size:
            grad_between[0, d] = of_between[d]
        if grad_deviation.size:
            grad_deviation[0, d] = of_deviation[d]


@_serial
def _add_rows(rows: Any, out: Any) -> None:
    """The rows for each component into out (K, D), or their sum into out (1, D); nothing where out is empty."""
    if out.size:
        out[:] = 0
        for k in range(rows.shape[0]):
            for d in range(rows.shape[1]):
                out[k % out.shape[0], d] += rows[k, d]


@_serial
def gradient_lines(
    threads: int, x: Any, g: Any, resp: Any, weights: Any, outer: Any, inner: Any, means: Any, variances: Any, overall: Any,
    gamma: Any, beta: Any, within: Any, between: Any, deviation: Any, eps: float, in_statistics: bool, affine_inside: bool,
    activation: int, of_batch: bool, lines: Any, grad_gamma: Any, grad_beta: Any, grad_within: Any, grad_between: Any,
    grad_deviation: Any,
) -> None:  # fmt: skip
    """The first half of the gradient of ``mix``: of what is learned, and lines (B, 2·K, D), what flows through μ and σ².

    ``of_batch``: these are the statistics of x under resp, and lines are ∂L/∂μ_k / (n_k · outer_k) and
    2·∂L/∂σ²_k / (n_k · outer_k). Otherwise they are constants, and lines are 0.
    """
    batch, components, dim = means.shape
    stretches = _stretches(threads, resp.shape[0], resp.shape[1])
    centre, scale, offset, bend, _ = _affine(
        inner, means, variances, overall, gamma, beta, within, between, deviation, eps, in_statistics, affine_inside
    )
    of_scale, of_z = np.zeros((batch, stretches, components, dim)), np.zeros((batch, stretches, components, dim))
    of_bend = np.zeros((batch, stretches, components if deviation.size else 0, dim))
    plain = np.zeros((batch, stretches, dim))
    _sums_stretches(x, g, resp, outer, centre, scale, offset, bend, activation, of_scale, of_z, of_bend, plain)
    grad_means, grad_variances = np.empty((batch, components, dim)), np.empty((batch, components, dim))
    _chain(
        weights, inner, means, variances, overall, gamma, within, between, deviation, eps, in_statistics, affine_inside,
        of_batch, of_scale, of_z, of_bend, plain, grad_means, grad_variances, grad_gamma, grad_beta, grad_within,
        grad_between, grad_deviation,
    )  # fmt: skip
    for b in range(batch):
        for k in range(components):
            # x enters μ_k and σ²_k with ν̂_k = ν_k / (λ_k m):  ∂μ_k = ν̂_k,  ∂σ²_k = 2 ν̂_k (x - μ_k).
            number = weights[b, k] * outer[b, k] * resp.shape[1]
            share = 1 / number if of_batch and number > 0 else 0.0
            for d in range(dim):
                lines[b, k, d] = grad_means[b, k, d] * share
                lines[b, components + k, d] = 2 * grad_variances[b, k, d] * share


@_serial
def gradient_points(
    threads: int, x: Any, g: Any, resp: Any, outer: Any, inner: Any, means: Any, variances: Any, overall: Any, gamma: Any,
    beta: Any, within: Any, between: Any, deviation: Any, eps: float, in_statistics: bool, affine_inside: bool,
    activation: int, lines: Any, grad: Any,
) -> None:  # fmt: skip
    """The second half: the gradient of x, from the lines."""
    centre, scale, offset, bend, _ = _affine(
        inner, means, variances, overall, gamma, beta, within, between, deviation, eps, in_statistics, affine_inside
    )
    # Not from the centre, from which β sets μ apart: a narrow component's slope is so large that the difference is lost.
    slope, intercept = np.zeros_like(scale), np.zeros_like(scale)
    for b in range(means.shape[0]):
        for k in range(means.shape[1]):
            for d in range(means.shape[2]):
                intercept[b, k, d], slope[b, k, d] = lines[b, k, d], lines[b, means.shape[1] + k, d]
    stretches = _stretches(threads, resp.shape[0], resp.shape[1])
    _points_stretches(x, g, resp, outer, centre, scale, offset, bend, means, slope, intercept, activation, stretches, grad)


# --------------------------------------------------------------------------------------------------------- inference


@_inlined
def _slot_posterior(
    tile: Any, count: int, b: int, first: int, group: int, log_norm: Any, means: Any, scale: Any, resp: Any, far: Any
) -> None:
    """The posterior of ``group`` components from ``first`` on, for the points of a tile: resp (4, group).

    far (4, 1 + group): in its first column their mean squared distance, E_ν[Σ_d z²]. The squares are of x - μ_k itself:
    about a common anchor, a component that is narrow beside its distance from the others would lose its digits.
    """
    half = tile.dtype.type(0.5)
    for j in range(group):
        k = first + j
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
        far[0, 1 + j], far[1, 1 + j], far[2, 1 + j], far[3, 1 + j] = q0, q1, q2, q3
        for p in range(4):
            resp[p, j] = log_norm[b, k] - half * far[p, 1 + j]
    for p in range(count):
        _posterior(resp, p)
        far[p, 0] = 0
        for j in range(group):
            if resp[p, j] != 0:
                far[p, 0] += resp[p, j] * far[p, 1 + j]


@_serial
def _trust(far: Any, farthest: float, tau: Any, total: Any, missing: Any, p: int) -> Any:
    """``reference.slot_trust`` of a point, and its part in what all slots are trusted, or not."""
    trust = total.dtype.type(1) if far <= farthest else total.dtype.type(farthest) / far
    total[p] += tau * trust
    missing[p] += tau * (1 - trust)
    return trust


@_serial
def _posteriors_stretch(
    x: Any, b: int, start: int, stop: int, group: int, slots: Any, farthest: float, log_norm: Any, means: Any,
    scale: Any, out: Any,
) -> None:  # fmt: skip
    tile, resp = np.zeros((4, x.dim), means.dtype), np.zeros((4, group), means.dtype)
    far = np.zeros((4, 1 + group), means.dtype)
    total, missing = np.zeros(4, means.dtype), np.zeros(4, means.dtype)
    for i in range(start, stop, 4):
        count = _load(x, b, i, stop, tile)
        total[:], missing[:] = 0, 0
        for first in range(0, means.shape[1], group):
            _slot_posterior(tile, count, b, first, group, log_norm, means, scale, resp, far)
            for p in range(count):
                trust = _trust(far[p, 0], farthest, slots[b, first // group], total, missing, p)
                for j in range(group):
                    out[i + p, first + j] = resp[p, j] * trust
        for p in range(count):
            if missing[p] > 0:
                for k in range(means.shape[1]):
                    out[i + p, k] /= total[p]


@_parallel
def _posteriors_stretches(
    x: Any, group: int, slots: Any, farthest: float, log_norm: Any, means: Any, scale: Any, stretches: int,
    out: Any,
) -> None:  # fmt: skip
    batch, points = out.shape[0], out.shape[1]
    for item in prange(batch * stretches):
        b, t = np.int64(item) // stretches, np.int64(item) % stretches
        start, stop = points * t // stretches, points * (t + 1) // stretches
        _posteriors_stretch(x, b, start, stop, group, slots, farthest, log_norm, means, scale, out[b])


@_serial
def posteriors(
    threads: int,
    x: Any,
    log_weights: Any,
    slots: Any,
    means: Any,
    variances: Any,
    floor: float,
    group: int,
    farthest: float,
    out: Any,
) -> None:
    """The posterior of each component among its ``group`` (K for the ensemble, else all T·K), into out (B, m, T·K).

    A slot that is farther than ``farthest`` from a point counts for less; ``slots`` (B, T·K / group) are their weights.
    """
    scale, log_norm = _densities(log_weights, variances, floor)
    stretches = _stretches(threads, out.shape[0], out.shape[1])
    _posteriors_stretches(x, group, slots, farthest, log_norm, means, scale, stretches, out)


@_serial
def _evaluate_stretch(
    x: Any, b: int, start: int, stop: int, group: int, slots: Any, farthest: float, log_norm: Any, means: Any,
    scale: Any, factor: Any, centre: Any, slope: Any, offset: Any, bend: Any, shift: Any, activation: int, y: Any,
) -> None:  # fmt: skip
    dim = x.dim
    tile, out = np.zeros((4, dim), means.dtype), np.zeros((4, dim), means.dtype)
    resp, w = np.zeros((4, group), means.dtype), np.zeros(4, means.dtype)
    far, trust = np.zeros((4, 1 + group), means.dtype), np.zeros(4, means.dtype)
    total, missing = np.zeros(4, means.dtype), np.zeros(4, means.dtype)
    for i in range(start, stop, 4):
        count = _load(x, b, i, stop, tile)
        out[:], total[:], missing[:] = 0, 0, 0
        for first in range(0, means.shape[1], group):
            in_use = False
            for j in range(group):
                in_use = in_use or factor[b, first + j] != 0
            if not in_use:
                continue
            _slot_posterior(tile, count, b, first, group, log_norm, means, scale, resp, far)
            for p in range(count):
                trust[p] = _trust(far[p, 0], farthest, slots[b, first // group], total, missing, p)
            for j in range(group):
                k = first + j
                for p in range(4):
                    w[p] = resp[p, j] * factor[b, k] * trust[p] if p < count else 0
                _add_component(tile, count, w, b, k, centre, slope, offset, bend, activation, out)
        for p in range(count):
            scaling = 1 / total[p] if missing[p] > 0 else out.dtype.type(1)
            for d in range(dim):
                out[p, d] = out[p, d] * scaling + shift[d]
        _store(out, count, y, b, i)


@_parallel
def _evaluate_stretches(
    x: Any, group: int, slots: Any, farthest: float, log_norm: Any, means: Any, scale: Any, factor: Any,
    centre: Any, slope: Any, offset: Any, bend: Any, shift: Any, activation: int, stretches: int, y: Any,
) -> None:  # fmt: skip
    batch, points = x.batch, x.outer * x.inner
    for item in prange(batch * stretches):
        b, t = np.int64(item) // stretches, np.int64(item) % stretches
        _evaluate_stretch(
            x, b, points * t // stretches, points * (t + 1) // stretches, group, slots, farthest, log_norm, means,
            scale, factor, centre, slope, offset, bend, shift, activation, y,
        )  # fmt: skip


@_serial
def evaluate(
    threads: int, x: Any, log_weights: Any, outer: Any, inner: Any, slots: Any, means: Any, variances: Any, overall: Any,
    gamma: Any, beta: Any, within: Any, between: Any, deviation: Any, eps: float, in_statistics: bool, affine_inside: bool,
    activation: int, floor: float, group: int, farthest: float, y: Any,
) -> None:  # fmt: skip
    """``posteriors`` and ``mix`` in one pass: y = Σ_k ν_k · outer_k · act(x̂_k) with γ and β, for T·K components."""
    scale, log_norm = _densities(log_weights, variances, floor)
    centre, slope, offset, bend, shift = _affine(
        inner, means, variances, overall, gamma, beta, within, between, deviation, eps, in_statistics, affine_inside
    )
    stretches = _stretches(threads, x.batch, x.outer * x.inner)
    _evaluate_stretches(
        x, group, slots, farthest, log_norm, means, scale, outer, centre, slope, offset, bend, shift, activation, stretches,
        y,
    )  # fmt: skip
