"""The pictures of ``mixnorm inspect``: densities before and after the norms, and the components over a training."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mixnorm_lab.inspect.densities import COLUMNS, Density, LayerDensities, weighted_densities
from mixnorm_lab.reports.model.groups import families
from mixnorm_lab.reports.plots.curves import components
from mixnorm_lab.reports.plots.style import BLUE, FORMATS, INK, LAYERS, ORANGES, STYLE, Picture, save, save_narrow, slug
from mixnorm_lab.storage.records import Record
from mixnorm_lab.storage.snapshots import SILENT, STAGES, lively, snapshot_epochs, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILL, FAINT = "#d5dbe3", "#6b6b6b"
POINTS = 150  # on a curve
STEPS = np.linspace(-3.5, 3.5, 57)  # deviations from its mean, where every component has points of its own
MIN_VARIANCE = 1e-12
SPIKES = " Spikes are cut off."
NARROW_COLUMNS, NARROW_WIDTH = 2, 4.2  # channels and inches, for a phone
NARROW = " A wider page has more channels."
HARDLY_VARY = f" Channels that hardly vary, with less than {SILENT:.0%} of the largest deviation, are left out."


def write(
    folder: Path,
    *,
    densities: LayerDensities | None = None,
    fits: LayerDensities | None = None,
    record: Record | None = None,
    layer: str | None = None,
) -> list[Path]:
    """Draws what there is to draw, each picture as PNG and SVG with its caption inside; returns the paths of the PNGs.

    Args:
        densities: of :func:`mixnorm_lab.inspect.norm_inputs.layer_densities`.
        fits: the input alone, with the mixtures of :func:`mixnorm_lab.inspect.component_counts.layer_likelihoods`.
        record: of the training, for the components over its epochs.
        layer: whose components; ``None`` is the first mixture norm.
    """
    made = draw(folder, densities=densities, fits=fits, record=record, layer=layer, counts=True, narrow=True)
    return [folder / f"{picture.name}.png" for picture in made]


def draw(
    folder: Path,
    *,
    densities: LayerDensities | None = None,
    fits: LayerDensities | None = None,
    record: Record | None = None,
    layer: str | None = None,
    counts: bool = False,
    narrow: bool = False,
    formats: Sequence[str] = FORMATS,
) -> list[Picture]:
    """As :func:`write`, the last view only with ``counts``; returns the pictures for a report.

    Args:
        narrow: draw all but the last again for a phone, with fewer channels.
    """
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        made = _views(densities, fits, record, layer)
        small = _views(densities, fits, record, layer, NARROW_COLUMNS) if narrow else []
        counted = in_use(record) if record is not None and counts else None
        made += [] if counted is None else [counted]
        for (picture, figure), size, an_inch in [*((one, 8.0, 17) for one in made), *((one, 9.5, 13) for one in small)]:
            caption = textwrap.fill(picture.caption, round(an_inch * figure.get_figwidth()))  # letters in a line
            figure.supxlabel(caption, x=0.01, ha="left", fontsize=size, color=FAINT, linespacing=1.4)
        save(made, folder, formats)
        save_narrow(small, folder)
    there = {picture.name for picture, _ in small}
    return [replace(picture, caption="", wide=True, narrow=picture.name in there) for picture, _ in made]


def _views(
    densities: LayerDensities | None,
    fits: LayerDensities | None,
    record: Record | None,
    layer: str | None,
    columns: int = COLUMNS,
) -> list[tuple[Picture, Figure]]:
    """The views of a layer's channels, the first ``columns`` of them."""
    drawn = (
        None if densities is None else before_and_after(densities, columns),
        None if fits is None else mixtures(fits, columns),
        None if record is None else evolution(record, layer, columns),
    )
    return [one for one in drawn if one is not None]


