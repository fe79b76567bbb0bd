"""The transform of points under their responsibilities, as a compiled loop: a component is a line, or a parabola.

Where there is no activation and no deviation part, which are None then, the compiler does not see their code.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mixnorm.ops.numba.lanes import WIDTH, larger
from mixnorm.ops.numba.lanes import load as load_lanes
from mixnorm.ops.numba.lanes import store as store_lanes
from mixnorm.ops.numba.points import load, store
from mixnorm.ops.numba.threads import entry, inlined, parallel_for, serial, stretch, stretches_of

RELU, LEAKY_RELU, SILU, GELU = range(4)
SQRT_HALF = math.sqrt(0.5)


@serial
def act(z: Any, activation: int) -> Any:
    if activation == RELU:
        return z if z > 0 else 0 * z
    if activation == LEAKY_RELU:
        return z if z > 0 else 0.01 * z
    if activation == SILU:
        return z / (1 + math.exp(-z))
    return 0.5 * z * (1 + math.erf(z * SQRT_HALF))


@inlined
def activated(z: Any, activation: int, aside: Any) -> Any:
    """``act`` of lanes; where there is no instruction for it, of one number after the other."""
    if activation == RELU:
        return larger(z, 0.0)
    if activation == LEAKY_RELU:
        return larger(z, z * 0.01)
    store_lanes(aside, 0, z)
    for p in range(WIDTH):
        aside[p] = act(aside[p], activation)
    return load_lanes(aside, 0)


@serial
def act_slope(z: Any, activation: int) -> float:
    if activation == RELU:
        return 1.0 if z > 0 else 0.0
    if activation == LEAKY_RELU:
        return 1.0 if z > 0 else 0.01
    if activation == SILU:
        sigmoid = 1 / (1 + math.exp(-z))
        return sigmoid * (1 + z * (1 - sigmoid))
    return 0.5 * (1 + math.erf(z * SQRT_HALF)) + z * math.exp(-0.5 * z * z) * 0.3989422804014327


@entry
def affine(
    inner: Any, means: Any, variances: Any, overall: Any, gamma: Any, beta: Any, within: Any, between: Any,
    deviation: Any, eps: float, in_statistics: bool, affine_inside: bool,
) -> Any:  # fmt: skip
    """x̂_k with γ and β as v · scale_k + v² · bend_k + offset_k, v = x - centre_k, and a shift behind the sum:
    ``reference.mix_components``.

    gamma and beta are (1, D), or (K, D) for each component, or empty; within and between (1, D) or empty, and if they are
    not, overall is μ and σ² of all points, (2·B, D); deviation is (1, D) or None, and bend is as well. Behind those of
    the components, centre, scale and offset have two rows of zeros, so that three may be taken from any on.
    """
    batch, components, dim = means.shape
    rows = components + 2
    centre, scale = np.zeros((batch, rows, dim), means.dtype), np.zeros((batch, rows, dim), means.dtype)
    offset, shift = np.zeros((batch, rows, dim), means.dtype), np.zeros(dim, means.dtype)
    bend = None if deviation is None else np.zeros((batch, rows, dim), means.dtype)
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
                if deviation is not None:
                    part = weight * deviation[0, d] * inner[b, k] * SQRT_HALF
                    bend[b, k, d] = part / (variances[b, k, d] + eps)
                    offset[b, k, d] -= part
                scale[b, k, d] = weight * slope
                if affine_inside:
                    offset[b, k, d] += bias
                else:
                    shift[d] = bias
    return centre, scale, offset, bend, shift


@serial
def _mix_stretch(
    item: int, stretches: int, x: Any, resp: Any, factor: Any, centre: Any, scale: Any, offset: Any, bend: Any,
    activation: Any, shift: Any, y: Any,
) -> None:  # fmt: skip
    b, _, start, stop = stretch(item, stretches, resp.shape[1])
    components, dim = factor.shape[1], x.dim
    tile, out = np.zeros((4, dim), scale.dtype), np.zeros((4, dim), scale.dtype)
    w = np.zeros((3, 4), scale.dtype)
    for i in range(start, stop, 4):
        count = load(x, b, i, stop, tile)
        for d in range(dim):
            out[0, d] = out[1, d] = out[2, d] = out[3, d] = shift[d]
        for k in range(0, components, 3):
            w[:] = 0
            for j in range(min(3, components - k)):
                for p in range(count):
                    w[j, p] = resp[b, i + p, k + j] * factor[b, k + j]
            add_three(tile, count, w, b, k, centre, scale, offset, bend, activation, out)
        store(out, count, y, b, i)


@inlined
def add_three(
    tile: Any, count: int, w: Any, b: int, k: int, centre: Any, scale: Any, offset: Any, bend: Any, activation: Any, out: Any
) -> None:
    """out += Σ w_j · act(x̂_j) of three components, for the points of a tile; there may be fewer, whose w are 0."""
    if bend is not None or (activation is not None and activation != RELU):
        for j in range(3):
            _add_curve(tile, count, w[j], b, k + j, centre, scale, offset, bend, activation, out)
        return
    u0, u1, u2, u3 = w[0, 0], w[0, 1], w[0, 2], w[0, 3]
    v0, v1, v2, v3 = w[1, 0], w[1, 1], w[1, 2], w[1, 3]
    w0, w1, w2, w3 = w[2, 0], w[2, 1], w[2, 2], w[2, 3]
    # No weight is below 0.
    is_first, is_second, is_third = u0 + u1 + u2 + u3 != 0, v0 + v1 + v2 + v3 != 0, w0 + w1 + w2 + w3 != 0
    if is_first + is_second + is_third <= 1:  # as where modes are apart
        j = 1 if is_second else 2 if is_third else 0
        u0, u1, u2, u3 = w[j, 0], w[j, 1], w[j, 2], w[j, 3]
        for d in range(tile.shape[1]):
            c, a, o = centre[b, k + j, d], scale[b, k + j, d], offset[b, k + j, d]
            z0, z1 = a * (tile[0, d] - c) + o, a * (tile[1, d] - c) + o
            z2, z3 = a * (tile[2, d] - c) + o, a * (tile[3, d] - c) + o
            out[0, d] += u0 * (z0 if activation is None else relu(z0))
            out[1, d] += u1 * (z1 if activation is None else relu(z1))
            out[2, d] += u2 * (z2 if activation is None else relu(z2))
            out[3, d] += u3 * (z3 if activation is None else relu(z3))
        return
    for d in range(tile.shape[1]):
        c0, c1, c2 = centre[b, k, d], centre[b, k + 1, d], centre[b, k + 2, d]
        a0, a1, a2 = scale[b, k, d], scale[b, k + 1, d], scale[b, k + 2, d]
        o0, o1, o2 = offset[b, k, d], offset[b, k + 1, d], offset[b, k + 2, d]
        x0, x1, x2, x3 = tile[0, d], tile[1, d], tile[2, d], tile[3, d]
        if activation is None:
            out[0, d] += u0 * (a0 * (x0 - c0) + o0) + v0 * (a1 * (x0 - c1) + o1) + w0 * (a2 * (x0 - c2) + o2)
            out[1, d] += u1 * (a0 * (x1 - c0) + o0) + v1 * (a1 * (x1 - c1) + o1) + w1 * (a2 * (x1 - c2) + o2)
            out[2, d] += u2 * (a0 * (x2 - c0) + o0) + v2 * (a1 * (x2 - c1) + o1) + w2 * (a2 * (x2 - c2) + o2)
            out[3, d] += u3 * (a0 * (x3 - c0) + o0) + v3 * (a1 * (x3 - c1) + o1) + w3 * (a2 * (x3 - c2) + o2)
        else:
            out[0, d] += u0 * relu(a0 * (x0 - c0) + o0) + v0 * relu(a1 * (x0 - c1) + o1) + w0 * relu(a2 * (x0 - c2) + o2)
            out[1, d] += u1 * relu(a0 * (x1 - c0) + o0) + v1 * relu(a1 * (x1 - c1) + o1) + w1 * relu(a2 * (x1 - c2) + o2)
            out[2, d] += u2 * relu(a0 * (x2 - c0) + o0) + v2 * relu(a1 * (x2 - c1) + o1) + w2 * relu(a2 * (x2 - c2) + o2)
            out[3, d] += u3 * relu(a0 * (x3 - c0) + o0) + v3 * relu(a1 * (x3 - c1) + o1) + w3 * relu(a2 * (x3 - c2) + o2)


@inlined
def relu(z: Any) -> Any:
    """max(z, 0), which is NaN where z is."""
    return type(z)(0) if z < 0 else z


@serial
def _add_curve(
    tile: Any, count: int, w: Any, b: int, k: int, centre: Any, scale: Any, offset: Any, bend: Any, activation: Any, out: Any
) -> None:
    for p in range(count):
        if w[p] != 0:
            for d in range(tile.shape[1]):
                v = tile[p, d] - centre[b, k, d]
                slope = scale[b, k, d] if bend is None else scale[b, k, d] + v * bend[b, k, d]
                z = v * slope + offset[b, k, d]
                out[p, d] += w[p] * (z if activation is None else act(z, activation))


@entry
def factors(weights: Any, is_unit: bool, inside: bool) -> Any:
    """a_k = 1/√λ_k, or 1 where ``is_unit``, and 0 for a component that is not in use: behind the activation, and inside."""
    outer, inner = np.ones_like(weights), np.ones_like(weights)
    for b in range(weights.shape[0]):
        for k in range(weights.shape[1]):
            a = 0.0 if weights[b, k] == 0 else 1.0 if is_unit else 1 / math.sqrt(weights[b, k])
            if inside:
                inner[b, k] = a
            else:
                outer[b, k] = a
    return outer, inner


@entry
def mix(
    threads: int, x: Any, resp: Any, outer: Any, centre: Any, scale: Any, offset: Any, bend: Any, activation: Any,
    shift: Any, y: Any,
) -> None:  # fmt: skip
    """y = Σ_k resp_k · outer_k · act(x̂_k) with γ and β; resp is (B, m, K)."""
    stretches = stretches_of(threads, resp.shape[0], resp.shape[1])
    given = stretches, x, resp, outer, centre, scale, offset, bend, activation, shift, y
    parallel_for(x.batch * stretches, _mix_stretch, given)
