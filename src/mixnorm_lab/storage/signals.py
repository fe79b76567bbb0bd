"""Ctrl-C and SIGTERM: both end a run as an exception does, and neither in the middle of what must be whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the process as Ctrl-C does, with what is under way tidied up, unless someone else handles it."""
    if not _in_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """What comes here waits until this is done; a second one, of someone who has no patience, does not wait.

    An exception that goes through another library's queue can leave it so that its thread waits for ever.
    """
    if not _in_main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    late: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        handler = handlers[signal.Signals(number)]
        assert callable(handler)
        handler(number, frame)

    def wait(number: int, frame: FrameType | None) -> None:
        late.append(number)
        if len(late) > 1:
            handle(number, frame)

    try:
        with ExitStack() as stack:
            for number, handler in handlers.items():
                if callable(handler):
                    stack.callback(signal.signal, number, handler)
                    signal.signal(number, wait)
            yield
    finally:  # also after an error, which the signal then follows
        if len(late) == 1:
            handle(late[0], None)


def _in_main_thread() -> bool:
    """The only one that may set a handler, and that handlers run in."""
    return threading.current_thread() is threading.main_thread()
