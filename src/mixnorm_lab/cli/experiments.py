"""``mixnorm compare``, ``train`` and ``reproduce``: commands that train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from mixnorm_lab.cli import generators
from mixnorm_lab.cli.common import Debug, Device, Json, choice, mistakes, print_json, typer
from mixnorm_lab.cli.engines import for_many, for_one
from mixnorm_lab.cli.options import (
    DECIDED,
    SHARED,
    Address,
    Data,
    EngineName,
    Features,
    Given,
    Jobs,
    Loss,
    Metric,
    Recipe,
    Seeds,
    StepName,
    helped,
    takes_run_options,
)
from mixnorm_lab.cli.runs import run_and_report, say
from mixnorm_lab.comparison import earlier, plan
from mixnorm_lab.comparison.plan import Own, as_given, layers_of, notes_of, preset_of, refuse, unused
from mixnorm_lab.comparison.run import Machine
from mixnorm_lab.config import catalog, presets
from mixnorm_lab.config.norm_names import EXAMPLES
from mixnorm_lab.config.run_config import OPTIONS
from mixnorm_lab.launch.one_run import Files


@takes_run_options
def compare(
    *,
    task: Annotated[
        str, typer.Option("--task", help="classify, or gan for generators of a grid, a ring or CIFAR-10.")
    ] = "classify",
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="digits (the default), cifar10, cifar100, a folder, or my_module:loaders; with gan, grid, ring or cifar10.",
        ),
    ] = None,
    norms: Annotated[
        str | None,
        typer.Option(
            "--norms",
            help="Compare these side by side, with commas: batch, mixture, mixture:em_iters=0, "
            f"{', '.join(EXAMPLES)}, … Batch norm is always among them.",
        ),
    ] = None,
    recipe: Recipe = None,
    loss: Loss = None,
    metric: Metric = None,
    step: StepName = None,
    chosen: Annotated[Given, DECIDED],
    seeds: Seeds = 5,
    shared: Annotated[Given, SHARED],
    features: Features = None,
    jobs: Jobs = 1,
    engine: EngineName = "local",
    address: Address = None,
    device: Device = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", help="The folder; by default one below runs/ for these settings.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Is mixture norm better than batch norm here, how much sooner, and what does it look like?

    Trains both with several seeds, and leaves records, pictures and report.html in a folder. The same command goes on where
    it was interrupted.

    Example: mixnorm compare --data cifar10 --seeds 3

    Your own problem: mixnorm compare --model my_module:build --data my_module:loaders --layers "layer3.*", where build()
    returns a model with batch norms, and loaders() returns two loaders, for training and for testing. Batches are pairs
    (inputs, labels) or dictionaries; classes, masks and numbers are told apart by the labels.

    Any norms side by side: mixnorm compare --norms batch,ghost-32,group-32,mixture,mixture:em_iters=0

    Generators: mixnorm compare --task gan --data ring --seeds 3, or with cifar10, by their Fréchet distance.
    """
    with mistakes():
        choice("--task", task, ("classify", "gan"))
        given = chosen | shared
        if task == "gan":
            unknown = [name for name in given if not OPTIONS[name].generators]
            asked = {"recipe": recipe, "norms": norms, "loss": loss, "metric": metric, "step": step}
            refuse("--task gan", [*unknown, *(name for name, value in asked.items() if value)])
            if generators.is_plane(data or "grid"):
                elsewhere = {"features": features, "address": address, "jobs": jobs > 1, "engine": engine != "local"}
                elsewhere["device"] = device not in ("auto", "cpu")
                further = [name for name in given if name not in generators.PLANE_OPTIONS]
                refuse(f"the {data or 'grid'}", further)
                refuse(f"the {data or 'grid'}", [name for name, asked in elsewhere.items() if asked], why="takes no")
                generators.compare_points(data or "grid", seeds, given, out, as_json=as_json)
                raise typer.Exit(0)
        with for_many(engine, address, device, jobs) as where:
            if task == "gan":
                refuse("DCGAN", [name for name in ("components", "em_iters") if name in given])
                code = _compare_generators(str(data), seeds, given, features, where, out, as_json)
            else:
                if features is not None:
                    raise ValueError("--features is for generators: add --task gan, or leave it out")
                planned = plan.comparison(
                    data or "digits", given, where.device, own=Own(loss, metric, step), recipe=recipe, norms=norms,
                    seeds=seeds, out=out, here=where.here,
                )  # fmt: skip
                for note in planned.notes:
                    say(note)
                code = run_and_report(
                    planned.configs, planned.root, where, Files(planned.files), as_json=as_json, title=planned.title,
                    inside=True,
                )  # fmt: skip
    raise typer.Exit(code)


def _compare_generators(
    data: str, seeds: int, given: Given, features: str | None, engine: Machine, out: Path | None, as_json: bool
) -> int:
    """Compares the paper's DCGAN with both norms on CIFAR-10, from its official files if ``data`` is a folder."""
    folder = Path(data) if Path(data).is_dir() else None
    if data != "cifar10" and folder is None:
        raise ValueError(f"there are no generators of {data!r}: choose grid, ring, cifar10 or the folder of its files")
    configs = [as_given(config, given, engine.device) for config in generators.pair(seeds)]
    configs, network = generators.with_features(configs, features)
    root = out or Path("runs") / f"gan-cifar10-{configs[1].identity()[:8]}"
    title = "Batch norm and mixture norm: DCGAN on CIFAR-10"
    return run_and_report(configs, root, engine, Files(folder, network), as_json=as_json, title=title)


