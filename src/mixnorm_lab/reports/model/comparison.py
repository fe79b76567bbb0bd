"""Mixture norm beside batch norm with the same settings: how much sooner, how much better, and the sentence that says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mixnorm_lab.reports.model.groups import PLAIN, Family, Group, accuracy, partner, reached, target, values
from mixnorm_lab.storage.records import Record
from mixnorm_lab.tables import Measured

# Student's t beyond which 2.5% lie on either side, for 1, 2, … degrees of freedom; beyond them that of the normal
# distribution, plus what is nearly the rest.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110,
     2.101, 2.093, 2.086)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """A group beside its batch norm, or batch norm beside itself.

    Args:
        best: the largest accuracy of each run, in %.
        steps: gradient updates to batch norm's largest accuracy (with the same seed, where there is one).
        seconds: of training alone, to the same.
        gain: points of the largest accuracy above batch norm's, over pairs of the same seed where all have one.
        saved: steps fewer than batch norm's, over such pairs, too.
        last: points of the last epoch's accuracy above batch norm's, over such pairs, too.

    Steps and seconds are of runs that were cut off as well, if all of these had got there.
    """

    group: Group
    base: Group
    best: Measured
    base_best: Measured
    steps: Measured
    base_steps: Measured
    seconds: Measured
    base_seconds: Measured
    gain: Measured
    saved: Measured
    last: Measured

    @property
    def fewer_steps(self) -> float | None:
        return _less(self.steps, self.base_steps)

    @property
    def less_time(self) -> float | None:
        return _less(self.seconds, self.base_seconds)

    @property
    def as_soon(self) -> bool:
        """Whether it takes fewer steps, or more, by less than what differs from seed to seed."""
        return is_within(self.saved)


def compare(group: Group, base: Group, key: str = PLAIN) -> Comparison:
    partners = _partners(group.runs, base)
    timed = _timed(group, base, key)
    beside = _partners(timed, base)
    return Comparison(
        group,
        base,
        Measured.over(accuracy(run, key) for run in group.runs),
        Measured.over(accuracy(run, key) for run in partners),
        _to_target(timed, base, "steps", key),
        _to_target(beside, base, "steps", key),
        _to_target(timed, base, "train_seconds", key),
        _to_target(beside, base, "train_seconds", key),
        _gain(group.runs, partners, key),
        _difference(beside, timed, lambda run: _steps_to_target(run, base, key)),
        lead_at_the_end(group, base, key),
    )


def _timed(group: Group, base: Group, key: str, below: float = 0.0) -> tuple[Record, ...]:
    """The runs that steps are counted of. To leave out only those that were cut off before they got there would favour the
    group."""
    got_there = all(_steps_to_target(run, base, key, below) is not None for run in group.cut_off)
    return group.until(0) if got_there else group.runs


def _partners(runs: Sequence[Record], base: Group) -> tuple[Record, ...]:
    """The runs of batch norm with the seeds of these, or all where one is missing."""
    by_seed = {run.config.seed: run for run in base.runs}
    seeds = [run.config.seed for run in runs]
    return tuple(by_seed[seed] for seed in seeds) if all(seed in by_seed for seed in seeds) else base.runs


def _to_target(runs: Sequence[Record], base: Group, number: str, key: str, below: float = 0.0) -> Measured:
    found = []
    for run in runs:
        goal = target(run, base, key)
        epoch = None if goal is None else reached(run, goal - below, key)
        found.append(None if epoch is None else epoch[number])
    return Measured.over(found)


def lead(group: Group, base: Group, key: str, until: int) -> Measured:
    """Points of the largest accuracy above batch norm's in the first epochs."""
    runs = group.until(until)
    return _gain(runs, _partners(runs, base), key, until)


def lead_at_the_end(group: Group, base: Group, key: str = PLAIN) -> Measured:
    """Points of the last epoch's accuracy above batch norm's, which no choice among evaluations has made larger."""
    partners = _partners(group.runs, base)
    return _difference(group.runs, partners, lambda run: None if np.isnan(e := values(run, key, 100)[-1]) else float(-e))


def saved_steps(group: Group, base: Group, key: str = PLAIN, below: float = 0.0) -> Measured:
    """How many % fewer steps each run took to batch norm's largest accuracy than batch norm with its seed.

    ``below``: points less than that accuracy, for both.
    """
    runs = _timed(group, base, key, below)
    partners = _partners(runs, base)
    theirs = {run.config.seed: _steps_to_target(run, base, key, below) for run in partners}
    mean = _to_target(partners, base, "steps", key, below).mean
    saved = []
    for run in runs:
        ours, beside = _steps_to_target(run, base, key, below), theirs.get(run.config.seed, mean)
        saved.append(None if ours is None or not beside else 100 * (1 - ours / beside))
    return Measured.over(saved)


