"""The tables behind a report: every run, what is not finished, the settings, and where the numbers come from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from mixnorm_lab.config.fields import rows as rows_of
from mixnorm_lab.reports.model.groups import Family, Group, best, in_the_end, reached
from mixnorm_lab.reports.model.measure import PLAIN, RECALIBRATED, Measure, measure_of
from mixnorm_lab.reports.model.sentences import duration
from mixnorm_lab.reports.tables.results import RUN
from mixnorm_lab.storage.records import Record
from mixnorm_lab.tables import Column, Table, Value, text_column


def unfinished(families: Sequence[Family]) -> Table:
    """The runs that are not finished, diverged or were interrupted."""
    columns = [
        RUN, Column("seed", "seed", digits=0), text_column("state", "state"), text_column("epochs", "epochs"),
        text_column("message", "message"), text_column("folder", "folder"),
    ]  # fmt: skip
    rows: list[dict[str, Value]] = []
    for group, run, folder in _all(families):
        if not run.finished:
            state = {"not finite": "diverged", None: "running, or killed"}.get(run.reason, run.reason)
            message = (run.ends[-1].get("message") if run.ends and not run.running else None) or ""
            done = f"{run.epochs[-1]['epoch'] if run.epochs else 0} of {run.config.epochs}"
            told = {"state": state, "epochs": done, "message": message, "folder": folder}
            rows.append({"run": group.name, "seed": run.config.seed, **told})
    return Table("Runs that are not finished", columns, rows).used()


def runs(families: Sequence[Family]) -> Sequence[Table]:
    """Every run by itself, a table for each metric."""
    by_metric: dict[str, list[Family]] = {}
    for family in families:
        by_metric.setdefault(family.metric, []).append(family)
    return [_runs(found, len(by_metric) > 1) for found in by_metric.values()]


def _runs(families: Sequence[Family], named: bool) -> Table:
    everything = [run for family in families for group in family.groups for run in group.runs]
    measure = measure_of(families[0].groups[0].config, PLAIN, everything)
    refilled = measure_of(families[0].groups[0].config, RECALIBRATED, everything)
    columns = [
        RUN, Column("seed", "seed", digits=0), Column("epochs", "epochs", digits=0),
        Column("end", f"{measure.name} in the end", measure.digits, measure.unit),
        Column("best", measure.best_word, measure.digits, measure.unit), Column("best_epoch", "in epoch", digits=0),
        Column("refilled", "in the end, statistics refilled", measure.digits, measure.unit),
        text_column("training", "training"), text_column("all", "in all"), text_column("folder", "folder"),
    ]  # fmt: skip
    found = [(group, run, folder) for group, run, folder in _all(families) if run.epochs]
    rows = [{"run": group.name, **_run_row(run, measure, refilled), "folder": folder} for group, run, folder in found]
    return Table(f"Every run, {measure.name}" if named else "Every run", columns, rows).used()


def _all(families: Sequence[Family]) -> list[tuple[Group, Record, str]]:
    """Every run with its group and its folder, from the folder on that holds them all."""
    found = [(group, run) for family in families for group in family.groups for run in group.all_runs]
    found.sort(key=lambda pair: (pair[0].name, pair[1].config.seed))
    folders = [run.path.resolve().parent for _, run in found if run.path is not None]
    root = Path(os.path.commonpath(folders)) if len(set(folders)) > 1 else None

    def named(run: Record) -> str:
        if run.path is None:
            return ""
        folder = run.path.resolve().parent
        return folder.name if root is None else folder.relative_to(root).as_posix()

    return [(group, run, named(run)) for group, run in found]


def _run_row(run: Record, measure: Measure, refilled: Measure) -> dict[str, Value]:
    last, top = run.epochs[-1], best(run, measure)
    first = None if top is None else reached(run, top, measure)
    return {
        "seed": run.config.seed,
        "epochs": last["epoch"],
        "end": in_the_end(run, measure),
        "best": top,
        "best_epoch": None if first is None else first["epoch"],
        "refilled": in_the_end(run, refilled),
        "training": None if last["train_seconds"] is None else duration(last["train_seconds"]),
        "all": None if last["seconds"] is None else duration(last["seconds"]),
    }


def settings(family: Family) -> Sequence[Table]:
    """What all groups of a family share, and what they differ in."""
    flat = [rows_of(group.config) for group in family.groups]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    shared = [key for key in keys if len({values.get(key) for values in flat}) == 1]
    first = [text_column("setting", "setting"), text_column("value", "value")]
    shared_rows: list[dict[str, Value]] = [{"setting": key, "value": flat[0][key]} for key in shared]
    tables = [Table(f"Settings: {family.title}", first, shared_rows)]
    differing = [key for key in keys if key not in shared]
    if differing:
        columns = [RUN, *(text_column(key, key) for key in differing)]
        rows: list[dict[str, Value]] = [{"run": g.label, **values} for g, values in zip(family.groups, flat, strict=True)]
        tables.append(Table(f"What differs: {family.title}", columns, rows))
    return tables


def environments(records: Iterable[Record]) -> Table:
    """Where the numbers come from: what the runs' environments say, each value once."""
    said: dict[str, dict[str, None]] = {}
    for record in records:
        for key, value in record.environment.items():
            if value is not None:
                said.setdefault(key, {})[str(value)] = None
    columns = [text_column("what", "what"), text_column("value", "value")]
    return Table(
        "Where the figures come from", columns, [{"what": key, "value": ", ".join(values)} for key, values in said.items()]
    )
