"""The models of the paper and some others, one file each, with the norm injected, and their names, on torch alone.

Each classifier says which images it is for (``input_shape``: C, H, W), and which norms a layer's name stands for
(``layers``): those that the paper replaces where it names a layer, and in residual networks "relu" for norms that a ReLU
follows and "sum" for those whose output is added to something first. A perceptron for tables, and models of other packages
(``libraries``), take the shape that the data has.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from torch import nn

from mixnorm_lab.models import libraries
from mixnorm_lab.models.cifar_cnn import CifarCNN
from mixnorm_lab.models.dcgan import Discriminator, Generator
from mixnorm_lab.models.densenet import DenseNet
from mixnorm_lab.models.digits_cnn import DigitsCNN
from mixnorm_lab.models.inception_v3 import InceptionV3
from mixnorm_lab.models.libraries import is_library
from mixnorm_lab.models.mlp import MLP
from mixnorm_lab.models.resnet import ResNet
from mixnorm_lab.models.wide_resnet import WideResNet

__all__ = [
    "MLP",
    "NAMES",
    "CifarCNN",
    "DenseNet",
    "DigitsCNN",
    "Discriminator",
    "Generator",
    "InceptionV3",
    "ResNet",
    "WideResNet",
    "build",
    "input_shape",
    "is_library",
    "last_norms",
    "without_relu",
]

NAMES = (
    "cifar-cnn",
    "inception-v3",
    "densenet-19-12",
    "densenet-40-12",
    "densenet-100-12",
    "digits-cnn",
    "resnet-18",
    "resnet-34",
    "wide-resnet-16-4",
    "mlp",
)

_SIZES = r"([1-9]\d*)-([1-9]\d*)"  # depth and growth, or depth and width
_Sized = type[DenseNet] | type[WideResNet]
_SIZED: dict[str, _Sized] = {"densenet": DenseNet, "wide-resnet": WideResNet}
_RESNETS = {"resnet-18": 18, "resnet-34": 34}
_Model = type[CifarCNN] | type[InceptionV3] | type[DigitsCNN] | type[ResNet] | _Sized
_MODELS: dict[str, _Model] = {"cifar-cnn": CifarCNN, "inception-v3": InceptionV3, "digits-cnn": DigitsCNN}


def build(name: str, num_classes: int, shape: tuple[int, ...] | None = None) -> nn.Module:
    """A new classifier with batch norms, by its name: one of ``NAMES``, "densenet-L-k" for any depth L and growth k,
    "wide-resnet-D-W" for any depth D and width W, or a model of another package, such as "timm:resnet18".

    ``shape``, of an image or a row, is for those whose ``input_shape`` is None.

    Example:
        >>> model = mixnorm_lab.models.build("inception-v3", 100)
        >>> mixnorm.convert(model, mixnorm_lab.models.last_norms("inception-v3", "inc3/0"), num_components=3)
    """
    if input_shape(name) is None:
        if shape is None:
            raise ValueError(f"{name} takes the shape that the data has: pass shape, such as (3, 32, 32)")
        if is_library(name):
            return libraries.build(name, num_classes, shape)
        if len(shape) != 1:
            raise ValueError(
                f"{name} is for the rows of a table, but the data has {' × '.join(map(str, shape))}: choose another"
            )
        return MLP(shape[0], num_classes)
    if sized := _sized(name):
        kind, first, second = sized
        return kind(first, second, num_classes)
    if name in _RESNETS:
        return ResNet(_RESNETS[name], num_classes)
    return _find(name)(num_classes)


def input_shape(name: str) -> tuple[int, int, int] | None:
    """(C, H, W) of the images that a model is for; None where it takes the shape of the data."""
    return None if name == "mlp" or is_library(name) else _find(name).input_shape


def last_norms(name: str, layer: str) -> list[str]:
    """The norms that the paper replaces where it names a layer: the layer's last one, or the last of each of its branches.

    Args:
        name: of the model, as in :func:`build`.
        layer: as the paper writes it, such as "conv3", "transition1", "red1" or "inc2/0"; or "relu" or "sum" of a ResNet.

    Returns:
        Names or globs of modules, for ``mixnorm.convert``.
    """
    layers = _layers(name)
    if layer not in layers:
        remedy = f"use {_nearest(layer, layers)}" if layers else "name its modules"
        raise ValueError(f"{name} has no layer {layer!r}: {remedy}")
    return list(layers[layer])


def without_relu(name: str) -> list[str]:
    """Globs of the norms of a model that no ReLU follows, into which none can be moved."""
    return list(_layers(name).get("sum", []))


def _layers(name: str) -> dict[str, list[str]]:
    """What a model's names of layers stand for; those of other packages have none."""
    if is_library(name):
        return {}
    return MLP.layers if name == "mlp" else _find(name).layers


def _sized(name: str) -> tuple[_Sized, int, int] | None:
    """The class that a name such as "densenet-40-12" stands for, and its two sizes."""
    for start, kind in _SIZED.items():
        if sizes := re.fullmatch(f"{start}-{_SIZES}", name):
            return kind, int(sizes[1]), int(sizes[2])
    return None


def _find(name: str) -> _Model:
    if sized := _sized(name):
        return sized[0]
    if name in _RESNETS:
        return ResNet
    if name not in _MODELS:
        raise ValueError(f"there is no model {name!r}: use {_nearest(name, NAMES)}")
    return _MODELS[name]


def _nearest(name: str, known: Iterable[str]) -> str:
    """Those that are spelled alike; all of them if none is."""
    return " or ".join(difflib.get_close_matches(name, known) or known)
