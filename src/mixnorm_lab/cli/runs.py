"""Training a command's runs with their progress shown, and the report about them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from mixnorm_lab import reports
from mixnorm_lab.cli.common import GOES_ON, INTERRUPTED, print_json, show_trace, typer
from mixnorm_lab.cli.engines import Engine
from mixnorm_lab.cli.results import inspect_run
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.launch.display import DownloadBar, RunDisplay
from mixnorm_lab.launch.one_run import Failure, Files
from mixnorm_lab.launch.suite import Suite
from mixnorm_lab.reports import Outcome
from mixnorm_lab.storage.folders import run_name
from mixnorm_lab.storage.records import Record


def run_and_report(
    configs: Sequence[RunConfig],
    root: Path,
    engine: Engine,
    files: Files,
    *,
    as_json: bool,
    title: str | None = None,
    report: bool = True,
    inside: bool = False,
) -> int:
    """Trains, shows what came out and writes the report, after Ctrl-C about what there is; returns the exit code."""
    if not engine.team.is_first:
        return _follow(configs, root, engine, files)
    code = 0
    failed: dict[str, Failure] = {}
    checked = False
    try:
        suite = Suite(configs, root, files)
        with DownloadBar() as download:
            suite.check(download.show, engine.team)
        checked = True
    finally:
        engine.team.from_first(checked)
    try:
        with RunDisplay([run_name(config) for config in configs], file=sys.stderr if as_json else None) as display:
            failed = suite.run(
                device=engine.device, display=display, jobs=engine.jobs, cluster=engine.cluster, team=engine.team
            )
    except KeyboardInterrupt:
        code = INTERRUPTED
        typer.echo(GOES_ON, err=True)
    _tell(failed)
    found = suite.recorded_now()
    if any(record.epochs for record in found):
        if inside:
            _look_inside(found, engine.here, files.data)
        outcome = reports.Outcome(found)
        page = reports.write(root, outcome, title=title) if report else None
        _show(outcome, page, root, as_json)
    return code or (2 if failed else 0)


def _follow(configs: Sequence[RunConfig], root: Path, engine: Engine, files: Files) -> int:
    """Trains in the other processes of torchrun, which show nothing but what goes wrong."""
    if not engine.team.from_first():
        return 2
    with Path(os.devnull).open("w") as nowhere, RunDisplay(file=nowhere) as display:
        failed = Suite(configs, root, files).run(device=engine.device, display=display, team=engine.team)
    _tell({f"process {engine.team.rank}, {name}": failure for name, failure in failed.items()})
    return 2 if failed else 0


def _look_inside(found: Sequence[Record], device: torch.device, data_folder: Path | None) -> None:
    """Draws what the first mixture norm does, for the report; what goes wrong there does not concern the comparison."""
    run = next((record for record in found if record.config.mixture is not None and record.epochs), None)
    if run is None:
        return
    try:
        inspect_run(run, device, data_folder)
    except (ValueError, OSError, RuntimeError) as error:
        typer.echo(f"The densities could not be drawn: {error}", err=True)


def _tell(failed: Mapping[str, Failure]) -> None:
    """Prints a line for each reason why runs failed, with their names."""
    runs: dict[str, list[str]] = {}
    for name, failure in failed.items():
        show_trace(failure.trace)
        runs.setdefault(failure.sentence, []).append(name)
    for sentence, names in runs.items():
        typer.echo(f"{', '.join(names)}: {sentence}", err=True)


def _show(outcome: Outcome, page: Path | None, root: Path, as_json: bool) -> None:
    """Prints what came out: tables and sentences, or JSON."""
    if as_json:
        files = {"folder": str(root), "report": None if page is None else str(page)}
        print_json({"answers": outcome.answers, "tables": [table.json() for table in outcome.tables], **files})
        return
    from rich.console import Console

    console = Console()
    for table in outcome.tables:
        console.print()
        console.print(table.rich(console.width))
    for sentence in outcome.answers:
        console.print(f"\n{sentence}", highlight=False, markup=False)
    console.print(f"\nThe report is {page}" if page else f"\nThe records are in {root}", highlight=False, soft_wrap=True)
