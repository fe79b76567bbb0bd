"""What MixtureNorm1d, 2d and 3d share: options, the two ways of a forward pass. The mathematics is in ``ops``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mixnorm import gmm
from mixnorm.ahead import FitAhead, beside_backward
from mixnorm.functional import Activation, AffineMode, Scale, empty_like_affine, no_autocast
from mixnorm.ops import distributed
from mixnorm.ops.choose import Backend, in_backward, is_followed, kernels_for
from mixnorm.ops.fit import Options
from mixnorm.ops.kernels import Form, Kernels, Look, Mixture, Parameters, compute_dtype
from mixnorm.ops.reference import MIN_VARIANCE
from mixnorm.options import DEFAULT_MAX_SAMPLES, GATES, Fit, Inference, Learned, Seeding, check_options
from mixnorm.populations import PER_FEATURE, WITH_HISTORY, Population, look_of, parameter_for_points

KERNEL_MODE = {"pooled": "ensemble", "steady": "ensemble"}  # ways to make a history, which is evaluated as an ensemble
MIN_POINTS = 8  # a component, on average: of fewer, its variances say nothing
STILL = 50  # training batches after which gates that have not moved are told


class _MixtureNorm(FitAhead):
    """What the three layers share; they differ in the rank of the input alone."""

    ranks: tuple[int, ...]
    shape_text: str

    weight: Tensor | None
    bias: Tensor | None
    within_weight: Tensor | None  # g, b and d, where they are learned
    between_weight: Tensor | None
    deviation_weight: Tensor | None
    # Here, because a layer that an earlier version pickled has none. None once the gates were looked at.
    _batches_with_gradient: int | None = 0

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
        seeding: Seeding | int = "kmeans++",
        fit: Fit = "batch",
        sample_fraction: float = 0.25,
        max_samples: int | None = DEFAULT_MAX_SAMPLES,
        min_weight: float = 0.01,
        history: int = 10,
        inference: Inference = "ensemble",
        affine_mode: AffineMode = "output",
        scale: Scale = "fisher",
        between: float | Learned = 0.0,
        within: float | Learned = 1.0,
        deviation: float | Learned = 0.0,
        component_affine: bool = False,
        activation: Activation | None = None,
        population: Population = "batch",
        num_groups: int | None = None,
        process_group: Any = None,
        backend: Backend = "auto",
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
        self.fit = fit
        self.sample_fraction = sample_fraction
        self.max_samples = max_samples
        self.min_weight = min_weight
        self.history = history
        self.inference = inference
        self.affine_mode = affine_mode
        self.scale = scale
        self.between = between
        self.within = within
        self.deviation = deviation
        self.component_affine = component_affine
        self.activation = activation
        self.population = population
        self.num_groups = num_groups
        self.process_group = process_group
        self.backend = backend
        self.frozen = False
        self._warned = self._whole = False  # of few points; whether a batch had enough
        check_options(self)

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        for name, wanted in (("weight", affine), ("bias", affine and bias)):
            shape = self.parameter_shapes()[name]
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **factory)) if wanted else None)
        for name in GATES:
            is_learned = getattr(self, name) == "learned"
            learned = nn.Parameter(torch.empty(num_features, **factory)) if is_learned else None
            self.register_parameter(f"{name}_weight", learned)
        self._create_history(**factory)
        self.reset_parameters()

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters that there may be, with their shapes."""
        one = (self.num_features,)
        of_affine = (self.num_components, self.num_features) if self.component_affine else one
        return {"weight": of_affine, "bias": of_affine, **{f"{name}_weight": one for name in GATES}}

    def reset_parameters(self) -> None:
        self.reset_running_stats()
        self._count_batches_anew()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        for name, gate in GATES.items():
            if (learned := self._parameters[f"{name}_weight"]) is not None:
                nn.init.constant_(learned, gate.batch_norm)

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
        if isinstance(x, torch.fx.Proxy):
            return leaf_of(self, x)
        self._check_input(x)
        parameters = self._parameters_for(x)
        group = None
        if self._group.group is not None and self.training and self.population in WITH_HISTORY:
            group = self._group.with_others()
        if x.numel() == 0 and group is None:
            shape = (1, -1, *[1] * (x.dim() - 2))
            own = self._parameters.values()
            return empty_like_affine(x, *(p if p is None else p.view(-1, x.shape[1]).sum(0).view(shape) for p in own))
        with no_autocast(x):
            look = look_of(self.population, self.num_groups)
            if group is not None:
                y = distributed.outside_compiler(self._normalize_batch, x, look, parameters, group)
            elif self.training or not self.keeps_history:
                y = self._normalize_batch(x, look, parameters)
            else:
                y = look.back(self._normalize_by_history(look.points(x), parameters), like=x)
        y = y.contiguous(memory_format=_memory_format(x))
        if y.requires_grad and not torch.compiler.is_compiling() and y._is_view():
            # As batch norm's, the output is no view: FSDP2 loses sight of one that changes in place, as behind it in a ReLU.
            # Nothing in the graph keeps the tensor that it is a view of.
            y = torch.ops.aten._unsafe_view(y, y.shape)
        return y

    def _normalize_batch(self, x: Tensor, look: Look, parameters: Parameters, group: Any = None) -> Tensor:
        if torch.jit.is_tracing():
            raise ValueError(
                f"{type(self).__name__} fits a mixture here, which torch.jit.trace cannot follow: call eval() first, or use "
                "torch.export where there is no history"
            )
        points = look.points(x.detach())
        # A warm start, or with fit="ahead" all that these points need.
        is_ahead = self.fit == "ahead" and self.training
        start = self.start_for(points) if (self.seeding != "kmeans++" and self.training) or is_ahead else None
        ranks = None if group is None else self._meet(points, x.requires_grad, start, group)
        count = points.shape[1] * points.shape[2] if ranks is None else ranks.total
        if count == 0:  # on all ranks
            affine = (p if p is None or p.dim() != 2 else p.sum(0) for p in parameters)
            return look.back(empty_like_affine(look.points(x), *affine), like=x)
        if count == 1 and self.training:
            raise ValueError(
                f"expected more than 1 value per channel when training, got population={self.population!r} with one: "
                "use a larger batch or image, or call eval()"
            )
        components, share = self.num_components, 1.0
        keeps_place = self.component_affine and start is not None
        if count < MIN_POINTS * components:
            share = count / (MIN_POINTS * components)  # such a batch counts for less
            components = components if keeps_place else max(1, count // MIN_POINTS)
            if is_ahead:
                is_ahead, start = False, None
        if components < self.num_components:
            start = None
            self._warn_of_few_points(count, components)
            if self.component_affine:  # these are not the components that γ and β are for
                weight, bias = (p if p is None else p.mean(0).expand(components, -1) for p in parameters[:2])
                parameters = parameters._replace(weight=weight, bias=bias)
        per_feature = self.population in PER_FEATURE or all(p is None for p in parameters)
        kernels = kernels_for(points, components, self.backend, per_feature=per_feature)
        form = Form(self.eps, self.activation, self.affine_mode, self.scale, self.component_affine)
        in_graph = kernels.counts and self.training and _in_graph(x)
        fit = self._fit_of(points, count, components, None if is_ahead else start, kernels, ranks, in_graph)
        if is_ahead and start is not None:
            sample, mixture = points, start
        else:
            sample, mixture = fit()
        if ranks is None:
            y, found = kernels.transform_of(x, look, mixture, parameters, form)
        else:
            y, found = distributed.transform_of(x, look, mixture, parameters, form, kernels, ranks)
        if self.training and (torch.compiler.is_compiling() or not in_backward()):
            # A recomputation (activation checkpointing) has been counted the first time. A compiled one asks as it runs.
            if not torch.compiler.is_compiling() and y.requires_grad and self._batches_with_gradient is not None:
                self._batches_with_gradient += 1
            if share < 1 and (components == 1 or keeps_place) and self.keeps_history and self.momentum != 0:
                found = self.with_prior(found, count)
            if components < self.num_components:
                found = _padded(found, self.num_components)
            if share == 1 or not (keeps_place and self._whole):  # components without points would lose their place
                self.remember(found, sample, share, kernels)
            if self.component_affine and share == 1:
                self._whole = True
            if is_ahead and start is None:
                self.keep_ahead(mixture, kernels)
            elif is_ahead and in_graph and ranks is None and y.requires_grad:
                beside_backward(y, lambda: self.keep_ahead(fit()[1], kernels))
            elif is_ahead:
                self.keep_ahead(fit()[1], kernels)
        return y

    def _fit_of(
        self,
        points: Tensor,
        count: int,
        components: int,
        start: Mixture | None,
        kernels: Kernels,
        ranks: Any,
        in_graph: bool,
    ) -> Callable[[], tuple[Tensor, Mixture]]:
        """The fit of a mixture to a sample of the points. Its random numbers are drawn now, whenever it is called."""
        size = gmm.sample_size(count, components, self.sample_fraction, self.max_samples)
        lloyd_iters = self.em_iters // 2
        options = Options(lloyd_iters, self.em_iters - lloyd_iters, max(self.eps, MIN_VARIANCE), self.min_weight)
        fits: list[Callable[[], tuple[Tensor, Mixture]]] = []
        # With a number, both: how many batches there were is not read back from a GPU.
        for begin in (start,) if start is None or self.seeding == "warm" else (None, start):
            if in_graph and begin is None and self.keeps_history:
                draws: Any = int(torch.randint(2**62, (), device="cpu")), self.num_batches_tracked
            else:
                draws = gmm.draw(size, points, components, begin, fixed=not self.training)
            given = points, size, draws, components, options, begin, kernels
            if ranks is None:
                fits.append(functools.partial(gmm.fit_points, *given))
            else:
                fits.append(functools.partial(gmm.fit_over_ranks, *given, ranks, self.inference == "pooled"))
        return fits[0] if len(fits) == 1 else functools.partial(self._early_or_late, *fits)

    def _early_or_late(self, seeded: Callable[[], Any], continued: Callable[[], Any]) -> tuple[Tensor, Mixture]:
        """Both fits, and of their mixtures the seeded one in the first batches of a training."""
        (_, early), (sample, late) = seeded(), continued()
        batches = self.num_batches_tracked if self._count_before is None else self._count_before
        is_early: Any = batches < self.seeding  # type: ignore[operator]
        return sample, Mixture(*(torch.where(is_early, a, b) for a, b in zip(early, late, strict=True)))

    def _meet(self, points: Tensor, has_gradient: bool, start: Mixture | None, group: Any) -> distributed.Ranks:
        """What the ranks tell each other before they fit: an error on all of them unless they are at the same layer."""
        own = self._group
        who = f"{type(self).__name__} {own.name!r}" if own.name else f"{type(self).__name__}({self.num_features})"
        alike = {
            "the step": "a forward pass in training",
            "num_features": self.num_features,
            "population": self.population,
            "num_components": self.num_components,
            "sample_fraction": self.sample_fraction,
            "max_samples": self.max_samples,
            "inference='pooled'": self.inference == "pooled",
            "seeding": self.seeding,
            "fit": self.fit,
            "an earlier batch to continue from": start is not None and self.seeding != "warm",
            "the dtype of the statistics": compute_dtype(points.dtype),
            "a gradient of the input": has_gradient,
        }
        count = points.shape[1] * points.shape[2]
        return distributed.meet(group, who, points.device, count, alike, own.number)

    def _warn_of_few_points(self, count: int, components: int) -> None:
        if self.training and not self._warned and not torch.compiler.is_compiling():
            self._warned = True
            warnings.warn(
                f"a batch of {count} points is too small for {self.num_components} components and was normalized with "
                f"{components}: use larger batches, or DataLoader(drop_last=True) if it was the last one of an epoch",
                stacklevel=2,
            )

    def _look_at_gates(self, points: Tensor) -> None:
        """Says so where gates are learned, but nobody trains them; once, in an evaluation, which may wait for a GPU."""
        # The compiler is asked about first: it would compile anew for each number of batches.
        if torch.compiler.is_compiling() or self._batches_with_gradient is None or self._batches_with_gradient < STILL:
            return
        if is_followed(points) or (points.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        count, self._batches_with_gradient = self._batches_with_gradient, None
        learned = {name: getattr(self, f"{name}_weight") for name in GATES}  # which others may compute, or hold as views
        moving = {name: p for name, p in learned.items() if p is not None and p.requires_grad and not p.is_meta}
        if moving and all(bool((p == GATES[name].batch_norm).all()) for name, p in moving.items()):
            names = " and ".join(f"{name}_weight" for name in moving)
            warnings.warn(
                f"{names} of a {type(self).__name__} did not change in {count} training batches, so that it is still batch "
                "norm: build the optimizer after mixnorm.convert, or add them to it with add_param_group",
                stacklevel=2,
            )

    def _normalize_by_history(self, points: Tensor, parameters: Parameters) -> Tensor:
        mode = KERNEL_MODE.get(self.inference, self.inference)
        per_feature = self.population in PER_FEATURE or all(p is None for p in parameters)
        kernels = kernels_for(points, self.num_components, self.backend, per_feature=per_feature, mode=mode)
        history = self.for_evaluation(kernels, compute_dtype(points.dtype), mode)
        self.look_at(points, history)
        self._look_at_gates(points)
        form = Form(self.eps, self.activation, self.affine_mode, self.scale, self.component_affine)
        return kernels.inference(points, history, parameters, form)

    def _parameters_for(self, x: Tensor) -> Parameters:
        """What a transform may learn, in the dtype of the computation, as it broadcasts against the points of x."""
        dtype, weight, bias = compute_dtype(x.dtype), self.weight, self.bias
        within, between, deviation = self.within_weight, self.between_weight, self.deviation_weight
        if within is None and self.within != 1:
            within = x.new_full((self.num_features,), float(self.within), dtype=dtype)
        if between is None and self.between != 0:
            between = x.new_full((self.num_features,), float(self.between), dtype=dtype)
        if deviation is None and self.deviation != 0:
            deviation = x.new_full((self.num_features,), float(self.deviation), dtype=dtype)
        parameters = Parameters(
            None if weight is None else weight.to(dtype),
            None if bias is None else bias.to(dtype),
            None if within is None else within.to(dtype),
            None if between is None else between.to(dtype),
            None if deviation is None else deviation.to(dtype),
        )
        if self.population in PER_FEATURE:
            return parameters
        shape = self.population, self.num_groups or 1, x.shape[0]
        return Parameters(*(None if p is None else parameter_for_points(p, *shape) for p in parameters))

    def _check_input(self, x: Tensor) -> None:
        if x.dim() not in self.ranks:
            self.check_rank(x)
        if x.shape[1] != self.num_features:
            raise ValueError(
                f"expected {self.num_features} channels in dimension 1, got {x.shape[1]} in shape {tuple(x.shape)}: "
                "set num_features to the channels of the input"
            )
        if not x.is_floating_point():
            raise ValueError(f"expected floating point input, got {x.dtype}: convert it with .float()")

    def check_rank(self, x: Tensor) -> None:
        if x.dim() not in self.ranks:
            raise ValueError(
                f"expected {self.shape_text} input to {type(self).__name__}, got {x.dim()}-D of shape {tuple(x.shape)}: "
                "use the layer of that rank, or reshape the input"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + "running_mean" in state_dict:  # a batch norm's: there the learned forms start
            for name, gate in GATES.items():
                if self._parameters[f"{name}_weight"] is not None:
                    state_dict.setdefault(f"{prefix}{name}_weight", torch.full((self.num_features,), gate.batch_norm))
        for name in ("weight", "bias") if self.component_affine else ():
            value = state_dict.get(prefix + name)
            if value is not None and not is_lazy(value) and value.dim() == 1:
                state_dict[prefix + name] = value.expand(self.num_components, -1).clone()
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._count_batches_anew()

    def _count_batches_anew(self) -> None:
        """Where the gates are set: those of a checkpoint may be the first ones again."""
        if self._batches_with_gradient is not None:
            self._batches_with_gradient = 0

    def extra_repr(self) -> str:
        text = (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}, num_components={self.num_components}, "
            f"em_iters={self.em_iters}, inference={self.inference!r}"
        )
        defaults = {
            "seeding": "kmeans++",
            "fit": "batch",
            "affine_mode": "output",
            "scale": "fisher",
            "between": 0.0,
            "within": 1.0,
            "deviation": 0.0,
            "component_affine": False,
            "activation": None,
            "population": "batch",
            "num_groups": None,
            "process_group": None,
        }
        changed = [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return ", ".join([text, *(["bias=False"] if self.affine and self.bias is None else []), *changed])


def leaf_of(module: Any, x: Any) -> Any:
    """The call of a module as one node of the graph that ``torch.fx`` traces, as it is of the norms in ``torch.nn``."""
    path = x.tracer.path_of_module(module)
    if not path:
        raise ValueError(
            f"a {type(module).__name__} by itself cannot be traced symbolically: trace a model with it, or use torch.export"
        )
    return x.tracer.create_proxy("call_module", path, (x,), {})


def _in_graph(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured, and this forward pass will not be recomputed with the generator put back."""
    if not x.is_cuda or torch.compiler.is_compiling() or not torch.cuda.is_current_stream_capturing():
        return False
    return x.requires_grad and torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def _padded(mixture: Mixture, count: int) -> Mixture:
    """λ, μ and σ² with components of weight 0 behind them, so that there are ``count``."""
    weights, means, variances = mixture
    more = count - weights.shape[1]
    return Mixture(F.pad(weights, (0, more)), F.pad(means, (0, 0, 0, more)), F.pad(variances, (0, 0, 0, more)))


def _memory_format(x: Tensor) -> torch.memory_format:
    """The memory format that batch norm would answer with."""
    if torch._C._are_functorch_transforms_active():  # vmap knows only whether a tensor is contiguous
        return torch.contiguous_format
    for rank, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == rank and not x.is_contiguous() and x.is_contiguous(memory_format=memory_format):
            return memory_format
    return torch.contiguous_format
