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

from mixnorm.ops import fit, numba_loops, reference
from mixnorm.ops.autograd import FastKernels, ReferenceTransform
from mixnorm.ops.compiling import tell_of
from mixnorm.ops.kernels import Form, History, Kernels, Mixture, Parameters

_ACTIVATIONS = {
    None: numba_loops.NONE,
    "relu": numba_loops.RELU,
    "leaky_relu": numba_loops.LEAKY_RELU,
    "silu": numba_loops.SILU,
    "gelu": numba_loops.GELU,
}

tell_of(numba_loops.__name__)

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
        self, points: Tensor, size: int, draws: Any, components: int, options: fit.Options
    ) -> tuple[Tensor, Mixture]:
        sample = self.sample(points, size, draws)
        lloyd_iters, em_iters, min_variance, min_weight = options
        min_variance, min_weight = float(min_variance), float(min_weight)  # loops are compiled again for another type
        if components == 1:  # nothing to seed and nothing to iterate
            lloyd_iters = em_iters = 0
        uniforms, found = draws[size + 1 :].view(points.shape[0], -1), _empty_mixture(sample, components)
        threads, x, numbers, *arrays = _arrays(sample.contiguous().unsqueeze(2), uniforms, *found)
        with _LOCK:
            numba_loops.fit(
                threads, x, numbers, lloyd_iters, em_iters, min_variance, min_weight, reference.MIN_VARIANCE, *arrays
            )
        return sample, found

    def sample(self, points: Tensor, size: int, draws: Tensor) -> Tensor:
        batch, outer, inner, dim = points.shape
        if size == outer * inner or points.dtype not in _TYPES:
            return super().sample(points, size, draws)
        sample = points.new_empty(batch, size, dim)
        with _LOCK:
            numba_loops.sample(*_arrays(points, draws, sample))
        return sample

    def em(self, sample: Tensor, start: Mixture, iterations: int, options: fit.Options) -> Mixture:
        found = Mixture(*(t.clone(memory_format=torch.contiguous_format) for t in start))
        threads, x, *arrays = _arrays(sample.unsqueeze(2), *found)
        with _LOCK:
            floors = float(options.min_variance), float(options.min_weight), reference.MIN_VARIANCE
            numba_loops.em(threads, x, iterations, *floors, *arrays)
        return found

    def em_step(self, points: Tensor, mixture: Mixture) -> tuple[Tensor, Mixture]:
        points = points.to(mixture.means.dtype)
        resp = points.new_empty(points.shape[0], points.shape[1] * points.shape[2], mixture.weights.shape[1])
        found = _empty_mixture(points, resp.shape[2])
        threads, x, *arrays = _arrays(points, *mixture, resp, *found)
        with _LOCK:
            numba_loops.em_step(threads, x, False, *arrays[:3], reference.MIN_VARIANCE, *arrays[3:])
        return resp, found

    def moments(self, points: Tensor, resp: Tensor) -> Mixture:
        points = points.to(resp.dtype)
        found = _empty_mixture(points, resp.shape[2])
        with _LOCK:
            numba_loops.moments(*_arrays(points, resp, *found))
        return found

    def mix(
        self, points: Tensor, resp: Tensor, mixture: Mixture, parameters: Parameters, form: Form, out: Tensor | None = None
    ) -> Tensor:
        x = points.to(resp.dtype)
        y = out if out is not None and out.dtype == x.dtype else torch.empty_like(x)
        inside, codes = _codes(parameters, form)
        *arrays, written = _arrays(x, resp, *mixture, *_with_overall(mixture, parameters), y)
        with _LOCK:
            numba_loops.mix(*arrays, form.scale == "unit", inside, *codes, written)
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
        inside, codes = _codes(parameters, form)
        outer, inner = torch.empty(2, *mixture.weights.shape, dtype=resp.dtype).unbind()
        _, weights, *arrays = _arrays(mixture.weights, outer, inner)
        with _LOCK:
            numba_loops.factors(weights, form.scale == "unit", inside, *arrays)
        factors = mixture.weights, outer, inner
        return _gradient(grad, points, resp, factors, mixture[1:], mixture, parameters, codes, True, over_ranks)

    def evaluate(self, points: Tensor, history: History, parameters: Parameters, form: Form) -> Tensor:
        x, (inside, codes) = points.to(history.means.dtype), _codes(parameters, form)
        log_weights, factors, slots, components, options = _flat_history(history, form, inside)
        y = torch.empty_like(x)
        *arrays, out = _arrays(x, log_weights, *factors, slots, *components, *_with_overall(history, parameters), y)
        with _LOCK:
            numba_loops.evaluate(*arrays, *codes, *options, out)
        return y.to(points.dtype)

    def inference_backward(
        self, grad: Tensor, points: Tensor, history: History, parameters: Parameters, form: Form
    ) -> list[Tensor | None]:
        x, (inside, codes) = points.detach().to(history.means.dtype), _codes(parameters, form)
        log_weights, factors, slots, components, options = _flat_history(history, form, inside)
        resp = x.new_empty(x.shape[0], x.shape[1] * x.shape[2], log_weights.shape[1])
        *arrays, out = _arrays(x, log_weights, slots, *components, resp)
        with _LOCK:
            numba_loops.posteriors(*arrays, *options, out)
        factors = log_weights, *factors
        return list(_gradient(grad, points, resp, factors, components, history, parameters, codes, False, None))


