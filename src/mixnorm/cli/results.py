"""``mixnorm report``, ``inspect`` and ``data``: commands that look at what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from mixnorm import data as data_sets
from mixnorm import reports
from mixnorm.cli.common import DataFolder, Debug, Device, Json, choose_device, mistakes, print_json, typer
from mixnorm.experiments import records
from mixnorm.reports.comparison import answers
from mixnorm.reports.groups import families
from mixnorm.reports.tables import accuracies, speed


def report(
    folder: Annotated[Path, typer.Argument(help="A folder with runs, at any depth.", metavar="DIR")],
    title: Annotated[str | None, typer.Option("--title")] = None,
    bench: Annotated[Path | None, typer.Option("--bench", help="A CSV of mixnorm bench cost, for the cost table.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Tables, pictures and one page from the records of runs.

    Example: mixnorm report runs/reproduce --bench bench.csv
    """
    with mistakes():
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}: mixnorm compare or mixnorm reproduce makes one")
        found = records.find(folder)
        page = reports.write(folder, found, title=title, bench=bench)
        groups = families(found)
    if as_json:
        tables = [make(family).json() for family in groups for make in (accuracies, speed)]
        print_json({"answers": answers(groups), "tables": tables, "report": str(page)})
        return
    for sentence in answers(groups):
        typer.echo(sentence)
    typer.echo(f"The report is {page}")


def data(
    name: Annotated[str, typer.Argument(help="digits, cifar10 or cifar100.")],
    folder: DataFolder = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """A data set: downloads it into the cache unless it is there, checks it, and says what it holds.

    Example: mixnorm data cifar10

    Example: mixnorm data cifar10 --data ~/cifar-10-batches-py
    """
    with mistakes(), _Download() as download:
        found = data_sets.prepare(name, folder, download.show)
    rows = data_sets.describe(found)
    if as_json:
        print_json(dict(rows))
        return
    width = max(len(key) for key, _ in rows)
    for key, value in rows:
        typer.echo(f"{key:{width}}  {value}")


class _Download:
    """A bar while something is downloaded, on stderr."""

    def __enter__(self) -> _Download:
        self.bar: Any = None
        return self

    def show(self, done: int, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        if self.bar is None:
            columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self.bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("download", total=total)
        self.bar.update(self.task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def inspect(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, or of several.", metavar="RUN")],
    layer: Annotated[
        str | None, typer.Option("--layer", help="The norm to look at; the first mixture norm, unless given.")
    ] = None,
    data: DataFolder = None,
    out: Annotated[Path | None, typer.Option("--out", help="For the pictures; the run's folder, unless given.")] = None,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """What the norms see and do: densities with their components, how the components evolve, how many are in use.

    Example: mixnorm inspect runs/digits-digits-cnn-1a2b3c4d/mixture-norm/seed-0
    """
    with mistakes():
        choose_device(device)
