"""The gradient of the transform, as compiled loops: sums over the points, what follows from them, and that of each point."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mixnorm.ops.numba.em import FLUSH
from mixnorm.ops.numba.points import load, store
from mixnorm.ops.numba.threads import entry, parallel_for, serial, stretch, stretches_of
from mixnorm.ops.numba.transform import RELU, SQRT_HALF, act_slope


@serial
def _sums_stretch(
    item: int, x: Any, g: Any, resp: Any, factor: Any, centre: Any, scale: Any, offset: Any, bend: Any, activation: Any,
    of_scale: Any, of_z: Any, of_bend: Any, plain: Any,
) -> None:  # fmt: skip
    """Σ h_k v, Σ h_k, with a bend Σ h_k v², and Σ g over a stretch, with v = x - centre_k and h_k = g · w_k · act'(x̂_k)."""
    b, t, start, stop = stretch(item, of_scale.shape[1], resp.shape[1])
    components, dim = factor.shape[1], x.dim
    tile, up = np.zeros((4, dim), scale.dtype), np.zeros((4, dim), scale.dtype)
    w = np.zeros(4, scale.dtype)
    s, h = np.zeros((components, dim), scale.dtype), np.zeros((components, dim), scale.dtype)
    q = None if bend is None else np.zeros((components, dim), scale.dtype)
    total = np.zeros(dim, scale.dtype)
    for base in range(start, stop, FLUSH):
        for i in range(base, min(base + FLUSH, stop), 4):
            count = load(x, b, i, stop, tile)
            load(g, b, i, stop, up)
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
                if bend is None and activation is None:
                    for d in range(dim):
                        c = centre[b, k, d]
                        h0, h1, h2, h3 = w0 * up[0, d], w1 * up[1, d], w2 * up[2, d], w3 * up[3, d]
                        h[k, d] += (h0 + h1) + (h2 + h3)
                        s[k, d] += (h0 * (tile[0, d] - c) + h1 * (tile[1, d] - c)) + (
                            h2 * (tile[2, d] - c) + h3 * (tile[3, d] - c)
                        )
                elif bend is None and activation == RELU:
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
                            v, through = tile[p, d] - centre[b, k, d], w[p] * up[p, d]
                            if activation is not None:
                                slope = scale[b, k, d] if bend is None else scale[b, k, d] + v * bend[b, k, d]
                                through *= act_slope(v * slope + offset[b, k, d], activation)
                            h[k, d] += through
                            s[k, d] += through * v
                            if bend is not None:
                                q[k, d] += through * v * v
        for d in range(dim):
            plain[b, t, d] += total[d]
            total[d] = 0
        for k in range(components):
            for d in range(dim):
                of_scale[b, t, k, d] += s[k, d]
                of_z[b, t, k, d] += h[k, d]
                s[k, d] = h[k, d] = 0
                if bend is not None:
                    of_bend[b, t, k, d] += q[k, d]
                    q[k, d] = 0


@serial
def _points_stretch(
    item: int, stretches: int, x: Any, g: Any, resp: Any, factor: Any, centre: Any, scale: Any, offset: Any, bend: Any,
    means: Any, lines: Any, activation: Any, grad: Any,
) -> None:  # fmt: skip
    """Σ_k w_k (g · act'(x̂_k) · (scale_k + 2 · v · bend_k) + line_k), with v = x - centre_k.

    line_k = (x - μ_k) · lines_(K + k) + lines_k is not about the centre, from which β sets μ apart: a narrow component's
    slope is so large that the difference would be lost.
    """
    b, _, start, stop = stretch(item, stretches, resp.shape[1])
    components, dim = factor.shape[1], x.dim
    tile, up, out = np.zeros((4, dim), scale.dtype), np.zeros((4, dim), scale.dtype), np.zeros((4, dim), scale.dtype)
    w = np.zeros(4, scale.dtype)
    for i in range(start, stop, 4):
        count = load(x, b, i, stop, tile)
        load(g, b, i, stop, up)
        out[:] = 0
        for k in range(components):
            for p in range(4):
                w[p] = resp[b, i + p, k] * factor[b, k] if p < count else 0
            w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
            if w0 == 0 and w1 == 0 and w2 == 0 and w3 == 0:
                continue
            if bend is None and activation is None:
                for d in range(dim):
                    c, a, t, o = means[b, k, d], scale[b, k, d], lines[b, components + k, d], lines[b, k, d]
                    out[0, d] += w0 * (up[0, d] * a + ((tile[0, d] - c) * t + o))
                    out[1, d] += w1 * (up[1, d] * a + ((tile[1, d] - c) * t + o))
                    out[2, d] += w2 * (up[2, d] * a + ((tile[2, d] - c) * t + o))
                    out[3, d] += w3 * (up[3, d] * a + ((tile[3, d] - c) * t + o))
            elif bend is None and activation == RELU:
                zero = scale.dtype.type(0)
                for d in range(dim):
                    c, a, r, t = centre[b, k, d], scale[b, k, d], offset[b, k, d], lines[b, components + k, d]
                    m, o = means[b, k, d], lines[b, k, d]
                    g0 = up[0, d] * a if (tile[0, d] - c) * a + r > 0 else zero
                    g1 = up[1, d] * a if (tile[1, d] - c) * a + r > 0 else zero
                    g2 = up[2, d] * a if (tile[2, d] - c) * a + r > 0 else zero
                    g3 = up[3, d] * a if (tile[3, d] - c) * a + r > 0 else zero
                    out[0, d] += w0 * (g0 + ((tile[0, d] - m) * t + o))
                    out[1, d] += w1 * (g1 + ((tile[1, d] - m) * t + o))
                    out[2, d] += w2 * (g2 + ((tile[2, d] - m) * t + o))
                    out[3, d] += w3 * (g3 + ((tile[3, d] - m) * t + o))
            else:
                for p in range(count):
                    if w[p] != 0:
                        for d in range(dim):
                            v, a = tile[p, d] - centre[b, k, d], scale[b, k, d]
                            e = scale.dtype.type(0) if bend is None else bend[b, k, d]
                            through = up[p, d] * (a + 2 * e * v)
                            if activation is not None:
                                through *= act_slope(v * (a + v * e) + offset[b, k, d], activation)
                            line = (tile[p, d] - means[b, k, d]) * lines[b, components + k, d] + lines[b, k, d]
                            out[p, d] += w[p] * (through + line)
        store(out, count, grad, b, i)


