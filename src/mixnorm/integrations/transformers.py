"""Converted models of Hugging Face's transformers, saved and loaded as that package does it.

``save_pretrained`` of a model writes its weights and its configuration, but not which norms were converted. Here that goes
into the configuration, ``config.mixture_norms``, and is read back from it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from mixnorm.integrations.description import describe, rebuild

KEY = "mixture_norms"  # in the configuration
HISTORY = ".history_means"  # ends a name that the state dict of a mixture norm alone has
WHERE_FROM = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "trust_remote_code")


def record(model: Any) -> Any:
    """Notes in ``model.config`` which norms are mixture norms, for ``model.save_pretrained`` to write; returns the model.

    For ``transformers.Trainer``, which saves checkpoints on its own. Call it again after another conversion, or after
    ``revert``; :func:`save_pretrained` does.

    Example:
        >>> record(mixnorm.convert(model))
        >>> Trainer(model, ...).train()
    """
    config = getattr(model, "config", None)
    if not (hasattr(config, "to_dict") and hasattr(model, "save_pretrained")):
        raise ValueError(
            f"a {type(model).__name__} is no model of transformers, which has a config and save_pretrained: save its "
            "state_dict() with torch.save, and convert a new model alike before load_state_dict()"
        )
    described = describe(model)
    if described["layers"]:
        setattr(config, KEY, described)
    elif hasattr(config, KEY):
        delattr(config, KEY)
    return model


def save_pretrained(model: Any, folder: Any, **options: Any) -> None:
    """``model.save_pretrained`` of a converted model, which :func:`from_pretrained` loads. Others are saved as usual.

    Args:
        options: of ``model.save_pretrained``.
    """
    record(model).save_pretrained(folder, **options)


def from_pretrained(cls: Any, folder: Any, *arguments: Any, **options: Any) -> Any:
    """``cls.from_pretrained`` of a model with mixture norms: the same layers, options and statistics as when it was saved.

    What was saved without mixture norms is loaded as usual.

    Args:
        cls: a class of transformers, such as ``ResNetForImageClassification``. An auto class stands for the class that the
            model was saved from.
        folder: or the name of a model on the hub.
        options: of ``cls.from_pretrained``.

    Example:
        >>> save_pretrained(mixnorm.convert(model), "converted")
        >>> model = from_pretrained(ResNetForImageClassification, "converted")
    """
    kind = cls if isinstance(cls, type) and issubclass(cls, nn.Module) else _saved_class(folder, options)
    wants_info = options.pop("output_loading_info", False)
    model, info = _rebuilding(kind).from_pretrained(folder, *arguments, output_loading_info=True, **options)
    model.__class__ = kind
    described = getattr(model.config, KEY, None)
    names = [] if described is None else list(_for_class(kind, model, described)["layers"])
    _check(folder, kind, names, info)
    for name in names:
        layer: Any = model.get_submodule(name)
        if layer.keeps_history and not layer.history_means.is_meta:
            layer.load_state_dict(layer.state_dict())  # the tensors are there: what follows from them is found again
    return (model, info) if wants_info else model


def _rebuilding(kind: Any) -> Any:
    """A class that differs in one thing: its new models have mixture norms where their configuration says."""

    def build(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        kind.__init__(self, config, *arguments, **options)
        if (described := getattr(config, KEY, None)) is not None:
            rebuild(self, _for_class(kind, self, described))

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__, "__doc__": kind.__doc__})


def _for_class(kind: Any, model: Any, described: dict[str, Any]) -> dict[str, Any]:
    """The description with names as they are in this class: a model with a head holds one without under a prefix."""
    prefix = f"{getattr(kind, 'base_model_prefix', '')}."
    modules = dict(model.named_modules())
    layers = {}
    for name, own in described["layers"].items():
        names = (name, name.removeprefix(prefix), prefix + name)
        layers[next((one for one in names if one in modules), name)] = own
    return {**described, "layers": layers}


def _check(folder: Any, kind: Any, names: list[str], info: dict[str, Any]) -> None:
    remedy = "save it again with mixnorm.integrations.transformers.save_pretrained(model, folder)"
    missing = sorted(key for key in info["missing_keys"] if key.rpartition(".")[0] in names)
    if missing:
        raise ValueError(
            f"{folder} has no weights for {missing[0]}, though its config.json has a mixture norm there, as happens when a "
            f"model was reverted: {remedy}"
        )
    unexpected = sorted(key for key in info["unexpected_keys"] if key.endswith(HISTORY))
    samples = sorted(key for key in info["unexpected_keys"] if key.endswith(".history_samples"))
    if samples and names:
        raise ValueError(f"{folder} has {samples[0]}, which its config.json was recorded before: {remedy}")
    if unexpected and not names:
        raise ValueError(
            f"{folder} has mixture norms, such as {unexpected[0].removesuffix(HISTORY)}, but its config.json does not say "
            f"with which options: {remedy}"
        )


def _saved_class(folder: Any, options: dict[str, Any]) -> Any:
    import transformers

    where = {name: options[name] for name in WHERE_FROM if name in options}
    config = options.get("config") or transformers.AutoConfig.from_pretrained(folder, **where)
    names = getattr(config, "architectures", None) or []
    found = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if found is None:
        raise ValueError(f"{folder} does not say which class of transformers it is of: pass that class, not an auto class")
    return found


__all__ = ["from_pretrained", "record", "save_pretrained"]
