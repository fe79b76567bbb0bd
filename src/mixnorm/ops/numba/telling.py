"""Word of the loops that numba compiles: the first step of a new installation waits for them, and says so."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from numba.core import event

logger = logging.getLogger("mixnorm")


class _Teller(event.Listener):
    """Logs a line when the first loop begins to be compiled, and one for each that is done; none for loops from the disk."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._of_thread = threading.local()
        self._has_begun = False

    def on_start(self, event: Any) -> None:
        depth = self._depth(event, 1)
        if depth == 1:
            self._of_thread.begun = time.perf_counter()
            if not self._has_begun:
                self._has_begun = True
                logger.warning(
                    "mixnorm compiles its loops for this CPU, which takes about ten seconds; they are then kept on disk"
                )

    def on_end(self, event: Any) -> None:
        if self._depth(event, -1) == 0:
            seconds = time.perf_counter() - self._of_thread.begun
            logger.warning("mixnorm compiled %s in %.0f s", event.data["dispatcher"].py_func.__name__, seconds)

    def _depth(self, event: Any, change: int) -> int | None:
        """How many loops are being compiled, each for the one before it; None for a function of someone else."""
        module = event.data["dispatcher"].py_func.__module__
        if module != self._package and not module.startswith(f"{self._package}."):
            return None
        self._of_thread.depth = getattr(self._of_thread, "depth", 0) + change
        return self._of_thread.depth


def tell_of(package: str) -> None:
    """Logs whenever numba compiles a function of this package."""
    event.register("numba:compile", _Teller(package))
