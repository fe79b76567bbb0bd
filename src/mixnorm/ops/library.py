"""The operations as PyTorch operators, with shapes and gradients that ``torch.compile`` knows.

A compiled model calls these, and they call :mod:`mixnorm.ops.backend` when they run: the same code as without a compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd

from mixnorm.ops import backend as ops

Four = tuple[Tensor, Tensor, Tensor, Tensor]


@custom_op("mixnorm::sample_and_fit", mutates_args=())
def sample_and_fit(
    points: Tensor,
    size: int,
    draws: Tensor,
    num_components: int,
    lloyd_iters: int,
    em_iters: int,
    min_variance: float,
    min_weight: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sample, mixture = ops.sample_and_fit(
        points, size, draws, num_components, lloyd_iters=lloyd_iters, em_iters=em_iters, min_variance=min_variance,
        min_weight=min_weight, backend=backend,
    )  # fmt: skip
    return sample.clone() if size == points.shape[1] * points.shape[2] else sample, *mixture


@sample_and_fit.register_fake
def _(points: Tensor, size: int, draws: Tensor, num_components: int, *_: Any, **__: Any) -> Four:
    batch, dim = points.shape[0], points.shape[3]
    new = points.new_empty
    dtype = ops.compute_dtype(points.dtype)
    return (
        new(batch, size, dim, dtype=dtype),
        new(batch, num_components, dtype=dtype),
        new(batch, num_components, dim, dtype=dtype),
        new(batch, num_components, dim, dtype=dtype),
    )


@custom_op("mixnorm::em", mutates_args=())
def em(
    sample: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    iterations: int,
    min_variance: float,
    min_weight: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return ops.em(
        sample, (weights, means, variances), iterations=iterations, min_variance=min_variance, min_weight=min_weight,
        backend=backend,
    )  # fmt: skip


@em.register_fake
def _(sample: Tensor, weights: Tensor, means: Tensor, variances: Tensor, *_: Any, **__: Any) -> ops.Statistics:
    return torch.empty_like(weights), torch.empty_like(means), torch.empty_like(variances)


@custom_op("mixnorm::em_step", mutates_args=())
def em_step(
    points: Tensor, weights: Tensor, means: Tensor, variances: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    resp, statistics = ops.em_step(points, (weights, means, variances), backend=backend)
    return resp.mT.contiguous().mT if _planar(points) else resp.contiguous(), *statistics


@em_step.register_fake
def _(points: Tensor, weights: Tensor, means: Tensor, variances: Tensor, backend: str) -> Four:
    batch, outer, inner, _ = points.shape
    count, components = outer * inner, weights.shape[1]
    shape = (batch, components, count) if _planar(points) else (batch, count, components)
    resp = weights.new_empty(shape)
    return (
        resp.mT if _planar(points) else resp,
        torch.empty_like(weights),
        torch.empty_like(means),
        torch.empty_like(variances),
    )


def _planar(points: Tensor) -> bool:
    """Whether ν (B, m, K) lies in memory as (B, K, m), as the GPU's kernels want it."""
    return points.device.type == "cuda"


@custom_op("mixnorm::normalize", mutates_args=())
def _normalize(
    points: Tensor,
    resp: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
    affine_mode: str,
    backend: str,
) -> Tensor:
    statistics = (weights, means, variances)
    options: dict[str, Any] = {"eps": eps, "activation": activation, "affine_mode": affine_mode, "backend": backend}
    with torch.no_grad():
        return _as(points, ops.normalize(points, resp, weight, bias, statistics=statistics, **options))


@_normalize.register_fake
def _(points: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(points)


@custom_op("mixnorm::normalize_backward", mutates_args=())
def normalize_backward(
    grad: Tensor,
    points: Tensor,
    resp: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
    affine_mode: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = (weights, means, variances)
    options: dict[str, Any] = {"eps": eps, "activation": activation, "affine_mode": affine_mode}
    mix_backward = ops.mix_backward(points, resp.shape[2], backend)
    found = mix_backward(grad, points, resp, statistics, weight, bias, **options)
    return _as(points, found[0]), *_parameters(points, found[1:], (weight, bias))


@normalize_backward.register_fake
def _(
    grad: Tensor,
    points: Tensor,
    resp: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(points), *_parameters(points, (weight, bias), (weight, bias))


@custom_op("mixnorm::inference", mutates_args=())
def _inference(
    points: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    slot_weights: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mode: str,
    bounded: bool,
    eps: float,
    activation: str | None,
    affine_mode: str,
    backend: str,
) -> Tensor:
    options: dict[str, Any] = {
        "mode": mode,
        "bounded": bounded,
        "eps": eps,
        "activation": activation,
        "affine_mode": affine_mode,
        "backend": backend,
    }
    with torch.no_grad():
        return _as(points, ops.inference(points, weights, means, variances, slot_weights, weight, bias, **options))


@_inference.register_fake
def _(points: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(points)


@custom_op("mixnorm::push", mutates_args=("weights_queue", "means_queue", "variances_queue", "tracked"))
def _push(
    weights_queue: Tensor,
    means_queue: Tensor,
    variances_queue: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    tracked: Tensor,
    backend: str,
) -> None:
    if ops.in_backward():  # a checkpointed call of a compiled module is recomputed there, and has been counted
        return
    ops.push((weights_queue, means_queue, variances_queue), (weights, means, variances), tracked, backend=backend)


@_push.register_fake
def _(*_: Any, **__: Any) -> None:
    return None


# Keyword arguments are not for operators with a gradient or with arguments that change.


def normalize(*tensors: Any, eps: float, activation: str | None, affine_mode: str, backend: str) -> Tensor:
    return _normalize(*tensors, eps, activation, affine_mode, backend)


def inference(
    *tensors: Any, mode: str, bounded: bool, eps: float, activation: str | None, affine_mode: str, backend: str
) -> Tensor:
    return _inference(*tensors, mode, bounded, eps, activation, affine_mode, backend)


def push(*tensors: Tensor, backend: str) -> None:
    _push(*tensors, backend)


def _save(count: int) -> Any:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:count])
        ctx.options = inputs[count:]

    return setup


def _normalize_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    points, weight, bias = normalize_backward(grad, *saved, *ctx.options)
    return points, None, None, None, None, *_or_none((weight, bias), saved[5:7]), None, None, None, None


register_autograd("mixnorm::normalize", _normalize_gradient, setup_context=_save(7))


def _as(points: Tensor, value: Tensor | None) -> Tensor:
    """``value`` with the strides that ``torch.empty_like`` gives."""
    assert value is not None
    expected = torch.empty_like(points, device="meta").stride()
    return value if value.stride() == expected else torch.empty_like(points).copy_(value)


def _parameters(points: Tensor, found: Any, parameters: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor, Tensor]:
    """The gradients of γ and β in the parameters' dtype; an operator returns tensors, so an empty one for none."""
    # Copies: they may be two parts of one tensor, and an operator's results may not.
    gamma, beta = (
        points.new_empty(0) if p is None else torch.empty_like(p) if g is p else g.to(p.dtype, copy=True)
        for g, p in zip(found, parameters, strict=True)
    )
    return gamma, beta


def _or_none(found: tuple[Tensor, Tensor], parameters: Any) -> list[Tensor | None]:
    return [None if p is None else g for g, p in zip(found, parameters, strict=True)]
