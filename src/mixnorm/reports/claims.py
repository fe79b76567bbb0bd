"""What the paper claims of mixture norm, and what was found: how much better, how much sooner, and from when on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mixnorm.reports.comparison import compare, lead, saved_steps
from mixnorm.reports.groups import PLAIN, RECALIBRATED, Family, Group, accuracy, partner, quarters, values
from mixnorm.reports.table import Column, Measured, Table, Value, text_column
from mixnorm.reports.tables import RUN, SEEDS, paper_figures, paper_speed, seeds

SPREAD = "The spread is one standard deviation of the differences, seed by seed."


def claims(family: Family) -> Table:
    """For each mixture norm, its gain in accuracy and the steps that it saves, beside the paper's."""
    columns = [
        RUN,
        SEEDS,
        Column("gain", "points above batch norm"),
        text_column("gain_is", "which is"),
        Column("saved", "% fewer steps to its best", digits=0, missing="never there"),
        text_column("saved_is", "which is"),
        Column("refilled", "points, statistics refilled"),
        text_column("refilled_is", "which is"),
    ]
    rows = []
    for group, base in _compared(family):
        told = paper_speed(group, base)
        gain = replace(compare(group, base).gain, paper=told.get("gain"))
        saved = replace(saved_steps(group, base), paper=told.get("fewer"))
        row: dict[str, Value] = {"run": group.label, "seeds": seeds(group), "gain": gain, "saved": saved}
        row |= {"gain_is": verdict(gain), "saved_is": verdict(saved, ("fewer", "more"))}
        if group.has(RECALIBRATED) and base.has(RECALIBRATED):
            refilled = compare(group, base, RECALIBRATED).gain
            row |= {"refilled": refilled, "refilled_is": verdict(refilled)}
        rows.append(row)
    notes = [SPREAD, "Steps are to batch norm's largest accuracy with the same seed; the share is a mean over the seeds."]
    return Table(f"Mixture norm against batch norm: {family.title}", columns, rows, notes).used()


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
        ours, theirs = (paper_figures(one).get("accuracy", {}).get(quarter) for one in (group, base))
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
    columns = [RUN, *(Column(str(epoch), f"epoch {epoch}") for epoch in at), Column("most", "one evaluation, at most")]
    rows: list[dict[str, Value]] = []
    for group in family.groups:
        if group.has(PLAIN) and group.has(RECALIBRATED):
            most = Measured.over(np.nanmax(values(run, PLAIN, 100) - values(run, RECALIBRATED, 100)) for run in group.runs)
            rows.append({"run": group.label, **{str(epoch): _worth(group, epoch) for epoch in at}, "most": most})
    notes = ["To the largest accuracy so far, and in the last column to that of an epoch by itself."]
    return Table(f"Points that refilled statistics add: {family.title}", columns, rows, notes)


def _worth(group: Group, epoch: int) -> Measured:
    both = [(accuracy(run, RECALIBRATED, epoch), accuracy(run, PLAIN, epoch)) for run in group.runs]
    return Measured.over(None if refilled is None or plain is None else refilled - plain for refilled, plain in both)


def verdict(measured: Measured, words: tuple[str, str] = ("higher", "lower")) -> str:
    """A difference in words: whether it is larger than its spread and, if so, how it compares with the paper's."""
    if measured.mean is None:
        return ""
    if measured.n < measured.of:
        return f"in {measured.n} of {measured.of} runs only"
    if measured.deviation is None:
        return "of one seed"
    if abs(measured.mean) <= measured.deviation:
        return "inside the spread"
    text = words[0] if measured.mean > 0 else words[1]
    if not isinstance(measured.paper, (int, float)):
        return text
    beyond = abs(measured.mean - measured.paper) > measured.deviation
    compared = ("more than in the paper" if measured.mean > measured.paper else "less than in the paper") if beyond else ""
    return f"{text}, {compared or 'as in the paper'}"


def _compared(family: Family) -> list[tuple[Group, Group]]:
    """Every mixture norm with its batch norm."""
    pairs = [(group, partner(group, family.groups)) for group in family.groups if not group.is_batch_norm and group.runs]
    return [(group, base) for group, base in pairs if base is not None]
