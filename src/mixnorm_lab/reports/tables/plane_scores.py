"""The table of generators in the plane, and the sentence that says what came out."""

from __future__ import annotations

from collections.abc import Sequence

from mixnorm_lab.config.plane import DATA
from mixnorm_lab.storage.plane_results import Result, by_norm
from mixnorm_lab.tables import Column, Measured, Table, Value, text_column


def table(data: str, results: Sequence[Result]) -> Table:
    """Modes reached, good samples and divergence of each norm, over the seeds."""
    columns = [
        text_column("norm", "generator"), Column("seeds", "seeds", digits=0),
        Column("reached", f"modes reached, of {len(DATA[data].centres)}", digits=1),
        Column("all", "seeds that reached all", digits=0),
        Column("good", "good samples", digits=1, unit="%"), Column("divergence", "divergence, nats", digits=3),
    ]  # fmt: skip
    rows: list[dict[str, Value]] = [
        {
            "norm": norm,
            "seeds": len(found),
            "reached": Measured.over(result.score.reached for result in found),
            "all": sum(result.score.reached == len(DATA[data].centres) for result in found),
            "good": Measured.over(100 * result.score.good for result in found),
            "divergence": Measured.over(result.score.divergence for result in found),
        }
        for norm, found in by_norm(results)
    ]
    notes = [
        "A sample is good within three deviations of a mode; a mode is reached by one good sample. The divergence is of the "
        "samples' nearest modes from uniform: 0 is best. Mean ± standard deviation over the seeds."
    ]
    return Table(f"Generators of the {data}", columns, rows, notes)


def answer(data: str, results: Sequence[Result]) -> str:
    """What came out, in a sentence."""
    found = dict(by_norm(results))
    reached, good = (
        {norm: Measured.over(value(result) for result in runs) for norm, runs in found.items()}
        for value in (lambda result: result.score.reached, lambda result: 100 * result.score.good)
    )
    number = Column("", "", digits=1)
    parts = [f"{n} reached {number.text(reached[n])} modes with {number.text(good[n])}% good samples" for n in found]
    count, seeds = len(DATA[data].centres), len(next(iter(found.values())))
    text = f"Of the {count} modes of the {data}, generators with {' and those with '.join(parts)}"
    return f"{text} ({seeds} seed{'s' * (seeds > 1)})."
