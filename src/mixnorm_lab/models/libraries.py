"""Models by name from timm, torchvision and transformers, where these are installed: new ones, without trained weights.

"timm:resnet18", "torchvision:resnet18"; of transformers a class, "transformers:ResNetForImageClassification", or a folder
that has a config.json, "transformers:my-folder".
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

PREFIXES = ("timm", "torchvision", "transformers")
CHANNELS, SIZE = "num_channels", "image_size"  # as configurations of transformers call them


def is_library(name: str) -> bool:
    """Whether the name of a model is one of these packages'."""
    library, colon, _ = name.partition(":")
    return bool(colon) and library in PREFIXES


def canonical(name: str) -> str:
    """The name that stays the same wherever the command is run: a folder is told as a whole."""
    library, _, rest = name.partition(":")
    if library == "transformers" and Path(rest).is_dir():
        return f"{library}:{Path(rest).resolve().as_posix()}"
    return name


def build(name: str, num_classes: int, shape: tuple[int, ...]) -> nn.Module:
    """A new model of a package, for images of this shape (C, H, W).

    It is the architecture as the package has it: one that was made for 224 × 224 takes small images, too, and makes them
    smaller at once, unless its own options say otherwise.
    """
    library, _, rest = name.partition(":")
    package = _package(library, name)
    if len(shape) != 3:
        raise ValueError(f"{name} is for images, but the data has rows of {shape[0]} numbers: leave --model out, or use mlp")
    if library == "timm":
        return _timm(package, name, rest, num_classes, shape)
    if library == "torchvision":
        return _torchvision(package, name, rest, num_classes, shape)
    return _transformers(package, name, rest, num_classes, shape)


def _package(library: str, name: str) -> Any:
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name} needs {error.name}: pip install {library}") from None
    except (ImportError, RuntimeError, OSError) as error:  # of a package for another PyTorch
        why = " ".join(str(error).split())
        raise ValueError(f"{name} needs {library}, which cannot be imported ({why}): install one for this PyTorch") from None


def _timm(timm: Any, name: str, model: str, num_classes: int, shape: tuple[int, ...]) -> nn.Module:
    if not timm.is_model(model):
        raise ValueError(_unknown(name, model, timm.list_models()))
    options = {"pretrained": False, "num_classes": num_classes, "in_chans": shape[0]}
    try:
        return timm.create_model(model, **options, img_size=shape[1:])  # which transformers need, and others do not know
    except TypeError:
        return timm.create_model(model, **options)


def _torchvision(torchvision: Any, name: str, model: str, num_classes: int, shape: tuple[int, ...]) -> nn.Module:
    known = torchvision.models.list_models(module=torchvision.models)
    if model not in known:
        raise ValueError(_unknown(name, model, known))
    if shape[0] != 3:
        raise ValueError(
            f"{name} is for images of 3 channels, but the data has {shape[0]}: use timm, whose models take any number"
        )
    plain = {"aux_logits": False, "init_weights": True} if model in ("inception_v3", "googlenet") else {}
    return torchvision.models.get_model(model, weights=None, num_classes=num_classes, **plain)


def _transformers(transformers: Any, name: str, which: str, num_classes: int, shape: tuple[int, ...]) -> nn.Module:
    if Path(which).is_dir():
        try:
            config = transformers.AutoConfig.from_pretrained(which, local_files_only=True)
        except (OSError, ValueError) as error:
            why = str(error).strip().splitlines()[0]
            raise ValueError(
                f"{which} has no configuration of transformers ({why}): name a folder with config.json"
            ) from None
        known = [one for one in config.architectures or [] if one.endswith("ForImageClassification")]
        found = next((one for one in known if hasattr(transformers, one)), None)
        if found is None:
            has = ", ".join(config.architectures or []) or "none"
            raise ValueError(
                f"{which} is of {has}, but a model ForImageClassification is needed: say so in its architectures"
            )
        kind = getattr(transformers, found)
    else:
        known = [one for one in dir(transformers) if one.endswith("ForImageClassification") and not one.startswith("Auto")]
        if which not in known:
            what = "neither a folder nor a class of transformers"
            raise ValueError(_unknown(name, which, known, what))
        kind = getattr(transformers, which)
        config = kind.config_class()
    sizes = {CHANNELS: shape[0], SIZE: shape[1]}
    if hasattr(config, SIZE) and shape[1] != shape[2]:
        raise ValueError(f"{name} takes square images, but the data has {shape[1]} × {shape[2]}: use --image-size")
    for field, value in sizes.items():
        if hasattr(config, field):
            setattr(config, field, value)
        elif field == CHANNELS and value != 3:
            raise ValueError(f"{name} takes images of 3 channels, but the data has {value}: choose another model")
    config.num_labels = num_classes
    return Logits(kind(config))


class Logits(nn.Module):
    """A model of transformers that gives its logits, as a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Any) -> Any:
        return self.model(pixel_values=images).logits


def _unknown(name: str, model: str, known: Iterable[str], what: str = "no model of it") -> str:
    known = list(known)
    near = (
        difflib.get_close_matches(model, known, n=5, cutoff=0.5)
        or sorted(one for one in known if model and model in one)[:5]
    )
    library = name.partition(":")[0]
    advice = f"use {' or '.join(near)}" if near else f"{len(known):,} are there, such as {', '.join(sorted(known)[:3])}"
    return (
        f"there is no {name}, {model!r} is {what}: {advice}"
        if library == "transformers"
        else f"there is no {name}: {advice}"
    )
