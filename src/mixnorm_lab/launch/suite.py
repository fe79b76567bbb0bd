"""Many runs in one folder: what is done is skipped, what was interrupted goes on, several can run at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.data.download import DownloadProgress
from mixnorm_lab.generators import gan
from mixnorm_lab.launch.display import RunDisplay
from mixnorm_lab.launch.local_processes import run_in_processes
from mixnorm_lab.launch.one_run import NO_FILES, Failure, Files, Place, train_one
from mixnorm_lab.launch.ray_cluster import Cluster
from mixnorm_lab.launch.run_queue import RunQueue
from mixnorm_lab.storage.folders import recorded, run_folder, run_name
from mixnorm_lab.training import build
from mixnorm_lab.training.team import ALONE, Team


def check(
    configs: Sequence[RunConfig],
    root: Path,
    files: Files = NO_FILES,
    progress: DownloadProgress | None = None,
    team: Team = ALONE,
) -> None:
    """Raises what can be known before any run starts: a folder of another configuration, data or a model that do not work.

    Downloads the data where the cache lacks it, and tells ``progress``.
    """
    todo = []
    for config in configs:
        build.check_shared(config, team)
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
    display: RunDisplay,
    files: Files = NO_FILES,
    jobs: int = 1,
    cluster: Cluster | None = None,
    team: Team = ALONE,
) -> dict[str, Failure]:
    """Trains every configuration in its own folder below ``root``; returns the runs that failed, and why.

    ``jobs`` is how many run at once, in as many processes; on a CPU they share its cores. With a ``cluster`` each runs where
    a GPU, or a core, is free. A run that loses its process goes on in another one. A ``team`` does each run together.
    """
    todo = []
    for config in configs:
        record = recorded(config, root)
        if record is None or not record.finished or team.size > 1:  # whose first rank tells the others
            todo.append(config)
        else:
            progress, last = display.run(run_name(config)), record.epochs[-1]
            progress.start(config.name, config.epochs, last["steps"] // last["epoch"], done=config.epochs)
            progress.epoch(last)
            progress.end("finished")
    queue, place = RunQueue(todo, display), Place(root, device, files)
    if cluster is not None:
        cluster.run(queue, place)
    elif jobs > 1 and len(todo) > 1:
        run_in_processes(queue, place, min(jobs, len(todo)))
    else:
        while (next_one := queue.next()) is not None:
            queue.heard(next_one, "done", train_one(next_one, place, display.run(run_name(next_one)), team))
    return queue.failed
