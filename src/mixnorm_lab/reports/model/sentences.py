"""What came out, in sentences: for each norm beside batch norm, or for many together."""

from __future__ import annotations

from collections.abc import Sequence

from mixnorm_lab.reports.model.comparison import Comparison, Target
from mixnorm_lab.reports.model.groups import Family, last_epochs, partner
from mixnorm_lab.tables import Difference

MOST = 3  # comparisons that have a sentence each, unless norms were compared side by side
BUSY = "The machine was busy, so time is not judged."
MANY = 100  # seeds, more than which nobody trains
WIDEST = 300  # %, beyond which an interval, of two seeds perhaps, says no more than that


def answers(found: Sequence[tuple[Family, Comparison]]) -> list[str]:
    """Sentences for each norm beside batch norm; for many that were not compared side by side, one for all."""
    sentences = [sentence(made, named=True) for family, made in found if family.side_by_side]
    found = [(family, made) for family, made in found if not family.side_by_side]
    if len(found) > MOST:
        return [*sentences, overview([made for _, made in found])]
    for family, made in found:
        where = f"{family.title}, {made.base.label}: " if len(found) > 1 else ""
        choices = [g for g in family.groups if not g.is_batch_norm and partner(g, family.groups) is made.base]
        sentences.append(where + sentence(made, named=len(choices) > 1))
    return sentences


def overview(comparisons: Sequence[Comparison]) -> str:
    """How many of many comparisons are certain, and in which direction."""
    better = [made for made in comparisons if made.end.sure and _gain(made) > 0]
    worse = [made for made in comparisons if made.end.sure and _gain(made) < 0]
    text = f"In {len(better)} of {len(comparisons)} comparisons the norm is better than batch norm in the end"
    if better and all(made.measure.unit == "%" for made in better):
        gains = sorted(_gain(made) for made in better)
        text += f", by {gains[0]:.2f} to {gains[-1]:.2f} points"
    text += f"; in {len(worse)} it is worse" if worse else ""
    left = len(comparisons) - len(better) - len(worse)
    return text + (f". The other {left} cannot be told from chance." if left else ".")


def sentence(made: Comparison, named: bool = False) -> str:
    """What a user reads first. ``named``: the norm is called by its label, for there are several."""
    return " ".join(part for part in (_ended(made, named), _sooner(made), _more_seeds(made)) if part)


def who(made: Comparison, named: bool = False) -> str:
    kind = made.group.config.norm_text.partition(",")[0]
    label = made.group.label
    told = label.replace("-", " ") in (kind, kind.removesuffix(" norm"))  # "mixture-norm" or "layer" says no more
    return f"{kind.capitalize()} ({label})" if named and not told else kind.capitalize()


def _gain(made: Comparison) -> float:
    return made.measure.sign * (made.end.mean or 0.0)


def _ended(made: Comparison, named: bool) -> str:
    measure, end = made.measure, made.end
    if made.ended.mean is None or made.base_ended.mean is None or end.mean is None:
        return f"{who(made, named)} has no {measure.name} in its last epochs."
    values = f"{measure.name} {measure.text(made.ended.mean)}{measure.unit} against {measure.text(made.base_ended.mean)}"
    values += measure.unit
    if end.sure:
        verb = f"is {'better' if _gain(made) > 0 else 'worse'} than batch norm"
    elif min(end.n, end.base_n) < 2:
        verb = "cannot be told apart from batch norm with one seed"
    else:
        verb = "cannot be told apart from batch norm with these seeds"
    return f"{who(made, named)} {verb}: {values}, {_apart(made)} ({_seeds(end)}; {_epochs(made)})."


