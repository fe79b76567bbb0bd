"""The mathematics as the paper writes it, in plain differentiable PyTorch.

Every faster path is tested against this file; this file is tested against transcriptions of the equations, scikit-learn
and autograd in fp64. Shapes: ``x`` is (..., m, D), ``resp`` (..., m, K), ``weights`` (..., K), ``means`` and ``variances``
(..., K, D). The loops run over components only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "silu": F.silu,
    "gelu": F.gelu,
}

# Below this a variance counts as zero: the density of a degenerate component stays finite in fp32.
MIN_VARIANCE = 1e-12
# A mean beyond this keeps its batch out of a history: in fp32 the square of a distance from it would not be finite.
LARGEST_MEAN = 1e16
STEADY = 0.5  # a slot's least share of the variance of all slots, for inference="steady"


def log_densities(x: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """log p_k(x_i) of every component, (..., m, K).

    The squares are of x - μ_k itself: expanding them would cancel wherever a mean is large beside its deviation.
    """
    columns = []
    for mean, variance in zip(means.unbind(-2), variances.clamp_min(MIN_VARIANCE).unbind(-2), strict=True):
        squares = (x - mean.unsqueeze(-2)).square() / variance.unsqueeze(-2)
        log_volume = (variance.log() + math.log(2 * math.pi)).sum(-1, keepdim=True)
        columns.append(-0.5 * (squares.sum(-1) + log_volume))
    return torch.stack(columns, dim=-1)


def responsibilities(x: Tensor, weights: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """ν_k(x_i), Eq. (posterior): (..., m, K). A component of weight 0 gets exactly 0."""
    return torch.softmax(log_densities(x, means, variances) + weights.log().unsqueeze(-2), dim=-1)


def moments(x: Tensor, resp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """λ_k, μ_k and σ²_k of the points under ν, Eq. (responsibility) and the M-step of EM."""
    total = resp.sum(-2)
    share = resp / positive(total).unsqueeze(-2)  # ν̂
    # Sums of x - anchor instead of x keep the digits of the mean when it is large beside the deviation.
    anchor = x.detach().mean(-2, keepdim=True)
    in_use = (total > 0).unsqueeze(-1)
    means = torch.where(in_use, anchor + share.transpose(-1, -2) @ (x - anchor), 0.0)
    variances = torch.stack(
        [(share[..., k, None] * (x - means[..., k, None, :]).square()).sum(-2) for k in range(resp.shape[-1])],
        dim=-2,
    )
    return total / x.shape[-2], means, variances


def em_step(x: Tensor, weights: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ν under the given mixture, then λ, μ and σ² under that ν: an E-step and an M-step."""
    resp = responsibilities(x, weights, means, variances)
    return resp, *moments(x, resp)


def normalize(
    x: Tensor,
    resp: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    activation: str | None,
    affine_mode: str,
) -> Tensor:
    """The mixture normalizing transform of a batch, Eq. (mixture_normalization0): gradients stop at ν."""
    weights, means, variances = moments(x, resp.detach())
    mixing = resp.detach() * inverse_sqrt(weights.detach()).unsqueeze(-2)
    return mix_components(x, mixing, means, variances, weight, bias, eps=eps, activation=activation, affine_mode=affine_mode)


def mix_components(
    x: Tensor,
    mixing: Tensor,
    means: Tensor,
    variances: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    activation: str | None,
    affine_mode: str,
) -> Tensor:
    """Σ_k mixing_k · act(x̂_k) with γ and β where ``affine_mode`` puts them; ``mixing`` is (..., m, K)."""
    gamma: Tensor | float = 1.0 if weight is None else weight
    beta: Tensor | float = 0.0 if bias is None else bias
    act = ACTIVATIONS[activation] if activation else None
    y = torch.zeros_like(x)
    for k in range(mixing.shape[-1]):
        mean, variance = means[..., k, None, :], variances[..., k, None, :]
        if affine_mode == "statistics":
            # The paper's μ_k + β and γ·σ²_k; a γ below zero counts as zero, so that the root stays real.
            scale = weight.clamp_min(0) * variance if weight is not None else variance
            normalized = (x - mean - beta) / (scale + eps).sqrt()
        else:
            normalized = (x - mean) / (variance + eps).sqrt()
            if act:
                normalized = gamma * normalized + beta
        if act:
            normalized = act(normalized)
        y = y + mixing[..., k, None] * normalized
    if affine_mode == "output" and not act:
        y = gamma * y + beta
    return y


