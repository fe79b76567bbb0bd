"""Statistics over the ranks of a process group: every rank gets what one process would find on all their points together.

A training step of a layer sends four messages forward and one backward; docs/mathematics.md derives their sums.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mixnorm.ops import backend as ops
from mixnorm.ops import reference, reference_fit
from mixnorm.ops.differentiable import gradients

WORLD = "world"  # the default group, whatever it is when the layer runs


class Group:
    """The process group of a layer. Copies of the layer share it; a pickle keeps "world", and no other group."""

    def __init__(self, group: Any) -> None:
        if dist.is_available():
            if group == dist.GroupMember.NON_GROUP_MEMBER:
                raise ValueError("this process is not in process_group: make the layer's group on its own ranks only")
            if isinstance(group, dist.ProcessGroup) and group is dist.group.WORLD:
                group = WORLD
        known = group is None or group == WORLD or (dist.is_available() and isinstance(group, dist.ProcessGroup))
        if not known:
            raise ValueError(
                f"process_group={group!r} is no process group: use one of torch.distributed, {WORLD!r} for the default one, "
                "or None for statistics of this process alone"
            )
        self.group = group

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        lost = self.group not in (None, WORLD)
        return (_without_group, ()) if lost else (Group, (self.group,))

    def with_others(self) -> Any:
        """The group if there are other ranks in it; ``None`` where this process is alone, and has nothing to send."""
        if self.group is None or not dist.is_available() or not dist.is_initialized():
            return None
        group = dist.group.WORLD if self.group == WORLD else self.group
        return group if dist.get_world_size(group) > 1 else None


def _without_group() -> Group:
    warnings.warn("a layer was saved with a process group, which no file holds: call mixnorm.synchronize", stacklevel=2)
    return Group(None)


@dataclass(frozen=True)
class Ranks:
    """What the ranks know of each other: how many points each has, and the first one's random state."""

    group: Any
    counts: list[int]
    rank: int
    random_state: Tensor

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def generator(self, device: torch.device) -> torch.Generator:
        """A generator that goes on from where the first rank's was."""
        generator = torch.Generator(device)
        generator.set_state(self.random_state)
        return generator

    def sample_of(self, points: Tensor, size: int, draws: Tensor, *, everywhere: bool) -> Tensor:
        """``size`` of all ranks' points, (B, size, D): on the first rank, and on the others only if ``everywhere``.

        Each rank fills in those rows that are its points and leaves 0 in the others, so that their sum is exact.
        """
        batch, outer, inner, dim = points.shape
        sample = points.new_zeros(batch, size, dim, dtype=ops.compute_dtype(points.dtype))
        if outer * inner:
            index = reference_fit.sample_indices(self.total, size, draws) - sum(self.counts[: self.rank])
            mine = (index >= 0) & (index < outer * inner)
            rows = reference_fit.gather(points, index.clamp(0, outer * inner - 1))
            sample.copy_(torch.where(mine.unsqueeze(-1), rows, 0))
        if everywhere:
            dist.all_reduce(sample, group=self.group)
        else:
            dist.reduce(sample, group_dst=0, group=self.group)
        return sample

    def from_first(self, mixture: ops.Statistics | None, sample: Tensor, num_components: int) -> ops.Statistics:
        """The first rank's mixture of the sample (B, s, D), on every rank."""
        batch, dim = sample.shape[0], sample.shape[2]
        message = sample.new_empty(batch, num_components, 1 + 2 * dim)
        if mixture is not None:
            torch.cat((mixture[0].unsqueeze(-1), *mixture[1:]), dim=-1, out=message)
        dist.broadcast(message, group_src=0, group=self.group)
        weights, means, variances = (part.contiguous() for part in message.split((1, dim, dim), dim=-1))
        return weights.squeeze(-1), means, variances


def outside_compiler(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Calls the function as it is also in a compiled model: what ranks tell each other decides the shapes that follow."""
    if torch.compiler.is_compiling():
        function = torch.compiler.disable(function)
    return function(*arguments)


def meet(points: Tensor, group: Any) -> Ranks:
    """Tells every rank how many points the others have, and the first rank's random state."""
    if points.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot hold statistics over a process group, whose batches may change in size: capture with "
            "process_group=None, or do not capture"
        )
    rank, size, device = dist.get_rank(group), dist.get_world_size(group), points.device
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    state = state.view(torch.int64)
    message = torch.zeros(size + len(state), dtype=torch.int64)
    message[rank] = points.shape[1] * points.shape[2]
    if rank == 0:
        message[size:] = state
    message = message.to(device)
    dist.all_reduce(message, group=group)
    message = message.cpu()
    return Ranks(group, message[:size].tolist(), rank, message[size:].clone().view(torch.uint8))


def transform_batch(
    points: Tensor,
    mixture: ops.Statistics,
    weight: Tensor | None,
    bias: Tensor | None,
    ranks: Ranks,
    *,
    history: tuple[ops.Statistics, Tensor] | None,
    backend: str,
    **options: Any,
) -> tuple[Tensor, ops.Statistics]:
    """:func:`mixnorm.ops.backend.transform_batch` with λ, μ, σ² of all ranks' points."""
    with torch.no_grad():
        resp, statistics = em_step(points.detach(), mixture, ranks, backend=backend)
        if history is not None:
            ops.push(history[0], statistics, history[1], backend=backend)
    return _Transform.apply(points, resp, *statistics, weight, bias, ranks, backend, options), statistics


