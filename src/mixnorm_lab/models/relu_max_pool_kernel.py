"""ReLU and max pooling in one pass over channels_last images, and their gradient without atomics."""

# Constants are in capitals, and what looks like a function is Triton.
# ruff: noqa: N803
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1024
NOWHERE = tl.constexpr(255)  # the place of a maximum that ReLU set to zero


class ReluMaxPool(torch.autograd.Function):
    """Keeps the place of each maximum in its window, a byte each, and nothing of the input.

    ``size`` and ``stride`` are of the windows, which are no further apart than they are wide; the last may reach over the
    edge.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, stride: int) -> Tensor:
        batch, channels, height, width = x.shape
        pooled = (batch, channels, *(triton.cdiv(side - size, stride) + 1 for side in (height, width)))
        out = torch.empty(pooled, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        places = torch.empty_like(out, dtype=torch.uint8)
        with torch.cuda.device_of(x):
            _forward[(triton.cdiv(out.numel(), BLOCK),)](
                x, out, places, out.numel(), channels, height, width, *pooled[2:], SIZE=size, STRIDE=stride, BLOCK=BLOCK
            )  # fmt: skip
        ctx.save_for_backward(places)
        ctx.shape, ctx.windows = x.shape, (size, stride)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        size, stride = ctx.windows
        _, channels, height, width = ctx.shape
        grad = grad.contiguous(memory_format=torch.channels_last)
        out = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        with torch.cuda.device_of(grad):
            _backward[(triton.cdiv(out.numel(), BLOCK),)](
                grad, places, out, out.numel(), channels, height, width, *places.shape[2:],
                SIZE=size, STRIDE=stride, BLOCK=BLOCK,
            )  # fmt: skip
        return out, None, None


@triton.jit
def _forward(
    x_ptr,  # (N, H, W, C)
    out_ptr,  # (N, PH, PW, C)
    places_ptr,  # as out, uint8
    count,
    CHANNELS: tl.constexpr,  # constants, because division by others takes longer than the memory
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    POOLED_HEIGHT: tl.constexpr,
    POOLED_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = i < count
    c, window = i % CHANNELS, i // CHANNELS
    column, row = window % POOLED_WIDTH, window // POOLED_WIDTH % POOLED_HEIGHT
    image = window // (POOLED_WIDTH * POOLED_HEIGHT)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.full((BLOCK,), 0, tl.int32)
    for tap in tl.static_range(SIZE * SIZE):
        y, x = row * STRIDE + tap // SIZE, column * STRIDE + tap % SIZE
        inside = exists & (y < HEIGHT) & (x < WIDTH)
        address = ((image * HEIGHT + y) * WIDTH + x) * CHANNELS + c
        value = tl.load(x_ptr + address, mask=inside, other=float("-inf")).to(tl.float32)
        larger = (value > largest) | (value != value)  # what is not a number stays, as in PyTorch
        place = tl.where(larger, tap, place)
        largest = tl.where(larger, value, largest)
    negative = largest <= 0
    tl.store(out_ptr + i, tl.where(negative, 0.0, largest).to(out_ptr.dtype.element_ty), mask=exists)
    tl.store(places_ptr + i, tl.where(negative, NOWHERE, place).to(tl.uint8), mask=exists)


@triton.jit
def _backward(
    grad_ptr,  # (N, PH, PW, C)
    places_ptr,  # as grad
    out_ptr,  # (N, H, W, C)
    count,
    CHANNELS: tl.constexpr,  # constants, because division by others takes longer than the memory
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    POOLED_HEIGHT: tl.constexpr,
    POOLED_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = i < count
    c, position = i % CHANNELS, i // CHANNELS
    x, y = position % WIDTH, position // WIDTH % HEIGHT
    image = position // (WIDTH * HEIGHT)
    total = tl.zeros((BLOCK,), tl.float32)
    WINDOWS: tl.constexpr = (SIZE + STRIDE - 1) // STRIDE  # along one side, which a position can belong to
    for up in tl.static_range(WINDOWS):
        for left in tl.static_range(WINDOWS):
            row, column = y // STRIDE - up, x // STRIDE - left
            tap_y, tap_x = y - row * STRIDE, x - column * STRIDE
            inside = exists & (row >= 0) & (row < POOLED_HEIGHT) & (column >= 0) & (column < POOLED_WIDTH)
            inside &= (tap_y < SIZE) & (tap_x < SIZE)
            address = ((image * POOLED_HEIGHT + row) * POOLED_WIDTH + column) * CHANNELS + c
            place = tl.load(places_ptr + address, mask=inside, other=NOWHERE).to(tl.int32)
            grad = tl.load(grad_ptr + address, mask=inside, other=0.0).to(tl.float32)
            total += tl.where(place == tap_y * SIZE + tap_x, grad, 0.0)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=exists)
