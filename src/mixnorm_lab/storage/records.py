"""What was measured: one ``record.jsonl`` for each run, written line by line so that a run killed at any time is readable.

Lines are JSON objects of four kinds. ``run`` opens a record with the configuration and environment, ``epoch`` follows each
epoch, ``resume`` says after which epoch an interrupted run continues, ``end`` says why it stopped; each has a checksum.
Errors are fractions. Epochs count from 1, steps and seconds from the start of the run. What is not finite is null. What
``components`` and ``mixtures`` hold, ``training.mixtures`` says.
"""

from __future__ import annotations

import contextlib
import datetime
import gzip
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mixnorm_lab.config.run_config import RunConfig

NAME = "record.jsonl"
KEPT = f"{NAME}.gz"  # of a finished run, to be kept with a document
VERSION = 1
REASONS = ("finished", "interrupted", "not finite")
# What every epoch has, and what may be missing from one and is then null.
REQUIRED = (
    "epoch",
    "steps",
    "train_loss",
    "train_error",
    "test_loss",
    "test_error",
    "learning_rate",
    "train_seconds",
    "seconds",
)
OPTIONAL = ("recalibrated_loss", "recalibrated_error", "components", "mixtures")
# Where there is such: of a run that is judged by another metric than accuracy; whether the machine was busy beside it; and
# of the last epoch alone, if the run was asked for them.
ASKED = ("test_metric", "recalibrated_metric", "busy", "train_eval_loss", "train_eval_error")
# The same of a generator's training. The distance is there where it was measured, with the features and samples it is of.
GAN_REQUIRED = ("epoch", "steps", "generator_loss", "discriminator_loss", "learning_rate", "train_seconds", "seconds")
GAN_OPTIONAL = ("distance", "recalibrated_distance", "features", "samples", "components", "mixtures")


