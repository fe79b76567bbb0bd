"""Training a command's runs with their progress shown, and the report about them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mixnorm_lab.cli.common import GOES_ON, INTERRUPTED, print_json, show_trace, typer
from mixnorm_lab.comparison import run
from mixnorm_lab.comparison.run import Compared, Machine
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.launch.display import RunDisplay
from mixnorm_lab.launch.one_run import Failure, Files
from mixnorm_lab.launch.suite import Suite


def run_and_report(
    configs: Sequence[RunConfig],
    root: Path,
    machine: Machine,
    files: Files,
    *,
    as_json: bool,
    title: str | None = None,
    report: bool = True,
    inside: bool = False,
) -> int:
    """Trains, shows what came out and writes the report, after Ctrl-C about what there is; returns the exit code."""
    if not machine.team.is_first:
        return _follow(configs, root, machine, files)
    compared = run.run(
        configs, root, machine, files, say=say, title=title, report=report, inside=inside,
        file=sys.stderr if as_json else None, on_interrupt=lambda: typer.echo(GOES_ON, err=True), on_failure=_tell,
    )  # fmt: skip
    if compared.outcome is not None:
        _show(compared, as_json)
    return INTERRUPTED if compared.interrupted else 2 if compared.failed else 0


def say(sentence: str) -> None:
    """Prints what is no result."""
    typer.echo(sentence, err=True)


def _follow(configs: Sequence[RunConfig], root: Path, machine: Machine, files: Files) -> int:
    """Trains in the other processes of torchrun, which show nothing but what goes wrong."""
    if not machine.team.from_first():
        return 2
    with Path(os.devnull).open("w") as nowhere, RunDisplay(file=nowhere) as display:
        failed = Suite(configs, root, files).run(device=machine.device, display=display, team=machine.team)
    _tell({f"process {machine.team.rank}, {name}": failure for name, failure in failed.items()})
    return 2 if failed else 0


def _tell(failed: Mapping[str, Failure]) -> None:
    """Prints a line for each reason why runs failed, with their names."""
    runs: dict[str, list[str]] = {}
    for name, failure in failed.items():
        show_trace(failure.trace)
        runs.setdefault(failure.sentence, []).append(name)
    for sentence, names in runs.items():
        typer.echo(f"{', '.join(names)}: {sentence}", err=True)


def _show(compared: Compared, as_json: bool) -> None:
    """Prints what came out: tables and sentences, or JSON."""
    root, page = compared.folder, compared.report
    if as_json:
        files = {"folder": str(root), "report": None if page is None else str(page)}
        print_json({"answers": compared.answers, "tables": [table.json() for table in compared.tables], **files})
        return
    from rich.console import Console

    console = Console()
    for table in compared.tables:
        console.print()
        console.print(table.rich(console.width))
    for sentence in compared.answers:
        console.print(f"\n{sentence}", highlight=False, markup=False)
    console.print(f"\nThe report is {page}" if page else f"\nThe records are in {root}", highlight=False, soft_wrap=True)
