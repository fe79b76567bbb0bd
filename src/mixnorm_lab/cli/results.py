"""``mixnorm report``, ``inspect`` and ``data``: commands that look at what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from mixnorm_lab import data as data_sets
from mixnorm_lab import reports
from mixnorm_lab.cli.common import DataFolder, Debug, Device, Json, choose_device, mistakes, print_json, typer
from mixnorm_lab.comparison.inspection import inspect_run
from mixnorm_lab.data import cifar
from mixnorm_lab.data.disk import recognize
from mixnorm_lab.launch.display import DownloadBar
from mixnorm_lab.reports.model.generators import keep_samples
from mixnorm_lab.reports.render import csv_files
from mixnorm_lab.reports.tables import likelihood as likelihood_table
from mixnorm_lab.storage import records


def report(
    folder: Annotated[Path, typer.Argument(help="A folder with runs, at any depth.", metavar="DIR")],
    title: Annotated[str | None, typer.Option("--title")] = None,
    bench: Annotated[Path | None, typer.Option("--bench", help="A CSV of mixnorm bench cost, for the cost table.")] = None,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", help="Copy the records, compressed, into this folder, and generators' best samples."),
    ] = None,
    document: Annotated[
        Path | None,
        typer.Option(
            "--document", help="Write a Markdown document of many experiments instead, with the text of DIR/findings.md."
        ),
    ] = None,
    csv: Annotated[
        str | None,
        typer.Option(
            "--csv",
            metavar="[FILE]",
            help="Write all epochs of all runs into DIR/epochs.csv or FILE, and the tables into summary.csv beside it; "
            "with -, print the epochs alone.",
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Tables, pictures and one page from the records of runs.

    Example: mixnorm report runs/reproduce --bench bench.csv

    Example: mixnorm report runs --csv

    Example: mixnorm report results --document docs/results.md --bench benchmarks/h200.csv
    """
    with mistakes():
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}: mixnorm compare or mixnorm reproduce makes one")
        found = records.find(folder)
        if csv is not None and not found:
            raise ValueError(f"{folder} has no records of runs, which --csv writes: mixnorm compare makes some")
        if csv == "-":
            typer.echo(csv_files.epochs(found, folder), nl=False)
            return
        if keep is not None:
            kept = records.keep(found, keep)
            keep_samples([run for run in found if records.kept_path(run, keep) in kept], keep)
        points = reports.points_in(folder) if document is None and not found else {}
        outcome = reports.Outcome(found)
        tables, answers = outcome.tables, outcome.answers
        for data, results in points.items():
            page, table, answer = reports.write_plane(folder, data, results)
            tables, answers = [*tables, table], [*answers, answer]
        if document is not None:
            page = reports.write_document(document, folder, found, bench=bench)
        elif not points:
            page = reports.write(folder, outcome, title=title, bench=bench)
        written = [] if csv is None else csv_files.write(Path(csv or folder / csv_files.EPOCHS), found, tables, folder)
    if as_json:
        files = {"report": str(page)} | ({"csv": [str(path) for path in written]} if written else {})
        print_json({"answers": answers, "tables": [table.json() for table in tables], **files})
        return
    from rich.console import Console

    console = Console()
    for sentence in answers:
        console.print(sentence, highlight=False, markup=False)
    typer.echo(f"The {'report' if document is None else 'document'} is {page}")
    if written:
        typer.echo(f"The numbers are in {' and '.join(map(str, written))}")


def data(
    name: Annotated[str, typer.Argument(help="digits, cifar10, cifar100, a folder or a table.")],
    folder: DataFolder = None,
    image_size: Annotated[int | None, typer.Option("--image-size", min=4, help="Of a folder of images.")] = None,
    target: Annotated[str | None, typer.Option("--target", help="Of a table: the column to predict.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """A data set: downloads it into the cache unless it is there, checks it, and says what it holds.

    Example: mixnorm data cifar10

    Example: mixnorm data cifar10 --data ~/cifar-10-batches-py

    Example: mixnorm data iris.csv --target species
    """
    with mistakes(), DownloadBar() as download:
        if name not in data_sets.NAMES and recognize.is_path(name):
            folder = Path(name)
            name = cifar.found_in(folder) or recognize.name_of(folder)
        found = data_sets.prepare(name, folder, download.show, image_size, target)
    if as_json:
        sizes = {f"train_{found.samples}": len(found.train), f"test_{found.samples}": len(found.test)}
        shape = {found.samples.removesuffix("s"): list(found.shape)}
        print_json({"name": found.name, **sizes, "classes": found.num_classes, **shape, "augment": found.augment})
        return
    rows = data_sets.describe(found)
    width = max(len(key) for key, _ in rows)
    for key, value in rows:
        typer.echo(f"{key:{width}}  {value}")


def inspect(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, finished or under way.", metavar="RUN")],
    layer: Annotated[str | None, typer.Option("--layer", help="The norm to look at; by default, a mixture norm.")] = None,
    data: DataFolder = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The folder for the pictures; by default, one in the run.")
    ] = None,
    likelihood: Annotated[
        bool, typer.Option("--likelihood", help="Also find how many components the norm's input wants; some minutes.")
    ] = False,
    device: Device = "auto",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What a norm sees and does: densities of channels before and after, how the components evolve, how many are in use.

    Example: mixnorm inspect runs/digits-digits-cnn-1a2b3c4d/mixture-norm/seed-0

    Example: mixnorm inspect runs/reproduce/inception-v3/cifar100/mn-4/seed-0 --layer inc2.0.2.4
    """
    with mistakes():
        run = records.read(_record(folder))
        found = inspect_run(run, choose_device(device), data, layer, out, likelihood=likelihood)
    view, epochs, paths = found.view, found.epochs, found.pictures
    table = None if found.likelihoods is None else likelihood_table.table([found.likelihoods])
    if as_json:
        shown = {} if table is None else {"likelihood": table.json()}
        print_json({"layer": view.layer, "epochs": epochs, "pictures": [str(path) for path in paths], **shown})
        return
    typer.echo(f"The norm {view.layer} after {epochs} epoch{'' if epochs == 1 else 's'}:")
    for path in paths:
        typer.echo(f"  {path}")
    if table is not None:
        from rich.console import Console

        console = Console()
        console.print("", table.rich(console.width), sep="\n")
    if run.config.mixture is None:
        typer.echo("This run has no mixture norm, so there are no components to show over its training.")
    elif len(paths) == 1:
        typer.echo("Only mixture norms have components to show over the training: choose one with --layer.")


def _record(folder: Path) -> Path:
    """The record of a run's folder."""
    path = folder / records.NAME
    if path.is_file():
        return path
    below = sorted(found.parent for found in folder.rglob(records.NAME)) if folder.is_dir() else []
    if below:
        raise ValueError(f"{folder} has {len(below)} runs: choose one, such as {below[-1]}")
    raise ValueError(f"{folder} has no run: mixnorm compare, train or reproduce makes one")
