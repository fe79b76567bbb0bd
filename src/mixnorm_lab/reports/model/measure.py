"""What runs are judged by, accuracy or another metric: its values, which are better, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mixnorm_lab.config.metrics import ACCURACY, Metric, metric_of
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.storage.records import Record

PLAIN, RECALIBRATED = "test_error", "recalibrated_error"  # the two ways to evaluate
ROWS = {PLAIN: "test_metric", RECALIBRATED: "recalibrated_metric"}  # where an epoch has them if they are no accuracies
WAYS = {PLAIN: "", RECALIBRATED: ", statistics refilled"}


def row_key(config: RunConfig, key: str) -> str:
    """Where an epoch of such a run has a number: that by which it is judged is an error only if it is accuracy."""
    return key if config.metric == ACCURACY.name else ROWS.get(key, key)


def values(run: Record, key: str, scale: float = 1.0) -> np.ndarray:
    """A number of every epoch, (epochs,), NaN where there is none."""
    name = row_key(run.config, key)
    return np.array([np.nan if epoch.get(name) is None else scale * epoch[name] for epoch in run.epochs], dtype=float)


@dataclass(frozen=True)
class Measure:
    """What runs are judged by, in one of the two ways to evaluate them.

    Args:
        key: the way, ``PLAIN`` or ``RECALIBRATED``.
        digits: after the decimal point, enough for the values of these runs.
    """

    metric: Metric
    key: str
    digits: int = 2

    @property
    def name(self) -> str:
        return self.metric.name

    @property
    def unit(self) -> str:
        return self.metric.unit

    @property
    def is_accuracy(self) -> bool:
        return self.metric == ACCURACY

    @property
    def points(self) -> str:
        """What differences are counted in: points of a percentage, or nothing."""
        return "points" if self.unit == "%" else ""

    @property
    def sign(self) -> int:
        """1 where higher is better, or -1."""
        return 1 if self.metric.better == "higher" else -1

    @property
    def best_word(self) -> str:
        return "largest" if self.sign > 0 else "lowest"

    @property
    def size(self) -> float:
        """A difference that is worth seeing, where it has one for everything: a point."""
        return 1.0 if self.unit == "%" else 0.0

    def values(self, run: Record) -> np.ndarray:
        """The measure after every epoch, (epochs,), in its unit; NaN where there is none."""
        if self.is_accuracy:
            return 100 - values(run, self.key, 100.0)
        return values(run, self.key, 100.0 if self.unit == "%" else 1.0)

    def so_far(self, line: np.ndarray) -> np.ndarray:
        """The best up to each epoch."""
        return self.sign * np.fmax.accumulate(self.sign * line)

    def best(self, line: np.ndarray) -> float | None:
        return None if np.isnan(line).all() else float(self.sign * np.nanmax(self.sign * line))

    def there(self, line: np.ndarray, target: float) -> np.ndarray:
        """Where a target is reached, for each value."""
        return self.sign * line >= self.sign * target - 1e-9

    def easier(self, value: float) -> float:
        """A value rounded to fewer digits, in the direction in which it is reached sooner."""
        factor = 10.0 ** (self.digits - 1)
        rounded = math.floor(value * factor * self.sign + 1e-9) / factor * self.sign
        return round(rounded, max(0, self.digits - 1))

    def text(self, value: float, signed: bool = False) -> str:
        return f"{value:{'+' if signed else ''},.{self.digits}f}".replace("-", "−")

    # How pictures show it: accuracy as the error that is left, as the paper does, and anything else as it is.

    @property
    def title(self) -> str:
        shown = "Test error" if self.is_accuracy else self.name[:1].upper() + self.name[1:]
        return f"{shown}{WAYS[self.key]}"

    @property
    def axis_label(self) -> str:
        if self.is_accuracy:
            return "test error in %"
        return f"{self.name} in %" if self.unit == "%" else self.name

    @property
    def shown_lower_is_better(self) -> bool:
        return self.is_accuracy or self.sign < 0

    def shown(self, run: Record) -> np.ndarray:
        """What a picture shows after every epoch."""
        return 100 - self.values(run) if self.is_accuracy else self.values(run)

    def shown_value(self, value: float) -> float:
        return 100 - value if self.is_accuracy else value


def measure_of(config: RunConfig, key: str = PLAIN, runs: Iterable[Record] = ()) -> Measure:
    """The measure of a configuration; with ``runs``, of which it takes the digits that tell their values apart."""
    measure = Measure(metric_of(config.metric), key)
    if measure.unit == "%":
        return measure
    last = [abs(line[~np.isnan(line)][-1]) for run in runs if not np.isnan(line := measure.values(run)).all()]
    typical = float(np.median(last)) if last else 0.0
    digits = 3 if not typical else min(9, max(0, 2 - math.floor(math.log10(typical))))
    return Measure(measure.metric, key, digits)
