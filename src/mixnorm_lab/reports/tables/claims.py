"""Mixture norm against batch norm, beside the paper: how much better, how much sooner, from when on, and how steadily."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mixnorm_lab.reports.model.comparison import as_in_the_paper, comparisons, lead, placebo_in_the_paper, verdict
from mixnorm_lab.reports.model.groups import Family, Group, best, partner, quarters
from mixnorm_lab.reports.model.measure import PLAIN, RECALIBRATED
from mixnorm_lab.reports.model.paper import paper_numbers, paper_speed
from mixnorm_lab.reports.model.statistics import holm
from mixnorm_lab.reports.tables.results import RUN
from mixnorm_lab.tables import Column, Difference, Measured, Table, Value, text_column


def claims(family: Family, key: str = PLAIN) -> Table:
    """For each norm its differences from batch norm, and what the paper has."""
    columns = [
        RUN,
        Column("end", "beyond batch norm, last epochs"),
        text_column("end_is", "which is"),
        Column("best", "by the largest, as in the paper"),
        text_column("best_is", "which is"),
        Column("saved", "% fewer steps to batch norm's largest", digits=0, missing="never there", floor=-999),
        Column("average", "over the training"),
        Column("unsteady", "deviation within 10 epochs"),
        Column("loss", "train loss", digits=3),
    ]
    rows = []
    for made in comparisons(family, key):
        told = paper_speed(made.group, made.base) if key == PLAIN else {}
        row: dict[str, Value] = {"run": made.group.label, "end": made.end, "end_is": verdict(made.end)}
        largest = replace(made.best, paper=told.get("gain"))
        row |= {"best": largest, "best_is": verdict(largest), "average": made.average}
        row["unsteady"] = made.unsteady if made.unsteady.mean is not None else None
        if key == PLAIN:
            row["loss"] = made.loss
            said = told.get("fewer")
            row["saved"] = as_in_the_paper(made.group, made.base, said if isinstance(said, (int, float)) else None)
        rows.append(row)
    if key == PLAIN:
        bases = {id(base): base for _, base in compared(family) if base.has(key) and len(base.runs) > 1}
        rows += [{"run": f"{base.label}, other seed", "saved": chance(base)} for base in bases.values()]
    way = ", statistics refilled" if key == RECALIBRATED else ""
    return Table(f"Against batch norm, in points: {family.title}{way}", columns, rows).used()


def chance(base: Group) -> str:
    """Batch norm's largest accuracy, reached by another seed of batch norm."""
    found = placebo_in_the_paper(base)
    text = "never" if found.mean is None else Column("", "", digits=0, floor=-999).text(replace(found, n=1, of=1))
    return f"{text} in {found.n} of {found.of} pairs"


def early_lead(family: Family) -> Table:
    """Points above batch norm after a quarter of the training, with running statistics and with refilled ones."""
    quarter = quarters(family.epochs)[0]
    columns = [RUN]
    for key, heading in ((PLAIN, "running statistics"), (RECALIBRATED, "statistics refilled")):
        columns += [Column(key, heading), text_column(f"{key}_is", "which is")]
    pairs = compared(family)
    rows: list[dict[str, Value]] = [{"run": group.label} for group, _ in pairs]
    for key in (PLAIN, RECALIBRATED):
        there = [i for i, (group, base) in enumerate(pairs) if group.has(key) and base.has(key)]
        for i, found in zip(there, holm([early(*pairs[i], key, quarter) for i in there]), strict=True):
            rows[i] |= {key: found, f"{key}_is": verdict(found)}
    return Table(f"Points above batch norm after {quarter} epochs: {family.title}", columns, rows).used()


def early(group: Group, base: Group, key: str, quarter: int) -> Difference:
    ours, theirs = (paper_numbers(one).get("accuracy", {}).get(quarter) for one in (group, base))
    return lead(group, base, key, quarter, None if ours is None or theirs is None else ours - theirs)


def staleness(family: Family) -> Table:
    """Points that refilled statistics add to the largest accuracy after each quarter of the training, for every norm, and
    the most that they add to a single evaluation."""
    at = quarters(family.epochs)
    columns = [RUN, *(Column(str(epoch), f"epoch {epoch}", counted=True) for epoch in at)]
    columns.append(Column("most", "worst evaluation of a run", counted=True))
    rows: list[dict[str, Value]] = []
    for group in family.groups:
        if group.has(PLAIN) and group.refilled:
            ways = group.judged_by(PLAIN), group.judged_by(RECALIBRATED)
            added = (ways[1].values(run) - ways[0].values(run) for run in group.until(0))
            most = Measured.over(float(np.nanmax(points)) for points in added)
            rows.append({"run": group.label, **{str(epoch): _worth(group, epoch) for epoch in at}, "most": most})
    return Table(f"Points that refilled statistics add: {family.title}", columns, rows)


def _worth(group: Group, epoch: int) -> Measured:
    plain, refilled = group.judged_by(PLAIN), group.judged_by(RECALIBRATED)
    both = [(best(run, refilled, epoch), best(run, plain, epoch)) for run in group.until(epoch)]
    return Measured.over(None if ours is None or theirs is None else ours - theirs for ours, theirs in both)


def compared(family: Family) -> list[tuple[Group, Group]]:
    """Every norm with its batch norm."""
    pairs = [(group, partner(group, family.groups)) for group in family.groups if not group.is_batch_norm and group.runs]
    return [(group, base) for group, base in pairs if base is not None]
