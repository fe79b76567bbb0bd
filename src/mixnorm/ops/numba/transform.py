"""The transform of points under their responsibilities, as a compiled loop: a component is a line, or a parabola.

Where there is no activation and no deviation part, which are None then, the compiler does not see their code.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from mixnorm.ops.numba.lanes import WIDTH, exp, has_any, larger, load, smaller, store, where, wide
from mixnorm.ops.numba.points import load_tile, load_weights, store_tile
from mixnorm.ops.numba.threads import entry, inlined, parallel_for, serial, stretch, stretches_of

SILU, GELU = range(2)
CENTRE, SCALE, OFFSET, BEND = range(4)  # what a table of lines has of each channel and component
SQRT_HALF = math.sqrt(0.5)


@serial
def _gelu(z: Any) -> Any:
    return 0.5 * z * (1 + math.erf(z * SQRT_HALF))


@serial
def _gelu_slope(z: Any) -> float:
    return 0.5 * (1 + math.erf(z * SQRT_HALF)) + z * math.exp(-0.5 * z * z) * 0.3989422804014327


@inlined
def _sigmoid(z: Any) -> Any:
    small = exp(smaller(z, 0.0 - z))
    return where(z, 1.0, small) / (1.0 + small)


@serial
def _curve(z: Any, activation: int, aside: Any) -> Any:
    if activation == SILU:
        return z * _sigmoid(z)
    store(aside, 0, z)
    for p in range(WIDTH):
        aside[p] = _gelu(aside[p])
    return load(aside, 0)


@serial
def _curve_slope(z: Any, activation: int, aside: Any) -> Any:
    if activation == SILU:
        share = _sigmoid(z)
        return share * (1.0 + z * (1.0 - share))
    store(aside, 0, z)
    for p in range(WIDTH):
        aside[p] = _gelu_slope(aside[p])
    return load(aside, 0)


def activated(z: Any, activation: Any, aside: Any) -> Any:
    """act(z) of lanes: ReLU is True, leaky ReLU its slope below 0, a float; an int is a curve, SILU or GELU.

    Each type is compiled by itself, and code for the others is not. ``aside`` has room for lanes.
    """
    raise NotImplementedError  # for numba alone


@overload(activated, strict=False)  # which would compare annotations, too
def _activated(z: Any, activation: Any, aside: Any) -> Any:
    if isinstance(activation, types.Boolean):
        return lambda z, activation, aside: larger(z, 0.0)
    if isinstance(activation, types.Float):
        return lambda z, activation, aside: larger(z, z * activation)
    return lambda z, activation, aside: _curve(z, activation, aside)


def slope_of(z: Any, activation: Any, aside: Any) -> Any:
    """act'(z) of lanes, likewise."""
    raise NotImplementedError


@overload(slope_of, strict=False)
def _slope_of(z: Any, activation: Any, aside: Any) -> Any:
    if isinstance(activation, types.Boolean):
        return lambda z, activation, aside: where(z, 1.0, 0.0)
    if isinstance(activation, types.Float):
        return lambda z, activation, aside: where(z, 1.0, activation)
    return lambda z, activation, aside: _curve_slope(z, activation, aside)


@entry
def affine(
    inner: Any, means: Any, variances: Any, overall: Any, gamma: Any, beta: Any, within: Any, between: Any,
    deviation: Any, eps: float, in_statistics: bool, affine_inside: bool,
) -> Any:  # fmt: skip
    """x̂_k with γ and β as v · scale_k + v² · bend_k + offset_k, v = x - centre_k, and a shift behind the sum:
    ``reference.mix_components``.

    gamma and beta are (1, D), or (K, D) for each component, or empty; within and between (1, D) or empty, and if they are
    not, overall is μ and σ² of all points, (2·B, D); deviation is (1, D) or None, and bend is as well.
    """
    batch, components, dim = means.shape
    centre, scale, offset = np.empty_like(means), np.empty_like(means), np.empty_like(means)
    bend, shift = None if deviation is None else np.empty_like(means), np.empty(dim, means.dtype)
    offset[:], shift[:] = 0, 0
    if bend is not None:
        bend[:] = 0
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


