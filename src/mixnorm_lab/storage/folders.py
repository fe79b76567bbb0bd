"""Where the folder of a run is, and where in it things are."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.storage import records
from mixnorm_lab.storage.records import Record

SAMPLES = "samples"  # of a generator
INSPECTION = "inspection"  # pictures of ``mixnorm inspect``


def run_folder(root: Path, config: RunConfig) -> Path:
    """Where below ``root`` a run has its folder."""
    return root / config.name / f"seed-{config.seed}"


def run_name(config: RunConfig) -> str:
    """What a run is called where there are several seeds."""
    return f"{config.name} seed {config.seed}"


def recorded(config: RunConfig, root: Path) -> Record | None:
    """The record of this run as far as it came."""
    path = run_folder(root, config) / records.NAME
    return records.read(path) if path.exists() and b"\n" in path.read_bytes() else None


def check_writable(folder: Path) -> None:
    """Raises where a folder cannot be made or written into; leaves nothing behind."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file: name a folder for the runs")
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"{folder} cannot be written ({error.strerror}): choose another folder with --out") from error
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def samples_picture(run: Path, updates: int) -> Path:
    """The samples that a generator made after so many updates."""
    return run / SAMPLES / f"{updates:08}.png"