@takes_run_options
def train(
    *,
    name: Annotated[
        str | None, typer.Argument(help="An experiment of the paper; without it, the options say what to train.")
    ] = None,
    data: Data = "digits",
    norm: Annotated[
        str | None,
        typer.Option(
            "--norm", help=f"The norm in place of batch norm, where --layers says or everywhere: {', '.join(EXAMPLES)}."
        ),
    ] = None,
    recipe: Recipe = None,
    loss: Loss = None,
    metric: Metric = None,
    step: StepName = None,
    chosen: Annotated[Given, helped(DECIDED, layers="The batch norms to replace; by default, none.")],
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    shared: Annotated[Given, SHARED],
    device: Device = "auto",
    out: Annotated[Path, typer.Option("--out", help="The folder in which the run gets its own.")] = Path("runs"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """One run: batch norm, or with --layers mixture norm there, or with --norm another one.

    Example: mixnorm train --data digits --layers conv2 --epochs 10

    Example: mixnorm train --data cifar100 --model resnet-18 --norm ghost-32

    Example: mixnorm train cifar-cnn/cifar10/mn-2 --data cifar-folder

    On several GPUs, as one process would with the same batch: torchrun --nproc-per-node 2 -m mixnorm train ...
    """
    with mistakes(), for_one(device) as where:
        given = chosen | shared
        if name is not None:
            found = catalog.get(name).config
            if found.gan is not None:
                raise ValueError(f"{name} trains a generator: mixnorm reproduce {name} --features RUN does that")
            decided = [one for one in chosen if one != "epochs"]
            asked = {"norm": norm, "recipe": recipe, "loss": loss, "metric": metric, "step": step}
            decided += [option for option, value in asked.items() if value]
            refuse(name, decided, ", or the name and say it all")
            config = replace(as_given(found, given, where.device), seed=seed)
            folder = None if data in ("digits", found.data) else Path(data)
        else:
            wanted = norm or ("mixture" if "layers" in given else "batch")
            owner, remedy = (f"--norm {norm}", "") if norm else ("batch norm", ", or add --layers for mixture norm there")
            refuse(owner, unused([wanted], given), remedy, why="has no use for")
            preset, folder = preset_of(data, given, where.device, recipe, Own(loss, metric, step))
            for note in notes_of(preset, folder):
                say(note)
            config = presets.of_norm(preset, wanted, layers_of(preset, given))
            config = replace(config, name=f"{preset.model}/{preset.data}/{config.name}", seed=seed)
            for older in earlier.older_settings(config):
                if told := earlier.note([older], out):
                    config = older
                    say(told)
                    break
        code = run_and_report([config], out, where, Files(folder), as_json=as_json, report=False)
    raise typer.Exit(code)


@takes_run_options
def reproduce(
    *,
    names: Annotated[list[str] | None, typer.Argument(help="Experiments, or globs such as 'cifar-cnn/cifar100/*'.")] = None,
    seeds: Seeds = 1,
    epochs: Annotated[
        int | None, typer.Option("--epochs", min=1, help="Train for so many epochs instead of the paper's.")
    ] = None,
    shared: Annotated[Given, SHARED],
    data: Annotated[
        Path | None, typer.Option("--data", help="A folder with the official files; by default, the cache.")
    ] = None,
    features: Features = None,
    jobs: Jobs = 1,
    engine: EngineName = "local",
    address: Address = None,
    device: Device = "auto",
    out: Annotated[Path, typer.Option("--out", help="The folder; runs that are finished there are skipped.")] = Path(
        "runs/reproduce"
    ),
    list_all: Annotated[bool, typer.Option("--list", help="List experiments with the paper's accuracies.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Experiments of the paper, by their names.

    Example: mixnorm reproduce cifar-cnn/cifar10/bn-2 cifar-cnn/cifar10/mn-2 --seeds 3

    Example: mixnorm reproduce 'cifar-cnn/cifar100/*' --jobs 4

    Example: mixnorm reproduce '*' --engine ray --address auto --out /shared/runs
    """
    with mistakes():
        if list_all:
            _list(names or ["*"], as_json)
            return
        if not names:
            raise ValueError("which experiments? mixnorm reproduce --list names them")
        found = {experiment.name: experiment for name in names for experiment in catalog.match(name)}
        given = shared if epochs is None else {"epochs": epochs} | shared
        with for_many(engine, address, device, jobs) as where:
            configs = [
                replace(as_given(experiment.config, given, where.device), seed=seed)
                for seed in range(seeds)
                for experiment in found.values()
            ]
            configs, network = generators.with_features(configs, features)
            title = "The paper's experiments, measured again"
            code = run_and_report(configs, out, where, Files(data, network), as_json=as_json, title=title)
    raise typer.Exit(code)


def _list(names: Sequence[str], as_json: bool) -> None:
    rows = [
        {
            "name": experiment.name,
            "epochs": experiment.config.epochs,
            "layers": list(experiment.config.mixture.layers) if experiment.config.mixture else [],
            "paper_accuracy": experiment.paper.get("max_accuracy"),
        }
        for experiment in {one.name: one for name in names for one in catalog.match(name)}.values()
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
