"""The runs of a comparison, trained with their progress shown, and the report about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from mixnorm_lab import reports
from mixnorm_lab.comparison.inspection import inspect_run
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.launch.display import DownloadBar, RunDisplay
from mixnorm_lab.launch.one_run import Failure, Files
from mixnorm_lab.launch.ray_cluster import Cluster
from mixnorm_lab.launch.suite import Suite
from mixnorm_lab.own import functions
from mixnorm_lab.reports import Outcome
from mixnorm_lab.storage.folders import run_name
from mixnorm_lab.storage.records import Record
from mixnorm_lab.tables import Table
from mixnorm_lab.training.team import ALONE, Team

Say = Callable[[str], None]


@dataclass(frozen=True)
class Machine:
    """Where runs are trained.

    Args:
        device: the device that each run uses.
        here: the device of this process, which trains nothing itself if there is a cluster.
    """

    device: torch.device
    here: torch.device
    jobs: int = 1
    cluster: Cluster | None = None
    team: Team = ALONE


@dataclass(frozen=True, repr=False)
class Compared:
    """What came out of runs.

    Attributes:
        folder: that has the records.
        report: the path of report.html; None where no run finished an epoch, or none was asked for.
        answers: the sentences that say what came out.
        tables: what a terminal shows.
        records: of all runs, epoch by epoch.
        failed: why runs failed, by their names.
        interrupted: whether Ctrl-C ended it; the same call goes on.
    """

    folder: Path
    outcome: Outcome | None
    report: Path | None
    failed: Mapping[str, Failure]
    interrupted: bool = False

    @property
    def answers(self) -> list[str]:
        return [] if self.outcome is None else self.outcome.answers

    @property
    def tables(self) -> list[Table]:
        return [] if self.outcome is None else self.outcome.tables

    @property
    def records(self) -> Sequence[Record]:
        return () if self.outcome is None else self.outcome.records

    def __str__(self) -> str:
        told = [*self.answers, *([f"The report is {self.report}"] if self.report else [f"The records are in {self.folder}"])]
        return "\n".join(told)

    __repr__ = __str__  # in a notebook, too


def run(
    configs: Sequence[RunConfig],
    root: Path,
    machine: Machine,
    files: Files,
    *,
    say: Say,
    title: str | None = None,
    report: bool = True,
    inside: bool = False,
    file: IO[str] | None = None,
    on_interrupt: Callable[[], None] = lambda: None,
    on_failure: Callable[[Mapping[str, Failure]], None] = lambda _: None,
) -> Compared:
    """Trains what is not finished, and writes the report; after Ctrl-C, about what there is.

    Args:
        say: gets sentences that are no results.
        report, inside: whether to write a report, and to draw for it what the first mixture norm does.
        file: where the progress is shown.
    """
    checked = False
    try:
        _check_processes(configs, machine)
        suite = Suite(configs, root, files)
        with DownloadBar() as download:
            notes = suite.check(download.show, machine.team, machine.here)
        for note in notes:
            say(note)
        checked = True
    finally:
        machine.team.from_first(checked)
    failed: dict[str, Failure] = {}
    interrupted = False
    try:
        with RunDisplay([run_name(config) for config in configs], file=file) as display:
            failed = suite.run(
                device=machine.device, display=display, jobs=machine.jobs, cluster=machine.cluster, team=machine.team
            )
    except KeyboardInterrupt:
        interrupted = True
        on_interrupt()
    on_failure(failed)
    found = suite.recorded_now()
    if not any(record.epochs for record in found):
        return Compared(root, None, None, failed, interrupted)
    if inside:
        _look_inside(found, machine.here, files.data, say)
    outcome = reports.Outcome(found)
    page = reports.write(root, outcome, title=title) if report else None
    return Compared(root, outcome, page, failed, interrupted)


def _check_processes(configs: Sequence[RunConfig], machine: Machine) -> None:
    """Raises where other processes would not find a user's function."""
    if machine.jobs == 1 and machine.cluster is None:
        return
    hidden = [name for name in configs[0].own_functions if functions.only_here(name)]
    if hidden:
        names = ", ".join(name.partition(":")[2] for name in hidden)
        raise ValueError(
            f"{names} cannot be imported by the processes of jobs={machine.jobs}: put it in a module, such as my_module.py, "
            "or use jobs=1"
        )


def _look_inside(found: Sequence[Record], device: torch.device, data_folder: Path | None, say: Say) -> None:
    """Draws what the first mixture norm does, for the report; what goes wrong there does not concern the comparison."""
    run = next((record for record in found if record.config.mixture is not None and record.epochs), None)
    if run is None:
        return
    try:
        inspect_run(run, device, data_folder)
    except (ValueError, OSError, RuntimeError) as error:
        say(f"The densities could not be drawn: {error}")
