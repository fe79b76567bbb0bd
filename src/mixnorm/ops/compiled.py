"""The reference's operations on a CPU, through compiled loops (numba): what ``backend="auto"`` uses there.

Same functions and shapes as the reference, but for points (B, outer, inner, D) in any memory layout.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from mixnorm.ops import compiled_kernels as kernels
from mixnorm.ops import reference, reference_fit
from mixnorm.ops.differentiable import gradients

_ACTIVATION_CODES = {
    None: kernels.NONE,
    "relu": kernels.RELU,
    "leaky_relu": kernels.LEAKY_RELU,
    "silu": kernels.SILU,
    "gelu": kernels.GELU,
}
Statistics = tuple[Tensor, Tensor, Tensor]

# Numba's threads start here and not in the first kernel: with OpenMP, their number would become torch's as well.
_threads = torch.get_num_threads()
numba.get_num_threads()
torch.set_num_threads(_threads)

usable = True  # until a fork: OpenMP's threads are not in the child, and numba's next loop would end that process


def _after_fork() -> None:
    global usable
    usable = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def fit(
    x: Tensor,
    num_components: int,
    *,
    lloyd_iters: int,
    em_iters: int,
    min_variance: float,
    min_weight: float,
    uniforms: Tensor,
) -> Statistics:
    """The reference's ``fit``: points (B, m, D)."""
    if num_components == 1:  # nothing to seed and nothing to iterate
        lloyd_iters = em_iters = 0
    mixture = _empty_mixture(x, x.shape[0], num_components)
    candidates = reference_fit.num_candidates(num_components)
    floor = reference.MIN_VARIANCE
    stretches = _stretches(x.shape[0], x.shape[1])
    _call(
        kernels.fit, x.unsqueeze(2), uniforms, candidates, lloyd_iters, em_iters, min_variance, min_weight, floor, stretches,
        *mixture,
    )  # fmt: skip
    return mixture


def em(
    x: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    *,
    iterations: int,
    min_variance: float,
    min_weight: float,
) -> Statistics:
    """The reference's ``em``: points (B, m, D)."""
    mixture = (weights.clone(), means.clone(), variances.clone())
    stretches = _stretches(x.shape[0], x.shape[1])
    floor = reference.MIN_VARIANCE
    _call(kernels.em, x.unsqueeze(2), iterations, min_variance, min_weight, floor, stretches, *mixture)
    return mixture


def gather(points: Tensor, index: Tensor) -> Tensor:
    """The points with the given numbers, (B, count, D)."""
    out = points.new_empty(points.shape[0], index.shape[0], points.shape[3])
    _call(kernels.gather, points, index, _stretches(points.shape[0], index.shape[0]), out)
    return out


def em_step(points: Tensor, mixture: Statistics) -> tuple[Tensor, Statistics]:
    """The reference's ``em_step``, in one read of the points."""
    points = points.to(mixture[1].dtype)
    batch, outer, inner, _ = points.shape
    resp = points.new_empty(batch, outer * inner, mixture[0].shape[1])
    result = _empty_mixture(points, batch, mixture[0].shape[1])
    stretches = _stretches(batch, outer * inner)
    _call(kernels.em_step, points, False, *mixture, reference.MIN_VARIANCE, stretches, resp, *result)
    return resp, result


def moments(points: Tensor, resp: Tensor) -> Statistics:
    """The reference's ``moments``."""
    result = _empty_mixture(points, points.shape[0], resp.shape[2])
    _call(kernels.moments, points, resp, _stretches(points.shape[0], resp.shape[1]), *result)
    return result


def normalize(
    points: Tensor,
    resp: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Statistics | None,
    **options: Any,
) -> Tensor:
    """The reference's ``normalize``; ``statistics`` are λ, μ and σ² of the points under ``resp`` where they are known."""
    x = points.to(resp.dtype)
    weights, means, variances = statistics or moments(x.detach(), resp)
    y = _Mix.apply(x, resp, inverse_sqrt(weights), means, variances, weight, bias, True, options)
    return y.to(points.dtype)


def mix(
    points: Tensor, resp: Tensor, statistics: Statistics, weight: Tensor | None, bias: Tensor | None, **options: Any
) -> Tensor:
    """``normalize`` without a gradient."""
    x, (weights, means, variances) = points.to(resp.dtype), statistics
    return _mix(x, resp.contiguous(), inverse_sqrt(weights), means, variances, weight, bias, options).to(points.dtype)


