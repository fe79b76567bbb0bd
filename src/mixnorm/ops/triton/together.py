"""Programs that work in phases: a barrier over all of them, and sums that all of them add to.

All programs of a grid must run at once, or the barrier would never open: a cooperative launch, which CUDA refuses rather than
hangs on. Sums over the programs are atomic additions; in PyTorch's deterministic mode each program leaves its part, and the
parts are added in order, which takes one more barrier.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixnorm.ops.triton import tiles

WARPS_HELD = 8  # warps that a multiprocessor surely holds, whatever the kernel


class Group(NamedTuple):
    """The programs of each mixture, and the memory through which they meet."""

    count: int
    totals: Tensor  # zeros
    barrier: Tensor  # (B,) zeros
    partial: Tensor | None
    constants: dict[str, Any]


def group(points: Tensor, tiles_of_points: int, num_warps: int, per_processor: int, numbers: int) -> Group:
    """A group of programs for each mixture of ``points`` (B, ...) that adds up ``numbers`` numbers."""
    batch, device = points.shape[0], points.device
    count = max(1, min(tiles_of_points, _at_once(device, num_warps, per_processor) // batch))
    in_order = count > 1 and torch.are_deterministic_algorithms_enabled()
    zeros = torch.zeros(batch * (numbers + 1), dtype=torch.float32, device=device)
    partial = torch.empty(batch, count, numbers, dtype=torch.float32, device=device) if in_order else None
    constants: dict[str, Any] = {
        "ALONE": count == 1,
        "IN_ORDER": in_order,
        "PROGRAMS_PAD": triton.next_power_of_2(count),
    }
    if count > 1:
        constants["launch_cooperative_grid"] = True
    return Group(count, zeros, zeros[batch * numbers :].view(torch.int32), partial, constants)


def _at_once(device: torch.device, num_warps: int, per_processor: int) -> int:
    """How many programs surely run at the same time: on a CPU one, because there they run one after another."""
    if device.type != "cuda":
        return 1
    return tiles.processors(device) * max(1, min(per_processor, WARPS_HELD // num_warps))


_ARRIVE = tl.constexpr(
    """{
    .reg .pred first;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first red.release.gpu.global.add.s32 [$1], 1;
    mov.u32 $0, 0;
    }"""
)


@triton.jit
def wait(barrier_ptr, arrivals, ALONE: tl.constexpr):
    """Waits until ``arrivals`` programs have come here in all; what they wrote before can then be read."""
    tl.debug_barrier()
    if not ALONE:
        tl.inline_asm_elementwise(_ARRIVE, "=r,l", [barrier_ptr], tl.int32, is_pure=False, pack=1)
        seen = 0
        while seen < arrivals:
            seen = tl.inline_asm_elementwise(
                "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [barrier_ptr], tl.int32, is_pure=False, pack=1
            )
        tl.debug_barrier()


@triton.jit
def own_part(totals_ptr, partial_ptr, numbers, b, program, programs, IN_ORDER: tl.constexpr):
    """Where a program leaves its sums."""
    if IN_ORDER:
        return partial_ptr + (b * programs + program) * numbers
    else:
        return totals_ptr


@triton.jit
def contribute(pointers, value, mask, ALONE: tl.constexpr, IN_ORDER: tl.constexpr):
    """Adds a program's sums to the totals, or leaves them where :func:`meet` adds them up."""
    if ALONE or IN_ORDER:
        tl.store(pointers, value, mask=mask)
    else:
        tl.atomic_add(pointers, value, mask=mask, sem="relaxed")


@triton.jit
def meet(
    totals_ptr,
    partial_ptr,
    numbers,
    barrier_ptr,
    arrivals,
    b,
    program,
    programs,
    PROGRAMS_PAD: tl.constexpr,
    ALONE: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    """Waits until the totals are complete; returns how many arrivals to wait for next."""
    wait(barrier_ptr, arrivals, ALONE)
    arrivals += programs
    if IN_ORDER:
        COLUMNS: tl.constexpr = 16
        g = tl.arange(0, PROGRAMS_PAD)
        for start in range(program * COLUMNS, numbers, programs * COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            mask = (g < programs)[:, None] & (column < numbers)[None, :]
            pointers = partial_ptr + b * programs * numbers + g[:, None] * numbers + column[None, :]
            tl.store(totals_ptr + column, tl.sum(tl.load(pointers, mask=mask, other=0.0), axis=0), mask=column < numbers)
        wait(barrier_ptr, arrivals, ALONE)
        arrivals += programs
    return arrivals
