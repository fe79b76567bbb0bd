"""The kernels for a CPU: loops that numba compiles, which ``backend="auto"`` uses there."""

from __future__ import annotations

import contextlib
import functools
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
from mixnorm.ops.numba import em, evaluation, fit, gradient, queue, transform
from mixnorm.ops.numba.points import Points
from mixnorm.ops.numba.telling import tell_of

# As ``transform.activated`` takes them: loops are compiled for each type.
_ACTIVATIONS: dict[str, bool | float | int] = {
    "relu": True,
    "leaky_relu": 0.01,
    "silu": transform.SILU,
    "gelu": transform.GELU,
}

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("NUMBA_DISABLE_JIT is set")
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
        x, found = sample.unsqueeze(2), _empty_mixture(sample, components)
        uniforms, resp = draws[size + 1 :].view(points.shape[0], -1), sample.new_empty(*sample.shape[:2], components)
        # The first step of k-means finds the clusters of the seeds. Of one component there is nothing to iterate.
        steps = (1 + options.lloyd_iters, options.em_iters) if components > 1 else (1, 0)
        floors = float(options.min_variance), float(options.min_weight)  # loops are compiled for each type
        threads, points_in, draws_in, shares, *mixture = _arrays(x, uniforms, resp, *found)
        with _LOCK:
            fit.seed(threads, points_in, draws_in, mixture[1])
            em.em(threads, points_in, shares, *mixture, False, *steps, *floors, reference.MIN_VARIANCE)
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
        found, resp = Mixture(*map(_CLONE, start)), sample.new_empty(*sample.shape[:2], start.weights.shape[1])
        floors = float(options.min_variance), float(options.min_weight)
        with _LOCK:
            em.em(*_arrays(sample.unsqueeze(2), resp, *found), False, 0, iterations, *floors, reference.MIN_VARIANCE)
        return found

    def em_step(self, points: Tensor, mixture: Mixture) -> tuple[Tensor, Mixture]:
        x, found = points.to(mixture.means.dtype), Mixture(*map(_CLONE, mixture))  # which is written over
        resp = x.new_empty(x.shape[0], x.shape[1] * x.shape[2], mixture.weights.shape[1])
        with _LOCK:
            em.em(*_arrays(x, resp, *found), False, 0, 1, 0.0, 0.0, reference.MIN_VARIANCE)
        return resp, found

    def moments(self, points: Tensor, resp: Tensor) -> Mixture:
        x = points.to(resp.dtype)
        found = _empty_mixture(x, resp.shape[2])
        found.means.copy_(x[:, :1, 0])  # about the first point, and if that is far away once more, about the means
        with _LOCK:
            em.em(*_arrays(x, resp, *found), True, 0, 0, 0.0, 0.0, reference.MIN_VARIANCE)
        return found

    def mix(
        self, points: Tensor, resp: Tensor, mixture: Mixture, parameters: Parameters, form: Form, out: Tensor | None = None
    ) -> Tensor:
        x = points.to(resp.dtype)
        y = out if out is not None and out.dtype == x.dtype else torch.empty_like(x)
        inside, activation, options = _options(parameters, form)
        arrays = _arrays(x, resp, y, *mixture, *_with_overall(mixture, parameters))
        threads, points_in, shares, written, weights, *given = arrays
        with _LOCK:
            outer, inner = transform.factors(weights, form.scale == "unit", inside)
            *lines, shift = transform.affine(inner, *given, *options)
            transform.mix(threads, points_in, shares, outer, *lines, activation, shift, written)
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
        a = reference.component_scale(mixture.weights, form.scale)
        factors = (torch.ones_like(a), a) if _options(parameters, form)[0] else (a, torch.ones_like(a))
        given = mixture.weights, *factors, *mixture[1:], *_with_overall(mixture, parameters)
        return _gradient(grad, points, resp, given, parameters, form, True, over_ranks)

    def evaluate(self, points: Tensor, history: History, parameters: Parameters, form: Form) -> Tensor:
        x, (inside, activation, options) = points.to(history.means.dtype), _options(parameters, form)
        y, (tables, trust) = torch.empty_like(x), _flat_history(history, form, inside)
        arrays = _arrays(x, y, *tables, *_with_overall(history, parameters))
        threads, points_in, written, slots, log_weights, outer, inner, means, variances, *given = arrays
        with _LOCK:
            *lines, shift = transform.affine(inner, means, variances, *given, *options)
            evaluation.evaluate(
                threads, points_in, slots, log_weights, means, variances, *trust, outer, *lines, activation, shift, written
            )
        return y.to(points.dtype)

    def push(self, queues: Mixture, newest: Mixture, tracked: Tensor) -> Tensor:
        weights, means, variances = queues
        dtype, alike = means.dtype, weights.dtype == means.dtype == variances.dtype
        alike = alike and newest.weights.dtype == newest.means.dtype == newest.variances.dtype == dtype
        # load_state_dict(assign=True) takes queues as they lie in memory.
        alike = alike and weights.is_contiguous() and means.is_contiguous() and variances.is_contiguous()
        if not alike or dtype not in _TYPES:
            return super().push(queues, newest, tracked)  # type: ignore[return-value]
        flat = newest.weights, newest.means.flatten(1), newest.variances.flatten(1)
        _, *arrays = _arrays(weights, means.flatten(2), variances.flatten(2), *flat)
        with _LOCK:
            taken = queue.push(tuple(arrays[:3]), tuple(arrays[3:]), reference.LARGEST_MEAN)
        if taken:
            torch.autograd.graph.increment_version(queues)
            tracked.add_(1)
        return torch.tensor(taken)

    def slot_weights(self, weights: Tensor, decay: float) -> tuple[Tensor, Tensor]:
        if weights.dtype not in _TYPES:
            return super().slot_weights(weights, decay)
        used = torch.empty_like(weights, memory_format=torch.contiguous_format)
        tau = weights.new_empty(weights.shape[:2])
        _, *arrays = _arrays(weights, used, tau)
        with _LOCK:
            queue.slot_weights(arrays[0], float(decay), reference.WHOLE, *arrays[1:])
        return used, tau

    def inference_backward(
        self, grad: Tensor, points: Tensor, history: History, parameters: Parameters, form: Form
    ) -> list[Tensor | None]:
        x = points.detach().to(history.means.dtype)
        tables, trust = _flat_history(history, form, _options(parameters, form)[0])
        slots, log_weights, outer, inner, *components = tables
        resp = x.new_empty(x.shape[0], x.shape[1] * x.shape[2], log_weights.shape[1])
        with _LOCK:
            evaluation.posteriors(*_arrays(x, resp, slots, log_weights, *components), *trust)
        given = log_weights, outer, inner, *components, *_with_overall(history, parameters)
        return list(_gradient(grad, points, resp, given, parameters, form, False, None))


