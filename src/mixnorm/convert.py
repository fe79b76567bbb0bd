"""Model surgery: batch norms to mixture norms and back."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from mixnorm.freeze import FROZEN_OF, THAWED_OF
from mixnorm.functional import check_choice
from mixnorm.layers import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d
from mixnorm.lazy import LazyMixtureNorm1d, LazyMixtureNorm2d, LazyMixtureNorm3d
from mixnorm.mixture_norm import _MixtureNorm
from mixnorm.ops.reference import History, overall_statistics, taken_together
from mixnorm.select import Select, left_out, norms_of_other_kinds, selected

ModelForm = Literal["gated", "paper"]
# Gates that start at batch norm, and its scale.
GATED = {"scale": "unit", "within": "learned", "between": "learned"}

logger = logging.getLogger("mixnorm")

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
# A replacement takes these over by reference, so that the handles that users hold still remove their hooks.
_HOOKS = [name for name in vars(nn.Module()) if "_hook" in name]


def convert(model: nn.Module, select: Select = None, *, form: ModelForm = "gated", **options: Any) -> nn.Module:
    """Replaces batch norms by mixture norms, in place.

    The model starts as the one that it was: in evaluation its output is the same as before, and with ``form="gated"`` in
    training, too. There each channel has two gates, which start at batch norm and move away from it as training says. They
    are new parameters, so build the optimizer after this call, or add ``within_weight`` and ``between_weight`` to it.

    Without ``select`` two kinds of batch norms stay as they are, and the log says so: the one right before the model's last
    layer, and those with fewer than four channels. ``SyncBatchNorm`` and subclasses always stay.

    All other parameters keep their identity, except γ and β with ``component_affine=True``, which has a row for each
    component. A module used in two places stays one. Training flag, device, dtype, hooks and running statistics carry over.
    Lazy batch norms become lazy mixture norms. Only options that change the transform itself change the output at once: an
    activation, a ``deviation`` that is a number, ``affine_mode="statistics"``, or a population without a history.

    Args:
        model: any module; if it is itself a batch norm, use what is returned.
        select: which batch norms: a module name (its own, or that of a module around it), a glob ("conv3.*"; "*" is all of
            them), a list of either, or a function of (name, module).
        form: "gated" (``scale="unit", within="learned", between="learned"``), or "paper", whose transform moves every mode
            to mean 0 from the first step on, and is for training from scratch.
        options: for the mixture norms, such as ``num_components=5``. They go before the form.

    Example:
        >>> mixnorm.convert(model, num_components=3)
        >>> mixnorm.convert(model, "layer3.*", form="paper", activation="relu")
    """
    check_choice("form", form, get_args(ModelForm))
    own = {p.name for p in inspect.signature(MixtureNorm2d).parameters.values() if p.kind is p.KEYWORD_ONLY}
    known = own - {"bias"} | {"eps", "momentum"}
    for name in options:
        if name not in known:
            raise ValueError(f"option {name!r} is unknown to mixture norm: choose from form, {', '.join(sorted(known))}")
    if form == "gated":
        for name, value in (("affine_mode", "statistics"), ("inference", "paper")):
            if options.get(name) == value:
                raise ValueError(f"{name}={value!r} is for the paper's transform alone: add form='paper'")
        if options.get("num_components") != 1:  # one component has nothing to gate
            options = GATED | options

    has_parameters = next(model.parameters(), None) is not None
    is_frozen = has_parameters and not any(p.requires_grad for p in model.parameters())

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
            lazy = _LAZY_MIXTURE_OF[type(norm)](**arguments)
            return _without_gradients(lazy) if is_frozen else lazy
        layer = _MIXTURE_OF[THAWED_OF.get(type(norm), type(norm))](norm.num_features, **arguments)
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
        layer.frozen = type(norm) in THAWED_OF
        return _without_gradients(layer) if is_frozen else layer

    def is_candidate(module: nn.Module) -> bool:
        return THAWED_OF.get(type(module), type(module)) in _MIXTURE_OF or type(module) in _LAZY_MIXTURE_OF

    candidates = _candidates(model, is_candidate)
    if not candidates:
        others = norms_of_other_kinds(model)
        if "SyncBatchNorm" in others:
            others += ": call convert before convert_sync_batchnorm"
        raise ValueError(f"the model has no batch norm to convert; it has {others or 'no norm at all'}")
    names = selected(candidates, select, "batch norm")
    stay = left_out(model, candidates) if select is None else {}
    model = _replace(model, candidates, [name for name in names if name not in stay], mixture_norm)
    _number_layers(model)
    chosen = {id(candidates[name]) for name in names if name not in stay}
    taken = f"converted {len(chosen)} of {len({id(norm) for norm in candidates.values()})} batch norms"
    if stay:
        why = "; ".join(f"{name!r} stays, because {reason}" for name, reason in stay.items())
        logger.warning("mixnorm %s: %s (select='*' takes all)", taken, why)
    else:
        logger.info("mixnorm %s", taken)
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
            norm.__class__ = FROZEN_OF[type(norm)]
        return norm

    candidates = _candidates(model, lambda module: isinstance(module, _MixtureNorm))
    if not candidates:
        raise ValueError(
            f"the model has no mixture norm to revert; it has {norms_of_other_kinds(model) or 'no norm at all'}"
        )
    return _replace(model, candidates, selected(candidates, select, "mixture norm"), batch_norm)


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


def _candidates(model: nn.Module, is_candidate: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules(remove_duplicate=False) if is_candidate(m)}


def _replace(
    model: nn.Module, candidates: dict[str, nn.Module], names: list[str], make: Callable[[nn.Module], nn.Module]
) -> nn.Module:
    """Puts ``make(module)`` in place of every candidate of these names, everywhere that it is used."""
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
    trains = [p.requires_grad for p in (old._parameters["weight"], old._parameters["bias"]) if p is not None]
    if trains and not any(trains):
        _without_gradients(new)  # gates, too
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


def _without_gradients(layer: Any) -> Any:
    for parameter in layer.parameters():
        parameter.requires_grad = False  # requires_grad_() is not for parameters of lazy layers
    return layer


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


def _number_layers(model: nn.Module) -> None:
    """Tells the layers with a process group their places in the model, by which ranks know that they are at the same."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, _MixtureNorm)]
    for number, (name, layer) in enumerate(layers, 1):
        if layer.process_group is not None:
            layer._group.name, layer._group.number = name, number
