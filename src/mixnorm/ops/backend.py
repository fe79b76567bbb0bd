"""The one place that chooses an implementation. Layers, functions and the fit call these; nothing else dispatches.

Shapes: ``points`` is (B, outer, inner, D). The m = outer · inner points of each of the B mixtures are spread over two axes,
so that every memory layout can be looked at without a copy.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mixnorm.ops import reference, reference_fit

BACKENDS = ("auto", "reference", "triton")
Statistics = tuple[Tensor, Tensor, Tensor]  # λ (B, K), μ (B, K, D), σ² (B, K, D)


def check(backend: str) -> None:
    """Raises unless the backend exists and can run here."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown: choose one of {', '.join(map(repr, BACKENDS))}")
    if backend == "triton":
        raise RuntimeError("backend='triton' is not part of this version: use 'auto' or 'reference'")


def fit(sample: Tensor, num_components: int, *, backend: str = "auto", **options: Any) -> Statistics:
    """A mixture of ``sample`` (B, m, D) from k-means++, Lloyd and EM; see :func:`mixnorm.ops.reference_fit.fit`."""
    return _implementation(sample, backend, reference_fit).fit(sample, num_components, **options)


def em(sample: Tensor, mixture: Statistics, *, backend: str = "auto", **options: Any) -> Statistics:
    """EM steps from a given mixture; see :func:`mixnorm.ops.reference_fit.em`."""
    return _implementation(sample, backend, reference_fit).em(sample, *mixture, **options)


def gather(points: Tensor, index: Tensor, *, backend: str = "auto") -> Tensor:
    """The points with the given numbers, (B, count, D), in at least fp32."""
    if points.dtype != compute_dtype(points.dtype):
        return reference_fit.gather(points, index).to(compute_dtype(points.dtype))
    return _implementation(points, backend, reference_fit).gather(points, index)


def em_step(points: Tensor, mixture: Statistics, *, backend: str = "auto") -> tuple[Tensor, Statistics]:
    """ν (B, m, K) of every point under the mixture, and λ, μ, σ² of all points under that ν."""
    points = points.to(mixture[1].dtype)
    implementation = _implementation(points, backend, reference)
    if implementation is not reference:
        return implementation.em_step(points, mixture)
    resp, *statistics = reference.em_step(_flat(points), *mixture)
    return resp, tuple(statistics)  # type: ignore[return-value]


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
    x = points.to(resp.dtype)
    implementation = _implementation(x, backend, reference)
    if implementation is not reference and _is_per_feature(weight, x) and _is_per_feature(bias, x):
        return implementation.normalize(x, resp, weight, bias, statistics, **options).to(points.dtype)
    y = reference.normalize(_flat(x), resp, _flat_like(weight, points), _flat_like(bias, points), **options)
    return y.to(points.dtype).unflatten(1, points.shape[1:3])


def inference(
    points: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    slot_weights: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    backend: str = "auto",
    **options: Any,
) -> Tensor:
    """The transform under T given mixtures: ``weights`` (B, T, K), ``means``, ``variances`` (B, T, K, D), τ (B, T)."""
    x = points.to(means.dtype)
    mixtures = (weights, means, variances, slot_weights)
    implementation = _implementation(x, backend, reference)
    if implementation is not reference and _is_per_feature(weight, x) and _is_per_feature(bias, x):
        return implementation.inference(x, *mixtures, weight, bias, **options).to(points.dtype)
    y = reference.inference(_flat(x), *mixtures, _flat_like(weight, points), _flat_like(bias, points), **options)
    return y.to(points.dtype).unflatten(1, points.shape[1:3])


def _implementation(x: Tensor, backend: str, reference: ModuleType) -> Any:
    """The module that runs for this tensor: ``reference``, or a faster one with the same functions."""
    check(backend)
    if backend == "auto" and x.device.type == "cpu" and _can_compile():
        from mixnorm.ops import compiled

        return compiled
    return reference


def _can_compile() -> bool:
    """Not while PyTorch traces or transforms the function: the loops are opaque to it."""
    tracing = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return _has_numba() and not tracing


@functools.cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def _is_per_feature(parameter: Tensor | None, points: Tensor) -> bool:
    return parameter is None or parameter.shape == points.shape[-1:]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Statistics are never computed in less than fp32."""
    return torch.promote_types(dtype, torch.float32)


def _flat(points: Tensor) -> Tensor:
    return points.flatten(1, 2)


def _flat_like(parameter: Tensor | None, points: Tensor) -> Tensor | None:
    """γ or β, which broadcasts against ``points``, as it broadcasts against the flattened points."""
    if parameter is None or parameter.dim() < 2:
        return parameter
    if parameter.shape[-3:-1] == (1, 1):
        return parameter.squeeze(-2)
    return parameter.expand(*parameter.shape[:-3], *points.shape[-3:]).flatten(-3, -2)
