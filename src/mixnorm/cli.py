"""The command line: arguments in, calls out. A user's mistake is one sentence on stderr and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch

from mixnorm.bench.cases import BENCHMARKS, LAYOUTS, all_cases, select
from mixnorm.bench.run import Settings, run
from mixnorm.bench.steps import backend_in_use
from mixnorm.bench.table import Table, read
from mixnorm.ops.backend import BACKENDS

try:
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError:
    raise SystemExit("The command line needs typer and rich: pip install 'mixnorm[tools]'") from None


class Commands(TyperGroup):
    """Says which commands there are when one is unknown."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None and not ctx.resilient_parsing:
            fail(f"{ctx.command_path} {cmd_name} is unknown: choose from {', '.join(self.list_commands(ctx))}")
        return command


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Mixture normalization: batch norm for activations with more than one mode.",
)  # fmt: skip
bench = typer.Typer(cls=Commands, no_args_is_help=True, help="Measure mixture norm beside batch norm.")
app.add_typer(bench, name="bench")


@app.callback()
def _main() -> None:
    """Keeps ``bench`` a command of its own while it is the only one."""


def main() -> None:
    app(prog_name="mixnorm")


def fail(sentence: str) -> None:
    typer.echo(sentence, err=True)
    raise typer.Exit(2)


@contextmanager
def mistakes() -> Iterator[None]:
    """Turns an error that is the user's to solve into its sentence."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        fail(str(error))


Out = Annotated[Path | None, typer.Option("--out", help="Add the rows to this CSV, one by one as they come.")]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        help="Only these cases: a benchmark, a shape, K=3, fp32, graph, … Can be repeated, or a list with commas: "
        "of one kind any will do, of several kinds all must fit.",
    ),
]
Seconds = Annotated[float | None, typer.Option("--seconds", min=0, help="Stop after this time; what is measured is kept.")]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny cases and few samples: whether it runs, in a few seconds.")]
Device = Annotated[str, typer.Option("--device", help="auto, cuda or cpu.")]
Backend = Annotated[str, typer.Option("--backend", help="Of mixture norm: auto, triton or reference.")]
Reference = Annotated[bool, typer.Option("--reference", help="Measure the plain reference, too.")]
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
    ) -> None:
        with mistakes():
            device = _device(device)
            _choice("--backend", backend, BACKENDS)
            backend_in_use(device, backend)  # one that cannot run here is a mistake now, not a failure of every case
            _choice("--layout", layout, (*LAYOUTS, "both"))
            cases = all_cases(device, quick=quick, layouts=LAYOUTS if layout == "both" else (layout,))
            cases = [case for case in cases if name in ("all", case.benchmark)]
            cases = select(cases, [term for terms in only or () for term in terms.split(",")])
            settings = Settings(device, backend, reference, quick, seconds, commit)
            table = Table(out)
        _measure(cases, settings, table)

    example = f"mixnorm bench {name} --out bench.csv --only K=3 --seconds 120"
    bench.command(name, help=f"{text}\n\nExample: {example}")(command)


def _measure(cases: list[Any], settings: Settings, table: Table) -> None:
    from mixnorm.bench.display import Display, show

    code = 0
    try:
        with Display() as display:
            run(cases, settings, table, display)
    except KeyboardInterrupt:
        code = 130
    except OSError as error:  # such as a full disk
        typer.echo(f"{table.path} could not be written: {error.strerror}", err=True)
        code = 2
    show(table.rows)
    if table.path and not code:
        typer.echo(f"\n{len(table.rows)} rows are in {table.path}; mixnorm bench plot {table.path} draws them.")
    raise typer.Exit(code)


def _device(device: str) -> str:
    _choice("--device", device, ("auto", "cuda", "cpu"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no GPU here; use cpu")
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{option} {value} is unknown: choose from {', '.join(choices)}")


_benchmark("all", "All benchmarks.")
for _name, _text in BENCHMARKS.items():
    _benchmark(_name, _text)


@bench.command("table")
def bench_table(file: Tables) -> None:
    """The table of a CSV again, with the goals.

    Example: mixnorm bench table bench.csv
    """
    from mixnorm.bench.display import show

    with mistakes():
        rows = read(file)
    show(rows)


@bench.command("plot")
def bench_plot(
    file: Tables, out: Annotated[Path, typer.Option("--out", help="The folder for the pictures.")] = Path("plots")
) -> None:
    """Pictures of a CSV.

    Example: mixnorm bench plot bench.csv --out plots
    """
    with mistakes():
        try:
            from mixnorm.bench.plots import draw
        except ModuleNotFoundError:
            raise ValueError("Pictures need matplotlib: pip install 'mixnorm[tools]'") from None
        for path in draw(read(file), out):
            typer.echo(str(path))
