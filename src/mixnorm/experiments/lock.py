"""One run at a time in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

NAME = "lock"


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
        yield


def _lock(file: IO[str]) -> None:
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows has none, and goes without
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
