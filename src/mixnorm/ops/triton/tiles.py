"""How a kernel walks over points (B, outer, inner, D): tiles of W·R rows, addressed in place in any memory layout.

A tile is (W, R, D). The R rows of a thread follow each other in its registers, so that sums over R need no communication;
the W rows lie in different lanes and warps. Where the channels are contiguous ("by rows": channels_last, or a sample), sums
over the points stay (W, D) per program until the end of the kernel. Where the points are contiguous (N, C, H, W), a tile is
many points wide, and its sums are (D,).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_DIM = 4096
THREADS_PER_WARP = 32


class Tile(NamedTuple):
    """The compile-time shape of a kernel's work."""

    W: int
    R: int
    BLOCK_D: int
    BY_ROWS: bool
    num_warps: int


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


def walk(points: Tensor, shape: Tile) -> Walk:
    _, outer, inner, dim = points.shape
    stride_b, stride_o, stride_i, stride_d = points.stride()
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


def tile(points: Tensor, sums_per_element: int, rows_at_once: int) -> Tile:
    """The tile for these points. ``sums_per_element`` numbers are kept in registers for each element of (W, D)."""
    dim = points.shape[-1]
    block_d = triton.next_power_of_2(dim)
    by_rows = dim == 1 or points.stride(-1) == 1
    if not by_rows:
        width = min(max(8192 // block_d, 8), 64)
        return Tile(width, 1, block_d, False, 8 if width * block_d >= 4096 else 4)
    vector = 16 // points.element_size()
    while vector > 1 and vector * sums_per_element > 96:
        vector //= 2
    num_warps = 4
    while num_warps < 16 and block_d > num_warps * THREADS_PER_WARP * vector:
        num_warps *= 2
    width = max(1, num_warps * THREADS_PER_WARP * vector // block_d)
    return Tile(width, rows_at_once, block_d, True, num_warps)


def programs(points: Tensor, rows_per_tile: int, per_processor: int) -> int:
    """How many programs share the points of each mixture."""
    batch, outer, inner, _ = points.shape
    tiles = triton.cdiv(outer * inner, rows_per_tile)
    return max(1, min(tiles, triton.cdiv(per_processor * processors(points.device), batch)))


_processors: dict[int | None, int] = {}


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a CPU runs the programs one after another, and needs no more than a few."""
    if device.type != "cuda":
        return 2
    found = _processors.get(device.index)
    if found is None:
        found = _processors[device.index] = torch.cuda.get_device_properties(device).multi_processor_count
    return found


def on_device(points: Tensor) -> Any:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device_of(points)


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
def load_tile(ptr, offsets, exists, d, dim, stride_d):
    """(W, R, D) in fp32; 0 where there is nothing."""
    pointers = ptr + offsets[:, :, None] + (d * stride_d)[None, None, :]
    return tl.load(pointers, mask=exists[:, :, None] & (d < dim)[None, None, :], other=0.0).to(tl.float32)


@triton.jit
def store_tile(ptr, value, offsets, exists, d, dim, stride_d):
    pointers = ptr + offsets[:, :, None] + (d * stride_d)[None, None, :]
    tl.store(pointers, value.to(ptr.dtype.element_ty), mask=exists[:, :, None] & (d < dim)[None, None, :])


@triton.jit
def over_rows(value, BY_ROWS: tl.constexpr):
    """Sums (W, R, D) over the rows of a thread, to (W, D); over all rows, to (D,), where the tile is wide."""
    total = tl.sum(value, axis=1)
    if not BY_ROWS:
        total = tl.sum(total, axis=0)
    return total


@triton.jit
def no_sums(W: tl.constexpr, BLOCK_D: tl.constexpr, BY_ROWS: tl.constexpr):
    if BY_ROWS:
        return tl.zeros((W, BLOCK_D), tl.float32)
    else:
        return tl.zeros((BLOCK_D,), tl.float32)


@triton.jit
def over_width(total, BY_ROWS: tl.constexpr):
    """What is left of the sum over a program's points, to (D,)."""
    if BY_ROWS:
        return tl.sum(total, axis=0)
    else:
        return total
