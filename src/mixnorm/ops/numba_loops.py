"""Compiled CPU loops: the fit, the EM step, the transform and its gradient, each as one call.

Points are ``x[b, o, i, :]`` of an array (B, outer, inner, D) with any strides, numbered o · inner + i. The points of a
mixture are cut into stretches, which run on all cores. Sums are taken over a few points in the working precision and then
added up in fp64, so that their error does not grow with the batch. The inner loops take four points, or three components
("rows by threes", padded with zeros), at a time: with one, most of the work would be loading and storing. Where their
weights are all 0, as most responsibilities are, they are skipped. Elements are indexed one by one, because a view costs as
much as a short row.

All of it is in one file, because numba's cache notices changes to a function's own file only.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

FLUSH = 64  # points whose sums are added up before they go into the fp64 ones
# Sums may be reordered, which lets them be vectorized; NaN and Inf keep their meaning.
_serial = njit(fastmath={"reassoc", "contract", "arcp", "nsz"}, nogil=True, cache=True, error_model="numpy")
_parallel = njit(parallel=True, nogil=True, cache=True, error_model="numpy")

FAR = 1e3  # (mean - centre)² / variance above which a variance about that centre has lost digits

NONE, RELU, LEAKY_RELU, SILU, GELU = range(5)


@_serial
def _stretches(threads: int, batch: int, count: int) -> int:
    """Into how many stretches the points of each mixture are cut, so that every thread has work."""
    return min(count, (threads + batch - 1) // batch)


# ---------------------------------------------------------------------------------------------------------------- EM


@_serial
def _load(x: Any, b: int, first: int, stop: int, tile: Any) -> int:
    """tile[p] = x for the four points from ``first`` on, or for as many as there are; how many."""
    inner = x.shape[2]
    count = min(4, stop - first)
    for p in range(count):
        o = (first + p) // inner
        i = first + p - o * inner
        for d in range(x.shape[3]):
            tile[p, d] = x[b, o, i, d]
    return count


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
    components, dim = log_norm.shape[1], x.shape[3]
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
    components, dim = centre.shape[1], x.shape[3]
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
                means[b, k, d] = x[b, 0, 0, d]
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
def _remaining_stretch(x: Any, b: int, index: Any, closest: Any, start: int, stop: int, out: Any) -> None:
    """The squared distance of each point to its nearest seed, if x[index[c]] were one, into out (candidates, m)."""
    for i in range(start, stop):
        for c in range(out.shape[0]):
            q = x.dtype.type(0)
            for d in range(x.shape[3]):
                z = x[b, i, 0, d] - x[b, index[c], 0, d]
                q += z * z
            out[c, i] = min(closest[i], q)


@_parallel
def _remaining_stretches(x: Any, b: int, index: Any, closest: Any, stretches: int, out: Any) -> None:
    points = x.shape[1]
    for item in prange(stretches):
        t = np.int64(item)
        _remaining_stretch(x, b, index, closest, points * t // stretches, points * (t + 1) // stretches, out)


@_serial
def _seed(x: Any, b: int, uniforms: Any, candidates: int, stretches: int, centers: Any) -> None:
    """Greedy k-means++, as ``fit.seed``: x is (B, m, 1, D)."""
    points, dim, components = x.shape[1], x.shape[3], centers.shape[1]
    closest, index = np.full(points, np.inf), np.zeros(candidates, np.int64)
    remaining = np.empty((candidates, points))
    for k in range(components):
        count = candidates if k else 1
        for c in range(count):
            u = uniforms[b, 1 + (k - 1) * candidates + c if k else 0]
            index[c] = _draw(closest, u) if k else min(int(u * points), points - 1)
        if stretches > 1:
            _remaining_stretches(x, b, index, closest, stretches, remaining[:count])
        else:
            _remaining_stretch(x, b, index, closest, 0, points, remaining[:count])
        best, least = 0, np.inf
        for c in range(count):
            inertia = remaining[c].sum()
            if inertia < least:
                best, least = c, inertia
        for i in range(points):
            closest[i] = remaining[best, i]
        for d in range(dim):
            centers[b, k, d] = x[b, index[best], 0, d]


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
def _seed_mixtures(x: Any, uniforms: Any, candidates: int, stretches: int, centers: Any) -> None:
    for b in prange(x.shape[0]):
        _seed(x, np.int64(b), uniforms, candidates, stretches, centers)


@_parallel
def _gather(x: Any, index: Any, stretches: int, out: Any) -> None:
    """The points with the given numbers into out (B, count, 1, D)."""
    batch, inner, count = x.shape[0], x.shape[2], index.shape[0]
    for item in prange(batch * stretches):
        b, t = np.int64(item) // stretches, np.int64(item) % stretches
        for j in range(count * t // stretches, count * (t + 1) // stretches):
            o = index[j] // inner
            i = index[j] - o * inner
            for d in range(x.shape[3]):
                out[b, j, 0, d] = x[b, o, i, d]


@_serial
def sample(threads: int, x: Any, draws: Any, out: Any) -> None:
    """``fit.sample_indices`` and ``fit.gather``: as many of the points as out (B, size, 1, D) holds."""
    count, size = x.shape[1] * x.shape[2], out.shape[1]
    begin = int(np.float64(draws[size]) * size * count) if count % size != 0 else 0
    one = draws.dtype.type
    index = np.empty(size, np.int64)
    for j in range(size):
        first = (j * count + begin) // size
        length = ((j + 1) * count + begin) // size - first
        place = first + min(int(draws[j] * one(length)), length - 1)
        index[j] = place if place < count else place - count
    _gather(x, index, _stretches(threads, x.shape[0], size), out)


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
    """k-means++, Lloyd's iterations and EM on points (B, m, 1, D), into weights (B, K), means and variances (B, K, D)."""
    batch, components, dim = means.shape
    stretches = _stretches(threads, batch, x.shape[1])
    candidates = (uniforms.shape[1] - 1) // max(components - 1, 1)  # of each round after the first seed
    centers, ones, flat = means.copy(), np.ones_like(means), np.ones_like(weights)
    if stretches == 1:  # enough mixtures for all cores
        _seed_mixtures(x, uniforms, candidates, stretches, centers)
    else:
        for b in range(batch):
            _seed(x, b, uniforms, candidates, stretches, centers)
    resp = np.empty((batch, x.shape[1], components), x.dtype)
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
    resp = np.empty((x.shape[0], x.shape[1], weights.shape[1]), x.dtype)
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
    return 0.5 * z * (1 + math.erf(z * 0.7071067811865476))


