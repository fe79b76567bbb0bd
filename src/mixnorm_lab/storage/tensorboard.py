"""TensorBoard events beside a record, where the package tensorboard is installed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mixnorm_lab.storage.signals import uninterrupted

CURVES = {
    "train_loss": "loss/train",
    "test_loss": "loss/test",
    "recalibrated_loss": "loss/test, fresh statistics",
    "train_error": "error/train",
    "test_error": "error/test",
    "recalibrated_error": "error/test, fresh statistics",
    "test_metric": "metric/test",
    "recalibrated_metric": "metric/test, fresh statistics",
    "learning_rate": "learning rate",
    "generator_loss": "loss/generator",
    "discriminator_loss": "loss/discriminator",
    "distance": "distance",
    "recalibrated_distance": "distance, fresh statistics",
}


class Events:
    """``done`` epochs are in earlier files; what those have beyond it is not shown.

    The writer has a queue and a thread, which an exception of Ctrl-C in the middle of it would leave waiting for each other.
    """

    def __init__(self, folder: Path, done: int) -> None:
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            return
        # What its thread cannot write, as on a full disk, the next call raises; the thread need not tell it as well.
        self._before, threading.excepthook = threading.excepthook, _without_files
        try:
            with uninterrupted():
                self._writer = SummaryWriter(folder, purge_step=done + 1)
        except OSError:
            threading.excepthook = self._before
            raise

    def epoch(self, row: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        values = {curve: row[name] for name, curve in CURVES.items() if row.get(name) is not None}
        values.update({f"components/{layer}": number for layer, number in row["components"].items()})
        with uninterrupted():
            for curve, value in values.items():
                self._writer.add_scalar(curve, value, row["epoch"])

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            try:
                with uninterrupted():
                    self._writer.close()
            finally:
                threading.excepthook = self._before


def _without_files(error: threading.ExceptHookArgs) -> None:
    if not issubclass(error.exc_type, OSError):
        threading.__excepthook__(error)
