"""The kernels for a CPU: loops that numba compiles, which ``backend="auto"`` uses there."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from mixnorm.ops import reference
from mixnorm.ops.autograd import FastKernels, ReferenceTransform
from mixnorm.ops.fit import Options
from mixnorm.ops.kernels import Form, History, Kernels, Mixture, Parameters
from mixnorm.ops.numba import em, evaluation, fit, gradient, transform
from mixnorm.ops.numba.points import Points
from mixnorm.ops.numba.telling import tell_of

_ACTIVATIONS = {
    "relu": transform.RELU,
    "leaky_relu": transform.LEAKY_RELU,
    "silu": transform.SILU,
    "gelu": transform.GELU,
}

tell_of(__name__)

# Numba's threads start here and not in the first kernel: with OpenMP, their number would become torch's as well.
_threads = torch.get_num_threads()
numba.get_num_threads()
torch.set_num_threads(_threads)
# Of numba's threading layers, two threads may not enter this one at once.
_LOCK = threading.Lock() if numba.threading_layer() == "workqueue" else contextlib.nullcontext()


class NumbaKernels(FastKernels):
    """Compiled loops over points in any memory layout, in fp32 or fp64."""

    name = "numba"

    def for_fit(self) -> Kernels:
        return NUMBA_FIT

    def obstacle(self, points: Tensor, components: int) -> str | None:
        return None if _usable else "numba's threads are not in a process that was forked"

    def sample_and_fit(
        self, points: Tensor, size: int, draws: Any, components: int, options: Options
    ) -> tuple[Tensor, Mixture]:
        sample = self.sample(points, size, draws).contiguous()
        uniforms, found = draws[size + 1 :].view(points.shape[0], -1), _empty_mixture(sample, components)
        with _LOCK:
            fit.seed(*_arrays(sample.unsqueeze(2), uniforms, found.means))
        # The first step of k-means finds the clusters of the seeds. Of one component there is nothing to iterate.
        steps = (1 + options.lloyd_iters, options.em_iters) if components > 1 else (1, 0)
        _em(sample.unsqueeze(2), found, steps=steps, floors=(options.min_variance, options.min_weight))
        return sample, found

    def sample(self, points: Tensor, size: int, draws: Tensor) -> Tensor:
        batch, outer, inner, dim = points.shape
        if size == outer * inner or points.dtype not in _TYPES:
            return super().sample(points, size, draws)
        sample = points.new_empty(batch, size, dim)
        with _LOCK:
            fit.sample(*_arrays(points, draws, sample))
        return sample

    def em(self, sample: Tensor, start: Mixture, iterations: int, options: Options) -> Mixture:
        found = Mixture(*(t.clone(memory_format=torch.contiguous_format) for t in start))
        _em(sample.unsqueeze(2), found, steps=(0, iterations), floors=(options.min_variance, options.min_weight))
        return found

    def em_step(self, points: Tensor, mixture: Mixture) -> tuple[Tensor, Mixture]:
        found = Mixture(*(t.clone(memory_format=torch.contiguous_format) for t in mixture))
        return _em(points.to(found.means.dtype), found, steps=(0, 1)), found

    def moments(self, points: Tensor, resp: Tensor) -> Mixture:
        points = points.to(resp.dtype)
        found = _empty_mixture(points, resp.shape[2])
        found.means.copy_(points[:, :1, 0])  # about the first point, and if that is far away once more, about the means
        _em(points, found, resp=resp)
        return found

    def mix(
        self, points: Tensor, resp: Tensor, mixture: Mixture, parameters: Parameters, form: Form, out: Tensor | None = None
    ) -> Tensor:
        x = points.to(resp.dtype)
        y = out if out is not None and out.dtype == x.dtype else torch.empty_like(x)
        with _LOCK:
            lines, shift, *_ = _lines(_factors(mixture.weights, parameters, form), mixture[1:], mixture, parameters, form)
            threads, *arrays, written = _arrays(x, resp, y)
            transform.mix(threads, *arrays, *lines, shift, written)
        if out is None:
            return y.to(points.dtype)
        return out if y is out else out.copy_(y)

    def mix_backward(
        self,
        grad: Tensor,
        points: Tensor,
        resp: Tensor,
        mixture: Mixture,
        parameters: Parameters,
        form: Form,
        over_ranks: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor | None, ...]:
        factors = _factors(mixture.weights, parameters, form)
        return _gradient(
            grad, points, resp, mixture.weights, factors, mixture[1:], mixture, parameters, form, True, over_ranks
        )

    def evaluate(self, points: Tensor, history: History, parameters: Parameters, form: Form) -> Tensor:
        x = points.to(history.means.dtype)
        log_weights, factors, slots, components, options = _flat_history(history, parameters, form)
        y = torch.empty_like(x)
        with _LOCK:
            lines, shift, *_ = _lines(factors, components, history, parameters, form)
            *arrays, out = _arrays(x, log_weights, slots, *components, y)
            evaluation.evaluate(*arrays, *options, *lines, shift, out)
        return y.to(points.dtype)

    def inference_backward(
        self, grad: Tensor, points: Tensor, history: History, parameters: Parameters, form: Form
    ) -> list[Tensor | None]:
        x = points.detach().to(history.means.dtype)
        log_weights, factors, slots, components, options = _flat_history(history, parameters, form)
        resp = x.new_empty(x.shape[0], x.shape[1] * x.shape[2], log_weights.shape[1])
        *arrays, out = _arrays(x, log_weights, slots, *components, resp)
        with _LOCK:
            evaluation.posteriors(*arrays, *options, out)
        return list(_gradient(grad, points, resp, log_weights, factors, components, history, parameters, form, False, None))


class _FitOnly(ReferenceTransform, NumbaKernels):
    name = "numba-fit"


NUMBA, NUMBA_FIT = NumbaKernels(), _FitOnly()

_usable = True  # until a fork: OpenMP's threads are not in the child, and numba's next loop would end that process


def _after_fork() -> None:
    global _usable
    _usable = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _is_scale_inside(parameters: Parameters, form: Form) -> bool:
    return form.is_scale_inside(parameters.within is not None or parameters.between is not None)


def _factors(weights: Tensor, parameters: Parameters, form: Form) -> tuple[Tensor, Tensor]:
    """a_k behind the activation, and inside."""
    a = reference.component_scale(weights, form.scale)
    return (torch.ones_like(a), a) if _is_scale_inside(parameters, form) else (a, torch.ones_like(a))


def _lines(
    factors: Sequence[Tensor],
    components: Sequence[Tensor],
    mixtures: Mixture | History,
    parameters: Parameters,
    form: Form,
) -> tuple[Any, ...]:
    """Each component as a line or a parabola, the shift behind their sum, and what ``transform.affine`` makes these of.

    Loops are compiled for an activation and a deviation that are ``None``, and for those that are not.
    """
    given = _arrays(factors[1], *components, *_with_overall(mixtures, parameters), like=components[0])[1:]
    deviation = None if parameters.deviation is None else _arrays(parameters.deviation.unsqueeze(0))[1]
    affine_inside = form.affine_mode == "output" and (form.component_affine or form.activation is not None)
    options = deviation, float(form.eps), form.affine_mode == "statistics", affine_inside
    *lines, shift = transform.affine(*given, *options)
    activation = None if form.activation is None else _ACTIVATIONS[form.activation]
    return (_arrays(factors[0])[1], *lines, activation), shift, given, options


def _with_overall(mixtures: Mixture | History, parameters: Parameters) -> list[Tensor | None]:
    """μ and σ² of all points (2·B, D), if they are needed, and the parameters but d as (1, D) or (K, D)."""
    weight, bias, within, between, _ = parameters
    rows = [
        None if weight is None else weight.reshape(-1, weight.shape[-1]),
        None if bias is None else bias.reshape(-1, bias.shape[-1]),
        None if within is None else within.unsqueeze(0),
        None if between is None else between.unsqueeze(0),
    ]
    if within is None and between is None:
        return [None, *rows]
    if isinstance(mixtures, History):
        overall = reference.overall_statistics(mixtures)
    else:
        overall = reference.taken_together(*mixtures)[1:]
    return [torch.stack(overall, 1).flatten(0, 1), *rows]


def _flat_history(history: History, parameters: Parameters, form: Form) -> tuple[Any, ...]:
    """A history as the loops take it: T·K components in groups that each have a posterior of their own."""
    log_weights, mixing, scale = reference.inference_factors(history.weights, history.tau, history.mode, form.scale)
    factors = (mixing, scale) if _is_scale_inside(parameters, form) else (mixing * scale, torch.ones_like(scale))
    components = history.means.flatten(1, 2), history.variances.flatten(1, 2)
    group, dim = history.weights.shape[2], history.means.shape[3]
    slots, farthest = history.tau, reference.farthest(dim) if history.bounded else float("inf")
    if history.mode != "ensemble":
        slots, group, farthest = torch.ones_like(slots[:, :1]), components[0].shape[1], float("inf")
    options = max(float(form.eps), reference.MIN_VARIANCE), group, farthest
    return log_weights.flatten(1, 2), [t.flatten(1, 2) for t in factors], slots, components, options


def _gradient(
    grad: Tensor,
    points: Tensor,
    resp: Tensor,
    weights: Tensor,
    factors: Sequence[Tensor],
    components: Sequence[Tensor],
    mixtures: Mixture | History,
    parameters: Parameters,
    form: Form,
    of_batch: bool,
    over_ranks: Callable[[Tensor], None] | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of the points and the parameters. ``of_batch``: μ and σ² are the points' own statistics under λ.

    ``factors`` are a_k behind the activation, and inside.
    """
    x, grad = points.detach().to(resp.dtype), grad.to(resp.dtype)
    found = [None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format) for t in parameters]
    flows = torch.empty(x.shape[0], 2, resp.shape[2], x.shape[3], dtype=torch.float64)  # through μ and σ²
    grad_points = torch.empty_like(x)
    with _LOCK:
        lines, _, (inner, means, variances, overall, gamma, _, within, between), options = _lines(
            factors, components, mixtures, parameters, form
        )
        threads, *arrays = _arrays(x, grad, resp)
        *written, of_deviation = (None if t is None else t.view(-1, t.shape[-1]) for t in found)
        gradient.gradient_lines(
            threads, *arrays, *lines, _arrays(weights)[1], inner, means, variances, overall, gamma, within, between,
            *options, of_batch, *_arrays(flows.flatten(1, 2), *written, like=x)[1:],
            None if of_deviation is None else _arrays(of_deviation)[1],
        )  # fmt: skip
    if over_ranks is not None:  # it adds up what all implementations agree on
        outer = factors[0][:, None, :, None]
        shared = (flows * outer).to(resp.dtype)
        over_ranks(shared)
        flows = torch.where(outer > 0, shared / outer, 0).double()
    with _LOCK:
        gradient.gradient_points(
            threads, *arrays, *lines, means, *_arrays(flows.to(resp.dtype).flatten(1, 2), grad_points)[1:]
        )
    return grad_points.to(points.dtype), *found


