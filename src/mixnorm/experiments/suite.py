"""Many runs in one folder: what is done is skipped, what was interrupted goes on, several can run at once."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from mixnorm.data.download import Progress as Download
from mixnorm.experiments import build, gan, records
from mixnorm.experiments.config import RunConfig
from mixnorm.experiments.progress import UPDATE_SECONDS, Display, Progress
from mixnorm.experiments.records import Record
from mixnorm.experiments.train import stopped_by_sigterm, train
from mixnorm.experiments.watch import NotFinite

# Of one run: the others go on. An OSError is not among them: a full disk, or a folder in use, concerns them all.
MISTAKES = (ValueError, NotFinite)


@dataclass(frozen=True)
class Files:
    """Where things are that runs need: the official files of the data set (the cache, unless given), and for generators the
    network of the features: the folder of a classifier's run, or a file of weights."""

    data: Path | None = None
    features: Path | None = None


NO_FILES = Files()


@dataclass(frozen=True)
class Failure:
    """Why a run failed: the sentence for its user, and the traceback for whoever looks into it."""

    sentence: str
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        return cls(" ".join(str(error).split()), "".join(traceback.format_exception(error)))


def run_folder(root: Path, config: RunConfig) -> Path:
    return root / config.name / f"seed-{config.seed}"


def run_name(config: RunConfig) -> str:
    return f"{config.name} seed {config.seed}"


def check(configs: Sequence[RunConfig], root: Path, files: Files = NO_FILES, progress: Download | None = None) -> None:
    """Raises what can be known before any run starts: a folder of another configuration, data or a model that do not work.

    Downloads the data where the cache lacks it, and tells ``progress``.
    """
    todo = []
    for config in configs:
        record = recorded(config, root)
        if record is not None and record.config.identity() != config.identity():
            differences = "; ".join(record.config.differences(config))
            raise ValueError(
                f"{run_folder(root, config)} holds a run of another configuration ({differences}): choose another --out, or "
                "the settings of that run to go on with it"
            )
        if record is None or not record.finished:
            todo.append(config)
    different = {replace(config, name="", seed=0).identity(): config for config in todo}
    classifiers = [config for config in different.values() if config.gan is None]
    build.check(classifiers, files.data, progress)
    for config in different.values():
        if config.gan is not None:
            gan.check(config, files.features)


def run_all(
    configs: Sequence[RunConfig],
    root: Path,
    *,
    device: torch.device,
    display: Display,
    files: Files = NO_FILES,
    jobs: int = 1,
) -> dict[str, Failure]:
    """Trains every configuration in its own folder below ``root``; returns the runs that failed, and why.

    ``jobs`` is how many run at once, in as many processes; on a CPU they share its cores.
    """
    todo = []
    for config in configs:
        record = recorded(config, root)
        if record is None or not record.finished:
            todo.append(config)
        else:
            progress = display.run(run_name(config))
            progress.start(config.name, config.epochs, 1, done=config.epochs)
            progress.epoch(record.epochs[-1])
            progress.end("finished")
    if jobs > 1 and len(todo) > 1:
        return _at_once(todo, root, device, display, files, min(jobs, len(todo)))
    failed = {}
    for config in todo:
        failure = _train(config, root, device, files, display.run(run_name(config)))
        if failure is not None:
            failed[run_name(config)] = failure
    return failed


def recorded(config: RunConfig, root: Path) -> Record | None:
    """The record of this run as far as it came."""
    path = run_folder(root, config) / records.NAME
    return records.read(path) if path.exists() and b"\n" in path.read_bytes() else None


def _train(config: RunConfig, root: Path, device: torch.device, files: Files, progress: Progress) -> Failure | None:
    try:
        with build.explained(config):
            folder = run_folder(root, config)
            if config.gan is not None:
                gan.train_prepared(
                    config, folder, device=device, features=files.features, data_folder=files.data, progress=progress
                )
                return None
            try:
                model, source = build.prepare(config, device, files.data)
            except BaseException:
                progress.end("failed")
                raise
            train(config, folder, model=model, source=source, device=device, progress=progress)
    except MISTAKES as error:
        return Failure.of(error)
    return None


