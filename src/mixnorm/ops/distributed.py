"""Statistics over the ranks of a process group: every rank gets what one process would find on all their points together.

A training step of a layer sends four messages forward and one backward; docs/mathematics.md derives their sums.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mixnorm.ops import fit
from mixnorm.ops.autograd import Transform, Work
from mixnorm.ops.kernels import Form, Kernels, Look, Mixture, Parameters, compute_dtype

WORLD = "world"  # the default group, whatever it is when the layer runs
HEADER = 16  # numbers, of which some are left for what else must be alike
PATIENCE = timedelta(seconds=30)  # a rank that waits longer says so
ALIKE = (
    "all ranks must run the same layers forward and backward, each layer in training on all of them or on none, and a rank "
    "without data runs an empty batch"
)


class Group:
    """The process group of a layer. Copies of the layer share it; a pickle keeps "world", and no other group."""

    def __init__(self, group: Any, name: str = "", number: int = 0) -> None:
        if dist.is_available():
            if group == dist.GroupMember.NON_GROUP_MEMBER:
                raise ValueError("this process is not in process_group: pass a group only to the layers of its own ranks")
            if isinstance(group, dist.ProcessGroup) and group is dist.group.WORLD:
                group = WORLD
        known = group is None or group == WORLD or (dist.is_available() and isinstance(group, dist.ProcessGroup))
        if not known:
            raise ValueError(
                f"process_group={group!r} is not a process group: use one of torch.distributed, {WORLD!r} for the default "
                "group, or None for statistics of this process alone"
            )
        self.group = group
        self.name, self.number = name, number  # of the layer in its model, from 1; 0 where that is not known

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        lost = self.group not in (None, WORLD)
        return (_without_group, ()) if lost else (Group, (self.group, self.name, self.number))

    def with_others(self) -> Any:
        """The group if there are other ranks in it; ``None`` where this process is alone, and has nothing to send."""
        if self.group is None or not dist.is_available() or not dist.is_initialized():
            return None
        group = dist.group.WORLD if self.group == WORLD else self.group
        return group if dist.get_world_size(group) > 1 else None


def _without_group() -> Group:
    warnings.warn("a saved layer has lost its process group: call mixnorm.synchronize on the loaded model", stacklevel=2)
    return Group(None)


@dataclass(frozen=True)
class Ranks:
    """What the ranks know of each other: how many points each has, and the first one's random state."""

    group: Any
    who: str  # the layer, for its errors
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
        sample = points.new_zeros(batch, size, dim, dtype=compute_dtype(points.dtype))
        if outer * inner:
            index = fit.sample_indices(self.total, size, draws) - sum(self.counts[: self.rank])
            mine = (index >= 0) & (index < outer * inner)
            rows = fit.gather(points, index.clamp(0, outer * inner - 1))
            sample.copy_(torch.where(mine.unsqueeze(-1), rows, 0))
        if everywhere:
            self.add_up(sample)
        else:
            _together(self.who, dist.reduce, sample, group_dst=0, group=self.group)
        return sample

    def add_up(self, tensor: Tensor) -> None:
        """Makes the tensor the sum of all ranks'."""
        _together(self.who, dist.all_reduce, tensor, group=self.group)

    def from_first(self, mixture: Mixture | None, sample: Tensor, num_components: int) -> Mixture:
        """The first rank's mixture of the sample (B, s, D), on every rank."""
        batch, dim = sample.shape[0], sample.shape[2]
        message = sample.new_empty(batch, num_components, 1 + 2 * dim)
        if mixture is not None:
            torch.cat((mixture[0].unsqueeze(-1), *mixture[1:]), dim=-1, out=message)
        _together(self.who, dist.broadcast, message, group_src=0, group=self.group)
        weights, means, variances = (part.contiguous() for part in message.split((1, dim, dim), dim=-1))
        return Mixture(weights.squeeze(-1), means, variances)


