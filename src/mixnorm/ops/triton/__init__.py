"""The reference's operations on a GPU, as Triton kernels: what ``backend="auto"`` uses there.

Same functions as the reference, for points (B, outer, inner, D) in any memory layout. Only :mod:`mixnorm.ops.backend`
imports this package. With ``TRITON_INTERPRET=1`` in the environment the kernels run on a CPU, slowly, for tests.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from mixnorm.ops import reference
from mixnorm.ops.differentiable import gradients
from mixnorm.ops.triton import evaluation, gradient, tiles, transform
from mixnorm.ops.triton import statistics as _statistics
from mixnorm.ops.triton.fit import em, sample_and_fit
from mixnorm.ops.triton.queue import push, slot_weights
from mixnorm.ops.triton.statistics import em_step

__all__ = [
    "em", "em_step", "inference", "mix", "mix_backward", "normalize", "obstacle", "push", "sample_and_fit", "slot_weights",
]  # fmt: skip

Statistics = tuple[Tensor, Tensor, Tensor]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_COMPONENTS = 16
MAX_MIXTURES = 65535


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton, too, looks when a kernel is defined


def obstacle(points: Tensor, components: int) -> str | None:
    """Why the kernels cannot take these points, or ``None``."""
    batch, outer, inner, dim = points.shape if points.dim() == 4 else (1, 1, 1, points.shape[-1])
    if points.device.type != "cuda" and not INTERPRETED:
        return f"the input is on {points.device.type!r}, not on a GPU"
    if points.dtype not in DTYPES:
        return f"the input has dtype {points.dtype}, not float32, float16 or bfloat16"
    if not torch.compiler.is_compiling() and points.is_neg():
        return "the input is lazily negated, as the imaginary part of a conjugate is"
    if dim > tiles.MAX_DIM:
        return f"the points have {dim} dimensions, more than {tiles.MAX_DIM}"
    if components > MAX_COMPONENTS:
        return f"{components} components are more than {MAX_COMPONENTS}"
    if batch > MAX_MIXTURES:
        return f"{batch} mixtures are more than {MAX_MIXTURES}, which a grid holds"
    if outer * inner * components >= 2**31:
        return f"{outer * inner} points with {components} components are more than 32 bits count"
    return None


def mix(
    points: Tensor, resp: Tensor, statistics: Statistics, weight: Tensor | None, bias: Tensor | None, **options: Any
) -> Tensor:
    """The transform without a gradient; ``statistics`` are those of the points under ``resp``."""
    return transform.mix(points, _planar(resp), _contiguous(statistics), _dense(weight), _dense(bias), **options)


def mix_backward(
    grad: Tensor,
    points: Tensor,
    resp: Tensor,
    statistics: Statistics,
    weight: Tensor | None,
    bias: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the points, γ (D,) and β (D,); for ``over_ranks`` see :func:`gradient.mix_backward`."""
    grad = grad.resolve_neg()  # of an output that goes into a complex number and its conjugate
    found, grad_weight, grad_bias = gradient.mix_backward(
        grad, points, _planar(resp), _contiguous(statistics), _dense(weight), _dense(bias), **options
    )
    if grad_weight.shape[0] == 1:
        return found, grad_weight[0], grad_bias[0]
    return found, grad_weight.sum(0), grad_bias.sum(0)


def normalize(
    points: Tensor,
    resp: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Statistics | None,
    **options: Any,
) -> Tensor:
    """The reference's ``normalize``."""
    resp = _planar(resp)
    statistics = statistics or _statistics.moments(points.detach(), resp)
    return _Mix.apply(points, resp, *_contiguous(statistics), _dense(weight), _dense(bias), options)


def inference(
    points: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    slot_weights: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    **options: Any,
) -> Tensor:
    """The reference's ``inference`` with mode "ensemble"."""
    return _Inference.apply(points, weights, means, variances, slot_weights, _dense(weight), _dense(bias), options)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        points: Tensor,
        resp: Tensor,
        weights: Tensor,
        means: Tensor,
        variances: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        ctx.options = options
        ctx.save_for_backward(points, resp, weights, means, variances, weight, bias)
        return transform.mix(points, resp, (weights, means, variances), weight, bias, **options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        points, resp, weights, means, variances, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted: the reference's, which has one
            y = reference.normalize(points.float().flatten(1, 2), resp, weight, bias, **ctx.options)
            found = gradients(y, (points, weight, bias), ctx.needs_input_grad[:1] + ctx.needs_input_grad[5:7], grad)
        else:
            found = mix_backward(grad, points, resp, (weights, means, variances), weight, bias, **ctx.options)
        return found[0], None, None, None, None, *_like(found[1:], (weight, bias)), None


class _Inference(torch.autograd.Function):
    """Forward in one pass. The gradient, for models that are tuned with their statistics frozen, is the reference's."""

    @staticmethod
    def forward(
        ctx: Any,
        points: Tensor,
        weights: Tensor,
        means: Tensor,
        variances: Tensor,
        slot_weights: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        ctx.options = options
        ctx.save_for_backward(points, weights, means, variances, slot_weights, weight, bias)
        return evaluation.inference(points, weights, means, variances, slot_weights, weight, bias, **options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        points, weights, means, variances, slot_weights, weight, bias = ctx.saved_tensors
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = tuple(t if t is None or again else t.detach().requires_grad_() for t in (points, weight, bias))
            x = inputs[0].float().flatten(1, 2)
            mixtures = (weights, means, variances, slot_weights)
            y = reference.inference(x, *mixtures, *inputs[1:], mode="ensemble", **ctx.options)
        wanted = ctx.needs_input_grad[:1] + ctx.needs_input_grad[5:7]
        found = gradients(y, inputs, wanted, grad, create_graph=again)
        return found[0], None, None, None, None, *_like(found[1:], (weight, bias)), None


def _planar(resp: Tensor) -> Tensor:
    """ν (B, m, K) in memory as (B, K, m) in fp32."""
    return resp.float().mT.contiguous().mT


def _dense(parameter: Tensor | None) -> Tensor | None:
    """γ or β as the kernels read it: one number after the other."""
    return None if parameter is None else parameter.contiguous()


def _contiguous(statistics: Statistics) -> Statistics:
    weights, means, variances = (t.contiguous() for t in statistics)
    return weights, means, variances


def _like(found: Any, parameters: tuple[Tensor | None, Tensor | None]) -> list[Tensor | None]:
    """Gradients in the dtype of their parameters, and none where there is no parameter."""
    return [None if p is None or g is None else g.to(p.dtype) for g, p in zip(found, parameters, strict=True)]