@_serial
def _act_slope(z: Any, activation: int) -> float:
    if activation == RELU:
        return 1.0 if z > 0 else 0.0
    if activation == LEAKY_RELU:
        return 1.0 if z > 0 else 0.01
    if activation == SILU:
        sigmoid = 1 / (1 + math.exp(-z))
        return sigmoid * (1 + z * (1 - sigmoid))
    return 0.5 * (1 + math.erf(z * 0.7071067811865476)) + z * math.exp(-0.5 * z * z) * 0.3989422804014327


@_serial
def _affine(means: Any, variances: Any, gamma: Any, beta: Any, eps: float, in_statistics: bool) -> Any:
    """x̂_k with γ and β as (x - centre_k) · scale_k, and a shift: inside the activation, or behind the sum without one.

    gamma and beta are empty where there are none. centre and scale have rows by threes.
    """
    batch, components, dim = means.shape
    rows = (components + 2) // 3 * 3
    centre, scale = np.zeros((batch, rows, dim), means.dtype), np.zeros((batch, rows, dim), means.dtype)
    shift = np.zeros(dim, means.dtype)
    for d in range(dim):
        weight = gamma[d] if gamma.size else means.dtype.type(1)
        bias = beta[d] if beta.size else means.dtype.type(0)
        for b in range(batch):
            for k in range(components):
                if in_statistics:
                    centre[b, k, d] = means[b, k, d] + bias
                    scale[b, k, d] = 1 / math.sqrt(max(weight, means.dtype.type(0)) * variances[b, k, d] + eps)
                else:
                    centre[b, k, d] = means[b, k, d]
                    scale[b, k, d] = weight / math.sqrt(variances[b, k, d] + eps)
        if not in_statistics:
            shift[d] = bias
    return centre, scale, shift