class _FitOnly(ReferenceTransform, NumbaKernels):
    name = "numba-fit"


NUMBA, NUMBA_FIT = NumbaKernels(), _FitOnly()

_usable = True  # until a fork: OpenMP's threads are not in the child, and numba's next loop would end that process


def _after_fork() -> None:
    global _usable
    _usable = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _options(parameters: Parameters, form: Form) -> tuple[bool, bool | float | int | None, tuple[Any, float, bool, bool]]:
    """Whether a_k is inside the activation, which activation, and d (1, D) with the options of ``transform.affine``.

    Loops are compiled for each type of an activation, ``None`` among them, and for a d that is ``None`` and one that is not.
    """
    inside = form.is_scale_inside(parameters.within is not None or parameters.between is not None)
    activation = None if form.activation is None else _ACTIVATIONS[form.activation]
    deviation = None if parameters.deviation is None else _arrays(parameters.deviation.unsqueeze(0))[1]
    affine_inside = form.affine_mode == "output" and (form.component_affine or form.activation is not None)
    return inside, activation, (deviation, float(form.eps), form.affine_mode == "statistics", affine_inside)


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


def _flat_history(history: History, form: Form, inside: bool) -> tuple[list[Tensor], tuple[float, int, float]]:
    """A history as the loops take it, T·K components in groups that each have a posterior of their own.

    The weights of the groups; log λ, a_k behind the activation and inside, μ and σ² of the components. And the least σ², the
    size of a group, and how far its points may be.
    """
    log_weights, mixing, scale = reference.inference_factors(history.weights, history.tau, history.mode, form.scale)
    factors = (mixing, scale) if inside else (mixing * scale, torch.ones_like(scale))
    group, dim = history.weights.shape[2], history.means.shape[3]
    slots, farthest = history.tau, reference.farthest(dim) if history.bounded else float("inf")
    if history.mode != "ensemble":
        slots, group, farthest = torch.ones_like(slots[:, :1]), log_weights[0].numel(), float("inf")
    tables = [slots, *(t.flatten(1, 2) for t in (log_weights, *factors, history.means, history.variances))]
    return tables, (max(float(form.eps), reference.MIN_VARIANCE), group, farthest)


def _gradient(
    grad: Tensor,
    points: Tensor,
    resp: Tensor,
    given: Sequence[Tensor | None],
    parameters: Parameters,
    form: Form,
    of_batch: bool,
    over_ranks: Callable[[Tensor], None] | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of the points and the parameters. ``of_batch``: μ and σ² are the points' own statistics under λ.

    ``given`` are λ, a_k behind the activation and inside, μ, σ², and what :func:`_with_overall` returns.
    """
    x, grad = points.detach().to(resp.dtype), grad.to(resp.dtype)
    found = [None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format) for t in parameters]
    *written, of_deviation = (None if t is None else t.view(-1, t.shape[-1]) for t in found)
    flows = torch.empty(x.shape[0], 2, resp.shape[2], x.shape[3], dtype=torch.float64)  # through μ and σ²
    grad_points = torch.empty_like(x)
    _, activation, options = _options(parameters, form)
    threads, x_in, grad_in, shares, weights, outer, inner, *components = _arrays(x, grad, resp, *given)
    means, variances, overall, gamma, _, within, between = components
    arrays = [
        *_arrays(flows.flatten(1, 2), *written, like=x)[1:],
        None if of_deviation is None else _arrays(of_deviation)[1],
    ]
    with _LOCK:
        *lines, _ = transform.affine(inner, *components, *options)
        points_given = threads, x_in, grad_in, shares, outer, *lines, activation
        gradient.gradient_lines(
            *points_given, weights, inner, means, variances, overall, gamma, within, between, *options, of_batch, *arrays
        )
    if over_ranks is not None:  # it adds up what all implementations agree on
        behind = given[1][:, None, :, None]  # type: ignore[index]
        shared = (flows * behind).to(resp.dtype)
        over_ranks(shared)
        flows = torch.where(behind > 0, shared / behind, 0).double()
    with _LOCK:
        gradient.gradient_points(*points_given, means, *_arrays(flows.to(resp.dtype).flatten(1, 2), grad_points)[1:])
    return grad_points.to(points.dtype), *found


def _empty_mixture(points: Tensor, components: int) -> Mixture:
    shape = (points.shape[0], components, points.shape[-1])
    return Mixture(points.new_empty(shape[:2]), points.new_empty(shape), points.new_empty(shape))


_CLONE = functools.partial(torch.clone, memory_format=torch.contiguous_format)
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
        if not tensor.is_cpu:
            raise ValueError(f"the input is on the CPU, but a tensor of the layer is on {tensor.device}: move one of them")
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
