"""The picture of generators in the plane: their points beside the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mixnorm_lab.config.plane import DATA, NORMS
from mixnorm_lab.reports.plots.style import BLUE, FORMATS, ORANGES, STYLE, Picture, save, save_narrow
from mixnorm_lab.storage.plane_results import Result, by_norm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Panel = tuple[str, np.ndarray, str]  # words, points, colour


def draw(
    data: str, results: Sequence[Result], folder: Path, formats: Sequence[str] = FORMATS, narrow: bool = False
) -> Picture:
    """Real points and those of both generators: of each norm the seed in the middle, by modes reached and good samples.

    Args:
        narrow: draw them again for a phone, below each other.
    """
    import matplotlib as mpl

    known = DATA[data]
    centres = np.array(known.centres, dtype=np.float32)
    noise = np.random.default_rng(0).normal(scale=known.deviation, size=(1000, 2))
    panels: list[Panel] = [("real points", np.resize(centres, (1000, 2)) + noise, "#555555")]
    for (norm, found), color in zip(by_norm(results), (BLUE, ORANGES[0]), strict=False):
        middle = sorted(found, key=lambda result: (result.score.reached, result.score.good))[len(found) // 2]
        score = middle.score
        words = f"{norm}, seed {middle.seed}:\n{score.reached} modes, {100 * score.good:.0f}% good"
        panels.append((words, np.array(middle.points), color))
    limit = 1.25 * float(np.abs(centres).max())
    title = f"Samples of the {data}: {' and '.join(NORMS)}"
    picture = Picture(f"modes-{data}", title, "Of each norm the seed in the middle.", wide=True)
    with mpl.rc_context(STYLE):
        save([(picture, _figure(panels, limit, 1, len(panels)))], folder, formats)
        if narrow:
            save_narrow([(picture, _figure(panels, limit, len(panels), 1))], folder)
    return replace(picture, narrow=narrow)


def _figure(panels: Sequence[Panel], limit: float, rows: int, columns: int) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * columns, 3.7 * rows), layout="constrained")
    for axis, (words, shown, color) in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=True):
        axis.scatter(shown[:, 0], shown[:, 1], s=2, color=color, alpha=0.5, linewidths=0, rasterized=True)
        axis.set(title=words, xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
        axis.grid(visible=False)
    return figure
