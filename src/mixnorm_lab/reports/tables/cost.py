"""The paper's table of computation cost, with rows of ``mixnorm bench cost`` beside it."""

from __future__ import annotations

from collections.abc import Sequence

from mixnorm_lab.config import catalog
from mixnorm_lab.storage.measurements import Row, is_base
from mixnorm_lab.tables import Column, Table, Value, text_column


def table(rows: Sequence[Row] = ()) -> Table:
    """Training steps a second of a whole DenseNet with its last norm replaced.

    Args:
        rows: as :func:`mixnorm_lab.storage.measurements.read` gives them; those of other benchmarks count for nothing.
    """
    columns = [
        text_column("model", "model"),
        Column("k", "K", digits=0),
        Column("batch", "batch size", digits=0),
        Column("channels", "channels", digits=0),
        Column("paper_rate", "paper, steps/s"),
        Column("paper_ratio", "paper, of BN's", digits=3),
    ]
    measured = _measured(rows)
    for i, (device, mode) in enumerate(measured):
        columns += [
            Column(f"rate{i}", f"{device}, {mode}: steps/s", digits=1),
            Column(f"ratio{i}", f"{device}, {mode}: of BN's", digits=3),
        ]
    made: list[dict[str, Value]] = []
    for (batch, channels), rates in catalog.COST.items():
        for k, rate in rates.items():
            model = "BN" if k == 1 else "MN"
            row: dict[str, Value] = {"model": model, "k": k, "batch": batch, "channels": channels, "paper_rate": rate}
            row["paper_ratio"] = rate / rates[1]
            for i, found in enumerate(measured.values()):
                milliseconds, base = found.get((batch, channels, k)), found.get((batch, channels, 1))
                if milliseconds:
                    row[f"rate{i}"] = 1e3 / milliseconds
                    row[f"ratio{i}"] = base / milliseconds if base else None
            made.append(row)
    notes = [
        "The paper: Titan X (Pascal), against a batch norm without a native kernel. "
        "Here: against nn.BatchNorm2d, which has one, the fastest backend that was measured.",
        "The network as a whole; only the norm after the third dense block is replaced.",
    ]
    return Table("Cost: training steps a second", columns, made, notes).used()


def _measured(rows: Sequence[Row]) -> dict[tuple[str, str], dict[tuple[int, int, int], float]]:
    """Milliseconds a step: by (device, mode), then (batch, channels, K), where K = 1 is batch norm."""
    found: dict[tuple[str, str], dict[tuple[int, int, int], float]] = {}
    for row in rows:
        if row["benchmark"] != "cost" or not row["time_ms"]:
            continue
        batch = row["m"] // 64  # 8×8 positions at the last norm
        key = (batch, row["channels"], 1 if is_base(row) else row["num_components"])
        part = found.setdefault((row["device"], row["mode"]), {})
        part[key] = min(row["time_ms"], part.get(key, row["time_ms"]))
    return found
