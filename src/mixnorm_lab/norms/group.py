"""Group norm (Wu and He, 2018), with layer norm and instance norm as its ends: statistics of one image alone."""

from __future__ import annotations

import math

from torch import nn


def group_norm(channels: int, groups: int, *, eps: float = 1e-5) -> nn.GroupNorm:
    """Group norm with γ and β for each channel: 1 group is layer norm, as many as channels are instance norm.

    Where the groups do not divide the channels, there are as many as divide both: a model of 16, 32 and 64 channels has 16,
    32 and 32 groups if 32 are asked for.
    """
    return nn.GroupNorm(math.gcd(groups, channels), channels, eps=eps)
