"""The gradient of the transform, as compiled loops: sums over the points, what follows from them, and that of each point."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mixnorm.ops.numba.em import TILES
from mixnorm.ops.numba.lanes import WIDTH, has_any, load, store, total, wide
from mixnorm.ops.numba.points import load_tile, load_weights, store_tile
from mixnorm.ops.numba.threads import entry, parallel_for, serial, stretch, stretches_of
from mixnorm.ops.numba.transform import BEND, CENTRE, OFFSET, SCALE, SQRT_HALF, in_use, slope_of, table_of_lines


@serial
def _sums_stretch(
    item: int, x: Any, g: Any, resp: Any, factor: Any, centre: Any, scale: Any, offset: Any, bend: Any, activation: Any,
    of_scale: Any, of_z: Any, of_bend: Any, plain: Any,
) -> None:  # fmt: skip
    """Σ h_k v, Σ h_k, with a bend Σ h_k v², and Σ g over a stretch, with v = x - centre_k and h_k = g · w_k · act'(x̂_k)."""
    b, t, start, stop = stretch(item, of_scale.shape[1], resp.shape[1])
    components, dim, zero = factor.shape[1], x.dim, scale.dtype.type(0)
    of_tile, of_weights = WIDTH * dim, WIDTH * components
    table = table_of_lines(b, centre, scale, offset, bend, components)
    places, aside = np.empty(WIDTH, np.int64), np.empty(WIDTH, scale.dtype)
    tiles, ups = np.empty(TILES * of_tile, scale.dtype), np.empty(TILES * of_tile, scale.dtype)
    weights, used = np.empty(TILES * of_weights, scale.dtype), np.empty(components, np.int64)
    for base in range(start, stop, TILES * WIDTH):
        here = 0
        for i in range(base, min(base + TILES * WIDTH, stop), WIDTH):
            count = load_tile(x, b, i, stop, places, tiles, here * of_tile)
            load_tile(g, b, i, stop, places, ups, here * of_tile)
            load_weights(resp, b, i, count, weights, here * of_weights)
            for d in range(dim if count < WIDTH else 0):
                for p in range(count, WIDTH):
                    ups[here * of_tile + WIDTH * d + p] = 0
            here += 1
        number = 0
        for k in range(components):
            mass = wide(zero)
            for n in range(here):
                w = load(weights, n * of_weights + WIDTH * k) * factor[b, k]
                store(weights, n * of_weights + WIDTH * k, w)
                mass = mass + w
            if has_any(mass):
                used[number] = k
                number += 1
        for d in range(dim):
            sum_of_g = wide(zero)
            for n in range(here):
                sum_of_g = sum_of_g + load(ups, n * of_tile + WIDTH * d)
            plain[b, t, d] += total(sum_of_g)
            for k in used[:number]:
                h, s, q = wide(zero), wide(zero), wide(zero)
                for n in range(here):
                    v = load(tiles, n * of_tile + WIDTH * d) - table[d, k, CENTRE]
                    through = load(ups, n * of_tile + WIDTH * d) * load(weights, n * of_weights + WIDTH * k)
                    if activation is not None:
                        slope = wide(table[d, k, SCALE]) if bend is None else v * table[d, k, BEND] + table[d, k, SCALE]
                        through = through * slope_of(v * slope + table[d, k, OFFSET], activation, aside)
                    h, s = h + through, s + through * v
                    if bend is not None:
                        q = q + through * v * v
                of_z[b, t, k, d] += total(h)
                of_scale[b, t, k, d] += total(s)
                if bend is not None:
                    of_bend[b, t, k, d] += total(q)


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
    components, dim, zero = factor.shape[1], x.dim, scale.dtype.type(0)
    table = table_of_lines(b, centre, scale, offset, bend, components)
    flows = np.empty((dim, components, 3), scale.dtype)
    for k in range(components):
        for d in range(dim):
            flows[d, k, 0], flows[d, k, 1], flows[d, k, 2] = means[b, k, d], lines[b, components + k, d], lines[b, k, d]
    places, used, aside = np.empty(WIDTH, np.int64), np.empty(components, np.int64), np.empty(WIDTH, scale.dtype)
    tile, up = np.empty(WIDTH * dim, scale.dtype), np.empty(WIDTH * dim, scale.dtype)
    weights = np.empty(WIDTH * components, scale.dtype)
    for i in range(start, stop, WIDTH):
        count = load_tile(x, b, i, stop, places, tile, 0)
        load_tile(g, b, i, stop, places, up, 0)
        load_weights(resp, b, i, count, weights, 0)
        number = in_use(weights, b, factor, used)
        for d in range(dim):
            u, above, out = load(tile, WIDTH * d), load(up, WIDTH * d), wide(zero)
            for n in range(number):
                k, through = used[n], above
                v = u - table[d, k, CENTRE]
                if bend is None:
                    through = above * table[d, k, SCALE]
                    if activation is not None:
                        through = through * slope_of(v * table[d, k, SCALE] + table[d, k, OFFSET], activation, aside)
                else:
                    bent = v * table[d, k, BEND]
                    through = above * (bent + bent + table[d, k, SCALE])
                    if activation is not None:
                        z = v * (bent + table[d, k, SCALE]) + table[d, k, OFFSET]
                        through = through * slope_of(z, activation, aside)
                through = (u - flows[d, k, 0]) * flows[d, k, 1] + (through + flows[d, k, 2])
                out = out + through * load(weights, WIDTH * n)
            store(tile, WIDTH * d, out)
        store_tile(tile, count, grad, b, i, places)


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
    of_within, of_between, of_deviation = np.zeros((3, dim))
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
                # Not a product with 0: one point that is not finite would take the gradient of all the others.
                lines[b, k, d] = grad_means[b, k, d] * share if share else 0.0
                lines[b, components + k, d] = 2 * grad_variances[b, k, d] * share if share else 0.0


@entry
def gradient_points(
    threads: int, x: Any, g: Any, resp: Any, outer: Any, centre: Any, scale: Any, offset: Any, bend: Any, activation: Any,
    means: Any, lines: Any, grad: Any,
) -> None:  # fmt: skip
    """The second half: the gradient of x, from the lines."""
    stretches = stretches_of(threads, resp.shape[0], resp.shape[1])
    given = stretches, x, g, resp, outer, centre, scale, offset, bend, means, lines, activation, grad
    parallel_for(x.batch * stretches, _points_stretch, given)
