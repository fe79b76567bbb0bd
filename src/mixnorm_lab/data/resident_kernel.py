"""A training batch in one launch: images are gathered, cropped, flipped, standardized, cast and laid out on the GPU."""

# Constants are in capitals, and what looks like a function is Triton.
# ruff: noqa: N803
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def make_batch(
    images: Tensor, labels: Tensor, plan: Tensor, step: Tensor, means: Tensor, scales: Tensor, pad: int,
    dtype: torch.dtype, memory_format: torch.memory_format,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Images (B, C, H, W) and labels (B,) of step ``step`` of a plan (steps, 4, B); see ``data.Resident``."""
    steps, _, batch = plan.shape
    _, channels, height, width = images.shape
    out = torch.empty(batch, channels, height, width, dtype=dtype, device=images.device, memory_format=memory_format)
    out_labels = torch.empty(batch, dtype=labels.dtype, device=images.device)
    size = channels * height * width
    block = min(BLOCK, triton.next_power_of_2(size))
    with torch.cuda.device_of(images):
        _make_batch[(batch, triton.cdiv(size, block))](
            images, labels, plan, step, means, scales, out, out_labels, steps, batch, pad,
            CHANNELS=channels, HEIGHT=height, WIDTH=width,
            CHANNELS_LAST=memory_format == torch.channels_last, BLOCK=block,
        )  # fmt: skip
    return out, out_labels


@triton.jit
def _make_batch(
    images_ptr,  # (N, C, H, W) uint8
    labels_ptr,  # (N,) int64
    plan_ptr,  # (steps, 4, B) int32
    step_ptr,  # one int64
    means_ptr,  # (C,)
    scales_ptr,  # (C,)
    out_ptr,  # (B, C, H, W), in memory (B, H, W, C) if CHANNELS_LAST
    out_labels_ptr,  # (B,)
    steps,
    batch,
    pad,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    member = tl.program_id(0)
    row = plan_ptr + (tl.load(step_ptr) % steps) * 4 * batch + member
    index = tl.load(row).to(tl.int64)
    top = tl.load(row + batch) - pad
    left = tl.load(row + 2 * batch) - pad
    flip = tl.load(row + 3 * batch)

    # In the order of the output's memory, so that the writes are contiguous; the reads are nearly so.
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if CHANNELS_LAST:
        c, y, x = i % CHANNELS, i // (CHANNELS * WIDTH), i // CHANNELS % WIDTH
    else:
        c, y, x = i // (HEIGHT * WIDTH), i // WIDTH % HEIGHT, i % WIDTH
    exists = i < CHANNELS * HEIGHT * WIDTH
    x = tl.where(flip != 0, WIDTH - 1 - x, x) + left
    y += top
    inside = exists & (x >= 0) & (x < WIDTH) & (y >= 0) & (y < HEIGHT)
    size = CHANNELS * HEIGHT * WIDTH
    pixel = tl.load(images_ptr + index * size + (c * HEIGHT + y) * WIDTH + x, mask=inside, other=0).to(tl.float32)
    value = (pixel - tl.load(means_ptr + c, mask=exists, other=0.0)) * tl.load(scales_ptr + c, mask=exists, other=0.0)
    value = tl.where(inside, value, 0.0)
    tl.store(out_ptr + member.to(tl.int64) * size + i, value.to(out_ptr.dtype.element_ty), mask=exists)
    if tl.program_id(1) == 0:
        tl.store(out_labels_ptr + member, tl.load(labels_ptr + index))
