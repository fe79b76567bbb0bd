"""The models of the paper, one file each, with the norm injected, and their names. They stand on torch alone.

Each classifier says which images it is for (``input_shape``: C, H, W), and which norms the paper replaces where it names a
layer (``layers``).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from torch import nn

from mixnorm_lab.models.cifar_cnn import CifarCNN
from mixnorm_lab.models.dcgan import Discriminator, Generator
from mixnorm_lab.models.densenet import DenseNet
from mixnorm_lab.models.digits_cnn import DigitsCNN
from mixnorm_lab.models.inception_v3 import InceptionV3

__all__ = [
    "NAMES",
    "CifarCNN",
    "DenseNet",
    "DigitsCNN",
    "Discriminator",
    "Generator",
    "InceptionV3",
    "build",
    "input_shape",
    "last_norms",
]

NAMES = ("cifar-cnn", "inception-v3", "densenet-19-12", "densenet-40-12", "densenet-100-12", "digits-cnn")

_DENSENET = re.compile(r"densenet-([1-9]\d*)-([1-9]\d*)")  # depth, growth
_Model = type[CifarCNN] | type[InceptionV3] | type[DigitsCNN] | type[DenseNet]
_MODELS: dict[str, _Model] = {"cifar-cnn": CifarCNN, "inception-v3": InceptionV3, "digits-cnn": DigitsCNN}


def build(name: str, num_classes: int) -> nn.Module:
    """A new classifier with batch norms, by its name: one of ``NAMES``, or "densenet-L-k" for any depth L and growth k.

    Example:
        >>> model = mixnorm_lab.models.build("inception-v3", 100)
        >>> mixnorm.convert(model, mixnorm_lab.models.last_norms("inception-v3", "inc3/0"), num_components=3)
    """
    if sizes := _DENSENET.fullmatch(name):
        return DenseNet(int(sizes[1]), int(sizes[2]), num_classes)
    return _find(name)(num_classes)


def input_shape(name: str) -> tuple[int, int, int]:
    """(C, H, W) of the images that a model is for."""
    return _find(name).input_shape


def last_norms(name: str, layer: str) -> list[str]:
    """The norms that the paper replaces where it names a layer: the layer's last one, or the last of each of its branches.

    Args:
        name: of the model, as in :func:`build`.
        layer: as the paper writes it, such as "conv3", "transition1", "red1" or "inc2/0".

    Returns:
        Module names, for ``mixnorm.convert``.
    """
    layers = _find(name).layers
    if layer not in layers:
        raise ValueError(f"{name} has no layer {layer!r}: use {_nearest(layer, layers)}")
    return list(layers[layer])


def _find(name: str) -> _Model:
    if _DENSENET.fullmatch(name):
        return DenseNet
    if name not in _MODELS:
        raise ValueError(f"there is no model {name!r}: use {_nearest(name, NAMES)}")
    return _MODELS[name]


def _nearest(name: str, known: Iterable[str]) -> str:
    """Those that are spelled alike; all of them if none is."""
    return " or ".join(difflib.get_close_matches(name, known) or known)