@serial
def _chain(
    weights: Any, inner: Any, means: Any, variances: Any, overall: Any, gamma: Any, within: Any, between: Any,
    deviation: Any, eps: float, in_statistics: bool, affine_inside: bool, of_batch: bool, of_scale: Any, of_z: Any,
    of_bend: Any, plain: Any, grad_means: Any, grad_variances: Any, grad_gamma: Any, grad_beta: Any, grad_within: Any,
    grad_between: Any, grad_deviation: Any,
) -> None:  # fmt: skip
    """The gradients of μ, σ² and what is learned, from the sums: the derivative of ``affine``, see docs/mathematics.md."""
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
                if deviation is not None:
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
        if grad_deviation is not None:
            grad_deviation[0, d] = of_deviation[d]


@serial
def _add_rows(rows: Any, out: Any) -> None:
    """The rows for each component into out (K, D), or their sum into out (1, D); nothing where out is empty."""
    if out.size:
        out[:] = 0
        for k in range(rows.shape[0]):
            for d in range(rows.shape[1]):
                out[k % out.shape[0], d] += rows[k, d]


@entry
def gradient_lines(
    threads: int, x: Any, g: Any, resp: Any, outer: Any, centre: Any, scale: Any, offset: Any, bend: Any, activation: Any,
    weights: Any, inner: Any, means: Any, variances: Any, overall: Any, gamma: Any, within: Any, between: Any,
    deviation: Any, eps: float, in_statistics: bool, affine_inside: bool, of_batch: bool, lines: Any, grad_gamma: Any,
    grad_beta: Any, grad_within: Any, grad_between: Any, grad_deviation: Any,
) -> None:  # fmt: skip
    """The first half of the gradient of ``mix``: of what is learned, and lines (B, 2·K, D), what flows through μ and σ².

    ``of_batch``: these are the statistics of x under resp, and lines are ∂L/∂μ_k / (n_k · outer_k) and
    2·∂L/∂σ²_k / (n_k · outer_k). Otherwise they are constants, and lines are 0.
    """
    batch, components, dim = means.shape
    stretches = stretches_of(threads, resp.shape[0], resp.shape[1])
    of_scale, of_z = np.zeros((batch, stretches, components, dim)), np.zeros((batch, stretches, components, dim))
    of_bend = None if bend is None else np.zeros((batch, stretches, components, dim))
    plain = np.zeros((batch, stretches, dim))
    given = x, g, resp, outer, centre, scale, offset, bend, activation, of_scale, of_z, of_bend, plain
    parallel_for(batch * stretches, _sums_stretch, given)
    grad_means, grad_variances = np.zeros((batch, components, dim)), np.zeros((batch, components, dim))
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


@entry
def gradient_points(
    threads: int, x: Any, g: Any, resp: Any, outer: Any, centre: Any, scale: Any, offset: Any, bend: Any, activation: Any,
    means: Any, lines: Any, grad: Any,
) -> None:  # fmt: skip
    """The second half: the gradient of x, from the lines."""
    stretches = stretches_of(threads, resp.shape[0], resp.shape[1])
    given = stretches, x, g, resp, outer, centre, scale, offset, bend, means, lines, activation, grad
    parallel_for(x.batch * stretches, _points_stretch, given)
