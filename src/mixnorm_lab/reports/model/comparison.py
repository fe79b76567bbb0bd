"""Norms beside batch norm with the same settings: how much better in the end, and how much sooner at fixed targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from mixnorm_lab.reports.model import statistics
from mixnorm_lab.reports.model.groups import (
    Family,
    Group,
    average,
    best,
    final_loss,
    in_the_end,
    is_busy,
    partner,
    reached,
    unsteadiness,
)
from mixnorm_lab.reports.model.measure import PLAIN, Measure
from mixnorm_lab.storage.records import Record
from mixnorm_lab.tables import Difference, Measured

SHARES = (0.1, 0.2, 1 / 3, 0.5)  # of batch norm's training: what its mean curve has there is a target for every norm


@dataclass(frozen=True)
class Target:
    """What it took a norm, and batch norm, to get to the same value.

    Args:
        fewer: % fewer steps than batch norm, by geometric means.
        less_time: the same of seconds of training; None where a machine was busy with something else.
    """

    value: float
    steps: Measured
    base_steps: Measured
    fewer: Difference
    seconds: Measured
    base_seconds: Measured
    less_time: Difference | None


@dataclass(frozen=True)
class Comparison:
    """A norm beside batch norm, over all seeds of both.

    Args:
        measure: what they are judged by.
        ended, base_ended: the mean over the last epochs.
        end, best, average: differences from batch norm of that, of the best evaluation, and of the mean over the training.
        unsteady: the difference of the deviation within windows of ten epochs; no mean where the training is shorter.
        loss: the difference of the training loss in the last epochs.
        busy: whether a machine was busy with something else, so that time is not judged.
    """

    group: Group
    base: Group
    measure: Measure
    ended: Measured
    base_ended: Measured
    end: Difference
    best: Difference
    average: Difference
    unsteady: Difference
    loss: Difference
    targets: tuple[Target, ...]
    busy: bool

    @property
    def furthest(self) -> Target | None:
        """The hardest target that every run of both norms got to."""
        return next((target for target in reversed(self.targets) if target.fewer.mean is not None), None)

    @property
    def seeds_needed(self) -> int | None:
        samples = [[value for run in one.runs if (value := in_the_end(run, self.measure)) is not None] for one in self.both]
        return statistics.seeds_needed(self.size, *samples)

    @property
    def size(self) -> float:
        """A difference that would be worth seeing: a point or, of what is no percentage, a twentieth of batch norm's."""
        return self.measure.size or 0.05 * abs(self.base_ended.mean or 0)

    @property
    def both(self) -> tuple[Group, Group]:
        return self.group, self.base


def compare(group: Group, base: Group, key: str = PLAIN) -> Comparison:
    measure = base.judged_by(key)

    def of(number: Callable[[Record, Measure], float | None]) -> Difference:
        ours, theirs = ([number(run, measure) for run in one.runs] for one in (group, base))
        return statistics.difference(ours, theirs)

    return Comparison(
        group=group,
        base=base,
        measure=measure,
        ended=Measured.over(in_the_end(run, measure) for run in group.runs),
        base_ended=Measured.over(in_the_end(run, measure) for run in base.runs),
        end=of(in_the_end),
        best=of(best),
        average=of(average),
        unsteady=of(unsteadiness),
        loss=of(lambda run, _: final_loss(run)),
        targets=tuple(to_target(group, base, value, measure) for value in targets(base, measure)),
        busy=busy((*group.runs, *base.runs)),
    )


def busy(runs: Sequence[Record]) -> bool:
    return any(is_busy(run) for run in runs)


def targets(base: Group, measure: Measure) -> tuple[float, ...]:
    """What batch norm's mean curve has after a tenth, a fifth, a third and a half of its training, a little rounded."""
    length = min(len(run.epochs) for run in base.runs)
    curve = np.array([measure.values(run)[:length] for run in base.runs])
    there = ~np.isnan(curve).all(axis=0)
    line = np.full(length, np.nan)
    line[there] = np.nanmean(curve[:, there], axis=0)
    line = measure.so_far(line)
    found = [line[math.ceil(share * length) - 1] for share in SHARES]
    return tuple(dict.fromkeys(measure.easier(float(value)) for value in found if not np.isnan(value)))


