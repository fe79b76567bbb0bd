"""The history: the newest mixture comes in and the oldest goes, in one launch; and the weights of its slots."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixnorm.ops import reference
from mixnorm.ops.kernels import Mixture
from mixnorm.ops.triton.launch import PLANS, Plan, cdiv, launch, power_of_two

COLUMNS = 128
LARGEST_MEAN = tl.constexpr(reference.LARGEST_MEAN)
WHOLE = tl.constexpr(reference.WHOLE)


def push(queues: Mixture, newest: Mixture, tracked: Tensor) -> None:
    """Shifts queues (B, T, K) and twice (B, T, K, D) by one and appends ``newest``, if that ``ops.can_be_kept``.

    ``tracked`` counts the batches. The decision is made on the device.
    """
    launch(_push_plan(queues[0].shape, newest[1].numel()), (*queues, *newest, tracked), ())


@functools.lru_cache(maxsize=PLANS)
def _push_plan(shape: tuple[int, ...], columns: int) -> Plan:
    batch, slots, components = shape
    numbers = (slots, batch * components, columns, components, columns // batch)
    constants = {"SLOTS_PAD": power_of_two(slots), "COLUMNS": COLUMNS}
    return Plan(_push, (cdiv(columns, COLUMNS),), numbers, constants)


@triton.jit
def _push(
    weights_queue_ptr,  # (B, T, K), changed
    means_queue_ptr,  # (B, T, K, D), changed
    variances_queue_ptr,  # (B, T, K, D), changed
    weights_ptr,  # (B, K)
    means_ptr,  # (B, K, D)
    variances_ptr,  # (B, K, D)
    tracked_ptr,  # one number, changed
    slots,
    weights_count,
    means_count,
    weights_row,
    means_row,
    SLOTS_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # Every program looks at all the numbers, so that all decide alike.
    bad = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, means_count, COLUMNS):
        i = start + tl.arange(0, COLUMNS)
        mean = tl.load(means_ptr + i, mask=i < means_count, other=0.0).to(means_queue_ptr.dtype.element_ty)
        number = tl.load(variances_ptr + i, mask=i < means_count, other=0.0).to(variances_queue_ptr.dtype.element_ty)
        number = number.to(tl.float32) + tl.load(weights_ptr + i, mask=i < weights_count, other=0.0)
        small = tl.abs(mean.to(tl.float32)) <= LARGEST_MEAN
        bad += ((number - number != 0) | (small == 0)).to(tl.int32)
    if tl.sum(bad, axis=0) == 0:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        few, many = column < weights_count, column < means_count
        weights = tl.load(weights_ptr + column, mask=few, other=0.0)
        place = column // weights_row * slots * weights_row + column % weights_row
        _shift(weights_queue_ptr, weights, place, few, weights_row, slots, SLOTS_PAD)
        place = column // means_row * slots * means_row + column % means_row
        _shift(means_queue_ptr, tl.load(means_ptr + column, mask=many, other=0.0), place, many, means_row, slots, SLOTS_PAD)
        variances = tl.load(variances_ptr + column, mask=many, other=0.0)
        _shift(variances_queue_ptr, variances, place, many, means_row, slots, SLOTS_PAD)
        if tl.program_id(0) == 0:
            tl.store(tracked_ptr, tl.load(tracked_ptr) + 1)


@triton.jit
def _shift(queue_ptr, newest, place, exists, row, slots, SLOTS_PAD: tl.constexpr):
    """Moves columns of a queue (T, row), which begin at ``place``, up by one, and puts ``newest`` last."""
    slot = tl.arange(0, SLOTS_PAD)[:, None]
    pointers = queue_ptr + place[None, :] + slot * row
    mask = (slot < slots) & exists[None, :]
    older = tl.load(pointers + row, mask=mask & (slot < slots - 1), other=0.0)
    tl.debug_barrier()  # all is read before anything is written
    value = tl.where(slot < slots - 1, older.to(tl.float32), newest[None, :])
    tl.store(pointers, value.to(queue_ptr.dtype.element_ty), mask=mask)


def slot_weights(weights: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """The history's λ (B, T, K) and τ (B, T): ``reference.slot_weights``."""
    used, tau = torch.empty_like(weights), torch.empty_like(weights[..., 0])
    launch(_slot_weights_plan(weights.shape, float(decay)), (weights.contiguous(),), (used, tau))
    return used, tau


@functools.lru_cache(maxsize=PLANS)
def _slot_weights_plan(shape: tuple[int, ...], decay: float) -> Plan:
    batch, slots, components = shape
    constants = {
        "T": slots,
        "K": components,
        "T_PAD": power_of_two(slots),
        "K_PAD": power_of_two(components),
        "num_warps": 1,
    }
    return Plan(_slot_weights, (batch,), (decay,), constants)


@triton.jit
def _slot_weights(
    weights_ptr,  # (B, T, K)
    used_ptr,  # (B, T, K), written
    tau_ptr,  # (B, T), written
    decay,
    T: tl.constexpr,
    K: tl.constexpr,
    T_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    t, k = tl.arange(0, T_PAD)[:, None], tl.arange(0, K_PAD)[None, :]
    mask = (t < T) & (k < K)
    weights = tl.load(weights_ptr + b * T * K + t * K + k, mask=mask, other=0.0).to(tl.float32)
    nothing = tl.sum(tl.sum(weights, axis=1), axis=0) == 0
    weights = tl.where((t == T - 1) & (k == 0), tl.where(nothing, 1.0, weights), weights)
    share = tl.sum(weights, axis=1)
    share = tl.where((share > WHOLE) & (share < 1 / WHOLE), 1.0, share)
    weights = weights / tl.where(share > 0, share, 1.0)[:, None]
    tl.store(used_ptr + b * T * K + t * K + k, weights.to(used_ptr.dtype.element_ty), mask=mask)
    slot = tl.arange(0, T_PAD)
    age = tl.maximum(T - 1 - slot, 0).to(tl.float32)
    # decay to the power of age, also for a decay of 0
    power = tl.where(age == 0, 1.0, tl.where(decay == 0, 0.0, tl.exp2(age * tl.log2(decay))))
    tau = power * share
    tl.store(tau_ptr + b * T + slot, (tau / tl.sum(tau, axis=0)).to(tau_ptr.dtype.element_ty), mask=slot < T)