@_serial
def _mix_stretch(
    x: Any, b: int, start: int, stop: int, resp: Any, factor: Any, centre: Any, scale: Any, shift: Any, activation: int,
    y: Any,
) -> None:  # fmt: skip
    components, dim, inner = factor.shape[1], x.shape[3], x.shape[2]
    w = np.zeros(scale.shape[1], scale.dtype)
    for point in range(start, stop):
        o = point // inner
        i = point - o * inner
        for k in range(components):
            w[k] = resp[b, point, k] * factor[b, k]
        if activation != NONE:
            for d in range(dim):
                y[b, o, i, d] = 0
            for k in range(components):
                if w[k] != 0:
                    for d in range(dim):
                        z = (x[b, o, i, d] - centre[b, k, d]) * scale[b, k, d] + shift[d]
                        y[b, o, i, d] += w[k] * _act(z, activation)
            continue
        for k in range(0, components, 3):
            w0, w1, w2 = w[k], w[k + 1], w[k + 2]
            if k and w0 == 0 and w1 == 0 and w2 == 0:
                continue
            for d in range(dim):
                v = x[b, o, i, d]
                part = w0 * scale[b, k, d] * (v - centre[b, k, d])
                part += w1 * scale[b, k + 1, d] * (v - centre[b, k + 1, d])
                part += w2 * scale[b, k + 2, d] * (v - centre[b, k + 2, d])
                y[b, o, i, d] = part + (y[b, o, i, d] if k else shift[d])


@_parallel
def _mix_stretches(
    x: Any, resp: Any, factor: Any, centre: Any, scale: Any, shift: Any, activation: int, stretches: int, y: Any
) -> None:
    batch, points = resp.shape[0], resp.shape[1]
    for item in prange(batch * stretches):
        b, t = np.int64(item) // stretches, np.int64(item) % stretches
        start, stop = points * t // stretches, points * (t + 1) // stretches
        _mix_stretch(x, b, start, stop, resp, factor, centre, scale, shift, activation, y)


@_serial
def _inverse_sqrt(weights: Any) -> Any:
    """1/√λ, and 0 for a component that is not in use."""
    result = np.zeros_like(weights)
    for b in range(weights.shape[0]):
        for k in range(weights.shape[1]):
            if weights[b, k] != 0:
                result[b, k] = 1 / math.sqrt(weights[b, k])
    return result


@_serial
def inverse_sqrt(weights: Any, out: Any) -> None:
    """``_inverse_sqrt`` into out."""
    out[:] = _inverse_sqrt(weights)


@_serial
def mix(
    threads: int, x: Any, resp: Any, weights: Any, means: Any, variances: Any, gamma: Any, beta: Any, eps: float,
    in_statistics: bool, activation: int, y: Any,
) -> None:  # fmt: skip
    """y = Σ_k resp_k/√λ_k · act(x̂_k) with γ and β; resp is (B, m, K), gamma and beta are (D,) or empty."""
    centre, scale, shift = _affine(means, variances, gamma, beta, eps, in_statistics)
    stretches = _stretches(threads, resp.shape[0], resp.shape[1])
    _mix_stretches(x, resp, _inverse_sqrt(weights), centre, scale, shift, activation, stretches, y)


# ---------------------------------------------------------------------------------------------------------- gradient


