"""What a run is judged by: the accuracy of a classifier, or another number that its evaluation gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Metric:
    """A number of an evaluation.

    An epoch's row has it as ``test_metric``, and as ``recalibrated_metric`` from refilled statistics; accuracy alone is
    there as ``test_error`` and ``recalibrated_error``, the share of wrong answers.

    Args:
        name: as a report calls it, such as "mean squared error".
        better: whether higher or lower values are.
        unit: what stands behind its values, such as "%".
    """

    name: str
    better: Better = "higher"
    unit: str = ""


ACCURACY = Metric("accuracy", unit="%")
METRICS = {
    metric.name: metric
    for metric in (ACCURACY, Metric("mean squared error", "lower"), Metric("mean IoU", unit="%"), Metric("loss", "lower"))
}


def metric_of(name: str) -> Metric:
    """The metric that ``RunConfig.metric`` names; one of the user's own is "its name:higher" or "its name:lower"."""
    if name in METRICS:
        return METRICS[name]
    own, colon, better = name.rpartition(":")
    if not colon or better not in ("higher", "lower") or not own:
        choices = ", ".join(METRICS)
        raise ValueError(f"there is no metric {name!r}: use {choices}, or a name with :higher or :lower behind it")
    return Metric(own, better)  # type: ignore[arg-type]
