"""The CSV of ``mixnorm bench``: a row for each measured variant, appended as it comes."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

KEYS = (
    "benchmark", "series", "case", "data", "dtype", "layout", "mode", "variant", "num_components", "em_iters",
    "m", "channels",
)  # fmt: skip
NUMBERS = (
    "time_ms", "p20_ms", "p80_ms", "ratio", "bytes", "bandwidth_share", "copy_gb_s", "peak_memory_mb", "error", "error_grad",
)  # fmt: skip
ENVIRONMENT = ("device", "torch", "triton", "commit", "date")
# ``failure`` is why there are no numbers: the text of what went wrong.
COLUMNS = (*KEYS, *NUMBERS, "failure", *ENVIRONMENT)
WHOLE = ("num_components", "em_iters", "m", "channels", "bytes")


class MeasurementFile:
    """Rows in a file and in memory. A file that exists is added to, so that several runs make one table."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path is None:
            return
        if not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {path.parent}, so make it or name another file")
        text = path.read_text() if path.exists() else ""
        if not text:
            path.write_text(_line(COLUMNS))
        elif text.splitlines()[0] != _line(COLUMNS).rstrip():
            raise ValueError(f"{path} has other columns than this version writes: name another file")
        elif not text.endswith("\n"):  # a run that was cut off in the middle of a row, which read() leaves out
            self._append("\n")

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._append(_line([_text(row.get(column)) for column in COLUMNS]))

    def _append(self, text: str) -> None:
        if self.path is not None:
            with self.path.open("a") as file:  # opened anew for each row: nothing is lost when the run is killed
                file.write(text)


def read(path: Path) -> list[Row]:
    """The rows of a file, without those that were cut off, and of each thing measured on a device the last."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}: mixnorm bench ... --out writes one")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path} is not a table of this version's mixnorm bench: its first line names other columns")
        rows = [_parse(row) for row in reader if None not in row and None not in row.values()]
    return latest(rows)


def latest(rows: Iterable[Row]) -> list[Row]:
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[column] for column in (*KEYS, "device"))
        found.pop(key, None)  # the later one takes its place in the order, too
        found[key] = row
    return list(found.values())


def is_base(row: Row) -> bool:
    """Whether a row is of what others are compared with."""
    return row["variant"] in ("batch_norm", "scikit_learn")


def _parse(row: dict[str, str]) -> Row:
    numbers = {*NUMBERS, *WHOLE}
    parsed: Row = {}
    for column, text in row.items():
        if column not in numbers:
            parsed[column] = text
        elif text == "":
            parsed[column] = None
        else:
            parsed[column] = int(text) if column in WHOLE else float(text)
    return parsed


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _line(values: Iterable[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(values)
    return buffer.getvalue()
