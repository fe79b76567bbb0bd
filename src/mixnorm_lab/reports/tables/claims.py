"""What the paper claims of mixture norm, and what was found: how much better, how much sooner, and from when on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mixnorm_lab.config import catalog
from mixnorm_lab.reports.model.comparison import compare, lead, lead_at_the_end, saved_steps, verdict
from mixnorm_lab.reports.model.groups import PLAIN, RECALIBRATED, Family, Group, accuracy, partner, quarters, values
from mixnorm_lab.reports.model.paper import paper_numbers, paper_speed
from mixnorm_lab.reports.tables.results import CUT_OFF, RUN, SEEDS, seeds
from mixnorm_lab.tables import Column, Measured, Table, Value, text_column

SPREAD = (
    "The spread is one standard deviation of the differences, seed by seed. Higher and lower, fewer and more are by more "
    "than it, which chance alone does about once in four times with three seeds, and once in eleven with five."
)
CLOSE = 0.5  # points
OURS = ("best/", "averaged/")  # panels of what the paper does not have


def claims(family: Family) -> Table:
    """For each mixture norm, its gain in accuracy and the steps that it saves, beside the paper's."""
    columns = [
        RUN,
        SEEDS,
        Column("gain", "points above batch norm"),
        text_column("gain_is", "which is"),
        Column("last", "points, last epoch"),
        Column("saved", "% fewer steps to its best", digits=0, missing="never there"),
        text_column("saved_is", "which is"),
        Column("close", f"% fewer to {CLOSE:g} points below it", digits=0, missing="never there"),
        Column("refilled", "points, statistics refilled"),
        text_column("refilled_is", "which is"),
    ]
    rows = []
    for group, base in _compared(family):
        told = paper_speed(group, base)
        gain = replace(compare(group, base).gain, paper=told.get("gain"))
        saved = replace(saved_steps(group, base), paper=told.get("fewer"))
        row: dict[str, Value] = {"run": group.label, "seeds": seeds(group), "gain": gain, "saved": saved}
        row |= {"last": lead_at_the_end(group, base), "close": saved_steps(group, base, below=CLOSE)}
        row |= {"gain_is": verdict(gain), "saved_is": verdict(saved, ("fewer", "more"))}
        if group.has(RECALIBRATED) and base.has(RECALIBRATED):
            refilled = compare(group, base, RECALIBRATED).gain
            row |= {"refilled": refilled, "refilled_is": verdict(refilled)}
        rows.append(row)
    notes = [
        SPREAD,
        "Steps are to batch norm's largest accuracy with the same seed; the share is a mean over the seeds.",
        "Where its curve is flat, its best comes by chance sooner or later; both norms' steps to a little less do not.",
    ]
    notes += [CUT_OFF] * any(group.cut_off for group in family.groups)
    return Table(f"Mixture norm against batch norm: {family.title}", columns, rows, notes).used()


def in_short(families: Sequence[Family]) -> Table:
    """The recommended form in each model and, where it was not run to the end, every mixture norm that was."""
    columns = [
        text_column("where", "model and data"),
        RUN,
        SEEDS,
        Column("gain", "points above batch norm"),
        text_column("gain_is", "which is"),
        Column("saved", "% fewer steps to its best", digits=0, missing="never there"),
        text_column("saved_is", "which is"),
    ]
    rows: list[dict[str, Value]] = []
    for family in families:
        whole = [group for group, _ in _compared(family) if group.finished]
        ours = [group for group in whole if any(panel.startswith(OURS) for panel in catalog.panels_of(group.name))]
        wanted = {group.label for group in ours or whole}
        where = f"{family.model}, {family.data}, {family.epochs} epochs"
        rows += [{**row, "where": where} for row in claims(family).rows if row["run"] in wanted]
    return Table("In short", columns, rows, [SPREAD])


def early_lead(family: Family) -> Table:
    """Points above batch norm after a quarter of the training, with running statistics and with refilled ones."""
    quarter = quarters(family.epochs)[0]
    columns = [
        RUN,
        Column(PLAIN, "running statistics"),
        text_column("plain_is", "which is"),
        Column(RECALIBRATED, "statistics refilled"),
        text_column("refilled_is", "which is"),
    ]
    rows = []
    for group, base in _compared(family):
        ours, theirs = (paper_numbers(one).get("accuracy", {}).get(quarter) for one in (group, base))
        said = None if ours is None or theirs is None else ours - theirs
        plain = replace(lead(group, base, PLAIN, quarter), paper=said)
        row: dict[str, Value] = {"run": group.label, PLAIN: plain, "plain_is": verdict(plain)}
        if group.has(RECALIBRATED) and base.has(RECALIBRATED):
            refilled = replace(lead(group, base, RECALIBRATED, quarter), paper=said)
            row |= {RECALIBRATED: refilled, "refilled_is": verdict(refilled)}
        rows.append(row)
    return Table(f"Points above batch norm after {quarter} epochs: {family.title}", columns, rows, [SPREAD]).used()


def staleness(family: Family) -> Table:
    """Points that refilled statistics add to the largest accuracy after each quarter of the training, for every norm, and
    the most that they add to a single evaluation."""
    at = quarters(family.epochs)
    columns = [RUN, *(Column(str(epoch), f"epoch {epoch}") for epoch in at), Column("most", "worst evaluation of a run")]
    rows: list[dict[str, Value]] = []
    for group in family.groups:
        if group.has(PLAIN) and group.has(RECALIBRATED):
            added = (values(run, PLAIN, 100) - values(run, RECALIBRATED, 100) for run in group.until(0))
            most = Measured.over(float(np.nanmax(points)) for points in added)
            rows.append({"run": group.label, **{str(epoch): _worth(group, epoch) for epoch in at}, "most": most})
    notes = [
        "To the largest accuracy so far; in the last column to a single evaluation, that of each run where they add most. "
        "Mean ± standard deviation over the seeds."
    ]
    return Table(f"Points that refilled statistics add: {family.title}", columns, rows, notes)


def _worth(group: Group, epoch: int) -> Measured:
    both = [(accuracy(run, RECALIBRATED, epoch), accuracy(run, PLAIN, epoch)) for run in group.until(epoch)]
    return Measured.over(None if refilled is None or plain is None else refilled - plain for refilled, plain in both)


def _compared(family: Family) -> list[tuple[Group, Group]]:
    """Every mixture norm with its batch norm."""
    pairs = [(group, partner(group, family.groups)) for group in family.groups if not group.is_batch_norm and group.runs]
    return [(group, base) for group, base in pairs if base is not None]
