"""A number that several runs have, with its spread over them and the paper's beside it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Measured:
    """A number over several runs.

    Args:
        mean: None where no run has the number.
        deviation: the sample's standard deviation; None for fewer than two runs.
        n: the runs that have the number.
        of: all runs.
        paper: the paper's number, or what it says instead.
    """

    mean: float | None
    deviation: float | None = None
    n: int = 1
    of: int = 1
    paper: float | str | None = None

    @classmethod
    def over(cls, values: Iterable[float | None], paper: float | str | None = None) -> Measured:
        everything = list(values)
        there = [value for value in everything if value is not None]
        mean = float(np.mean(there)) if there else None
        deviation = float(np.std(there, ddof=1)) if len(there) > 1 else None
        return cls(mean, deviation, len(there), len(everything), paper)
