"""How fast a run goes, and how long it still takes, once that can be said."""

from __future__ import annotations

LEAST_SECONDS, LEAST_STEPS = 5.0, 10  # that are timed before they say how long the rest takes
LEAST_SECONDS_OF_SPEED = 1.0
FORGOTTEN = 0.25  # of the time so far: the first steps are slower than those that follow
NEXT_MARK = 0.02  # of the time so far, so that a run of any length has a few hundred marks


class Pace:
    """The speed of a run, evaluations counted in. The first step does not count, for it may compile."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, int]] = []  # time, steps done

    def mark(self, now: float, done: int) -> None:
        """``done`` steps are done now; the first call comes after the first step."""
        if not self._marks or now - self._marks[-1][0] > NEXT_MARK * (now - self._marks[0][0]):
            self._marks.append((now, done))

    def seconds_a_step(self, now: float, done: int) -> float | None:
        """None before there is enough to say how long the rest takes."""
        if not self._marks:
            return None
        start, first = self._marks[0]
        return self._since_the_beginning(now, done) if now - start >= LEAST_SECONDS and done - first >= LEAST_STEPS else None

    def steps_a_second(self, now: float, done: int) -> float | None:
        """None for the first second."""
        if not self._marks or now - self._marks[0][0] < LEAST_SECONDS_OF_SPEED:
            return None
        seconds = self._since_the_beginning(now, done)
        return None if seconds is None else 1 / seconds

    def _since_the_beginning(self, now: float, done: int) -> float | None:
        start = self._marks[0][0]
        earliest = start + FORGOTTEN * (now - start)
        since, before = max((mark for mark in self._marks if mark[0] <= earliest), default=self._marks[0])
        return (now - since) / (done - before) if done > before and now > since else None


def duration(seconds: float) -> str:
    """Such as 0:07, 12:34 or 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
