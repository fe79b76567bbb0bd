"""Points in any memory layout, which loops take a tile at a time.

Points (B, outer, inner, D) are numbered o · inner + i. A few of them are copied into a tile and back, so that nothing else
asks how they lie, and one compilation serves all layouts.
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


@inlined
def load(x: Any, b: int, first: int, stop: int, tile: Any) -> int:
    """tile[p] = x for the four points from ``first`` on, or for as many as there are; how many."""
    count, step = min(4, stop - first), np.uint64(x.step_d)
    if step == np.uint64(1):  # the compiler takes several at once
        for p in range(count):
            place = place_of(x, b, first + p)
            for d in range(x.dim):
                tile[p, d] = x.memory[place + np.uint64(d)]
        return count
    # Neighbours together, because they are near each other in memory, and their channels are not.
    place0, place1 = place_of(x, b, first), place_of(x, b, min(first + 1, stop - 1))
    place2, place3 = place_of(x, b, min(first + 2, stop - 1)), place_of(x, b, min(first + 3, stop - 1))
    for d in range(x.dim):
        along = np.uint64(d) * step
        tile[0, d], tile[1, d] = x.memory[place0 + along], x.memory[place1 + along]
        tile[2, d], tile[3, d] = x.memory[place2 + along], x.memory[place3 + along]
    return count


@inlined
def store(tile: Any, count: int, y: Any, b: int, first: int) -> None:
    """The inverse of ``load``."""
    step = np.uint64(y.step_d)
    if step == np.uint64(1) or count < 4:
        for p in range(count):
            place = place_of(y, b, first + p)
            for d in range(y.dim):
                y.memory[place + np.uint64(d) * step] = tile[p, d]
        return
    place0, place1 = place_of(y, b, first), place_of(y, b, first + 1)
    place2, place3 = place_of(y, b, first + 2), place_of(y, b, first + 3)
    for d in range(y.dim):
        along = np.uint64(d) * step
        y.memory[place0 + along], y.memory[place1 + along] = tile[0, d], tile[1, d]
        y.memory[place2 + along], y.memory[place3 + along] = tile[2, d], tile[3, d]


@serial
def load_lanes(x: Any, b: int, first: int, stop: int, places: Any, tile: Any) -> int:
    """tile[WIDTH · d + p] = x for the points from ``first`` on: how many there are. What is left repeats the last of them."""
    count = min(WIDTH, stop - first)
    if _find(x, b, first, stop, places):
        for d in range(x.dim):
            lanes.store(tile, WIDTH * d, lanes.load(x.memory, places[0] + d * x.step_d))
        return count
    d = 0
    if x.step_d == 1:
        while d + SQUARE <= x.dim:
            for p in range(0, WIDTH, SQUARE):
                lanes.load_square(x.memory, places, p, d, tile, WIDTH * d)
            d += SQUARE
    for rest in range(d, x.dim):
        for p in range(WIDTH):
            tile[WIDTH * rest + p] = x.memory[places[p] + rest * x.step_d]
    return count


@serial
def store_lanes(tile: Any, count: int, y: Any, b: int, first: int, places: Any) -> None:
    """The inverse of ``load_lanes``."""
    if _find(y, b, first, first + count, places):
        for d in range(y.dim):
            lanes.store(y.memory, places[0] + d * y.step_d, lanes.load(tile, WIDTH * d))
        return
    d = 0
    if y.step_d == 1 and count == WIDTH:
        while d + SQUARE <= y.dim:
            for p in range(0, WIDTH, SQUARE):
                lanes.store_square(y.memory, places, p, d, tile, WIDTH * d)
            d += SQUARE
    for rest in range(d, y.dim):
        for p in range(count):
            y.memory[places[p] + rest * y.step_d] = tile[WIDTH * rest + p]


@inlined
def _find(x: Any, b: int, first: int, stop: int, places: Any) -> bool:
    """Where each of WIDTH points begins in memory, and whether that is one place after the other."""
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
