"""What a training tells of how far it is, and to whom: someone who shows it, sends it on, or does neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

UPDATE_SECONDS = 0.2  # between two updates of a bar: everything around a training step must cost next to nothing


class RunProgress(Protocol):
    """What the trainer tells of one run."""

    def start(self, name: str, epochs: int, steps: int, done: int) -> None:
        """``epochs`` of ``steps`` each, of which ``done`` epochs are done already."""

    def step(self, done: int) -> None:
        """``done`` steps of the epoch are done. Called often."""

    def epoch(self, row: Mapping[str, Any]) -> None:
        """An epoch is done; its row of the record."""

    def end(self, reason: str) -> None:
        """Why: "finished", "interrupted", "not finite" or "failed"; the last perhaps without a start."""


class Silent:
    """Shows nothing."""

    def start(self, name: str, epochs: int, steps: int, done: int) -> None: ...

    def step(self, done: int) -> None: ...

    def epoch(self, row: Mapping[str, Any]) -> None: ...

    def end(self, reason: str) -> None: ...
