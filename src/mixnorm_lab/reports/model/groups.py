"""Records in order: runs in groups over their seeds, batch norm with the same settings, and the numbers of each run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.storage.records import Record

NORM = ("name", "seed", "mixture", "norm", "norm_layers")  # what runs differ in that are compared
PLAIN, RECALIBRATED = "test_error", "recalibrated_error"  # the two ways to evaluate


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed.

    Args:
        label: the name, without what all names beside it share.
        config: of the first run.
        runs: the runs that count, in the order of their seeds: those that finished or, where none did, those with an epoch.
        left_out: the others.
        repeated: those that have the settings and the seed of one of these but other numbers, and count for nothing.
    """

    name: str
    label: str
    config: RunConfig
    runs: tuple[Record, ...]
    left_out: tuple[Record, ...] = ()
    repeated: tuple[Record, ...] = ()

    @property
    def is_batch_norm(self) -> bool:
        return self.config.mixture is None and self.config.norm is None

    @property
    def is_mixture_norm(self) -> bool:
        return self.config.mixture is not None

    @property
    def all_runs(self) -> tuple[Record, ...]:
        """Those that count for nothing as well, in the order of their seeds."""
        return tuple(sorted((*self.runs, *self.left_out, *self.repeated), key=lambda run: run.config.seed))

    @property
    def finished(self) -> bool:
        return bool(self.runs) and all(run.finished for run in self.runs)

    def until(self, epoch: int) -> tuple[Record, ...]:
        """The runs that count, and those that were cut off later than this epoch, in the order of their seeds."""
        further = (run for run in self.cut_off if run.epochs[-1]["epoch"] >= epoch)
        return tuple(sorted((*self.runs, *further), key=lambda run: run.config.seed))

    @property
    def cut_off(self) -> tuple[Record, ...]:
        """Runs beside finished ones that have epochs, and have not diverged."""
        return tuple(run for run in self.left_out if run.epochs and run.reason != "not finite")

    def has(self, key: str) -> bool:
        """Whether every run that counts has this number, in some epoch."""
        return bool(self.runs) and all(any(epoch.get(key) is not None for epoch in run.epochs) for run in self.runs)


@dataclass(frozen=True)
class Family:
    """Groups that belong in one table: the same model, data, epochs and images to test on. Batch norm comes first.

    ``validation`` is the share of the training images that took the place of the test images.
    """

    model: str
    data: str
    epochs: int
    validation: float
    groups: tuple[Group, ...]

    @property
    def side_by_side(self) -> bool:
        """Whether these are norms that were compared by name: one beside batch norm and mixture norm, or mixture norm with
        other options."""
        return any(group.config.norm is not None or group.name.startswith("mixture-norm,") for group in self.groups)

    @property
    def title(self) -> str:
        held_out = ", on held-out training images" if self.validation else ""
        return f"{self.model} on {self.data}, {self.epochs} epoch{'s' if self.epochs > 1 else ''}{held_out}"


def families(records: Iterable[Record]) -> list[Family]:
    """Everything that was recorded, in the order in which models and data come first."""
    by_settings: dict[str, list[Record]] = {}
    for record in records:
        by_settings.setdefault(record.config.name + _without(record.config, "name", "seed"), []).append(record)
    found: dict[tuple[str, str, int, float], list[Group]] = {}
    for runs in by_settings.values():
        once = _one_for_each_seed(runs)
        group = replace(_group(once), repeated=tuple(run for run in runs if _repeats(run, once)))
        config = group.config
        found.setdefault((config.model, config.data, config.epochs, config.validation), []).append(group)
    return [Family(*key, tuple(_labelled(sorted(groups, key=_order)))) for key, groups in found.items()]


def _without(config: RunConfig, *fields: str) -> str:
    return repr({key: value for key, value in sorted(config.to_json().items()) if key not in fields})


def _one_for_each_seed(runs: list[Record]) -> list[Record]:
    """Of two runs that are the same, such as a copy, the one that came furthest."""
    best: dict[int, Record] = {}
    for run in runs:
        other = best.get(run.config.seed)
        if other is None or run.extent > other.extent:
            best[run.config.seed] = run
    return [best[seed] for seed in sorted(best)]


