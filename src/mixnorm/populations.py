"""Which points share statistics: five ways to look at an activation (N, C, ...) as points, and back.

Each is only a view, but for groups of channels that come last, and for images whose rows cannot be strung together. Points
are (B, outer, inner, D): B mixtures of outer · inner points in R^D.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from mixnorm.ops.kernels import Look, with_gradient_alike

Population = Literal["batch", "instance", "layer", "group", "channel"]
WITH_HISTORY = ("batch", "channel")
PER_FEATURE = ("batch", "instance")  # whose γ and β are one number for each feature of a point


class _Batch(Look):
    """One mixture of N·L points in R^C."""

    def points(self, x: Tensor) -> Tensor:
        x = x.flatten(2) if x.dim() > 2 else x.unsqueeze(-1)  # as _flat, which would be one call more in every step
        return x.transpose(1, 2).unsqueeze(0)

    def back(self, points: Tensor, like: Tensor) -> Tensor:
        return points.squeeze(0).transpose(1, 2).reshape(like.shape)


class _Instance(Look):
    """N mixtures of L points in R^C."""

    def points(self, x: Tensor) -> Tensor:
        return _flat(x).transpose(1, 2).unsqueeze(1)

    def back(self, points: Tensor, like: Tensor) -> Tensor:
        return points.squeeze(1).transpose(1, 2).reshape(like.shape)


class _Layer(Look):
    """N mixtures of C·L scalars."""

    def points(self, x: Tensor) -> Tensor:
        return _flat(x).unsqueeze(-1)

    def back(self, points: Tensor, like: Tensor) -> Tensor:
        return points.reshape(like.shape)


class _Group(Look):
    """N·G mixtures of C/G·L scalars; where channels are last, a copy."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups

    def points(self, x: Tensor) -> Tensor:
        grouped = with_gradient_alike(_flat(x)).unflatten(1, (self.num_groups, -1))
        return grouped.reshape(-1, *grouped.shape[2:], 1)

    def back(self, points: Tensor, like: Tensor) -> Tensor:
        return points.reshape(like.shape)


class _Channel(Look):
    """C mixtures of N·L scalars."""

    def points(self, x: Tensor) -> Tensor:
        return _flat(x).transpose(0, 1).unsqueeze(-1)

    def back(self, points: Tensor, like: Tensor) -> Tensor:
        return points.squeeze(-1).transpose(0, 1).reshape(like.shape)


LOOKS = {"batch": _Batch(), "instance": _Instance(), "layer": _Layer(), "channel": _Channel()}


def look_of(population: str, num_groups: int | None = None) -> Look:
    """How the points of a population are cut out of an activation (N, C), (N, C, L) or (N, C, ...)."""
    return LOOKS.get(population) or _Group(num_groups or 1)


def _flat(x: Tensor) -> Tensor:
    """(N, C, L)."""
    return x.flatten(2) if x.dim() > 2 else x.unsqueeze(-1)


def parameter_for_points(parameter: Tensor, population: str, num_groups: int, batch: int) -> Tensor:
    """γ or β (C,) as it broadcasts against the points; ``batch`` is N."""
    if population in ("batch", "instance"):
        return parameter
    if population == "layer":
        return parameter.view(-1, 1, 1)
    if population == "group":
        return parameter.view(num_groups, -1, 1, 1).repeat(batch, 1, 1, 1)
    return parameter.view(-1, 1, 1, 1)