def before_and_after(view: LayerDensities, most: int = COLUMNS) -> tuple[Picture, Figure]:
    """A column for each channel, and for each norm two rows: the layer's input with its mixture, and the output."""
    title = f"Activations of {view.layer} before and after batch norm and mixture norm"
    caption = (
        f"{view.points:,} points of one training batch. Before: the mixture, fitted to all channels together, one Gaussian "
        "for BN; fit is how much of the histogram lies under its density. After: the normal distribution with the mean and "
        "deviation of the output; normal is how much of the histogram lies under it. Dashed: the components, as they go "
        "in and as they come out, numbered by weight for each norm anew."
    )
    rows = [
        _Row(f"{word} {norm.name}", BLUE if norm.name == "BN" else ORANGES[0], found, after=word == "after")
        for norm in view.norms
        for word, found in (("before", norm.before), ("after", norm.after))
    ]
    return _by_channels(view, f"densities-{slug(view.layer)}", title, caption, rows, most)


def mixtures(view: LayerDensities, most: int = COLUMNS) -> tuple[Picture, Figure]:
    """A column for each channel, and for each mixture a row: the layer's input with the mixture."""
    title = f"Activations of {view.layer} and mixtures of one and of more components"
    caption = (
        f"{view.points:,} points of training images. Line: a mixture of K components without covariances, fitted to all "
        "channels together; fit is how much of the histogram lies under its density. Dashed: the components, numbered by "
        "weight in each row anew."
    )
    rows = [_Row(norm.name, INK, norm.before) for norm in view.norms]
    return _by_channels(view, f"mixtures-{slug(view.layer)}", title, caption, rows, most)


@dataclass(frozen=True)
class _Row:
    """A row of a picture: densities by channels, of a norm's input or of what comes out ``after`` it."""

    label: str
    color: str
    densities: tuple[Density, ...]
    after: bool = False


def _by_channels(
    view: LayerDensities, name: str, title: str, caption: str, rows: Sequence[_Row], most: int
) -> tuple[Picture, Figure]:
    """A picture with a column for each of the first ``most`` channels."""
    channels = view.channels[:most]
    columns, more = len(channels), len(view.channels) > most
    narrow = most <= NARROW_COLUMNS
    width = NARROW_WIDTH if narrow else 1.4 + 2.1 * columns
    long = 2.7 if narrow else 0.9 * (4 - columns)  # a narrow caption is
    figure = _figure(title, (width, 1.6 + 1.35 * len(rows) + long))
    body: Any = figure.subfigures()  # its legend leaves room for a caption below
    axes = body.subplots(len(rows), columns, squeeze=False)
    cut = False
    for across, row in zip(axes, rows, strict=True):
        for axis, density in zip(across, row.densities[:columns], strict=True):
            cut |= _density(axis, density, row.after)
        across[0].set_ylabel(row.label, color=row.color, fontweight="bold")
    for column, channel in enumerate(channels):
        axes[0, column].set_title(f"channel {channel}", fontsize=10)
    count = max(len(density.weights) for row in rows if not row.after for density in row.densities)
    _legend(body, count, columns=5 if columns > 3 else 1 if narrow else columns, after=any(row.after for row in rows))
    return Picture(name, title, caption + cut * SPIKES + view.left_out * HARDLY_VARY + more * NARROW), figure


