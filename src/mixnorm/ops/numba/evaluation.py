"""Evaluation under T mixtures in one pass over the points, and the posteriors alone, as compiled loops."""

from __future__ import annotations

from typing import Any

import numpy as np

from mixnorm.ops.numba.em import densities, posterior, squared_distances, table_of_densities
from mixnorm.ops.numba.lanes import WIDTH, load, smaller, store, where, wide
from mixnorm.ops.numba.points import load_tile, store_tile
from mixnorm.ops.numba.threads import entry, inlined, parallel_for, serial, stretch, stretches_of
from mixnorm.ops.numba.transform import in_use, mix_tile, table_of_lines


@inlined
def _slot(
    tile: Any, table: Any, b: int, first: int, group: int, log_norm: Any, farthest: float, far: Any, weights: Any
) -> Any:  # fmt: skip
    """``reference.slot_trust`` of the mixture with ``group`` components from ``first`` on; weights are its ν times that."""
    squared_distances(tile, 0, table, first, group, far)
    posterior(b, first, group, log_norm, far, weights, WIDTH * first)
    mean = wide(far.dtype.type(0))
    for j in range(group):
        share = load(weights, WIDTH * (first + j))
        mean = mean + where(share, share * load(far, WIDTH * j), 0.0)  # which may be infinite
    trust = smaller(1.0, farthest / mean)
    for k in range(first, first + group):
        store(weights, WIDTH * k, load(weights, WIDTH * k) * trust)
    return trust


@serial
def _posteriors_stretch(
    item: int, stretches: int, x: Any, group: int, slots: Any, farthest: float, log_norm: Any, means: Any, scale: Any,
    out: Any,
) -> None:  # fmt: skip
    b, _, start, stop = stretch(item, stretches, out.shape[1])
    components, zero = means.shape[1], means.dtype.type(0)
    table = table_of_densities(b, means, scale)
    places, tile = np.empty(WIDTH, np.int64), np.empty(WIDTH * x.dim, means.dtype)
    far, weights = np.empty(WIDTH * group, means.dtype), np.empty(WIDTH * components, means.dtype)
    for i in range(start, stop, WIDTH):
        count = load_tile(x, b, i, stop, places, tile, 0)
        total, missing = wide(zero), wide(zero)
        for first in range(0, components, group):
            trust = _slot(tile, table, b, first, group, log_norm, farthest, far, weights)
            total = total + trust * slots[b, first // group]
            missing = missing + (1.0 - trust) * slots[b, first // group]
        scaling = where(missing, 1.0 / total, 1.0)
        for k in range(components):
            store(weights, WIDTH * k, load(weights, WIDTH * k) * scaling)
        for p in range(count):
            for k in range(components):
                out[b, i + p, k] = weights[WIDTH * k + p]


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


@serial
def _evaluate_stretch(
    item: int, stretches: int, x: Any, group: int, slots: Any, farthest: float, log_norm: Any, means: Any, inverse: Any,
    factor: Any, centre: Any, scale: Any, offset: Any, bend: Any, activation: Any, shift: Any, y: Any,
) -> None:  # fmt: skip
    b, _, start, stop = stretch(item, stretches, x.outer * x.inner)
    dim, components, zero = x.dim, means.shape[1], means.dtype.type(0)
    table, lines = table_of_densities(b, means, inverse), table_of_lines(b, centre, scale, offset, bend, components)
    places, tile = np.empty(WIDTH, np.int64), np.empty(WIDTH * dim, means.dtype)
    far, weights = np.empty(WIDTH * group, means.dtype), np.empty(WIDTH * components, means.dtype)
    used, aside = np.empty(components, np.int64), np.empty(WIDTH, means.dtype)
    for i in range(start, stop, WIDTH):
        count = load_tile(x, b, i, stop, places, tile, 0)
        total, missing = wide(zero), wide(zero)
        for first in range(0, components, group):
            if not np.any(factor[b, first : first + group]):
                for k in range(first, first + group):
                    store(weights, WIDTH * k, wide(zero))
                continue
            trust = _slot(tile, table, b, first, group, log_norm, farthest, far, weights)
            total = total + trust * slots[b, first // group]
            missing = missing + (1.0 - trust) * slots[b, first // group]
        number = in_use(weights, b, factor, used)
        scaling = where(missing, 1.0 / total, 1.0)
        mix_tile(tile, weights, used, number, lines, bend, activation, aside, scaling, shift)
        store_tile(tile, count, y, b, i, places)


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