@_serial
def _sums_stretch(
    x: Any, g: Any, b: int, start: int, stop: int, resp: Any, factor: Any, centre: Any, scale: Any, shift: Any,
    activation: int, of_scale: Any, of_z: Any, plain: Any,
) -> None:  # fmt: skip
    """Σ h_k (x - centre_k), Σ h_k and Σ g over a stretch, with h_k = g · w_k · act'(x̂_k)."""
    components, dim = factor.shape[1], x.shape[3]
    tile, up = np.zeros((4, dim), scale.dtype), np.zeros((4, dim), scale.dtype)
    w = np.zeros(4, scale.dtype)
    s, h = np.zeros((components, dim), scale.dtype), np.zeros((components, dim), scale.dtype)
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
                if activation == NONE:
                    for d in range(dim):
                        c = centre[b, k, d]
                        h0, h1, h2, h3 = w0 * up[0, d], w1 * up[1, d], w2 * up[2, d], w3 * up[3, d]
                        h[k, d] += (h0 + h1) + (h2 + h3)
                        s[k, d] += (h0 * (tile[0, d] - c) + h1 * (tile[1, d] - c)) + (
                            h2 * (tile[2, d] - c) + h3 * (tile[3, d] - c)
                        )
                else:
                    for p in range(count):
                        for d in range(dim):
                            v = tile[p, d] - centre[b, k, d]
                            through = w[p] * up[p, d] * _act_slope(v * scale[b, k, d] + shift[d], activation)
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


@_parallel
def _sums_stretches(
    x: Any, g: Any, resp: Any, factor: Any, centre: Any, scale: Any, shift: Any, activation: int, of_scale: Any, of_z: Any,
    plain: Any,
) -> None:  # fmt: skip
    batch, points, stretches = resp.shape[0], resp.shape[1], of_scale.shape[1]
    for item in prange(batch * stretches):
        b, t = np.int64(item) // stretches, np.int64(item) % stretches
        _sums_stretch(
            x, g, b, points * t // stretches, points * (t + 1) // stretches, resp, factor, centre, scale, shift, activation,
            of_scale[b, t], of_z[b, t], plain[b, t],
        )  # fmt: skip


@_serial
def _points_stretch(
    x: Any, g: Any, b: int, start: int, stop: int, resp: Any, factor: Any, centre: Any, scale: Any, shift: Any, means: Any,
    slope: Any, intercept: Any, activation: int, grad: Any,
) -> None:  # fmt: skip
    """Σ_k w_k (g · act'(x̂_k) · scale_k + (x - μ_k) · slope_k + intercept_k)."""
    components, dim, inner = factor.shape[1], x.shape[3], x.shape[2]
    w = np.zeros(scale.shape[1], scale.dtype)
    for point in range(start, stop):
        o = point // inner
        i = point - o * inner
        for k in range(components):
            w[k] = resp[b, point, k] * factor[b, k]
        if activation != NONE:
            for d in range(dim):
                grad[b, o, i, d] = 0
            for k in range(components):
                if w[k] != 0:
                    for d in range(dim):
                        v = x[b, o, i, d] - centre[b, k, d]
                        through = g[b, o, i, d] * scale[b, k, d] * _act_slope(v * scale[b, k, d] + shift[d], activation)
                        line = (x[b, o, i, d] - means[b, k, d]) * slope[b, k, d] + intercept[b, k, d]
                        grad[b, o, i, d] += w[k] * (through + line)
            continue
        for k in range(0, components, 3):
            w0, w1, w2 = w[k], w[k + 1], w[k + 2]
            if k and w0 == 0 and w1 == 0 and w2 == 0:
                continue
            for d in range(dim):
                v = x[b, o, i, d]
                of_g = w0 * scale[b, k, d] + w1 * scale[b, k + 1, d] + w2 * scale[b, k + 2, d]
                part = w0 * ((v - means[b, k, d]) * slope[b, k, d] + intercept[b, k, d])
                part += w1 * ((v - means[b, k + 1, d]) * slope[b, k + 1, d] + intercept[b, k + 1, d])
                part += w2 * ((v - means[b, k + 2, d]) * slope[b, k + 2, d] + intercept[b, k + 2, d])
                before = grad[b, o, i, d] if k else scale.dtype.type(0)
                grad[b, o, i, d] = before + (g[b, o, i, d] * of_g + part)


