"""The transforms as functions of tensors: what the layers compute, without their state."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mixnorm.ops.choose import Backend, kernels_for
from mixnorm.ops.kernels import Form, History, Parameters, are_per_feature, compute_dtype
from mixnorm.ops.reference import ACTIVATIONS

Activation = Literal["relu", "leaky_relu", "silu", "gelu"]
AffineMode = Literal["output", "statistics"]
Scale = Literal["fisher", "unit"]
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
    scale: Scale = "fisher",
    within: Tensor | float = 1.0,
    between: Tensor | float = 0.0,
    deviation: Tensor | float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    r"""The mixture normalizing transform of a batch of points under given responsibilities.

    .. math::
        \hat x_i = \sum_k \frac{\nu_{ik}}{\sqrt{\lambda_k}} \cdot \frac{x_i - \mu_k}{\sqrt{\sigma_k^2 + \epsilon}},

    with λ, μ and σ² the statistics of the points under ν. Gradients flow to ``x`` (also through μ and σ²), ``weight``,
    ``bias``, ``within``, ``between`` and ``deviation``, never to ``resp``.

    Args:
        x: (..., m, D).
        resp: ν, (..., m, K); each row's sum is 1.
        weight: γ, anything that broadcasts against x; usually (D,).
        bias: β, likewise.
        activation: applied to each component inside the sum; then γ and β are inside as well.
        affine_mode: "output" for γ·x̂ + β, "statistics" for the paper's μ_k + β and γ·σ²_k.
        scale: "fisher" for 1/√λ_k, the paper's, or "unit" for 1.
        within: g of docs/mathematics.md, a number or anything that broadcasts against x.
        between: b, likewise.
        deviation: d, likewise.

    Returns:
        (..., m, D) in the dtype of x.
    """
    check_choice("activation", activation, (None, *ACTIVATIONS))
    check_choice("affine_mode", affine_mode, get_args(AffineMode))
    check_choice("scale", scale, get_args(Scale))
    _check_gates(within=within, between=between, deviation=deviation)
    check_form(activation, affine_mode, scale, not _is(within, 1), not _is(between, 0), not _is(deviation, 0))
    if x.dim() < 2 or resp.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"resp of shape {tuple(resp.shape)} does not fit x of shape {tuple(x.shape)}: "
            "expected x (..., m, D) and resp (..., m, K)"
        )
    _check_dtype(x)
    if x.numel() == 0:
        return empty_like_affine(x, weight, bias, *(p for p in (within, between, deviation) if isinstance(p, Tensor)))
    dtype = compute_dtype(x.dtype)
    parameters = _parameters(weight, bias, within, between, deviation, x)
    with no_autocast(x):
        points = _as_points(x)
        kernels = kernels_for(points, resp.shape[-1], backend, per_feature=are_per_feature(parameters, points))
        resp = resp.detach().reshape(-1, *resp.shape[-2:]).to(dtype)
        y = kernels.normalize(points, resp, parameters, Form(eps, activation, affine_mode, scale))
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
    scale: Scale = "fisher",
    within: Tensor | float = 1.0,
    between: Tensor | float = 0.0,
    deviation: Tensor | float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """The transform of points under the mixtures of the last T batches.

    Args:
        x: (..., m, D).
        weights: λ, (..., T, K). A slot whose weights are all 0 is empty.
        means: μ, (..., T, K, D).
        variances: σ², (..., T, K, D).
        slot_weights: τ, (T,) or (..., T); 0 for an empty slot, and the sum is 1.
        mode: "ensemble", the τ-weighted mean of the T transforms; "mixture", one posterior over all T·K components with
            1/√λ_k; "paper", the equation as printed, which is Σ√τ times the training transform when the T are equal.

    The other options are those of :func:`mixture_normalize`.

    Returns:
        (..., m, D) in the dtype of x. Gradients flow to ``x``, ``weight``, ``bias``, ``within``, ``between`` and
        ``deviation``, and stop at the posterior.
    """
    check_choice("mode", mode, get_args(InferenceMode))
    check_choice("activation", activation, (None, *ACTIVATIONS))
    check_choice("affine_mode", affine_mode, get_args(AffineMode))
    check_choice("scale", scale, get_args(Scale))
    _check_gates(within=within, between=between, deviation=deviation)
    changed = not _is(within, 1), not _is(between, 0), not _is(deviation, 0)
    check_form(activation, affine_mode, scale, *changed, inference=mode)
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
        return empty_like_affine(x, weight, bias, *(p for p in (within, between, deviation) if isinstance(p, Tensor)))
    dtype = compute_dtype(x.dtype)
    parameters = _parameters(weight, bias, within, between, deviation, x)
    with no_autocast(x):
        points = _as_points(x)
        per_feature = are_per_feature(parameters, points)
        kernels = kernels_for(points, weights.shape[-1], backend, per_feature=per_feature, mode=mode)
        history = History(
            weights.detach().reshape(-1, *weights.shape[-2:]).to(dtype),
            means.detach().reshape(-1, *means.shape[-3:]).to(dtype),
            variances.detach().reshape(-1, *means.shape[-3:]).to(dtype),
            slot_weights.detach().to(dtype).expand(*lead, *slots).reshape(-1, *slots),
            mode,
        )
        y = kernels.inference(points, history, parameters, Form(eps, activation, affine_mode, scale))
    return y.reshape(x.shape)


def empty_like_affine(x: Tensor, *parameters: Tensor | None) -> Tensor:
    """The transform of no points: as empty as x, with the parameters in its graph."""
    y = x * 1
    for parameter in parameters:
        y = y if parameter is None else y * parameter
    return y.to(x.dtype)


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


def check_form(
    activation: str | None,
    affine_mode: str,
    scale: str,
    within: bool,
    between: bool,
    deviation: bool,
    *,
    inference: str = "ensemble",
) -> None:
    """Raises where two options contradict each other; ``within`` and so on: whether these are not the paper's."""
    moved = "within" if within else "between" if between else None
    changed = moved or ("deviation" if deviation else None)
    if changed is not None and affine_mode == "statistics":
        raise ValueError(f"{changed} does not go with affine_mode='statistics', the paper's: use affine_mode='output'")
    if moved is not None and activation is not None and scale == "fisher":
        raise ValueError(f"{moved} with an activation inside needs scale='unit': set it, or move the activation out")
    if inference == "paper" and (changed is not None or scale != "fisher"):
        raise ValueError(
            f"inference='paper' is for the paper's transform, not for another {changed or 'scale'}: use 'ensemble'"
        )


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _check_gates(**gates: Any) -> None:
    for name, value in gates.items():
        if not isinstance(value, Tensor) and not is_number(value):
            raise ValueError(f"{name}={value!r} must be a number or a tensor that broadcasts against x")


def _is(value: Tensor | float, number: float) -> bool:
    return not isinstance(value, Tensor) and value == number


def _parameters(
    weight: Tensor | None,
    bias: Tensor | None,
    within: Tensor | float,
    between: Tensor | float,
    deviation: Tensor | float,
    x: Tensor,
) -> Parameters:
    """The parameters for the points of x; the paper's within, between and deviation are none."""
    dtype = compute_dtype(x.dtype)
    given = (
        None if _is(value, paper) else value if isinstance(value, Tensor) else x.new_full(x.shape[-1:], value, dtype=dtype)
        for value, paper in ((within, 1), (between, 0), (deviation, 0))
    )
    return Parameters(*(_with_inner_axis(p, x, dtype) for p in (weight, bias, *given)))


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
