"""Pictures of a table: a pure function of its rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mixnorm_lab.bench import goals
from mixnorm_lab.storage.measurements import Row, is_base

INK, GREY, GOAL = "#333333", "#8a8f98", "#cc3311"
BLUE, ORANGE, PALE = "#4477aa", "#ee7733", "#bbbbbb"
SHADES = ("#d3e3f3", "#a6cce3", "#6aaed6", "#3787c0", "#125ca4", "#08306b")
FASTEST = ("triton", "compiled", "reference")
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6e6e6",
}


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """One picture for each benchmark and device in the rows, of the fastest backend that was measured."""
    pictures: dict[str, tuple[str, Callable[[list[Row]], Figure]]] = {  # with the figure that each is made of
        "layer": ("ratio", layer),
        "cost": ("ratio", cost),
        "inference": ("ratio", inference),
        "fit": ("time_ms", fit),
        "scaling": ("time_ms", scaling),
        "memory": ("ratio", memory),
    }
    paths = []
    for device in dict.fromkeys(row["device"] for row in rows):
        here = _fastest([row for row in rows if row["device"] == device])
        for benchmark, (number, picture) in pictures.items():
            part = [row for row in here if row["benchmark"] == benchmark and row[number]]
            if all(is_base(row) for row in part):
                continue
            folder.mkdir(parents=True, exist_ok=True)
            paths.append(folder / f"{_slug(device)}-{benchmark}.png")
            with mpl.rc_context(STYLE):
                picture(part).savefig(paths[-1], dpi=130)
    if not paths:
        raise ValueError("there is nothing to draw: the table has no mixture norm that was measured")
    return paths


def layer(rows: list[Row]) -> Figure:
    return _ratio_bars(rows, "One layer, forward and backward: time against batch norm's")


def inference(rows: list[Row]) -> Figure:
    return _ratio_bars(rows, "One layer in evaluation, a history of ten batches: time against batch norm's")


def memory(rows: list[Row]) -> Figure:
    return _ratio_bars(rows, "Peak memory of a training step of one layer, against batch norm's")


def _ratio_bars(rows: list[Row], title: str) -> Figure:
    """Bars of every K for each case, an axis for each mode; red marks are goals, the line at 1 is batch norm."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    mixture = [row for row in rows if not is_base(row)]
    components = sorted({row["num_components"] for row in mixture})
    cases = {mode: list(dict.fromkeys(_label(row) for row in rows if row["mode"] == mode)) for mode in modes}
    figure, axes = _side_by_side(title, rows, [len(cases[mode]) for mode in modes])
    for axis, mode in zip(axes, modes, strict=True):
        width = min(0.3, 0.8 / len(components))
        for row in (row for row in mixture if row["mode"] == mode):
            index = components.index(row["num_components"])
            x = cases[mode].index(_label(row)) + (index - (len(components) - 1) / 2) * width
            _bar(axis, x, row["ratio"], width, _shade(index, len(components)), goals.goal(row, rows))
        axis.axhline(1, color=INK, lw=1, zorder=2)
        axis.set_xticks(range(len(cases[mode])), cases[mode], fontsize=8.5)
        axis.set_xlim(-0.6, len(cases[mode]) - 0.4)
        axis.tick_params(axis="x", length=0)
        axis.margins(y=0.12)
        axis.set_title(_mode_text(mode))
    axes[0].set_ylabel("ratio to batch norm (1 is equal)")
    handles: list[Any] = [Patch(color=_shade(i, len(components)), label=f"K = {k}") for i, k in enumerate(components)]
    handles.append(Line2D([], [], color=INK, lw=1, label="batch norm"))
    if any(goals.goal(row, rows) is not None for row in mixture):
        handles.append(Line2D([], [], color=GOAL, lw=2.2, label="goal, at most"))
    _legend(figure, handles)
    return figure


