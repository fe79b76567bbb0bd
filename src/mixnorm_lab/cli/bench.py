"""``mixnorm bench``: mixture norm measured beside batch norm."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from mixnorm_lab.bench.cases import BENCHMARKS, LAYOUTS, all_cases, select
from mixnorm_lab.bench.run import BenchOptions, run
from mixnorm_lab.bench.steps import backend_in_use
from mixnorm_lab.cli.common import Commands, Debug, Device, Json, choice, choose_device, mistakes, print_json, typer
from mixnorm_lab.internals import BACKENDS
from mixnorm_lab.storage.measurements import MeasurementFile, read

bench = typer.Typer(cls=Commands, no_args_is_help=True, help="Measure mixture norm beside batch norm.")

Out = Annotated[Path | None, typer.Option("--out", help="Add the rows to this CSV, one by one as they come.")]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        help="Only these cases: a benchmark, a shape, a model, K=3, fp32, graph, … Can be repeated, or a list with commas: "
        "of one kind any will do, of several kinds all must fit.",
    ),
]
Seconds = Annotated[float | None, typer.Option("--seconds", min=0, help="Stop after this time; what is measured is kept.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few cases and few samples, in a few seconds.")]
Backend = Annotated[str, typer.Option("--backend", help="Of mixture norm: auto, triton or reference.")]
Reference = Annotated[bool, typer.Option("--reference", help="Measure the plain reference, too (not in whole models).")]
Layout = Annotated[str, typer.Option("--layout", help="Of layer, inference and memory: channels_last, contiguous or both.")]
Commit = Annotated[str | None, typer.Option("--commit", help="The commit to record where git cannot tell.")]
Tables = Annotated[Path, typer.Argument(help="A CSV that mixnorm bench wrote.", metavar="FILE.csv")]


def _benchmark(name: str, text: str) -> None:
    """Adds the command ``mixnorm bench NAME``; they all take the same options."""

    def command(
        out: Out = None,
        only: Only = None,
        seconds: Seconds = None,
        quick: Quick = False,
        device: Device = "auto",
        backend: Backend = "auto",
        reference: Reference = False,
        layout: Layout = "channels_last",
        commit: Commit = None,
        as_json: Json = False,
        debug: Debug = False,
    ) -> None:
        with mistakes():
            kind = choose_device(device).type
            choice("--backend", backend, BACKENDS)
            backend_in_use(kind, backend)  # one that cannot run here is a mistake now, not a failure of every case
            choice("--layout", layout, (*LAYOUTS, "both"))
            cases = all_cases(kind, quick=quick, layouts=LAYOUTS if layout == "both" else (layout,))
            cases = [case for case in cases if name in ("all", case.benchmark)]
            cases = select(cases, [term for terms in only or () for term in terms.split(",")])
            options = BenchOptions(kind, backend, reference, quick, seconds, commit)
            table = MeasurementFile(out)
        _measure(cases, options, table, as_json)

    example = f"mixnorm bench {name} --out bench.csv --only K=3 --seconds 120"
    bench.command(name, help=f"{text}\n\nExample: {example}")(command)


def _measure(cases: list[Any], options: BenchOptions, table: MeasurementFile, as_json: bool) -> None:
    from mixnorm_lab.bench.display import BenchDisplay, show

    code = 0
    try:
        with BenchDisplay(sys.stderr if as_json else None) as display:
            run(cases, options, table, display)
    except KeyboardInterrupt:
        code = 130
    except OSError as error:  # such as a full disk
        typer.echo(f"{table.path} could not be written: {error.strerror}", err=True)
        code = 2
    if as_json:
        print_json(table.rows)
    else:
        show(table.rows)
    if table.path and not code and not as_json:
        typer.echo(f"\n{len(table.rows)} rows are in {table.path}; mixnorm bench plot {table.path} draws them.")
    raise typer.Exit(code)


_benchmark("all", "All benchmarks.")
for _name, _text in BENCHMARKS.items():
    _benchmark(_name, _text)


@bench.command("table")
def bench_table(file: Tables, as_json: Json = False, debug: Debug = False) -> None:
    """The table of a CSV again, with the goals.

    Example: mixnorm bench table bench.csv
    """
    from mixnorm_lab.bench.display import show

    with mistakes():
        rows = read(file)
    if as_json:
        print_json(rows)
    else:
        show(rows)


@bench.command("plot")
def bench_plot(
    file: Tables,
    out: Annotated[Path, typer.Option("--out", help="The folder for the pictures.")] = Path("plots"),
    debug: Debug = False,
) -> None:
    """Pictures of a CSV.

    Example: mixnorm bench plot bench.csv --out plots
    """
    with mistakes():
        try:
            from mixnorm_lab.bench.plots import draw
        except ModuleNotFoundError:
            raise ValueError(
                "Pictures need matplotlib: install the extra, pip install '.[tools]' from a checkout of mixnorm"
            ) from None
        for path in draw(read(file), out):
            typer.echo(str(path))
