"""Which curves belong in one picture, what they are called and how they look."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixnorm_lab.config import catalog
from mixnorm_lab.reports.model.groups import Family, Group, partner
from mixnorm_lab.reports.plots.style import BLUE, DASHES, ORANGES, OTHERS, slug


@dataclass(frozen=True)
class Panel:
    """Curves that belong in one picture, with the word for each."""

    name: str
    title: str
    groups: tuple[Group, ...]
    labels: tuple[str, ...]


def panels(families: Sequence[Family]) -> list[Panel]:
    """The paper's panels for runs that the catalog knows, and for others one for each batch norm."""
    found = []
    everything = [group for family in families for group in family.groups if group.runs]
    for panel, title in catalog.PANELS.items():
        groups = _shown_in(panel, [group for group in everything if panel in _panels_of(group)])
        if groups and panel != "components":
            found.append(Panel(slug(panel), title, tuple(groups), tuple(_paper_label(group, panel) for group in groups)))
    for family in families:
        others = [group for group in family.groups if group.runs and group.name not in catalog.EXPERIMENTS]
        bases = list(dict.fromkeys(id(partner(group, family.groups)) for group in others))
        for base in bases:
            groups = [group for group in others if id(partner(group, family.groups)) == base]
            end = "" if len(bases) == 1 else f", {groups[0].label}"
            title = f"{family.model} on {family.data}{end}"
            found.append(Panel(slug(title), title, tuple(groups), tuple(_label(group, groups) for group in groups)))
    return found


def _panels_of(group: Group) -> tuple[str, ...]:
    """The panels of the catalog that a group is a curve of; those are of test images."""
    return () if group.config.validation else catalog.panels_of(group.name)


def _shown_in(panel: str, groups: list[Group]) -> list[Group]:
    """Averaged weights have panels of their own, and stand in the paper's only where nothing else does."""
    if panel.startswith(("averaged/", "best/")):
        return [group for group in groups if bool(group.config.average) == panel.startswith("averaged/")]
    plain = {group.name for group in groups if not group.config.average}
    return [group for group in groups if not group.config.average or group.name not in plain]


def _paper_label(group: Group, panel: str) -> str:
    mixture = group.config.mixture
    if panel.startswith(("best/", "averaged/")) and group.is_batch_norm:
        return "batch norm"
    if panel.startswith("averaged/"):
        return _name(group) if mixture is None else _inference(mixture.options)
    differing = group.label.removesuffix(")").partition(" (")[2]
    name = "recommended form" if group.name.startswith("best/") else _name(group)
    extra = [setting for setting in differing.split(", ") if setting and not setting.startswith("average:")]
    name = ", ".join([name, *extra, *(["weights averaged"] if group.config.average else [])])
    if panel == "densenet":
        name = f"{group.config.model.rpartition('-')[0].replace('densenet', 'DenseNet')} {name}"
    if panel == "inception-v3/nesterov":
        return f"{'BN' if mixture is None else 'MN'}, drops × {group.config.schedule.factor:g}"
    if mixture is not None and panel == "cifar-cnn/em-iterations":
        return f"{name}: EM iter. {mixture.options['em_iters']}"
    if mixture is not None and panel == "cifar-cnn/layers":
        return f"{name}: {' + '.join(mixture.layers)}"
    return name


def _name(group: Group) -> str:
    """As in the paper: MN-2."""
    return group.name.rpartition("/")[2].upper()


def _inference(options: Mapping[str, Any]) -> str:
    from mixnorm import MixtureNorm2d  # here, for it loads torch, which other reports need not wait for

    layer = inspect.signature(MixtureNorm2d).parameters
    way, history = (options.get(name, layer[name].default) for name in ("inference", "history"))
    return f"mixture norm in all layers, {way}, T = {history}"


def _label(group: Group, groups: Sequence[Group]) -> str:
    if sum(other.is_batch_norm == group.is_batch_norm for other in groups) > 1:
        return group.label
    return group.config.norm_text.partition(",")[0]


def styles(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Colour by norm, dashes by the settings, shade by which mixture norm with those settings it is."""
    bases = [partner(group, groups) for group in groups]
    order = list(dict.fromkeys(id(base) for base in bases))
    found = []
    for i, (group, base) in enumerate(zip(groups, bases, strict=True)):
        beside = [groups[j] for j, other in enumerate(bases[:i]) if other is base]
        if group.is_batch_norm:
            color = BLUE
        elif group.is_mixture_norm:
            color = ORANGES[sum(other.is_mixture_norm for other in beside) % len(ORANGES)]
        else:
            color = OTHERS[sum(other.config.norm is not None for other in beside) % len(OTHERS)]
        found.append({"color": color, "linestyle": DASHES[order.index(id(base)) % len(DASHES)]})
    return found
