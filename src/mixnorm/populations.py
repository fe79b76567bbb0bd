"""Which points share statistics: five ways to look at an activation (N, C, ...) as points, and back.

Each is only a view, but for groups of channels that come last. Points are (B, outer, inner, D): B mixtures of
outer · inner points in R^D.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from mixnorm.ops.kernels import Look, with_gradient_alike

Population = Literal["batch", "instance", "layer", "group", "channel"]
WITH_HISTORY = ("batch", "channel")
PER_FEATURE = ("batch", "instance")  # whose γ and β are one number for each feature of a point


def to_points(x: Tensor, population: str, num_groups: int) -> Tensor:
    """(N, C), (N, C, L) or (N, C, ...) to (B, outer, inner, D)."""
    x = x.flatten(2) if x.dim() > 2 else x.unsqueeze(-1)  # (N, C, L)
    if population == "batch":
        return x.transpose(1, 2).unsqueeze(0)  # one mixture of N·L points in R^C
    if population == "instance":
        return x.transpose(1, 2).unsqueeze(1)  # N mixtures of L points in R^C
    if population == "layer":
        return x.unsqueeze(-1)  # N mixtures of C·L scalars
    if population == "group":
        grouped = with_gradient_alike(x).unflatten(1, (num_groups, -1))  # where channels are last, a copy
        return grouped.reshape(-1, *grouped.shape[2:], 1)  # N·G mixtures of C/G·L scalars
    return x.transpose(0, 1).unsqueeze(-1)  # C mixtures of N·L scalars


def from_points(points: Tensor, population: str, like: Tensor) -> Tensor:
    """The inverse of :func:`to_points`, in the shape of ``like``."""
    if population == "batch":
        x = points.squeeze(0).transpose(1, 2)
    elif population == "instance":
        x = points.squeeze(1).transpose(1, 2)
    elif population == "channel":
        x = points.squeeze(-1).transpose(0, 1)
    else:
        x = points
    return x.reshape(like.shape)


class PopulationLook(Look):
    """An activation (N, C, ...) as the points of a population."""

    def __init__(self, population: str, num_groups: int) -> None:
        self.population, self.num_groups = population, num_groups

    def points(self, x: Tensor) -> Tensor:
        return to_points(x, self.population, self.num_groups)

    def back(self, points: Tensor, like: Tensor) -> Tensor:
        return from_points(points, self.population, like)


def parameter_for_points(parameter: Tensor, population: str, num_groups: int, batch: int) -> Tensor:
    """γ or β (C,) as it broadcasts against the points; ``batch`` is N."""
    if population in ("batch", "instance"):
        return parameter
    if population == "layer":
        return parameter.view(-1, 1, 1)
    if population == "group":
        return parameter.view(num_groups, -1, 1, 1).repeat(batch, 1, 1, 1)
    return parameter.view(-1, 1, 1, 1)
