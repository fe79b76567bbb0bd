"""The curves of a report, errors and what was reached when, and the components in use: a pure function of records."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mixnorm_lab.reports.model.groups import Family, Group, best, is_busy, partner, reached
from mixnorm_lab.reports.model.measure import PLAIN, RECALIBRATED, values
from mixnorm_lab.reports.plots.panels import Panel, panels, styles
from mixnorm_lab.reports.plots.style import (
    BLUE,
    DASHES,
    FORMATS,
    LAYERS,
    STYLE,
    Picture,
    legend_below,
    new_figure,
    save,
    slug,
)
from mixnorm_lab.tables import Measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOW = 10  # epochs, the paper's
FEW, APART = 5, 0.06  # epochs whose points are shown; how far apart those of one epoch are
MOST_LINES = 14  # layers that have a line each in one picture

# What a picture shows: a number of every epoch, the best so far against steps or seconds, or the components in use.
KINDS = (PLAIN, RECALIBRATED, "steps", "train_seconds", "train_error", "train_loss", "test_loss", "components")


def draw(
    families: Sequence[Family], folder: Path, kinds: Collection[str] = KINDS, formats: Sequence[str] = FORMATS
) -> list[Picture]:
    """All pictures that the records have the numbers for, or those of some kinds."""
    import matplotlib as mpl

    made: list[tuple[Picture, Figure]] = []
    with mpl.rc_context(STYLE):
        for panel in panels(families):
            made += _curves(panel, kinds)
        if "components" in kinds:
            for family in families:
                made += [drawn for group in family.groups if (drawn := components(group)) is not None]
        save(made, folder, formats)
    return [picture for picture, _ in made]


def _curves(panel: Panel, kinds: Collection[str]) -> list[tuple[Picture, Figure]]:
    def there(*keys: str) -> bool:
        return keys[-1] in kinds and any(all(group.has(key) for key in keys) for group in panel.groups)

    made = [errors(panel, key) for key in (PLAIN, RECALIBRATED) if there(key)]
    # Of one epoch the picture against steps would be that of the errors again.
    against: tuple[str, ...] = () if _of_one_epoch(panel) else ("steps",)
    if not any(is_busy(run) for group in panel.groups for run in group.runs):  # else time is not judged
        against += ("train_seconds",)
    made += [soonest(panel, number) for number in against if there(PLAIN, number)]
    further = ("train_error", "train_loss", "test_loss") if panel.name == "densenet" else ("train_error",)  # as in the paper
    return made + [errors(panel, key) for key in further if there(key)]


TITLES = {  # of what runs are not judged by, which has its own
    "train_error": ("Training error", "training error in %"),
    "train_loss": ("Training loss", "training loss"),
    "test_loss": ("Test loss", "test loss"),
}


def errors(panel: Panel, key: str) -> tuple[Picture, Figure]:
    """A number of every epoch, with one standard deviation: over the seeds or, of one seed, within a window of epochs."""
    measure = panel.groups[0].judged_by(key)
    judged = key in (PLAIN, RECALIBRATED)
    title, axis_label = (measure.title, measure.axis_label) if judged else TITLES[key]
    figure, axis = new_figure(f"{title}: {panel.title}", "epoch", axis_label)
    drawn: list[np.ndarray] = []
    words: dict[str, bool] = {}  # what the spread is over, each once
    edges: list[np.ndarray] = []  # of the spread, which a few epochs have room for
    number = sum(group.has(key) for group in panel.groups)
    one_epoch = _of_one_epoch(panel)
    for group, label, style in zip(panel.groups, panel.labels, styles(panel.groups), strict=True):
        if not group.has(key):
            continue
        x, all_values = _measured(group, key)
        if one_epoch:  # beside each other
            x = x + APART * (len(drawn) - (number - 1) / 2)
        if len(all_values) > 1:
            line = centre = all_values.mean(axis=0)
            deviation = all_values.std(axis=0, ddof=1)
            words["over the seeds"] = True
        else:
            window = max(2, min(WINDOW, len(x) // 4))
            line = all_values[0]
            centre, deviation = _rolling(line, window)
            if len(x) > 1:
                words[f"within {window} epochs, of one seed"] = True
        _curve(axis, x, line, label, {"lw": 1.6 if len(x) < 60 else 1.2, **style})
        _spread(axis, x, centre, deviation, style["color"])
        drawn.append(line)
        edges += [centre - deviation, centre + deviation] if len(x) <= FEW else []
    _limits(axis, drawn, edges, falls=not judged or measure.shown_lower_is_better)
    if one_epoch:
        _only(axis, 1)
    legend_below(figure)
    how = "Bars" if one_epoch else "Shaded"
    caption = f"{how}: one standard deviation {' or '.join(words)}." if words else "One epoch, one seed."
    if key == RECALIBRATED:
        caption += " Before each evaluation the statistics of all norms were refilled from training batches."
    return Picture(f"{panel.name}-{key.replace('_', '-')}", f"{title}: {panel.title}", caption), figure


def soonest(panel: Panel, against: str) -> tuple[Picture, Figure]:
    """The best so far against steps or seconds, and where batch norm's best is reached."""
    measure = panel.groups[0].judged_by()
    name = "steps" if against == "steps" else "time"
    ends = [run.epochs[-1][against] for group in panel.groups for run in group.runs]
    unit, axis_label = _unit(against, max((end for end in ends if end is not None), default=0.0))
    title = f"Best so far against {name}: {panel.title}"
    figure, axis = new_figure(title, axis_label, f"{measure.axis_label}, best so far")
    drawn: list[np.ndarray] = []
    edges: list[np.ndarray] = []
    dots: list[str] = []
    for group, label, style in zip(panel.groups, panel.labels, styles(panel.groups), strict=True):
        if not (group.has(PLAIN) and group.has(against)):
            continue
        x = _over_seeds(group, against)[1].mean(axis=0) / unit
        best_of = np.fmin if measure.shown_lower_is_better else np.fmax
        so_far = best_of.accumulate(_over_seeds(group, PLAIN)[1], axis=1)
        line, deviation = so_far.mean(axis=0), so_far.std(axis=0, ddof=1) if len(so_far) > 1 else np.zeros(len(x))
        _curve(axis, x, line, label, style)
        _spread(axis, x, line, deviation, style["color"])
        drawn.append(line)
        edges += [line - deviation, line + deviation] if len(x) <= FEW else []
        base = partner(group, panel.groups)
        if base is None:
            continue
        goal = Measured.over(best(run, measure) for run in base.runs).mean
        if goal is None:
            continue
        level = measure.shown_value(goal)
        when = Measured.over(epoch[against] if (epoch := reached(run, goal, measure)) else None for run in group.runs)
        if group is base:
            axis.axhline(level, color=BLUE, lw=0.9, ls=style["linestyle"], alpha=0.7, zorder=1)
        elif when.mean is not None:
            dots.append(" with one standard deviation over the seeds" if when.deviation is not None else "")
            spread = {} if when.deviation is None else {"xerr": when.deviation / unit, "elinewidth": 1.2, "capsize": 2.5}
            axis.errorbar(
                when.mean / unit, level, fmt="o", ms=6.5, color=style["color"], mec="white", mew=1, zorder=5, **spread
            )
    _limits(axis, drawn, edges, skip=8, falls=measure.shown_lower_is_better)
    axis.set_xlim(left=0)
    legend_below(figure)
    caption = "Thin line: batch norm's best, in the mean over its seeds."
    if dots:
        who = "mixture norm" if all(group.config.norm is None for group in panel.groups) else "another norm"
        caption += f" Dot: where {who} gets there{max(dots)}."
    return Picture(f"{panel.name}-best-by-{name}", title, caption), figure


