"""What the numbers should be, and how they compare: pure functions of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mixnorm_lab.config import catalog
from mixnorm_lab.storage.measurements import Row, is_base

# Time against batch norm's, K = 3, channels_last, inside a CUDA graph.
LAYER = {
    ("256x256x56x56", "bf16"): 1.0,
    ("256x256x56x56", "fp32"): 1.15,
    ("256x64x32x32", "bf16"): 1.0,
    ("256x128x16x16", "fp32"): 1.3,
    ("256x128x8x8", "fp32"): 2.0,
    ("256x128x8x8", "bf16"): 2.0,
    ("64x448x8x8", "fp32"): 2.0,
}
LARGE = ("256x256x56x56", "256x64x32x32")
EAGER_LAYER = 3.0
INFERENCE = {"": 2.0, "relu": 2.5, "steady": 2.5, "distilled": 1.2}
COST = {"graph": 0.98, "eager": 0.95}  # steps a second against batch norm's
MODELS = {  # a training step of a model, by its case and mode
    ("cifar-cnn-b256", "graph"): 1.1,
    ("resnet-18-b256", "graph"): 1.1,
    ("resnet-50-b128", "graph"): 1.02,
    ("resnet-50-b128", "eager"): 1.1,
}
COMPILATION = 1.5  # of a model with torch.compile, against batch norm's
FIRST_STEP = {"cpu": 10.0, "eager": 5.0}  # seconds in a new environment, by the mode: on a CPU, on a GPU
SLOPE, SLOPE_FROM = 1.0, 1_000_000  # of the time against the points, on a log-log scale, from so many points on
GROWTH = {"fp32": 0.15, "bf16": 0.4}  # of the time from K = 2 to K = 5 at the large shapes
MEMORY_SLACK = 1.05
CPU_LAYER, CPU_INFERENCE, CPU_MEMORY_INPUTS, CPU_FIT = 3.0, 8.0, 1.5, 0.5
CPU_SHAPES = ("64x128x8x8", "64x448x8x8", "64x64x32x32")


@dataclass(frozen=True)
class Check:
    """A number beside its goal."""

    text: str
    measured: float
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.measured <= self.goal


def base_of(row: Row, rows: Iterable[Row]) -> Row | None:
    """The row that a row is a ratio to."""
    keys = ("benchmark", "series", "case", "data", "dtype", "layout", "mode", "device")
    return next((r for r in rows if is_base(r) and all(r[key] == row[key] for key in keys)), None)


def goal(row: Row, rows: Sequence[Row]) -> float | None:
    """The most that the row's ratio may be; ``None`` where nothing was asked for. The reference has no goals."""
    if not _has_goals(row):
        return None
    if row["benchmark"] == "models":
        is_asked = row["num_components"] is not None and row["series"] == "training"
        return MODELS.get((row["case"], row["mode"])) if is_asked else None
    if row["benchmark"] == "start":
        return COMPILATION if row["series"] == "compile" else None
    if row["series"] and row["benchmark"] != "inference":
        return None
    if row["benchmark"] == "memory":
        return memory_goal(row, base_of(row, rows))
    if row["benchmark"] == "cost":
        return 1 / COST[row["mode"]] if row["mode"] in COST else None
    if row["benchmark"] == "fit":
        return CPU_FIT if row["mode"] == "cpu" and row["ratio"] is not None else None
    if row["num_components"] != 3 or row["layout"] != "channels_last":
        return None
    if row["mode"] == "cpu":
        limits = {"layer": CPU_LAYER, "inference": CPU_INFERENCE}
        return limits.get(row["benchmark"]) if row["case"] in CPU_SHAPES and not row["series"] else None
    if row["benchmark"] == "inference":
        return INFERENCE[row["series"]] if (row["case"], row["dtype"]) in LAYER else None
    limit = LAYER.get((row["case"], row["dtype"]))
    return EAGER_LAYER if limit is not None and row["mode"] == "eager" else limit


def _has_goals(row: Row) -> bool:
    return not is_base(row) and not row["variant"].startswith("reference")


def seconds_goal(row: Row) -> float | None:
    """The most seconds that a row of "start" may have, whatever batch norm has; ``None`` where that was not asked for."""
    if row["benchmark"] != "start" or row["series"] != "first-step" or not _has_goals(row):
        return None
    return FIRST_STEP.get(row["mode"])


def memory_goal(row: Row, base: Row | None) -> float | None:
    """Batch norm's peak, the responsibilities in fp32 and 5%; on a CPU, batch norm's and one and a half inputs."""
    if base is None or not base["peak_memory_mb"]:
        return None
    peak = base["peak_memory_mb"]
    if row["mode"] == "cpu":
        return (peak + CPU_MEMORY_INPUTS * 4 * row["m"] * row["channels"] / 1e6) / peak
    return MEMORY_SLACK * (peak + 4 * row["m"] * row["num_components"] / 1e6) / peak


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The power p of y ~ x^p: the slope of a line through the points on a log-log scale."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def slopes(rows: Iterable[Row]) -> dict[tuple[str, str, str], tuple[float, bool]]:
    """By series, variant and device, the slope of the time, and whether it is taken from a million points on.

    Against the points only those from a million on count, where two of them are that large.
    """
    lines: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row["series"] in ("m", "C") and row["time_ms"]:
            size = row["m"] if row["series"] == "m" else row["channels"]
            lines.setdefault((row["series"], row["variant"], row["device"]), []).append((size, row["time_ms"]))
    found = {}
    for key, line in lines.items():
        large = [point for point in line if point[0] >= SLOPE_FROM]
        asymptotic = key[0] == "m" and len(large) > 1
        if len(line) > 1:
            found[key] = slope(*zip(*(large if asymptotic else line), strict=True)), asymptotic
    return found


def checks(rows: Sequence[Row]) -> list[Check]:
    """What several rows decide together: slopes, and the growth with K."""
    found = []
    for (series, variant, _), (value, asymptotic) in slopes(rows).items():
        against = "the channels" if series == "C" else "the points" + (" from a million on" if asymptotic else "")
        has_goal = asymptotic and variant not in ("batch_norm", "reference")
        found.append(Check(f"slope of the time against {against}, {variant}", value, SLOPE if has_goal else None))
    timed = [row for row in rows if row["benchmark"] == "layer" and row["case"] in LARGE and row["time_ms"]]
    same = ("case", "data", "dtype", "layout", "mode", "variant", "device")
    for two in (row for row in timed if row["num_components"] == 2 and row["variant"] != "reference"):
        five = next((r for r in timed if r["num_components"] == 5 and all(r[key] == two[key] for key in same)), None)
        if five:
            text = f"growth from K = 2 to K = 5, {two['case']} {two['dtype']} {two['layout']}"
            found.append(Check(text, five["time_ms"] / two["time_ms"] - 1, GROWTH.get(two["dtype"])))
    return found


def paper_ratio(row: Row) -> float | None:
    """The paper's steps a second against its batch norm's, for a row of "cost"."""
    batch = row["m"] // 64  # 8×8 positions at the last norm
    table = catalog.COST.get((batch, row["channels"]))
    return table[row["num_components"]] / table[1] if table and row["num_components"] in table else None
