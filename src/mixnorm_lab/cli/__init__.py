"""The command line: arguments in, calls out."""

from __future__ import annotations

from mixnorm_lab.cli.bench import bench
from mixnorm_lab.cli.common import Commands, CsvMayBeAlone, Debug, typer
from mixnorm_lab.cli.experiments import compare, reproduce, train
from mixnorm_lab.cli.results import data, inspect, report

app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Mixture normalization: batch norm for activations with more than one mode.",
)  # fmt: skip
for _command in (compare, train, reproduce, report, inspect, data):
    app.command(cls=CsvMayBeAlone if _command is report else None)(_command)
app.add_typer(bench, name="bench")


@app.callback()
def _main(debug: Debug = False) -> None:
    """Options that come before the command."""


def main() -> None:
    app(prog_name="mixnorm")
