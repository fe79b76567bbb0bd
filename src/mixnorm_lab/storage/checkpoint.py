"""A run's state on the disk: whole or not there at all, and checked when it is read.

The file is what ``torch.save`` writes, and a line with its checksum behind it, which ``torch.load`` does not mind.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch

NAME = "checkpoint.pt"
PREVIOUS = "checkpoint.previous.pt"
TEMPORARY = "checkpoint.new.pt"
VERSION = 1
MARK = b"\nsha256 "
TRAILER = len(MARK) + 64 + 1  # with the hexadecimal digits and a line break


class CheckpointError(ValueError):
    """A checkpoint that cannot be used."""


def write(folder: Path, state: dict[str, Any]) -> None:
    """Puts ``state``, of tensors and plain containers, in place of the last checkpoint, which stays as ``PREVIOUS``.

    A kill at any moment leaves one of the two as ``NAME``, or the last as ``PREVIOUS``; a full disk leaves the last.
    """
    buffer = io.BytesIO()
    torch.save({"version": VERSION, **state}, buffer)
    content = buffer.getbuffer()
    new, current = folder / TEMPORARY, folder / NAME
    try:
        with new.open("wb") as file:
            file.write(content)
            file.write(MARK + hashlib.sha256(content).hexdigest().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if current.exists():
            os.replace(current, folder / PREVIOUS)
        os.replace(new, current)
        _sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise OSError(
            f"{current} cannot be written ({error.strerror or error}): the last checkpoint is kept, so make room or choose "
            "another folder, and run the same command again"
        ) from error


def read(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint of a folder, on the CPU; ``None`` where there is none."""
    previous = folder / PREVIOUS
    for path in (folder / NAME, previous):
        if path.exists():
            remedy = "delete it to start this run again from the beginning"
            if path != previous and previous.exists():
                remedy = f"delete it to go on from {PREVIOUS}"
            return _checked(path, remedy)
    return None


def forget_previous(folder: Path) -> None:
    """Frees the room that the last checkpoint but one takes."""
    (folder / PREVIOUS).unlink(missing_ok=True)


def _checked(path: Path, remedy: str) -> dict[str, Any]:
    try:
        file = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): {remedy}") from error
    content, trailer = memoryview(file)[:-TRAILER], file[-TRAILER:]
    if trailer != MARK + hashlib.sha256(content).hexdigest().encode() + b"\n":
        raise CheckpointError(f"{path} is damaged (its checksum does not fit its content): {remedy}")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} holds more than tensors and plain values, and is not loaded: {remedy}") from error
    if state.get("version") != VERSION:
        raise CheckpointError(f"{path} was written by another version of mixnorm: use that one, or {remedy}")
    return state


def _sync_folder(folder: Path) -> None:
    """Renames are on the disk when this returns."""
    if os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
