"""Which curves belong in one picture, what they are called and how they look. Batch norm is blue, mixture norm orange."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixnorm import MixtureNorm2d
from mixnorm_lab.config import catalog
from mixnorm_lab.reports.model.groups import Family, Group, partner

BLUE = "#4477aa"
ORANGES = ("#ee7733", "#8a3a0e", "#f5b48a", "#c2570c", "#5c2405")
DASHES: Any = (
    "-",
    (0, (4, 1.5)),
    (0, (1, 1)),
    (0, (5, 1, 1, 1)),
)  # one for each batch norm, and the mixture norms beside it


@dataclass(frozen=True)
class Panel:
    """Curves that belong in one picture, with the word for each."""

    name: str
    title: str
    groups: tuple[Group, ...]
    labels: tuple[str, ...]


def panels(families: Sequence[Family]) -> list[Panel]:
    """The paper's figures for runs that the catalog knows, and for others one for each batch norm."""
    found = []
    everything = [group for family in families for group in family.groups if group.runs]
    for figure, title in catalog.FIGURES.items():
        groups = _shown_in(figure, [group for group in everything if figure in _figures(group)])
        if groups and figure != "components":
            found.append(Panel(slug(figure), title, tuple(groups), tuple(_paper_label(group, figure) for group in groups)))
    for family in families:
        others = [group for group in family.groups if group.runs and group.name not in catalog.EXPERIMENTS]
        bases = list(dict.fromkeys(id(partner(group, family.groups)) for group in others))
        for base in bases:
            groups = [group for group in others if id(partner(group, family.groups)) == base]
            end = "" if len(bases) == 1 else f", {groups[0].label}"
            title = f"{family.model} on {family.data}{end}"
            found.append(Panel(slug(title), title, tuple(groups), tuple(_label(group, groups) for group in groups)))
    return found


def _figures(group: Group) -> tuple[str, ...]:
    """The figures that a group is a curve of; those are of test images."""
    return () if group.config.validation else catalog.figures(group.name)


def _shown_in(figure: str, groups: list[Group]) -> list[Group]:
    """Averaged weights have figures of their own, and stand in the paper's only where nothing else does."""
    if figure.startswith(("averaged/", "best/")):
        return [group for group in groups if bool(group.config.average) == figure.startswith("averaged/")]
    plain = {group.name for group in groups if not group.config.average}
    return [group for group in groups if not group.config.average or group.name not in plain]


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _paper_label(group: Group, figure: str) -> str:
    mixture = group.config.mixture
    if figure.startswith("averaged/"):
        return _name(group) if mixture is None else _inference(mixture.options)
    differing = group.label.removesuffix(")").partition(" (")[2]
    name = "recommended form" if group.name.startswith("best/") else _name(group)
    extra = [setting for setting in differing.split(", ") if setting and not setting.startswith("average:")]
    name = ", ".join([name, *extra, *(["weights averaged"] if group.config.average else [])])
    if figure == "densenet":
        name = f"{group.config.model.rpartition('-')[0].replace('densenet', 'DenseNet')} {name}"
    if figure == "inception-v3/nesterov":
        return f"{'BN' if mixture is None else 'MN'}, drops × {group.config.schedule.factor:g}"
    if mixture is not None and figure == "cifar-cnn/em-iterations":
        return f"{name}: EM iter. {mixture.options['em_iters']}"
    if mixture is not None and figure == "cifar-cnn/layers":
        return f"{name}: {' + '.join(mixture.layers)}"
    return name


def _name(group: Group) -> str:
    """As in the paper: MN-2."""
    return group.name.rpartition("/")[2].upper()


def _inference(options: Mapping[str, Any]) -> str:
    layer = inspect.signature(MixtureNorm2d).parameters
    way, history = (options.get(name, layer[name].default) for name in ("inference", "history"))
    return f"mixture norm in all layers, {way}, T = {history}"


def _label(group: Group, groups: Sequence[Group]) -> str:
    if sum(other.is_batch_norm == group.is_batch_norm for other in groups) > 1:
        return group.label
    return "batch norm" if group.is_batch_norm else "mixture norm"


def styles(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Colour by norm, dashes by the settings, shade by which mixture norm with those settings it is."""
    bases = [partner(group, groups) for group in groups]
    order = list(dict.fromkeys(id(base) for base in bases))
    found = []
    for i, (group, base) in enumerate(zip(groups, bases, strict=True)):
        before = sum(other is base and not groups[j].is_batch_norm for j, other in enumerate(bases[:i]))
        color = BLUE if group.is_batch_norm else ORANGES[before % len(ORANGES)]
        found.append({"color": color, "linestyle": DASHES[order.index(id(base)) % len(DASHES)]})
    return found