def to_target(group: Group, base: Group, value: float, measure: Measure) -> Target:
    ours, theirs = ([reached(run, value, measure) for run in one.runs] for one in (group, base))

    def numbers(key: str) -> tuple[list[float | None], list[float | None]]:
        first, second = ([None if epoch is None else epoch[key] for epoch in found] for found in (ours, theirs))
        return first, second

    steps, base_steps = numbers("steps")
    seconds, base_seconds = numbers("train_seconds")
    return Target(
        value=value,
        steps=Measured.over(steps),
        base_steps=Measured.over(base_steps),
        fewer=statistics.fewer(steps, base_steps),
        seconds=Measured.over(seconds),
        base_seconds=Measured.over(base_seconds),
        less_time=None if busy((*group.runs, *base.runs)) else statistics.fewer(seconds, base_seconds),
    )


def placebo(base: Group, value: float, measure: Measure, key: str = "steps") -> Measured:
    """How many % fewer steps one seed of batch norm takes to a target than another, over all pairs that both got there."""
    found = [epoch[key] for run in base.runs if (epoch := reached(run, value, measure)) is not None]
    return Measured.over(
        100 * (1 - min(pair) / max(pair)) for pair in combinations(found, 2) if None not in pair and max(pair)
    )


def as_in_the_paper(group: Group, base: Group, paper: float | None = None) -> Difference:
    """% fewer steps to batch norm's largest accuracy: to its mean over the seeds, and of batch norm to each seed's own."""
    measure = base.judged_by()
    bests = [best(run, measure) for run in base.runs]
    there = [value for value in bests if value is not None]
    goal = float(np.mean(there)) if there else None
    ours = [_steps_to(run, goal, measure) for run in group.runs]
    theirs = [_steps_to(run, value, measure) for run, value in zip(base.runs, bests, strict=True)]
    return statistics.fewer(ours, theirs, paper)


def placebo_in_the_paper(base: Group) -> Measured:
    """% fewer steps that one seed of batch norm takes to another's largest accuracy than that one: of all pairs, in either
    order, those in which it gets there."""
    measure = base.judged_by()
    bests = [best(run, measure) for run in base.runs]
    saved = []
    for run, (other, goal) in ((run, pair) for run in base.runs for pair in zip(base.runs, bests, strict=True)):
        if run is not other:
            ours, theirs = _steps_to(run, goal, measure), _steps_to(other, goal, measure)
            saved.append(None if ours is None or not theirs else 100 * (1 - ours / theirs))
    return Measured.over(saved)


def _steps_to(run: Record, goal: float | None, measure: Measure) -> float | None:
    epoch = None if goal is None else reached(run, goal, measure)
    return None if epoch is None else epoch["steps"]


def lead(group: Group, base: Group, key: str, until: int, paper: float | None = None) -> Difference:
    """How much larger the largest accuracy of the first epochs is, with runs that were cut off later."""
    measure = base.judged_by(key)
    ours, theirs = ([best(run, measure, until) for run in one.until(until)] for one in (group, base))
    return statistics.difference(ours, theirs, paper)


def comparisons(family: Family, key: str = PLAIN) -> list[Comparison]:
    """Every norm beside batch norm with its settings, in the order of the family; corrected for how many there are."""
    pairs = [(group, partner(group, family.groups)) for group in family.groups if not group.is_batch_norm and group.runs]
    found = [compare(group, base, key) for group, base in pairs if base is not None and group.has(key) and base.has(key)]
    ends, bests = (statistics.holm([getattr(made, name) for made in found]) for name in ("end", "best"))
    steps = iter(statistics.holm([target.fewer for made in found for target in made.targets]))
    times = iter(statistics.holm([target.less_time for made in found for target in made.targets if target.less_time]))
    corrected = []
    for made, end, largest in zip(found, ends, bests, strict=True):
        told = tuple(
            replace(target, fewer=next(steps), less_time=next(times) if target.less_time else None)
            for target in made.targets
        )
        corrected.append(replace(made, end=end, best=largest, targets=told))
    return corrected


def verdict(made: Difference, words: tuple[str, str] = ("higher", "lower")) -> str:
    """A difference in words: which way, if that is certain, and how its interval compares with the paper's figure."""
    if made.mean is None:
        return ""
    if made.low is None or made.high is None:
        return "cannot tell"
    text = words[made.mean < 0] if made.sure else "cannot tell"
    if not isinstance(made.paper, (int, float)):
        return text
    if made.low <= made.paper <= made.high:
        return f"{text}, as in the paper" if made.sure else text
    return f"{text}, {'more' if made.mean > made.paper else 'less'} than in the paper"
