"""Which layers of a model are mixture norms, with their options, as plain values that go to JSON and back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from mixnorm.layers import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d
from mixnorm.mixture_norm import _MixtureNorm

CLASSES: dict[str, type[_MixtureNorm]] = {kind.__name__: kind for kind in (MixtureNorm1d, MixtureNorm2d, MixtureNorm3d)}
PLACEMENT = ("device", "dtype")  # where a layer is, which the model decides
ARGUMENTS = tuple(name for name in inspect.signature(MixtureNorm2d).parameters if name not in PLACEMENT)


def describe(model: nn.Module) -> dict[str, Any]:
    """Every mixture norm of a model by its name: ``{"shared": options of all, "layers": {name: its own options}}``.

    A model without any gives an empty ``layers``. A process group is not told, but "world" is.
    """
    found = {name: _arguments(name, module) for name, module in model.named_modules() if isinstance(module, _MixtureNorm)}
    first = next(iter(found.values()), {})
    shared = {key: value for key, value in first.items() if all(one[key] == value for one in found.values())}
    layers = {name: {k: v for k, v in one.items() if k not in shared} for name, one in found.items()}
    return {"shared": shared, "layers": layers}


def rebuild(model: nn.Module, described: Mapping[str, Any]) -> nn.Module:
    """Puts new mixture norms where a description has them, in place of whatever is there; a state dict then fills them.

    Returns the model, or the layer if the model was nothing else.
    """
    for name, own in described["layers"].items():
        arguments = {**described["shared"], **own}
        try:
            old = model.get_submodule(name)
        except AttributeError:
            raise ValueError(
                f"a {type(model).__name__} has no module {name!r}, where the description has a mixture norm: build the "
                "model that was described"
            ) from None
        model = _put(model, old, _layer(name, arguments, like=old))
    return model


def _arguments(name: str, layer: Any) -> dict[str, Any]:
    where = f"the mixture norm {name!r}" if name else "the mixture norm"
    if isinstance(layer, LazyModuleMixin):
        raise ValueError(f"{where} has not seen a batch, and has no channels yet: run one through the model first")
    if CLASSES.get(type(layer).__name__) is not type(layer):
        raise ValueError(f"{where} is a {type(layer).__name__}, a class of your own: only mixnorm's own can be described")
    values = {argument: getattr(layer, argument) for argument in ARGUMENTS}
    values["bias"] = layer.bias is not None
    if values["process_group"] != "world":
        values["process_group"] = None
    plain = {argument: _plain(value) for argument, value in values.items()}
    samples = None if layer.history_samples is None else list(layer.history_samples.shape)
    return {"class": type(layer).__name__, **plain, "frozen": layer.frozen, "samples": samples}


def _plain(value: Any) -> Any:
    """A number of any type as Python's own, which JSON knows."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _layer(name: str, arguments: dict[str, Any], like: nn.Module) -> _MixtureNorm:
    kind = CLASSES.get(arguments.pop("class", ""))
    frozen, samples = arguments.pop("frozen", False), arguments.pop("samples", None)
    unknown = sorted(arguments.keys() - set(ARGUMENTS))
    if kind is None or unknown:
        what = f"option {unknown[0]!r}" if unknown else "class"
        raise ValueError(f"the mixture norm {name!r} has a {what} that this version does not know: update mixnorm")
    tensor = next((t for t in (*like.parameters(), *like.buffers()) if t is not None and t.is_floating_point()), None)
    placement: dict[str, Any] = {} if tensor is None else {"device": tensor.device, "dtype": tensor.dtype}
    layer = kind(**arguments, **placement)
    layer.frozen = frozen
    if samples is not None:  # of inference="pooled": their number follows from the batches
        layer.history_samples = torch.empty(samples, **placement)
    layer.train(like.training)
    return layer


def _put(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Replaces a module everywhere that it is used."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
    return new if model is old else model
