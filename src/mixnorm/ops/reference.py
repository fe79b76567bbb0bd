"""The mathematics as the paper writes it, in plain differentiable PyTorch.

Every faster path is tested against this file; this file is tested against transcriptions of the equations, scikit-learn
and autograd in fp64. Shapes: ``x`` is (..., m, D), ``resp`` (..., m, K), ``weights`` (..., K), ``means`` and ``variances``
(..., K, D). The loops run over components only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
WHOLE = (
    0.98  # weights of a slot that add up to a number from this to its inverse add up to 1, but for rounding, perhaps bf16's
)


class Mixture(NamedTuple):
    """K Gaussians with diagonal covariance, B times: the numbers that kernels take and give."""

    weights: Tensor  # λ (B, K)
    means: Tensor  # μ (B, K, D)
    variances: Tensor  # σ² (B, K, D)


class History(NamedTuple):
    """T mixtures to evaluate with, what each counts, and how."""

    weights: Tensor  # λ (B, T, K)
    means: Tensor  # μ (B, T, K, D)
    variances: Tensor  # σ² (B, T, K, D)
    tau: Tensor  # τ (B, T)
    mode: str = "ensemble"  # one of kernels.INFERENCE_MODES
    bounded: bool = False  # whether a slot counts for less at a point that it does not describe


class Parameters(NamedTuple):
    """What a transform may learn: (D,) each, or what broadcasts against the points; γ and β also (K, D), by a form."""

    weight: Tensor | None = None  # γ
    bias: Tensor | None = None  # β
    within: Tensor | None = None  # g, how far a component has its own scale; None is 1
    between: Tensor | None = None  # b, how much of its own place it keeps; None is 0
    deviation: Tensor | None = None  # d, the weight of the Fisher vector's deviation part; None is 0


class Form(NamedTuple):
    """The form of the transform: the options of a layer that change its equation."""

    eps: float = 1e-5
    activation: str | None = None
    affine_mode: str = "output"
    scale: str = "fisher"
    component_affine: bool = False

    def is_scale_inside(self, looks_around: bool) -> bool:
        """Whether a_k is inside the activation, and not a factor of the whole component as in the paper's form.

        ``looks_around``: whether there is a g or b, which need the mean and variance of all points.
        """
        return looks_around or (self.component_affine and self.activation is None)


# The fields of a form that are choices, with the values that they may have.
FORM_CHOICES: dict[str, tuple[Any, ...]] = {
    "activation": (None, *ACTIVATIONS),
    "affine_mode": ("output", "statistics"),
    "scale": ("fisher", "unit"),
    "component_affine": (False, True),
}


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


def normalize(x: Tensor, resp: Tensor, parameters: Parameters, form: Form) -> Tensor:
    """The mixture normalizing transform of a batch, Eq. (mixture_normalization0): gradients stop at ν."""
    weights, means, variances = moments(x, resp.detach())
    return mix(x, resp.detach(), weights.detach(), means, variances, parameters, form)


def mix(
    x: Tensor, resp: Tensor, weights: Tensor, means: Tensor, variances: Tensor, parameters: Parameters, form: Form
) -> Tensor:
    """The transform under ν and given statistics."""
    overall = taken_together(weights, means, variances)[1:] if _looks_around(parameters) else None
    return mix_components(x, resp, component_scale(weights, form.scale), means, variances, overall, parameters, form)


def mix_components(
    x: Tensor,
    mixing: Tensor,
    scale: Tensor,
    means: Tensor,
    variances: Tensor,
    overall: tuple[Tensor, Tensor] | None,
    parameters: Parameters,
    form: Form,
) -> Tensor:
    """Σ_k mixing_k · act(x̂_k) with γ and β where ``form`` puts them; ``mixing`` is (..., m, K), ``scale`` a_k (..., K).

    x̂_k = (x - μ_k) · ((1 - g)/√(σ² + ε) + g·a_k/√(σ²_k + ε)) + b·(μ_k - μ)/√(σ² + ε)
          + d·a_k·((x - μ_k)²/(σ²_k + ε) - 1)/√2, with μ and σ² ``overall``.
    In the paper's form, where g = 1 and b = d = 0, a_k = 1/√λ_k is a factor of the whole term.
    """
    weight, bias, within, between, deviation = parameters
    gamma: Tensor | float = 1.0 if weight is None else weight
    beta: Tensor | float = 0.0 if bias is None else bias
    act = ACTIVATIONS[form.activation] if form.activation else None
    affine_inside = act is not None or form.component_affine
    scale_inside = form.is_scale_inside(_looks_around(parameters))
    if overall is not None:
        mean_of_all, spread_of_all = overall[0].unsqueeze(-2), (overall[1] + form.eps).sqrt().unsqueeze(-2)
    y = torch.zeros_like(x)
    for k in range(mixing.shape[-1]):
        mean, variance = means[..., k, None, :], variances[..., k, None, :]
        if form.component_affine:  # with T mixtures, the components of each in turn
            gamma = 1.0 if weight is None else weight[k % weight.shape[0]]
            beta = 0.0 if bias is None else bias[k % bias.shape[0]]
        if form.affine_mode == "statistics":
            # The paper's μ_k + β and γ·σ²_k; a γ below zero counts as zero, so that the root stays real.
            spread = weight.clamp_min(0) * variance if weight is not None else variance
            normalized = (x - mean - beta) / (spread + form.eps).sqrt()
        else:
            own_scale = scale[..., k, None, None] if scale_inside else 1.0
            standardized = (x - mean) / (variance + form.eps).sqrt()
            normalized = own_scale * standardized
            if within is not None:
                normalized = within * normalized + (1 - within) * (x - mean) / spread_of_all
            if between is not None:
                normalized = normalized + between * (mean - mean_of_all) / spread_of_all
            if deviation is not None:
                normalized = normalized + deviation * own_scale * (standardized.square() - 1) / math.sqrt(2)
            if affine_inside:
                normalized = gamma * normalized + beta
        if act:
            normalized = act(normalized)
        share = mixing[..., k, None] if scale_inside else mixing[..., k, None] * scale[..., k, None, None]
        y = y + share * normalized
    if form.affine_mode == "output" and not affine_inside:
        y = gamma * y + beta
    return y


def _looks_around(parameters: Parameters) -> bool:
    """Whether the transform of a component needs the mean and variance of all points."""
    return parameters.within is not None or parameters.between is not None


def component_scale(weights: Tensor, scale: str) -> Tensor:
    """a_k: 1/√λ_k for "fisher", 1 for "unit"."""
    return inverse_sqrt(weights) if scale == "fisher" else torch.ones_like(weights)


def inference(x: Tensor, history: History, parameters: Parameters, form: Form) -> Tensor:
    """The transform under T given mixtures, λ (..., T, K), μ and σ² (..., T, K, D), τ (..., T).

    As in training, gradients stop at the posterior. μ and σ² of all points are the mean over the T, as batch norm's are.
    """
    weights, _, _, tau, mode, bounded = history
    means, variances = history.means.flatten(-3, -2), history.variances.flatten(-3, -2)
    with torch.no_grad():  # and detach: forward-mode derivatives do not stop at no_grad
        squares = squared_distances(x.detach(), means, variances.clamp_min(form.eps))
        log_density = _log_densities(squares, variances.clamp_min(form.eps))
        log_weights, mixing, scale = inference_factors(weights, tau, mode, form.scale)
        joint = log_density.unflatten(-1, weights.shape[-2:]) + log_weights.unsqueeze(-3)
        if mode == "ensemble":
            posterior = torch.softmax(joint, dim=-1)  # (..., m, T, K)
            mixing = posterior * mixing.unsqueeze(-3)
            if bounded:
                trust = slot_trust((posterior * squares.unflatten(-1, weights.shape[-2:])).sum(-1), x.shape[-1])
                mixing = mixing * (trust / trusted(trust, tau.unsqueeze(-2))).unsqueeze(-1)
        else:
            mixing = torch.softmax(joint.flatten(-2), dim=-1).unflatten(-1, weights.shape[-2:]) * mixing.unsqueeze(-3)
        overall = overall_statistics(history) if _looks_around(parameters) else None
    return mix_components(x, mixing.flatten(-2), scale.flatten(-2), means, variances, overall, parameters, form)


def overall_statistics(history: History) -> tuple[Tensor, Tensor]:
    """The mean and the variance of a batch (..., D), averaged over the T that a history holds: batch norm's statistics."""
    _, mean, variance = taken_together(history.weights, history.means, history.variances)
    tau = history.tau.unsqueeze(-1)
    return (tau * mean).sum(-2), (tau * variance).sum(-2)


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
    log_weights, *_ = inference_factors(weights, slot_weights, "ensemble", "unit")
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


