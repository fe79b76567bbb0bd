"""The picture of generators in the plane: their points beside the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mixnorm_lab.config.plane import DATA, NORMS
from mixnorm_lab.reports.plots.style import BLUE, FORMATS, ORANGES, STYLE, Picture, save
from mixnorm_lab.storage.plane_results import Result, by_norm


def draw(data: str, results: Sequence[Result], folder: Path, formats: Sequence[str] = FORMATS) -> Picture:
    """Real points and those of both generators: of each norm the seed in the middle, by modes reached and good samples."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    known = DATA[data]
    centres = np.array(known.centres, dtype=np.float32)
    noise = np.random.default_rng(0).normal(scale=known.deviation, size=(1000, 2))
    panels = [("real points", np.resize(centres, (1000, 2)) + noise, "#555555")]
    for (norm, found), color in zip(by_norm(results), (BLUE, ORANGES[0]), strict=False):
        middle = sorted(found, key=lambda result: (result.score.reached, result.score.good))[len(found) // 2]
        score = middle.score
        words = f"{norm}, seed {middle.seed}:\n{score.reached} modes, {100 * score.good:.0f}% good"
        panels.append((words, np.array(middle.points), color))
    limit = 1.25 * float(np.abs(centres).max())
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.2 * len(panels), 3.7), layout="constrained")
        for axis, (words, shown, color) in zip(figure.subplots(1, len(panels)), panels, strict=True):
            axis.scatter(shown[:, 0], shown[:, 1], s=2, color=color, alpha=0.5, linewidths=0, rasterized=True)
            axis.set(title=words, xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
            axis.grid(visible=False)
        title = f"Samples of the {data}: {' and '.join(NORMS)}"
        picture = Picture(f"modes-{data}", title, "Of each norm the seed in the middle.", wide=True)
        save([(picture, figure)], folder, formats)
    return picture
