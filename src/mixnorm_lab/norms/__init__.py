"""Norms to compare mixture norm with, one file each, and their places in a model: they replace its batch norms."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mixnorm_lab.config.norm_names import NormName, parse
from mixnorm_lab.norms.dropout import BatchNormDropout
from mixnorm_lab.norms.enhanced import WHOLE, EnhancedBatchNorm
from mixnorm_lab.norms.ghost import GhostBatchNorm, GhostParabola
from mixnorm_lab.norms.group import check_groups, group_norm
from mixnorm_lab.norms.mode import ModeNorm
from mixnorm_lab.norms.renorm import WARMUP, BatchRenorm
from mixnorm_lab.norms.shuffled import ShuffledMixtureNorm

__all__ = [
    "BatchNormDropout",
    "BatchRenorm",
    "EnhancedBatchNorm",
    "GhostBatchNorm",
    "GhostParabola",
    "ModeNorm",
    "ShuffledMixtureNorm",
    "batch_norms",
    "group_norm",
    "make",
    "replace_norms",
]


def make(name: str, channels: int, *, eps: float = 1e-5, momentum: float | None = 0.1) -> nn.Module:
    """A norm by its name, such as "ghost-32". ``momentum`` is of running statistics; batch renorm has the published one."""
    return _make(parse(name), channels, eps, momentum)


def _make(name: NormName, channels: int, eps: float, momentum: float | None) -> nn.Module:
    number = name.number
    if name.kind == "ghost":
        return GhostBatchNorm(channels, int(number or 0), eps=eps, momentum=momentum)
    if name.kind == "parabola":
        return GhostParabola(channels, int(number or 0), eps=eps, momentum=momentum)
    if name.kind == "enhanced":
        return EnhancedBatchNorm(channels, int(number or WHOLE), eps=eps, momentum=momentum)
    if name.kind == "dropout":
        return BatchNormDropout(channels, float(number or 0), eps=eps, momentum=momentum)
    if name.kind == "renorm":
        return BatchRenorm(channels, eps=eps, warmup=int(number or WARMUP))
    if name.kind == "mode":
        return ModeNorm(channels, int(number or 0), eps=eps, momentum=momentum)
    if name.kind == "shuffled":
        return ShuffledMixtureNorm(channels, int(number or 0), eps=eps, momentum=momentum)
    groups = {"group": int(number or 0), "layer": 1, "instance": channels}[name.kind]
    return group_norm(channels, groups, eps=eps)


def replace_norms(model: nn.Module, name: str, layers: Sequence[str] = ("*",)) -> nn.Module:
    """Replaces batch norms by the norm of a name, in place. γ and β stay the parameters that they are.

    Args:
        layers: names or globs of modules, as :func:`mixnorm.convert` takes them.
    """
    wanted = parse(name)
    found = batch_norms(model, layers)
    if wanted.kind == "group":
        check_groups(int(wanted.number or 0), {place: norm.num_features for place, norm in found.items()})
    for place, norm in found.items():
        if place == "":
            raise ValueError("the model is a batch norm itself, which has no place to put another norm: put it in a module")
        new = _make(wanted, norm.num_features, norm.eps, norm.momentum)
        owner = new.norm if isinstance(new, BatchNormDropout) else new
        if norm.affine:
            owner.weight, owner.bias = norm.weight, norm.bias
        parent, _, last = place.rpartition(".")
        setattr(model.get_submodule(parent), last, new)
    return model


def batch_norms(model: nn.Module, layers: Sequence[str] = ("*",)) -> dict[str, _BatchNorm]:
    """The batch norms of a model at ``layers``, by their places; an error where a name or glob matches none."""
    places = {place: norm for place, norm in model.named_modules() if isinstance(norm, _BatchNorm) and type(norm) in _KINDS}
    chosen: dict[str, _BatchNorm] = {}
    for pattern in layers:
        found = [p for p in places if p == pattern or p.startswith(f"{pattern}.") or fnmatchcase(p, pattern)]
        if not found:
            raise ValueError(f"{pattern!r} matches no batch norm: the model has {', '.join(places) or 'none'}")
        chosen |= {place: places[place] for place in found}
    return chosen


_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