def inference_factors(weights: Tensor, slot_weights: Tensor, mode: str, scale: str) -> tuple[Tensor, Tensor, Tensor]:
    """The log-weights of the posterior, what it is multiplied by, and a_k, all (..., T, K).

    - "ensemble": τ_t · ν^t_k / √λ^t_k, with a posterior ν^t of its own for each t.
    - "mixture":  π^t_k / √λ^t_k, with one posterior π over all T·K components.
    - "paper":    π^t_k / √(τ_t λ^t_k), Eq. (mixture_normalization_test) as printed.
    """
    tau = slot_weights.unsqueeze(-1)
    if mode == "ensemble":
        # An empty slot has no posterior; a uniform one, times τ = 0, keeps it out without a NaN.
        filled = weights.sum(-1, keepdim=True) > 0
        return torch.where(filled, weights, 1.0).log(), tau.expand_as(weights), component_scale(weights, scale)
    joint = tau * weights
    found = component_scale(joint if mode == "paper" else weights, scale)
    return joint.log(), torch.ones_like(weights), torch.where(tau > 0, found, 0.0)


def can_be_kept(weights: Tensor, means: Tensor, variances: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether a mixture is finite in the dtype of a history, and its means are not too large to take squares from."""
    finite = weights.to(dtype).isfinite().all() & means.to(dtype).isfinite().all() & variances.to(dtype).isfinite().all()
    return finite & (means.abs() <= LARGEST_MEAN).all()


def slot_weights(weights: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """The λ (..., T, K) that a history is evaluated with, and τ (..., T), Eq. (decay_factor), over the filled slots.

    The newest slot is the last. An empty history is taken for one component of mean 0 and variance 1, as a new batch norm's.
    The weights of a batch of few points add up to less than 1, and it counts for as much; those of a slot that stands for
    many batches, as a batch norm's statistics do, to more.
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
    """How much each slot counts (...), from its weights (..., K): 1, or less for few points, or more for many batches."""
    share = weights.sum(-1, dtype=torch.promote_types(weights.dtype, torch.float32))
    return torch.where((share > 0) & ((share < WHOLE) | (share > 1 / WHOLE)), share, 1.0).to(weights.dtype)


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
