"""The runs of a command as they are shown: how far each is, in which state, and how long it takes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from mixnorm_lab.config.metrics import metric_of
from mixnorm_lab.launch.pace import Pace, duration
from mixnorm_lab.training.progress import UPDATE_SECONDS

ENOUGH_KINDS = 3  # of runs, whose speed is known, before something is said of all of them

# The states of a run, in the order in which they are told.
FINISHED, INTERRUPTED, FAILED, NOT_FINITE = "finished", "interrupted", "failed", "not finite"
RUNNING, FIRST_STEP, PREPARING, WAITING, NOT_STARTED = "running", "first step", "preparing", "waiting", "not started"
ENDS = (FINISHED, INTERRUPTED, FAILED, NOT_FINITE)
STATES = (*ENDS, RUNNING, FIRST_STEP, PREPARING, WAITING, NOT_STARTED)


class Teller(Protocol):
    """Who prints lines where there are no bars."""

    def __call__(self, text: str, *, now_and_then: bool) -> None: ...


class ShownRun:
    """A run as it is shown: the listener that its trainer tells how far it is."""

    def __init__(self, name: str, tell: Teller) -> None:
        self.name, self.tell = name, tell
        self.kind = name.rpartition(" seed ")[0] or name  # the same for all seeds
        self.state = WAITING
        self.epochs = self.steps = self.done_epochs = self.done = self.done_before = 0
        self.measure, self.measured = "accuracy", ""  # the last that was measured, and what it is
        self.started = self.next_update = time.monotonic()
        self.seconds = 0.0  # that it took, once it has ended
        self.pace = Pace()

    @property
    def share(self) -> float:
        """How much of the run is done."""
        return self.done / (self.epochs * self.steps) if self.epochs else 0.0

    @property
    def was_finished(self) -> bool:
        """Whether there was nothing left to do."""
        return self.epochs > 0 and self.done_before == self.epochs * self.steps

    def start(self, name: str, epochs: int, steps: int, done: int) -> None:
        self.epochs, self.steps, self.done_epochs = epochs, steps, done
        self.done = self.done_before = done * steps
        self.state = FIRST_STEP
        rest = f", {done} of them done" if done else ""
        self.tell(f"{self.name}: {epochs} epoch{'s' * (epochs > 1)} of {steps} steps{rest}", now_and_then=False)

    def step(self, done: int) -> None:
        now = time.monotonic()
        if now >= self.next_update:
            self.next_update = now + UPDATE_SECONDS
            self._count(now, self.done_epochs * self.steps + done)

    def epoch(self, row: Mapping[str, Any]) -> None:
        self.done_epochs = row["epoch"]
        if row.get("test_error") is not None:
            self.measure, self.measured = "accuracy", f"{100 * (1 - row['test_error']):.1f}%"
        elif row.get("test_metric") is not None:
            metric, value = metric_of(row["metric"]), row["test_metric"]
            self.measure, self.measured = metric.name, f"{100 * value:.1f}%" if metric.unit == "%" else f"{value:.4g}"
        elif row.get("distance") is not None:
            self.measure, self.measured = "distance", f"{row['distance']:.1f}"
        self._count(time.monotonic(), self.done_epochs * self.steps)

    def end(self, reason: str) -> None:
        self.state, self.seconds = reason, time.monotonic() - self.started
        measured = f", {self.measure} {self.measured}" if self.measured else ""
        when = "earlier" if self.was_finished else f"after {duration(self.seconds)}"
        self.tell(f"{self.name}: {reason} {when}{measured}", now_and_then=False)

    def elapsed(self, now: float) -> str:
        """The time since it began; nothing for one that has not, or had finished earlier."""
        if self.state in (WAITING, NOT_STARTED) or self.was_finished:
            return ""
        return duration(self.seconds if self.state in ENDS else now - self.started)

    def speed(self, now: float) -> str:
        """Steps a second."""
        found = self.pace.steps_a_second(self.started + self.seconds if self.state in ENDS else now, self.done)
        return "" if found is None else f"{found:,.0f}" if found >= 100 else f"{found:.3g}"

    def seconds_left(self, now: float) -> float | None:
        """None before that can be said."""
        each = self.pace.seconds_a_step(now, self.done) if self.state == RUNNING else None
        return None if each is None else each * (self.epochs * self.steps - self.done)

    def whole_seconds(self, now: float) -> float | None:
        """What the whole of it takes or, if it has finished, took."""
        if self.state == FINISHED:
            share = 1 - self.done_before / max(1, self.epochs * self.steps)
            return self.seconds / share if share > 0 else None
        left = self.seconds_left(now)
        return None if left is None else left / max(1e-9, 1 - self.share)

    def _count(self, now: float, done: int) -> None:
        self.done, self.state = done, RUNNING
        self.pace.mark(now, done)
        speed, left = self.speed(now), self.seconds_left(now)
        parts = [f"epoch {self.done_epochs}/{self.epochs}", self.measured and f"{self.measure} {self.measured}"]
        parts += [speed and f"{speed} steps/s", f"{self.elapsed(now)} elapsed"]
        parts += ["" if left is None else f"{duration(left)} left"]
        self.tell(f"{self.name}: " + ", ".join(part for part in parts if part), now_and_then=True)


class ShownRuns:
    """All runs of a command, and what they come to."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._runs: dict[str, ShownRun] = {}

    def __iter__(self) -> Iterator[ShownRun]:
        return iter(list(self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, run: ShownRun) -> ShownRun:
        self._runs[run.name] = run
        return run

    def named(self, name: str) -> ShownRun | None:
        return self._runs.get(name)

    def counts(self) -> str:
        """How many runs are in which state."""
        states = Counter(RUNNING if run.state in (FIRST_STEP, PREPARING) else run.state for run in self)
        return ", ".join(f"{states[state]} {state}" for state in STATES if states[state])

    def left(self, now: float) -> str:
        """The time until all runs are done: what those that run have left, and for each to come as long as another seed of
        it took. "~" where there is no other seed yet; nothing where too little is known."""
        open_runs = [run for run in self if run.state not in ENDS]
        took: dict[str, list[float]] = {}
        for run in self:
            whole = run.whole_seconds(now)
            if whole is not None:
                took.setdefault(run.kind, []).append(whole)
        kinds = {run.kind for run in open_runs}
        early = any(run.state == RUNNING and run.seconds_left(now) is None for run in open_runs)
        stopped = any(run.state == NOT_STARTED for run in open_runs)
        if not open_runs or early or stopped or len(took) < min(ENOUGH_KINDS, len(kinds | took.keys())):
            return ""
        everything = [seconds for known in took.values() for seconds in known]
        expected = {kind: sum(known) / len(known) for kind in kinds for known in [took.get(kind, everything)]}
        known_lefts = [run.seconds_left(now) for run in open_runs]
        lefts = [expected[run.kind] if left is None else left for run, left in zip(open_runs, known_lefts, strict=True)]
        at_once = max(1, sum(run.state not in (WAITING, NOT_STARTED) for run in open_runs))
        return "~" * bool(kinds - took.keys()) + duration(max(sum(lefts) / at_once, *lefts, 0.0))
