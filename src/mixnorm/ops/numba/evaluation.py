"""Evaluation under T mixtures in one pass over the points, and the posteriors alone, as compiled loops."""

from __future__ import annotations

from typing import Any

import numpy as np

from mixnorm.ops.numba.em import densities
from mixnorm.ops.numba.lanes import WIDTH, exp, has_any, larger, load, smaller, store, where, wide
from mixnorm.ops.numba.points import load_lanes, store_lanes
from mixnorm.ops.numba.threads import entry, inlined, parallel_for, serial, stretch, stretches_of
from mixnorm.ops.numba.transform import activated


MEAN, INVERSE, CENTRE, SCALE, OFFSET, BEND = range(6)  # what the table of a mixture has of each channel and component


@inlined
def _squared_distances(tile: Any, table: Any, first: int, group: int, out: Any) -> None:
    """Σ_d ((x - μ_k) / σ_k)² of ``group`` components from ``first`` on, three of them at a time.

    The squares are of x - μ_k itself: about a common anchor, a component that is narrow beside its distance from the others
    would lose its digits.
    """
    last, zero = first + group - 1, table.dtype.type(0)
    for j in range(0, group, 3):
        k0, k1, k2 = first + j, min(first + j + 1, last), min(first + j + 2, last)
        q0, q1, q2 = wide(zero), wide(zero), wide(zero)
        for d in range(table.shape[0]):
            v = load(tile, WIDTH * d)
            z0 = (v - table[d, k0, MEAN]) * table[d, k0, INVERSE]
            z1 = (v - table[d, k1, MEAN]) * table[d, k1, INVERSE]
            z2 = (v - table[d, k2, MEAN]) * table[d, k2, INVERSE]
            q0, q1, q2 = q0 + z0 * z0, q1 + z1 * z1, q2 + z2 * z2
        store(out, WIDTH * (k0 - first), q0)
        store(out, WIDTH * (k1 - first), q1)
        store(out, WIDTH * (k2 - first), q2)


@inlined
def _slot_posterior(b: int, first: int, group: int, log_norm: Any, far: Any, resp: Any) -> Any:
    """The posterior of the components of a slot from their squared distances, and the mean of these, E_ν[Σ_d z²]."""
    top = log_norm[b, first] - load(far, 0) * 0.5
    for j in range(1, group):
        top = larger(top, log_norm[b, first + j] - load(far, WIDTH * j) * 0.5)
    total = wide(far.dtype.type(0))
    for j in range(group):
        part = exp(log_norm[b, first + j] - load(far, WIDTH * j) * 0.5 - top)
        store(resp, WIDTH * j, part)
        total = total + part
    mean = wide(far.dtype.type(0))
    for j in range(group):
        share = load(resp, WIDTH * j) / total
        store(resp, WIDTH * j, share)
        mean = mean + where(share, share * load(far, WIDTH * j), 0.0)  # which may be infinite
    return mean