def cost(rows: list[Row]) -> Figure:
    """Steps a second against batch norm's for every row of the paper's table: ours in each mode, and the paper's."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure, axes = _side_by_side(
        "DenseNet with its last norm replaced: training steps a second against batch norm's", rows, [1] * len(cases)
    )
    kinds = [*modes, "paper"]
    colors = {"graph": BLUE, "eager": "#88bbdd", "cpu": BLUE, "paper": PALE}
    values = []
    for axis, case in zip(axes, cases, strict=True):
        part = [row for row in rows if row["case"] == case and not is_base(row)]
        components = sorted({row["num_components"] for row in part})
        bars = [(kind, row["num_components"], 1 / row["ratio"]) for kind in modes for row in part if row["mode"] == kind]
        papers = {row["num_components"]: goals.paper_ratio(row) for row in part}
        bars += [("paper", k, value) for k, value in papers.items() if value is not None]
        width = min(0.3, 0.84 / len(kinds))
        for kind, k, value in bars:
            x = components.index(k) + (kinds.index(kind) - (len(kinds) - 1) / 2) * width
            _bar(axis, x, value, width, colors[kind], goals.COST.get(kind), digits=3)
            values.append(value)
        axis.axhline(1, color=INK, lw=1, zorder=2)
        axis.set_xticks(range(len(components)), [f"K = {k}" for k in components])
        axis.set_xlim(-0.6, len(components) - 0.4)
        axis.tick_params(axis="x", length=0)
        depth, batch = (int(number) for number in re.findall(r"\d+", case))
        axis.set_title(f"{depth} layers, batch {batch}, {part[0]['channels']} channels")
    for axis in axes:
        axis.set_ylim(min(0.7, *values) - 0.03, max(1.04, *values) + 0.03)
    axes[0].set_ylabel(f"steps a second, batch norm is 1 (from {axes[0].get_ylim()[0]:.2f})")
    texts = {"graph": "in a CUDA graph", "eager": "eager", "cpu": "on the CPU", "paper": "the paper (Titan X)"}
    handles: list[Any] = [Patch(color=colors[kind], label=texts[kind]) for kind in kinds]
    handles.append(Line2D([], [], color=INK, lw=1, label="batch norm"))
    if any(mode in goals.COST for mode in modes):
        handles.append(Line2D([], [], color=GOAL, lw=2.2, label="goal, at least"))
    _legend(figure, handles)
    return figure


def scaling(rows: list[Row]) -> Figure:
    """Time against the points, the channels and the components, batch norm beside it; slopes of the log-log lines."""
    texts = {"m": "points m", "C": "channels C", "K": "components K"}
    series = [name for name in texts if any(row["series"] == name for row in rows)]
    figure, axes = _side_by_side("One layer, forward and backward, as it grows", rows, [1] * len(series))
    found = goals.slopes(rows)
    for axis, name in zip(axes, series, strict=True):
        part = [row for row in rows if row["series"] == name]
        for variant in dict.fromkeys(row["variant"] for row in part):
            color = GREY if variant == "batch_norm" else BLUE
            line = sorted((_size(row), row["time_ms"]) for row in part if row["variant"] == variant)
            label = "batch norm" if variant == "batch_norm" else f"mixture norm{'' if name == 'K' else ', K = 3'}"
            if (name, variant, part[0]["device"]) in found:
                value, asymptotic = found[name, variant, part[0]["device"]]
                label += f": slope {value:.2f}" + (" from a million points on" if asymptotic else "")
            if name == "K" and variant == "batch_norm":  # has no components
                axis.axhline(line[0][1], color=color, lw=1.8, label=label)
            else:
                axis.plot(*zip(*line, strict=True), "o-", color=color, lw=1.8, ms=4.5, label=label)
        if name == "K":
            axis.set_ylim(0, 1.12 * max(row["time_ms"] for row in part))
            axis.set_xticks(sorted({_size(row) for row in part if not is_base(row)}))
        else:
            axis.set_xscale("log", base=2 if name == "C" else 10)
            axis.set_yscale("log")
            axis.margins(y=0.25)
        shape = part[0]["case"].split("x")
        fixed = {"m": f"C = {shape[1]}", "C": f"m = {part[0]['m']:,}", "K": "×".join(shape)}[name]
        axis.set_title(f"against the {texts[name].split()[0]} ({fixed}, {part[0]['dtype']})", fontsize=10)
        axis.set_xlabel(texts[name])
        axis.legend(frameon=False, fontsize=8.5, loc="lower right" if name == "K" else "upper left")
    axes[0].set_ylabel("milliseconds")
    return figure


def fit(rows: list[Row]) -> Figure:
    """Time of the fit against K, a line for each size of the sample."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure, axes = _side_by_side("The fit alone: k-means++, one Lloyd iteration, one EM iteration", rows, [1] * len(modes))
    for axis, mode in zip(axes, modes, strict=True):
        part = [row for row in rows if row["mode"] == mode]
        for index, case in enumerate(dict.fromkeys(row["case"] for row in part)):
            color = (BLUE, ORANGE, "#228833", "#aa3377", GREY)[index % 5]
            for base in (False, True):
                same = [row for row in part if row["case"] == case and is_base(row) == base]
                line = sorted((row["num_components"], row["time_ms"]) for row in same)
                if line:
                    label = f"{' × '.join(case.split('x'))}{', scikit-learn' if base else ''}"
                    axis.plot(*zip(*line, strict=True), "x:" if base else "o-", color=color, lw=1.8, ms=6, label=label)
        if any(is_base(row) for row in part):  # an order of magnitude above the others
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, None)
        axis.set_xticks(sorted({row["num_components"] for row in part}))
        axis.set_xlabel("components K")
        axis.set_title(_mode_text(mode))
    axes[0].set_ylabel("milliseconds")
    axes[-1].legend(frameon=False, title="points × channels", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _bar(axis: Any, x: float, value: float, width: float, color: str, goal: float | None, digits: int = 2) -> None:
    """A bar with its number at the foot, where nothing else is, and its goal as a mark across it."""
    axis.bar(x, value, 0.92 * width, color=color)
    dark = sum(weight * channel for weight, channel in zip((0.3, 0.6, 0.1), mpl.colors.to_rgb(color), strict=True)) < 0.55
    axis.text(
        x, 0.025, f"{value:.{digits}f}", transform=axis.get_xaxis_transform(), rotation=90, ha="center", va="bottom",
        fontsize=8.5, color="white" if dark else INK, zorder=4,
    )  # fmt: skip
    if goal is not None:
        axis.hlines(goal, x - 0.5 * width, x + 0.5 * width, color=GOAL, lw=2.5, zorder=3)


def _side_by_side(title: str, rows: list[Row], widths: Sequence[int]) -> tuple[Figure, list[Any]]:
    """A figure with axes side by side, under two lines that say what was measured, where, and with what."""
    count = sum(widths)
    width = min(16, max(9.5, 3 + (4.2 if count == len(widths) else 1.55) * count))
    # What the layout may use: the head above and the legend below are placed by hand.
    figure = Figure(figsize=(width, 5.4), layout=ConstrainedLayoutEngine(rect=(0.004, 0.065, 0.99, 0.815)))
    backend = next(row["variant"] for row in rows if not is_base(row))
    row = rows[-1]
    versions = f"torch {row['torch']}" + (f", triton {row['triton']}" if backend == "triton" else "")
    commit = f"commit {row['commit']}" if row["commit"] else ""
    where = [row["device"], f"backend {backend}", versions, commit, row["date"][:10]]
    figure.text(0.01, 0.975, title, va="top", fontsize=12.5, color=INK, weight="bold")
    figure.text(0.01, 0.925, " · ".join(part for part in where if part), va="top", fontsize=10, color=GREY)
    axes = figure.subplots(1, len(widths), squeeze=False, width_ratios=list(widths))[0]
    return figure, list(axes)


def _legend(figure: Figure, handles: list[Any]) -> None:
    figure.legend(handles=handles, loc="lower right", ncols=len(handles), frameon=False, fontsize=9)


def _fastest(rows: list[Row]) -> list[Row]:
    """Batch norm, and of the backends that were measured the first of ``FASTEST``."""
    found = {row["variant"] for row in rows}
    chosen = next((name for name in FASTEST if name in found), None)
    return [row for row in rows if is_base(row) or row["variant"] == chosen]


def _size(row: Row) -> int:
    return row[{"m": "m", "C": "channels", "K": "num_components"}[row["series"]]] or 0


def _label(row: Row) -> str:
    parts = [row["case"].replace("x", "×"), row["dtype"]]
    parts += [row["layout"]] if row["layout"] != "channels_last" else []
    parts += ["one mode"] if row["data"] == "normal" else []
    return "\n".join(parts)


def _shade(index: int, count: int) -> str:
    """From light to dark as K grows."""
    if count == 1:
        return BLUE
    shades = SHADES if count > 3 else SHADES[1:-1]
    return shades[round(index * (len(shades) - 1) / (count - 1))]


def _mode_text(mode: str) -> str:
    return {"graph": "inside a CUDA graph", "eager": "eager", "cpu": "on the CPU"}[mode]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