def em_step(points: Tensor, mixture: ops.Statistics, ranks: Ranks, *, backend: str) -> tuple[Tensor, ops.Statistics]:
    """ν (B, m, K) of this rank's points under the mixture, and λ, μ, σ² of all ranks' points under their ν.

    Each rank's moments become sums of ν, ν·(x - μ) and ν·(x - μ)² about the mixture's own means, in fp64: these add up.
    """
    anchor, dim = mixture[1].double(), mixture[1].shape[2]
    count = points.shape[1] * points.shape[2]
    if count:
        resp, (weights, means, variances) = ops.em_step(points, mixture, backend=backend)
        number, shift = weights.double().unsqueeze(-1) * count, means.double() - anchor
        sums = torch.cat((number, number * shift, number * (variances.double() + shift.square())), dim=-1)
    else:
        resp = mixture[0].new_empty(points.shape[0], 0, mixture[0].shape[1])
        sums = anchor.new_zeros(*anchor.shape[:2], 1 + 2 * dim)
    dist.all_reduce(sums, group=ranks.group)
    number, first, second = sums.split((1, dim, dim), dim=-1)
    unused = number == 0
    shift = first / number
    means = torch.where(unused, 0, anchor + shift)
    variances = torch.where(unused, 0, (second / number - shift.square()).clamp_min(0))
    dtype = mixture[1].dtype
    return resp, ((number.squeeze(-1) / ranks.total).to(dtype), means.to(dtype), variances.to(dtype))


class _Transform(torch.autograd.Function):
    """The transform of this rank's points. The gradient of x is that of all ranks' losses together; those of γ and β are
    this rank's share, as DistributedDataParallel expects them."""

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
        ranks: Ranks,
        backend: str,
        options: dict[str, Any],
    ) -> Tensor:
        ctx.ranks, ctx.backend, ctx.options = ranks, backend, options
        ctx.save_for_backward(points, resp, weights, means, variances, weight, bias)
        if points.numel() == 0:
            return torch.empty_like(points)
        return ops.mix(points, resp, (weights, means, variances), weight, bias, backend=backend, **options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        points, resp, weights, means, variances, weight, bias = ctx.saved_tensors
        statistics, ranks, wanted = (weights, means, variances), ctx.ranks, ctx.needs_input_grad[0]
        count = points.shape[1] * points.shape[2]

        def over_ranks(lines: Tensor) -> None:
            """∂L/∂μ_k / n_k and 2·∂L/∂σ²_k / n_k, from this rank's loss and points to those of all."""
            lines.mul_(count)
            dist.all_reduce(lines, group=ranks.group)
            lines.div_(ranks.total)

        kernel = ops.mix_backward_in_parts(points, resp.shape[2], weight, bias, ctx.backend) if wanted and count else None
        if kernel is not None:
            found = kernel(grad, points, resp, statistics, weight, bias, over_ranks=over_ranks, **ctx.options)
        else:
            found = _gradients(grad, points, resp, statistics, weight, bias, over_ranks if wanted else None, ctx.options)
        of_weight, of_bias = (None if p is None else g for g, p in zip(found[1:], (weight, bias), strict=True))
        return found[0], None, None, None, None, of_weight, of_bias, None, None, None


def _gradients(
    grad: Tensor,
    points: Tensor,
    resp: Tensor,
    statistics: ops.Statistics,
    weight: Tensor | None,
    bias: Tensor | None,
    over_ranks: Any,
    options: dict[str, Any],
) -> list[Tensor | None]:
    """The gradients of the points (with ``over_ranks``), γ and β: autograd's with μ and σ² held fixed, and through them."""
    x, (weights, means, variances) = points.to(resp.dtype).flatten(1, 2), statistics
    leaves: list[Any] = [None if t is None else t.detach().requires_grad_() for t in (x, means, variances, weight, bias)]
    with torch.enable_grad():
        mixing = resp * reference.inverse_sqrt(weights).unsqueeze(1)
        parameters = (ops.flat_like(leaf, points) for leaf in leaves[3:])
        y = reference.mix_components(leaves[0], mixing, *leaves[1:3], *parameters, **options)
    found: list[Any] = gradients(y, leaves, [True] * len(leaves), grad, create_graph=False)
    grad_x, grad_means, grad_variances, *of_parameters = found
    if over_ranks is None:
        return [None, *of_parameters]
    numbers = weights.unsqueeze(-1) * max(x.shape[1], 1)
    lines = torch.stack((grad_means, 2 * grad_variances), dim=1) * torch.where(numbers > 0, 1 / numbers, 0).unsqueeze(1)
    over_ranks(lines)
    for k, (offset, tilt) in enumerate(zip(*(line.unbind(1) for line in lines.unbind(1)), strict=True)):
        through = offset.unsqueeze(1) + tilt.unsqueeze(1) * (x - means[:, k, None])
        grad_x = torch.addcmul(grad_x, resp[..., k, None], through)
    return [grad_x.to(points.dtype).unflatten(1, points.shape[1:3]), *of_parameters]
