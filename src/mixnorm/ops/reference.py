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
WHOLE = 0.98  # the weights of a slot that add up to more than this add up to 1, but for rounding, which may be bf16's


def log_densities(x: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """log p_k(x_i) of every component, (..., m, K)."""
    return _log_densities(squared_distances(x, means, variances), variances)


def squared_distances(x: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """Σ_d (x - μ_k)²/σ²_k, (..., m, K).

    The squares are of x - μ_k itself: expanding them would cancel wherever a mean is large beside its deviation.
    """
    columns = [
        ((x - mean.unsqueeze(-2)).square() / variance.unsqueeze(-2)).sum(-1)
        for mean, variance in zip(means.unbind(-2), variances.clamp_min(MIN_VARIANCE).unbind(-2), strict=True)
    ]
    return torch.stack(columns, dim=-1)


def _log_densities(squares: Tensor, variances: Tensor) -> Tensor:
    log_volume = (variances.clamp_min(MIN_VARIANCE).log() + math.log(2 * math.pi)).sum(-1)
    return -0.5 * (squares + log_volume.unsqueeze(-2))


def responsibilities(x: Tensor, weights: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """ν_k(x_i), Eq. (posterior): (..., m, K). A component of weight 0 gets exactly 0."""
    return torch.softmax(log_densities(x, means, variances) + weights.log().unsqueeze(-2), dim=-1)


def moments(x: Tensor, resp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """λ_k, μ_k and σ²_k of the points under ν, Eq. (responsibility) and the M-step of EM."""
    total = resp.sum(-2)
    share = resp / positive(total).unsqueeze(-2)  # ν̂
    # Sums are of x - center, because a mean may be large beside its deviation, and a component narrow beside its distance
    # from the others: first about the mean of all points, then twice about what that gives for each component.
    points = x.detach()
    center = points.mean(-2, keepdim=True)
    centers = center + share.detach().mT @ (points - center)
    means, variances = [], []
    for k in range(resp.shape[-1]):
        nu, center = share[..., k, None], centers[..., k, None, :]
        center = center + (nu.detach() * (points - center)).sum(-2, keepdim=True)
        centered = x - center
        shift = (nu * centered).sum(-2)
        means.append(center.squeeze(-2) + shift)
        variances.append((nu * centered.square()).sum(-2) - shift.square())
    in_use = (total > 0).unsqueeze(-1)
    return total / x.shape[-2], torch.where(in_use, torch.stack(means, -2), 0.0), torch.stack(variances, -2).clamp_min(0)


def em_step(x: Tensor, weights: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ν under the given mixture, then λ, μ and σ² under that ν: an E-step and an M-step."""
    resp = responsibilities(x, weights, means, variances)
    return resp, *moments(x, resp)


def normalize(
    x: Tensor,
    resp: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
    affine_mode: str,
) -> Tensor:
    """The mixture normalizing transform of a batch, Eq. (mixture_normalization0): gradients stop at ν."""
    weights, means, variances = moments(x, resp.detach())
    mixing = resp.detach() * inverse_sqrt(weights.detach()).unsqueeze(-2)
    return mix_components(x, mixing, means, variances, weight, bias, eps, activation, affine_mode)


def mix_components(
    x: Tensor,
    mixing: Tensor,
    means: Tensor,
    variances: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
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
    mode: str,
    bounded: bool,
    eps: float,
    activation: str | None,
    affine_mode: str,
) -> Tensor:
    """The transform under T given mixtures: ``weights`` (..., T, K), ``means``, ``variances`` (..., T, K, D), τ (..., T).

    As in training, gradients stop at the posterior. ``bounded``, for the ensemble: see :func:`slot_trust`.
    """
    means, variances = means.flatten(-3, -2), variances.flatten(-3, -2)
    with torch.no_grad():  # and detach: forward-mode derivatives do not stop at no_grad
        squares = squared_distances(x.detach(), means, variances.clamp_min(eps))
        log_density = _log_densities(squares, variances.clamp_min(eps))
        log_weights, factor = inference_factors(weights, slot_weights, mode=mode)
        joint = log_density.unflatten(-1, weights.shape[-2:]) + log_weights.unsqueeze(-3)
        if mode == "ensemble":
            posterior = torch.softmax(joint, dim=-1)  # (..., m, T, K)
            mixing = posterior * factor.unsqueeze(-3)
            if bounded:
                trust = slot_trust((posterior * squares.unflatten(-1, weights.shape[-2:])).sum(-1), x.shape[-1])
                mixing = mixing * (trust / trusted(trust, slot_weights.unsqueeze(-2))).unsqueeze(-1)
        else:
            mixing = torch.softmax(joint.flatten(-2), dim=-1).unflatten(-1, weights.shape[-2:]) * factor.unsqueeze(-3)
    mixing = mixing.flatten(-2)
    return mix_components(x, mixing, means, variances, weight, bias, eps, activation, affine_mode)


def slot_trust(squares: Tensor, dim: int) -> Tensor:
    """How far each slot is trusted at each point, in (0, 1], from its mean squared distance E_ν[Σ_d z²]: (..., m, T).

    The mixture of an unusual batch may lie anywhere and be narrow, and its transform of an ordinary point is then so large
    that it would decide the mean over all T. But it shows: its z² are not about 1 a channel. Beyond :func:`farthest` a slot
    counts for less, in inverse proportion to its z². Its transform grows with their root, so whatever the batch was, its
    part in the result is bounded, and vanishes the less the batch has to do with the point.
    """
    return (farthest(dim) / squares).clamp_max(1.0)


def mean_square(x: Tensor, weights: Tensor, means: Tensor, variances: Tensor, slot_weights: Tensor, eps: float) -> Tensor:
    """E[z²] a channel over the points, in the median over the slots: about 1 under a history of such points."""
    means, variances = means.flatten(-3, -2), variances.flatten(-3, -2).clamp_min(eps)
    squares = squared_distances(x, means, variances)
    log_weights, _ = inference_factors(weights, slot_weights, mode="ensemble")
    joint = _log_densities(squares, variances).unflatten(-1, weights.shape[-2:]) + log_weights.unsqueeze(-3)
    of_slots = (torch.softmax(joint, dim=-1) * squares.unflatten(-1, weights.shape[-2:])).sum(-1)
    of_slots = of_slots.div(x.shape[-1]).clamp_max(25.0).flatten(0, -2).mean(0)  # no point counts for more than 25
    return of_slots[(slot_weights > 0).flatten(0, -2).any(0)].median()


def farthest(dim: int) -> float:
    """The Σ_d z² up to which a slot describes a point: 4 a channel, and more for what chance does where they are few."""
    return 4.0 * dim + 16.0


def trusted(trust: Tensor, slot_weights: Tensor) -> Tensor:
    """Σ_t τ_t · trust_t, which takes the place of Σ_t τ_t = 1: (..., m, 1), and exactly 1 where all are trusted."""
    total = (slot_weights * trust).sum(-1, keepdim=True)
    return torch.where(((1 - trust) * slot_weights > 0).any(-1, keepdim=True), total, 1.0)


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


def can_be_kept(weights: Tensor, means: Tensor, variances: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether a mixture is finite in the dtype of a history, and its means are not too large to take squares from."""
    finite = weights.to(dtype).isfinite().all() & means.to(dtype).isfinite().all() & variances.to(dtype).isfinite().all()
    return finite & (means.abs() <= LARGEST_MEAN).all()


def slot_weights(weights: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """The λ (..., T, K) that a history is evaluated with, and τ (..., T), Eq. (decay_factor), over the filled slots.

    The newest slot is the last. An empty history is taken for one component of mean 0 and variance 1, as a new batch norm's.
    The weights of a batch of few points add up to less than 1, and it counts for as much.
    """
    slots, components = weights.shape[-2:]
    unused = ~(weights.sum(-1) > 0).any(-1)
    # An assignment to [..., -1, 0] is what inductor cannot lower where buffers are constants.
    newest = torch.arange(slots * components, device=weights.device).view(slots, components) == (slots - 1) * components
    weights = torch.where(unused[..., None, None] & newest, 1.0, weights)
    filled = (weights.sum(-1) > 0).to(weights.dtype)
    share = slot_share(weights)
    age = torch.arange(slots - 1, -1, -1, device=weights.device, dtype=weights.dtype)
    tau = torch.full_like(age, decay) ** age * share * filled
    return weights / share.unsqueeze(-1), tau / tau.sum(-1, keepdim=True)


def slot_share(weights: Tensor) -> Tensor:
    """How much each slot's batch counts (...), from its weights (..., K): 1, or less for a batch of few points."""
    share = weights.sum(-1, dtype=torch.promote_types(weights.dtype, torch.float32))
    return torch.where((share > 0) & (share < WHOLE), share, 1.0).to(weights.dtype)


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