def _density(axis: Any, density: Density, after: bool) -> bool:
    """Draws one; whether something is higher than the picture."""
    low, high = density.edges[0], density.edges[-1]
    narrow = (density.means + STEPS[:, None] * density.deviations).ravel()
    x = np.unique(np.concatenate([np.linspace(low, high, POINTS), narrow[(low < narrow) & (narrow < high)]]))
    parts = weighted_densities(x, density.weights, density.means, density.deviations)
    line = parts.sum(axis=0)
    if after:
        line = weighted_densities(x, np.ones(1), np.array([density.mean]), np.array([density.deviation]))[0]
    axis.stairs(density.heights, density.edges, fill=True, color=FILL)
    axis.plot(x, line, color=INK, lw=1.3)
    for k, part in enumerate(parts):
        axis.plot(x, part, color=_color(k), ls="--", lw=1.2)
    share = f"normal {density.under_normal():.0%}" if after else f"fit {density.under_mixture():.0%}"
    skewness = f"skew {density.skewness:+.1f}".replace("-", "−") if abs(density.skewness) >= 0.05 else "skew 0"
    end = len(density.heights) // 3
    at_right = density.heights[-end:].max() <= density.heights[:end].max()  # where there is room
    place: Any = {"x": 0.98, "ha": "right"} if at_right else {"x": 0.02, "ha": "left"}
    small: Any = {"transform": axis.transAxes, "fontsize": 8, "color": FAINT, "linespacing": 1.3}
    axis.text(y=0.98, va="top", s=f"{share}\n{skewness}", **place, **small)
    axis.set_xlim(low, high)
    _without_heights(axis)
    usual = np.quantile(density.heights, 0.9)  # 0 where there is nothing but a spike
    return _limit(axis, max(density.heights.max(), line.max()), 3 * usual or np.inf)


def _legend(figure: Any, count: int, columns: int, after: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=FILL, label="activations")]
    handles.append(Line2D([], [], color=INK, label="before: mixture, after: normal distribution" if after else "mixture"))
    handles += [Line2D([], [], color=_color(k), ls="--", label=f"component {k + 1}") for k in range(count)]
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, columnspacing=1.4)


def evolution(record: Record, layer: str | None = None, most: int = COLUMNS) -> tuple[Picture, Figure] | None:
    """A row for each stage of the training: the weights of a layer's components, and their densities in a few channels.

    ``None`` where the record has no mixtures of the layer.
    """
    taken = [epoch for epoch in record.epochs if epoch["mixtures"]]
    if layer is None and taken:
        layer = next(iter(taken[0]["mixtures"]))
    taken = [epoch for epoch in taken if layer in epoch["mixtures"]]
    if layer is None or not taken:
        return None
    wanted = {*snapshot_epochs(record.config.epochs, STAGES), taken[-1]["epoch"]}  # the last, of a training under way
    taken = [epoch for epoch in taken if epoch["epoch"] in wanted]
    channels = taken[0]["mixtures"][layer]["channels"]
    usual = spread(len(channels), COLUMNS)
    found_lively = lively(_deviations(taken[-1]["mixtures"][layer]), usual, COLUMNS)
    drawn, more = found_lively[:most], len(found_lively) > most
    title = f"Components of {layer} during the training: {record.config.name}"
    narrow = most <= NARROW_COLUMNS
    width = NARROW_WIDTH if narrow else 2.2 + 2.0 * len(drawn)
    figure = _figure(title, (width, 1.6 + 1.3 * len(taken) + 0.8 * narrow))
    axes = figure.subplots(len(taken), 1 + len(drawn), squeeze=False, sharex="col", width_ratios=[0.8] + [1] * len(drawn))
    cut = False
    largest = max(_components(epoch["mixtures"][layer], drawn[0])[0][0] for epoch in taken)
    for row, epoch in zip(axes, taken, strict=True):
        found = [_components(epoch["mixtures"][layer], channel) for channel in drawn]
        share = round(100 * epoch["epoch"] / record.config.epochs)
        row[0].set_ylabel(f"{share}%\nepoch {epoch['epoch']}", rotation=0, ha="right", va="center", color=INK)
        _weights(row[0], found[0][0], 1.25 * largest)
        for axis, one in zip(row[1:], found, strict=True):
            cut |= _mixture(axis, *one)
    joint = not isinstance(taken[0]["mixtures"][layer]["weights"][0], list)
    axes[0, 0].set_title("weights λ" if joint else f"λ, channel {channels[drawn[0]]}", fontsize=10)
    axes[-1, 0].set_xlabel("component", fontsize=9)
    for column, channel in enumerate(drawn, 1):
        axes[0, column].set_title(f"channel {channels[channel]}", fontsize=10)
        axes[-1, column].set_xlabel("activation", fontsize=9)
    caption = (
        "Of an epoch's last training batch: the weights of the components, and their densities times their weights in a "
        "few channels. Colours number the components by weight, in each row anew. All rows of a column have the same "
        "horizontal axis."
    )
    return Picture(
        f"evolution-{slug(layer)}", title, caption + cut * SPIKES + (found_lively != usual) * HARDLY_VARY + more * NARROW
    ), figure