class _Forwarded:
    """Progress that another process shows. A step is told now and then: it may take less time than the telling."""

    def __init__(self, parent: Any) -> None:
        self.parent = parent
        self.next_step = 0.0

    def start(self, name: str, epochs: int, steps: int, done: int) -> None:
        self.parent.send(("start", (name, epochs, steps, done)))

    def step(self, done: int) -> None:
        now = time.monotonic()
        if now >= self.next_step:
            self.next_step = now + UPDATE_SECONDS
            self.parent.send(("step", (done,)))

    def epoch(self, row: Mapping[str, Any]) -> None:
        self.parent.send(("epoch", (dict(row),)))

    def end(self, reason: str) -> None:
        self.parent.send(("end", (reason,)))


def _work(root: Path, device: torch.device, files: Files, threads: int, parent: Any) -> None:
    """What a process does: the runs that it is sent, one after the other, until it is sent None."""
    torch.set_num_threads(threads)
    for config in iter(parent.recv, None):
        try:
            failure = _train(config, root, device, files, _Forwarded(parent))
        except OSError as error:
            parent.send(("stop", Failure.of(error)))
            return
        parent.send(("done", failure))


class _Worker:
    """A process, and the run that it has at the moment."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")  # a GPU does not survive a fork
        self.messages, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(*arguments, theirs))  # it may have some of its own
        with _deaf_to_ctrl_c():
            self.process.start()
        theirs.close()
        self.run: str | None = None

    def begin(self, config: RunConfig | None) -> None:
        self.run = None if config is None else run_name(config)
        with suppress(BrokenPipeError):  # who reads its messages hears that it is no more
            self.messages.send(config)

    def receive(self) -> tuple[str, Any]:
        """What it tells, or that it died."""
        try:
            return self.messages.recv()
        except (EOFError, ConnectionResetError):  # killed, perhaps for its memory
            self.process.join()
            why = f"its process ended with code {self.process.exitcode}: run the command again to go on"
            return "died", Failure(why, "")

    def end(self) -> None:
        """Waits for it, and reads what it still sends, so that it need not wait for a reader."""
        with suppress(EOFError, OSError):
            while True:
                self.messages.recv()
        self.process.join()


def _at_once(
    todo: Sequence[RunConfig], root: Path, device: torch.device, display: Display, files: Files, jobs: int
) -> dict[str, Failure]:
    threads = max(1, torch.get_num_threads() // jobs)
    waiting, failed, workers = deque(todo), {}, []

    def next_run(worker: _Worker | None) -> None:
        """Gives a worker, or a new one, the run that comes next."""
        if worker is None and waiting:
            worker = _Worker(root, device, files, threads)
            workers.append(worker)
        if worker is not None:
            worker.begin(waiting.popleft() if waiting else None)

    with stopped_by_sigterm():
        try:
            for _ in range(jobs):
                next_run(None)
            while busy := {worker.messages: worker for worker in workers if worker.run is not None}:
                for ready in connection.wait(list(busy)):
                    worker = busy[ready]  # type: ignore[index]
                    progress, (what, values) = display.run(str(worker.run)), worker.receive()
                    if what == "stop":
                        raise OSError(values.sentence) from RuntimeError(values.trace)
                    if what not in ("done", "died"):
                        getattr(progress, what)(*values)
                        continue
                    if values is not None:
                        failed[str(worker.run)] = values
                    if what == "died":
                        progress.end("failed")
                        worker.run = None
                    next_run(worker if what == "done" else None)
        finally:
            for worker in workers:
                worker.process.terminate()  # as Ctrl-C: what is done is kept
            for worker in workers:
                worker.end()
    return failed


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """A process that starts here does not hear Ctrl-C, which a terminal sends to all: this one then ends it."""
    if threading.current_thread() is not threading.main_thread():  # the only one that may set a handler
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
