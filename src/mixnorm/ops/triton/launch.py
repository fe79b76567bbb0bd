"""Launching a kernel for little: what Triton finds out from the arguments each time is looked up here by a short key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[int | float, ...],
    constants: dict[str, Any],
) -> None:
    """Runs ``kernel(*tensors, *numbers, **constants)`` on the device of the first tensor; options are among the constants.

    The compiled kernel depends on the dtypes and on the alignment of the tensors, on the numbers (a multiple of 16 is compiled
    for) and on the constants: all of that is in the key.
    """
    first = tensors[0]
    assert first is not None
    device = first.device.index
    key = (
        id(kernel),
        device,
        numbers,
        tuple(constants.values()),
        *[None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors],
    )
    found = _compiled.get(key)
    with torch.cuda.device_of(first):
        if found is not None:
            compiled, ordered = found
            compiled[(*grid, 1, 1)[:3]](*tensors, *numbers, *ordered)
            return
        compiled = kernel[grid](*tensors, *numbers, **constants)
    if compiled is not None:  # the interpreter compiles nothing
        names = kernel.arg_names[len(tensors) + len(numbers) :]
        _compiled[key] = compiled, tuple(constants[name] for name in names)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own function is for kernels, and slow outside of them."""
    return -(-a // b)


def power_of_two(number: int) -> int:
    """The least power of two that is not below the number."""
    return 1 << max(0, number - 1).bit_length()
