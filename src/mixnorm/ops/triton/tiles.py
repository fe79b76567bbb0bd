"""How a kernel walks over points (B, outer, inner, D): tiles of W·R rows, addressed in place in any memory layout.

A tile is (W, R, S, V), its D channels cut into S segments of V. What the compiler keeps in the registers of one thread are R
rows and the S segments, so sums over R and S need no communication; a warp holds whole rows where it can, and the W rows lie
in different lanes and warps. Where the channels are contiguous ("by rows": channels_last, or a sample), sums over the points
stay (W, S, V) until the end of the kernel. Where the points are contiguous (N, C, H, W), a tile is many points wide, and its
sums are (S, V).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixnorm.ops.triton.launch import cdiv, power_of_two

MAX_DIM = 4096
THREADS_PER_WARP = 32
TABLE_BYTES = 4  # of a number in fp32


class Described(NamedTuple):
    """All of points (B, outer, inner, D) that a plan depends on."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def by_rows(self) -> bool:
        return self.shape[-1] == 1 or self.strides[-1] == 1


def describe(points: Tensor) -> Described:
    return Described(points.device, points.dtype, points.shape, points.stride())


class Tile(NamedTuple):
    """The compile-time shape of a kernel's work."""

    W: int
    R: int
    S: int
    V: int
    BY_ROWS: bool
    STAGES: int
    num_warps: int


class Tuning(NamedTuple):
    """How a kernel that goes by rows cuts its work: measured, see benchmarks/LOG.md."""

    vector_bytes: int  # of a row that a thread reads at once
    elements: int  # of a row that a thread holds, at least a vector
    most: int  # elements times components
    rows: int  # R at most
    elements_at_once: int  # of a thread's rows, times components
    stages: int  # tiles on their way from memory while one is worked on; 1: none
    num_warps: int
    per_processor: int  # programs on each multiprocessor


TUNING = {
    "fit": Tuning(16, 8, 32, 8, 96, 1, 4, 1),
    "statistics": Tuning(16, 8, 64, 4, 96, 3, 4, 2),
    "transform": Tuning(16, 1, 64, 4, 96, 1, 4, 4),
    "gradient_sums": Tuning(16, 1, 64, 4, 96, 3, 4, 2),
    "gradient": Tuning(16, 1, 64, 4, 96, 3, 4, 2),
    "evaluation": Tuning(16, 8, 64, 4, 32, 1, 4, 4),
}


class Walk(NamedTuple):
    """How to get from the number of a point to its address.

    ``path`` is FLAT where one stride leads from any point to the next, WITHIN where no tile crosses from one step of the
    outer axis to the next, ANY otherwise. Strides and D are in units of ``ALIGN`` elements, so that the compiler knows how
    wide a load may be.
    """

    stride_b: int
    stride_o: int
    stride_i: int
    stride_d: int
    path: int
    align: int


ANY, FLAT, WITHIN = 0, 1, 2
_ANY, _FLAT, _WITHIN = tl.constexpr(ANY), tl.constexpr(FLAT), tl.constexpr(WITHIN)


