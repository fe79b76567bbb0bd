"""The one place that chooses an implementation. Layers, functions and the fit call these; nothing else dispatches.

Shapes: ``points`` is (B, outer, inner, D). The m = outer · inner points of each of the B mixtures are spread over two axes,
so that every memory layout can be looked at without a copy.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mixnorm.ops import reference, reference_fit

BACKENDS = ("auto", "reference", "triton")
HAS_TRITON, HAS_NUMBA = (importlib.util.find_spec(name) is not None for name in ("triton", "numba"))
Statistics = tuple[Tensor, Tensor, Tensor]  # λ (B, K), μ (B, K, D), σ² (B, K, D)


def check(backend: str) -> None:
    """Raises unless the backend exists and can run here."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown: choose one of {', '.join(map(repr, BACKENDS))}")
    if backend == "triton" and not HAS_TRITON:
        raise RuntimeError("backend='triton' needs the package triton: install it, or use 'auto'")


def traced_as_operators() -> bool:
    """Whether a compiler is to see the registered operators. An exported graph runs elsewhere: it gets PyTorch's own."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def in_backward() -> bool:
    """Whether a backward pass is running: a forward pass in it is a recomputation, as activation checkpointing does it."""
    return torch._C._current_graph_task_id() != -1


def makes_numbers(points: Tensor, num_components: int, backend: str) -> bool:
    """Whether the implementation for these points can make its random numbers from a seed and a counter."""
    return hasattr(_implementation(points, backend, num_components), "sample_and_fit")


def sample_and_fit(
    points: Tensor, size: int, draws: Any, num_components: int, *, backend: str = "auto", **options: Any
) -> tuple[Tensor, Statistics]:
    """``size`` of the points (B, size, D), and their mixture from k-means++, Lloyd and EM.

    ``draws`` are size + 1 uniform numbers for the sample, and ``reference_fit.num_uniforms`` for each mixture; or, where
    :func:`makes_numbers`, a seed and a counter on the device.
    """
    if traced_as_operators():
        from mixnorm.ops import library

        sample, *mixture = library.sample_and_fit(points, size, draws, num_components, backend=backend, **options)
        return sample, tuple(mixture)  # type: ignore[return-value]
    implementation = _implementation(points, backend, num_components)
    if hasattr(implementation, "sample_and_fit"):
        return implementation.sample_and_fit(points, size, draws, num_components, **options)
    sample = sample_of(points, size, draws, backend=backend)
    uniforms = draws[size + 1 :].view(points.shape[0], -1)
    return sample, (implementation or reference_fit).fit(sample, num_components, uniforms=uniforms, **options)


def sample_of(points: Tensor, size: int, draws: Tensor, *, backend: str = "auto") -> Tensor:
    """``size`` of the points, (B, size, D), in at least fp32."""
    batch, outer, inner, dim = points.shape
    dtype = compute_dtype(points.dtype)
    if size == outer * inner:
        return points.reshape(batch, size, dim).to(dtype)
    index = reference_fit.sample_indices(outer * inner, size, draws)
    implementation: Any = None
    if points.dtype == dtype and not traced_as_operators():
        implementation = _implementation(points, backend)
    if hasattr(implementation, "gather"):
        return implementation.gather(points, index)
    return reference_fit.gather(points, index).to(dtype)


def em(sample: Tensor, mixture: Statistics, *, backend: str = "auto", **options: Any) -> Statistics:
    """EM steps from a given mixture; see :func:`mixnorm.ops.reference_fit.em`."""
    if traced_as_operators():
        from mixnorm.ops import library

        return tuple(library.em(sample, *mixture, backend=backend, **options))  # type: ignore[return-value]
    return (_implementation(sample, backend, mixture[0].shape[1]) or reference_fit).em(sample, *mixture, **options)


def em_step(
    points: Tensor, mixture: Statistics, *, history: tuple[Statistics, Tensor] | None = None, backend: str = "auto"
) -> tuple[Tensor, Statistics]:
    """ν (B, m, K) of every point under the mixture, and λ, μ, σ² of all points under that ν.

    ``history``: queues and a count that these go into, as in :func:`push`.
    """
    implementation = None
    if traced_as_operators():
        from mixnorm.ops import library

        resp, *found = library.em_step(points, *mixture, backend=backend)
    else:
        implementation = _implementation(points, backend, mixture[0].shape[1])
        if implementation is not None:
            resp, found = implementation.em_step(points, mixture)
        else:
            resp, *found = reference.em_step(_flat(points.to(mixture[1].dtype)), *mixture)
    weights, means, variances = found
    if history is not None:
        push(history[0], (weights, means, variances), history[1], backend=backend)
    return resp, (weights, means, variances)


def normalize(
    points: Tensor,
    resp: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    statistics: Statistics | None = None,
    backend: str = "auto",
    **options: Any,
) -> Tensor:
    """The transform of a batch. ``statistics`` are those of the points under ``resp``, where they are known already."""
    if _is_per_feature(weight, points) and _is_per_feature(bias, points):
        implementation = _implementation(points, backend, resp.shape[2])
        if traced_as_operators():
            if implementation is not None and statistics is not None:
                from mixnorm.ops import library

                return library.normalize(points, resp, *statistics, weight, bias, backend=backend, **options)
        elif implementation is not None:
            return implementation.normalize(points, resp, weight, bias, statistics, **options)
    x = points.to(resp.dtype)
    y = reference.normalize(_flat(x), resp, flat_like(weight, points), flat_like(bias, points), **options)
    return y.to(points.dtype).unflatten(1, points.shape[1:3])


def mix(
    points: Tensor,
    resp: Tensor,
    statistics: Statistics,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    backend: str = "auto",
    **options: Any,
) -> Tensor:
    """The transform under given ν and statistics, without a gradient."""
    if _is_per_feature(weight, points) and _is_per_feature(bias, points):
        implementation = _implementation(points, backend, resp.shape[2])
        if implementation is not None:
            return implementation.mix(points, resp, statistics, weight, bias, **options)
    mixing = resp * reference.inverse_sqrt(statistics[0]).unsqueeze(1)
    parameters = (flat_like(weight, points), flat_like(bias, points))
    y = reference.mix_components(_flat(points.to(resp.dtype)), mixing, *statistics[1:], *parameters, **options)
    return y.to(points.dtype).unflatten(1, points.shape[1:3])


def transform_batch(
    points: Tensor,
    mixture: Statistics,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    history: tuple[Statistics, Tensor] | None,
    backend: str = "auto",
    **options: Any,
) -> tuple[Tensor, Statistics]:
    """:func:`em_step` and :func:`normalize`: the transform of the points under the posterior of a mixture, and λ, μ, σ²."""
    if not traced_as_operators() and _is_per_feature(weight, points) and _is_per_feature(bias, points):
        implementation = _implementation(points, backend, mixture[0].shape[1])
        if hasattr(implementation, "transform_batch"):
            return implementation.transform_batch(points, mixture, weight, bias, history, **options)
    with torch.no_grad():
        resp, statistics = em_step(points.detach(), mixture, history=history, backend=backend)
    return normalize(points, resp, weight, bias, statistics=statistics, backend=backend, **options), statistics


def inference(
    points: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    slot_weights: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    mode: str,
    backend: str = "auto",
    **options: Any,
) -> Tensor:
    """The transform under T given mixtures: ``weights`` (B, T, K), ``means``, ``variances`` (B, T, K, D), τ (B, T)."""
    mixtures = (weights, means, variances, slot_weights)
    if _is_per_feature(weight, points) and _is_per_feature(bias, points):
        if traced_as_operators():
            wanted = any(t is not None and t.requires_grad for t in (points, weight, bias))
            if not (wanted and torch.is_grad_enabled()):  # the compiler differentiates the reference itself
                from mixnorm.ops import library

                return library.inference(points, *mixtures, weight, bias, mode=mode, backend=backend, **options)
            backend = "reference"
        implementation = _implementation(points, backend, weights.shape[2])
        if hasattr(implementation, "push"):  # the kernels are for one of the modes
            if mode == "ensemble":
                return implementation.inference(points, *mixtures, weight, bias, **options)
        elif implementation is not None:
            return implementation.inference(points, *mixtures, weight, bias, mode=mode, **options)
    x = points.to(means.dtype)
    parameters = (flat_like(weight, points), flat_like(bias, points))
    y = reference.inference(_flat(x), *mixtures, *parameters, mode=mode, **options)
    return y.to(points.dtype).unflatten(1, points.shape[1:3])


def push(queues: Statistics, newest: Statistics, tracked: Tensor, *, backend: str = "auto") -> None:
    """Shifts the queues (B, T, K) and twice (B, T, K, D) by one and appends ``newest``, if that :func:`can_be_kept`.

    The queues change in place. Nothing is read back from a GPU to decide.
    """
    if traced_as_operators():
        from mixnorm.ops import library

        library.push(*queues, *newest, tracked, backend=backend)
        return
    implementation = _implementation(newest[0].unsqueeze(0).unsqueeze(-1), backend)
    # model.to(memory_format=...) reorders the queues of population="channel", which have four dimensions.
    if hasattr(implementation, "push") and all(queue.is_contiguous() for queue in queues):
        implementation.push(queues, newest, tracked)
        return
    taken = can_be_kept(newest, queues[1].dtype)
    on_host = taken.device.type == "cpu"
    if on_host and not taken:
        return
    for queue, value in zip(queues, newest, strict=True):
        shifted = torch.cat((queue[:, 1:], value.unsqueeze(1).to(queue.dtype)), 1)
        queue.copy_(shifted if on_host else torch.where(taken, shifted, queue))
    tracked.add_(taken)


def can_be_kept(statistics: Statistics, dtype: torch.dtype) -> Tensor:
    """Whether a mixture is finite in the dtype of a history, and its means are not too large to take squares from."""
    finite = [values.to(dtype).isfinite().all() for values in statistics]
    return torch.stack([*finite, (statistics[1].abs() <= reference.LARGEST_MEAN).all()]).all()


def slot_weights(weights: Tensor, decay: float, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """λ and τ of a history with the weights (..., T, K); see :func:`mixnorm.ops.reference.slot_weights`."""
    lead = weights.shape[:-2]
    implementation: Any = None if traced_as_operators() else _implementation(weights, backend)
    if hasattr(implementation, "slot_weights"):
        used, tau = implementation.slot_weights(weights.reshape(-1, *weights.shape[-2:]), decay)
        return used.view(weights.shape), tau.view(*lead, -1)
    return reference.slot_weights(weights, decay)


def _implementation(points: Tensor, backend: str, components: int = 1) -> Any:
    """The module with faster functions for these points, or ``None`` for the reference."""
    check(backend)
    if backend == "reference" or _is_followed():
        return None
    if backend == "triton" or (points.device.type == "cuda" and HAS_TRITON):
        from mixnorm.ops import triton

        obstacle = triton.obstacle(points, components)
        if backend == "triton" and obstacle:
            raise RuntimeError(f"backend='triton' cannot run: {obstacle}; use 'auto'")
        return None if obstacle else triton
    if points.device.type == "cpu" and HAS_NUMBA:
        from mixnorm.ops import compiled

        return compiled if compiled.usable else None
    return None


def _is_followed() -> bool:
    """Whether something looks at each of PyTorch's operations: function transforms, forward-mode derivatives, a tracer."""
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_exporting() or torch.jit.is_tracing():
        return True
    return forward_ad._current_level >= 0


