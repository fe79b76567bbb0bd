"""Several runs at once on this machine, in a process each. One that is killed is replaced, and its run goes on."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from typing import Any

import torch

from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.launch.one_run import Place, attempt
from mixnorm_lab.launch.run_queue import RunQueue
from mixnorm_lab.storage.signals import stopped_by_sigterm

PATIENCE = 10.0  # seconds that a process has to end by itself, once there is nothing left to do


def run_in_processes(queue: RunQueue, place: Place, jobs: int) -> None:
    """Does all runs of the queue, ``jobs`` at once; on a CPU they share its cores."""
    threads = max(1, torch.get_num_threads() // jobs)
    workers: list[_Worker] = []

    def next_run(worker: _Worker | None) -> None:
        """Gives a worker, or a new one, the run that comes next."""
        if worker is None and queue:
            worker = _Worker(place, threads)
            workers.append(worker)
        if worker is not None:
            config = queue.next()
            worker.begin(config)
            if config is not None:
                queue.begins(config)

    with stopped_by_sigterm():
        try:
            for _ in range(jobs):
                next_run(None)
            while busy := {worker.messages: worker for worker in workers if worker.run is not None}:
                for ready in connection.wait(list(busy)):
                    worker = busy[ready]  # type: ignore[index]
                    assert worker.run is not None
                    what, values = worker.receive()
                    queue.heard(worker.run, what, values)
                    if what == "lost":
                        worker.run = None
                        next_run(None)
                    elif what == "done":
                        next_run(worker)
        finally:
            for worker in workers:
                if worker.run is None:
                    worker.process.join(PATIENCE)  # it tidies up after its compiler, and is not to be disturbed
                worker.process.terminate()  # as Ctrl-C: what is done is kept
            for worker in workers:
                worker.end()


def _work(place: Place, threads: int, parent: Any) -> None:
    """What a process does: the runs that it is sent, one after the other, until it is sent None."""
    torch.set_num_threads(threads)
    for config in iter(parent.recv, None):
        message = attempt(config, place, lambda what, values: parent.send((what, values)))
        parent.send(message)
        if message[0] == "stop":
            return


class _Worker:
    """A process, and the run that it has at the moment."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")  # a GPU does not survive a fork
        self.messages, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(*arguments, theirs))  # it may have some of its own
        with _deaf_to_ctrl_c():
            self.process.start()
        theirs.close()
        self.run: RunConfig | None = None

    def begin(self, config: RunConfig | None) -> None:
        self.run = config
        with suppress(BrokenPipeError):  # who reads its messages hears that it is no more
            self.messages.send(config)

    def receive(self) -> tuple[str, Any]:
        """What it tells, or that it is lost."""
        try:
            return self.messages.recv()
        except (EOFError, OSError):  # killed, perhaps for its memory, and perhaps in the middle of a message
            self.process.join()
            return "lost", f"its process ended with code {self.process.exitcode}"

    def end(self) -> None:
        """Waits for it, and reads what it still sends, so that it need not wait for a reader."""
        with suppress(EOFError, OSError):
            while True:
                self.messages.recv()
        self.process.join()


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
