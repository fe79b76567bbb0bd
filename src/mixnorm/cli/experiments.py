"""``mixnorm compare``, ``train`` and ``reproduce``: commands that train."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch

from mixnorm import reports
from mixnorm.cli import generators
from mixnorm.cli.common import (
    INTERRUPTED,
    Debug,
    Device,
    Json,
    choice,
    mistakes,
    print_json,
    show_trace,
    typer,
)
from mixnorm.cli.engines import Engine, for_many, for_one
from mixnorm.cli.results import inspect_run
from mixnorm.data import NAMES, cifar
from mixnorm.experiments import catalog, suite
from mixnorm.experiments.build import is_own
from mixnorm.experiments.config import OPTIMIZERS, PRECISIONS, RunConfig
from mixnorm.experiments.progress import Display, Download
from mixnorm.experiments.records import Record
from mixnorm.experiments.settings import Settings, defaults
from mixnorm.experiments.work import Failure, Files, recorded, run_name

Data = Annotated[
    str,
    typer.Option("--data", help="digits, cifar10, cifar100, a folder with CIFAR's official files, or my_module:loaders."),
]
Model = Annotated[
    str | None, typer.Option("--model", help="cifar-cnn, densenet-40-12, inception-v3, digits-cnn or my_module:build.")
]
Layers = Annotated[
    str | None,
    typer.Option("--layers", help="The batch norms to replace: the paper's layer names, or globs of modules; with commas."),
]
Components = Annotated[int | None, typer.Option("--components", "-k", min=1, help="K, the components of a mixture.")]
EmIters = Annotated[int | None, typer.Option("--em-iters", min=0, help="The paper's EM iter.")]
Option = Annotated[
    list[str] | None, typer.Option("--option", "-o", help="Any other option of MixtureNorm2d, such as inference=mixture.")
]
Epochs = Annotated[int | None, typer.Option("--epochs", min=1, help="Passes over the training images.")]
BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1)]
OptimizerName = Annotated[str | None, typer.Option("--optimizer", help="rmsprop, nesterov or adam.")]
Rate = Annotated[float | None, typer.Option("--lr", help="The initial learning rate.")]
WeightDecay = Annotated[float | None, typer.Option("--weight-decay")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Runs of each, with seeds 0, 1, …")]
Recalibrate = Annotated[
    int,
    typer.Option("--recalibrate", min=0, help="Evaluate a second time with statistics refilled from N training batches."),
]
Precision = Annotated[str, typer.Option("--precision", help="fp32 or bf16 (autocast).")]
Validation = Annotated[
    float,
    typer.Option("--validation", min=0, max=0.9, help="Test on this share of the training images, to choose settings."),
]
NormMomentum = Annotated[
    float | None, typer.Option("--norm-momentum", help="Of every norm's running statistics; 1 is the last batch alone.")
]
Features = Annotated[
    str | None,
    typer.Option("--features", help="For generators: the folder of a classifier's run, the file of the Inception, or fid."),
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs at once.")]
EngineName = Annotated[str, typer.Option("--engine", help="local, or ray: over the machines of a cluster.")]
Address = Annotated[
    str | None, typer.Option("--address", help="Of the Ray cluster, such as auto; this machine alone, unless given.")
]


def compare(
    task: Annotated[
        str, typer.Option("--task", help="classify, or gan: generators of a grid, a ring or of cifar10.")
    ] = "classify",
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="digits (unless given), cifar10, cifar100, a folder, or my_module:loaders; for gan grid, ring or cifar10.",
        ),
    ] = None,
    model: Model = None,
    layers: Layers = None,
    components: Components = None,
    em_iters: EmIters = None,
    option: Option = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    optimizer: OptimizerName = None,
    lr: Rate = None,
    weight_decay: WeightDecay = None,
    seeds: Seeds = 5,
    recalibrate: Recalibrate = 0,
    precision: Precision = "fp32",
    validation: Validation = 0.0,
    norm_momentum: NormMomentum = None,
    features: Features = None,
    jobs: Jobs = 1,
    engine: EngineName = "local",
    address: Address = None,
    device: Device = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", help="The folder; one below runs/ for these settings, unless given.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Is mixture norm better than batch norm here, how much sooner, and what does it look like?

    Trains both with several seeds, and leaves records, pictures and report.html in a folder. The same command goes on where
    it was interrupted.

    Example: mixnorm compare --data cifar10 --seeds 3

    Your own problem: mixnorm compare --model my_module:build --data my_module:loaders --layers "layer3.*", where build()
    returns a model with batch norms and loaders() returns two loaders of (images, labels), for training and for testing.

    Generators: mixnorm compare --task gan --data ring --seeds 3, or with cifar10, by their Fréchet distance.
    """
    with mistakes():
        choice("--task", task, ("classify", "gan"))
        if task == "gan":
            _refuse(
                "--task gan", model=model, layers=layers, option=option, batch_size=batch_size, optimizer=optimizer, lr=lr,
                weight_decay=weight_decay, validation=validation or None, norm_momentum=norm_momentum,
            )  # fmt: skip
            if generators.is_plane(data or "grid"):
                generators.compare_points(data or "grid", seeds, epochs, components, em_iters, out, as_json=as_json)
                raise typer.Exit(0)
        with for_many(engine, address, device, jobs) as where:
            if task == "gan":
                _refuse("DCGAN", components=components, em_iters=em_iters)
                code = _compare_generators(str(data), seeds, epochs, recalibrate, precision, features, where, out, as_json)
            else:
                settings, folder = _settings(
                    data or "digits", model, layers, components, em_iters, option, epochs, batch_size, optimizer, lr,
                    weight_decay, recalibrate, precision, validation, norm_momentum, where.device,
                )  # fmt: skip
                configs = settings.pair(seeds)
                name = "-".join(part.replace(":", ".") for part in (settings.data, settings.model))
                root = out or Path("runs") / f"{name}-{configs[1].identity()[:8]}"
                title = f"Batch norm and mixture norm: {settings.model} on {settings.data}"
                code = _run(configs, root, where, Files(folder), as_json=as_json, title=title, inside=True)
    raise typer.Exit(code)


