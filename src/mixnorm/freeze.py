"""Norms that stay in evaluation: ``freeze`` and ``unfreeze``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mixnorm.mixture_norm import _MixtureNorm, leaf_of


class _StaysInEvaluation:
    """A batch norm that ``train()`` does not reach, and that torch.fx takes for a leaf, as it takes all of torch.nn."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # not forward, which torch.jit.script reads
        if args and isinstance(args[0], torch.fx.Proxy):
            return leaf_of(self, args[0])
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def train(self, mode: bool = True) -> Any:
        return super().train(False)  # type: ignore[misc]


class FrozenBatchNorm1d(_StaysInEvaluation, nn.BatchNorm1d):
    """What :func:`freeze` makes of a ``BatchNorm1d``."""


class FrozenBatchNorm2d(_StaysInEvaluation, nn.BatchNorm2d):
    """What :func:`freeze` makes of a ``BatchNorm2d``."""


class FrozenBatchNorm3d(_StaysInEvaluation, nn.BatchNorm3d):
    """What :func:`freeze` makes of a ``BatchNorm3d``."""


class FrozenSyncBatchNorm(_StaysInEvaluation, nn.SyncBatchNorm):
    """What :func:`freeze` makes of a ``SyncBatchNorm``."""


FROZEN_OF: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: FrozenBatchNorm1d,
    nn.BatchNorm2d: FrozenBatchNorm2d,
    nn.BatchNorm3d: FrozenBatchNorm3d,
    nn.SyncBatchNorm: FrozenSyncBatchNorm,
}
THAWED_OF = {frozen: norm for norm, frozen in FROZEN_OF.items()}


def freeze(model: nn.Module) -> nn.Module:
    """Puts every mixture norm and batch norm into evaluation for good: ``model.train()`` does not undo it.

    :func:`unfreeze` does. γ and β still train. Batch norms are those of ``torch.nn``, not subclasses of them, nor lazy ones
    before their first batch. Call this after ``convert_sync_batchnorm``, which makes norms that are not frozen.
    """
    for module in model.modules():
        if isinstance(module, _MixtureNorm):
            module.frozen = True
            module.eval()
        elif type(module) in FROZEN_OF:
            module.__class__ = FROZEN_OF[type(module)]
            module.eval()
    return model


def unfreeze(model: nn.Module) -> nn.Module:
    """Undoes :func:`freeze`; the norms take over the model's training flag."""
    thawed: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, _MixtureNorm) and module.frozen:
            module.frozen = False
            thawed.append(module)
        elif type(module) in THAWED_OF:
            module.__class__ = THAWED_OF[type(module)]
            thawed.append(module)
    for parent in model.modules():
        for child in parent.children():
            if any(child is module for module in thawed):
                child.train(parent.training)
    return model