@serial
def _posteriors_stretch(
    item: int, stretches: int, x: Any, group: int, slots: Any, farthest: float, log_norm: Any, means: Any, scale: Any,
    out: Any,
) -> None:  # fmt: skip
    b, _, start, stop = stretch(item, stretches, out.shape[1])
    components, zero = means.shape[1], means.dtype.type(0)
    table = np.empty((x.dim, components, 2), means.dtype)
    for k in range(components):
        for d in range(x.dim):
            table[d, k, MEAN], table[d, k, INVERSE] = means[b, k, d], scale[b, k, d]
    places, tile = np.empty(WIDTH, np.int64), np.empty(WIDTH * x.dim, means.dtype)
    far, resp = np.empty(WIDTH * group, means.dtype), np.empty(WIDTH * group, means.dtype)
    found = np.empty(WIDTH * components, means.dtype)
    for i in range(start, stop, WIDTH):
        count = load_lanes(x, b, i, stop, places, tile)
        total, missing = wide(zero), wide(zero)
        for first in range(0, components, group):
            _squared_distances(tile, table, first, group, far)
            mean = _slot_posterior(b, first, group, log_norm, far, resp)
            trust, tau = smaller(1.0, farthest / mean), slots[b, first // group]
            total, missing = total + trust * tau, missing + (1.0 - trust) * tau
            for j in range(group):
                store(found, WIDTH * (first + j), load(resp, WIDTH * j) * trust)
        scaling = where(missing, 1.0 / total, 1.0)
        for k in range(components):
            store(found, WIDTH * k, load(found, WIDTH * k) * scaling)
        for p in range(count):
            for k in range(components):
                out[b, i + p, k] = found[WIDTH * k + p]


@entry
def posteriors(
    threads: int, x: Any, out: Any, slots: Any, log_weights: Any, means: Any, variances: Any, floor: float, group: int,
    farthest: float,
) -> None:  # fmt: skip
    """The posterior of each component among its ``group`` (K for the ensemble, else all T·K), into out (B, m, T·K).

    A slot that is farther than ``farthest`` from a point counts for less, as in ``reference.slot_trust``; ``slots``
    (B, T·K / group) are their weights.
    """
    scale, log_norm = densities(log_weights, variances, floor)
    stretches = stretches_of(threads, out.shape[0], out.shape[1])
    given = stretches, x, group, slots, farthest, log_norm, means, scale, out
    parallel_for(x.batch * stretches, _posteriors_stretch, given)


@inlined
def _place(v: Any, table: Any, d: int, k: int, bend: Any, activation: Any, aside: Any) -> Any:
    """act(x̂_k) of channel d, with γ and β."""
    v = v - table[d, k, CENTRE]
    if bend is not None:
        z = v * (v * table[d, k, BEND] + table[d, k, SCALE]) + table[d, k, OFFSET]
    else:
        z = v * table[d, k, SCALE] + table[d, k, OFFSET]
    return z if activation is None else activated(z, activation, aside)


@serial
def _evaluate_stretch(
    item: int, stretches: int, x: Any, group: int, slots: Any, farthest: float, log_norm: Any, means: Any, inverse: Any,
    factor: Any, centre: Any, scale: Any, offset: Any, bend: Any, activation: Any, shift: Any, y: Any,
) -> None:  # fmt: skip
    b, _, start, stop = stretch(item, stretches, x.outer * x.inner)
    dim, components, zero = x.dim, means.shape[1], means.dtype.type(0)
    table = np.empty((dim, components, 5 if bend is None else 6), means.dtype)
    for k in range(components):
        for d in range(dim):
            table[d, k, MEAN], table[d, k, INVERSE] = means[b, k, d], inverse[b, k, d]
            table[d, k, CENTRE], table[d, k, SCALE] = centre[b, k, d], scale[b, k, d]
            table[d, k, OFFSET] = offset[b, k, d]
            if bend is not None:
                table[d, k, BEND] = bend[b, k, d]
    places, tile = np.empty(WIDTH, np.int64), np.empty(WIDTH * dim, means.dtype)
    far, resp = np.empty(WIDTH * group, means.dtype), np.empty(WIDTH * group, means.dtype)
    weights, used = np.empty(WIDTH * components, means.dtype), np.empty(components, np.int64)
    aside = np.empty(WIDTH, means.dtype)
    for i in range(start, stop, WIDTH):
        count = load_lanes(x, b, i, stop, places, tile)
        total, missing, number = wide(zero), wide(zero), 0
        for first in range(0, components, group):
            in_use = False
            for j in range(group):
                in_use = in_use or factor[b, first + j] != 0
            if not in_use:
                continue
            _squared_distances(tile, table, first, group, far)
            mean = _slot_posterior(b, first, group, log_norm, far, resp)
            trust, tau = smaller(1.0, farthest / mean), slots[b, first // group]
            total, missing = total + trust * tau, missing + (1.0 - trust) * tau
            for j in range(group):
                w = load(resp, WIDTH * j) * trust * factor[b, first + j]
                if has_any(w):
                    store(weights, WIDTH * number, w)
                    used[number] = first + j
                    number += 1
        scaling = where(missing, 1.0 / total, 1.0)
        for d in range(0, dim, 2):  # two at a time, which share the weights
            e = min(d + 1, dim - 1)
            v0, v1, z0, z1 = load(tile, WIDTH * d), load(tile, WIDTH * e), wide(zero), wide(zero)
            for n in range(number):
                k, w = used[n], load(weights, WIDTH * n)
                z0 = z0 + _place(v0, table, d, k, bend, activation, aside) * w
                z1 = z1 + _place(v1, table, e, k, bend, activation, aside) * w
            store(tile, WIDTH * d, z0 * scaling + shift[d])
            store(tile, WIDTH * e, z1 * scaling + shift[e])
        store_lanes(tile, count, y, b, i, places)


@entry
def evaluate(
    threads: int, x: Any, slots: Any, log_weights: Any, means: Any, variances: Any, floor: float, group: int,
    farthest: float, outer: Any, centre: Any, scale: Any, offset: Any, bend: Any, activation: Any, shift: Any, y: Any,
) -> None:  # fmt: skip
    """``posteriors`` and ``mix`` in one pass: y = Σ_k ν_k · outer_k · act(x̂_k) with γ and β, for T·K components."""
    inverse, log_norm = densities(log_weights, variances, floor)
    stretches = stretches_of(threads, x.batch, x.outer * x.inner)
    given = (
        stretches, x, group, slots, farthest, log_norm, means, inverse, outer, centre, scale, offset, bend, activation,
        shift, y,
    )  # fmt: skip
    parallel_for(x.batch * stretches, _evaluate_stretch, given)
