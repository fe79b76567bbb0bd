"""How long a new process takes until a model trains, where nothing has been compiled before.

Each variant has a process of its own, with empty caches of numba, Triton and torch.compile. One that takes too long is
ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mixnorm_lab.bench.cases import Case
from mixnorm_lab.bench.steps import Variant

CACHES = ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
LIMIT = 300.0  # seconds of a process
COMMAND = (sys.executable, "-m", "mixnorm_lab.bench.whole.first_step")


def figures(case: Case) -> tuple[str, ...]:
    """What is measured: the first step; the same from the start of the process on; then torch.compile's first step."""
    return ("first-step", "with-import", *(("compile",) if case.mode == "compiled" else ()))


def mode(case: Case, figure: str, device: str) -> str:
    """What the column ``mode`` says of a figure."""
    return "compiled" if figure == "compile" else "cpu" if device == "cpu" else "eager"


def measure(case: Case, variant: Variant, device: str, limit: float) -> tuple[dict[str, float], str]:
    """Seconds by figure, and why some are missing, if so: what came before the end of a process is kept."""
    options = {"num_components": variant.num_components, "em_iters": case.em_iters, "backend": variant.backend}
    job = {
        "device": device,
        "model": case.model,
        "shape": case.shape,
        "bf16": case.dtype == "bf16",
        "compile": case.mode == "compiled",
        "mixture": options if variant.is_mixture else None,
        "form": variant.form,
    }
    with tempfile.TemporaryDirectory(prefix="mixnorm-bench-", ignore_cleanup_errors=True) as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        with output.open("w") as out, errors.open("w") as err:
            code = _run(job, _environment(Path(folder)), limit, out, err)
        lines = [line.split() for line in output.read_text().splitlines()]
        known = figures(case)
        found = {line[0]: float(line[1]) for line in lines if len(line) == 2 and line[0] in known}
        if code is None:
            return found, f"it was not there after {limit:.0f} seconds, when the process was ended"
        if code:
            return found, (errors.read_text().strip().splitlines() or ["the process failed without a word"])[-1]
    return found, ""


def _run(job: dict[str, Any], environment: dict[str, str], limit: float, out: Any, err: Any) -> int | None:
    """The exit code, or None if the process was ended, with all that it started, such as compilers."""
    command = [*COMMAND, json.dumps(job | {"began": time.time()})]
    process = subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment(folder: Path) -> dict[str, str]:
    source = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path} | {name: str(folder / name.lower()) for name in CACHES}
