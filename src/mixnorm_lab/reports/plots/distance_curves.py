"""Pictures of generators: the distance against updates, and samples at the lowest distance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mixnorm_lab.reports.model.generators import DISTANCE, feature_labels, lowest, title
from mixnorm_lab.reports.model.groups import Family, Group, values
from mixnorm_lab.reports.plots.panels import styles
from mixnorm_lab.reports.plots.style import FORMATS, STYLE, Picture, legend_below, new_figure, save, save_narrow, slug
from mixnorm_lab.storage.folders import samples_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(families: Sequence[Family], folder: Path, formats: Sequence[str] = FORMATS, narrow: bool = False) -> list[Picture]:
    """The distance against updates, and the samples of the first seed at the lowest distance; these again for a phone."""
    import matplotlib as mpl

    made: list[tuple[Picture, Figure]] = []
    small: list[tuple[Picture, Figure]] = []
    with mpl.rc_context(STYLE):
        for family in families:
            there = [group for group in family.groups if group.has(DISTANCE)]
            if there:
                made += [_curve(family, there), *_samples(family, there)]
                small += _samples(family, there, below=True) if narrow else []
        save(made, folder, formats)
        save_narrow(small, folder)
    there_too = {picture.name for picture, _ in small}
    return [replace(picture, narrow=picture.name in there_too) for picture, _ in made]


def _curve(family: Family, there: Sequence[Group]) -> tuple[Picture, Figure]:
    name = title(family)
    figure, axis = new_figure(name, "thousand updates", name.partition(":")[0])
    cut = ""
    for group, style in zip(there, styles(there), strict=True):
        count = min(len(run.epochs) for run in group.runs)
        lines = np.array([values(run, DISTANCE)[:count] for run in group.runs])
        measured = ~np.isnan(lines).any(axis=0)
        x = np.array([epoch["steps"] for epoch in group.runs[0].epochs[:count]])[measured] / 1000
        mean = lines[:, measured].mean(axis=0)
        axis.plot(x, mean, marker="o", ms=3, label=group.label, **style)
        if len(lines) > 1:
            spread = lines[:, measured].std(axis=0, ddof=1)
            axis.fill_between(x, mean - spread, mean + spread, color=style["color"], alpha=0.18, linewidth=0)
        for run in group.left_out:  # its distances are as good as another's, but their lowest may be still to come
            found = [(epoch["steps"] / 1000, epoch[DISTANCE]) for epoch in run.epochs if epoch.get(DISTANCE) is not None]
            if found:
                axis.plot(*zip(*found, strict=True), color=style["color"], lw=0.9, ls=":", marker="o", ms=2)
                cut = " Dotted: runs that did not finish."
    legend_below(figure)
    labels = ", ".join(dict.fromkeys(label for group in there for label in feature_labels(group)))
    return Picture(f"{slug(family.model)}-{slug(family.data)}-distance", name, f"Features: {labels}.{cut}"), figure


def _samples(family: Family, there: Sequence[Group], below: bool = False) -> list[tuple[Picture, Figure]]:
    """Grids side by side or below each other, where their files are still there."""
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    found = []
    for group in there:
        run = group.runs[0]
        best = lowest(run)
        if run.path is not None and best is not None:
            file = samples_picture(run.path.parent, best["steps"])
            if file.is_file():
                found.append((f"{group.label}: {best[DISTANCE]:.2f} after {best['steps']:,}", imread(file)))
    if not found:
        return []
    rows, columns = (len(found), 1) if below else (1, len(found))
    figure = Figure(figsize=(4 * columns, 4.4 * rows), layout="constrained")
    for axis, (label, pixels) in zip(figure.subplots(rows, columns, squeeze=False).flat, found, strict=True):
        axis.imshow(pixels, interpolation="nearest")
        axis.set_title(label)
        axis.set_axis_off()
    name = f"{slug(family.model)}-{slug(family.data)}-samples"
    return [(Picture(name, f"Samples at the lowest distance: {family.model}", "The same noise for all.", wide=True), figure)]
