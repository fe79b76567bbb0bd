"""The paper's numbers for groups that are named as in the catalog, where they can be compared."""

from __future__ import annotations

from typing import Any

from mixnorm_lab.config import catalog
from mixnorm_lab.reports.model.groups import Group


def paper_numbers(group: Group, wanted: bool = True) -> dict[str, Any]:
    """The paper's numbers for a group, if it trained as long and its own weights were tested, on the test images."""
    found, config = catalog.EXPERIMENTS.get(group.name), group.config
    comparable = wanted and not config.validation and not config.average
    return found.paper if comparable and found is not None and found.config.epochs == config.epochs else {}


def paper_speed(group: Group, base: Group) -> dict[str, float | str]:
    """The paper's steps to batch norm's best, how many fewer they are in %, and its gain in points."""
    ours, theirs = paper_numbers(group), paper_numbers(base)
    told: dict[str, float | str] = {}
    if "steps_to_bn" in ours:
        told["steps"] = "never" if ours["steps_to_bn"] is None else ours["steps_to_bn"]
    if ours.get("steps_to_bn") and theirs.get("steps_to_bn"):
        told["fewer"] = 100 * (1 - ours["steps_to_bn"] / theirs["steps_to_bn"])
    if "max_accuracy" in ours and "max_accuracy" in theirs:
        told["gain"] = ours["max_accuracy"] - theirs["max_accuracy"]
    return told
