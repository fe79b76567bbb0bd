"""The one choice of an implementation: asked once in a forward pass, for the points that are there."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from mixnorm.ops.kernels import Kernels, is_exporting

Backend = Literal["auto", "reference", "triton"]
BACKENDS: tuple[str, ...] = get_args(Backend)
HAS_TRITON, HAS_NUMBA = (importlib.util.find_spec(name) is not None for name in ("triton", "numba"))
USABLE = {backend for backend in BACKENDS if backend != "triton" or HAS_TRITON}
REFERENCE = Kernels()


def check_backend(backend: str) -> None:
    """Raises unless the backend exists and can run here."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown: choose one of {', '.join(map(repr, BACKENDS))}")
    if backend == "triton" and not HAS_TRITON:
        raise RuntimeError("backend='triton' needs the package triton: install it, or use 'auto'")


def kernels_for(
    points: Tensor, components: int, backend: str, *, per_feature: bool = True, mode: str | None = None
) -> Kernels:
    """The kernels for points (B, outer, inner, D) and so many components.

    ``per_feature`` says that γ and β are (D,) or absent, ``mode`` which inference is wanted; ``None`` is training.
    """
    if backend not in USABLE:
        check_backend(backend)
    found = REFERENCE
    if backend != "reference" and not is_followed(points):
        if backend == "triton" or (points.device.type == "cuda" and HAS_TRITON):
            from mixnorm.ops.triton import TRITON

            found = TRITON
        elif points.device.type == "cpu" and HAS_NUMBA:
            # The compiler is asked about first: it would compile anew once the loops are there.
            found = _numba() if torch.compiler.is_compiling() or _loops is None else _loops
    obstacle = found.obstacle(points, components)
    if obstacle is not None:
        if backend == "triton":
            raise RuntimeError(f"backend='triton' cannot run: {obstacle}; use 'auto'")
        found = REFERENCE
    if mode is None:
        found = found if per_feature else found.for_fit()
    elif not per_feature or mode not in found.modes:
        found = REFERENCE
    if torch.compiler.is_compiling() and not is_exporting():
        # A compiler sees operators. An exported graph runs elsewhere: it gets PyTorch's own.
        from mixnorm.ops.library import Operators

        return Operators(found)
    return found


_loops: Kernels | None = None  # once they were asked for


def _numba() -> Kernels:
    """The compiled loops; the reference where numba is there and cannot be used."""
    global _loops
    try:
        from mixnorm.ops.numba import NUMBA

        _loops = NUMBA
    except Exception as error:  # whatever an installation breaks on: training goes on, more slowly
        warnings.warn(f"numba is installed but cannot be used, so plain PyTorch runs instead: {error}", stacklevel=3)
        _loops = REFERENCE
    return _loops


def is_followed(points: Tensor) -> bool:
    """Whether something looks at each of PyTorch's operations, and must not miss any: it gets the reference.

    Function transforms, forward-mode derivatives, exporters, tracers through ``__torch_dispatch__``, tensor subclasses.
    """
    if torch._C._are_functorch_transforms_active() or is_exporting() or torch.jit.is_tracing():
        return True
    if forward_ad._current_level >= 0:
        return True
    if torch.compiler.is_compiling():
        return False
    if torch._C._functorch.is_legacy_batchedtensor(points):  # a gradient of autograd.grad(is_grads_batched=True)
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or type(points) not in (Tensor, nn.Parameter)


def in_backward() -> bool:
    """Whether a backward pass is running: a forward pass in it is a recomputation, as activation checkpointing does it."""
    return torch._C._current_graph_task_id() != -1
