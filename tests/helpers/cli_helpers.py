"""The command line as a user meets it: in this process where that is enough, in one of its own where it is not."""

import os
import subprocess
import sys

from typer.testing import CliRunner

from mixnorm_lab.cli import app
from mixnorm_lab.storage import records

# The reference needs no compilation, which a fresh checkout would wait for.
QUICK = ["--device", "cpu", "-o", "backend=reference"]


def invoke(*arguments, code=0):
    """What a command leaves: stdout, stderr, and the exit code that was expected."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="mixnorm")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def mistake(*arguments):
    """The one sentence that a mistake is answered with."""
    result = invoke(*arguments, code=2)
    [sentence] = result.stderr.splitlines()
    return sentence


def start(*arguments, cwd, **options):
    """A process with the command, one thread, and its output in pipes."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    environment.pop("COLUMNS", None)
    return subprocess.Popen(
        [sys.executable, "-m", "mixnorm", *map(str, arguments)],
        cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def ended(process, limit, code=0):
    """What a process that :func:`start` made wrote, on stdout and stderr; it ends with the code within ``limit`` seconds."""
    try:
        out, errors = process.communicate(timeout=limit)
    finally:
        process.kill()
    assert process.returncode == code, errors
    return out, errors


def measured(folder):
    """What the runs below a folder measured, without the time that they took."""
    return {
        str(record.path.relative_to(folder)): [
            {name: value for name, value in row.items() if "seconds" not in name and name != "busy"} for row in record.epochs
        ]
        for record in records.find(folder)
    }
