"""MixtureNorm1d, 2d and 3d: drop-in replacements for batch norm. State and modes are here, the mathematics is in ``ops``."""

from __future__ import annotations

import warnings
from numbers import Integral, Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixnorm import gmm
from mixnorm.functional import AFFINE_MODES, INFERENCE_MODES, check_choice, empty_like_affine, no_autocast
from mixnorm.history import MixtureHistory
from mixnorm.ops import backend as ops
from mixnorm.ops import distributed
from mixnorm.ops.reference import ACTIVATIONS, MIN_VARIANCE, steady_variances
from mixnorm.populations import POPULATIONS, WITH_HISTORY, from_points, parameter_for_points, to_points

SEEDINGS = ("kmeans++", "warm")
DEFAULT_MAX_SAMPLES = 4096
MIN_POINTS = 8  # a component, on average: of fewer, its variances say nothing
MAX_WARM_STARTS = 32  # forward passes that may wait for their recomputation


class _MixtureNorm(MixtureHistory):
    """What the three layers share; they differ in the rank of the input alone."""

    ranks: tuple[int, ...]
    shape_text: str
    batch_norm: type[nn.Module]
    bounded = True  # a slot of the history counts for less where it is far from a point; False is for measurements

    weight: Tensor | None
    bias: Tensor | None

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
        bias: bool = True,
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
        self._warned = False
        self._check_options()

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        for name, wanted in (("weight", affine), ("bias", affine and bias)):
            self.register_parameter(name, nn.Parameter(torch.empty(num_features, **factory)) if wanted else None)
        self._create_history(**factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def process_group(self) -> Any:
        """Whose ranks share statistics: a process group, "world" for the default one, or ``None`` for this process alone."""
        return self._group.group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self._group = distributed.Group(group)

    def train(self, mode: bool = True) -> _MixtureNorm:
        return super().train(mode and not self.frozen)

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        weight, bias = self._parameter(self.weight, x), self._parameter(self.bias, x)
        group = self._group.with_others() if self.training and self.population in WITH_HISTORY else None
        if x.numel() == 0 and group is None:
            shape = (1, -1, *[1] * (x.dim() - 2))
            return empty_like_affine(x, *(p if p is None else p.view(shape) for p in (self.weight, self.bias)))
        with no_autocast(x):
            points = to_points(x, self.population, self.num_groups or 1)
            if group is not None:
                y = distributed.outside_compiler(self._normalize_batch, points, weight, bias, group)
            elif self.training or not self.keeps_history:
                y = self._normalize_batch(points, weight, bias)
            else:
                y = self._normalize_by_history(points, weight, bias)
            y = from_points(y, self.population, like=x)
        return y.contiguous(memory_format=_memory_format(x))

    def _normalize_batch(self, points: Tensor, weight: Tensor | None, bias: Tensor | None, group: Any = None) -> Tensor:
        if torch.jit.is_tracing():
            raise ValueError(
                f"{type(self).__name__} fits a mixture here, which torch.jit.trace cannot follow: call eval() first, or use "
                "torch.export where there is no history"
            )
        start = self._warm_mixture(points) if self.seeding == "warm" and self.training else None
        ranks = None if group is None else distributed.meet(points, group)
        count = points.shape[1] * points.shape[2] if ranks is None else ranks.total
        if count == 0:  # on all ranks
            return empty_like_affine(points, weight, bias)
        if count == 1 and self.training:
            raise ValueError(
                f"expected more than 1 value per channel when training, got population={self.population!r} with one: "
                "use a larger batch or image, or call eval()"
            )
        components = min(self.num_components, max(1, count // MIN_POINTS))
        if components < self.num_components and self.training and not torch.compiler.is_compiling():
            self._warn_of_few_points(count, components)
        with torch.no_grad():
            size = gmm.sample_size(count, components, self.sample_fraction, self.max_samples)
            sample, mixture = gmm.fit_points(
                points.detach(),
                size,
                components,
                em_iters=self.em_iters,
                min_weight=self.min_weight,
                min_variance=max(self.eps, MIN_VARIANCE),
                init=start,
                generator=None,
                fixed=not self.training,
                counter=self.num_batches_tracked if self.training and self.keeps_history and _in_graph(points) else None,
                ranks=ranks,
                sample_everywhere=self.inference == "pooled",
                backend=self.backend,
            )
        # A recomputation inside backward (activation checkpointing) has been counted the first time.
        first_time = self.training and not _in_backward()
        whole = count >= MIN_POINTS * self.num_components
        pushed = first_time and self.keeps_history
        history = self.queues() if pushed and whole else None
        options: dict[str, Any] = {"eps": self.eps, "activation": self.activation, "affine_mode": self.affine_mode}
        options |= {"history": history, "backend": self.backend}
        if ranks is None:
            y, statistics = ops.transform_batch(points, mixture, weight, bias, **options)
        else:
            y, statistics = distributed.transform_batch(points, mixture, weight, bias, ranks, **options)
        if not whole:  # it counts for as much as it has points
            statistics = _with_components(statistics, self.num_components)
            if pushed:
                queues, tracked = self.queues()
                share = count / (MIN_POINTS * self.num_components)
                ops.push(queues, (statistics[0] * share, *statistics[1:]), tracked, backend=self.backend)
        if first_time:
            self.remember(statistics, sample)
        return y

    def _warn_of_few_points(self, count: int, components: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a batch of {count} points is too small for {self.num_components} components, so {components} took their "
                "place: use larger batches, or drop_last=True if this was the rest of a data set",
                stacklevel=2,
            )

    def _warm_mixture(self, points: Tensor) -> ops.Statistics | None:
        """The last batch's mixture, to go on from; ``None`` for the first batch, which is seeded.

        A recomputation starts where its forward pass did. It is known by a random number, because activation checkpointing
        puts the generator back.
        """
        if torch.compiler.is_compiling():
            return self._newest_for(points)
        number = int(torch.randint(2**62, ()))
        if number in self._warm_starts and _in_backward():
            return self._warm_starts[number]
        start = self._warm_starts[number] = self._newest_for(points)
        if len(self._warm_starts) > MAX_WARM_STARTS:
            del self._warm_starts[next(iter(self._warm_starts))]
        return start

    def _newest_for(self, points: Tensor) -> ops.Statistics | None:
        """The newest mixture as (B, K) and twice (B, K, D); ``None`` where there is none for these points."""
        mixture, shape = self.mixture, (points.shape[0], self.num_components)
        if mixture is None or mixture.weights.numel() != shape[0] * shape[1]:
            return None
        dtype = ops.compute_dtype(points.dtype)
        return (
            mixture.weights.to(dtype).reshape(shape),
            mixture.means.to(dtype).reshape(*shape, -1),
            mixture.variances.to(dtype).reshape(*shape, -1),
        )

    def _normalize_by_history(self, points: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        weights, tau = self.slot_weights()
        means, variances, mode = self.history_means, self.history_vars, self.inference
        if mode == "pooled":
            mode, pooled = "ensemble", self.pooled_mixture()
            if pooled is not None:  # a history of one
                axis = weights.dim() - 2
                weights, means, variances = (t.unsqueeze(axis) for t in (pooled.weights, pooled.means, pooled.variances))
                tau = torch.ones_like(weights[..., 0])
        history = [t.to(ops.compute_dtype(points.dtype)) for t in (weights, means, variances, tau)]
        if self.population == "batch":
            history = [t.unsqueeze(0) for t in history]
        weights, means, variances, tau = history
        if mode == "steady":
            mode, variances = "ensemble", steady_variances(weights, means, variances, tau)
        return ops.inference(
            points, weights, means, variances, tau, weight, bias, mode=mode, bounded=self.bounded, eps=self.eps,
            activation=self.activation, affine_mode=self.affine_mode, backend=self.backend,
        )  # fmt: skip

    def _parameter(self, parameter: Tensor | None, x: Tensor) -> Tensor | None:
        if parameter is None:
            return None
        parameter = parameter.to(ops.compute_dtype(x.dtype))
        return parameter_for_points(parameter, self.population, self.num_groups or 1, x.shape[0])

    def _check_options(self) -> None:
        check_choice("seeding", self.seeding, SEEDINGS)
        check_choice("inference", self.inference, (*INFERENCE_MODES, "pooled", "steady"))
        check_choice("affine_mode", self.affine_mode, AFFINE_MODES)
        check_choice("activation", self.activation, (None, *ACTIVATIONS))
        check_choice("population", self.population, POPULATIONS)
        ops.check(self.backend)
        for name, least in (("num_features", 1), ("num_components", 1), ("history", 1), ("em_iters", 0)):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
        if not 0 <= self.min_weight < 1:
            raise ValueError(f"min_weight={self.min_weight!r} must be in [0, 1): 0 drops no component")
        if self.momentum is not None and not (isinstance(self.momentum, Real) and 0 <= self.momentum <= 1):
            raise ValueError(f"momentum={self.momentum!r} must be in [0, 1], or None to weigh the history evenly")
        if not self.eps >= 0:
            raise ValueError(f"eps={self.eps!r} must not be negative")
        if self.max_samples is not None and not isinstance(self.max_samples, Integral):
            raise ValueError(f"max_samples={self.max_samples!r} must be a whole number, or None for no bound")
        gmm.sample_size(1, self.num_components, self.sample_fraction, self.max_samples)
        if self.population == "group":
            groups = self.num_groups
            if not isinstance(groups, Integral) or groups < 1 or self.num_features % groups:
                raise ValueError(
                    f"num_groups={self.num_groups!r} must divide num_features={self.num_features} for population='group'"
                )
        elif self.num_groups is not None:
            raise ValueError(
                f"num_groups={self.num_groups!r} is for population='group', not {self.population!r}: leave it out"
            )

    def _check_input(self, x: Tensor) -> None:
        if isinstance(x, torch.fx.Proxy):
            raise ValueError(
                f"{type(self).__name__} cannot be traced symbolically: use torch.export, or a torch.fx.Tracer whose "
                "is_leaf_module says True to it"
            )
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
            "process_group": None,
        }
        changed = [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return ", ".join([text, *(["bias=False"] if self.affine and self.bias is None else []), *changed])


def _with_components(statistics: ops.Statistics, count: int) -> ops.Statistics:
    """λ, μ and σ² with components of weight 0 behind them, so that there are ``count``."""
    weights, means, variances = statistics
    more = count - weights.shape[1]
    return F.pad(weights, (0, more)), F.pad(means, (0, 0, 0, more)), F.pad(variances, (0, 0, 0, more))


def _in_backward() -> bool:
    """Whether this forward pass is a recomputation. A compiler cannot know: there ``ops.library.push`` asks when it runs."""
    return not torch.compiler.is_compiling() and ops.in_backward()


def _in_graph(points: Tensor) -> bool:
    """Whether a CUDA graph is being captured, and this forward pass will not be recomputed with the generator put back."""
    if not points.is_cuda or torch.compiler.is_compiling() or not torch.cuda.is_current_stream_capturing():
        return False
    return points.requires_grad and torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def _memory_format(x: Tensor) -> torch.memory_format:
    """The memory format that batch norm would answer with."""
    for rank, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        # In this order: vmap knows only whether a tensor is contiguous.
        if x.dim() == rank and not x.is_contiguous() and x.is_contiguous(memory_format=memory_format):
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
        num_features, eps, affine, track_running_stats, device, dtype, bias: as in batch norm.
        momentum: 1 - ζ, the weight of the newest batch in the history; ``None`` weighs all T evenly.
        num_components: K.
        em_iters: the paper's "EM iter.": ``em_iters // 2`` Lloyd iterations, the rest EM.
        seeding: "kmeans++", or "warm": EM goes on from the last batch's mixture.
        sample_fraction: the share of the points that the mixture is fitted to; 1.0 is all of them.
        max_samples: a bound on that sample, so that the cost of the fit stops growing; ``None`` for no bound.
        min_weight: components under this weight are dropped, their points merged into the others.
        history: T.
        inference: "ensemble", the weighted mean of the T transforms; "mixture", one posterior over all T·K components;
            "paper", the equation as printed; "pooled", one mixture fitted to the kept samples of the last T batches;
            "steady", the ensemble with variances raised in slots that the others contradict, for evaluation in the middle of
            a training, while the weights move fast.
        affine_mode: "output" for γ·x̂ + β, "statistics" for the paper's μ_k + β and γ·σ²_k (a γ below 0 counts as 0).
        activation: ``None``, "relu", "leaky_relu", "silu" or "gelu", applied to each component inside the sum.
        population: which points share statistics. "batch": one mixture of N·L points in R^C; "instance": one for each
            sample; "layer": one for each sample, of C·L scalars; "group": one for each sample and group; "channel": one for
            each channel, of N·L scalars. Only "batch" and "channel" keep a history; the others fit in evaluation as in
            training, with fixed random numbers.
        num_groups: for ``population="group"``.
        process_group: a process group of ``torch.distributed``, or "world" for the default one: in training, statistics are
            over the batches of all its ranks, which must all take part in each forward and backward pass; a batch may be
            empty. For "batch" and "channel". A copy of the layer shares the group, a pickle keeps "world" alone.
        backend: "auto" (Triton on a GPU, compiled loops on a CPU, else plain PyTorch), "reference" or "triton". On a GPU the
            fit adds up in any order, so that two runs differ in their last digits; under
            ``torch.use_deterministic_algorithms(True)`` they agree to the bit.

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
