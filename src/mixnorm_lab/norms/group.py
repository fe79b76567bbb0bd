"""Group norm (Wu and He, 2018), with layer norm and instance norm as its ends: statistics of one image alone."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def group_norm(channels: int, groups: int, *, eps: float = 1e-5) -> nn.GroupNorm:
    """Group norm with γ and β for each channel: 1 group is layer norm, as many as channels are instance norm.

    Fewer channels than groups are a group each, if the groups are a multiple of them: a model of 16, 32 and 64 channels has
    16, 32 and 32 groups if 32 are asked for.
    """
    return nn.GroupNorm(min(groups, channels), channels, eps=eps)


def check_groups(groups: int, layers: Mapping[str, int]) -> None:
    """Raises where a layer has channels that make no such groups; ``layers`` has their number by the layers' names."""
    wrong = [name for name, channels in layers.items() if not _fit(groups, channels)]
    if not wrong:
        return
    possible = [n for n in range(2, max(layers.values()) + 1) if all(_fit(n, channels) for channels in layers.values())]
    nearest = sorted(sorted(possible, key=lambda n: abs(n - groups))[:2])
    remedy = " or ".join(f"group-{n}" for n in nearest) or "layer, which has one group"
    others = f", nor those of {len(wrong) - 1} more" if len(wrong) > 1 else ""
    raise ValueError(
        f"the {layers[wrong[0]]} channels of '{wrong[0]}' cannot be divided into {groups} groups{others}: use {remedy}"
    )


def _fit(groups: int, channels: int) -> bool:
    return channels % groups == 0 or groups % channels == 0
