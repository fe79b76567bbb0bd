"""Which inference needs no refilled statistics in the middle of a training: a table of ``benchmarks/average.py``."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from mixnorm_lab.tables import Column, Measured, Table, Value, text_column

NAME = "inference.csv"  # in the folder of the records
TITLE = "Inference in the middle of a training, on held-out training images"


@dataclass(frozen=True)
class Evaluation:
    """A row of the file.

    Args:
        decay: of the average of the weights; 0 is the last weights.
        inference, history: of mixture norm; empty and 0 for batch norm.
        refill: the batches that statistics were refilled from.
        running, refilled: accuracies in % on held-out training images.
    """

    experiment: str
    seed: int
    step: int
    decay: float
    inference: str
    history: int
    refill: int
    running: float
    refilled: float


COLUMNS = tuple(field.name for field in fields(Evaluation))


def read(path: Path) -> list[Evaluation]:
    """The rows of a file, none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    whole, numbers = ("seed", "step", "history", "refill"), ("decay", "running", "refilled")
    try:
        kinds = {**dict.fromkeys(whole, int), **dict.fromkeys(numbers, float)}
        return [Evaluation(**{name: kinds.get(name, str)(row[name]) for name in COLUMNS}) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a table of benchmarks/average.py: write it again with its --out") from error


def table(rows: Sequence[Evaluation]) -> Table:
    """Mean accuracies over a training's evaluations, and the most that refilling adds to one, over the seeds."""
    columns = [
        Column("decay", "weights averaged with", digits=1),
        text_column("inference", "inference"),
        Column("history", "T", digits=0),
        Column("seeds", "seeds", digits=0),
        Column("running", "running statistics", unit="%"),
        Column("refilled", "statistics refilled", unit="%"),
        Column("most", "refilling adds in the worst evaluation"),
    ]
    found: dict[tuple[str, float, str, int], dict[int, list[Evaluation]]] = {}
    for row in rows:
        key = row.experiment, row.decay, row.inference, row.history
        found.setdefault(key, {}).setdefault(row.seed, []).append(row)
    made: list[dict[str, Value]] = []
    for (_, decay, inference, history), by_seed in found.items():
        runs = list(by_seed.values())
        made.append(
            {
                "decay": decay or "last weights",
                "inference": inference,
                "history": history or None,
                "seeds": len(runs),
                "running": Measured.over(_mean(row.running for row in run) for run in runs),
                "refilled": Measured.over(_mean(row.refilled for row in run) for run in runs),
                "most": Measured.over(max(row.refilled - row.running for row in run) for run in runs),
            }
        )
    last = max(row.step for row in rows)
    evaluations = len({row.step for row in rows})
    notes = [
        f"Accuracies are means of {evaluations} evaluations in the first {last:,} steps; what refilling adds is in points, "
        "in the evaluation of each run where it adds most. Mean ± standard deviation over the seeds."
    ]
    return Table(f"{TITLE}: {', '.join(dict.fromkeys(row.experiment for row in rows))}", columns, made, notes)


def commands(rows: Sequence[Evaluation]) -> tuple[str, ...]:
    """What measures it again."""
    steps = sorted({row.step for row in rows})
    every = steps[1] - steps[0] if len(steps) > 1 else steps[0]
    ways = list(dict.fromkeys(row.inference for row in rows if row.inference))
    told = f"--decays {_words(sorted({row.decay for row in rows if row.decay}))}"
    if ways:
        told += f" --inferences {_words(ways)} --histories {_words(sorted({row.history for row in rows}))}"
    told += f" --refill {rows[0].refill} --steps {steps[-1]} --every {every}"
    runs = dict.fromkeys((row.experiment, row.seed) for row in rows)
    start = "python benchmarks/average.py --folder OFFICIAL_FILES"
    return tuple(f"{start} --experiment {name} {told} --seed {seed} --out {NAME}" for name, seed in runs)


def _mean(values: Iterable[float]) -> float:
    there = list(values)
    return sum(there) / len(there)


def _words(values: Iterable[float | str]) -> str:
    return " ".join(value if isinstance(value, str) else f"{value:g}" for value in values)
