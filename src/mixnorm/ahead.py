"""``fit="ahead"``: a batch is shared out among the components of the batch before, and its own are fitted for the next one.

The fitted mixture says only which points belong together; λ, μ and σ² are those of the batch at hand. So a batch can be
normalized before its own mixture is there, and no step waits for a fit: in a CUDA graph it runs beside the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parameter import is_lazy

from mixnorm.history import MixtureHistory
from mixnorm.ops.choose import in_backward, is_followed
from mixnorm.ops.kernels import Kernels, Mixture, compute_dtype

NAMES = ("ahead_weights", "ahead_means", "ahead_vars")
COUNT = "ahead_count"  # of the batches that left a mixture


class FitAhead(MixtureHistory):
    """Keeps the mixture that is fitted to a batch for the next one: λ (K,), μ and σ² (K, C); for "channel" with a leading C.

    Before the first batch it is one component that has all points.
    """

    fit: str = "batch"  # here, because a layer that an earlier version pickled has none
    _has_ahead = False  # whether a batch has left its mixture; known here, so that a GPU need not be asked
    ahead_weights: Tensor
    ahead_means: Tensor
    ahead_vars: Tensor
    ahead_count: Tensor

    def _create_history(self, device: Any, dtype: Any) -> None:
        for name in NAMES:
            self.register_buffer(name, None)
        super()._create_history(device=device, dtype=dtype)
        self.register_buffer(COUNT, self._no_batch(device))

    def _no_batch(self, device: Any) -> Tensor | None:
        return torch.tensor(0, dtype=torch.long, device=device) if self.fit == "ahead" else None

    def history_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().history_shapes()
        if self.fit == "ahead":
            without_slots = [shape[:i] + shape[i + 1 :] for shape, i in zip(shapes.values(), (-2, -3, -3), strict=True)]
            shapes |= zip(NAMES, without_slots, strict=True)
        return shapes

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        self._has_ahead = False
        if self.fit == "ahead":
            for name, value in self._nothing().items():
                getattr(self, name).copy_(value)

    def _nothing(self) -> dict[str, Tensor]:
        weights, means, variances, count = (torch.zeros_like(getattr(self, name)) for name in (*NAMES, COUNT))
        weights[..., 0] = 1
        return dict(zip((*NAMES, COUNT), (weights, means, variances.fill_(1), count), strict=True))

    def start_for(self, points: Tensor) -> Mixture | None:
        """The mixture of the batch before; with ``fit="ahead"`` as it was fitted there, to share these points out.

        Such a mixture is written over when this batch's is there. A copy is kept where the forward pass may be repeated.
        """
        if self.fit == "ahead" and not torch.compiler.is_compiling() and not in_backward() and not _may_be_repeated():
            torch.randint(2**62, (), device="cpu")  # as below, so that a checkpoint changes no random number
            return self._ahead_for(points)
        return super().start_for(points)

    def _newest_for(self, points: Tensor) -> Mixture | None:
        if self.fit != "ahead":
            return super()._newest_for(points)
        found = self._ahead_for(points)
        return None if found is None else Mixture(*(t.clone() for t in found))

    def _ahead_for(self, points: Tensor) -> Mixture | None:
        if not self._has_ahead and not self._was_given(points):
            return None
        dtype = compute_dtype(points.dtype)
        weights, means, variances = (queue.squeeze(1).to(dtype) for queue in self._ahead_queues())
        return Mixture(weights, means, variances)

    def _was_given(self, points: Tensor) -> bool:
        """Whether someone wrote a mixture to the buffers, as DistributedDataParallel does; it is read back, once."""
        if torch.compiler.is_compiling() or is_followed(points) or self.ahead_count.is_meta:
            return False
        if points.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        self._has_ahead = bool(self.ahead_count)
        return self._has_ahead

    def _ahead_queues(self) -> Mixture:
        """The kept mixture as queues of one slot, (B, 1, K) and twice (B, 1, K, D)."""
        weights, means, variances = self.ahead_weights, self.ahead_means, self.ahead_vars
        shape = (-1, 1, *means.shape[-2:])
        return Mixture(weights.view(shape[:-1]), means.view(shape), variances.view(shape))

    @torch.no_grad()
    def keep_ahead(self, mixture: Mixture, kernels: Kernels) -> None:
        """Keeps the mixture of this batch for the next one, unless it is not finite."""
        kernels.push(self._ahead_queues(), mixture, self.ahead_count)
        self._has_ahead = True

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        has_buffers = self.fit == "ahead" and not is_lazy(self.ahead_means)
        if has_buffers and any(prefix + name in state_dict for name in ("history_means", "running_mean")):
            for name, value in self._nothing().items():  # where it is that of another fit, or a batch norm's
                state_dict.setdefault(prefix + name, value)
        elif self.fit != "ahead":
            for name in (*NAMES, COUNT):
                state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if has_buffers and not self.ahead_count.is_meta:
            self._has_ahead = bool(self.ahead_count)


def _may_be_repeated() -> bool:
    """Whether activation checkpointing may be at work, which runs a forward pass again in the backward pass."""
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


_streams: dict[torch.device, torch.cuda.Stream] = {}  # one a device, because two fits must not run at once


def beside_backward(y: Tensor, work: Callable[[], None]) -> None:
    """Runs ``work`` on a second stream from when the backward pass comes to y, until that pass ends."""
    device = y.device
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    stream, waiting = _streams[device], [work]

    def begin(_: Tensor) -> None:
        if not waiting:  # a second backward pass through the same graph
            return
        held = [waiting.pop()]  # with what the work reads, so that its memory is not used again before the end
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            held[0]()

        def end() -> None:
            torch.cuda.current_stream(device).wait_stream(stream)
            held.clear()

        Variable._execution_engine.queue_callback(end)

    y.register_hook(begin)
