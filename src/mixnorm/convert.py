"""Model surgery: batch norms to mixture norms and back, fresh statistics, frozen statistics."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from mixnorm.layers import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d
from mixnorm.lazy import LazyMixtureNorm1d, LazyMixtureNorm2d, LazyMixtureNorm3d
from mixnorm.mixture_norm import _MixtureNorm, leaf_of
from mixnorm.ops import distributed
from mixnorm.ops.reference import History, Mixture, overall_statistics, taken_together

Select = str | Sequence[str] | Callable[[str, nn.Module], bool] | None


class _StaysInEvaluation:
    """A batch norm that ``train()`` does not reach, and that torch.fx takes for a leaf, as it takes all of torch.nn."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # not forward, which torch.jit.script reads
        if args and isinstance(args[0], torch.fx.Proxy):
            return leaf_of(self, args[0])
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def train(self, mode: bool = True) -> Any:
        return super().train(False)  # type: ignore[misc]


class FrozenBatchNorm1d(_StaysInEvaluation, nn.BatchNorm1d):
    """What :func:`freeze` makes of a ``BatchNorm1d``."""


class FrozenBatchNorm2d(_StaysInEvaluation, nn.BatchNorm2d):
    """What :func:`freeze` makes of a ``BatchNorm2d``."""


class FrozenBatchNorm3d(_StaysInEvaluation, nn.BatchNorm3d):
    """What :func:`freeze` makes of a ``BatchNorm3d``."""


class FrozenSyncBatchNorm(_StaysInEvaluation, nn.SyncBatchNorm):
    """What :func:`freeze` makes of a ``SyncBatchNorm``."""


_MIXTURE_OF: dict[type[nn.Module], type[_MixtureNorm]] = {
    nn.BatchNorm1d: MixtureNorm1d,
    nn.BatchNorm2d: MixtureNorm2d,
    nn.BatchNorm3d: MixtureNorm3d,
}
_LAZY_MIXTURE_OF: dict[type[nn.Module], type[_MixtureNorm]] = {
    nn.LazyBatchNorm1d: LazyMixtureNorm1d,
    nn.LazyBatchNorm2d: LazyMixtureNorm2d,
    nn.LazyBatchNorm3d: LazyMixtureNorm3d,
}
_LAZY_BATCH_NORM_OF = {mixture: norm for norm, mixture in _LAZY_MIXTURE_OF.items()}
_BATCH_NORM_OF = {mixture: norm for norm, mixture in _MIXTURE_OF.items()}
_FROZEN_OF: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: FrozenBatchNorm1d,
    nn.BatchNorm2d: FrozenBatchNorm2d,
    nn.BatchNorm3d: FrozenBatchNorm3d,
    nn.SyncBatchNorm: FrozenSyncBatchNorm,
}
_THAWED_OF = {frozen: norm for norm, frozen in _FROZEN_OF.items()}

# A replacement takes these over by reference, so that the handles that users hold still remove their hooks.
_HOOKS = [name for name in vars(nn.Module()) if "_hook" in name]


