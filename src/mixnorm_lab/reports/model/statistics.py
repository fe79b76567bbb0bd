"""Differences of means with their certainty: Welch's interval, Holm's correction, and how many seeds a difference takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mixnorm_lab.tables import Difference

LEVEL = 0.05  # of a false positive, two-sided
POWER = 0.8  # of a difference that is there to be seen
MOST_SEEDS = 1000
FEW = 8  # degrees of freedom below which a deviation is itself badly known


def difference(ours: Sequence[float | None], base: Sequence[float | None], paper: float | None = None) -> Difference:
    """How much larger the mean of ``ours`` is, with Welch's 95% interval where both have two values and these vary.

    A run without a value makes the difference one of a part of the runs alone, which has no mean.
    """
    n, base_n = len(ours), len(base)
    a, b = ([value for value in part if value is not None] for part in (ours, base))
    if not a or not b or len(a) < n or len(b) < base_n:
        return Difference(None, n=len(a), base_n=len(b), of=n, base_of=base_n, paper=paper)
    mean = float(np.mean(a) - np.mean(b))
    made = Difference(mean, n=n, base_n=base_n, of=n, base_of=base_n, paper=paper)
    if min(n, base_n) < 2 or (len(set(a)) == 1 and len(set(b)) == 1):
        return made
    from scipy import stats  # here, for it takes a second to load

    parts = [float(np.var(part, ddof=1)) / len(part) for part in (a, b)]
    error = math.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(of) - 1) for part, of in zip(parts, (a, b), strict=True)
    )  # Satterthwaite's
    half = float(stats.t.ppf(1 - LEVEL / 2, freedom)) * error
    return replace(made, low=mean - half, high=mean + half, p=float(2 * stats.t.sf(abs(mean) / error, freedom)))


def fewer(ours: Sequence[float | None], base: Sequence[float | None], paper: float | None = None) -> Difference:
    """How many % less ``ours`` are, from geometric means: the difference of logarithms, with its interval."""
    first, second = ([None if value is None or value <= 0 else math.log(value) for value in part] for part in (ours, base))
    found = difference(first, second, paper)

    def share(log: float | None) -> float | None:
        return None if log is None else 100 * (1 - math.exp(log))

    return replace(found, mean=share(found.mean), low=share(found.high), high=share(found.low))


def holm(found: Sequence[Difference]) -> list[Difference]:
    """The differences of a table, each with whether it stands when all that were looked at are counted (Holm, 1979)."""
    tested = sorted((made.p, i) for i, made in enumerate(found) if made.p is not None)
    corrected = list(found)
    largest = 0.0
    for rank, (p, i) in enumerate(tested):
        largest = max(largest, min(1.0, p * (len(tested) - rank)))
        corrected[i] = replace(found[i], sure=largest < LEVEL)
    return corrected


def seeds_needed(size: float, *samples: Sequence[float]) -> int | None:
    """How many seeds of each norm show a difference of this size four times out of five, by the spread of these samples.

    Where they have few degrees of freedom, the spread is taken from its upper 80% limit, for a small one may be chance. None
    where no sample has two values, nothing varies, or a thousand seeds would not do.
    """
    from scipy import stats

    freedom = sum(len(sample) - 1 for sample in samples if len(sample) > 1)
    squares = sum(float(np.var(sample)) * len(sample) for sample in samples if len(sample) > 1)
    if not freedom or not squares or not size:
        return None
    deviation = math.sqrt(squares / (stats.chi2.ppf(0.2, freedom) if freedom < FEW else freedom))
    for n in range(2, MOST_SEEDS + 1):
        shift, degrees = size / (deviation * math.sqrt(2 / n)), 2 * n - 2
        beyond = stats.t.ppf(1 - LEVEL / 2, degrees)
        if stats.nct.sf(beyond, degrees, shift) >= POWER:
            return n
    return None
