"""MixtureNorm1d, 2d and 3d: drop-in replacements for batch norm. State and modes are here, the mathematics is in ``ops``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mixnorm import gmm
from mixnorm.functional import AFFINE_MODES, INFERENCE_MODES, check_choice, empty_like_affine, no_autocast
from mixnorm.gmm import GaussianMixture
from mixnorm.ops import backend as ops
from mixnorm.ops.reference import ACTIVATIONS, MIN_VARIANCE
from mixnorm.populations import POPULATIONS, WITH_HISTORY, from_points, parameter_for_points, to_points

SEEDINGS = ("kmeans++", "warm")
DEFAULT_MAX_SAMPLES = 4096
MAX_WARM_STARTS = 32  # forward passes that may wait for their recomputation


class _MixtureNorm(nn.Module):
    """What the three layers share; they differ in the rank of the input alone."""

    ranks: tuple[int, ...]
    shape_text: str
    batch_norm: type[nn.Module]

    # 1: the history of the last T mixtures. A state dict without a version that has running_mean is a batch norm's.
    _version = 1

    history_weights: Tensor | None
    history_means: Tensor | None
    history_vars: Tensor | None
    history_samples: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_components: int = 3,
        em_iters: int = 2,
        seeding: str = "kmeans++",
        sample_fraction: float = 0.25,
        max_samples: int | None = DEFAULT_MAX_SAMPLES,
        min_weight: float = 0.01,
        history: int = 10,
        inference: str = "ensemble",
        affine_mode: str = "output",
        activation: str | None = None,
        population: str = "batch",
        num_groups: int | None = None,
        process_group: Any = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.affine = affine
        self.track_running_stats = track_running_stats
        self.num_components = num_components
        self.em_iters = em_iters
        self.seeding = seeding
        self.sample_fraction = sample_fraction
        self.max_samples = max_samples
        self.min_weight = min_weight
        self.history = history
        self.inference = inference
        self.affine_mode = affine_mode
        self.activation = activation
        self.population = population
        self.num_groups = num_groups
        self.process_group = process_group
        self.backend = backend
        self.frozen = False
        self._check_options()

        # What is not in the state dict: it can be found again from the buffers or the next batch.
        self._batches_seen = 0
        self._last_mixture: GaussianMixture | None = None
        self._warm_starts: dict[int, ops.Statistics | None] = {}
        self._pooled: GaussianMixture | None = None

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        for name in ("weight", "bias"):
            self.register_parameter(name, nn.Parameter(torch.empty(num_features, **factory)) if affine else None)
        lead, dim = ((num_features,), 1) if population == "channel" else ((), num_features)
        shape = (*lead, history, num_components)
        keep = self.keeps_history
        self.register_buffer("history_weights", torch.empty(shape, **factory) if keep else None)
        self.register_buffer("history_means", torch.empty(*shape, dim, **factory) if keep else None)
        self.register_buffer("history_vars", torch.empty(*shape, dim, **factory) if keep else None)
        self.register_buffer("history_samples", None)  # of inference="pooled", once a batch has told their number
        count = torch.tensor(0, dtype=torch.long, device=device) if keep else None
        self.register_buffer("num_batches_tracked", count)
        self.reset_parameters()

    @property
    def keeps_history(self) -> bool:
        """Whether evaluation uses the history of the last T batches, and not the batch at hand."""
        return self.track_running_stats and self.population in WITH_HISTORY

    @property
    def mixture(self) -> GaussianMixture | None:
        """The mixture of the last training batch; ``None`` before the first. For "batch", (K,), (K, C) and (K, C)."""
        if not self.keeps_history:
            return self._last_mixture
        if self._batches_seen == 0:
            return None
        return GaussianMixture(
            self.history_weights[..., -1, :].clone(),
            self.history_means[..., -1, :, :].clone(),
            self.history_vars[..., -1, :, :].clone(),
        )

    def effective_components(self) -> int | Tensor:
        """How many components the last training batch used; a tensor where there are several mixtures."""
        mixture = self.mixture
        if mixture is None:
            return 0
        counts = mixture.effective_components()
        return int(counts) if counts.dim() == 0 else counts

    def reset_running_stats(self) -> None:
        """Empties the history."""
        self._batches_seen = 0
        self._forget()
        self.history_samples = None
        if self.keeps_history:
            self.history_weights.zero_()
            self.history_means.zero_()
            self.history_vars.fill_(1)
            self.num_batches_tracked.zero_()

    def _forget(self) -> None:
        """Drops what is not in the state dict."""
        self._last_mixture = self._pooled = None
        self._warm_starts = {}

    def reset_parameters(self) -> None:
        self.reset_running_stats()
        if self.affine:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def train(self, mode: bool = True) -> _MixtureNorm:
        return super().train(mode and not self.frozen)

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        parameters = [self._parameter(p, x) for p in (self.weight, self.bias)]
        if x.numel() == 0:
            shape = (1, -1, *[1] * (x.dim() - 2))
            return empty_like_affine(x, *(p if p is None else p.view(shape) for p in (self.weight, self.bias)))
        with no_autocast(x):
            points = to_points(x, self.population, self.num_groups or 1)
            if self.training or not self.keeps_history:
                y = self._normalize_batch(points, *parameters)
            else:
                y = self._normalize_by_history(points, *parameters)
            y = from_points(y, self.population, like=x)
        return y.contiguous(memory_format=_memory_format(x))

    def _normalize_batch(self, points: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        count = points.shape[1] * points.shape[2]
        if count == 1 and self.training:
            raise ValueError(
                f"expected more than 1 value per channel when training, got population={self.population!r} with one: "
                "use a larger batch or image, or call eval()"
            )
        with torch.no_grad():
            generator = None if self.training else _fixed_generator(points.device)
            sample = self._sample(points.detach(), generator)
            mixture = gmm.fit_sample(
                sample,
                self.num_components,
                em_iters=self.em_iters,
                min_weight=self.min_weight,
                min_variance=max(self.eps, MIN_VARIANCE),
                init=self._warm_mixture(sample) if self.seeding == "warm" and self.training else None,
                generator=generator,
                backend=self.backend,
            )
            resp, statistics = ops.em_step(points.detach(), mixture, backend=self.backend)
            # A recomputation inside backward (activation checkpointing) has been counted the first time.
            if self.training and not _in_backward():
                self._remember(statistics, sample)
        return ops.normalize(
            points, resp, weight, bias, statistics=statistics, eps=self.eps, activation=self.activation,
            affine_mode=self.affine_mode, backend=self.backend,
        )  # fmt: skip

    def _sample(self, points: Tensor, generator: torch.Generator | None) -> Tensor:
        """The points that the mixture is fitted to, (B, s, D)."""
        batch, outer, inner, dim = points.shape
        count = outer * inner
        size = gmm.sample_size(count, self.num_components, self.sample_fraction, self.max_samples)
        if size == count:
            return points.reshape(batch, count, dim).to(ops.compute_dtype(points.dtype))
        index = gmm.sample_indices(count, size, points.device, generator)
        return ops.gather(points, index, backend=self.backend)

    def _warm_mixture(self, sample: Tensor) -> ops.Statistics | None:
        """The last batch's mixture, to go on from; ``None`` for the first batch, which is seeded.

        A recomputation starts where its forward pass did. It is known by a random number, because activation checkpointing
        puts the generator back.
        """
        number = 0 if torch.compiler.is_compiling() else int(torch.randint(2**62, ()))
        if number in self._warm_starts and _in_backward():
            return self._warm_starts[number]
        mixture, start = self.mixture, None
        shape = (sample.shape[0], self.num_components)
        if mixture is not None and mixture.weights.numel() == shape[0] * shape[1]:
            start = (
                mixture.weights.to(sample.dtype).reshape(shape),
                mixture.means.to(sample.dtype).reshape(*shape, -1),
                mixture.variances.to(sample.dtype).reshape(*shape, -1),
            )
        self._warm_starts[number] = start
        if len(self._warm_starts) > MAX_WARM_STARTS:
            del self._warm_starts[next(iter(self._warm_starts))]
        return start

    def _remember(self, statistics: ops.Statistics, sample: Tensor) -> None:
        """Appends this batch's mixture to the history, unless it is not finite."""
        if self.population == "batch":
            statistics, sample = tuple(s.squeeze(0) for s in statistics), sample.squeeze(0)  # type: ignore[assignment]
        if not self.keeps_history:
            self._batches_seen += 1
            self._last_mixture = GaussianMixture(*statistics)
            return
        newest = [s.to(self.history_weights.dtype) for s in statistics]
        finite = sum(s.sum() for s in newest).isfinite()
        on_host = finite.device.type == "cpu" and not torch.compiler.is_compiling()
        if on_host and not finite:
            return
        self._batches_seen += 1
        self._pooled = None
        queues = [self.history_weights, self.history_means, self.history_vars]
        axis = self.history_weights.dim() - 2
        if self.inference == "pooled":
            queues.append(self._sample_queue(sample, axis))
            rows = torch.arange(queues[-1].shape[-2], device=sample.device) % sample.shape[-2]
            newest.append(sample[..., rows, :].to(queues[-1].dtype))
        for queue, value in zip(queues, newest, strict=True):
            shifted = torch.cat((queue.narrow(axis, 1, self.history - 1), value.unsqueeze(axis)), axis)
            queue.copy_(shifted if on_host else torch.where(finite, shifted, queue))
        self.num_batches_tracked.add_(finite)

    def _sample_queue(self, sample: Tensor, axis: int) -> Tensor:
        """The kept samples of the last T batches, NaN where a slot is empty; the first batch says how many points."""
        if self.history_samples is None:
            shape = (*sample.shape[:axis], self.history, *sample.shape[axis:])
            with torch.inference_mode(False):
                self.history_samples = torch.full(shape, torch.nan, dtype=sample.dtype, device=sample.device)
        return self.history_samples

    def _normalize_by_history(self, points: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        mixtures = [self.history_weights, self.history_means, self.history_vars]
        mode, slot_weights = self.inference, None
        if mode == "pooled":
            pooled = self._pooled_mixture()
            mode = "ensemble"
            if pooled is not None:
                axis = self.history_weights.dim() - 2
                mixtures = [t.unsqueeze(axis) for t in (pooled.weights, pooled.means, pooled.variances)]
                slot_weights = torch.ones_like(mixtures[0][..., 0])
        if slot_weights is None:
            mixtures[0], slot_weights = self._slot_weights()
        if self.population == "batch":
            mixtures, slot_weights = [t.unsqueeze(0) for t in mixtures], slot_weights.unsqueeze(0)
        dtype = ops.compute_dtype(points.dtype)
        return ops.inference(
            points, *(t.to(dtype) for t in mixtures), slot_weights.to(dtype), weight, bias, mode=mode, eps=self.eps,
            activation=self.activation, affine_mode=self.affine_mode, backend=self.backend,
        )  # fmt: skip

    def _slot_weights(self) -> tuple[Tensor, Tensor]:
        """The history's λ (..., T, K) and τ (..., T), Eq. (decay_factor), over the slots that are filled."""
        filled = self.history_weights.sum(-1) > 0
        # A layer that has seen nothing behaves as a new batch norm: mean 0 and variance 1.
        unused = ~filled.any(-1, keepdim=True)
        newest = torch.zeros_like(filled[..., :1, None].expand_as(self.history_weights))
        newest[..., -1, 0] = unused.squeeze(-1)
        weights = torch.where(newest, 1.0, self.history_weights)
        age = torch.arange(self.history - 1, -1, -1, device=weights.device, dtype=weights.dtype)
        decay = torch.ones_like(age) if self.momentum is None else (1 - self.momentum) ** age
        tau = torch.where(weights.sum(-1) > 0, decay, 0.0)
        return weights, tau / tau.sum(-1, keepdim=True)

    def _pooled_mixture(self) -> GaussianMixture | None:
        """One mixture of the kept samples of the last T batches, fitted once; ``None`` where none are kept."""
        if self._pooled is None and self.history_samples is not None:
            axis = self.history_weights.dim() - 2
            filled = self.history_samples.isfinite().movedim(axis, 0).flatten(1).all(1).nonzero().squeeze(1)
            if filled.numel() == 0:
                return None
            pool = self.history_samples.index_select(axis, filled).flatten(axis, axis + 1)
            self._pooled = gmm.fit_mixture(
                pool,
                self.num_components,
                em_iters=self.em_iters,
                min_weight=self.min_weight,
                min_variance=max(self.eps, MIN_VARIANCE),
                generator=_fixed_generator(pool.device),
                backend=self.backend,
            )
        return self._pooled

    def _parameter(self, parameter: Tensor | None, x: Tensor) -> Tensor | None:
        if parameter is None:
            return None
        parameter = parameter.to(ops.compute_dtype(x.dtype))
        return parameter_for_points(parameter, self.population, self.num_groups or 1, x.shape[0])

    def _apply(self, *args: Any, **kwargs: Any) -> _MixtureNorm:
        self._forget()
        return super()._apply(*args, **kwargs)

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
        if prefix + "running_mean" in state_dict:
            self._translate_batch_norm(state_dict, prefix, error_msgs)
        if self.keeps_history:
            # The samples come and go with the state dict: their number is not known before.
            samples = state_dict.get(prefix + "history_samples")
            empty = None if samples is None else torch.empty_like(samples, device=self.history_weights.device)
            self.history_samples = empty if self.inference == "pooled" else None
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self._forget()
        if self.keeps_history and not self.num_batches_tracked.is_meta:
            self._batches_seen = int(self.num_batches_tracked)

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
            mean, var = (torch.zeros(self.num_features), torch.ones(self.num_features))
        for name, value in self.history_of(mean, var).items():
            state_dict[prefix + name] = value

    def history_of(self, mean: Tensor, var: Tensor) -> dict[str, Tensor]:
        """The history buffers that make evaluation equal to batch norm's with these running statistics (C,)."""
        buffers = {
            "history_weights": torch.zeros_like(self.history_weights, device=mean.device),
            "history_means": torch.zeros_like(self.history_means, device=mean.device),
            "history_vars": torch.ones_like(self.history_vars, device=mean.device),
        }
        shape = (-1, 1) if self.population == "channel" else (-1,)
        buffers["history_weights"][..., -1, 0] = 1
        buffers["history_means"][..., -1, 0, :] = mean.view(shape)
        buffers["history_vars"][..., -1, 0, :] = var.view(shape)
        return buffers

    def _check_options(self) -> None:
        check_choice("seeding", self.seeding, SEEDINGS)
        check_choice("inference", self.inference, (*INFERENCE_MODES, "pooled"))
        check_choice("affine_mode", self.affine_mode, AFFINE_MODES)
        check_choice("activation", self.activation, (None, *ACTIVATIONS))
        check_choice("population", self.population, POPULATIONS)
        ops.check(self.backend)
        for name, least in (("num_features", 1), ("num_components", 1), ("history", 1), ("em_iters", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
        if not 0 <= self.min_weight < 1:
            raise ValueError(f"min_weight={self.min_weight!r} must be in [0, 1): 0 drops no component")
        if self.momentum is not None and not (isinstance(self.momentum, (int, float)) and 0 <= self.momentum <= 1):
            raise ValueError(f"momentum={self.momentum!r} must be in [0, 1], or None to weigh the history evenly")
        if not self.eps >= 0:
            raise ValueError(f"eps={self.eps!r} must not be negative")
        if self.max_samples is not None and not isinstance(self.max_samples, int):
            raise ValueError(f"max_samples={self.max_samples!r} must be a whole number, or None for no bound")
        gmm.sample_size(1, self.num_components, self.sample_fraction, self.max_samples)
        if self.population == "group":
            groups = self.num_groups
            if not isinstance(groups, int) or groups < 1 or self.num_features % groups:
                raise ValueError(
                    f"num_groups={self.num_groups!r} must divide num_features={self.num_features} for population='group'"
                )
        elif self.num_groups is not None:
            raise ValueError(
                f"num_groups={self.num_groups!r} is for population='group', not {self.population!r}: leave it out"
            )
        if self.process_group is not None:
            raise NotImplementedError(
                "process_group: statistics over several processes are not part of this version; leave it out, and every "
                "process normalizes by its own batch"
            )

    def _check_input(self, x: Tensor) -> None:
        if x.dim() not in self.ranks:
            raise ValueError(
                f"expected {self.shape_text} input to {type(self).__name__}, got {x.dim()}-D of shape {tuple(x.shape)}: "
                "use the layer of that rank, or reshape the input"
            )
        if x.shape[1] != self.num_features:
            raise ValueError(
                f"expected {self.num_features} channels in dimension 1, got {x.shape[1]} in shape {tuple(x.shape)}: "
                "set num_features to the channels of the input"
            )
        if not x.is_floating_point():
            raise ValueError(f"expected floating point input, got {x.dtype}: convert it with .float()")

    def extra_repr(self) -> str:
        text = (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}, num_components={self.num_components}, "
            f"em_iters={self.em_iters}, inference={self.inference!r}"
        )
        defaults = {
            "seeding": "kmeans++",
            "affine_mode": "output",
            "activation": None,
            "population": "batch",
            "num_groups": None,
        }
        changed = [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return ", ".join([text, *changed])


def _fixed_generator(device: torch.device) -> torch.Generator | None:
    """The same random numbers every time, for evaluation."""
    return None if device.type == "meta" else torch.Generator(device).manual_seed(0)


def _in_backward() -> bool:
    """Whether this forward pass is a recomputation, as activation checkpointing does it."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _memory_format(x: Tensor) -> torch.memory_format:
    """The memory format that batch norm would answer with."""
    for rank, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == rank and x.is_contiguous(memory_format=memory_format) and not x.is_contiguous():
            return memory_format
    return torch.contiguous_format


class MixtureNorm2d(_MixtureNorm):
    r"""Mixture normalization over (N, C, H, W) input, a drop-in for :class:`torch.nn.BatchNorm2d`.

    Fits a mixture of K Gaussians to each batch and normalizes every point by the component that it belongs to:

    .. math::
        \hat x_i = \sum_k \frac{\nu_k(x_i)}{\sqrt{\lambda_k}} \cdot \frac{x_i - \mu_k}{\sqrt{\sigma_k^2 + \epsilon}},
        \qquad y = \gamma \hat x + \beta.

    With K = 1 this is batch norm. In evaluation the mixtures of the last T training batches take the place of the batch's
    own; ``history_vars`` holds the variances that the training transform divides by, without batch norm's n / (n - 1).

    Args:
        num_features, eps, affine, track_running_stats, device, dtype: as in batch norm.
        momentum: 1 - ζ, the weight of the newest batch in the history; ``None`` weighs all T evenly.
        num_components: K.
        em_iters: the paper's "EM iter.": ``em_iters // 2`` Lloyd iterations, the rest EM.
        seeding: "kmeans++", or "warm": EM goes on from the last batch's mixture.
        sample_fraction: the share of the points that the mixture is fitted to; 1.0 is all of them.
        max_samples: a bound on that sample, so that the cost of the fit stops growing; ``None`` for no bound.
        min_weight: components under this weight are dropped, their points merged into the others.
        history: T.
        inference: "ensemble", the weighted mean of the T transforms; "mixture", one posterior over all T·K components;
            "paper", the equation as printed; "pooled", one mixture fitted to the kept samples of the last T batches.
        affine_mode: "output" for γ·x̂ + β, "statistics" for the paper's μ_k + β and γ·σ²_k (a γ below 0 counts as 0).
        activation: ``None``, "relu", "leaky_relu", "silu" or "gelu", applied to each component inside the sum.
        population: which points share statistics. "batch": one mixture of N·L points in R^C; "instance": one for each
            sample; "layer": one for each sample, of C·L scalars; "group": one for each sample and group; "channel": one for
            each channel, of N·L scalars. Only "batch" and "channel" keep a history; the others fit in evaluation as in
            training, with fixed random numbers.
        num_groups: for ``population="group"``.
        process_group: for statistics over several processes.
        backend: "auto", "reference" or "triton".

    Shape:
        The output has the shape, memory format and dtype of the input. Statistics are in fp32 at least.

    Examples:
        >>> layer = mixnorm.MixtureNorm2d(64, num_components=3)
        >>> y = layer(torch.randn(16, 64, 8, 8))
        >>> layer.effective_components()
        3
    """

    ranks, shape_text, batch_norm = (4,), "(N, C, H, W)", nn.BatchNorm2d


class MixtureNorm1d(_MixtureNorm):
    """Mixture normalization over (N, C) or (N, C, L) input; arguments as in :class:`MixtureNorm2d`."""

    ranks, shape_text, batch_norm = (2, 3), "(N, C) or (N, C, L)", nn.BatchNorm1d


class MixtureNorm3d(_MixtureNorm):
    """Mixture normalization over (N, C, D, H, W) input; arguments as in :class:`MixtureNorm2d`."""

    ranks, shape_text, batch_norm = (5,), "(N, C, D, H, W)", nn.BatchNorm3d
