"""The transforms as functions of tensors: what the layers compute, without their state."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mixnorm.ops.choose import Backend, kernels_for
from mixnorm.ops.kernels import Form, History, compute_dtype, is_per_feature
from mixnorm.ops.reference import ACTIVATIONS

Activation = Literal["relu", "leaky_relu", "silu", "gelu"]
AffineMode = Literal["output", "statistics"]
InferenceMode = Literal["ensemble", "mixture", "paper"]


def mixture_normalize(
    x: Tensor,
    resp: Tensor,
    eps: float = 1e-5,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    affine_mode: AffineMode = "output",
    backend: Backend = "auto",
) -> Tensor:
    r"""The mixture normalizing transform of a batch of points under given responsibilities.

    .. math::
        \hat x_i = \sum_k \frac{\nu_{ik}}{\sqrt{\lambda_k}} \cdot \frac{x_i - \mu_k}{\sqrt{\sigma_k^2 + \epsilon}},

    with λ, μ and σ² the statistics of the points under ν. Gradients flow to ``x`` (also through μ and σ²), ``weight`` and
    ``bias``, never to ``resp``.

    Args:
        x: (..., m, D).
        resp: ν, (..., m, K); each row's sum is 1.
        weight, bias: γ and β, anything that broadcasts against x; usually (D,).
        activation: applied to each component inside the sum; then γ and β are inside as well.
        affine_mode: "output" for γ·x̂ + β, "statistics" for the paper's μ_k + β and γ·σ²_k.

    Returns:
        (..., m, D) in the dtype of x.
    """
    check_choice("activation", activation, (None, *ACTIVATIONS))
    check_choice("affine_mode", affine_mode, get_args(AffineMode))
    if x.dim() < 2 or resp.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"resp of shape {tuple(resp.shape)} does not fit x of shape {tuple(x.shape)}: "
            "expected x (..., m, D) and resp (..., m, K)"
        )
    _check_dtype(x)
    if x.numel() == 0:
        return empty_like_affine(x, weight, bias)
    dtype = compute_dtype(x.dtype)
    weight, bias = (_with_inner_axis(p, x, dtype) for p in (weight, bias))
    with no_autocast(x):
        points = _as_points(x)
        per_feature = is_per_feature(weight, points) and is_per_feature(bias, points)
        kernels = kernels_for(points, resp.shape[-1], backend, per_feature=per_feature)
        resp = resp.detach().reshape(-1, *resp.shape[-2:]).to(dtype)
        y = kernels.normalize(points, resp, weight, bias, Form(eps, activation, affine_mode))
    return y.reshape(x.shape)


def mixture_inference(
    x: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    slot_weights: Tensor,
    mode: InferenceMode = "ensemble",
    eps: float = 1e-5,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    affine_mode: AffineMode = "output",
    backend: Backend = "auto",
) -> Tensor:
    """The transform of points under the mixtures of the last T batches.

    Args:
        x: (..., m, D).
        weights: λ, (..., T, K). A slot whose weights are all 0 is empty.
        means, variances: μ and σ², (..., T, K, D).
        slot_weights: τ, (T,) or (..., T); 0 for an empty slot, and the sum is 1.
        mode: "ensemble", the τ-weighted mean of the T transforms; "mixture", one posterior over all T·K components with
            1/√λ_k; "paper", the equation as printed, which is Σ√τ times the training transform when the T are equal.

    Returns:
        (..., m, D) in the dtype of x. Gradients flow to ``x``, ``weight`` and ``bias``, and stop at the posterior.
    """
    check_choice("mode", mode, get_args(InferenceMode))
    check_choice("activation", activation, (None, *ACTIVATIONS))
    check_choice("affine_mode", affine_mode, get_args(AffineMode))
    lead, slots, dim = x.shape[:-2], weights.shape[-2:-1], x.shape[-1:]
    fits = x.dim() >= 2 and weights.dim() >= 2 and weights.shape[:-2] == lead
    fits = fits and variances.shape == means.shape == (*weights.shape, *dim)
    fits = fits and slot_weights.shape[-1:] == slots and slot_weights.dim() < weights.dim()
    if not fits:
        raise ValueError(
            f"x {tuple(x.shape)}, weights {tuple(weights.shape)}, means {tuple(means.shape)}, variances "
            f"{tuple(variances.shape)} and slot_weights {tuple(slot_weights.shape)} do not fit together: expected "
            "(..., m, D), (..., T, K), twice (..., T, K, D), and (T,) or (..., T)"
        )
    _check_dtype(x)
    if x.numel() == 0:
        return empty_like_affine(x, weight, bias)
    dtype = compute_dtype(x.dtype)
    weight, bias = (_with_inner_axis(p, x, dtype) for p in (weight, bias))
    with no_autocast(x):
        points = _as_points(x)
        per_feature = is_per_feature(weight, points) and is_per_feature(bias, points)
        kernels = kernels_for(points, weights.shape[-1], backend, per_feature=per_feature, mode=mode)
        history = History(
            weights.detach().reshape(-1, *weights.shape[-2:]).to(dtype),
            means.detach().reshape(-1, *means.shape[-3:]).to(dtype),
            variances.detach().reshape(-1, *means.shape[-3:]).to(dtype),
            slot_weights.detach().to(dtype).expand(*lead, *slots).reshape(-1, *slots),
            mode,
        )
        y = kernels.inference(points, history, weight, bias, Form(eps, activation, affine_mode))
    return y.reshape(x.shape)


def empty_like_affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The transform of no points: as empty as x, with the parameters in its graph."""
    y = x * 1 if weight is None else x * weight
    return (y if bias is None else y + bias).to(x.dtype)


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Statistics are not for autocast: a context in which it is off for x's device."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises a ``ValueError`` that names the value and the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, choices))}")


def _check_dtype(x: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}: convert it to a floating point type first")


def _as_points(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-2], 1, x.shape[-1])


def _with_inner_axis(parameter: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """γ or β, which broadcasts against x (..., m, D), for points (B, m, 1, D)."""
    if parameter is None or parameter.dim() < 2:
        return parameter if parameter is None else parameter.to(dtype)
    parameter = parameter.to(dtype).expand(*x.shape[:-2], *parameter.shape[-2:])
    return parameter.reshape(-1, parameter.shape[-2], 1, parameter.shape[-1])
