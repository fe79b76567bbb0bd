"""One run at a time in a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

NAME = "lock"
_held: set[IO[str]] = set()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder, which is made if need be. The system lets go of it when the process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / NAME).open("a+")
    except OSError as error:
        raise OSError(f"{folder} cannot be written ({error.strerror}): choose another folder for the run") from error
    with file:
        try:
            _lock(file)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another"
            raise OSError(
                f"{folder} is in use by process {owner}: wait until it is done, or choose another folder"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        _held.add(file)
        try:
            yield
        finally:
            _held.discard(file)


def wait_until_free(folder: Path, seconds: float) -> None:
    """Waits until no process holds the folder, but no longer: it takes a while where the machine of the process was lost."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with (folder / NAME).open("a+") as file:
                _lock(file)
            return
        except FileNotFoundError:
            return
        except BlockingIOError:
            time.sleep(0.5)


def _let_go() -> None:
    """In a process that a loader forked: it would hold the folder beyond the end of the one that trains."""
    for file in _held:
        file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def _lock(file: IO[str]) -> None:
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows has none, and goes without
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
