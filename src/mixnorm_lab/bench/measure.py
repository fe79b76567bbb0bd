"""Time and memory of steps, in turns: what disturbs one variant disturbs the others as well, so that ratios hold.

On a GPU a sample is a stretch of calls between two events. A case whose tensors fit into the L2 cache (60 MB on an H200) is
measured with a warm cache, for every variant alike, as a layer meets the activation that was written just before it.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

import numpy as np
import torch

Step = Callable[[], None]
Key = TypeVar("Key")

WARMUP_CALLS = 3
GPU_SAMPLES, GPU_SAMPLE_MS, GPU_WARMUP_MS = 25, 4.0, 40.0
CPU_ROUNDS, CPU_REPEATS, CPU_ROW_SECONDS, CPU_CASE_SECONDS = 12, 10, 0.5, 5.0
QUICK_SAMPLES, QUICK_SAMPLE_MS = 5, 0.5
QUICK_CPU_ROUNDS, QUICK_CPU_REPEATS, QUICK_CPU_SECONDS = 4, 3, 2.0
LEAST_ROUNDS = 5  # before a deadline counts


class Captured:
    """A step in a CUDA graph. It holds the step as well, whose tensors the graph writes to."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compilation, handles and workspaces come into being before the capture
            for _ in range(WARMUP_CALLS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        try:
            with torch.cuda.graph(self.graph, stream=stream):
                step()
        except BaseException:
            torch.cuda.set_stream(torch.cuda.default_stream())  # a capture that fails does not put it back
            raise

    def __call__(self) -> None:
        self.graph.replay()


def prepare(step: Step, mode: str) -> Step:
    """The step, run a few times so that everything is compiled, as it is timed in this mode."""
    if mode == "graph":
        return Captured(step)
    for _ in range(WARMUP_CALLS):
        step()
    return step


def alternate(steps: Mapping[Key, Step], device: str, *, quick: bool, deadline: float) -> dict[Key, list[float]]:
    """Milliseconds of a call, many samples of each step. After ``deadline`` (time.monotonic) a few samples are enough."""
    if not steps:
        return {}
    with without_garbage_collection():
        if device == "cuda":
            return _alternate_gpu(steps, quick=quick, deadline=deadline)
        return _alternate_cpu(steps, quick=quick, deadline=deadline)


def _alternate_gpu(steps: Mapping[Key, Step], *, quick: bool, deadline: float) -> dict[Key, list[float]]:
    samples, sample_ms = (QUICK_SAMPLES, QUICK_SAMPLE_MS) if quick else (GPU_SAMPLES, GPU_SAMPLE_MS)
    repeats = {}
    for key, step in steps.items():
        once = max(gpu_time(step, 3), 1e-3)
        gpu_time(step, math.ceil(min(GPU_WARMUP_MS, 10 * sample_ms) / once))  # until the clock is up
        repeats[key] = math.ceil(sample_ms / max(gpu_time(step, 5), 1e-3))
    times: dict[Key, list[float]] = {key: [] for key in steps}
    for number in range(samples):
        if number >= LEAST_ROUNDS and time.monotonic() > deadline:
            break
        for key, step in steps.items():
            times[key].append(gpu_time(step, repeats[key]))
    return times


def gpu_time(step: Step, calls: int) -> float:
    """Milliseconds a call, over a stretch of calls that starts on an idle GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def _alternate_cpu(steps: Mapping[Key, Step], *, quick: bool, deadline: float) -> dict[Key, list[float]]:
    """Each step runs several times in a row, the first few not counted: so a layer meets a warm allocator in training."""
    once = sum(cpu_time(step) for step in steps.values()) / 1e3
    most, least, limit, seconds = CPU_ROUNDS, 3, CPU_REPEATS, CPU_CASE_SECONDS
    if quick:
        most, least, limit, seconds = QUICK_CPU_ROUNDS, 2, QUICK_CPU_REPEATS, QUICK_CPU_SECONDS
    repeats = max(1, min(limit, int(CPU_ROW_SECONDS / once)))
    uncounted = 1 if quick else min(3, repeats)
    rounds = max(least, min(most, int(seconds / (once * (repeats + uncounted)))))
    times: dict[Key, list[float]] = {key: [] for key in steps}
    for number in range(rounds):
        if number > 0 and time.monotonic() > deadline:
            break
        for key, step in steps.items():
            for _ in range(uncounted):
                step()
            times[key] += [cpu_time(step) for _ in range(repeats)]
    return times


def cpu_time(step: Step) -> float:
    start = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - start)


def percentiles(times: list[float]) -> tuple[float, float, float]:
    """The median, and what 20% and 80% of the samples stay under."""
    p20, median, p80 = np.percentile(times, (20, 50, 80)).tolist()
    return median, p20, p80


def gpu_peak_memory(step: Step) -> int:
    """Bytes that one eager call of the step takes at its peak, beyond what is there before it."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth(device: str, *, quick: bool) -> float:
    """Bytes a second, read and written, of a copy that is large beside every cache."""
    size = 2**22 if quick else 2**30 if device == "cuda" else 2**26
    source = torch.rand(size // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copy()
    times = [gpu_time(copy, 5) if device == "cuda" else cpu_time(copy) for _ in range(3 if quick else 11)]
    return 2 * size / (percentiles(times)[0] / 1e3)


def free_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        with suppress(RuntimeError):  # after a kernel that went astray every call fails; the rows say so, this need not
            torch.cuda.empty_cache()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A collection in the middle of a sample would count for the variant that happens to trigger it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