def inference(
    x: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    slot_weights: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    mode: str,
    eps: float,
    activation: str | None,
    affine_mode: str,
) -> Tensor:
    """The transform under T given mixtures: ``weights`` (..., T, K), ``means``, ``variances`` (..., T, K, D), τ (..., T).

    As in training, gradients stop at the posterior.
    """
    means, variances = means.flatten(-3, -2), variances.flatten(-3, -2)
    with torch.no_grad():  # and detach: forward-mode derivatives do not stop at no_grad
        log_density = log_densities(x.detach(), means, variances.clamp_min(eps))
        mixing = inference_mixing(log_density, weights, slot_weights, mode=mode)
    return mix_components(x, mixing, means, variances, weight, bias, eps=eps, activation=activation, affine_mode=affine_mode)


def inference_mixing(log_density: Tensor, weights: Tensor, slot_weights: Tensor, *, mode: str) -> Tensor:
    """What each of the T·K components contributes to each point, from log p^t_k(x_i): both (..., m, T·K)."""
    log_weights, factor = inference_factors(weights, slot_weights, mode=mode)
    joint = log_density.unflatten(-1, weights.shape[-2:]) + log_weights.unsqueeze(-3)
    per_slot = mode == "ensemble"
    posterior = torch.softmax(joint if per_slot else joint.flatten(-2), dim=-1).flatten(-2 if per_slot else -1)
    return posterior * factor.flatten(-2).unsqueeze(-2)


def inference_factors(weights: Tensor, slot_weights: Tensor, *, mode: str) -> tuple[Tensor, Tensor]:
    """The log-weights of the posterior and the factor behind it, both (..., T, K).

    - "ensemble": τ_t · ν^t_k / √λ^t_k, with a posterior ν^t of its own for each t.
    - "mixture":  π^t_k / √λ^t_k, with one posterior π over all T·K components.
    - "paper":    π^t_k / √(τ_t λ^t_k), Eq. (mixture_normalization_test) as printed.
    """
    tau = slot_weights.unsqueeze(-1)
    if mode == "ensemble":
        # An empty slot has no posterior; a uniform one, times τ = 0, keeps it out without a NaN.
        filled = weights.sum(-1, keepdim=True) > 0
        return torch.where(filled, weights, 1.0).log(), tau * inverse_sqrt(weights)
    joint = tau * weights
    return joint.log(), torch.where(tau > 0, inverse_sqrt(joint if mode == "paper" else weights), 0.0)


def slot_weights(weights: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """The λ (..., T, K) that a history is evaluated with, and τ (..., T), Eq. (decay_factor), over the filled slots.

    The newest slot is the last. An empty history is taken for one component of mean 0 and variance 1, as a new batch norm's.
    """
    slots, components = weights.shape[-2:]
    unused = ~(weights.sum(-1) > 0).any(-1)
    # An assignment to [..., -1, 0] is what inductor cannot lower where buffers are constants.
    newest = torch.arange(slots * components, device=weights.device).view(slots, components) == (slots - 1) * components
    weights = torch.where(unused[..., None, None] & newest, 1.0, weights)
    age = torch.arange(slots - 1, -1, -1, device=weights.device, dtype=weights.dtype)
    tau = torch.where(weights.sum(-1) > 0, torch.full_like(age, decay) ** age, 0.0)
    return weights, tau / tau.sum(-1, keepdim=True)


def steady_variances(weights: Tensor, means: Tensor, variances: Tensor, tau: Tensor) -> Tensor:
    """The variances (..., T, K, D) of a history, raised in slots that the others contradict.

    A feature that was constant some batches ago, and is not any more, has next to no variance in the slots of that time, and
    their transforms would outweigh all others. So a slot's overall variance is made at least ``STEADY`` times that of all
    slots taken together. Where the slots agree nothing changes.
    """
    _, mean, variance = taken_together(weights, means, variances)
    _, _, total = taken_together(tau, mean, variance)
    return variances + (STEADY * total.unsqueeze(-2) - variance).clamp_min(0).unsqueeze(-2)


def taken_together(weights: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weight (...), mean and variance (..., D) of n distributions as one, from (..., n) and twice (..., n, D)."""
    total = weights.sum(-1)
    share = (weights / positive(total).unsqueeze(-1)).unsqueeze(-1)
    mean = (share * means).sum(-2)
    return total, mean, (share * (variances + (means - mean.unsqueeze(-2)).square())).sum(-2)


def inverse_sqrt(weights: Tensor) -> Tensor:
    """1/√λ, and 0 for a component that is not in use."""
    return torch.where(weights > 0, positive(weights).rsqrt(), 0.0)


def positive(value: Tensor) -> Tensor:
    return value.clamp_min(torch.finfo(value.dtype).tiny)
