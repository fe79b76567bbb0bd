"""Pictures of whole models: their steps against batch norm's, and what a new process takes until its first one."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mixnorm_lab.bench import goals
from mixnorm_lab.bench.cases import MODES
from mixnorm_lab.bench.plot_parts import BLUE, GOAL, GREY, INK, ORANGE, PALE, SHADES, VALUE_ROOM, bar, legend, new_figure
from mixnorm_lab.storage.measurements import Row, is_base

FORMS = {  # in the order of the bars
    "ghost-32": ("ghost of 32", PALE),
    "paper": ("paper", SHADES[1]),
    "relu": ("ReLU inside", BLUE),
    "ahead": ('fit="ahead"', SHADES[4]),
    "gated": ("gated", ORANGE),
}
FIGURES = {
    "first-step": "the first training step",
    "with-import": "from the start of the process to the end of that step",
    "compile": "then, the first step of a new model with torch.compile",
}


def models(rows: list[Row]) -> Figure:
    """Bars of every form for each model, an axis for training in each mode and for evaluation."""
    kinds = list(dict.fromkeys((row["series"], row["mode"]) for row in rows))
    title = "Whole models with mixture norm in all places: time against batch norm's"
    figure, axes = new_figure(title, rows, (len(kinds), 1), height=3.2)
    others = [row for row in rows if not is_base(row)]
    forms = [form for form in FORMS if any(_form(row) == form for row in others)]
    most = len({row["case"] for row in rows})
    width = min(0.3, 0.84 / len(forms))
    for axis, (series, mode) in zip(axes, kinds, strict=True):
        part = [row for row in others if (row["series"], row["mode"]) == (series, mode)]
        cases = list(dict.fromkeys(row["case"] for row in part))
        for number, case in enumerate(cases):
            bars = sorted((row for row in part if row["case"] == case), key=lambda row: forms.index(_form(row)))
            for place, row in enumerate(bars):
                x = number + (place - (len(bars) - 1) / 2) * width
                bar(axis, x, f"{row['ratio']:.2f}", width, FORMS[_form(row)][1], goals.goal(row, rows), upright=False)
        axis.axhline(1, color=INK, lw=1, zorder=2)
        dtypes = {row["case"]: row["dtype"] for row in part}
        axis.set_xticks(range(len(cases)), [f"{_model(case)}, {dtypes[case]}" for case in cases])
        axis.set_xlim(-0.6, most - 0.4)
        axis.tick_params(axis="x", length=0, pad=VALUE_ROOM / 2)
        axis.margins(y=0.12)
        axis.set_title(f"{'a training step' if series == 'training' else 'evaluation'}, {MODES[mode]}")
        axis.set_ylabel("ratio to batch norm")
    handles: list[Any] = [Patch(color=FORMS[form][1], label=FORMS[form][0]) for form in forms]
    handles.append(Line2D([], [], color=INK, lw=1, label="batch norm"))
    if any(goals.goal(row, rows) is not None for row in others):
        handles.append(Line2D([], [], color=GOAL, lw=2.2, label="goal, at most"))
    legend(figure, handles)
    return figure


def start(rows: list[Row]) -> Figure:
    """Seconds of batch norm and of mixture norm side by side, an axis for each figure."""
    series = [name for name in FIGURES if any(row["series"] == name for row in rows)]
    title = "A new process with empty caches: seconds until a model trains"
    figure, axes = new_figure(title, rows, (len(series), 1), height=3.0)
    most = max(len({row["case"] for row in rows if row["series"] == name}) for name in series)
    has_goals = False
    for axis, name in zip(axes, series, strict=True):
        part = [row for row in rows if row["series"] == name]
        cases = list(dict.fromkeys(row["case"] for row in part))
        for row in part:
            x = cases.index(row["case"]) + (-0.15 if is_base(row) else 0.15)
            limit = _limit(row, rows)
            has_goals = has_goals or limit is not None
            bar(axis, x, f"{row['time_ms'] / 1e3:.1f}", 0.3, GREY if is_base(row) else BLUE, limit, upright=False)
        axis.set_xticks(range(len(cases)), [_model(case) for case in cases])
        axis.set_xlim(-0.6, most - 0.4)
        axis.tick_params(axis="x", length=0, pad=VALUE_ROOM / 2)
        axis.margins(y=0.12)
        axis.set_title(FIGURES[name])
        axis.set_ylabel("seconds")
    handles: list[Any] = [Patch(color=GREY, label="batch norm"), Patch(color=BLUE, label="mixture norm, gated")]
    if has_goals:
        handles.append(Line2D([], [], color=GOAL, lw=2.2, label="goal, at most"))
    legend(figure, handles)
    return figure


def _limit(row: Row, rows: list[Row]) -> float | None:
    """The goal of a row of "start" in seconds."""
    ratio, base = goals.goal(row, rows), goals.base_of(row, rows)
    if ratio is None or base is None:
        return goals.seconds_goal(row)
    return float(ratio * base["time_ms"] / 1e3)


def _form(row: Row) -> str:
    return str(row["variant"]).rpartition(" ")[2]


def _model(case: str) -> str:
    name, _, batch = case.rpartition("-b")
    return f"{name}, batch {batch}"
