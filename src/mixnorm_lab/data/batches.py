"""A batch of a user's loader, whatever it is made of: on the device, cut to a few samples, and as inputs and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# Where a batch that is a dictionary has its labels.
LABELS = ("labels", "label", "targets", "target", "y", "mask", "masks")
REMEDY = "make each a pair (inputs, labels) or a dictionary with labels, or say with --step how to train on one"


def mapped(batch: Any, change: Callable[[Tensor], Tensor], other: Callable[[Any], Any] = lambda value: value) -> Any:
    """A batch with all of its tensors changed, in dictionaries, tuples and lists of any depth; ``other`` is for the rest."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(value, change, other) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [mapped(value, change, other) for value in batch]
        if isinstance(batch, list):
            return parts
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return other(batch)


def placed(batch: Any, device: torch.device, channels_last: bool) -> Any:
    """A batch on a device, with images in the wanted memory format."""

    def place(value: Tensor) -> Tensor:
        value = value.to(device, non_blocking=True)
        if channels_last and value.dim() == 4 and value.is_floating_point():
            value = value.contiguous(memory_format=torch.channels_last)
        return value

    # Such as a graph, which knows its tensors itself.
    return mapped(batch, place, lambda value: value.to(device) if callable(getattr(value, "to", None)) else value)


def split(batch: Any) -> tuple[Any, Any]:
    """The inputs and the labels of a batch: a pair, or a dictionary with labels and what else the model takes.

    Raises:
        ValueError: it is neither; says what it is, and what to do.
    """
    if isinstance(batch, Mapping):
        name = labels_key(batch)
        if not isinstance(batch[name], Tensor):
            raise ValueError(f"the {name} of a batch are {_kind(batch[name])}, but must be a tensor: {REMEDY}")
        return {key: value for key, value in batch.items() if key != name}, batch[name]
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(f"a batch of the data is {_kind(batch)}: {REMEDY}")
    inputs, labels = batch
    if not isinstance(labels, Tensor) or not _tensors(inputs):
        raise ValueError(f"a batch of the data is {_kind(batch)}, but must hold tensors: {REMEDY}")
    if isinstance(inputs, Tensor) and inputs.shape[:1] != labels.shape[:1]:
        raise ValueError(
            f"inputs and labels of a batch have the shapes {tuple(inputs.shape)} and {tuple(labels.shape)}: there must be a "
            "label for each input"
        )
    return inputs, labels


def labels_key(batch: Mapping[str, Any]) -> str:
    """The key of the labels in a batch that is a dictionary."""
    found = next((key for key in LABELS if key in batch), None)
    if found is None:
        keys = ", ".join(map(str, batch)) or "nothing"
        raise ValueError(f"a batch of the data is a dictionary of {keys}: call its labels 'labels', or give --step")
    return found


def size(batch: Any) -> int:
    """How many samples a batch has: the length of its first tensor."""
    return next((len(tensor) for tensor in _tensors(batch) if tensor.dim()), 1)


def is_finite(batch: Any) -> bool:
    """Whether all numbers of a batch are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in _tensors(batch) if tensor.is_floating_point())


def few(batch: Any, count: int) -> Any:
    """The first samples of a batch; all of it where its tensors are not of the same length."""
    lengths = {len(tensor) if tensor.dim() else 0 for tensor in _tensors(batch)}
    return mapped(batch, lambda tensor: tensor[:count]) if len(lengths) == 1 else batch


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    if isinstance(batch, (Tensor, Mapping, tuple, list)):
        mapped(batch, note)
    return found


def _kind(batch: Any) -> str:
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {', '.join(type(part).__name__ for part in batch) or 'nothing'}"
    return f"a {type(batch).__name__}"
