"""What a configuration says of a value that cannot be: one sentence with what can."""

from __future__ import annotations

from typing import Any


def one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"there is no {what} {value!r}: choose one of {', '.join(allowed)}")


def check(holds: bool, what: str, value: Any, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{what} is {value}, but must be {allowed}")