def fields(*, gan: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What every epoch of a run has, and what it may have."""
    return (GAN_REQUIRED, GAN_OPTIONAL) if gan else (REQUIRED, OPTIONAL)


class RecordError(ValueError):
    """A record that cannot be read."""


@dataclass
class Record:
    """A run: ``epochs`` are sorted and each there once; ``ends`` has a line for each time it stopped by itself."""

    config: RunConfig
    environment: dict[str, Any]
    epochs: list[dict[str, Any]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)
    path: Path | None = None
    started: str | None = None
    running: bool = True  # since it was started or resumed last, no end was written: it runs, or was killed

    @property
    def reason(self) -> str | None:
        """Why the run stopped: one of ``REASONS``, or None where no end was written."""
        return None if self.running else self.ends[-1]["reason"]

    @property
    def finished(self) -> bool:
        return self.reason == "finished"

    @property
    def extent(self) -> tuple[bool, int]:
        """How far the run got: of two that are the same, the larger one has more to tell."""
        return self.finished, len(self.epochs)


class Writer:
    """Appends to a record. Each line is on the disk when its call returns.

    A last line that was cut off, by a kill or a full disk, is moved to ``record.jsonl.cut`` when the file is opened.

    Args:
        record: what is in the file already. :attr:`record` is this with what is written, as :func:`read` would give it.
    """

    def __init__(self, path: Path, record: Record | None = None) -> None:
        self.path = path
        self.record = record
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            _repair(path)
            self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def run(self, config: RunConfig, environment: Mapping[str, Any]) -> None:
        self.write("run", version=VERSION, config=config.to_json(), environment=dict(environment), started=now())

    def epoch(self, values: Mapping[str, Any]) -> None:
        """Values of all ``REQUIRED``, and of those ``OPTIONAL`` and ``ASKED`` ones there are; or of a generator's."""
        required, optional = fields(gan="generator_loss" in values)
        unknown = sorted(values.keys() - {*required, *optional, *ASKED})
        if unknown:
            raise ValueError(f"an epoch has no {unknown[0]}: a record holds {', '.join((*required, *optional))}")
        asked = {name: values[name] for name in ASKED if name in values}
        told = {name: values[name] for name in required} | {name: values.get(name) for name in optional} | asked
        self.write("epoch", **told)

    def resume(self, epoch: int, environment: Mapping[str, Any]) -> None:
        """The run goes on after ``epoch`` epochs; later ones in the record are measured again."""
        self.write("resume", epoch=epoch, environment=dict(environment), started=now())

    def end(self, reason: str, seconds: float, message: str | None = None) -> None:
        self.write("end", reason=reason, message=message, seconds=seconds)

    def write(self, kind: str, **values: Any) -> None:
        line = json.dumps(_finite({"kind": kind, **values}), allow_nan=False, ensure_ascii=False).encode()
        line = _summed(line)
        left = memoryview(line + b"\n")
        with self._explained():
            size = os.fstat(self._file.fileno()).st_size
            try:
                while left:
                    left = left[self._file.write(left) :]
                os.fsync(self._file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(size)  # a part of a line would spoil the next one
                raise
        if kind == "run" or self.record is not None:
            self.record = _add(self.record, _loads(line), self.path)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                f"{self.path} cannot be written ({error.strerror or error}): what was recorded before is kept, so make room "
                "or choose another folder, and run the same command again"
            ) from error


def _summed(line: bytes) -> bytes:
    """A line with the checksum of the line before that: JSON says nothing of a digit that has changed on a disk."""
    return line[:-1] + f', "crc": {zlib.crc32(line)}}}'.encode()


def _loads(line: bytes) -> Any:
    """The JSON of a line whose checksum is right, or that was written before there were any."""
    values = json.loads(line)
    if isinstance(values, dict) and "crc" in values:
        start, comma, _ = line.rpartition(b', "crc": ')
        if not comma or _summed(start + b"}") != line:
            raise ValueError("its checksum is wrong")
    return values


def _repair(path: Path) -> None:
    """Ends the last line of a file, or moves it aside if it was cut off."""
    if not path.is_file():
        return
    content = path.read_bytes()
    start = content.rfind(b"\n") + 1
    last = content[start:]
    if not last:
        return
    if _is_whole(last):
        with path.open("ab") as file:
            file.write(b"\n")
        return
    with path.with_name(path.name + ".cut").open("ab") as aside:
        aside.write(last + b"\n")
        aside.flush()
        os.fsync(aside.fileno())
    os.truncate(path, start)


def _is_whole(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)  # no part of an object is an object
    except ValueError:
        return False


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def read(path: Path) -> Record:
    """The record in a file. A last line that was cut off counts for nothing; any other broken line is an error."""
    record = _read(path)
    if record is None:
        raise RecordError(
            f"{path} has no whole line: the run was stopped before it began, so remove the file and run it again"
        )
    return record


def find(folder: Path) -> list[Record]:
    """All runs below a folder, in the order of their paths, without those that were stopped before their first line."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: name one that holds runs")
    records = [_read(path) for path in sorted([*folder.rglob(NAME), *folder.rglob(KEPT)])]
    return [record for record in records if record is not None]


def keep(records: Iterable[Record], folder: Path) -> list[Path]:
    """Copies records, compressed, to where a run of their name and seed has its folder, unless a longer one is there."""
    kept = []
    for record in records:
        path = kept_path(record, folder)
        there = _read(path) if path.exists() else None
        if record.path is None or not record.epochs or (there is not None and there.extent > record.extent):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(_content(record.path), mtime=0))  # the same bytes each time
        kept.append(path)
    return kept


def kept_path(record: Record, folder: Path) -> Path:
    return folder / record.config.name / f"seed-{record.config.seed}" / KEPT


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.name == KEPT else content
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RecordError(f"{path} is damaged ({error}): take it from where it was kept first") from error
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}): name the record of a run") from error


def _read(path: Path) -> Record | None:
    content = _content(path)
    lines = content.split(b"\n")
    last = lines.pop()
    if _is_whole(last):  # only its line break is missing
        lines.append(last)
    record = None
    for number, line in enumerate(lines, start=1):
        try:
            record = _add(record, _loads(line), path)
        except RecordError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise RecordError(
                f"{path}, line {number} is broken ({why}): remove that line to use the rest, or the file to run it again"
            ) from error
    return record


def _add(record: Record | None, line: Any, path: Path) -> Record:
    """The record with one more line."""
    if not isinstance(line, dict):
        raise ValueError("it is no JSON object")
    kind = line["kind"]
    if kind == "run":
        if line["version"] != VERSION:
            raise RecordError(
                f"{path} was written by another version of mixnorm (format {line['version']}): read it with that one"
            )
        # A run that begins anew in the same file takes the place of what was there.
        return Record(RunConfig.from_json(line["config"]), dict(line["environment"]), path=path, started=line["started"])
    if record is None:
        raise ValueError('the first line must be of the kind "run"')
    if kind == "epoch":
        _add_epoch(record, line)
    elif kind == "resume":
        record.epochs = [epoch for epoch in record.epochs if epoch["epoch"] <= line["epoch"]]
        record.environment = dict(line["environment"])
        record.running = True
    elif kind == "end":
        if line["reason"] not in REASONS:
            raise ValueError(f"{line['reason']!r} is no reason to end")
        record.ends.append(line)
        record.running = False
    else:
        raise ValueError(f"there is no kind {kind!r}")
    return record


def _add_epoch(record: Record, line: dict[str, Any]) -> None:
    required, optional = fields(gan=record.config.gan is not None)
    for name in required:
        if not (line[name] is None or isinstance(line[name], (int, float))):
            raise ValueError(f"{name} is {line[name]!r}, which is no number")
    if not (isinstance(line["epoch"], int) and isinstance(line["steps"], int) and line["epoch"] >= 1):
        raise ValueError("epoch and steps must be whole numbers from 1 on")
    values = {name: line[name] for name in required} | {name: line.get(name) for name in optional}
    values |= {name: line[name] for name in ASKED if name in line}
    earlier = [epoch for epoch in record.epochs if epoch["epoch"] != line["epoch"]]
    record.epochs = sorted([*earlier, values], key=lambda epoch: epoch["epoch"])


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