def _is_per_feature(parameter: Tensor | None, points: Tensor) -> bool:
    return parameter is None or parameter.shape == points.shape[-1:]


def mix_backward(points: Tensor, components: int, backend: str) -> Any:
    """The function that computes the gradients of :func:`normalize`, where the implementation for these points has one."""
    return _implementation(points, backend, components).mix_backward


def mix_backward_in_parts(points: Tensor, components: int, weight: Tensor | None, bias: Tensor | None, backend: str) -> Any:
    """The function that computes the gradients of :func:`mix` and lets its sums be changed on the way, or ``None``."""
    implementation = _implementation(points, backend, components)
    in_parts = hasattr(implementation, "push") and _is_per_feature(weight, points) and _is_per_feature(bias, points)
    return implementation.mix_backward if in_parts else None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Statistics are never computed in less than fp32."""
    return torch.promote_types(dtype, torch.float32)


def _flat(points: Tensor) -> Tensor:
    return points.flatten(1, 2)


def flat_like(parameter: Tensor | None, points: Tensor) -> Tensor | None:
    """γ or β, which broadcasts against ``points``, as it broadcasts against the flattened points."""
    if parameter is None or parameter.dim() < 2:
        return parameter
    if parameter.shape[-3:-1] == (1, 1):
        return parameter.squeeze(-2)
    return parameter.expand(*parameter.shape[:-3], *points.shape[-3:]).flatten(-3, -2)