@_parallel
def _points_stretches(
    x: Any, g: Any, resp: Any, factor: Any, centre: Any, scale: Any, shift: Any, means: Any, slope: Any, intercept: Any,
    activation: int, stretches: int, grad: Any,
) -> None:  # fmt: skip
    batch, points = resp.shape[0], resp.shape[1]
    for item in prange(batch * stretches):
        b, t = np.int64(item) // stretches, np.int64(item) % stretches
        _points_stretch(
            x, g, b, points * t // stretches, points * (t + 1) // stretches, resp, factor, centre, scale, shift, means,
            slope, intercept, activation, grad,
        )  # fmt: skip


@_serial
def _chain(
    variances: Any, gamma: Any, beta: Any, eps: float, in_statistics: bool, activation: int, of_scale: Any, of_z: Any,
    plain: Any, grad_means: Any, grad_variances: Any, grad_gamma: Any, grad_beta: Any,
) -> None:  # fmt: skip
    """The gradients of μ, σ², γ and β from the sums: the derivative of ``_affine``."""
    batch, components, dim = variances.shape
    stretches = of_scale.shape[1]
    for d in range(dim):
        weight = gamma[d] if gamma.size else 1.0
        to_gamma, to_beta = 0.0, 0.0
        for b in range(batch):
            for k in range(components):
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
                    to_gamma += variance * of_square if weight >= 0 else 0.0
                    to_beta -= root * z_sum
                else:
                    root = 1 / math.sqrt(variance + eps)
                    grad_means[b, k, d] = -weight * root * z_sum
                    grad_variances[b, k, d] = -0.5 * weight * root * root * root * scale_sum
                    to_gamma += root * scale_sum
                    to_beta += z_sum if activation != NONE else 0.0
            if not in_statistics and activation == NONE:
                for t in range(stretches):
                    to_beta += plain[b, t, d]
        if gamma.size:
            grad_gamma[d] = to_gamma
        if beta.size:
            grad_beta[d] = to_beta


@_serial
def gradient_lines(
    threads: int, x: Any, g: Any, resp: Any, factor: Any, means: Any, variances: Any, gamma: Any, beta: Any, eps: float,
    in_statistics: bool, activation: int, of_batch: bool, lines: Any, grad_gamma: Any, grad_beta: Any,
) -> None:  # fmt: skip
    """The first half of the gradient of ``mix``: of γ and β, and lines (B, 2, K, D), what flows through μ and σ².

    ``of_batch``: these are the statistics of x under resp, with factor_k = 1/√λ_k, and lines are √λ_k times ∂L/∂μ_k / n_k
    and 2·∂L/∂σ²_k / n_k. Otherwise they are constants, and lines are 0.
    """
    batch, components, dim = means.shape
    stretches = _stretches(threads, resp.shape[0], resp.shape[1])
    centre, scale, shift = _affine(means, variances, gamma, beta, eps, in_statistics)
    of_scale, of_z = np.zeros((batch, stretches, components, dim)), np.zeros((batch, stretches, components, dim))
    plain = np.zeros((batch, stretches, dim))
    _sums_stretches(x, g, resp, factor, centre, scale, shift, activation, of_scale, of_z, plain)
    grad_means, grad_variances = np.empty((batch, components, dim)), np.empty((batch, components, dim))
    _chain(
        variances, gamma, beta, eps, in_statistics, activation, of_scale, of_z, plain, grad_means, grad_variances,
        grad_gamma, grad_beta,
    )  # fmt: skip
    for b in range(batch):
        for k in range(components):
            # x enters μ_k and σ²_k with ν̂_k = ν_k / (λ_k m):  ∂μ_k = ν̂_k,  ∂σ²_k = 2 ν̂_k (x - μ_k).
            share = factor[b, k] / resp.shape[1] if of_batch else 0.0
            for d in range(dim):
                lines[b, 0, k, d] = grad_means[b, k, d] * share
                lines[b, 1, k, d] = 2 * grad_variances[b, k, d] * share


