"""The history's queues: the newest mixture comes in, the oldest goes, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mixnorm.ops.triton import tiles

Statistics = tuple[Tensor, Tensor, Tensor]
COLUMNS = 128


def push(queues: Statistics, newest: Statistics, tracked: Tensor) -> None:
    """Shifts queues (B, T, K) and twice (B, T, K, D) by one and appends ``newest``, unless that is not finite.

    ``tracked`` counts the batches. The decision is made on the device.
    """
    batch, slots, components = queues[0].shape
    columns = newest[1].numel()
    with tiles.on_device(newest[0]):
        _push[(triton.cdiv(columns, COLUMNS),)](
            *queues, *newest, tracked, slots, batch * components, columns, components, columns // batch,
            SLOTS_PAD=triton.next_power_of_2(slots), COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip


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
        number = tl.load(means_ptr + i, mask=i < means_count, other=0.0)
        number += tl.load(variances_ptr + i, mask=i < means_count, other=0.0)
        number += tl.load(weights_ptr + i, mask=i < weights_count, other=0.0)
        bad += (number - number != 0).to(tl.int32)
    if tl.sum(bad, axis=0) == 0:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        _shift(weights_queue_ptr, weights_ptr, column, weights_count, weights_row, slots, SLOTS_PAD)
        _shift(means_queue_ptr, means_ptr, column, means_count, means_row, slots, SLOTS_PAD)
        _shift(variances_queue_ptr, variances_ptr, column, means_count, means_row, slots, SLOTS_PAD)
        if tl.program_id(0) == 0:
            tl.store(tracked_ptr, tl.load(tracked_ptr) + 1)


@triton.jit
def _shift(queue_ptr, newest_ptr, column, count, row, slots, SLOTS_PAD: tl.constexpr):
    slot = tl.arange(0, SLOTS_PAD)[:, None]
    place = queue_ptr + (column // row * slots * row + column % row)[None, :] + slot * row
    mask = (slot < slots) & (column < count)[None, :]
    older = tl.load(place + row, mask=mask & (slot < slots - 1), other=0.0)
    newest = tl.load(newest_ptr + column, mask=column < count, other=0.0)[None, :]
    tl.debug_barrier()  # all is read before anything is written
    tl.store(place, tl.where(slot < slots - 1, older.to(tl.float32), newest).to(queue_ptr.dtype.element_ty), mask=mask)
