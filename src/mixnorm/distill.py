"""A model to ship: the T mixtures that a layer keeps become one, so that evaluation costs a T-th."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mixnorm.mixture_norm import _MixtureNorm
from mixnorm.ops.kernels import Mixture
from mixnorm.ops.reference import MIN_VARIANCE, slot_trust, taken_together

MAX_ROUNDS = 20  # of matching and merging; two or three are the rule


@torch.no_grad()
def distill(model: nn.Module) -> nn.Module:
    """Reduces the history of every mixture norm from T mixtures of K components to one of K, in place.

    Components that belong together are merged to one with the mean and the variance that they have together, so that every
    layer's overall mean and variance stay what they were; what the other batches contradict counts for less. A layer with
    ``inference="pooled"`` keeps its pooled mixture, and one without a history stays as it is. The model is for evaluation:
    if it trains on, it keeps the last batch alone. Its state dict is that of layers with ``history=1``.

    Example:
        >>> mixnorm.distill(model.eval())
        >>> torch.onnx.export(model, (x,), "model.onnx", dynamo=True)
    """
    layers = [module for module in model.modules() if isinstance(module, _MixtureNorm)]
    if not layers:
        raise ValueError("the model has no mixture norm to distill: convert it first, or leave this call out")
    for layer in layers:
        if layer.keeps_history:
            _keep_one_mixture(layer)
    return model


def _keep_one_mixture(layer: _MixtureNorm) -> None:
    pooled = layer.pooled_mixture() if layer.inference == "pooled" else None
    if pooled is not None:
        merged = Mixture(pooled.weights, pooled.means, pooled.variances)
    else:
        weights, tau = layer.slot_weights()
        means, variances = layer.history_means.double(), layer.history_vars.double()
        shares = (weights * tau.unsqueeze(-1)).double()
        counted = shares * agreement(weights.double(), tau.double(), means, variances, layer.eps).unsqueeze(-1)
        counted = counted * (shares.sum((-2, -1), keepdim=True) / counted.sum((-2, -1), keepdim=True))
        merged = merge_mixtures(counted, means, variances, layer.eps)
    axis = layer.history_weights.dim() - 2
    for name, value in zip(("history_weights", "history_means", "history_vars"), merged, strict=True):
        setattr(layer, name, value.unsqueeze(axis).to(getattr(layer, name).dtype))
    layer.history, layer.history_samples = 1, None
    layer.inference = "ensemble"  # with one mixture all modes are the same
    layer._forget()


def agreement(weights: Tensor, tau: Tensor, means: Tensor, variances: Tensor, eps: float) -> Tensor:
    """How far the other slots agree with each, (..., T) in [0, 1]; from λ (..., T, K), τ, and μ and σ² (..., T, K, D).

    In a merged variance one batch at another scale would outweigh all others. Two slots agree as far as each one's overall
    mean and variance describe the points of the other (``slot_trust``); squared, because a variance grows as the distances
    do, and its part must vanish. The mean over the others is exactly 1 where all of them describe each other.
    """
    _, mean, variance = taken_together(weights, means, variances)  # (..., T, D)
    variance = variance.clamp_min(max(eps, MIN_VARIANCE))
    apart = (mean.unsqueeze(-2) - mean.unsqueeze(-3)).square()
    trust = slot_trust(((variance.unsqueeze(-3) + apart) / variance.unsqueeze(-2)).sum(-1), mean.shape[-1])
    others = tau.unsqueeze(-2) * (1 - torch.eye(tau.shape[-1], dtype=tau.dtype, device=tau.device))
    total = others.sum(-1)
    return torch.where(total > 0, (others * torch.minimum(trust, trust.mT).square()).sum(-1) / total, 1.0)


def merge_mixtures(weights: Tensor, means: Tensor, variances: Tensor, eps: float) -> Mixture:
    """One mixture (..., K) and twice (..., K, D) of T, whose components are permuted: (..., T, K) and twice (..., T, K, D).

    ``weights`` are τ_t·λ^t_k. Each component of the result is one component of each of the T, taken together. The centers
    are those of the last of the T that has the most components in use. Then two steps are repeated until nothing changes:
    match the components to the centers, and move each center to the mean and variance of what was matched to it.
    """
    slots = torch.arange(weights.shape[-2], device=weights.device)
    start = ((weights > 0).sum(-1) * len(slots) + slots).argmax(-1)[..., None, None]  # (..., 1, 1)
    one = start.expand(*weights.shape[:-2], 1, weights.shape[-1])
    ones = one.unsqueeze(-1).expand(*one.shape, means.shape[-1])
    centers = Mixture(
        weights.gather(-2, one).squeeze(-2), means.gather(-3, ones).squeeze(-3), variances.gather(-3, ones).squeeze(-3)
    )
    last: Tensor | None = None
    for _ in range(MAX_ROUNDS):
        match = _match(weights, means, variances, centers, max(eps, MIN_VARIANCE))
        if last is not None and torch.equal(match, last):
            break
        last = match
        index = match.unsqueeze(-1).expand_as(means)
        centers = _merged(weights.gather(-1, match), means.gather(-2, index), variances.gather(-2, index))
    return centers


def _match(weights: Tensor, means: Tensor, variances: Tensor, centers: Mixture, min_variance: float) -> Tensor:
    """Which component of each mixture goes to each center, (..., T, K).

    The components choose in turn, the heaviest first, the nearest center that is free: the least sum of squared distances
    in units of both variances. One to one, because 1/√λ is a part of the transform: were two of a mixture's components
    merged, its scale would change.
    """
    spread = (variances.unsqueeze(-2) + centers[2].unsqueeze(-3).unsqueeze(-3)).clamp_min(min_variance)
    distance = ((means.unsqueeze(-2) - centers[1].unsqueeze(-3).unsqueeze(-3)).square() / spread).sum(-1)
    # A center that nothing was matched to yet is the last choice, and better than none.
    distance = torch.where(centers[0].unsqueeze(-2).unsqueeze(-2) > 0, distance, torch.finfo(distance.dtype).max)
    match = torch.empty_like(weights, dtype=torch.long)
    for component in weights.argsort(dim=-1, descending=True, stable=True).split(1, -1):  # (..., T, 1)
        row = component.unsqueeze(-1).expand(*component.shape, distance.shape[-1])
        nearest = distance.gather(-2, row).squeeze(-2).argmin(-1, keepdim=True)
        match.scatter_(-1, nearest, component)
        distance = distance.scatter(-1, nearest.unsqueeze(-2).expand(*distance.shape[:-1], 1), torch.inf)
    return match


def _merged(weights: Tensor, means: Tensor, variances: Tensor) -> Mixture:
    """The T components of each center taken together: (..., K) and twice (..., K, D)."""
    total, mean, variance = taken_together(weights.mT, means.transpose(-3, -2), variances.transpose(-3, -2))
    # A component that is in use nowhere has a variance that can be divided by, as in an empty slot.
    return Mixture(total, mean, torch.where(total.unsqueeze(-1) > 0, variance, 1.0))