class _FitOnly(ReferenceTransform, NumbaKernels):
    name = "numba-fit"


NUMBA, NUMBA_FIT = NumbaKernels(), _FitOnly()

_usable = True  # until a fork: OpenMP's threads are not in the child, and numba's next loop would end that process


def _after_fork() -> None:
    global _usable
    _usable = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _codes(parameters: Parameters, form: Form) -> tuple[bool, tuple[float, bool, bool, int]]:
    """Whether a_k is inside the activation, and the options of the loops."""
    inside = form.is_scale_inside(parameters.within is not None or parameters.between is not None)
    affine_inside = form.affine_mode == "output" and (form.component_affine or form.activation is not None)
    return inside, (float(form.eps), form.affine_mode == "statistics", affine_inside, _ACTIVATIONS[form.activation])


def _with_overall(mixtures: Mixture | History, parameters: Parameters) -> list[Tensor | None]:
    """μ and σ² of all points (2·B, D), if they are needed, and the parameters as (1, D) or (K, D)."""
    weight, bias, within, between, deviation = parameters
    rows = [
        None if weight is None else weight.reshape(-1, weight.shape[-1]),
        None if bias is None else bias.reshape(-1, bias.shape[-1]),
        None if within is None else within.unsqueeze(0),
        None if between is None else between.unsqueeze(0),
        None if deviation is None else deviation.unsqueeze(0),
    ]
    if within is None and between is None:
        return [None, *rows]
    if isinstance(mixtures, History):
        overall = reference.overall_statistics(mixtures)
    else:
        overall = reference.taken_together(*mixtures)[1:]
    return [torch.stack(overall, 1).flatten(0, 1), *rows]


def _flat_history(history: History, form: Form, inside: bool) -> tuple[Any, ...]:
    """A history as the loops take it: T·K components in groups that each have a posterior of their own."""
    log_weights, mixing, scale = reference.inference_factors(history.weights, history.tau, history.mode, form.scale)
    factors = (mixing, scale) if inside else (mixing * scale, torch.ones_like(scale))
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
    factors: Sequence[Tensor],
    components: Sequence[Tensor],
    mixtures: Mixture | History,
    parameters: Parameters,
    codes: tuple[float, bool, bool, int],
    of_batch: bool,
    over_ranks: Callable[[Tensor], None] | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of the points and the parameters. ``of_batch``: μ and σ² are the points' own statistics.

    ``factors`` are λ, a_k behind the activation and a_k inside.
    """
    x, grad, given = points.detach().to(resp.dtype), grad.to(resp.dtype), _with_overall(mixtures, parameters)
    found = [None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format) for t in given[1:]]
    grad_points = torch.empty_like(x)
    lines = torch.empty(x.shape[0], 2, resp.shape[2], x.shape[3], dtype=torch.float64, device=x.device)
    threads, *arrays = _arrays(x, grad, resp, *factors, *components, *given)
    with _LOCK:
        numba_loops.gradient_lines(threads, *arrays, *codes, of_batch, *_arrays(lines.flatten(1, 2), *found, like=x)[1:])
    if over_ranks is not None:  # it adds up what all implementations agree on
        outer = factors[1][:, None, :, None]
        shared = (lines * outer).to(resp.dtype)
        over_ranks(shared)
        lines = torch.where(outer > 0, shared / outer, 0).double()
    del arrays[3]  # λ
    with _LOCK:
        numba_loops.gradient_points(threads, *arrays, *codes, *_arrays(lines.flatten(1, 2), grad_points)[1:])
    of_parameters = (t if t is None else t.view(p.shape) for t, p in zip(found, parameters, strict=True))  # type: ignore[union-attr]
    return grad_points.to(points.dtype), *of_parameters


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
        arrays.append(numba_loops.Points(array, *shape, *strides) if are_points else array)
    return arrays
