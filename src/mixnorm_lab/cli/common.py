"""The parts that all commands share.

A user's mistake is one sentence on stderr and exit code 2; ``--debug`` shows where it arose.
"""

from __future__ import annotations

import errno
import inspect
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from typer.core import TyperCommand, TyperGroup

INTERRUPTED = 130  # the exit code of a command that Ctrl-C ended
GOES_ON = "\nInterrupted: the same command goes on from here."
FULL = (errno.ENOSPC, errno.EDQUOT)
UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # click's, which some versions of typer carry inside


class Commands(TyperGroup):
    """Says in one sentence what is wrong with a command line, and which commands there are when one is unknown."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None and not ctx.resilient_parsing:
            fail(f"{ctx.command_path} {cmd_name} is unknown: choose from {', '.join(self.list_commands(ctx))}")
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _usage():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _usage():
            return super().invoke(ctx)


class CsvMayBeAlone(TyperCommand):
    """A command whose ``--csv`` takes a file, or ``-``, if one stands behind it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        following = [*args[1:], ""][: len(args)]
        alone = [
            arg == "--csv" and not (then == "-" or then.endswith(".csv")) for arg, then in zip(args, following, strict=True)
        ]
        return super().parse_args(ctx, [f"{arg}=" if is_alone else arg for arg, is_alone in zip(args, alone, strict=True)])


def flowing(text: str) -> str:
    """A docstring whose paragraphs are lines of their own, which a terminal of any width breaks where it ends."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))


@contextmanager
def _usage() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        if "\n" in message or not message:  # no mistake, but the help of a command that was called without anything
            raise
        path = error.ctx.command_path if getattr(error, "ctx", None) else "mixnorm"  # type: ignore[attr-defined]
        fail(f"{message.rstrip('.')}; {path} --help says what there is")


def fail(sentence: str) -> NoReturn:
    typer.echo(sentence, err=True)
    raise typer.Exit(2)


@contextmanager
def mistakes() -> Iterator[None]:
    """Turns an error that is the user's to solve into its sentence."""
    try:
        yield
    except typer.Exit:
        raise
    except BrokenPipeError:  # who read the output wanted no more of it, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        show_trace(traceback.format_exc())
        fail(_sentence(error))


def show_trace(trace: str) -> None:
    """Shows where an error arose, if that was asked for."""
    if _debug:
        typer.echo(trace, err=True)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:  # as the system says it, which knows no remedy
        where = f"{error.filename}: " if error.filename else ""
        remedy = "make room or choose another folder" if error.errno in FULL else "name another place"
        return f"{where}{error.strerror}: {remedy}, and run the same command again"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install {error.name}"
    return " ".join(str(error).split()) or type(error).__name__


_debug = False


def _set_debug(ctx: typer.Context, value: bool) -> bool:
    global _debug
    _debug = value or (_debug and ctx.parent is not None)  # before the command, where it is read first, or behind it
    return value


Debug = Annotated[bool, typer.Option("--debug", callback=_set_debug, help="Show the traceback of an error.")]
Device = Annotated[str, typer.Option("--device", help="auto, cuda or cpu.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]
DataFolder = Annotated[Path | None, typer.Option("--data", help="A folder with the official files of the data set.")]


def choose_device(device: str) -> torch.device:
    kind, colon, index = device.partition(":")
    choice("--device", kind, ("auto", "cuda", "cpu"))
    if colon and not (kind == "cuda" and index.isdecimal()):
        raise ValueError(f"--device {device} is unknown: write auto, cpu, cuda, or cuda:0 for the first GPU")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no GPU here; use cpu")
    return torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{option} {value} is unknown: choose from {', '.join(choices)}")


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
