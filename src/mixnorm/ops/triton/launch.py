"""Launching a kernel for little. What follows from shapes and options is a plan, made once; a launch looks it up and calls.

Triton finds out from the arguments of every call which compiled kernel they need. Here that is a lookup too: it depends on
the plan, on the dtypes and alignment of the tensors that come from outside, and on whether a number needs 64 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PLANS = 1024  # kept of each kind


class Plan:
    """A kernel with everything but its tensors: the grid, the numbers, the constants and options for the compiler."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[int | float, ...], constants: dict[str, Any], **info: Any
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self.info = info  # what the caller wants to know again
        self.compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def launch(plan: Plan, given: tuple[Tensor | None, ...], own: tuple[Tensor | None, ...], *extra: int) -> None:
    """Runs ``kernel(*given, *own, *extra, *numbers, **constants)`` on the device of the first tensor.

    ``own`` tensors are new and so aligned, or None; their dtypes follow from the plan. ``extra`` numbers differ from call to
    call, and their kernel does not specialize on them.
    """
    first = given[0]
    assert first is not None
    if first.is_cuda and first.device.index != torch.cuda.current_device():
        with torch.cuda.device_of(first):
            _run(plan, given, own, extra)
    else:
        _run(plan, given, own, extra)


def key_of(given: tuple[Tensor | None, ...], extra: tuple[int, ...]) -> tuple[Any, ...]:
    """What decides which compiled kernel of a plan a call needs."""
    return tuple([None if t is None else (t.dtype, t.data_ptr() % 16) for t in given] + [n >> 31 > 0 for n in extra])


def _run(plan: Plan, given: tuple[Tensor | None, ...], own: tuple[Tensor | None, ...], extra: tuple[int, ...]) -> None:
    key = key_of(given, extra)
    found = plan.compiled.get(key)
    if found is not None:
        runner, constants = found
        runner(*given, *own, *extra, *plan.numbers, *constants)
        return
    compiled = plan.kernel[plan.grid](*given, *own, *extra, *plan.numbers, **plan.constants)
    if compiled is not None:  # the interpreter compiles nothing
        names = plan.kernel.arg_names[len(given) + len(own) + len(extra) + len(plan.numbers) :]
        runner = compiled[(*plan.grid, 1, 1)[:3]]
        plan.compiled[key] = runner, tuple(plan.constants[name] for name in names)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own function is for kernels, and slow outside of them."""
    return -(-a // b)


def power_of_two(number: int) -> int:
    """The least power of two that is not below the number."""
    return 1 << max(0, number - 1).bit_length()