def _repeats(run: Record, once: list[Record]) -> bool:
    """Whether a run was done again, and is not one of these nor a copy, or the beginning, of one."""
    [kept] = [other for other in once if other.config.seed == run.config.seed]
    return run.epochs != kept.epochs[: len(run.epochs)]


def _group(runs: list[Record]) -> Group:
    counted = [run for run in runs if run.finished] or [run for run in runs if run.epochs and run.reason != "not finite"]
    rest = [run for run in runs if all(run is not other for other in counted)]
    config = runs[0].config
    return Group(config.name, config.name, config, tuple(counted), tuple(rest))


def _order(group: Group) -> tuple[bool, list[Any]]:
    parts = re.split(r"(\d+)", group.name)  # mn-2 before mn-10
    return not group.is_batch_norm, [(part.isdigit(), int(part) if part.isdigit() else part) for part in parts]


def _labelled(groups: Sequence[Group]) -> list[Group]:
    """Labels without the folder that most names share, nor the data set at their end; of groups with one name, with the
    settings that they differ in; and of averaged weights always, where others are not, because they say more than a name."""
    folder, names = Counter(group.name.rpartition("/")[0] for group in groups).most_common(1)[0]
    shared = f"{folder}/" if folder and 2 * names > len(groups) else ""
    labelled = []
    for group in groups:
        same = [other for other in groups if other.name == group.name and other is not group]
        differing = {line.split(", not ")[0] for other in same for line in group.config.differences(other.config)}
        if group.config.average and any(other.config.average != group.config.average for other in groups):
            differing.add(f"average: {group.config.average:g}")
        told = (line for line in differing if not line.startswith("seed:") and not line.endswith(": none"))
        extra = ", ".join(sorted(told))
        data = group.config.data
        name = group.name.removeprefix(shared).removeprefix(f"forms/{data}/").removesuffix(f"/{data}")
        labelled.append(replace(group, label=name + (f" ({extra})" if extra else "")))
    return labelled


def partner(group: Group, groups: Iterable[Group]) -> Group | None:
    """Batch norm with the same settings, or None; of batch norm, itself."""
    if group.is_batch_norm:
        return group
    settings = _without(group.config, *NORM)
    same = (other for other in groups if other.is_batch_norm and other.runs)
    return next((other for other in same if _without(other.config, *NORM) == settings), None)


def values(run: Record, key: str, scale: float = 1.0) -> np.ndarray:
    """A number of every epoch, (epochs,), NaN where there is none."""
    return np.array([np.nan if epoch.get(key) is None else scale * epoch[key] for epoch in run.epochs], dtype=float)


def last_value(run: Record, key: str) -> float | None:
    """A number of the last epoch."""
    return run.epochs[-1].get(key) if run.epochs else None


def accuracy(run: Record, key: str = PLAIN, until: int | None = None) -> float | None:
    """The largest accuracy in % in the first ``until`` epochs, or None where they were not reached."""
    errors = values(run, key, 100.0)
    if until is not None:
        if not run.epochs or run.epochs[-1]["epoch"] < until:
            return None
        errors = errors[[epoch["epoch"] <= until for epoch in run.epochs]]
    return None if np.isnan(errors).all() else float(100 - np.nanmin(errors))


def quarters(epochs: int) -> list[int]:
    """The epochs after a quarter, a half, three quarters and all of the training."""
    return [max(1, epochs * part // 4) for part in (1, 2, 3, 4)]


def reached(run: Record, target: float, key: str = PLAIN) -> dict[str, Any] | None:
    """The first epoch with at least this accuracy in %."""
    enough = 100 - values(run, key, 100.0) >= target - 1e-9
    return run.epochs[int(np.argmax(enough))] if enough.any() else None


def target(run: Record, base: Group, key: str = PLAIN) -> float | None:
    """The accuracy that a run is to reach: that of batch norm with its seed or, where that was not run, of all its seeds."""
    bests = {other.config.seed: accuracy(other, key) for other in base.runs}
    if bests.get(run.config.seed) is not None:
        return bests[run.config.seed]
    there = [best for best in bests.values() if best is not None]
    return float(np.mean(there)) if there else None
