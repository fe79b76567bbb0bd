"""Whether a machine was busy with something else while a run trained: then the time that it took says little."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WAITED = 0.1  # the share of its time that a run's threads may wait for a core
OTHERS = 0.05  # the share of all cores that others may use: a run's threads may also wait for each other
LOAD = 1.25  # of the cores, where the system does not tell how long threads wait
GPU_SHARE = 5  # % of a GPU's time that another process may use
PROC = Path("/proc")


class Watch:
    """Looks at what else a machine does, from one call of :meth:`busy` to the next.

    Args:
        shared: whether it is known that other runs train at the same time.
    """

    def __init__(self, device: torch.device, *, shared: bool = False) -> None:
        self.device = device
        self.shared = shared
        self.start()

    def start(self) -> None:
        """What comes before does not count."""
        self._before = sample()

    def busy(self) -> bool:
        """Whether others were busy since the last call, as far as the system tells."""
        before = self._before
        self.start()
        others = self.device.type == "cuda" and _gpu_is_shared(self.device, before.time)
        return self.shared or others or _cores_are_short(before, self._before)


@dataclass(frozen=True)
class Sample:
    """What a system has counted so far, in seconds; None where it does not tell.

    Args:
        time: by the clock.
        ran, waited: how long the threads of this process ran, and waited for a core.
        own: what this process and those that it started, such as workers of a loader, had of the cores.
        all: what all processes had.
    """

    time: float
    ran: float | None = None
    waited: float | None = None
    own: float | None = None
    all: float | None = None


def sample() -> Sample:
    """What the system has counted until now. Linux alone tells all of it."""
    try:
        tasks = list((PROC / "self/task").iterdir())
        ran = waited = 0
        workers = 0.0
        for task in tasks:
            with suppress(OSError):  # it has ended
                numbers = (task / "schedstat").read_text().split()
                ran, waited = ran + int(numbers[0]), waited + int(numbers[1])
                workers += sum(map(_of_worker, (task / "children").read_text().split()))
        ticks = [int(number) for number in (PROC / "stat").read_text().splitlines()[0].split()[1:9]]
        used = sum(ticks) - ticks[3] - ticks[4]  # without idle cores, waiting for a disk or not
        return Sample(time.time(), ran / 1e9, waited / 1e9, sum(os.times()[:4]) + workers, used / _TICKS)
    except (OSError, ValueError, IndexError):
        return Sample(time.time())


def _of_worker(process: str) -> float:
    """What a process had of the cores, without those that it started."""
    with suppress(OSError):
        numbers = (PROC / process / "stat").read_text().rpartition(")")[2].split()
        return (int(numbers[11]) + int(numbers[12])) / _TICKS
    return 0.0


_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def _cores_are_short(before: Sample, after: Sample) -> bool:
    cores = os.cpu_count() or 1

    def since(name: str) -> float | None:
        then, now = getattr(before, name), getattr(after, name)
        return None if then is None or now is None else max(0.0, now - then)

    ran, waited, own, everyone = map(since, ("ran", "waited", "own", "all"))
    if ran is not None and waited is not None:
        seconds = max(1e-3, after.time - before.time)
        others = None if own is None or everyone is None else max(0.0, everyone - own) / (cores * seconds)
        return waited > WAITED * (ran + waited) and (others is None or others > OTHERS)
    try:
        return os.getloadavg()[0] > LOAD * cores
    except (OSError, AttributeError):  # Windows has no such number
        return False


def _gpu_is_shared(device: torch.device, since: float) -> bool:
    """Whether more than one process has used the GPU since a time, in seconds; False where NVML cannot be read."""
    try:
        import pynvml  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        return False
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, int(since * 1e6))
    except (nvml.NVMLError, AttributeError, RuntimeError):
        return False
    return len({sample.pid for sample in samples if sample.smUtil > GPU_SHARE}) > 1
