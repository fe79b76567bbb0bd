"""The progress of a training: how far it is, told to someone who shows it, sends it on, or does neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

UPDATE_SECONDS = 0.2  # between two updates of a bar: everything around a training step must cost next to nothing


class RunProgress(Protocol):
    """A listener that the trainer tells how far one run is."""

    def start(self, name: str, epochs: int, steps: int, done: int) -> None:
        """The run starts: ``epochs`` of ``steps`` each, of which ``done`` epochs are done already."""

    def step(self, done: int) -> None:
        """A step is done, the one that makes ``done`` of the epoch's. Called often."""

    def epoch(self, row: Mapping[str, Any]) -> None:
        """An epoch is done; its row of the record, and the name of the ``metric`` that it has."""

    def end(self, reason: str) -> None:
        """The run ends, and why: "finished", "interrupted", "not finite" or "failed"; the last perhaps without a start."""


class Silent:
    """A listener that shows nothing."""

    def start(self, name: str, epochs: int, steps: int, done: int) -> None: ...

    def step(self, done: int) -> None: ...

    def epoch(self, row: Mapping[str, Any]) -> None: ...

    def end(self, reason: str) -> None: ...
