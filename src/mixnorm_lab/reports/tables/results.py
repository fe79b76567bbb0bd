"""The two tables that answer the question: accuracy after each quarter of the training, and steps to batch norm's best."""

from __future__ import annotations

from dataclasses import replace

from mixnorm_lab.config import catalog
from mixnorm_lab.reports.model.comparison import compare
from mixnorm_lab.reports.model.groups import PLAIN, RECALIBRATED, Family, Group, accuracy, partner, quarters
from mixnorm_lab.reports.model.paper import paper_numbers, paper_speed
from mixnorm_lab.storage.records import Record
from mixnorm_lab.tables import Column, Measured, Table, Value, text_column

RUN = text_column("run", "run")
SEEDS = Column("seeds", "seeds", digits=0)
CUT_OFF = "Runs that did not finish count for steps if all of them had got there, and not for points in the end."
WAYS = {PLAIN: "", RECALIBRATED: ", statistics refilled"}


def accuracies(family: Family, key: str = PLAIN, paper: bool = True) -> Table:
    """The largest accuracy after each quarter of the training, in %."""
    at = quarters(family.epochs)
    columns = [RUN, SEEDS]
    columns += [
        Column(f"after {epoch}", f"{part}%, epoch {epoch}") for part, epoch in zip((25, 50, 75, 100), at, strict=True)
    ]
    columns += [text_column("mixture", "layers, K, EM iter."), text_column("rate", "learning rate, weight decay")]
    rows = []
    for group in _with(family, key):
        theirs = paper_numbers(group, paper and key == PLAIN).get("accuracy", {})
        best = paper_numbers(group, paper and key == PLAIN).get("max_accuracy")
        row: dict[str, Value] = {"run": group.label, "mixture": mixture_text(group), "seeds": seeds(group)}
        for epoch in at:
            said = theirs.get(epoch, best if epoch == family.epochs else None)
            row[f"after {epoch}"] = Measured.over((accuracy(run, key, epoch) for run in group.until(epoch)), said)
        row["rate"] = _rate(group) if len({_rate(other) for other in family.groups}) > 1 else None
        rows.append(row)
    notes = [*_seed_notes(family), *(_paper_notes(family) if paper and key == PLAIN else [])]
    return Table(f"Largest test accuracy in %: {family.title}{WAYS[key]}", columns, rows, notes).used()


def speed(family: Family, key: str = PLAIN, paper: bool = True) -> Table:
    """Steps and seconds to batch norm's largest accuracy."""
    columns = [
        RUN,
        Column("target", "target", unit="%"),
        Column("steps", "steps to it", digits=0, missing="never"),
        Column("fewer", "fewer steps", digits=0, unit="%"),
        Column("seconds", "seconds to it", digits=1, missing="never"),
        Column("less_time", "less time", digits=0, unit="%"),
        Column("gain", "points above it", missing="—"),
        Column("step_ms", "ms a step", digits=2),
    ]
    rows = []
    for group in _with(family, key):
        base = partner(group, family.groups)
        row: dict[str, Value] = {"run": group.label, "step_ms": Measured.over(step_ms(run) for run in group.runs).mean}
        if base is not None and base.has(key):
            made = compare(group, base, key)
            told = paper_speed(group, base) if paper and key == PLAIN else {}
            row |= {
                "target": made.base_best.mean,
                "steps": replace(made.steps, paper=told.get("steps")),
                "seconds": made.seconds,
            }
            if not group.is_batch_norm:
                fewer = made.fewer_steps
                row["fewer"] = None if fewer is None else Measured(fewer, n=1, of=1, paper=told.get("fewer"))
                row["less_time"] = made.less_time
                row["gain"] = replace(made.gain, paper=told.get("gain"))
        rows.append(row)
    notes = ["The target is batch norm's best accuracy, with the same seed; its own row says when it got there itself."]
    if any(row.get("fewer") is not None for row in rows):
        notes.append("Fewer steps and less time are of the means over the seeds; a minus sign is more.")
    if any(group.cut_off for group in _with(family, key)):
        notes.append(CUT_OFF)
    if any(partner(group, family.groups) is None for group in _with(family, key)):
        notes.append("A dash: no batch norm was trained with the same settings.")
    return Table(f"Steps to batch norm's best: {family.title}{WAYS[key]}", columns, rows, notes).used()


def _with(family: Family, key: str) -> list[Group]:
    return [group for group in family.groups if group.has(key)]


def mixture_text(group: Group) -> str:
    mixture = group.config.mixture
    if mixture is None:
        return group.config.norm_text
    told = [f"K {mixture.options['num_components']}"] if "num_components" in mixture.options else []
    told += [f"EM {mixture.options['em_iters']}"] if "em_iters" in mixture.options else []
    told += [str(mixture.options["inference"])] if "inference" in mixture.options else []
    told += [f"T {mixture.options['history']}"] if "history" in mixture.options else []
    return ", ".join([" + ".join(mixture.layers), *told])


def _rate(group: Group) -> str:
    optimizer = group.config.optimizer
    return f"{optimizer.lr:g}, {optimizer.weight_decay:g}"


def seeds(group: Group) -> Value:
    left = len(group.left_out)
    return len(group.runs) if not left else f"{len(group.runs)} of {len(group.runs) + left}"


def _seed_notes(family: Family) -> list[str]:
    notes = []
    if any(len(group.runs) > 1 for group in family.groups):
        notes.append("Mean ± standard deviation over the seeds.")
    left = [run for group in family.groups for run in group.left_out]
    diverged = sum(run.reason == "not finite" for run in left)
    if diverged:
        told = "1 run diverged and counts" if diverged == 1 else f"{diverged} runs diverged and count"
        notes.append(f"{told} for nothing here.")
    cut_off = len(left) - diverged
    if cut_off:
        told = "1 run did not finish and counts" if cut_off == 1 else f"{cut_off} runs did not finish and count"
        notes.append(f"{told} in the quarters passed alone.")
    again = sum(len(group.repeated) for group in family.groups)
    if again:
        told = "1 run has" if again == 1 else f"{again} runs have"
        notes.append(
            f"{told} the settings and the seed of another that stands here, and count{'s' * (again == 1)} for nothing."
        )
    if not all(group.finished for group in family.groups if group.runs):
        notes.append("Some runs are not finished, and stand here with the epochs they have.")
    return notes


def step_ms(run: Record) -> float | None:
    last = run.epochs[-1]
    return None if last["train_seconds"] is None or not last["steps"] else 1e3 * last["train_seconds"] / last["steps"]


def _paper_notes(family: Family) -> list[str]:
    """Where runs that are named as the paper's are not quite the paper's."""
    notes: dict[str, list[str]] = {}
    for group in family.groups:
        found = catalog.EXPERIMENTS.get(group.name)
        if found is None or not found.paper:
            continue
        differing = [
            line for line in group.config.differences(found.config) if not line.startswith(("seed:", "recalibrate:"))
        ]
        if differing:
            notes.setdefault(f"not quite as in the paper ({'; '.join(differing)})", []).append(group.label)
        if found.note and paper_numbers(group):
            notes.setdefault(f"where the paper does not say, {found.note}", []).append(group.label)
    return [f"{', '.join(labels)}: {note}." for note, labels in notes.items()]
