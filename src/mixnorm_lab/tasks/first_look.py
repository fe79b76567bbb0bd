"""A first look at a project before anything is trained: one batch through the model, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mixnorm_lab.config.losses import BINARY, CROSS_ENTROPY, OF_MODEL, SQUARED
from mixnorm_lab.config.metrics import ACCURACY
from mixnorm_lab.data import batches
from mixnorm_lab.tasks.forward import call, logits_of, own_loss
from mixnorm_lab.tasks.shapes import at_size, kind_of

SAMPLES = 8  # of a batch: more say nothing of shapes
POINTS_A_COMPONENT = 8  # with fewer, mixture norm fits fewer components
USUAL = 3  # components, which are never refused: where there are few points, a mixture has fewer
FAR = 10  # from 0, or times 1, that numbers to predict may be
MANY = 16  # beyond which each component describes little


@dataclass(frozen=True)
class Look:
    """What a first batch says.

    Args:
        points: that each batch norm gets from a training batch: samples times positions.
        positions: the same of a single sample.
        kind: what the labels say of the output (``tasks.shapes``), or None where a user's step alone knows.
        unfit: why they do not fit the output, if they do not.
        has_loss: whether the model computes a loss of its own.
        scale: the mean and the deviation of labels that are numbers.
    """

    points: Mapping[str, int]
    positions: Mapping[str, int]
    kind: str | None = None
    unfit: str = ""
    has_loss: bool = False
    scale: tuple[float, float] | None = None


@torch.no_grad()
def look(model: nn.Module, batch: Any, step: Any = None, batch_size: int | None = None) -> Look:
    """Looks at the first samples of a training batch; with a user's ``step``, which may want all of it, at the whole.

    Args:
        model: with its batch norms.
        batch: a pair of inputs and labels, or what ``step`` takes.
        batch_size: of training, unless it is that of the batch.
    """
    size = batch_size or batches.size(batch)
    shown = batch if step is not None else batches.few(batch, SAMPLES)
    scale = size / max(1, batches.size(shown))
    counted: dict[str, float] = {}
    handles = [
        module.register_forward_pre_hook(_counter(name, counted))
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
    ]
    model.train(step is not None)
    try:
        if step is not None:
            step(model, shown)
            output, labels = None, None
        else:
            inputs, labels = shown
            output = call(model, inputs, labels)
    finally:
        for handle in handles:
            handle.remove()
    points = {name: round(scale * count) for name, count in counted.items()}
    positions = {name: max(1, round(scale * count / size)) for name, count in counted.items()}
    if step is not None or labels is None:
        return Look(points, positions)
    logits, has_loss = logits_of(output), own_loss(output) is not None
    if has_loss:
        logits = at_size(logits, labels)
    try:
        kind = _kind(logits, batch[1], labels)
        values = batch[1].double()
        spread = (values.mean().item(), values.std(correction=0).item()) if kind == "values" else None
        return Look(points, positions, kind, has_loss=has_loss, scale=spread)
    except ValueError as error:
        return Look(points, positions, unfit=str(error), has_loss=has_loss)


def _kind(logits: Tensor, labels: Tensor, shown: Tensor) -> str:
    """What the labels are; those that are classes, of the whole batch."""
    kind = kind_of(logits, shown)
    if len(labels) > len(shown) and not labels.is_floating_point():
        repeats = -(-len(labels) // len(shown))
        kind_of(logits.repeat(repeats, *[1] * (logits.dim() - 1))[: len(labels)], labels)
    return kind


def _counter(name: str, counted: dict[str, float]) -> Any:
    def count(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        x = arguments[0]
        if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1]:
            counted[name] = max(counted.get(name, 0), x.numel() / x.shape[1])

    return count


def task_of(found: Look, loss: str | None, metric: str | None, step: str) -> tuple[str, str]:
    """The loss and the metric of a project, where they are not said, by what its labels are.

    Args:
        loss, metric: as ``RunConfig`` has them, or None.
    """
    if step:
        return loss or CROSS_ENTROPY, metric or "loss"
    if loss is None:
        if found.has_loss:
            loss = OF_MODEL
        elif found.unfit:
            raise ValueError(found.unfit)
        elif found.kind == "either":
            raise ValueError(
                f"the labels are floats of 0 and 1: say --loss '{BINARY}' if these are answers, or --loss '{SQUARED}' if "
                "they are numbers to predict"
            )
        else:
            loss = {"classes": CROSS_ENTROPY, "masks": CROSS_ENTROPY, "binary": BINARY}.get(str(found.kind), SQUARED)
    if metric is None:
        by_kind = {"classes": ACCURACY.name, "binary": ACCURACY.name, "masks": "mean IoU"}
        metric = by_kind.get(str(found.kind), "loss")
        if found.kind == "either" and loss == BINARY:
            metric = ACCURACY.name
        elif metric == "loss" and loss == SQUARED:
            metric = SQUARED
    return loss, metric


def note_of_scale(found: Look) -> str | None:
    """What to know of labels that are far from where a network begins."""
    if found.scale is None or (abs(found.scale[0]) <= FAR and 1 / FAR <= found.scale[1] <= FAR):
        return None
    mean, deviation = found.scale
    return (
        f"The labels have the mean {mean:.3g} and the deviation {deviation:.3g}: a network learns numbers near 0 and 1 "
        "sooner, so it may help to standardize them in your loaders."
    )


def check_components(found: Look, norms: Mapping[str, tuple[int, str]]) -> list[str]:
    """Raises where norms have more components than a batch has points for; returns what a user should know.

    Args:
        norms: for each mixture norm its number of components and its population.
    """
    short = []
    for name, (components, population) in norms.items():
        points = points_of(found, name, population)
        if points is None:
            continue
        most = max(1, points // POINTS_A_COMPONENT)
        if components > most and components > USUAL:
            raise ValueError(
                f"{components:,} components are too many for {name!r}, which gets {points:,} points from a batch and needs "
                f"at least {POINTS_A_COMPONENT} for each: use -k {most} or less, larger batches, or --layers without it"
            )
        if components > most:
            short.append(
                f"{name} gets {points:,} points from a batch, which is enough for {most} of {components} components"
            )
    rest = len(short) - 1
    others = f", and {rest} other norm{'s are' if rest > 1 else ' is'} short of points as well" if rest > 0 else ""
    notes = [f"{short[0]}{others}."] if short else []
    most = max((components for components, _ in norms.values()), default=1)
    if most > MANY:
        notes.append(f"{most} components are many: each describes few points, and 2 to 5 are usual.")
    return notes


def points_of(found: Look, name: str, population: str) -> int | None:
    """How many points a mixture of a norm is fitted to, where that is known."""
    if name not in found.points or population not in ("batch", "channel", "instance"):
        return None
    return found.positions[name] if population == "instance" else found.points[name]


def components_of(model: nn.Module, kinds: Sequence[type]) -> dict[str, tuple[int, str]]:
    """For each mixture norm of a model its number of components and its population."""
    found: dict[str, tuple[int, str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, tuple(kinds)):
            norm: Any = module
            found[name] = (norm.num_components, norm.population)
    return found
