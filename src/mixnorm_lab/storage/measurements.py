"""The one tidy table: a row for each measured variant, appended to a CSV as it comes."""

from __future__ import annotations

import csv
import datetime
import io
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]

KEYS = (
    "benchmark", "series", "case", "data", "dtype", "layout", "mode", "variant", "num_components", "em_iters",
    "m", "channels",
)  # fmt: skip
FIGURES = (
    "time_ms", "p20_ms", "p80_ms", "ratio", "bytes", "bandwidth_share", "copy_gb_s", "peak_memory_mb", "error", "error_grad",
)  # fmt: skip
ENVIRONMENT = ("device", "torch", "triton", "commit", "date")
# ``failure`` is why there are no figures: the text of what went wrong.
COLUMNS = (*KEYS, *FIGURES, "failure", *ENVIRONMENT)
WHOLE = ("num_components", "em_iters", "m", "channels", "bytes")


class Table:
    """Rows in a file and in memory. A file that exists is added to, so that several runs make one table."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path is None:
            return
        if not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")
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


def _parse(row: dict[str, str]) -> Row:
    numbers = {*FIGURES, *WHOLE}
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


def environment(device: str, commit: str | None = None) -> Row:
    """Where the figures come from: the columns of ``ENVIRONMENT``."""
    threads = torch.get_num_threads()
    cpu = f"{_processor()}, {threads} thread{'' if threads == 1 else 's'}"
    name = torch.cuda.get_device_name() if device == "cuda" else cpu
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = ""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton,
        "commit": _commit() if commit is None else commit,
        "date": now,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of this package's checkout, with "+" where files differ from it; nothing if it is not run from one."""
    package = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=package, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) / "src" / "mixnorm" != package:
            return ""
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