def walk(points: Described, shape: Tile) -> Walk:
    _, outer, inner, dim = points.shape
    stride_b, stride_o, stride_i, stride_d = points.strides
    if inner == 1:
        stride_i = stride_o
    path = ANY
    if outer == 1 or inner == 1 or stride_o == inner * stride_i:
        path = FLAT
    elif inner % (shape.W * shape.R) == 0:
        path = WITHIN
    align = 1
    if stride_d == 1:
        common = math.gcd(dim, math.gcd(stride_b, math.gcd(stride_o, stride_i)), 16)
        align = common & -common
    return Walk(stride_b, stride_o // align, stride_i // align, stride_d, path, align)


def tile(points: Described, components: int, purpose: str) -> Tile:
    """The tile for a kernel over these points."""
    block_d = power_of_two(points.shape[-1])
    if not points.by_rows:
        width = min(max(8192 // block_d, 4), 64)
        return Tile(width, 1, 1, block_d, False, 1, 8 if width * block_d >= 4096 else 4)
    tuning = TUNING[purpose]
    # A thread keeps several numbers for each component of each of its elements: too many would not fit its registers.
    most = power_of_two_below(tuning.most // components)
    # An evaluation reads its tables, which are fp32, for each tile. Points in vectors of as many elements need no exchange,
    # and few threads to a row sum it up in few steps.
    of_tables = purpose == "evaluation"
    widest = tuning.vector_bytes // (TABLE_BYTES if of_tables else points.dtype.itemsize)
    vector = min(most, widest)
    elements = max(vector, min(most, tuning.elements))
    threads = 1 if of_tables else THREADS_PER_WARP  # to a row, at least
    segments = max(1, min(cdiv(block_d, threads * vector), elements // vector))
    length = block_d // segments
    num_warps = tuning.num_warps
    while num_warps < 16 and length > num_warps * THREADS_PER_WARP * vector:
        num_warps *= 2
    width = max(1, num_warps * THREADS_PER_WARP * vector // length)
    rows = min(tuning.rows, power_of_two_below(tuning.elements_at_once // (components * elements)))
    if vector < widest:  # the compiler makes its vectors as wide as a thread's share of the tile allows
        rows = 1
    return Tile(width, rows, segments, length, True, tuning.stages, num_warps)


def power_of_two_below(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


def programs(points: Described, shape: Tile, purpose: str) -> int:
    """How many programs share the points of each mixture."""
    batch, outer, inner, _ = points.shape
    tiles = cdiv(outer * inner, shape.W * shape.R)
    at_once = TUNING[purpose].per_processor * processors(points.device)
    return max(1, min(tiles, cdiv(at_once, batch)))


_processors: dict[int | None, int] = {}


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a CPU runs the programs one after another, and needs no more than a few."""
    if device.type != "cuda":
        return 2
    found = _processors.get(device.index)
    if found is None:
        found = _processors[device.index] = torch.cuda.get_device_properties(device).multi_processor_count
    return found


@triton.jit
def rows_of_tile(tile, m, W: tl.constexpr, R: tl.constexpr):
    """The numbers of a tile's points, (W, R), and which of them exist."""
    points = tile * (W * R) + tl.arange(0, W)[:, None] + tl.arange(0, R)[None, :] * W
    return points, points < m


@triton.jit
def row_offsets(
    tile, points, inner, stride_o, stride_i, PATH: tl.constexpr, ALIGN: tl.constexpr, W: tl.constexpr, R: tl.constexpr
):
    """Where each point of a tile begins, (W, R)."""
    if PATH == _FLAT:
        units = points.to(tl.int64) * stride_i
    elif PATH == _WITHIN:
        tiles = inner // (W * R)
        first = (tile % tiles) * (W * R)
        within = tl.arange(0, W)[:, None] + tl.arange(0, R)[None, :] * W
        units = (tile // tiles).to(tl.int64) * stride_o + (first + within).to(tl.int64) * stride_i
    else:
        units = (points // inner).to(tl.int64) * stride_o + (points % inner).to(tl.int64) * stride_i
    return units * ALIGN


@triton.jit
def channels(S: tl.constexpr, V: tl.constexpr):
    """The channels of a tile, (S, V)."""
    return tl.arange(0, S)[:, None] * V + tl.arange(0, V)[None, :]


@triton.jit
def channels_of_rows(W: tl.constexpr, S: tl.constexpr, V: tl.constexpr, BY_ROWS: tl.constexpr):
    """The channels of a tile as (W, 1, S, V) where it goes by rows: each warp then reads what belongs to them for itself, as
    it reads its rows. The fit needs that in half precision: what it copies has other vectors than its sample, and the
    compiler would carry them along through exchanges in every phase."""
    d = channels(S, V)[None, None, :, :]
    if BY_ROWS:
        d = tl.broadcast_to(d, (W, 1, S, V))
    return d


@triton.jit
def load_tile(ptr, offsets, exists, d, dim, stride_d):
    """(W, R, S, V) in fp32; 0 where there is nothing."""
    pointers = ptr + tall(offsets) + wide(d * stride_d)
    return tl.load(pointers, mask=tall(exists) & wide(d < dim), other=0.0).to(tl.float32)


@triton.jit
def store_tile(ptr, value, offsets, exists, d, dim, stride_d):
    pointers = ptr + tall(offsets) + wide(d * stride_d)
    tl.store(pointers, value.to(ptr.dtype.element_ty), mask=tall(exists) & wide(d < dim))


@triton.jit
def over_channels(value):
    """(W, R, S, V) to (W, R)."""
    return tl.sum(tl.sum(value, axis=2), axis=2)


@triton.jit
def over_rows(value, BY_ROWS: tl.constexpr):
    """(W, R, S, V) to (W, S, V), a sum over the rows of a thread; to (S, V), over all rows, where the tile is wide."""
    total = tl.sum(value, axis=1)
    if not BY_ROWS:
        total = tl.sum(total, axis=0)
    return total


@triton.jit
def no_sums(W: tl.constexpr, S: tl.constexpr, V: tl.constexpr, BY_ROWS: tl.constexpr):
    if BY_ROWS:
        return tl.zeros((W, S, V), tl.float32)
    else:
        return tl.zeros((S, V), tl.float32)


@triton.jit
def over_width(total, BY_ROWS: tl.constexpr):
    """What is left of the sum over a program's points, to (S, V)."""
    if BY_ROWS:
        return tl.sum(total, axis=0)
    else:
        return total


@triton.jit
def wide(row):
    """(S, V) as it goes with a tile; (W, 1, S, V) does so already."""
    if len(row.shape) == 2:
        return row[None, None, :, :]
    else:
        return row


@triton.jit
def over_row(row):
    """The sum over all channels: of (S, V) one number, of (W, 1, S, V) one for each row."""
    if len(row.shape) == 2:
        return tl.sum(tl.sum(row, axis=0), axis=0)
    else:
        return over_channels(row)


@triton.jit
def tall(value):
    """(W, R) as it goes with a tile."""
    return value[:, :, None, None]