def _apart(made: Comparison) -> str:
    """ "2.94 points higher [2.29, 3.60]"."""
    measure, end = made.measure, made.end
    assert end.mean is not None
    assert made.ended.mean is not None
    assert made.base_ended.mean is not None
    if not float(measure.text(abs(end.mean))):
        same = measure.text(made.ended.mean) == measure.text(made.base_ended.mean)
        text = "no difference" if same else "hardly any difference"
        sign = 1
    else:
        sign = -1 if end.mean < 0 else 1
        points = f" {measure.points}" if measure.points else ""
        text = f"{measure.text(abs(end.mean))}{points} {'higher' if sign > 0 else 'lower'}"
    if end.low is None or end.high is None:
        return text
    low, high = sorted((sign * end.low, sign * end.high))
    return f"{text} [{measure.text(low)}, {measure.text(high)}]"


def _seeds(end: Difference) -> str:
    if end.n == end.base_n:
        return f"{end.n} seeds each" if end.n > 1 else "one seed each"
    return f"{end.n} seed{'s' * (end.n > 1)}, batch norm {end.base_n}"


def _epochs(made: Comparison) -> str:
    count = last_epochs(made.group.config.epochs)
    return "the last epoch" if count == 1 else f"mean of the last {count} epochs"


def _sooner(made: Comparison) -> str:
    target = made.furthest
    if target is None or target.steps.mean is None or target.base_steps.mean is None:
        return f"Not every run reached what batch norm reaches in the first half. {BUSY if made.busy else ''}".rstrip()
    goal = f"{target.value:.{max(0, made.measure.digits - 1)}f}{made.measure.unit}"
    goal = goal if made.measure.unit else f"a {made.measure.name} of {goal}"
    counts = _instead(f"{target.steps.mean:,.0f}", f"{target.base_steps.mean:,.0f}")
    told = f"It reached {goal} {_share(target.fewer, 'steps')} {counts}"
    if made.busy:
        return f"{told}. {BUSY}"
    return f"{told}{_time(target)}."


def _share(made: Difference, what: str) -> str:
    """ "in 33% fewer steps [25, 40]"."""
    assert made.mean is not None
    if abs(made.mean) < 0.5:
        text, sign = f"in as {'many' if what == 'steps' else 'much'} {what}", 1
    else:
        sign = 1 if made.mean > 0 else -1
        word = ("fewer" if what == "steps" else "less") if sign > 0 else "more"
        text = f"in {abs(made.mean):.0f}% {word} {what}"
    if made.low is None or made.high is None:
        return text
    low, high = sorted((sign * made.low, sign * made.high))
    chance = "" if made.sure or text.startswith("in as") else ", which may be chance"
    inside = "" if text.startswith("in as") or max(-low, high) > WIDEST else f" [{low:.0f}, {high:.0f}]"
    return f"{text}{inside}{chance}".replace("-", "−")


def _instead(ours: str, theirs: str) -> str:
    return f"({ours})" if ours == theirs else f"({ours} instead of {theirs})"


def _time(target: Target) -> str:
    if target.less_time is None or target.less_time.mean is None or target.seconds.mean is None:
        return ""
    assert target.base_seconds.mean is not None
    spent = _instead(duration(target.seconds.mean), duration(target.base_seconds.mean))
    return f", and {_share(target.less_time, 'training time')} {spent}"


def _more_seeds(made: Comparison) -> str:
    """How many seeds a comparison that tells nothing would have needed to tell something."""
    end = made.end
    if end.sure or end.mean is None:
        return ""
    size = f"{made.size:g} point" if made.measure.unit == "%" else made.measure.text(made.size)
    needed = made.seeds_needed
    if needed is None:
        return "" if min(end.n, end.base_n) > 1 else "Five seeds of each norm would tell more."
    if needed <= min(end.n, end.base_n):
        return f"A difference of {size} would probably have been seen."
    if needed > MANY:
        return f"A difference of {size} would not be seen with {MANY} seeds of each norm: it would need a steadier training."
    rough = "" if end.n + end.base_n - 2 >= 8 else " (a rough estimate from so few)"
    return f"To see a difference of {size}, about {needed} seeds of each norm would be needed{rough}."


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
