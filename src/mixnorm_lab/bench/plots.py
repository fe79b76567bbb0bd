"""Pictures of a table: a pure function of its rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter

from mixnorm_lab.bench import goals
from mixnorm_lab.bench.cases import MODES
from mixnorm_lab.bench.plot_parts import (
    BLUE,
    GOAL,
    GREY,
    INK,
    ORANGE,
    PALE,
    STYLE,
    VALUE_ROOM,
    backend_of,
    bar,
    below,
    legend,
    logarithmic,
    new_figure,
    shade,
)
from mixnorm_lab.bench.whole import pictures as whole
from mixnorm_lab.storage.measurements import Row, is_base

FASTEST = ("triton", "compiled", "reference")


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """One picture for each benchmark and device in the rows, of the fastest backend that was measured."""
    pictures: dict[str, tuple[str, Callable[[list[Row]], Figure]]] = {  # with the figure that each is made of
        "layer": ("ratio", layer),
        "cost": ("ratio", cost),
        "inference": ("ratio", inference),
        "fit": ("time_ms", fit),
        "scaling": ("time_ms", scaling),
        "memory": ("ratio", memory),
        "models": ("ratio", whole.models),
        "start": ("time_ms", whole.start),
    }
    paths = []
    for device in dict.fromkeys(row["device"] for row in rows):
        here = _fastest([row for row in rows if row["device"] == device])
        for benchmark, (number, picture) in pictures.items():
            part = [row for row in here if row["benchmark"] == benchmark and row[number]]
            if benchmark in ("layer", "inference"):  # what is special stands in the table
                part = [row for row in part if not row["series"]]
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
    figure, axes = new_figure(title, rows, (len(modes), 1), height=3.6)
    for axis, mode in zip(axes, modes, strict=True):
        width = min(0.3, 0.8 / len(components))
        for number, case in enumerate(cases[mode]):
            bars = [row for row in mixture if row["mode"] == mode and _label(row) == case]
            for place, row in enumerate(sorted(bars, key=lambda row: row["num_components"])):
                color = shade(components.index(row["num_components"]), len(components))
                x = number + (place - (len(bars) - 1) / 2) * width
                bar(axis, x, f"{row['ratio']:.2f}", width, color, goals.goal(row, rows), upright=len(components) > 2)
        axis.axhline(1, color=INK, lw=1, zorder=2)
        axis.set_xticks(range(len(cases[mode])), cases[mode], fontsize=9.5)
        axis.set_xlim(-0.6, most - 0.4)  # a case is as wide in every mode
        axis.tick_params(axis="x", length=0, pad=VALUE_ROOM if len(components) > 2 else VALUE_ROOM / 2)
        axis.margins(y=0.12)
        axis.set_title(MODES[mode])
        axis.set_ylabel("ratio to batch norm")
    handles: list[Any] = [Patch(color=shade(i, len(components)), label=f"K = {k}") for i, k in enumerate(components)]
    handles.append(Line2D([], [], color=INK, lw=1, label="batch norm"))
    if any(goals.goal(row, rows) is not None for row in mixture):
        handles.append(Line2D([], [], color=GOAL, lw=2.2, label="goal, at most"))
    legend(figure, handles)
    return figure


def cost(rows: list[Row]) -> Figure:
    """Steps a second against batch norm's for every row of the paper's table: ours in each mode, and the paper's."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    title = "DenseNet with its last norm replaced: training steps a second against batch norm's"
    figure, axes = new_figure(title, rows, (1, len(cases)), height=4.2)
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
            bar(axis, x, f"{value:.3f}", width, colors[kind], goals.COST.get(kind))
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
    legend(figure, handles)
    return figure


def scaling(rows: list[Row]) -> Figure:
    """Time against the points, the channels and the components, batch norm beside it; slopes of the log-log lines."""
    texts = {"m": "points m", "C": "channels C", "K": "components K"}
    series = [name for name in texts if name in _growing(rows)]
    figure, axes = new_figure("One layer, forward and backward, as it grows", rows, (1, len(series)), height=4.6)
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
            logarithmic(axis, "y")
            axis.set_xscale("log", base=2 if name == "C" else 10)
            axis.set_xlabel(f"{texts[name]} (log scale)")
            axis.xaxis.set_minor_formatter(NullFormatter())
            if name == "C":
                axis.set_xticks(sizes := sorted({_size(row) for row in part}), [f"{size}" for size in sizes], rotation=45)
        shape = part[0]["case"].split("x")
        fixed = {"m": f"C = {shape[1]}", "C": f"m = {part[0]['m']:,}", "K": "×".join(shape)}[name]
        axis.set_title(f"against the {texts[name].split()[0]}\n({fixed}, {part[0]['dtype']})")
        below(axis)
    return figure


def fit(rows: list[Row]) -> Figure:
    """Time of the fit against K, a line for each size of the sample."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    title = "The fit alone: k-means++, one Lloyd iteration, one EM iteration"
    figure, axes = new_figure(title, rows, (1, len(modes)), height=4.6)
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
            logarithmic(axis, "y")
        else:
            axis.set_ylim(0, None)
        axis.set_xticks(sorted({row["num_components"] for row in part}))
        axis.set_xlabel("components K")
        axis.set_title(MODES[mode])
        below(axis, "points × channels")
    return figure


def _fastest(rows: list[Row]) -> list[Row]:
    """What has no mixture, and of the backends that were measured the first of ``FASTEST``."""
    found = {backend_of(row) for row in rows}
    chosen = next((name for name in FASTEST if name in found), None)
    return [row for row in rows if backend_of(row) not in FASTEST or backend_of(row) == chosen]


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


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
