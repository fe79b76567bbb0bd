"""Peak memory of a training step on a CPU (Linux): by how much a process of its own grows at most.

``python -m mixnorm_lab.bench.cpu_memory JSON`` prints it in bytes, for a case and a variant.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from mixnorm_lab.bench.cases import Case
from mixnorm_lab.bench.steps import Variant, make_inputs, make_step


def cpu_peak_memory(case: Case, variant: Variant) -> int:
    """In a process whose allocator gives everything back at once, so that what was used before does not count."""
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    job = json.dumps([asdict(case), asdict(variant)])
    command = [sys.executable, "-m", "mixnorm_lab.bench.cpu_memory", job]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"memory was not measured: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return int(done.stdout)


def measure(case: Case, variant: Variant) -> int:
    step = make_step(case, variant, make_inputs(case, "cpu"))
    for _ in range(3):
        step()
    peaks = []
    for _ in range(5):
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = _status("VmRSS")
        step()
        peaks.append(_status("VmHWM") - before)
    return round(statistics.median(peaks))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


if __name__ == "__main__":
    case, variant = json.loads(sys.argv[1])
    case["shape"], case["components"] = tuple(case["shape"]), tuple(case["components"])
    print(measure(Case(**case), Variant(**variant)))
