"""CSV for other programs: a line for each epoch of each run, and one for each number of the tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.storage.records import Record
from mixnorm_lab.tables import Table

EPOCHS, SUMMARY = "epochs.csv", "summary.csv"
FIRST = ("folder", "run", "model", "data", "norm", "seed", "epoch", "steps")
SPREAD = ("deviation", "low", "high", "p", "n", "of", "paper")  # of what is measured over several runs
LAYERS, LEFT_OUT = "components", "mixtures"  # of an epoch: one number a layer, and pictures of mixtures


def epochs(records: Iterable[Record], folder: Path) -> str:
    """Every epoch of every run: what run it is, and each number that its record has.

    Columns are ``folder`` (of the run, below ``folder``), ``run``, ``model``, ``data``, ``norm``, ``seed``, ``epoch``,
    ``steps``, then the numbers, and "components.LAYER" for each mixture norm. A cell is empty where there is no number.
    """
    rows = [_epoch(record, row, folder) for record in records for row in record.epochs]
    names = dict.fromkeys((*FIRST, *(name for row in rows for name in row if not name.startswith(f"{LAYERS}."))))
    layers = dict.fromkeys(name for row in rows for name in row if name.startswith(f"{LAYERS}."))
    return _text([*names, *layers], rows)


def summary(tables: Iterable[Table]) -> str:
    """Every number of the tables that a terminal shows: the table, the row's name, the column, the number and its spread."""
    rows = []
    for table in tables:
        made = table.json()
        keys = list(made["columns"])
        for row in made["rows"]:
            for key in keys[1:]:
                cell = row[key]
                if cell in (None, ""):
                    continue
                spread = cell if isinstance(cell, Mapping) else {}
                about = {"table": table.title, "row": row[keys[0]], "column": made["columns"][key]}
                told = {name: spread[name] for name in SPREAD if spread.get(name) is not None}
                rows.append(about | {"value": spread.get("mean") if spread else cell} | told)
    used = [name for name in SPREAD if any(name in row for row in rows)]
    return _text(["table", "row", "column", "value", *used], rows)


def write(target: Path, records: Sequence[Record], tables: Iterable[Table], folder: Path) -> tuple[Path, Path]:
    """Writes the epochs into a file, and the summary into one beside it; returns both paths."""
    beside = target.with_name(SUMMARY if target.name == EPOCHS else f"{target.stem}-{SUMMARY}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(epochs(records, folder), encoding="utf-8")
    beside.write_text(summary(tables), encoding="utf-8")
    return target, beside


def _epoch(record: Record, row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    config = record.config
    place = "" if record.path is None else record.path.parent.relative_to(folder).as_posix()
    about = {"folder": place, "run": config.name, "model": config.model, "data": config.data, "norm": _norm(config)}
    numbers = {name: value for name, value in row.items() if name not in (LAYERS, LEFT_OUT)}
    layers = {f"{LAYERS}.{layer}": count for layer, count in (row.get(LAYERS) or {}).items()}
    return {**about, "seed": config.seed, **numbers, **layers}


def _norm(config: RunConfig) -> str:
    """The norm as ``--norms`` names it."""
    return config.norm or ("batch" if config.mixture is None else "mixture")


def _text(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    rows = list(rows)
    used = [name for name in names if name in FIRST or any(row.get(name) is not None for row in rows)]
    out = io.StringIO()
    writer = csv.DictWriter(out, used, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
