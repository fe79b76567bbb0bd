"""Many runs in one folder: what is done is skipped, what was interrupted goes on, several can run at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.data.download import DownloadProgress
from mixnorm_lab.generators import build as gan_build
from mixnorm_lab.launch.display import RunDisplay
from mixnorm_lab.launch.local_processes import run_in_processes
from mixnorm_lab.launch.one_run import NO_FILES, Failure, Files, Place, train_one
from mixnorm_lab.launch.ray_cluster import Cluster
from mixnorm_lab.launch.run_queue import RunQueue
from mixnorm_lab.own.sources import changed
from mixnorm_lab.storage.folders import check_writable, recorded, run_folder, run_name
from mixnorm_lab.storage.records import Record
from mixnorm_lab.training import build
from mixnorm_lab.training.run import show_finished
from mixnorm_lab.training.team import ALONE, Team


class Suite:
    """The runs of a command in one folder.

    Args:
        root: the folder below which each has its own.

    Attributes:
        records: for each run the record that it had when it was looked at last, or None. The record of a finished run does
            not change any more, and is read once.
    """

    def __init__(self, configs: Sequence[RunConfig], root: Path, files: Files = NO_FILES) -> None:
        self.configs = configs
        self.root = root
        self.files = files
        self.records = [recorded(config, root) for config in configs]

    def check(
        self, progress: DownloadProgress | None = None, team: Team = ALONE, here: torch.device | None = None
    ) -> list[str]:
        """Raises what can be known before any run starts: a folder of another configuration, data or a model that do not
        work. Returns what a user should know of the mixtures.

        Downloads the data where the cache lacks it, and tells ``progress``.
        """
        todo = []
        for config, record in zip(self.configs, self.records, strict=True):
            build.check_shared(config, team)
            if record is not None and record.config.identity() != config.identity():
                if replace(record.config, sources=config.sources).identity() == config.identity():
                    files = changed(record.config.sources, config.sources)
                    raise ValueError(
                        f"{files} changed since the runs in {self.root}, which are kept: choose another --out for new ones"
                    )
                differences = "; ".join(record.config.differences(config))
                raise ValueError(
                    f"{run_folder(self.root, config)} holds a run of another configuration ({differences}): choose another "
                    "--out, or the settings of that run to go on with it"
                )
            if record is None or not record.finished:
                todo.append(config)
        if todo:
            check_writable(self.root)
        different = {replace(config, name="", seed=0).identity(): config for config in todo}
        classifiers = [config for config in different.values() if config.gan is None]
        notes = build.check(classifiers, self.files.data, progress, here or build.CPU)
        for config in different.values():
            if config.gan is not None:
                gan_build.check(config, self.files.features)
        return notes

    def run(
        self,
        *,
        device: torch.device,
        display: RunDisplay,
        jobs: int = 1,
        cluster: Cluster | None = None,
        team: Team = ALONE,
    ) -> dict[str, Failure]:
        """Trains every run that is not finished; returns those that failed, and why.

        ``jobs`` is how many run at once, in as many processes; on a CPU they share its cores. With a ``cluster`` each runs
        where a GPU, or a core, is free. A run that loses its process goes on in another one. A ``team`` does each run
        together.
        """
        todo = []
        for config, record in zip(self.configs, self.records, strict=True):
            if record is None or not record.finished or team.size > 1:  # whose first rank tells the others
                todo.append(config)
            else:
                progress = display.run(run_name(config))
                show_finished(record, progress)
                progress.end("finished")
        several = cluster is None and jobs > 1 and len(todo) > 1
        queue, place = RunQueue(todo, display), Place(self.root, device, self.files, shared=several)
        if cluster is not None:
            cluster.run(queue, place)
        elif several:
            run_in_processes(queue, place, min(jobs, len(todo)))
        else:
            while (next_one := queue.next()) is not None:
                queue.heard(next_one, "done", train_one(next_one, place, display.run(run_name(next_one)), team))
        return queue.failed

    def recorded_now(self) -> list[Record]:
        """The records that there are, of runs that were trained meanwhile as well."""
        for number, (config, record) in enumerate(zip(self.configs, self.records, strict=True)):
            if record is None or not record.finished:
                self.records[number] = recorded(config, self.root)
        return [record for record in self.records if record is not None]
