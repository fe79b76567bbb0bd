"""The state of a mixture norm: the mixtures of the last T training batches, and what evaluation makes of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mixnorm import gmm
from mixnorm.gmm import GaussianMixture
from mixnorm.ops import reference
from mixnorm.ops.choose import in_backward, is_followed
from mixnorm.ops.kernels import History, Kernels, Mixture, compute_dtype, flat, is_exporting
from mixnorm.populations import WITH_HISTORY

LOOKED_AT = 256  # points, to see whether a history describes them
MOST_SQUARE = 2.0  # E[z²] of the points that a history is evaluated at; 1 where it is of such points
PRIOR_POINTS = 4  # that a prior of the variances of a small batch stands for
MOST_BATCHES = 32768.0  # that a slot stands for: fp16, should the model be converted to it, can hold sums of it
MAX_WARM_STARTS = 32  # forward passes that may wait for their recomputation


class MixtureHistory(nn.Module):
    """A queue of T mixtures, the newest last: λ (T, K), μ and σ² (T, K, C); for "channel" with a leading C and D = 1.

    A slot that was never filled has λ = 0, and counts for nothing.
    """

    # 1: the history of the last T mixtures. A state dict without a version that has running_mean is a batch norm's.
    _version = 1

    num_features: int
    num_components: int
    eps: float
    momentum: float | None
    track_running_stats: bool
    em_iters: int
    seeding: str | int
    min_weight: float
    history: int
    inference: str
    population: str
    backend: str
    bounded = True  # a slot of the history counts for less where it is far from a point; False is for measurements
    # The history: None where none is kept, and then never looked at.
    history_weights: Tensor
    history_means: Tensor
    history_vars: Tensor
    num_batches_tracked: Tensor
    history_samples: Tensor | None

    def _create_history(self, device: Any, dtype: Any) -> None:
        # What is not in the state dict: it can be found again from the buffers or the next batch.
        self._seen = False  # a batch since the history was emptied
        self._looked = False  # whether an evaluation saw that the batches came in
        self._written: int | None = None  # the version of the history that training, or a load, left
        self._told_of_refusal = self._told_of_misfit = False
        self._last_statistics: Mixture | None = None
        self._warm_starts: dict[int, tuple[Mixture | None, Tensor | None]] = {}
        self._count_before: Tensor | None = None  # the batches before the one of the last start
        self._pooled: tuple[int, GaussianMixture] | None = None  # with the version of the samples that it was fitted to

        keep = self.keeps_history
        for name, shape in self.history_shapes().items():
            self.register_buffer(name, torch.empty(shape, device=device, dtype=dtype) if keep else None)
        self.register_buffer("history_samples", None)  # of inference="pooled", once a batch has told their number
        count = torch.tensor(0, dtype=torch.long, device=device) if keep else None
        self.register_buffer("num_batches_tracked", count)

    def history_shapes(self) -> dict[str, tuple[int, ...]]:
        """The buffers of the history, with their shapes."""
        lead, dim = ((self.num_features,), 1) if self.population == "channel" else ((), self.num_features)
        shape = (*lead, self.history, self.num_components)
        return {"history_weights": shape, "history_means": (*shape, dim), "history_vars": (*shape, dim)}

    @property
    def keeps_history(self) -> bool:
        """Whether evaluation uses the history of the last T batches, and not the batch at hand."""
        return self.track_running_stats and self.population in WITH_HISTORY

    @property
    def mixture(self) -> GaussianMixture | None:
        """The mixture of the last training batch; ``None`` before the first. For "batch", (K,), (K, C) and (K, C)."""
        if self._last_statistics is not None or not self.keeps_history:
            return None if self._last_statistics is None else GaussianMixture(*self._last_statistics)
        if self._is_empty():
            return None
        weights = self.history_weights[..., -1, :].clone()
        return GaussianMixture(
            weights / reference.slot_share(weights).unsqueeze(-1),
            self.history_means[..., -1, :, :].clone(),
            self.history_vars[..., -1, :, :].clone(),
        )

    def _is_empty(self) -> bool:
        """Whether the history holds no batch. What a GPU or a tracer counted is not read back: there, any batch counts."""
        count = self.num_batches_tracked
        if torch.compiler.is_compiling() or count.device.type != "cpu" or is_followed(count):
            return not self._seen
        return not count

    def effective_components(self) -> int | Tensor:
        """How many components the last training batch used; a tensor where there are several mixtures."""
        mixture = self.mixture
        if mixture is None:
            return 0
        counts = mixture.effective_components()
        return int(counts) if counts.dim() == 0 else counts

    def reset_running_stats(self) -> None:
        """Empties the history."""
        self._seen = self._looked = False
        self._forget()
        self.history_samples = None
        if self.keeps_history:
            self.history_weights.zero_()
            self.history_means.zero_()
            self.history_vars.fill_(1)
            self.num_batches_tracked.zero_()
            self._settle()

    def _settle(self) -> None:
        """Takes what is in the buffers for the layer's own."""
        means = self._buffers["history_means"]
        if means is not None and not is_lazy(means):
            self._written = None if means.is_inference() else means._version

    def _forget(self) -> None:
        """Drops what is not in the state dict."""
        self._last_statistics = self._pooled = self._count_before = None
        self._warm_starts = {}

    def queues(self) -> tuple[Mixture, Tensor]:
        """What a training batch's mixture is pushed to: the queues (B, T, K) and twice (B, T, K, D), and the count."""
        buffers: Any = self._buffers  # found sooner than through the module
        weights, means, variances = buffers["history_weights"], buffers["history_means"], buffers["history_vars"]
        if self.population == "batch":
            weights, means, variances = weights.unsqueeze(0), means.unsqueeze(0), variances.unsqueeze(0)
        return Mixture(weights, means, variances), buffers["num_batches_tracked"]

    def remember(self, statistics: Mixture, sample: Tensor, share: float, kernels: Kernels) -> None:
        """Keeps a training batch: its mixture in the queues, where it counts for ``share`` of a whole batch, its sample."""
        if not self.keeps_history or self.momentum == 0:
            if not is_followed(sample):  # what a function transform or a tracer made must not outlive it
                one = self.population == "batch"
                self._last_statistics = Mixture(*(t.squeeze(0) for t in statistics)) if one else statistics
            return
        queues, tracked = self.queues()
        newest = statistics if share == 1 else statistics._replace(weights=statistics.weights * share)
        taken = kernels.push(queues, newest, tracked)
        if taken is not None and taken.device.type == "cpu" and not is_followed(sample) and not taken:
            self._warn_of_refusal("a batch was")
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling:
            means = self.history_means
            self._written = None if means.is_inference() else means._version
        # A module's attributes are slow to set, and a compiler would compile anew for each that is read. In an export the
        # batch is a later one, of the program.
        is_settled = not is_compiling and self._seen and self._last_statistics is None and self._pooled is None
        if not is_settled and not is_exporting():
            self._seen, self._last_statistics, self._pooled = True, None, None
        if self.inference == "pooled" and not (self.history_samples is None and is_followed(sample)):
            self._keep_sample(sample, statistics)

    @torch.no_grad()
    def with_prior(self, statistics: Mixture, count: int) -> Mixture:
        """The statistics of a batch of few points with variances that can be divided by, as the history keeps them.

        The variance of two or three points is near 0 in some channel, where an evaluation would scale everything up. So it
        is the unbiased one, averaged with what is known beside it: that of the batch before or, of the first batch, that of
        all channels together, for points at a distance from a mean of so few. Components that keep their place have their
        own of the batch before.
        """
        weights, means, variances = statistics
        points = weights.unsqueeze(-1) * count  # of each component
        freedom = (points - 1).clamp_min(0)
        newest = Mixture(*(queue.narrow(1, -1, 1).squeeze(1).to(variances.dtype) for queue in self.queues()[0]))
        total, _, before = reference.taken_together(*newest)
        before = before.unsqueeze(1)
        if weights.shape[1] == self.num_components:
            before = torch.where(newest.weights.unsqueeze(-1) > 0, newest.variances, before)
        _, _, overall = reference.taken_together(*statistics)
        at_first = overall.mean() * ((count + 1) / (count - 1))
        prior = torch.where(total.view(-1, 1, 1) > 0, before, at_first)
        return Mixture(weights, means, (points * variances + PRIOR_POINTS * prior) / (freedom + PRIOR_POINTS))

    def look_at(self, points: Tensor, history: History) -> None:
        """Before an evaluation, where that costs next to nothing: says what training would have to wait for a GPU to know.

        Whether every batch was refused; and, where someone else wrote to the buffers (not if they are a fresh copy, of
        version 0), whether what is there describes the points. An average of buffers does not, where it is of mixtures that
        have their components in any order.
        """
        if torch.compiler.is_compiling() or is_followed(points):
            return
        version = None if self.history_means.is_inference() else self.history_means._version
        if (self._looked and version == self._written) or points.is_meta or self.history_means.is_meta:
            return
        if points.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if self._seen and not self._looked and not self.num_batches_tracked:
            self._warn_of_refusal("all training batches were")
        elif (
            version not in (self._written, 0) and not self._told_of_misfit and (self.history_weights[..., :-1, :] > 0).any()
        ):
            x = flat(points.detach())
            x = x[:, :: max(1, x.shape[1] // LOOKED_AT)].to(history.means.dtype)
            with torch.no_grad():
                square = reference.mean_square(x, *history[:4], self.eps)  # type: ignore[call-arg]
            if square > MOST_SQUARE:
                self._told_of_misfit = True
                warnings.warn(
                    f"the history of a {type(self).__name__} does not fit its input, as happens when histories are averaged "
                    "(AveragedModel(use_buffers=True), a moving average of all buffers): call "
                    "mixnorm.recalibrate(model, batches) before evaluation",
                    stacklevel=2,
                )
        self._looked, self._written = True, version

    def _warn_of_refusal(self, what: str) -> None:
        if not self._told_of_refusal:
            self._told_of_refusal = True
            dtype = self.history_means.dtype
            remedy = "call float() on the norm, which takes inputs of any dtype"
            if torch.finfo(dtype).bits >= 32:
                remedy = "lower the learning rate, or look for the layer that gives it NaN or infinity"
            warnings.warn(
                f"{what} kept out of the history of a {type(self).__name__}, because the statistics are not finite in "
                f"{dtype}: {remedy}",
                stacklevel=2,
            )

    def _keep_sample(self, sample: Tensor, statistics: Mixture) -> None:
        """Appends the sample (B, s, D) to those of the last T batches, unless the history did not take the batch either."""
        if self.population == "batch":
            sample = sample.squeeze(0)
        axis = self.history_weights.dim() - 2
        queue = self._sample_queue(sample, axis)
        kept, found = queue.shape[-2], sample.shape[-2]
        # Of more points than are kept every n-th, so that no image is left out; fewer are repeated.
        rows = torch.arange(kept, device=sample.device) * max(found // kept, 1) % found
        newest = sample[..., rows, :].to(queue.dtype)
        shifted = torch.cat((queue.narrow(axis, 1, self.history - 1), newest.unsqueeze(axis)), axis)
        taken = reference.can_be_kept(*statistics, self.history_means.dtype)
        queue.copy_(torch.where(taken & newest.isfinite().all(), shifted, queue))

    def _sample_queue(self, sample: Tensor, axis: int) -> Tensor:
        """The kept samples of the last T batches, NaN where a slot is empty; as many points a slot as the largest had."""
        queue, found = self.history_samples, sample.shape[-2]
        if queue is None or queue.shape[-2] < found:
            shape = (*sample.shape[:axis], self.history, *sample.shape[axis:])
            with torch.inference_mode(False):
                if queue is None:
                    queue = torch.full(shape, torch.nan, dtype=sample.dtype, device=sample.device)
                else:  # those of smaller batches are repeated
                    queue = queue[..., torch.arange(found, device=queue.device) % queue.shape[-2], :]
            self.history_samples = queue
        return queue

    def start_for(self, points: Tensor) -> Mixture | None:
        """The last batch's mixture, to go on from with a warm start; ``None`` for the first batch, which is seeded.

        A recomputation starts where its forward pass did. It is known by a random number, because activation checkpointing
        puts the generator back.
        """
        if torch.compiler.is_compiling() or is_followed(points):
            self._count_before = None
            return self._newest_for(points)
        number = int(torch.randint(2**62, (), device="cpu"))  # whatever the default device is
        if number not in self._warm_starts or not in_backward():
            counts = self.keeps_history and self.seeding != "warm"
            self._warm_starts[number] = self._newest_for(points), self.num_batches_tracked.clone() if counts else None
        start, self._count_before = self._warm_starts[number]
        if len(self._warm_starts) > MAX_WARM_STARTS:
            del self._warm_starts[next(iter(self._warm_starts))]
        return start

    def _newest_for(self, points: Tensor) -> Mixture | None:
        """The newest mixture as (B, K) and twice (B, K, D); ``None`` where there is none for these points."""
        mixture, shape = self.mixture, (points.shape[0], self.num_components)
        if mixture is None or mixture.weights.numel() != shape[0] * shape[1]:
            return None
        dtype = compute_dtype(points.dtype)
        return Mixture(
            mixture.weights.to(dtype).reshape(shape),
            mixture.means.to(dtype).reshape(*shape, -1),
            mixture.variances.to(dtype).reshape(*shape, -1),
        )

    @property
    def decay(self) -> float:
        """ζ, the share of its weight that a slot keeps with each new batch."""
        return 1.0 if self.momentum is None else 1 - self.momentum

    def slot_weights(self) -> tuple[Tensor, Tensor]:
        """The history's λ (..., T, K) and τ (..., T), Eq. (decay_factor), over the slots that are filled."""
        return reference.slot_weights(self.history_weights, self.decay)

    def for_evaluation(self, kernels: Kernels, dtype: torch.dtype, mode: str) -> History:
        """The mixtures that an evaluation uses, as ``inference`` says."""
        (weights, means, variances), _ = self.queues()
        pooled = self.pooled_mixture() if self.inference == "pooled" else None
        if pooled is None:
            weights, tau = kernels.slot_weights(weights, self.decay)
        else:  # a history of one
            shape = (weights.shape[0], 1, self.num_components)
            weights, tau = pooled.weights.reshape(shape), pooled.weights.new_ones(shape[:2])
            means, variances = pooled.means.reshape(*shape, -1), pooled.variances.reshape(*shape, -1)
        # Copies where there may be a gradient: a training batch may come in before it is asked for.
        copy = torch.is_grad_enabled()
        tensors = (weights.to(dtype), means.to(dtype, copy=copy), variances.to(dtype, copy=copy), tau.to(dtype))
        history = History(*tensors, mode, self.bounded)
        return history._replace(variances=reference.steady_variances(*tensors)) if self.inference == "steady" else history

    def pooled_mixture(self) -> GaussianMixture | None:
        """One mixture of the kept samples of the last T batches, fitted once.

        ``None`` where none are kept, or where they are so far apart that their squares are not finite.
        """
        if is_exporting() or torch.jit.is_tracing():
            raise ValueError(
                "inference='pooled' fits its mixture in evaluation, which cannot be exported: call mixnorm.distill(model) "
                "first, which keeps that mixture"
            )
        samples = self.history_samples
        if samples is None or samples.is_meta:
            return None
        version = -1 if samples.is_inference() else samples._version  # an average of models copies into them
        if self._pooled is None or self._pooled[0] != version:
            axis = self.history_weights.dim() - 2
            filled = samples.isfinite().movedim(axis, 0).flatten(1).all(1).nonzero().squeeze(1)
            if filled.numel() == 0:
                return None
            with torch.inference_mode(False):  # a later evaluation may want a gradient under the same mixture
                pool = samples.index_select(axis, filled).flatten(axis, axis + 1)
                fitted = gmm.fit_mixture(
                    pool,
                    self.num_components,
                    em_iters=self.em_iters,
                    min_weight=self.min_weight,
                    min_variance=max(self.eps, reference.MIN_VARIANCE),
                    generator=torch.Generator(pool.device).manual_seed(0),  # the same random numbers every time
                    backend=self.backend,
                )
            if not (fitted.means.isfinite().all() and fitted.variances.isfinite().all()):
                return None
            self._pooled = (version, fitted)
        return self._pooled[1]

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> MixtureHistory:
        self._forget()

        def apply(tensor: Tensor) -> Tensor:
            """A move to a memory format is for images and volumes, but looks at the number of dimensions alone."""
            if is_lazy(tensor) or tensor.dim() < 4:
                return fn(tensor)
            return fn(tensor.flatten(-2)).view(tensor.shape)

        super()._apply(apply, *args, **kwargs)
        self._settle()
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if prefix + "running_mean" in state_dict and prefix + "running_var" in state_dict:
            self._translate_batch_norm(state_dict, prefix, error_msgs)
        if self.keeps_history and any(prefix + name in state_dict for name in ("history_samples", "history_means")):
            # The samples come and go with the history: their number is not known before.
            samples = state_dict.get(prefix + "history_samples")
            with torch.inference_mode(False):
                empty = None if samples is None else torch.empty_like(samples, device=self.history_weights.device)
            self.history_samples = empty if self.inference == "pooled" else None
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self._forget()
        self._settle()
        if self.keeps_history and not self.num_batches_tracked.is_meta:
            self._seen = bool(self.num_batches_tracked)

    def _translate_batch_norm(self, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]) -> None:
        """Replaces a batch norm's entries by the history that gives its evaluation output."""
        mean, var = (state_dict.pop(prefix + name) for name in ("running_mean", "running_var"))
        if not self.keeps_history:
            state_dict.pop(prefix + "num_batches_tracked", None)
            return
        # Batch norms of PyTorch before 0.4.1 did not count their batches.
        state_dict.setdefault(prefix + "num_batches_tracked", torch.zeros_like(self.num_batches_tracked))
        if mean.shape != (self.num_features,):
            error_msgs.append(
                f"size mismatch for {prefix}running_mean: copying a param with shape {tuple(mean.shape)} from checkpoint, "
                f"the shape in current model is {(self.num_features,)}."
            )
            mean, var = mean.new_zeros(self.num_features), mean.new_ones(self.num_features)
        for name, value in self.history_of(mean, var).items():
            state_dict[prefix + name] = value

    def history_of(self, mean: Tensor, var: Tensor) -> dict[str, Tensor]:
        """The history buffers that make evaluation equal to batch norm's with these running statistics (C,).

        They stand for all batches before: a slot of so much weight that the next batch counts for as much as it would in
        batch norm's running statistics. Where the history is weighed evenly, they count for as many batches as it holds.
        """
        buffers = {
            "history_weights": torch.zeros_like(self.history_weights, device=mean.device),
            "history_means": torch.zeros_like(self.history_means, device=mean.device),
            "history_vars": torch.ones_like(self.history_vars, device=mean.device),
        }
        shape = (-1, 1) if self.population == "channel" else (-1,)
        batches = max(1.0, min(1 / self.momentum, MOST_BATCHES)) if self.momentum else self.history
        buffers["history_weights"][..., -1, 0] = batches
        buffers["history_means"][..., -1, 0, :] = mean.view(shape)
        buffers["history_vars"][..., -1, 0, :] = var.view(shape)
        return buffers