def outside_compiler(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Calls the function as it is also in a compiled model: what ranks tell each other decides the shapes that follow."""
    if torch.compiler.is_compiling():
        function = torch.compiler.disable(function)
    return function(*arguments)


def meet(group: Any, who: str, device: torch.device, count: int, alike: dict[str, Any], number: int = 0) -> Ranks:
    """Tells every rank how many points the others have, and the first rank's random state.

    ``alike`` is what must be the same on all ranks, and ``number`` says which layer this is, unless that is 0. Where they
    are not the same, every rank raises an error. The message is an all-to-all because nobody else sends those: gloo ends
    a process where two messages of one kind and of different sizes meet, as this one and a gradient of
    DistributedDataParallel would.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot hold statistics over a process group, whose batches may change in size: capture with "
            "process_group=None, or do not capture"
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    state = state.view(torch.int64)
    header = [count, number, *(zlib.crc32(repr(value).encode()) for value in alike.values())]
    mine = torch.tensor(header + [0] * (HEADER - len(header)), device="cpu")
    sizes = [HEADER + len(state), *[HEADER] * (size - 1)]  # what each rank tells each of the others
    sent = torch.cat((mine, state) if rank == 0 else (mine,)).repeat(size).to(device)
    message = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    _together(who, dist.all_to_all_single, message, sent, sizes, [sizes[rank]] * size, group=group)
    first, *others = message.cpu().split(sizes)
    headers = torch.stack((first[:HEADER], *others)).T.tolist()
    _check_alike(who, rank, alike, headers)
    return Ranks(group, who, headers[0], rank, first[HEADER:].clone().view(torch.uint8))


def _check_alike(who: str, rank: int, alike: dict[str, Any], headers: list[list[int]]) -> None:
    """Raises where the ranks do not agree on what they are doing; all of them find out together."""
    if len(set(headers[1]) - {0}) > 1:
        raise RuntimeError(f"the ranks are at different layers, this one at {who}: {ALIKE}")
    for name, values in zip(alike, headers[2:], strict=False):
        if len(set(values)) > 1:
            others = ", ".join(str(r) for r, value in enumerate(values) if value != values[rank])
            raise RuntimeError(
                f"the ranks disagree at {who}: {name} is {alike[name]!r} on rank {rank}, but not on rank {others}; build "
                "the same model on all ranks, and call train(), eval(), freeze() and no_grad() alike"
            )


def _together(who: str, collective: Callable[..., Any], tensor: Tensor, *arguments: Any, **options: Any) -> None:
    """Runs a collective; where the others do not come, one sentence says what they must do."""
    try:
        work = collective(tensor, *arguments, async_op=True, **options)
        if tensor.device.type == "cpu" and not _is_done(work):
            seconds = PATIENCE.total_seconds()
            warnings.warn(f"{who} has waited {seconds:g} s for the other ranks, and still waits: {ALIKE}", stacklevel=2)
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(f"{who} could not reach the other ranks: {ALIKE}") from error


def _is_done(work: Any) -> bool:
    """Whether the work ends soon, well or not."""
    try:
        work.wait(PATIENCE)
    except RuntimeError:
        return bool(work.is_completed())
    return True


def transform_of(
    x: Tensor,
    look: Look,
    mixture: Mixture,
    parameters: Parameters,
    form: Form,
    kernels: Kernels,
    ranks: Ranks,
) -> tuple[Tensor, Mixture]:
    """The kernels' ``transform_of`` with λ, μ, σ² of all ranks' points."""
    work = Work(kernels, form, look, lambda points: em_step(points, mixture, kernels, ranks), [], ranks)
    return Transform.apply(x, *parameters, work), work.found[0]


def em_step(points: Tensor, mixture: Mixture, kernels: Kernels, ranks: Ranks) -> tuple[Tensor, Mixture]:
    """ν (B, m, K) of this rank's points under the mixture, and λ, μ, σ² of all ranks' points under their ν.

    Each rank's moments become sums of ν, ν·(x - μ) and ν·(x - μ)² about the mixture's own means, in fp64: these add up.
    """
    anchor, dim = mixture[1].double(), mixture[1].shape[2]
    count = points.shape[1] * points.shape[2]
    if count:
        resp, (weights, means, variances) = kernels.em_step(points, mixture)
        number, shift = weights.double().unsqueeze(-1) * count, means.double() - anchor
        sums = torch.cat((number, number * shift, number * (variances.double() + shift.square())), dim=-1)
    else:
        resp = mixture[0].new_empty(points.shape[0], 0, mixture[0].shape[1])
        sums = anchor.new_zeros(*anchor.shape[:2], 1 + 2 * dim)
    ranks.add_up(sums)
    number, first, second = sums.split((1, dim, dim), dim=-1)
    unused = number == 0
    shift = first / number
    means = torch.where(unused, 0, anchor + shift)
    variances = torch.where(unused, 0, (second / number - shift.square()).clamp_min(0))
    dtype = mixture[1].dtype
    return resp, Mixture((number.squeeze(-1) / ranks.total).to(dtype), means.to(dtype), variances.to(dtype))
