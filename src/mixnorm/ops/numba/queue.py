"""The history as compiled loops: the newest mixture comes in and the oldest goes; and the weights of its slots."""

from __future__ import annotations

from typing import Any

import numpy as np

from mixnorm.ops.numba.threads import entry


@entry
def push(queues: Any, newest: Any, largest_mean: float) -> bool:
    """Shifts three queues (B, T, n), of weights, means and variances, by one and appends the newest (B, n): whether it can.

    That is ``reference.can_be_kept``: all is finite, and no mean is too large to take squares from.
    """
    weights, means, variances = newest
    for values in (weights, means, variances):
        for b in range(values.shape[0]):
            for i in range(values.shape[1]):
                if not np.isfinite(values[b, i]):
                    return False
    for b in range(means.shape[0]):
        for i in range(means.shape[1]):
            if abs(means[b, i]) > means.dtype.type(largest_mean):
                return False
    for n in range(3):
        queue, values = queues[n], newest[n]
        for b in range(queue.shape[0]):
            for t in range(queue.shape[1] - 1):
                for i in range(queue.shape[2]):
                    queue[b, t, i] = queue[b, t + 1, i]
            for i in range(queue.shape[2]):
                queue[b, queue.shape[1] - 1, i] = values[b, i]
    return True


@entry
def slot_weights(weights: Any, decay: float, whole: float, used: Any, tau: Any) -> None:
    """``reference.slot_weights``: the λ (B, T, K) and τ (B, T) that a history is evaluated with."""
    batch, slots, components = weights.shape
    for b in range(batch):
        every, is_empty = 0.0, True
        for t in range(slots):
            share = 0.0
            for k in range(components):
                share += weights[b, t, k]
            tau[b, t] = 0
            if share > 0:
                is_empty = False
                # Of a batch of few points they add up to less, of what stands for many batches to more.
                counts = share if share < whole or share > 1 / whole else 1.0
                tau[b, t] = decay ** (slots - 1 - t) * counts
                every += tau[b, t]
                share = counts
            for k in range(components):
                used[b, t, k] = weights[b, t, k] / (share if share > 0 else 1.0)
        if is_empty:
            used[b, slots - 1, 0] = tau[b, slots - 1] = every = 1.0
        for t in range(slots):
            tau[b, t] /= every
