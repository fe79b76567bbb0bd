"""The comparison of generators in the plane as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mixnorm_lab.generators.plane import DATA, NORMS, Result, by_norm
from mixnorm_lab.reports.plots.curves import FORMATS, STYLE, Picture, save
from mixnorm_lab.reports.plots.panels import BLUE, ORANGES
from mixnorm_lab.reports.tables.table import Column, Measured, Table, Value, text_column


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


def draw(data: str, results: Sequence[Result], folder: Path, formats: Sequence[str] = FORMATS) -> Picture:
    """Real points and those of both generators: of each norm the seed in the middle, by modes reached and good samples."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    modes = DATA[data]
    noise = np.random.default_rng(0).normal(scale=modes.deviation, size=(1000, 2))
    panels = [("real points", np.resize(modes.centres.numpy(), (1000, 2)) + noise, "#555555")]
    for (norm, found), color in zip(by_norm(results), (BLUE, ORANGES[0]), strict=False):
        middle = sorted(found, key=lambda result: (result.score.reached, result.score.good))[len(found) // 2]
        score = middle.score
        words = f"{norm}, seed {middle.seed}:\n{score.reached} modes, {100 * score.good:.0f}% good"
        panels.append((words, np.array(middle.points), color))
    limit = 1.25 * float(modes.centres.abs().max())
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.2 * len(panels), 3.7), layout="constrained")
        for axis, (words, points, color) in zip(figure.subplots(1, len(panels)), panels, strict=True):
            axis.scatter(points[:, 0], points[:, 1], s=2, color=color, alpha=0.5, linewidths=0, rasterized=True)
            axis.set(title=words, xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
            axis.grid(visible=False)
        title = f"Samples of the {data}: {' and '.join(NORMS)}"
        picture = Picture(f"modes-{data}", title, "Of each norm the seed in the middle.", wide=True)
        save([(picture, figure)], folder, formats)
    return picture
