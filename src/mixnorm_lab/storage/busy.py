"""Whether a machine was busy with something else while a run trained: then the time that it took says little."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

WAITED = 0.1  # the share of its time that a run's threads may wait for a core
LOAD = 1.25  # of the cores, where the system does not tell how long threads wait
GPU_SHARE = 5  # % of a GPU's time that another process may use
TASKS = Path("/proc/self/task")


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
        self._before = _scheduled()
        self._since = time.time()

    def busy(self) -> bool:
        """Whether others were busy since the last call, as far as the system tells."""
        before, since = self._before, self._since
        self.start()
        others = self.device.type == "cuda" and _gpu_is_shared(self.device, since)
        return self.shared or others or _cores_are_short(before, self._before)


def _scheduled() -> tuple[int, int] | None:
    """For how many nanoseconds this process's threads ran, and for how many they waited for a core. Linux alone says."""
    ran = waited = 0
    try:
        for task in TASKS.iterdir():
            with suppress(OSError):  # it has ended
                numbers = (task / "schedstat").read_text().split()
                ran, waited = ran + int(numbers[0]), waited + int(numbers[1])
    except (OSError, ValueError, IndexError):
        return None
    return ran, waited


def _cores_are_short(before: tuple[int, int] | None, after: tuple[int, int] | None) -> bool:
    if before is not None and after is not None:
        ran, waited = (max(0, now - then) for now, then in zip(after, before, strict=True))
        return waited > WAITED * (ran + waited)
    try:
        return os.getloadavg()[0] > LOAD * (os.cpu_count() or 1)
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
