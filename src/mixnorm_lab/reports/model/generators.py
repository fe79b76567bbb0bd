"""The numbers of generators' records: the lowest distance, and the updates to batch norm's lowest."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mixnorm_lab.config import catalog
from mixnorm_lab.config.parts.gan import FEATURES
from mixnorm_lab.reports.model.groups import Family, Group
from mixnorm_lab.storage.folders import samples_picture
from mixnorm_lab.storage.records import Record, kept_path
from mixnorm_lab.tables import Measured

DISTANCE, FRESH_DISTANCE = "distance", "recalibrated_distance"  # with running statistics, and with refilled ones


def title(family: Family) -> str:
    """Names the features, without which a distance says nothing."""
    gan = family.groups[0].config.gan
    assert gan is not None
    return f"{FEATURES[gan.features]}: {family.model} on {family.data}, {family.epochs * gan.updates:,} updates"


def lowest(run: Record) -> dict[str, Any] | None:
    """The epoch with the lowest distance."""
    measured = [epoch for epoch in run.epochs if epoch.get(DISTANCE) is not None]
    return min(measured, key=lambda epoch: epoch[DISTANCE]) if measured else None


def lowest_distances(group: Group) -> list[float | None]:
    """The lowest distance of each run."""
    return [None if (epoch := lowest(run)) is None else epoch[DISTANCE] for run in group.runs]


def updates_to(run: Record, target: float) -> int | None:
    """Updates until the distance was first measured to be as low."""
    return next(
        (epoch["steps"] for epoch in run.epochs if epoch.get(DISTANCE) is not None and epoch[DISTANCE] <= target), None
    )


def to_lowest(group: Group, base: Group) -> Measured:
    """Updates to the lowest distance of batch norm with the same seed or, where there is none, of all its seeds."""
    lows = {run.config.seed: epoch[DISTANCE] for run in base.runs if (epoch := lowest(run)) is not None}
    mean = float(np.mean(list(lows.values())))
    return Measured.over(updates_to(run, lows.get(run.config.seed, mean)) for run in group.runs)


def feature_labels(group: Group) -> list[str]:
    """The features that its distances are of, each with the digest of its weights."""
    return sorted({epoch["features"] for run in group.runs for epoch in run.epochs if epoch.get("features")})


def is_fid(group: Group) -> bool:
    """Whether its distances are of the 2015 Inception's features, as the paper's are."""
    return group.config.gan is not None and group.config.gan.features == "inception-2015"


def paper_fid(group: Group) -> dict[str, Any]:
    """The paper's numbers for a group of generators, if it trained as long."""
    found = catalog.EXPERIMENTS.get(group.name)
    return found.paper if found is not None and found.config.epochs == group.config.epochs else {}


def keep_samples(records: Iterable[Record], folder: Path) -> None:
    """Copies the samples at each generator's lowest distance to beside its kept record, in place of what is there."""
    for run in records:
        best = lowest(run)
        if run.path is None or best is None:
            continue
        file = samples_picture(run.path.parent, best["steps"])
        kept = samples_picture(kept_path(run, folder).parent, best["steps"])
        if file.is_file() and file != kept:
            shutil.rmtree(kept.parent, ignore_errors=True)
            kept.parent.mkdir(parents=True)
            shutil.copyfile(file, kept)
