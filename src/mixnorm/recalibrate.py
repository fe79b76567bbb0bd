"""Fresh statistics for every norm of a model, from data."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mixnorm.freeze import THAWED_OF
from mixnorm.mixture_norm import _MixtureNorm
from mixnorm.ops import distributed
from mixnorm.ops.reference import Mixture


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterable[Any]) -> nn.Module:
    """Refills the history of every mixture norm, and the running statistics of every batch norm, from data.

    Running statistics lag behind the weights while the learning rate is high; this takes them anew from the model as it
    is. Only the norms run in training mode meanwhile, so dropout is off. Frozen norms keep what they have. A compiled model
    runs without its compiler here.

    With statistics over ranks, every rank calls this with batches of its own, at least one. Some may have fewer than others.

    Args:
        batches: inputs, or tuples and lists that begin with one, or mappings of keyword arguments; as many as the history
            is long are enough for mixture norms, and batch norms take the plain mean over all of them.

    Example:
        >>> mixnorm.recalibrate(model, itertools.islice(loader, 100))
    """
    norms: list[Any] = [m for m in model.modules() if _has_statistics(m)]
    if not norms:
        raise ValueError("the model has no norm with statistics to refill: convert it first, or leave this call out")
    flags = {module: module.training for module in model.modules()}
    before = [(norm, norm.momentum, copy.deepcopy(norm.state_dict())) for norm in norms]
    calls: Counter[nn.Module] = Counter()

    def take_plain_mean(norm: Any, _: Any) -> None:
        """Over all batches, as momentum=None says; but that waits for the GPU, to read how many there were."""
        calls[norm] += 1
        norm.momentum = 1 / calls[norm]

    hooks = [norm.register_forward_pre_hook(take_plain_mean) for norm in norms if isinstance(norm, _BatchNorm)]
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    try:
        model.eval()
        for norm in norms:
            newest = norm.mixture if getattr(norm, "component_affine", False) else None
            norm.reset_running_stats()
            if newest is not None:  # where the first batch goes on from: γ_k and β_k are for these components
                norm._last_statistics = Mixture(newest.weights, newest.means, newest.variances)
            norm.train()
            if norm.momentum == 0:  # which keeps statistics as they are
                norm.momentum = None
        # Without a compiler, which would compile for hooks that are gone tomorrow, and for the momentum of each batch anew.
        with torch.compiler.set_stance("force_eager"):
            for batch, is_new in _rounds(batches, norms, device):
                with nullcontext() if is_new else _without_points(norms):
                    _feed(model, batch, device)
    except BaseException:
        for norm, _, state in before:
            norm.load_state_dict(state)
        raise
    finally:
        for hook in hooks:
            hook.remove()
        for norm, momentum, _ in before:
            norm.momentum = momentum
        for module, training in flags.items():
            module.training = training
    return model


def _has_statistics(module: nn.Module) -> bool:
    if isinstance(module, _MixtureNorm):
        return module.keeps_history and not module.frozen
    return isinstance(module, _BatchNorm) and module.track_running_stats and type(module) not in THAWED_OF


def _rounds(batches: Iterable[Any], norms: list[Any], device: torch.device) -> Iterator[tuple[Any, bool]]:
    """The batches, and whether each is new: the last one again as long as another rank still has batches."""
    found = dict.fromkeys(norm._group.with_others() for norm in norms if isinstance(norm, _MixtureNorm))
    groups = [group for group in found if group is not None]
    batch, done, iterator = None, 0, iter(batches)
    while True:
        has_batch = 1
        try:
            batch = next(iterator)
        except StopIteration:
            has_batch = 0
        counts = [has_batch]
        for group in groups:
            alike = {"the step": "recalibrate"}
            counts += distributed.meet(group, "recalibrate", device, max(counts), alike).counts
        if done == 0 and min(counts) == 0:
            where = " on another rank" if has_batch else ""
            raise ValueError(f"batches is empty{where}: pass at least one batch to take statistics from")
        if max(counts) == 0:
            return
        yield batch, bool(has_batch)
        done += 1


@contextmanager
def _without_points(norms: list[Any]) -> Iterator[None]:
    """Norms with statistics over ranks see empty batches and hand on what they got; the others are in evaluation."""
    inputs: list[Any] = []

    def empty(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs.append(arguments[0])
        return (arguments[0][:0], *arguments[1:])

    hooks = []
    for norm in norms:
        if isinstance(norm, nn.SyncBatchNorm) or (isinstance(norm, _MixtureNorm) and norm.process_group is not None):
            hooks.append(norm.register_forward_pre_hook(empty))
            hooks.append(norm.register_forward_hook(lambda *_: inputs.pop(), prepend=True))
        else:
            norm.eval()
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for norm in norms:
            norm.train()


def _feed(model: nn.Module, batch: Any, device: torch.device) -> None:
    def place(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    if isinstance(batch, Mapping):
        model(**{name: place(value) for name, value in batch.items()})
    else:
        model(place(batch[0] if isinstance(batch, (tuple, list)) else batch))