def _steps_to_target(run: Record, base: Group, key: str, below: float = 0.0) -> float | None:
    return _to_target([run], base, "steps", key, below).mean


def _gain(runs: Sequence[Record], partners: Sequence[Record], key: str, until: int | None = None) -> Measured:
    return _difference(runs, partners, lambda run: accuracy(run, key, until))


def _difference(
    runs: Sequence[Record], partners: Sequence[Record], number: Callable[[Record], float | None]
) -> Measured:  # fmt: skip
    """How much more than their partners runs have of a number, seed by seed where the seeds are the same."""
    ours, theirs = ([number(run) for run in part] for part in (runs, partners))
    if [run.config.seed for run in runs] == [run.config.seed for run in partners]:
        return Measured.over(None if a is None or b is None else a - b for a, b in zip(ours, theirs, strict=True))
    a, b = Measured.over(ours), Measured.over(theirs)
    if a.mean is None or b.mean is None:
        return Measured(None, n=0, of=a.of)
    deviation = None if a.deviation is None or b.deviation is None else math.hypot(a.deviation, b.deviation)
    return Measured(a.mean - b.mean, deviation, a.n, a.of)


def interval(measured: Measured) -> str:
    """Where the mean of a difference is with 95% certainty, if its values are normally distributed; nothing of one value."""
    if measured.mean is None or measured.deviation is None or measured.n < 2:
        return ""
    freedom = measured.n - 1
    t = T[freedom - 1] if freedom <= len(T) else 1.96 + 2.4 / freedom
    half = t * measured.deviation / math.sqrt(measured.n)
    return f"{measured.mean - half:+.2f} to {measured.mean + half:+.2f}".replace("-", "−")


def is_within(difference: Measured) -> bool:
    """Whether a difference is smaller than its spread over the seeds."""
    return difference.mean is not None and difference.deviation is not None and abs(difference.mean) < difference.deviation


def verdict(measured: Measured, words: tuple[str, str] = ("higher", "lower")) -> str:
    """A difference in words: whether it is larger than its spread and, if so, how it compares with the paper's."""
    if measured.mean is None:
        return ""
    if measured.n < measured.of:
        return f"in {measured.n} of {measured.of} runs only"
    if measured.deviation is None:
        return "of one seed"
    if abs(measured.mean) <= measured.deviation:
        return "inside the spread"
    text = words[0] if measured.mean > 0 else words[1]
    if not isinstance(measured.paper, (int, float)):
        return text
    beyond = abs(measured.mean - measured.paper) > measured.deviation
    compared = ("more than in the paper" if measured.mean > measured.paper else "less than in the paper") if beyond else ""
    return f"{text}, {compared or 'as in the paper'}"


def _less(ours: Measured, theirs: Measured) -> float | None:
    """How many % less, where every run got there."""
    if ours.mean is None or not theirs.mean or ours.n < ours.of:
        return None
    return 100 * (1 - ours.mean / theirs.mean)


def best_comparisons(family: Family, key: str = PLAIN) -> list[Comparison]:
    """For each batch norm, the mixture norm with its settings that has the largest accuracy; of norms side by side, all."""
    if family.side_by_side:
        return side_by_side(family, key)
    best: dict[int, Comparison] = {}
    for group in family.groups:
        base = partner(group, family.groups)
        if group.is_batch_norm or not group.runs or base is None or not group.has(key) or not base.has(key):
            continue
        made = compare(group, base, key)
        other = best.get(id(base))
        if other is None or (made.best.mean or 0) > (other.best.mean or 0):
            best[id(base)] = made
    return list(best.values())


def side_by_side(family: Family, key: str = PLAIN) -> list[Comparison]:
    """Every norm beside batch norm with its settings, in the order of the family."""
    pairs = [(group, partner(group, family.groups)) for group in family.groups if not group.is_batch_norm and group.runs]
    return [compare(group, base, key) for group, base in pairs if base is not None and group.has(key) and base.has(key)]