def convert(model: nn.Module, select: Select = None, **options: Any) -> nn.Module:
    """Replaces batch norms by mixture norms, in place.

    Parameters keep their identity, so an optimizer that was built before still works. (With ``component_affine=True`` γ and
    β are new parameters, as a learned ``within``, ``between`` or ``deviation`` is.) A module used in two places stays one.
    Training flag, device, dtype and hooks carry over, and so do the running statistics: evaluation gives the same output as
    before, until the first training batch (unless an option changes the transform itself: an activation, a ``deviation``
    that is a number, ``affine_mode="statistics"``, or a population without a history). Lazy batch norms become lazy mixture
    norms. ``SyncBatchNorm`` and subclasses are left alone.

    Args:
        model: any module; if it is itself a batch norm, use what is returned.
        select: which batch norms: a module name (its own, or that of a module around it), a glob ("conv3.*"), a list of
            either, or a function of (name, module). All of them if ``None``.
        options: for the mixture norms, such as ``num_components=5``.

    Example:
        >>> mixnorm.convert(model, "layer3.*", num_components=3)
    """
    own = {p.name for p in inspect.signature(MixtureNorm2d).parameters.values() if p.kind is p.KEYWORD_ONLY}
    known = own - {"bias"} | {"eps", "momentum"}
    for name in options:
        if name not in known:
            raise ValueError(f"option {name!r} is unknown to mixture norm: choose from {', '.join(sorted(known))}")

    def mixture_norm(norm: Any) -> _MixtureNorm:
        arguments = {"eps": norm.eps, "momentum": norm.momentum, **options}
        reference = norm.weight if norm.affine else norm.running_mean
        placement = {} if reference is None else {"device": reference.device, "dtype": reference.dtype}
        arguments |= {
            "affine": norm.affine,
            "bias": norm.bias is not None,
            "track_running_stats": norm.track_running_stats and norm.running_mean is not None,  # else it uses the batch's
            **placement,
        }
        if type(norm) in _LAZY_MIXTURE_OF:
            return _LAZY_MIXTURE_OF[type(norm)](**arguments)
        layer = _MIXTURE_OF[_THAWED_OF.get(type(norm), type(norm))](norm.num_features, **arguments)
        if layer.keeps_history:
            for name in ("history_weights", "history_means", "history_vars"):
                setattr(layer, name, getattr(layer, name).to(norm.running_mean.dtype))
            # A norm that never saw a batch has nothing to hand over, and a new history says so.
            if not _is_new(norm):
                with torch.no_grad():
                    for name, value in layer.history_of(norm.running_mean, norm.running_var).items():
                        getattr(layer, name).copy_(value)
            if norm.num_batches_tracked is not None:
                layer.num_batches_tracked.copy_(norm.num_batches_tracked)
        layer.frozen = type(norm) in _THAWED_OF
        return layer

    def is_candidate(module: nn.Module) -> bool:
        return _THAWED_OF.get(type(module), type(module)) in _MIXTURE_OF or type(module) in _LAZY_MIXTURE_OF

    model = _replace(model, select, is_candidate, mixture_norm, "batch norm")
    _number_layers(model)
    return model


def revert(model: nn.Module, select: Select = None) -> nn.Module:
    """Replaces mixture norms by batch norms, in place: the inverse of :func:`convert`, with the same promises.

    The running statistics are the mean and the variance of the history's mixtures taken together. What batch norm lacks is
    lost: ``within``, ``between`` and ``deviation``, and of γ_k and β_k all but their means.
    """

    def batch_norm(layer: Any) -> nn.Module:
        reference = layer.weight if layer.affine else layer.history_means
        placement = {} if reference is None else {"device": reference.device, "dtype": reference.dtype}
        if type(layer) in _LAZY_BATCH_NORM_OF:
            lazy: Any = _LAZY_BATCH_NORM_OF[type(layer)]
            return lazy(layer.eps, layer.momentum, layer.affine, layer.track_running_stats, **placement)
        made = next(norm for mixture, norm in _BATCH_NORM_OF.items() if isinstance(layer, mixture))
        norm: Any = made(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, **placement)
        if layer.keeps_history:
            norm.running_mean, norm.running_var = _overall_statistics(layer)
            norm.num_batches_tracked.copy_(layer.num_batches_tracked)
        if layer.frozen:
            norm.__class__ = _FROZEN_OF[type(norm)]
        return norm

    return _replace(model, select, lambda m: isinstance(m, _MixtureNorm), batch_norm, "mixture norm")


