"""Many runs over the machines of a Ray cluster: each where a GPU, or a core, is free; again, if its machine is lost."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.launch.one_run import Files, Place, attempt
from mixnorm_lab.launch.run_queue import RunQueue
from mixnorm_lab.storage.folders import run_folder, run_name
from mixnorm_lab.storage.lock import wait_until_free
from mixnorm_lab.storage.signals import stopped_by_sigterm

POLL_SECONDS = 0.2
ANSWER_SECONDS = 10.0
STOP_SECONDS = 60.0  # that runs have to write down how far they came, after Ctrl-C
OBJECT_STORE = 100_000_000  # bytes of memory, for messages alone
FREE_SECONDS = 120.0  # until a file system has noticed that a machine which held a lock is gone


@contextmanager
def connected(address: str | None) -> Iterator[Cluster]:
    """The cluster at an address ("auto" is the one of this machine), or a new one of this machine's GPUs and cores alone."""
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError(
            "--engine ray needs Ray: install the extra, pip install '.[ray]' from a checkout of mixnorm"
        ) from None
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is None:
        address, options = "local", options | {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
    try:
        host, _, port = address.rpartition(":")
        if port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
        ray.init(address, **options)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise OSError(
            f"Ray does not answer at {address} ({reason}): start it with ray start --head, or leave --address out to use "
            "this machine alone"
        ) from error
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


class Cluster:
    """A Ray cluster that this process is connected to. All its machines must see the folder of the runs, and the data."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray

    def device(self, wanted: str) -> torch.device:
        """What each run has one of: "auto" is a GPU where the cluster has some."""
        has_gpus = self.ray.cluster_resources().get("GPU", 0) >= 1
        if wanted not in ("auto", "cuda", "cpu"):
            raise ValueError(f"--device {wanted} is not for Ray, which chooses the GPUs: use auto, cuda or cpu")
        if wanted == "cuda" and not has_gpus:
            raise ValueError("--device cuda: the Ray cluster has no GPU; use cpu")
        return torch.device("cuda" if has_gpus and wanted != "cpu" else "cpu")

    def run(self, queue: RunQueue, place: Place) -> None:
        """Does all runs of the queue. Ray has them all at once, and begins one whenever there is room."""
        ray = self.ray
        own_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )  # where this process is: were the messages' machine lost, all would be
        inbox = ray.remote(_Inbox).options(num_cpus=0, scheduling_strategy=own_node).remote()
        gpus = 1 if place.device.type == "cuda" else 0
        task = ray.remote(_run).options(num_cpus=1, num_gpus=gpus, max_retries=0)  # the queue says what is done again
        place = replace(place, root=place.root.resolve(), files=_resolved(place.files))
        configs: dict[str, RunConfig] = {}
        running: dict[Any, str] = {}

        def begin() -> None:
            while (config := queue.next()) is not None:
                name = run_name(config)
                running[task.remote(config, place, str(Path.cwd()), inbox, name in configs)] = name
                configs[name] = config

        def hear() -> None:
            for name, what, values in ray.get(inbox.take.remote()):
                queue.heard(configs[name], what, values)

        with stopped_by_sigterm():
            try:
                begin()
                while running:
                    ended, _ = ray.wait(list(running), num_returns=len(running), timeout=POLL_SECONDS)
                    hear()
                    for run in ended:
                        queue.heard(configs[running.pop(run)], *self._outcome(run))
                    begin()
            finally:
                self._stop(list(running))

    def _outcome(self, run: Any) -> tuple[str, Any]:
        exceptions = self.ray.exceptions
        try:
            return self.ray.get(run)
        except exceptions.RayTaskError as error:  # what no user can mend
            raise error.as_instanceof_cause() from error
        except exceptions.RayError as error:
            return "lost", f"its process was lost ({type(error).__name__})"

    def _stop(self, runs: list[Any]) -> None:
        """As Ctrl-C: what is done is kept."""
        for run in runs:
            self.ray.cancel(run)
        if runs:
            self.ray.wait(runs, num_returns=len(runs), timeout=STOP_SECONDS)


class _Inbox:
    """An actor that keeps what runs tell until it is fetched."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str, Any]] = []

    def put(self, *message: Any) -> None:
        self.messages.append(message)  # type: ignore[arg-type]

    def take(self) -> list[tuple[str, str, Any]]:
        taken, self.messages = self.messages, []
        return taken


def _run(config: RunConfig, place: Place, folder: str, inbox: Any, again: bool) -> tuple[str, Any]:
    """A task: one run, somewhere on the cluster."""
    import ray

    torch.set_num_threads(1)
    with suppress(FileNotFoundError):  # a user's own models and data are looked for there; others do without
        os.chdir(folder)
    if again:
        wait_until_free(run_folder(place.root, config), FREE_SECONDS)

    def send(what: str, values: Any) -> None:
        sent = inbox.put.remote(run_name(config), what, values)
        if what == "end":  # all messages are there when the task is done
            ray.get(sent)

    return attempt(config, place, send)


def _resolved(files: Files) -> Files:
    return Files(*(None if path is None else path.resolve() for path in (files.data, files.features)))
