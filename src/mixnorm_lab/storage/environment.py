"""Where numbers come from: the machine, the versions of what ran on it, and the commit."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import mixnorm


def of_run(device: torch.device | str) -> dict[str, Any]:
    """What a record says of it. ``commit`` is null where the packages are not run from a repository."""
    kind = torch.device(device).type
    found = of_measurement(kind)
    return {
        "mixnorm": mixnorm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "triton": found["triton"] or None,
        "device": str(device),
        "gpu": found["device"] if kind == "cuda" else None,
        "processor": found["device"] if kind != "cuda" else None,
        "commit": found["commit"] or None,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def of_measurement(device: str, commit: str | None = None) -> dict[str, Any]:
    """What a row of ``mixnorm bench`` says of it: the columns ``measurements.ENVIRONMENT``."""
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
    """The commit of the checkout, with "+" where files of the packages differ; nothing if they are not run from one."""
    packages = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=packages, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) / "src" != packages:
            return ""
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