def synchronize(model: nn.Module, process_group: Any = None) -> nn.Module:
    """Makes every mixture norm normalize by the statistics of all ranks' batches together, in place.

    R ranks then train as one process would on the concatenated batch, as with ``SyncBatchNorm``. Only mixture norms change:
    ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` does this for batch norms. Evaluation, frozen layers and populations of
    single samples send nothing; nor does a process that is alone. See docs/distributed.md.

    Args:
        process_group: of ``torch.distributed``; the default group if ``None``, which may be initialized later.

    Example:
        >>> model = DistributedDataParallel(mixnorm.synchronize(mixnorm.convert(model)))
    """
    layers = [module for module in model.modules() if isinstance(module, _MixtureNorm)]
    if not layers:
        raise ValueError("the model has no mixture norm to synchronize: convert it first, or leave this call out")
    for layer in layers:
        layer.process_group = "world" if process_group is None else process_group
    _number_layers(model)
    return model


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


def freeze(model: nn.Module) -> nn.Module:
    """Puts every mixture norm and batch norm into evaluation for good: ``model.train()`` does not undo it.

    :func:`unfreeze` does. γ and β still train. Batch norms are those of ``torch.nn``, not subclasses of them, nor lazy ones
    before their first batch. Call this after ``convert_sync_batchnorm``, which makes norms that are not frozen.
    """
    for module in model.modules():
        if isinstance(module, _MixtureNorm):
            module.frozen = True
            module.eval()
        elif type(module) in _FROZEN_OF:
            module.__class__ = _FROZEN_OF[type(module)]
            module.eval()
    return model


def unfreeze(model: nn.Module) -> nn.Module:
    """Undoes :func:`freeze`; the norms take over the model's training flag."""
    thawed: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, _MixtureNorm) and module.frozen:
            module.frozen = False
            thawed.append(module)
        elif type(module) in _THAWED_OF:
            module.__class__ = _THAWED_OF[type(module)]
            thawed.append(module)
    for parent in model.modules():
        for child in parent.children():
            if any(child is module for module in thawed):
                child.train(parent.training)
    return model


def _replace(
    model: nn.Module,
    select: Select,
    is_candidate: Callable[[nn.Module], bool],
    make: Callable[[nn.Module], nn.Module],
    what: str,
) -> nn.Module:
    """Puts ``make(module)`` in place of every selected candidate, everywhere that it is used."""
    candidates = {name: m for name, m in model.named_modules(remove_duplicate=False) if is_candidate(m)}
    names = _selected(candidates, select, what)
    for name in names:
        if not {"weight", "bias"} <= candidates[name]._parameters.keys():
            raise ValueError(
                f"{name!r} computes its weight or bias from other parameters, which its replacement would not: undo that "
                "first, with torch.nn.utils.prune.remove or torch.nn.utils.parametrize.remove_parametrizations"
            )
    chosen = {id(candidates[name]) for name in names}
    replacements: dict[int, nn.Module] = {}
    for module in candidates.values():
        if id(module) in chosen and id(module) not in replacements:
            replacements[id(module)] = _take_over(make(module), module)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in replacements:
                parent._modules[name] = replacements[id(child)]
    return replacements.get(id(model), model)


def _selected(candidates: dict[str, nn.Module], select: Select, what: str) -> list[str]:
    """The names that ``select`` means; an error that lists what there is where it means none."""
    listing = ", ".join(repr(name) for name in candidates) or "none"
    if not candidates:
        remedy = "convert it first"
        if what == "batch norm":
            remedy = "call it before convert_sync_batchnorm (SyncBatchNorm and subclasses are left alone)"
        raise ValueError(f"the model has no {what} to replace: leave this call out, or {remedy}")
    if select is None:
        return list(candidates)
    if callable(select) and not isinstance(select, (nn.Module, type)):
        names = [name for name, module in candidates.items() if select(name, module)]
        if not names:
            raise ValueError(f"select chose no {what}: the model has {listing}")
        return names
    names = []
    for pattern in [select] if isinstance(select, str) or not isinstance(select, Iterable) else select:
        if not isinstance(pattern, str):
            raise ValueError(
                f"select={pattern!r} is no name: use a name or glob of {listing}, or a function of (name, module)"
            )
        found = [n for n in candidates if n == pattern or n.startswith(pattern + ".") or fnmatchcase(n, pattern)]
        if not found:
            raise ValueError(f"select={pattern!r} matches no {what}: the model has {listing}")
        names += found
    if not names:
        raise ValueError(f"select is empty: name at least one {what} of {listing}, or use None for all")
    return names


