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
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from mixnorm_lab.bench import goals
from mixnorm_lab.storage.measurements import Row, is_base

INK, FAINT, GREY, GOAL = "#222222", "#5d6570", "#8a8f98", "#cc3311"
BLUE, ORANGE, PALE = "#4477aa", "#ee7733", "#bbbbbb"
SHADES = ("#d3e3f3", "#a6cce3", "#6aaed6", "#3787c0", "#125ca4", "#08306b")
FASTEST = ("triton", "compiled", "reference")
WIDTH, HEAD, FOOT = 10.5, 0.75, 0.4  # inches: narrow enough to be read on a page of 800 pixels
VALUE_ROOM = 40  # points below an axis, for the numbers of its bars
STYLE: Any = {
    "font.size": 11,
    "legend.fontsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.titlesize": 11.5,
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
            if all(is_base(row) for row in part) or (benchmark == "scaling" and not _growing(part)):
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
    most = max(map(len, cases.values()))
    figure, axes = _axes(title, rows, (len(modes), 1), height=3.6)
    for axis, mode in zip(axes, modes, strict=True):
        width = min(0.3, 0.8 / len(components))
        for number, case in enumerate(cases[mode]):
            bars = [row for row in mixture if row["mode"] == mode and _label(row) == case]
            for place, row in enumerate(sorted(bars, key=lambda row: row["num_components"])):
                color = _shade(components.index(row["num_components"]), len(components))
                x = number + (place - (len(bars) - 1) / 2) * width
                _bar(axis, x, f"{row['ratio']:.2f}", width, color, goals.goal(row, rows), upright=len(components) > 2)
        axis.axhline(1, color=INK, lw=1, zorder=2)
        axis.set_xticks(range(len(cases[mode])), cases[mode], fontsize=9.5)
        axis.set_xlim(-0.6, most - 0.4)  # a case is as wide in every mode
        axis.tick_params(axis="x", length=0, pad=VALUE_ROOM if len(components) > 2 else VALUE_ROOM / 2)
        axis.margins(y=0.12)
        axis.set_title(_mode_text(mode))
        axis.set_ylabel("ratio to batch norm")
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
    title = "DenseNet with its last norm replaced: training steps a second against batch norm's"
    figure, axes = _axes(title, rows, (1, len(cases)), height=4.2)
    known = any(goals.paper_ratio(row) is not None for row in rows)
    kinds = [*modes, *(["paper"] if known else [])]
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
            _bar(axis, x, f"{value:.3f}", width, colors[kind], goals.COST.get(kind))
            values.append(value)
        axis.axhline(1, color=INK, lw=1, zorder=2)
        axis.set_xticks(range(len(components)), [f"K = {k}" for k in components])
        axis.set_xlim(-0.6, len(components) - 0.4)
        axis.tick_params(axis="x", length=0, pad=VALUE_ROOM)
        depth, batch = (int(number) for number in re.findall(r"\d+", case))
        axis.set_title(f"{depth} layers, batch {batch},\n{part[0]['channels']} channels")
    for axis in axes:
        axis.set_ylim(min(0.7, *values) - 0.03, max(1.04, *values) + 0.03)
    axes[0].set_ylabel(f"steps a second, batch norm is 1\n(the axis begins at {axes[0].get_ylim()[0]:.2f})")
    texts = {"graph": "in a CUDA graph", "eager": "eager", "cpu": "eager, on a CPU", "paper": "the paper (Titan X)"}
    handles: list[Any] = [Patch(color=colors[kind], label=texts[kind]) for kind in kinds]
    handles.append(Line2D([], [], color=INK, lw=1, label="batch norm"))
    if any(mode in goals.COST for mode in modes):
        handles.append(Line2D([], [], color=GOAL, lw=2.2, label="goal, at least"))
    _legend(figure, handles)
    return figure


def scaling(rows: list[Row]) -> Figure:
    """Time against the points, the channels and the components, batch norm beside it; slopes of the log-log lines."""
    texts = {"m": "points m", "C": "channels C", "K": "components K"}
    series = [name for name in texts if name in _growing(rows)]
    figure, axes = _axes("One layer, forward and backward, as it grows", rows, (1, len(series)), height=4.6)
    found = goals.slopes(rows)
    for axis, name in zip(axes, series, strict=True):
        part = [row for row in rows if row["series"] == name]
        for variant in dict.fromkeys(row["variant"] for row in part):
            color = GREY if variant == "batch_norm" else BLUE
            line = sorted((_size(row), row["time_ms"]) for row in part if row["variant"] == variant)
            label = "batch norm" if variant == "batch_norm" else f"mixture norm{'' if name == 'K' else ', K = 3'}"
            if (name, variant, part[0]["device"]) in found:
                value, asymptotic = found[name, variant, part[0]["device"]]
                label += f": slope {value:.2f}".replace("-", "−") + ("\nfrom a million points on" if asymptotic else "")
            if name == "K" and variant == "batch_norm":  # has no components
                axis.axhline(line[0][1], color=color, lw=1.8, label=label)
            else:
                axis.plot(*zip(*line, strict=True), "o-", color=color, lw=1.8, ms=4.5, label=label)
        axis.set_xlabel(texts[name])
        axis.set_ylabel("milliseconds")
        if name == "K":
            axis.set_ylim(0, 1.12 * max(row["time_ms"] for row in part))
            axis.set_xticks(sorted({_size(row) for row in part if not is_base(row)}))
        else:
            _logarithmic(axis, "y")
            axis.set_xscale("log", base=2 if name == "C" else 10)
            axis.set_xlabel(f"{texts[name]} (log scale)")
            axis.xaxis.set_minor_formatter(NullFormatter())
            if name == "C":
                axis.set_xticks(sizes := sorted({_size(row) for row in part}), [f"{size}" for size in sizes], rotation=45)
        shape = part[0]["case"].split("x")
        fixed = {"m": f"C = {shape[1]}", "C": f"m = {part[0]['m']:,}", "K": "×".join(shape)}[name]
        axis.set_title(f"against the {texts[name].split()[0]}\n({fixed}, {part[0]['dtype']})")
        _below(axis)
    return figure


def fit(rows: list[Row]) -> Figure:
    """Time of the fit against K, a line for each size of the sample."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    title = "The fit alone: k-means++, one Lloyd iteration, one EM iteration"
    figure, axes = _axes(title, rows, (1, len(modes)), height=4.6)
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
        axis.set_ylabel("milliseconds")
        if any(is_base(row) for row in part):  # an order of magnitude above the others
            _logarithmic(axis, "y")
        else:
            axis.set_ylim(0, None)
        axis.set_xticks(sorted({row["num_components"] for row in part}))
        axis.set_xlabel("components K")
        axis.set_title(_mode_text(mode))
        _below(axis, "points × channels")
    return figure


def _logarithmic(axis: Any, which: str) -> None:
    """A logarithmic axis that says so, with plain numbers."""
    getattr(axis, f"set_{which}scale")("log")
    getattr(axis, f"set_{which}label")(f"{getattr(axis, f'get_{which}label')()} (log scale)")
    found = getattr(axis, f"{which}axis")
    low, high = getattr(axis, f"get_{which}lim")()
    found.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,)))
    found.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    found.set_minor_formatter(NullFormatter())


def _below(axis: Any, title: str | None = None) -> None:
    """The legend of an axis below it, where it hides nothing."""
    axis.legend(frameon=False, title=title, loc="upper center", bbox_to_anchor=(0.5, -0.24))


def _bar(axis: Any, x: float, number: str, width: float, color: str, goal: float | None, *, upright: bool = True) -> None:
    """A bar with its number below the axis, where no line crosses it, and its goal as a mark across it."""
    axis.bar(x, float(number), 0.92 * width, color=color)
    axis.annotate(
        number, (x, 0), (0, -4), xycoords=axis.get_xaxis_transform(), textcoords="offset points",
        rotation=90 if upright else 0, ha="center", va="top", fontsize=9.5, color=INK, annotation_clip=False,
    )  # fmt: skip
    if goal is not None:
        axis.hlines(goal, x - 0.5 * width, x + 0.5 * width, color=GOAL, lw=2.5, zorder=3)


def _axes(title: str, rows: list[Row], grid: tuple[int, int], height: float) -> tuple[Figure, list[Any]]:
    """A figure with axes, under two lines that say what was measured, where, and with what.

    Args:
        grid: of the axes, rows and columns.
        height: of a row in inches.
    """
    whole = HEAD + FOOT + height * grid[0]
    # What the layout may use: the head above and the legend below are placed by hand.
    layout = ConstrainedLayoutEngine(rect=(0.004, FOOT / whole, 0.992, 1 - (HEAD + FOOT) / whole), hspace=0.06)
    figure = Figure(figsize=(WIDTH, whole), layout=layout)
    backend = next(row["variant"] for row in rows if not is_base(row))
    row = rows[-1]
    versions = f"torch {row['torch']}" + (f", triton {row['triton']}" if backend == "triton" else "")
    commit = f"commit {row['commit']}" if row["commit"] else ""
    where = [row["device"], f"backend {backend}", versions, commit, row["date"][:10]]
    figure.text(0.01, 1 - 0.1 / whole, title, va="top", fontsize=13, color=INK, weight="bold")
    place = " · ".join(part for part in where if part)
    figure.text(0.01, 1 - 0.4 / whole, place, va="top", fontsize=10, color=FAINT)
    axes = figure.subplots(*grid, squeeze=False)
    return figure, list(axes.flat)


def _legend(figure: Figure, handles: list[Any]) -> None:
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False)


def _fastest(rows: list[Row]) -> list[Row]:
    """Batch norm, and of the backends that were measured the first of ``FASTEST``."""
    found = {row["variant"] for row in rows}
    chosen = next((name for name in FASTEST if name in found), None)
    return [row for row in rows if is_base(row) or row["variant"] == chosen]


def _growing(rows: Sequence[Row]) -> set[str]:
    """The series with more than one size: others are no curve."""
    sizes: dict[str, set[int]] = {}
    for row in rows:
        if not is_base(row):
            sizes.setdefault(row["series"], set()).add(_size(row))
    return {name for name, found in sizes.items() if len(found) > 1}


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
    return {"graph": "inside a CUDA graph", "eager": "eager", "cpu": "eager, on a CPU"}[mode]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