def _of_one_epoch(panel: Panel) -> bool:
    return all(len(run.epochs) == 1 for group in panel.groups for run in group.runs)


def _only(axis: Any, epoch: int) -> None:
    """An axis of one epoch alone."""
    axis.set_xlim(epoch - 0.5, epoch + 0.5)
    axis.set_xticks([epoch])


def _curve(axis: Any, x: np.ndarray, line: np.ndarray, label: str, style: dict[str, Any]) -> None:
    """A line, of few epochs with points: of one there is no line."""
    few = {"marker": "o", "ms": 6 if len(x) == 1 else 3.5} if len(x) <= FEW else {}
    axis.plot(x, line, label=label, **few, **style)


def _spread(axis: Any, x: np.ndarray, centre: np.ndarray, deviation: np.ndarray, color: str) -> None:
    """One standard deviation: an area around a line, a bar through a point."""
    if len(x) == 1:
        if deviation[0] > 0:
            axis.errorbar(x, centre, yerr=deviation, fmt="none", ecolor=color, elinewidth=1.2, capsize=3)
    else:
        axis.fill_between(x, centre - deviation, centre + deviation, color=color, alpha=0.18, linewidth=0)


def components(group: Group) -> tuple[Picture, Figure] | None:
    """The components in use in each layer; None where they were not recorded."""
    recorded = [run for run in group.runs if run.epochs and all(epoch["components"] for epoch in run.epochs)]
    if not recorded:
        return None
    epochs = min(len(run.epochs) for run in recorded)
    layers = list(recorded[0].epochs[0]["components"])
    used = np.array(
        [[[e["components"].get(layer, np.nan) for e in run.epochs[:epochs]] for layer in layers] for run in recorded],
        dtype=float,
    )
    x = np.array([epoch["epoch"] for epoch in recorded[0].epochs[:epochs]])
    top = float(np.nanmax(used, initial=1.0))
    if group.config.mixture is not None:
        top = max(top, group.config.mixture.options.get("num_components", top))
    title = f"Components in use: {group.name}"
    if len(layers) > MOST_LINES:
        caption, figure = _components_map(title, layers, x, used.mean(axis=0), top)
    else:
        caption, figure = _components_lines(title, layers, x, used, top)
    return Picture(f"components-{slug(group.name)}", title, caption), figure


