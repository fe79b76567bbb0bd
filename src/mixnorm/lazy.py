"""LazyMixtureNorm1d, 2d and 3d, which take the number of channels from their first batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from mixnorm.layers import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d
from mixnorm.mixture_norm import _MixtureNorm
from mixnorm.options import GATES, check_fit, check_options, check_seeding


class _LazyMixtureNorm(LazyModuleMixin, _MixtureNorm):  # type: ignore[misc]
    """What the three share. The first batch, or a state dict that says how many channels there are, ends the waiting."""

    def __init__(
        self,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        **options: Any,
    ) -> None:
        # Without tensors, which would soon be made anew; and with a number of features that num_groups divides.
        for_history = {option: options.pop(option) for option in ("seeding", "fit", "component_affine") if option in options}
        super().__init__(options.get("num_groups") or 1, eps, momentum, False, False, device, dtype, **options)
        self.num_features, self.affine, self.track_running_stats = 0, affine, track_running_stats
        for option, value in for_history.items():
            setattr(self, option, value)
        check_seeding(self)
        check_fit(self)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = UninitializedParameter(**factory) if affine else None
        self.bias = UninitializedParameter(**factory) if affine and bias else None
        for name in GATES:
            if getattr(self, f"{name}_weight") is not None:
                setattr(self, f"{name}_weight", UninitializedParameter(**factory))
        if self.keeps_history:
            for name in self.history_shapes():
                setattr(self, name, UninitializedBuffer(**factory))
            self.num_batches_tracked = torch.tensor(0, dtype=torch.long, device=device)
            self.register_buffer("ahead_count", self._no_batch(device))

    def reset_parameters(self) -> None:
        if not self.has_uninitialized_params():
            super().reset_parameters()

    def reset_running_stats(self) -> None:
        if not self.has_uninitialized_params():
            super().reset_running_stats()

    def initialize_parameters(self, x: Tensor | None = None) -> None:  # type: ignore[override]
        if x is not None and self.num_features == 0:
            self.check_rank(x)
            self._materialize(x.shape[1])

    def _materialize(self, num_features: int) -> None:
        self.num_features = num_features
        try:
            check_options(self)
        except ValueError:
            self.num_features = 0
            raise
        shapes = {**self.parameter_shapes(), **self.history_shapes()}
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if is_lazy(tensor):
                tensor.materialize(shape)
        self.reset_parameters()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        known = [state_dict.get(prefix + name) for name in ("weight", "running_mean", "history_means")]
        found = next((t for t in known if t is not None and not is_lazy(t)), None)
        if found is not None and self.num_features == 0:
            # γ and running statistics are (C,), a history's means (T, K, C), or (C, T, K, 1) for "channel".
            self._materialize(found.shape[0 if found.dim() == 4 else -1])
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.num_features:
            self._infer_parameters(self, ())  # there is nothing to wait for: it becomes the layer that it stands for


class LazyMixtureNorm1d(_LazyMixtureNorm):
    """A :class:`MixtureNorm1d` whose ``num_features`` is that of its first input, as ``nn.LazyBatchNorm1d``.

    All arguments but ``num_features`` are those of ``MixtureNorm1d``, which it becomes with the first forward pass, or when
    a state dict is loaded. Before that it may be moved and saved; an optimizer is made afterwards.

    Examples:
        >>> layer = mixnorm.LazyMixtureNorm1d(num_components=2)
        >>> y = layer(torch.randn(128, 64))
        >>> layer.num_features
        64
    """

    cls_to_become = MixtureNorm1d
    ranks, shape_text = MixtureNorm1d.ranks, MixtureNorm1d.shape_text


class LazyMixtureNorm2d(_LazyMixtureNorm):
    """A :class:`MixtureNorm2d` whose ``num_features`` is that of its first input, as ``nn.LazyBatchNorm2d``.

    All arguments but ``num_features`` are those of ``MixtureNorm2d``, which it becomes with the first forward pass, or when
    a state dict is loaded. Before that it may be moved and saved; an optimizer is made afterwards.

    Examples:
        >>> layer = mixnorm.LazyMixtureNorm2d(num_components=2)
        >>> y = layer(torch.randn(16, 64, 8, 8))
        >>> layer.num_features
        64
    """

    cls_to_become = MixtureNorm2d
    ranks, shape_text = MixtureNorm2d.ranks, MixtureNorm2d.shape_text


class LazyMixtureNorm3d(_LazyMixtureNorm):
    """A :class:`MixtureNorm3d` whose ``num_features`` is that of its first input, as ``nn.LazyBatchNorm3d``.

    All arguments but ``num_features`` are those of ``MixtureNorm3d``, which it becomes with the first forward pass, or when
    a state dict is loaded. Before that it may be moved and saved; an optimizer is made afterwards.

    Examples:
        >>> layer = mixnorm.LazyMixtureNorm3d(num_components=2)
        >>> y = layer(torch.randn(4, 64, 4, 8, 8))
        >>> layer.num_features
        64
    """

    cls_to_become = MixtureNorm3d
    ranks, shape_text = MixtureNorm3d.ranks, MixtureNorm3d.shape_text
