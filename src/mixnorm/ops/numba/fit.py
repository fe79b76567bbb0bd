"""The seeding and the fit of a mixture, and the sample that it is fitted to, as compiled loops."""

from __future__ import annotations

from typing import Any

import numpy as np

from mixnorm.ops.numba.points import place_of
from mixnorm.ops.numba.threads import entry, parallel_for, serial, stretch, stretches_of


@serial
def _remaining(item: int, stretches: int, rows: Any, b: int, index: Any, count: int, closest: Any, out: Any) -> None:
    """The squared distance of each point to its nearest seed, if rows[index[c]] were one, into out (candidates, m)."""
    _, _, start, stop = stretch(item, stretches, rows.shape[1])
    for i in range(start, stop):
        for c in range(count):
            q = rows.dtype.type(0)
            for d in range(rows.shape[2]):
                z = rows[b, i, d] - rows[b, index[c], d]
                q += z * z
            out[c, i] = min(closest[i], q)


@serial
def _seed(b: int, rows: Any, uniforms: Any, candidates: int, stretches: int, centers: Any) -> None:
    """Greedy k-means++, as ``fit.seed``, of rows (B, m, D)."""
    points, dim, components = rows.shape[1], rows.shape[2], centers.shape[1]
    closest, index = np.empty(points), np.empty(max(candidates, 1), np.int64)
    closest[:] = np.inf
    remaining = np.empty((max(candidates, 1), points))
    for k in range(components):
        count = candidates if k else 1
        for c in range(count):
            u = uniforms[b, 1 + (k - 1) * candidates + c if k else 0]
            index[c] = _draw(closest, u) if k else min(int(u * points), points - 1)
        if stretches > 1:
            parallel_for(stretches, _remaining, (stretches, rows, b, index, count, closest, remaining))
        else:
            _remaining(0, stretches, rows, b, index, count, closest, remaining)
        best, least = 0, np.inf
        for c in range(count):
            inertia = 0.0
            for i in range(points):
                inertia += remaining[c, i]
            if inertia < least:
                best, least = c, inertia
        for i in range(points):
            closest[i] = remaining[best, i]
        for d in range(dim):
            centers[b, k, d] = rows[b, index[best], d]


@serial
def _draw(closest: Any, u: float) -> int:
    """The first point whose cumulative distance passes the share u of all; a point at distance 0 is never drawn."""
    every, cumulative = 0.0, 0.0
    for i in range(closest.shape[0]):
        every += closest[i]
    target = u * every
    for i in range(closest.shape[0]):
        cumulative += closest[i]
        if cumulative > target:
            return i
    return closest.shape[0] - 1


@serial
def _gather(item: int, stretches: int, x: Any, index: Any, out: Any) -> None:
    """The points with the given numbers into out (B, count, D)."""
    b, _, start, stop = stretch(item, stretches, index.shape[0])
    step = np.uint64(x.step_d)
    for j in range(start, stop):
        place = place_of(x, b, index[j])
        for d in range(x.dim):
            out[b, j, d] = x.memory[place + np.uint64(d) * step]


@entry
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
    stretches = stretches_of(threads, x.batch, size)
    parallel_for(x.batch * stretches, _gather, (stretches, x, index, out))


@entry
def seed(threads: int, x: Any, uniforms: Any, centers: Any) -> None:
    """Greedy k-means++ on points (B, m, 1, D) that lie row by row: centers (B, K, D), as ``fit.seed``."""
    batch, components, dim = centers.shape
    stretches = stretches_of(threads, batch, x.outer)
    candidates = (uniforms.shape[1] - 1) // max(components - 1, 1)  # of each round after the first seed
    rows = x.memory.reshape((batch, x.outer, dim))
    if stretches == 1:  # enough mixtures for all cores
        parallel_for(batch, _seed, (rows, uniforms, candidates, stretches, centers))
    else:
        for b in range(batch):
            _seed(b, rows, uniforms, candidates, stretches, centers)