@inlined
def table_of_lines(b: int, centre: Any, scale: Any, offset: Any, bend: Any, components: int) -> Any:
    """What ``affine`` found of a mixture, (D, K, 3 or 4), as the loops come to it."""
    dim = centre.shape[2]
    table = np.empty((dim, components, 3 if bend is None else 4), centre.dtype)
    for k in range(components):
        for d in range(dim):
            table[d, k, CENTRE], table[d, k, SCALE], table[d, k, OFFSET] = centre[b, k, d], scale[b, k, d], offset[b, k, d]
            if bend is not None:
                table[d, k, BEND] = bend[b, k, d]
    return table


@inlined
def normalized(v: Any, table: Any, d: int, k: int, bend: Any, activation: Any, aside: Any) -> Any:
    """act(x̂_k) of a channel, with γ and β."""
    v = v - table[d, k, CENTRE]
    if bend is not None:
        z = v * (v * table[d, k, BEND] + table[d, k, SCALE]) + table[d, k, OFFSET]
    else:
        z = v * table[d, k, SCALE] + table[d, k, OFFSET]
    return z if activation is None else activated(z, activation, aside)


@inlined
def in_use(weights: Any, b: int, factor: Any, used: Any) -> int:
    """The components that a point of the tile belongs to: their numbers, and weights times factors, moved to the front."""
    number = 0
    for k in range(factor.shape[1]):
        w = load(weights, WIDTH * k) * factor[b, k]
        if has_any(w):
            store(weights, WIDTH * number, w)
            used[number] = k
            number += 1
    return number


@inlined
def mix_tile(
    tile: Any, weights: Any, used: Any, number: int, table: Any, bend: Any, activation: Any, aside: Any, scaling: Any,
    shift: Any,
) -> None:  # fmt: skip
    """x = scaling · Σ_k w_k · act(x̂_k) + shift for the points of a tile, in place."""
    dim, zero = table.shape[0], table.dtype.type(0)
    for d in range(0, dim, 2):  # two at a time, which share the weights
        e = min(d + 1, dim - 1)
        v0, v1, z0, z1 = load(tile, WIDTH * d), load(tile, WIDTH * e), wide(zero), wide(zero)
        for n in range(number):
            k, w = used[n], load(weights, WIDTH * n)
            z0 = z0 + normalized(v0, table, d, k, bend, activation, aside) * w
            z1 = z1 + normalized(v1, table, e, k, bend, activation, aside) * w
        store(tile, WIDTH * d, z0 * scaling + shift[d])
        store(tile, WIDTH * e, z1 * scaling + shift[e])


@serial
def _mix_stretch(
    item: int, stretches: int, x: Any, resp: Any, factor: Any, centre: Any, scale: Any, offset: Any, bend: Any,
    activation: Any, shift: Any, y: Any,
) -> None:  # fmt: skip
    b, _, start, stop = stretch(item, stretches, resp.shape[1])
    components = factor.shape[1]
    table = table_of_lines(b, centre, scale, offset, bend, components)
    places, tile = np.empty(WIDTH, np.int64), np.empty(WIDTH * x.dim, scale.dtype)
    weights, used = np.empty(WIDTH * components, scale.dtype), np.empty(components, np.int64)
    aside = np.empty(WIDTH, scale.dtype)
    for i in range(start, stop, WIDTH):
        count = load_tile(x, b, i, stop, places, tile, 0)
        load_weights(resp, b, i, count, weights, 0)
        number = in_use(weights, b, factor, used)
        mix_tile(tile, weights, used, number, table, bend, activation, aside, scale.dtype.type(1), shift)
        store_tile(tile, count, y, b, i, places)


@entry
def factors(weights: Any, is_unit: bool, inside: bool) -> Any:
    """a_k = 1/√λ_k, or 1 where ``is_unit``, and 0 for a component that is not in use: behind the activation, and inside."""
    outer, inner = np.empty_like(weights), np.empty_like(weights)
    for b in range(weights.shape[0]):
        for k in range(weights.shape[1]):
            a = 0.0 if weights[b, k] == 0 else 1.0 if is_unit else 1 / math.sqrt(weights[b, k])
            outer[b, k], inner[b, k] = (1.0, a) if inside else (a, 1.0)
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
