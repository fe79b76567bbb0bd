"""The table of norms side by side: the accuracy in the end, and its difference from batch norm's."""

from __future__ import annotations

from mixnorm_lab.reports.model.comparison import compare, interval
from mixnorm_lab.reports.model.groups import PLAIN, Family, Group, last_value, partner
from mixnorm_lab.reports.tables.results import RUN, SEEDS, WAYS, seeds, step_ms
from mixnorm_lab.storage.records import Record
from mixnorm_lab.tables import Column, Measured, Table, Value, text_column


def table(family: Family, key: str = PLAIN) -> Table:
    """A row for each norm: accuracies in %, points above batch norm seed by seed, and ms a step."""
    columns = [
        RUN,
        SEEDS,
        Column("last", "last epoch, %"),
        Column("above", "points above batch norm"),
        text_column("interval", "95% interval"),
        Column("train_eval_loss", "training loss, evaluated", digits=3),
        Column("train_loss", "training loss, last epoch", digits=3),
        Column("step_ms", "ms a step", digits=2),
    ]
    rows = [_row(group, family, key) for group in family.groups if group.has(key)]
    notes = ["Points above batch norm are differences seed by seed, where it was trained with the same seeds."]
    if any(row.get("interval") for row in rows):
        notes.append(
            "Mean ± standard deviation over the seeds; the interval is of the mean of the differences, by Student's t."
        )
    if any(row.get("train_eval_loss") is not None for row in rows):
        notes.append(
            "The evaluated training loss is of training images without crops and flips, by the norms in evaluation."
        )
    return Table(f"Norms side by side: {family.title}{WAYS[key]}", columns, rows, notes).used()


def _row(group: Group, family: Family, key: str) -> dict[str, Value]:
    row: dict[str, Value] = {
        "run": group.label,
        "seeds": seeds(group),
        "last": Measured.over(_last_accuracy(run, key) for run in group.runs),
        "train_loss": Measured.over(last_value(run, "train_loss") for run in group.runs),
        "step_ms": Measured.over(step_ms(run) for run in group.runs).mean,
    }
    if group.has("train_eval_loss"):
        row["train_eval_loss"] = Measured.over(last_value(run, "train_eval_loss") for run in group.runs)
    base = partner(group, family.groups)
    if base is not None and base is not group and base.has(key):
        made = compare(group, base, key)
        row |= {"above": made.last, "interval": interval(made.last)}
    return row


def _last_accuracy(run: Record, key: str) -> float | None:
    error = last_value(run, key)
    return None if error is None else 100 - 100 * error