def _take_over(new: nn.Module, old: nn.Module) -> nn.Module:
    """Gives ``new`` the parameters, the hooks and the training flag of ``old``.

    Only γ and β for each component cannot be the same parameters: they start with batch norm's, or end as their mean.
    """
    lazy: Any = [module for module in (old, new) if isinstance(module, LazyModuleMixin)]
    for module in lazy:  # what waits for the first batch waits for its own
        module._initialize_hook.remove()
        module._load_hook.remove()
    for name in ("weight", "bias"):
        own, theirs = new._parameters[name], old._parameters[name]
        if not lazy and own is not None and theirs is not None and own.dim() != theirs.dim():
            with torch.no_grad():
                own.copy_(theirs if own.dim() > theirs.dim() else theirs.mean(0))
            own.requires_grad_(theirs.requires_grad)
        else:
            new._parameters[name] = theirs
    for name in _HOOKS:
        setattr(new, name, getattr(old, name))
    hooks: Iterable[Any] = new._load_state_dict_pre_hooks.values()
    for hook in hooks:
        if getattr(hook, "with_module", False):  # it holds a weak reference to its module
            hook.module = weakref.ref(new)
    for module in lazy[1:]:
        module._initialize_hook = new.register_forward_pre_hook(module._infer_parameters, prepend=True, with_kwargs=True)
        module._load_hook = new._register_load_state_dict_pre_hook(module._lazy_load_hook)
    new.training = old.training
    return new


def _is_new(norm: Any) -> bool:
    """Whether the norm never saw a batch. On the meta device it has nothing to hand over in any case."""
    if norm.running_mean.is_meta:
        return True
    if norm.num_batches_tracked is None or norm.num_batches_tracked > 0:
        return False
    return not bool(norm.running_mean.any()) and bool((norm.running_var == 1).all())


def _overall_statistics(layer: Any) -> tuple[Tensor, Tensor]:
    """The mean and variance (C,) of all the history's mixtures taken together, weighted by τ.

    A form that looks at them in evaluation averages variances, as batch norm does, and so it is here.
    """
    weights, tau = layer.slot_weights()
    if layer.within != 1 or layer.between != 0:
        history = History(*(t.double() for t in (weights, layer.history_means, layer.history_vars, tau)))
        return tuple(t.flatten().to(layer.history_means.dtype) for t in overall_statistics(history))  # type: ignore[return-value]
    # In fp64: a rounding error of the shares moves the mean by as much of itself, which may be many deviations.
    shares, dtype = weights.double() * tau.double().unsqueeze(-1), layer.history_means.dtype
    means, variances = (buffer.double().flatten(-3, -2) for buffer in (layer.history_means, layer.history_vars))
    _, mean, var = taken_together(shares.flatten(-2), means, variances)
    return mean.flatten().to(dtype), var.flatten().to(dtype)


def _has_statistics(module: nn.Module) -> bool:
    if isinstance(module, _MixtureNorm):
        return module.keeps_history and not module.frozen
    return isinstance(module, _BatchNorm) and module.track_running_stats and type(module) not in _THAWED_OF


def _number_layers(model: nn.Module) -> None:
    """Tells the layers with a process group their places in the model, by which ranks know that they are at the same."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, _MixtureNorm)]
    for number, (name, layer) in enumerate(layers, 1):
        if layer.process_group is not None:
            layer._group.name, layer._group.number = name, number


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
