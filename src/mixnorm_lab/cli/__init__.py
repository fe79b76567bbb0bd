"""The command line: arguments in, calls out."""

from __future__ import annotations

import warnings
from typing import Annotated

from mixnorm import __version__
from mixnorm_lab.cli.bench import bench
from mixnorm_lab.cli.common import Commands, CsvMayBeAlone, Debug, flowing, typer
from mixnorm_lab.cli.experiments import compare, reproduce, train
from mixnorm_lab.cli.results import data, inspect, report

app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Mixture normalization for PyTorch, trained and measured beside batch norm.",
)  # fmt: skip
for _command in (compare, train, reproduce, report, inspect, data):
    app.command(cls=CsvMayBeAlone if _command is report else None, help=flowing(_command.__doc__ or ""))(_command)
app.add_typer(bench, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mixnorm {__version__}")
        raise typer.Exit(0)


@app.callback()
def _main(
    debug: Debug = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before the command."""


def main() -> None:
    # A sentence of the library is for who typed the command, and not for who looks into its files.
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    app(prog_name="mixnorm")