def answers(found: Sequence[tuple[Family, Comparison]]) -> list[str]:
    """What came out: a sentence or two for each batch norm and its best mixture norm; where there are many, one for all. Of
    norms side by side, for each of them."""
    sentences = [f"{sentence(made, named=True)} {_in_the_end(made)}" for family, made in found if family.side_by_side]
    found = [(family, made) for family, made in found if not family.side_by_side]
    if len(found) > 3:
        return [*sentences, overview([made for _, made in found])]
    for family, made in found:
        where = f"{family.title}, {made.base.label}: " if len(found) > 1 else ""
        choices = [g for g in family.groups if not g.is_batch_norm and partner(g, family.groups) is made.base]
        sentences.append(where + sentence(made, named=len(choices) > 1))
    return sentences


def overview(comparisons: Sequence[Comparison]) -> str:
    sooner = [made.fewer_steps for made in comparisons if made.fewer_steps is not None and made.fewer_steps > 0]
    never = sum(made.steps.n == 0 for made in comparisons)
    better = [made.gain.mean for made in comparisons if made.gain.mean is not None and made.gain.mean > 0]
    text = (
        f"In {len(sooner)} of {len(comparisons)} settings, the best mixture norm reached batch norm's best accuracy sooner"
    )
    text += f" ({min(sooner):.0f} to {max(sooner):.0f}% fewer steps)" if sooner else ""
    text += f"; in {len(better)}, its own best accuracy is higher"
    text += f" (by {min(better):.2f} to {max(better):.2f} points)" if better else ""
    if better and any(made.gain.deviation is not None for made in comparisons):
        clear = [one for one in (made.gain for made in comparisons) if one.deviation is not None and not is_within(one)]
        higher = sum(one.mean is not None and one.mean > 0 for one in clear)
        text += f", in {higher} of these by more than the spread of the seeds"
    return text + (f"; in {never}, no run got there." if never else ".")


def sentence(made: Comparison, named: bool = False) -> str:
    """``named``: the norm is called by its label, for there are several."""
    kind = made.group.config.norm_text.partition(",")[0]
    label = made.group.label
    told = label.replace("-", " ") in (kind, kind.removesuffix(" norm"))  # "mixture-norm" or "layer" says no more
    who = f"{kind.capitalize()} ({label})" if named and not told else kind.capitalize()
    epochs = made.group.config.epochs
    goal = f"batch norm's best accuracy ({made.base_best.mean:.2f}%)"
    fewer, steps = made.fewer_steps, made.steps
    if fewer is not None:
        share = "as many steps" if abs(fewer) < 0.5 else f"{abs(fewer):.0f}% {'fewer' if fewer > 0 else 'more'} steps"
        within = ", which is within the spread of the seeds" if made.as_soon and share != "as many steps" else ""
        counts = f"({steps.mean:,.0f} instead of {made.base_steps.mean:,.0f}{within})"
        return f"{who} reached {goal} in {share} {counts}, and {_ended(made)}. {_time(made)}".rstrip()
    if steps.n:
        return f"{who} reached {goal} in {steps.n} of {steps.of} runs, and {_ended(made)}."
    return f"{who} did not reach {goal} in {epochs} epoch{'s' * (epochs > 1)}: {_ended(made)}."


def _ended(made: Comparison) -> str:
    gain = made.gain
    assert gain.mean is not None  # both have an accuracy, or there were no comparison
    seeds = f"{gain.of} seeds" if gain.of > 1 else "one seed, so the spread is not known"
    if gain.of > 1 and len(made.base.runs) == 1:
        seeds += ", but one of batch norm, so the spread is not known"
    if round(abs(gain.mean), 2) == 0:
        return f"its best accuracy is the same ({seeds})"
    spread, within = "", ""
    if gain.deviation is not None:
        spread = f" ± {gain.deviation:.2f}"
        within = ", which is within the spread of the seeds" if is_within(gain) else ""
    points = f"{abs(gain.mean):.2f}{spread} points {'higher' if gain.mean > 0 else 'lower'}"
    return f"its best accuracy is {points} ({seeds}){within}"


def _in_the_end(made: Comparison) -> str:
    last = made.last
    if last.mean is None:
        return ""
    if round(abs(last.mean), 2) == 0:
        return "In the last epoch its accuracy is batch norm's."
    points = f"{abs(last.mean):.2f}" + ("" if last.deviation is None else f" ± {last.deviation:.2f}")
    where = "above" if last.mean >= 0 else "below"
    sure = f" (95% interval of the mean: {inside})" if (inside := interval(last)) else ""
    return f"In the last epoch it is {points} points {where} batch norm{sure}."


def _time(made: Comparison) -> str:
    if made.seconds.mean is None or made.base_seconds.mean is None:
        return ""
    return f"In training time that is {duration(made.seconds.mean)} instead of {duration(made.base_seconds.mean)}."


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