def _em(
    points: Tensor,
    mixture: Mixture,
    resp: Tensor | None = None,
    steps: tuple[int, int] = (0, 0),
    floors: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    """``em.em`` over a mixture, which changes in place: ν."""
    is_given = resp is not None
    if resp is None:
        resp = points.new_empty(points.shape[0], points.shape[1] * points.shape[2], mixture.weights.shape[1])
    threads, x, shares, *arrays = _arrays(points, resp, *mixture)
    least_variance, least_weight = map(float, floors)  # loops are compiled for each type
    with _LOCK:
        em.em(threads, x, shares, is_given, *steps, least_variance, least_weight, reference.MIN_VARIANCE, *arrays)
    return resp


def _empty_mixture(points: Tensor, components: int) -> Mixture:
    shape = (points.shape[0], components, points.shape[-1])
    return Mixture(points.new_empty(shape[:2]), points.new_empty(shape), points.new_empty(shape))


_NOTHING = {torch.float32: np.empty((0, 0), np.float32), torch.float64: np.empty((0, 0), np.float64)}
_TYPES = {torch.float32: "<f4", torch.float64: "<f8"}


def _arrays(*tensors: Tensor | None, like: Tensor | None = None) -> list[Any]:
    """The number of threads that the loops use, and the tensors as they take them.

    Points (B, outer, inner, D) stay where they lie, other tensors are arrays row by row, and ``None`` is an empty array.
    Through the array interface, because ``Tensor.numpy()`` would pin the storage for good, which FSDP resizes.
    """
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    numba.set_num_threads(threads)
    arrays: list[Any] = [threads]
    for tensor in tensors:
        if tensor is None:
            arrays.append(_NOTHING[(tensors[0] if like is None else like).dtype])  # type: ignore[union-attr]
            continue
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        shape = tensor.shape
        if are_points := len(shape) == 4:
            strides = tensor.stride()
            extent = 1 + (shape[0] - 1) * strides[0] + (shape[1] - 1) * strides[1]
            extent += (shape[2] - 1) * strides[2] + (shape[3] - 1) * strides[3]
        else:
            tensor = tensor.contiguous()
        memory = SimpleNamespace(
            __array_interface__={
                "data": (tensor.data_ptr(), False),
                "shape": (extent,) if are_points else tuple(shape),
                "typestr": _TYPES[tensor.dtype],
                "version": 3,
            },
            tensor=tensor,  # which must live as long as the array
        )
        array = np.asarray(memory)
        arrays.append(Points(array, *shape, *strides) if are_points else array)
    return arrays