def mix_backward(
    grad: Tensor,
    points: Tensor,
    resp: Tensor,
    statistics: Statistics,
    weight: Tensor | None,
    bias: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of the points, γ (D,) and β (D,)."""
    x, (weights, means, variances) = points.to(resp.dtype), statistics
    saved = (x, resp.contiguous(), inverse_sqrt(weights), means, variances, weight, bias)
    found, grad_weight, grad_bias = _gradient(grad.to(resp.dtype), saved, options, of_batch=True, of_points=True)
    assert found is not None
    return found.to(points.dtype), grad_weight, grad_bias


def inverse_sqrt(weights: Tensor) -> Tensor:
    """1/√λ, and 0 for a component that is not in use."""
    return torch.from_numpy(kernels.inverse_sqrt(weights.numpy()))


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
    bounded: bool,
    **options: Any,
) -> Tensor:
    """The reference's ``inference``: ``weights`` is (B, T, K), ``slot_weights`` (B, T)."""
    dtype, points = points.dtype, points.to(means.dtype)
    batch, outer, inner, _ = points.shape
    log_weights, factor = reference.inference_factors(weights, slot_weights, mode=mode)
    log_weights, factor, means, variances = (t.flatten(1, 2) for t in (log_weights, factor, means, variances))
    each = mode == "ensemble"  # a posterior of its own for each slot
    group, slots = (weights.shape[2], slot_weights) if each else (means.shape[1], torch.ones_like(slot_weights[:, :1]))
    farthest = reference.farthest(means.shape[2]) if each and bounded else float("inf")
    floor = max(options["eps"], reference.MIN_VARIANCE)
    stretches = _stretches(batch, outer * inner)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (points, weight, bias)):
        resp = points.new_empty(batch, outer * inner, means.shape[1])
        _call(kernels.posteriors, points, log_weights, slots, means, variances, floor, group, farthest, stretches, resp)
        y = _Mix.apply(points, resp, factor, means, variances, weight, bias, False, options)
    else:
        y = torch.empty_like(points)
        _call(
            kernels.evaluate, points, log_weights, factor, slots, means, variances, weight, bias, *_codes(**options), floor,
            group, farthest, stretches, y,
        )  # fmt: skip
    return y.to(dtype)


class _Mix(torch.autograd.Function):
    """Σ_k resp_k · factor_k · act(x̂_k) with γ and β.

    ``of_batch``: μ and σ² are the statistics of the points under ``resp``, and the gradient flows through them. Otherwise
    they are constants, as in inference.
    """

    @staticmethod
    def forward(
        ctx: Any,
        points: Tensor,
        resp: Tensor,
        factor: Tensor,
        means: Tensor,
        variances: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        of_batch: bool,
        options: dict[str, Any],
    ) -> Tensor:
        ctx.of_batch, ctx.options = of_batch, options
        ctx.save_for_backward(points, resp, factor, means, variances, weight, bias)
        return _mix(points, resp, factor, means, variances, weight, bias, options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        wanted = ctx.needs_input_grad[:1] + ctx.needs_input_grad[5:7]
        points, resp, factor, means, variances, weight, bias = saved = ctx.saved_tensors
        found: Sequence[Tensor | None]
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted: the reference's, which has one
            x = points.flatten(1, 2)
            if ctx.of_batch:
                y = reference.normalize(x, resp, weight, bias, **ctx.options)
            else:
                y = reference.mix_components(x, resp * factor.unsqueeze(1), means, variances, weight, bias, **ctx.options)
            found = gradients(y, (points, weight, bias), wanted, grad)
        else:
            found = _gradient(grad, saved, ctx.options, of_batch=ctx.of_batch, of_points=wanted[0])
        return found[0], None, None, None, None, found[1], found[2], None, None


def _mix(
    points: Tensor,
    resp: Tensor,
    factor: Tensor,
    means: Tensor,
    variances: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    y = torch.empty_like(points)
    stretches = _stretches(points.shape[0], resp.shape[1])
    _call(kernels.mix, points, resp, factor, means, variances, weight, bias, *_codes(**options), stretches, y)
    return y


def _gradient(
    grad: Tensor, saved: tuple[Any, ...], options: dict[str, Any], *, of_batch: bool, of_points: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of the points (if wanted), γ and β; ``saved`` are the tensors of ``_mix``."""
    points, resp, factor, means, variances, weight, bias = saved
    if grad.stride() != points.stride():  # the loops are compiled for two tensors of one layout
        grad = torch.empty_like(points).copy_(grad)
    grad_weight, grad_bias = (None if t is None else torch.empty_like(t) for t in (weight, bias))
    grad_points = torch.empty_like(points) if of_points else points.new_empty(0, 0, 0, 0)
    stretches = _stretches(points.shape[0], resp.shape[1])
    _call(
        kernels.gradient, points, grad, resp, factor, means, variances, weight, bias, *_codes(**options),
        of_batch, stretches, grad_weight, grad_bias, grad_points,
    )  # fmt: skip
    return (grad_points if of_points else None), grad_weight, grad_bias


def _codes(*, eps: float, activation: str | None, affine_mode: str) -> tuple[float, bool, int]:
    return eps, affine_mode == "statistics", _ACTIVATION_CODES[activation]


def _empty_mixture(like: Tensor, batch: int, components: int) -> Statistics:
    shape = (batch, components, like.shape[-1])
    return like.new_empty(shape[:2]), like.new_empty(shape), like.new_empty(shape)


_LOCK = threading.Lock()  # not every threading layer of numba may be entered twice
_NOTHING = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0, np.float64)}


def _call(kernel: Any, points: Tensor, *arguments: Any) -> None:
    """Calls a kernel with arrays for tensors, and an empty array for ``None``."""
    nothing = _NOTHING[points.dtype]
    arrays = [
        nothing if a is None else a.detach().resolve_neg().numpy() if isinstance(a, Tensor) else a
        for a in (points, *arguments)
    ]
    with _LOCK:
        kernel(*arrays)


def _stretches(batch: int, count: int) -> int:
    """Into how many stretches the points of each mixture are cut, so that every core has work."""
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    numba.set_num_threads(threads)
    return min(count, -(-threads // batch))
