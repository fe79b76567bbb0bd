"""Points in any memory layout, which loops take a tile of WIDTH points at a time.

Points (B, outer, inner, D) are numbered o · inner + i. A tile has the lanes of one channel after the other, so that nothing
else asks how points lie, and one compilation serves all layouts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mixnorm.ops.numba import lanes
from mixnorm.ops.numba.lanes import SQUARE, WIDTH
from mixnorm.ops.numba.threads import inlined, serial


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


@inlined
def place_of(x: Any, b: int, point: int) -> Any:
    """Where a point begins in memory; without a sign, or every access would ask whether it counts from the end."""
    outer = point // x.inner
    return np.uint64(b * x.step_b + outer * x.step_o + (point - outer * x.inner) * x.step_i)


@serial
def load_tile(x: Any, b: int, first: int, stop: int, places: Any, tile: Any, at: int) -> int:
    """tile[at + WIDTH · d + p] = x for the points from ``first`` on: how many there are. The last one fills what is left.

    ``places`` is for WIDTH integers.
    """
    count = min(WIDTH, stop - first)
    if _find(x, b, first, stop, places):
        for d in range(x.dim):
            lanes.store(tile, at + WIDTH * d, lanes.load(x.memory, places[0] + d * x.step_d))
        return count
    done = 0
    if x.step_d == 1:
        while done + SQUARE <= x.dim:
            for p in range(0, WIDTH, SQUARE):
                lanes.load_square(x.memory, places, p, done, tile, at + WIDTH * done)
            done += SQUARE
    for d in range(done, x.dim):
        for p in range(WIDTH):
            tile[at + WIDTH * d + p] = x.memory[places[p] + d * x.step_d]
    return count


@serial
def store_tile(tile: Any, count: int, y: Any, b: int, first: int, places: Any) -> None:
    """The inverse of ``load_tile``, from the beginning of a tile."""
    if _find(y, b, first, first + count, places):
        for d in range(y.dim):
            lanes.store(y.memory, places[0] + d * y.step_d, lanes.load(tile, WIDTH * d))
        return
    done = 0
    if y.step_d == 1 and count == WIDTH:
        while done + SQUARE <= y.dim:
            for p in range(0, WIDTH, SQUARE):
                lanes.store_square(y.memory, places, p, done, tile, WIDTH * done)
            done += SQUARE
    for d in range(done, y.dim):
        for p in range(count):
            y.memory[places[p] + d * y.step_d] = tile[WIDTH * d + p]


@inlined
def _find(x: Any, b: int, first: int, stop: int, places: Any) -> bool:
    """Where each of WIDTH points begins in memory, and whether they are neighbours there."""
    outer = first // x.inner
    inner = first - outer * x.inner
    place = b * x.step_b + outer * x.step_o + inner * x.step_i
    are_neighbours = True
    for p in range(WIDTH):
        places[p] = place
        are_neighbours = are_neighbours and place == places[0] + p
        if first + p + 1 < stop:
            inner += 1
            place += x.step_i
            if inner == x.inner:
                inner = 0
                place += x.step_o - x.inner * x.step_i
    return are_neighbours


@inlined
def load_weights(resp: Any, b: int, first: int, count: int, weights: Any, at: int) -> None:
    """weights[at + WIDTH · k + p] = ν of a tile's points; 0 for those that there are not."""
    for k in range(resp.shape[2]):
        for p in range(count):
            weights[at + WIDTH * k + p] = resp[b, first + p, k]
        for p in range(count, WIDTH):
            weights[at + WIDTH * k + p] = 0
