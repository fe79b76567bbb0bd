"""Launching a kernel for little. What follows from shapes and options is a plan, made once; a launch looks it up and calls.

Triton finds out from the arguments of every call which compiled kernel they need. Here that is a lookup too: it depends on
the plan, the device, the dtypes and alignment of the tensors that come from outside, and on whether a number needs 64 bits.
Then Triton goes through seven functions of its own to the one in C that starts the kernel. Where its version is one that
is known, that one is called directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

PLANS = 1024  # kept of each kind
KNOWN_VERSIONS = ("3.6.",)  # of Triton, whose launcher takes what ``_starter`` gives it


class Plan:
    """A kernel with everything but its tensors: the grid, the numbers, the constants and options for the compiler."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[int | float, ...], constants: dict[str, Any], **info: Any
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self.info = info  # what the caller wants to know again
        self.compiled: dict[Any, tuple[Callable[..., None], tuple[Any, ...]]] = {}


def launch(plan: Plan, given: tuple[Tensor | None, ...], own: tuple[Tensor | None, ...], *extra: int) -> None:
    """Runs ``kernel(*given, *own, *extra, *numbers, **constants)`` on the device of the first tensor.

    ``own`` tensors are new and so aligned, or None; their dtypes follow from the plan. ``extra`` numbers differ from call to
    call, and their kernel does not specialize on them.
    """
    assert given[0] is not None
    device = given[0].get_device()  # -1 for a CPU, on which the interpreter runs
    if device >= 0 and device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            _run(plan, device, given, own, extra)
    else:
        _run(plan, device, given, own, extra)


def _run(
    plan: Plan, device: int, given: tuple[Tensor | None, ...], own: tuple[Tensor | None, ...], extra: tuple[int, ...]
) -> None:
    key = key_of(device, given, extra)
    found = plan.compiled.get(key)
    if found is not None:
        start, constants = found
        start(*given, *own, *extra, *plan.numbers, *constants)
        return
    compiled = plan.kernel[plan.grid](*given, *own, *extra, *plan.numbers, **plan.constants)
    if compiled is not None:  # the interpreter compiles nothing
        names = plan.kernel.arg_names[len(given) + len(own) + len(extra) + len(plan.numbers) :]
        start = _starter(compiled, (*plan.grid, 1, 1)[:3], device)
        plan.compiled[key] = start, tuple(plan.constants[name] for name in names)


def key_of(device: int, given: tuple[Tensor | None, ...], extra: tuple[int, ...]) -> tuple[Any, ...]:
    """What decides which compiled kernel of a plan a call needs."""
    offsets = [0 if t is None else t.data_ptr() % 16 for t in given]
    return (
        device,
        *[None if t is None else t.dtype for t in given],
        *(offsets if any(offsets) else ()),
        *[number >> 31 > 0 for number in extra],
    )


def _starter(compiled: Any, grid: tuple[int, ...], device: int) -> Callable[..., None]:
    """What starts a compiled kernel on the current stream of its device, with the kernel's arguments."""
    runner, launcher = compiled[grid], compiled.run
    if not triton.__version__.startswith(KNOWN_VERSIONS) or not _is_plain(launcher):
        return runner  # type: ignore[no-any-return]
    runtime: Any = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    fixed = (
        compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, compiled.packed_metadata,
        None, None, None,
    )  # fmt: skip

    def start(*arguments: Any) -> None:
        if enter.calls or leave.calls or runtime.launch_enter_hook is not enter or runtime.launch_exit_hook is not leave:
            runner(*arguments)  # a profiler wants to be told
        else:
            launcher.launch(*grid, torch._C._cuda_getCurrentRawStream(device), *fixed, *arguments)

    return start


def _is_plain(launcher: Any) -> bool:
    """Whether it is the launcher for NVIDIA's GPUs, of a kernel that needs no memory beyond its arguments."""
    return (
        type(launcher).__name__ == "CudaLauncher" and not launcher.global_scratch_size and not launcher.profile_scratch_size
    )


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own function is for kernels, and slow outside of them."""
    return -(-a // b)


def power_of_two(number: int) -> int:
    """The least power of two that is not below the number."""
    return 1 << max(0, number - 1).bit_length()