def _components(mixture: dict[str, Any], channel: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """λ, μ and σ (K,) of the components in use in a channel, by its place in the snapshot; the largest weight first."""
    weights, means, variances = (np.array(mixture[name], dtype=float) for name in ("weights", "means", "variances"))
    weights = weights if weights.ndim == 1 else weights[:, channel]
    order = [k for k in np.argsort(-weights, kind="stable") if weights[k] > 0]
    return weights[order], means[order, channel], np.sqrt(np.maximum(variances[order, channel], MIN_VARIANCE))


def _deviations(mixture: dict[str, Any]) -> list[float]:
    """Of all components together, channel by channel."""
    weights, means, variances = (np.array(mixture[name], dtype=float) for name in ("weights", "means", "variances"))
    weights = weights if weights.ndim == 2 else weights[:, None]
    mean = (weights * means).sum(axis=0)
    return list(np.sqrt((weights * (variances + (means - mean) ** 2)).sum(axis=0)))


def _weights(axis: Any, weights: np.ndarray, top: float) -> None:
    numbers = range(1, len(weights) + 1)
    axis.bar(numbers, weights, color=[_color(k) for k in range(len(weights))], width=0.7)
    for number, weight in zip(numbers, weights, strict=True):
        axis.text(number, weight + 0.03 * top, f"{weight:.2f}".lstrip("0"), ha="center", fontsize=8, color=FAINT)
    axis.set_ylim(0, top)
    _without_heights(axis)
    axis.set_xticks(numbers)


def _mixture(axis: Any, weights: np.ndarray, means: np.ndarray, deviations: np.ndarray) -> bool:
    """Draws one; whether something is higher than the picture."""
    peaks = []
    for k, (weight, mean, deviation) in enumerate(zip(weights, means, deviations, strict=True)):
        x = mean + STEPS * deviation
        [part] = weighted_densities(x, *(np.array([value]) for value in (weight, mean, deviation)))
        axis.fill_between(x, part, color=_color(k), alpha=0.25, linewidth=0)
        axis.plot(x, part, color=_color(k), lw=1.3)
        peaks.append(part.max())
    _without_heights(axis)
    return _limit(axis, max(peaks), 6 * sorted(peaks)[-2] if len(peaks) > 1 else np.inf)


def in_use(record: Record) -> tuple[Picture, Figure] | None:
    """The components in use in each layer; ``None`` where they were not recorded."""
    return components(families([record])[0].groups[0])


def _figure(title: str, size: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    title = textwrap.fill(title, round(10.5 * size[0])).replace("$", r"\$")
    figure.suptitle(title, color=INK, x=0.01, ha="left", fontsize=12)
    return figure


def _limit(axis: Any, highest: float, spike: float) -> bool:
    """Ends the axis over what is highest, but at ``spike``: equal values would leave no room for the others."""
    axis.set_ylim(0, 1.15 * min(highest, spike))
    return bool(highest > 1.15 * spike)


def _color(component: int) -> str:
    return LAYERS[component % len(LAYERS)]


def _without_heights(axis: Any) -> None:
    """Areas count here, and a scale of heights would say nothing."""
    axis.set_yticks([])
    axis.grid(False)
    axis.spines["left"].set_visible(False)
    axis.tick_params(labelsize=8)
    axis.locator_params(axis="x", nbins=4)