@_serial
def gradient_points(
    threads: int, x: Any, g: Any, resp: Any, factor: Any, means: Any, variances: Any, gamma: Any, beta: Any, eps: float,
    in_statistics: bool, activation: int, lines: Any, grad: Any,
) -> None:  # fmt: skip
    """The second half: the gradient of x, from the lines."""
    centre, scale, shift = _affine(means, variances, gamma, beta, eps, in_statistics)
    # Not from the centre, from which β sets μ apart: a narrow component's slope is so large that the difference is lost.
    rows, slope, intercept = np.zeros_like(scale), np.zeros_like(scale), np.zeros_like(scale)
    for b in range(means.shape[0]):
        for k in range(means.shape[1]):
            for d in range(means.shape[2]):
                rows[b, k, d] = means[b, k, d]
                intercept[b, k, d], slope[b, k, d] = lines[b, 0, k, d], lines[b, 1, k, d]
    stretches = _stretches(threads, resp.shape[0], resp.shape[1])
    _points_stretches(x, g, resp, factor, centre, scale, shift, rows, slope, intercept, activation, stretches, grad)


# --------------------------------------------------------------------------------------------------------- inference


@_serial
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
    tile, resp = np.zeros((4, x.shape[3]), means.dtype), np.zeros((4, group), means.dtype)
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
    scale: Any, factor: Any, centre: Any, slope: Any, shift: Any, activation: int, y: Any,
) -> None:  # fmt: skip
    inner, dim = x.shape[2], x.shape[3]
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
                w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
                if w0 == 0 and w1 == 0 and w2 == 0 and w3 == 0:
                    continue
                if activation == NONE:
                    for d in range(dim):
                        out[0, d] += w0 * slope[b, k, d] * (tile[0, d] - centre[b, k, d])
                        out[1, d] += w1 * slope[b, k, d] * (tile[1, d] - centre[b, k, d])
                        out[2, d] += w2 * slope[b, k, d] * (tile[2, d] - centre[b, k, d])
                        out[3, d] += w3 * slope[b, k, d] * (tile[3, d] - centre[b, k, d])
                else:
                    for p in range(count):
                        if w[p] != 0:
                            for d in range(dim):
                                z = (tile[p, d] - centre[b, k, d]) * slope[b, k, d] + shift[d]
                                out[p, d] += w[p] * _act(z, activation)
        for p in range(count):
            o = (i + p) // inner
            at = i + p - o * inner
            scaling = 1 / total[p] if missing[p] > 0 else out.dtype.type(1)
            for d in range(dim):
                y[b, o, at, d] = out[p, d] * scaling + (shift[d] if activation == NONE else 0)


@_parallel
def _evaluate_stretches(
    x: Any, group: int, slots: Any, farthest: float, log_norm: Any, means: Any, scale: Any, factor: Any,
    centre: Any, slope: Any, shift: Any, activation: int, stretches: int, y: Any,
) -> None:  # fmt: skip
    batch, points = x.shape[0], x.shape[1] * x.shape[2]
    for item in prange(batch * stretches):
        b, t = np.int64(item) // stretches, np.int64(item) % stretches
        _evaluate_stretch(
            x, b, points * t // stretches, points * (t + 1) // stretches, group, slots, farthest, log_norm, means,
            scale, factor, centre, slope, shift, activation, y,
        )  # fmt: skip


@_serial
def evaluate(
    threads: int, x: Any, log_weights: Any, factor: Any, slots: Any, means: Any, variances: Any, gamma: Any, beta: Any,
    eps: float, in_statistics: bool, activation: int, floor: float, group: int, farthest: float, y: Any,
) -> None:  # fmt: skip
    """``posteriors`` and ``mix`` in one pass: y = Σ_k ν_k · factor_k · act(x̂_k) with γ and β, for T·K components."""
    scale, log_norm = _densities(log_weights, variances, floor)
    centre, slope, shift = _affine(means, variances, gamma, beta, eps, in_statistics)
    stretches = _stretches(threads, x.shape[0], x.shape[1] * x.shape[2])
    _evaluate_stretches(
        x, group, slots, farthest, log_norm, means, scale, factor, centre, slope, shift, activation, stretches, y
    )
