"""Many runs in one folder: what is done is skipped, what was interrupted goes on, several can run at once."""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mixnorm.experiments import build, records
from mixnorm.experiments.config import RunConfig
from mixnorm.experiments.progress import Display, Progress
from mixnorm.experiments.records import Record
from mixnorm.experiments.train import train
from mixnorm.experiments.watch import NotFinite

POLL_SECONDS = 0.1
MISTAKES = (ValueError, OSError, NotFinite)  # of one run: the others go on


def run_folder(root: Path, config: RunConfig) -> Path:
    return root / config.name / f"seed-{config.seed}"


def run_name(config: RunConfig) -> str:
    return f"{config.name} seed {config.seed}"


def run_all(
    configs: Sequence[RunConfig],
    root: Path,
    *,
    device: torch.device,
    display: Display,
    data_folder: Path | None = None,
    jobs: int = 1,
) -> dict[str, str]:
    """Trains every configuration in its own folder below ``root``; returns the runs that failed, and why.

    ``jobs`` is how many run at once, each in a process of its own; on a CPU they share its cores.
    """
    check(configs, root)
    todo = []
    for config in configs:
        done = finished(config, root)
        if done is None:
            todo.append(config)
        else:
            progress = display.run(run_name(config))
            progress.start(config.name, config.epochs, 1, done=config.epochs)
            progress.epoch(done.epochs[-1])
            progress.end("finished")
    if jobs > 1 and len(todo) > 1:
        return _at_once(todo, root, device, display, data_folder, min(jobs, len(todo)))
    failed = {}
    for config in todo:
        try:
            _train(config, root, device, data_folder, display.run(run_name(config)))
        except MISTAKES as error:
            failed[run_name(config)] = str(error)
    return failed


def check(configs: Sequence[RunConfig], root: Path) -> None:
    """Raises for a folder of another configuration before any run starts."""
    for config in configs:
        record = recorded(config, root)
        if record is not None and record.config.identity() != config.identity():
            differences = "; ".join(record.config.differences(config))
            raise ValueError(
                f"{run_folder(root, config)} holds a run of another configuration ({differences}): choose another --out, or "
                "the settings of that run to go on with it"
            )


def finished(config: RunConfig, root: Path) -> Record | None:
    """The record of this run, if it is done."""
    record = recorded(config, root)
    return record if record is not None and record.finished else None


def recorded(config: RunConfig, root: Path) -> Record | None:
    """The record of this run as far as it came."""
    path = run_folder(root, config) / records.NAME
    return records.read(path) if path.exists() and b"\n" in path.read_bytes() else None


def _train(config: RunConfig, root: Path, device: torch.device, data_folder: Path | None, progress: Progress) -> None:
    model, source = build.prepare(config, device, data_folder)
    train(config, run_folder(root, config), model=model, source=source, device=device, progress=progress)


class _Forwarded:
    """Progress that another process shows."""

    def __init__(self, messages: Any, name: str) -> None:
        self.messages, self.name = messages, name

    def _send(self, what: str, *values: Any) -> None:
        self.messages.put((self.name, what, values))

    def start(self, name: str, epochs: int, steps: int, done: int) -> None:
        self._send("start", name, epochs, steps, done)

    def step(self, done: int) -> None:
        self._send("step", done)

    def epoch(self, row: Mapping[str, Any]) -> None:
        self._send("epoch", dict(row))

    def end(self, reason: str) -> None:
        self._send("end", reason)


def _worker(
    config: RunConfig, root: Path, device: torch.device, data_folder: Path | None, threads: int, messages: Any
) -> None:
    torch.set_num_threads(threads)
    try:
        _train(config, root, device, data_folder, _Forwarded(messages, run_name(config)))
    except MISTAKES as error:
        messages.put((run_name(config), "failed", (str(error),)))


def _at_once(
    todo: Sequence[RunConfig], root: Path, device: torch.device, display: Display, data_folder: Path | None, jobs: int
) -> dict[str, str]:
    context = multiprocessing.get_context("spawn")  # a GPU does not survive a fork
    messages: Any = context.Queue()
    threads = max(1, (os.cpu_count() or 1) // jobs)
    waiting = deque(todo)
    running: dict[str, Any] = {}
    failed: dict[str, str] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                config = waiting.popleft()
                process = context.Process(target=_worker, args=(config, root, device, data_folder, threads, messages))
                process.start()
                running[run_name(config)] = process
            ended = [name for name, process in running.items() if not process.is_alive()]
            _show(messages, display, failed)
            for name in ended:
                code = running.pop(name).exitcode
                if code:
                    failed.setdefault(name, f"its process ended with code {code}: run the command again to go on with it")
    finally:
        for process in running.values():
            process.terminate()  # as Ctrl-C: what is done is kept
        for process in running.values():
            process.join()
    _show(messages, display, failed)
    return failed


def _show(messages: Any, display: Display, failed: dict[str, str]) -> None:
    """Shows what the processes sent, and waits a moment for it."""
    wait = POLL_SECONDS
    while True:
        try:
            name, what, values = messages.get(timeout=wait)
        except queue.Empty:
            return
        wait = 0.001
        if what == "failed":
            failed[name] = values[0]
        else:
            getattr(display.run(name), what)(*values)
