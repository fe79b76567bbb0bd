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
PRODUCT_BLOCK = 1 << 18  # elements of a block of points that goes through matrix products, small enough for the cache

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
    **options: Any,
) -> Tensor:
    """The reference's ``inference``: ``weights`` is (B, T, K), ``slot_weights`` (B, T)."""
    dtype, points = points.dtype, points.to(means.dtype)
    batch, outer, inner, _ = points.shape
    log_weights, factor = reference.inference_factors(weights, slot_weights, mode=mode)
    share = slot_weights.unsqueeze(-1) * weights
    tensors = (share, log_weights, factor, means, variances)
    share, log_weights, factor, means, variances = (t.flatten(1, 2) for t in tensors)
    # The softmax is PyTorch's: its exponential function is vectorized, over the points where these come last.
    joint = points.new_empty(batch, means.shape[1], outer * inner)
    floor = max(options["eps"], reference.MIN_VARIANCE)
    stretches = _stretches(batch, outer * inner)
    _call(kernels.log_joint, points, share, log_weights, means, variances, floor, stretches, joint.mT)
    joint = joint.unflatten(1, tuple(weights.shape[1:]) if mode == "ensemble" else (1, -1))
    slots = joint.shape[1]
    resp = torch.softmax(joint, dim=2).flatten(1, 2)
    differentiable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (points, weight, bias))
    if differentiable or options["activation"] is not None or means.shape[1] < 8:
        y = _Mix.apply(points, resp.mT.contiguous(), factor, means, variances, weight, bias, False, options)
    else:
        y = _mix_by_products(points, resp, share, factor, means, variances, weight, bias, slots, **options)
    return y.to(dtype)


def _mix_by_products(
    points: Tensor,
    rows: Tensor,
    share: Tensor,
    factor: Tensor,
    means: Tensor,
    variances: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    slots: int,
    *,
    eps: float,
    activation: None,
    affine_mode: str,
) -> Tensor:
    """``_Mix`` without a gradient and without an activation, for the many components of a history: ``rows`` is (B, K, m).

    The sum over k is then a slope and an intercept for each element, which are matrix products. ``share`` (B, K), the weight
    of each component in all, makes the anchor.
    """
    batch, outer, inner, dim = points.shape
    gamma: Tensor | float = 1.0 if weight is None else weight
    beta: Tensor | float = 0.0 if bias is None else bias
    shift: Tensor | float = 0.0
    if affine_mode == "statistics":
        scale = ((variances if weight is None else weight.clamp_min(0) * variances) + eps).rsqrt()
        centre = means + beta
    else:
        scale = (variances + eps).rsqrt() * gamma
        centre, shift = means, beta
    # Each slot's posteriors add up to one, so a share of the shift in every component adds up to the shift.
    scale = scale * factor.unsqueeze(-1)
    anchor = (share.unsqueeze(-1) * centre).sum(1, keepdim=True)
    both = torch.cat((scale, (anchor - centre) * scale + shift / slots), dim=-1)
    y = torch.empty_like(points)
    step = max(1, PRODUCT_BLOCK // (batch * inner * dim))
    rows_at_once = batch * min(step, outer) * inner
    buffer = _buffer(3 * rows_at_once * dim, both.dtype)
    products = buffer[: 2 * rows_at_once * dim].view(batch, -1, 2 * dim)
    centred = buffer[2 * rows_at_once * dim :].view(batch, -1, inner, dim)
    for start in range(0, outer, step):
        x, out = points[:, start : start + step], y[:, start : start + step]
        w = rows[..., start * inner : (start + step) * inner].mT
        slope, intercept = torch.bmm(w, both, out=products[:, : w.shape[1]]).unflatten(1, x.shape[1:3]).split(dim, dim=-1)
        torch.addcmul(intercept, torch.sub(x, anchor.unsqueeze(1), out=centred[:, : x.shape[1]]), slope, out=out)
    return y


class _Buffers(threading.local):
    kept: Tensor | None = None


_buffers = _Buffers()


def _buffer(size: int, dtype: torch.dtype) -> Tensor:
    """Uninitialized memory, valid until this thread's next call. Fresh memory costs more in page faults than its use."""
    kept = _buffers.kept
    if kept is None or kept.dtype != dtype or kept.numel() < size:
        with torch.inference_mode(False):
            kept = torch.empty(size, dtype=dtype)
        if size <= 4 * PRODUCT_BLOCK:
            _buffers.kept = kept
    return kept[:size]


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