def _compare_generators(
    data: str, seeds: int, epochs: int | None, recalibrate: int, precision: str, features: str | None, engine: Engine,
    out: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """The paper's DCGAN on CIFAR-10, from its official files if ``data`` is a folder."""
    folder = Path(data) if Path(data).is_dir() else None
    if data != "cifar10" and folder is None:
        raise ValueError(f"there are no generators of {data!r}: choose grid, ring, cifar10 or the folder of its files")
    configs = [
        _shortened(config, config.seed, epochs, recalibrate, precision, 0.0, None, engine.device)
        for config in generators.pair(seeds)
    ]
    configs, network = generators.with_features(configs, features)
    root = out or Path("runs") / f"gan-cifar10-{configs[1].identity()[:8]}"
    title = "Batch norm and mixture norm: DCGAN on CIFAR-10"
    return _run(configs, root, engine, Files(folder, network), as_json=as_json, title=title)


def train(
    name: Annotated[str | None, typer.Argument(help="An experiment of the paper; or say it all with options.")] = None,
    data: Data = "digits",
    model: Model = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="The batch norms to replace; none of them, unless given.")
    ] = None,
    components: Components = None,
    em_iters: EmIters = None,
    option: Option = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    optimizer: OptimizerName = None,
    lr: Rate = None,
    weight_decay: WeightDecay = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    recalibrate: Recalibrate = 0,
    precision: Precision = "fp32",
    validation: Validation = 0.0,
    norm_momentum: NormMomentum = None,
    device: Device = "auto",
    out: Annotated[Path, typer.Option("--out", help="The folder, in which the run gets its own.")] = Path("runs"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """One run: batch norm, or with --layers mixture norm there.

    Example: mixnorm train --data digits --layers conv2 --epochs 10

    Example: mixnorm train cifar-cnn/cifar10/mn-2 --data cifar-folder

    On several GPUs, as one process would with the same batch: torchrun --nproc-per-node 2 -m mixnorm train ...
    """
    with mistakes(), for_one(device) as where:
        if name is not None:
            found = catalog.get(name).config
            _refuse(
                name, ", or the name and say it all", model=model, layers=layers, components=components, em_iters=em_iters,
                option=option, batch_size=batch_size, optimizer=optimizer, lr=lr, weight_decay=weight_decay,
            )  # fmt: skip
            config = _shortened(found, seed, epochs, recalibrate, precision, validation, norm_momentum, where.device)
            folder = None if data in ("digits", found.data) else Path(data)
        else:
            settings, folder = _settings(
                data, model, layers, components, em_iters, option, epochs, batch_size, optimizer, lr, weight_decay,
                recalibrate, precision, validation, norm_momentum, where.device,
            )  # fmt: skip
            kind = "mixture-norm" if layers else "batch-norm"
            config = settings.run(f"{settings.model}/{settings.data}/{kind}", seed, mixture=bool(layers))
        code = _run([config], out, where, Files(folder), as_json=as_json, report=False)
    raise typer.Exit(code)


def reproduce(
    names: Annotated[list[str] | None, typer.Argument(help="Experiments, or globs such as 'cifar-cnn/cifar100/*'.")] = None,
    seeds: Seeds = 1,
    epochs: Annotated[int | None, typer.Option("--epochs", min=1, help="Instead of the paper's.")] = None,
    recalibrate: Recalibrate = 0,
    precision: Precision = "fp32",
    validation: Validation = 0.0,
    norm_momentum: NormMomentum = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="A folder with the official files; the cache, unless given.")
    ] = None,
    features: Features = None,
    jobs: Jobs = 1,
    engine: EngineName = "local",
    address: Address = None,
    device: Device = "auto",
    out: Annotated[Path, typer.Option("--out", help="The folder; what is done in it is skipped.")] = Path("runs/reproduce"),
    list_all: Annotated[bool, typer.Option("--list", help="Name all experiments, with the paper's figures.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Experiments of the paper, by their names.

    Example: mixnorm reproduce cifar-cnn/cifar10/bn-2 cifar-cnn/cifar10/mn-2 --seeds 3

    Example: mixnorm reproduce 'cifar-cnn/cifar100/*' --jobs 4

    Example: mixnorm reproduce '*' --engine ray --address auto --out /shared/runs
    """
    if list_all:
        _list(as_json)
        return
    with mistakes():
        if not names:
            raise ValueError("which experiments? mixnorm reproduce --list names them")
        found = {experiment.name: experiment for name in names for experiment in catalog.match(name)}
        with for_many(engine, address, device, jobs) as where:
            configs = [
                _shortened(experiment.config, seed, epochs, recalibrate, precision, validation, norm_momentum, where.device)
                for seed in range(seeds)
                for experiment in found.values()
            ]
            configs, network = generators.with_features(configs, features)
            title = "The paper's experiments, measured again"
            code = _run(configs, out, where, Files(data, network), as_json=as_json, title=title)
    raise typer.Exit(code)


def _settings(
    data: str, model: str | None, layers: str | None, components: int | None, em_iters: int | None, option: list[str] | None,
    epochs: int | None, batch_size: int | None, optimizer: str | None, lr: float | None, weight_decay: float | None,
    recalibrate: int, precision: str, validation: float, norm_momentum: float | None, device: torch.device,
) -> tuple[Settings, Path | None]:  # fmt: skip
    """The settings that the options make of the defaults, and the folder of the data."""
    folder = None
    if not (data in NAMES or is_own(data)) and (Path(data).is_dir() or len(Path(data).parts) > 1):
        if not Path(data).is_dir():
            raise ValueError(f"there is no folder {data}: name one with CIFAR's official files, or a data set")
        folder, data = Path(data), cifar.name_of(Path(data))
    choice("--precision", precision, PRECISIONS)
    settings = defaults(data, model)
    choice("--optimizer", optimizer or settings.optimizer.name, OPTIMIZERS)
    chosen = {"name": optimizer, "lr": lr, "weight_decay": weight_decay}
    mixture = {"num_components": components, "em_iters": em_iters} | dict(map(_assignment, option or ()))
    changes = {
        "epochs": epochs,
        "batch_size": batch_size,
        "layers": None if layers is None else tuple(layer.strip() for layer in layers.split(",")),
        "optimizer": dataclasses.replace(settings.optimizer, **_given(chosen)),
        "options": settings.options | _given(mixture),
        "recalibrate": recalibrate,
        "precision": precision,
        "validation": validation,
        "norm_momentum": norm_momentum,
        "channels_last": device.type == "cuda",  # which convolutions are fastest in
    }
    return dataclasses.replace(settings, **_given(changes)), folder


def _refuse(name: str, remedy: str = "", **settings: Any) -> None:
    """Settings that an experiment of the paper has of its own."""
    given = [f"--{setting.replace('_', '-')}" for setting in _given(settings)]
    if given:
        raise ValueError(f"{name} comes with its own {', '.join(given)}: leave that out{remedy}")


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _assignment(text: str) -> tuple[str, Any]:
    """ "inference=mixture" as a name and a value."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--option {text} says no value: write it as name=value, such as inference=mixture")
    words: dict[str, Any] = {"none": None, "true": True, "false": False}
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, words.get(value.lower(), value)


def _shortened(
    config: RunConfig,
    seed: int,
    epochs: int | None,
    recalibrate: int,
    precision: str,
    validation: float,
    norm_momentum: float | None,
    device: torch.device,
) -> RunConfig:
    """An experiment as it was asked for; the report says where it is not quite the paper's."""
    choice("--precision", precision, PRECISIONS)
    changes: dict[str, Any] = {
        "seed": seed,
        "epochs": epochs or config.epochs,
        "recalibrate": recalibrate,
        "precision": precision,
        "validation": validation,
        "norm_momentum": norm_momentum,
        "channels_last": device.type == "cuda",
    }
    return dataclasses.replace(config, **changes)


def _run(
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
    """Trains, shows what came out, and writes the report, after Ctrl-C of what there is; returns the exit code."""
    if not engine.team.is_first:
        return _follow(configs, root, engine, files)
    code = 0
    failed: dict[str, Failure] = {}
    checked = False
    try:
        with Download() as download:
            suite.check(configs, root, files, download.show, engine.team)
        checked = True
    finally:
        engine.team.from_first(checked)
    try:
        with Display([run_name(config) for config in configs], file=sys.stderr if as_json else None) as display:
            failed = suite.run_all(
                configs, root, device=engine.device, display=display, files=files, jobs=engine.jobs,
                cluster=engine.cluster, team=engine.team,
            )  # fmt: skip
    except KeyboardInterrupt:
        code = INTERRUPTED
        typer.echo("\nInterrupted: the same command goes on from here.", err=True)
    _tell(failed)
    found = [record for record in (recorded(config, root) for config in configs) if record]
    if any(record.epochs for record in found):
        if inside:
            _look_inside(found, engine.here, files.data)
        page = reports.write(root, found, title=title) if report else None
        _show(found, page, root, as_json)
    return code or (2 if failed else 0)


def _follow(configs: Sequence[RunConfig], root: Path, engine: Engine, files: Files) -> int:
    """What the other processes of torchrun do, which show nothing but what goes wrong."""
    if not engine.team.from_first():
        return 2
    with Path(os.devnull).open("w") as nowhere, Display(file=nowhere) as display:
        failed = suite.run_all(configs, root, device=engine.device, display=display, files=files, team=engine.team)
    _tell({f"process {engine.team.rank}, {name}": failure for name, failure in failed.items()})
    return 2 if failed else 0


def _look_inside(found: Sequence[Record], device: torch.device, data_folder: Path | None) -> None:
    """Draws what the first mixture norm does, for the report; what goes wrong there does not concern the comparison."""
    run = next((record for record in found if record.config.mixture is not None and record.epochs), None)
    if run is None or run.path is None:
        return
    try:
        inspect_run(run.path.parent, device, data_folder)
    except (ValueError, OSError, RuntimeError) as error:
        typer.echo(f"The densities could not be drawn: {error}", err=True)


def _tell(failed: Mapping[str, Failure]) -> None:
    """A line for each reason, with the runs that it ended."""
    runs: dict[str, list[str]] = {}
    for name, failure in failed.items():
        show_trace(failure.trace)
        runs.setdefault(failure.sentence, []).append(name)
    for sentence, names in runs.items():
        typer.echo(f"{', '.join(names)}: {sentence}", err=True)


def _show(found: Sequence[Record], page: Path | None, root: Path, as_json: bool) -> None:
    tables, answers = reports.summary(found)
    if as_json:
        files = {"folder": str(root), "report": None if page is None else str(page)}
        print_json({"answers": answers, "tables": [table.json() for table in tables], **files})
        return
    from rich.console import Console

    console = Console()
    for table in tables:
        console.print()
        console.print(table.rich())
    for sentence in answers:
        console.print(f"\n{sentence}", highlight=False, markup=False)
    console.print(f"\nThe report is {page}" if page else f"\nThe records are in {root}", highlight=False, soft_wrap=True)


def _list(as_json: bool) -> None:
    rows = [
        {
            "name": experiment.name,
            "epochs": experiment.config.epochs,
            "layers": list(experiment.config.mixture.layers) if experiment.config.mixture else [],
            "paper_accuracy": experiment.paper.get("max_accuracy"),
        }
        for experiment in catalog.EXPERIMENTS.values()
    ]
    if as_json:
        print_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("experiment", no_wrap=True)  # to be copied
    table.add_column("epochs", justify="right", no_wrap=True)
    table.add_column("mixture norm at")
    table.add_column("paper", justify="right", no_wrap=True)
    for row in rows:
        accuracy = row["paper_accuracy"]
        layers = ", ".join(row["layers"])  # type: ignore[arg-type]
        table.add_row(row["name"], str(row["epochs"]), layers, f"{accuracy:.2f}%" if accuracy else "")  # type: ignore[arg-type]
    Console().print(table)