def _components_lines(title: str, layers: list[str], x: np.ndarray, used: np.ndarray, top: float) -> tuple[str, Figure]:
    """A line for each layer, smoothed as in the paper. ``used``: (runs, layers, epochs)."""
    figure, axis = new_figure(title, "epoch", "components in use")
    window = max(2, min(WINDOW, len(x) // 4))
    for i, layer in enumerate(layers):
        smooth, deviation = (np.mean([_rolling(run[i], window)[part] for run in used], axis=0) for part in (0, 1))
        smooth = smooth + 0.03 * (i - (len(layers) - 1) / 2)  # equal lines would hide each other
        color, dash = LAYERS[i % len(LAYERS)], DASHES[i // len(LAYERS) % len(DASHES)]
        _curve(axis, x, smooth, layer, {"color": color, "ls": dash})
        _spread(axis, x, smooth, deviation, color)
    axis.set_ylim(0, top + 0.5)
    axis.set_yticks(range(int(top) + 1))
    if len(x) == 1:
        _only(axis, x[0])
    legend_below(figure)
    averaged = f", averaged over {window} epochs; shaded: one standard deviation" if len(x) > 1 else ""
    caption = f"For each mixture norm{averaged}."
    return caption + (" Lines are drawn a little apart." if len(layers) > 1 else ""), figure


def _components_map(title: str, layers: list[str], x: np.ndarray, used: np.ndarray, top: float) -> tuple[str, Figure]:
    """Too many layers for lines: one row for each, its colour the components. ``used``: (layers, epochs)."""
    figure, axis = new_figure(title, "epoch", "mixture norm")
    extent = (x[0] - 0.5, x[-1] + 0.5, len(layers) + 0.5, 0.5)
    axis.grid(visible=False)
    shown = axis.imshow(used, aspect="auto", extent=extent, vmin=1, vmax=top, cmap="YlOrBr", interpolation="nearest")
    figure.colorbar(shown, ax=axis, label="components in use", ticks=range(1, int(top) + 1))
    return f"A row is a mixture norm, from {layers[0]} above to {layers[-1]} below.", figure


def _over_seeds(group: Group, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Epochs (E,) and values (runs, E), as long as the shortest run; errors in %."""
    count = min(len(run.epochs) for run in group.runs)
    x = np.array([epoch["epoch"] for epoch in group.runs[0].epochs[:count]])
    if key in (PLAIN, RECALIBRATED):
        measure = group.judged_by(key)
        return x, np.array([measure.shown(run)[:count] for run in group.runs])
    scale = 100.0 if key.endswith("error") else 1.0
    return x, np.array([values(run, key, scale)[:count] for run in group.runs])


def _measured(group: Group, key: str) -> tuple[np.ndarray, np.ndarray]:
    """As :func:`_over_seeds`, without the epochs in which it was not measured for all."""
    x, found = _over_seeds(group, key)
    there = ~np.isnan(found).any(axis=0)
    return x[there], found[:, there]


def _rolling(line: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation within a window around each epoch, shorter at both ends."""
    parts = [line[max(0, i - window // 2) : i + (window + 1) // 2] for i in range(len(line))]
    return np.array([np.mean(part) for part in parts]), np.array([np.std(part) for part in parts])


def _unit(against: str, largest: float) -> tuple[float, str]:
    """What the axis counts in, and what it says."""
    if against == "steps":
        return (1000, "thousand gradient updates") if largest >= 10_000 else (1, "gradient updates")
    return next(
        (unit, f"{name} of training")
        for limit, unit, name in ((200, 1, "seconds"), (12_000, 60, "minutes"), (float("inf"), 3600, "hours"))
        if largest < limit
    )


def _limits(axis: Any, lines: Sequence[np.ndarray], edges: Sequence[np.ndarray], skip: int = 20, falls: bool = True) -> None:
    """Errors that fall by a large factor stand on a logarithmic axis; others without the first, steepest 1/skip.

    ``edges`` are of spreads that are to be seen whole. Without ``falls`` the lines rise, as accuracies do.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    there = [line[np.isfinite(line)] for line in lines]
    there = [line for line in there if len(line)]
    if not there:
        return
    low, high = min(line.min() for line in there), max(line.max() for line in there)
    lowest, highest = min([low, *_flat(edges)]), max([high, *_flat(edges)])
    settled = [line[len(line) // skip] for line in there]
    if not falls:
        bottom = min([*settled, *_flat(edges)])
        margin = 0.04 * (highest - bottom) or 1.0
        axis.set_ylim(bottom - margin, highest + margin)
        return
    if low > 0 and high / low > 6:
        axis.set_yscale("log")
        axis.set_ylabel(f"{axis.get_ylabel()} (log scale)")
        axis.set_ylim((lowest if lowest > low / 10 else low) / 1.15, highest * 1.15)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        return
    top = max([*settled, *_flat(edges)])
    margin = 0.04 * (top - lowest) or 1.0
    axis.set_ylim(lowest - margin, top + margin)


def _flat(lines: Sequence[np.ndarray]) -> list[float]:
    return [float(value) for line in lines for value in line if np.isfinite(value)]
