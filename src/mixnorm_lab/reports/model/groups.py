"""Records in order: runs in groups over their seeds, batch norm with the same settings, and the numbers of each run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mixnorm_lab.config.run_config import RunConfig, samples_of
from mixnorm_lab.reports.model.measure import PLAIN, RECALIBRATED, Measure, measure_of, row_key, values
from mixnorm_lab.storage.records import Record

NORM = ("name", "seed", "mixture", "norm", "norm_layers")  # what runs differ in that are compared
WINDOW = 10  # epochs, the paper's


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
        name = row_key(self.config, key)
        return bool(self.runs) and all(any(epoch.get(name) is not None for epoch in run.epochs) for run in self.runs)

    @property
    def refilled(self) -> bool:
        """Whether its runs were evaluated with refilled statistics, too."""
        return self.has(RECALIBRATED)

    def judged_by(self, key: str = PLAIN) -> Measure:
        return measure_of(self.config, key, self.runs)


@dataclass(frozen=True)
class Family:
    """Groups that belong in one table: the same model, data, epochs, data to test on, and metric. Batch norm comes first.

    ``validation`` is the share of the training data that took the place of the test data.
    """

    model: str
    data: str
    epochs: int
    validation: float
    metric: str
    groups: tuple[Group, ...]

    def judged_by(self, key: str = PLAIN) -> Measure:
        return measure_of(self.groups[0].config, key, [run for group in self.groups for run in group.runs])

    @property
    def side_by_side(self) -> bool:
        """Whether these are norms that were compared by name: one beside batch norm and mixture norm, or mixture norm with
        other options."""
        return any(group.config.norm is not None or group.name.startswith("mixture-norm,") for group in self.groups)

    @property
    def title(self) -> str:
        held_out = f", on held-out training {samples_of(self.data)}" if self.validation else ""
        return f"{self.model} on {self.data}, {self.epochs} epoch{'s' if self.epochs > 1 else ''}{held_out}"


def families(records: Iterable[Record]) -> list[Family]:
    """Everything that was recorded, in the order in which models and data come first."""
    by_settings: dict[str, list[Record]] = {}
    for record in records:
        by_settings.setdefault(record.config.name + _without(record.config, "name", "seed"), []).append(record)
    found: dict[tuple[str, str, int, float, str], list[Group]] = {}
    for runs in by_settings.values():
        once = _one_for_each_seed(runs)
        group = replace(_group(once), repeated=tuple(run for run in runs if _repeats(run, once)))
        config = group.config
        key = config.model, config.data, config.epochs, config.validation, config.metric
        found.setdefault(key, []).append(group)
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


def last_value(run: Record, key: str) -> float | None:
    """A number of the last epoch."""
    return run.epochs[-1].get(key) if run.epochs else None


def quarters(epochs: int) -> list[int]:
    """The epochs after a quarter, a half, three quarters and all of the training."""
    return [max(1, epochs * part // 4) for part in (1, 2, 3, 4)]


def last_epochs(epochs: int) -> int:
    """How many epochs at the end a run is judged by: ten, or the last tenth of a training of fewer than a hundred."""
    return max(1, min(WINDOW, epochs // 10))


def in_the_end(run: Record, measure: Measure) -> float | None:
    """The mean over the last epochs that a run has."""
    line = measure.values(run)[-last_epochs(run.config.epochs) :]
    return None if np.isnan(line).all() else float(np.nanmean(line))


def best(run: Record, measure: Measure, until: int | None = None) -> float | None:
    """The best of one evaluation in the first ``until`` epochs, or None where they were not reached."""
    line = measure.values(run)
    if until is not None:
        if not run.epochs or run.epochs[-1]["epoch"] < until:
            return None
        line = line[[epoch["epoch"] <= until for epoch in run.epochs]]
    return measure.best(line)


def average(run: Record, measure: Measure) -> float | None:
    """The mean over all epochs."""
    line = measure.values(run)
    return None if np.isnan(line).all() else float(np.nanmean(line))


def unsteadiness(run: Record, measure: Measure) -> float | None:
    """The deviation within windows of ten epochs, in the mean over all such windows; None of fewer than twenty epochs."""
    line = measure.values(run)
    if len(line) < 2 * WINDOW or np.isnan(line).any():
        return None
    return float(np.lib.stride_tricks.sliding_window_view(line, WINDOW).std(axis=1, ddof=1).mean())


def final_loss(run: Record, key: str = "train_loss") -> float | None:
    """The mean training loss over the last epochs; ``train_eval_loss`` is there of the last one alone."""
    if key == "train_eval_loss":
        return last_value(run, key)
    line = values(run, key)[-last_epochs(run.config.epochs) :]
    return None if np.isnan(line).all() else float(np.nanmean(line))


def reached(run: Record, target: float, measure: Measure) -> dict[str, Any] | None:
    """The first epoch that is as good as a target."""
    enough = measure.there(measure.values(run), target)
    return run.epochs[int(np.argmax(enough))] if enough.any() else None


def is_busy(run: Record) -> bool:
    """Whether other work was on the machine in the course of a run, so that its seconds say nothing."""
    return any(epoch.get("busy") for epoch in run.epochs)
