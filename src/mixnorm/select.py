"""Which norms of a model a replacement is for: those that are asked for, or those that gain by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from mixnorm.mixture_norm import _MixtureNorm

Select = str | Sequence[str] | Callable[[str, nn.Module], bool] | None
FEWEST_CHANNELS = (
    4  # with fewer, one unusual batch moves evaluation by more than half (tests/library/test_unusual_batches.py)
)


def selected(candidates: dict[str, nn.Module], select: Select, what: str) -> list[str]:
    """The names that ``select`` means, all if ``None``; an error that lists what there is where it means none."""
    listing = ", ".join(repr(name) for name in candidates)
    if select is None:
        return list(candidates)
    if callable(select) and not isinstance(select, (nn.Module, type)):
        names = [name for name, module in candidates.items() if select(name, module)]
        if not names:
            raise ValueError(f"select chose no {what}: the model has {listing}")
        return names
    names = []
    for pattern in [select] if isinstance(select, str) or not isinstance(select, Iterable) else select:
        if not isinstance(pattern, str):
            raise ValueError(
                f"select={pattern!r} is no name: use a name or glob of {listing}, or a function of (name, module)"
            )
        found = [n for n in candidates if n == pattern or n.startswith(pattern + ".") or fnmatchcase(n, pattern)]
        if not found:
            raise ValueError(f"select={pattern!r} matches no {what}: the model has {listing}")
        names += found
    if not names:
        raise ValueError(f"select is empty: name at least one {what} of {listing}, or use None for all")
    return names


def left_out(model: nn.Module, candidates: Mapping[str, nn.Module]) -> dict[str, str]:
    """The norms that had better stay as they are, by name, with the reason.

    None if that would leave nothing: whoever converts a model with a single norm means that one. But those that stayed in a
    conversion before stay again.
    """
    reasons = {
        name: f"it has fewer than {FEWEST_CHANNELS} channels"
        for name, norm in candidates.items()
        if 0 < getattr(norm, "num_features", 0) < FEWEST_CHANNELS  # 0 until a lazy norm's first batch
    }
    for name in _before_the_last_layer(model, candidates):
        reasons[name] = "the last layer reads from it which mode a point is in"
    is_converted = any(isinstance(module, _MixtureNorm) for module in model.modules())
    return reasons if is_converted or len(reasons) < len(candidates) else {}


def _before_the_last_layer(model: nn.Module, candidates: Mapping[str, nn.Module]) -> list[str]:
    """The names of the norm between which and the model's last linear or convolutional layer no other has weights.

    In the order in which modules are defined, which is that of the forward pass in all but unusual models.
    """
    weighted = [module for module in model.modules() if module._parameters]
    if len(weighted) < 2 or not isinstance(weighted[-1], (nn.Linear, _ConvNd)):
        return []
    return [name for name, norm in candidates.items() if norm is weighted[-2]]


def norms_of_other_kinds(model: nn.Module) -> str:
    """What a model without batch norms has instead, such as "LayerNorm (12 times)"; nothing if it has no norm at all."""
    found = Counter(_kind(module) for module in model.modules() if _is_norm(module))
    return ", ".join(f"{kind} ({count} times)" if count > 1 else kind for kind, count in found.items())


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) or ("norm" in type(module).__name__.lower() and not module._modules)


def _kind(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, _BatchNorm) and not type(module).__module__.startswith("torch.nn."):
        return f"{name}, a subclass of batch norm"
    return f"{name}, which is mixture norm already" if isinstance(module, _MixtureNorm) else name
