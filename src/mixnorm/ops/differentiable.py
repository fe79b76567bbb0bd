"""Gradients through the reference, for what a kernel's own gradient does not cover: a gradient of the gradient, say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gradients(
    y: Tensor, inputs: Sequence[Tensor | None], wanted: Sequence[bool], grad: Tensor, *, create_graph: bool = True
) -> list[Tensor | None]:
    """∂(y·grad)/∂input for those inputs that are wanted; ``grad`` has as many elements as y."""
    places = [i for i, t in enumerate(inputs) if t is not None and wanted[i]]
    asked = [t for t in (inputs[i] for i in places) if t is not None]
    found = torch.autograd.grad(y, asked, grad.reshape(y.shape).to(y.dtype), create_graph=create_graph)
    result: list[Tensor | None] = [None] * len(inputs)
    for place, gradient in zip(places, found, strict=True):
        result[place] = gradient
    return result
