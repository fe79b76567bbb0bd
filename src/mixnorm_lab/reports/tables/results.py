"""The tables that answer the question: how good each norm is in the end, and how many steps it takes to fixed targets."""

from __future__ import annotations

from collections.abc import Iterable

from mixnorm_lab.config import catalog
from mixnorm_lab.config.run_config import samples_of
from mixnorm_lab.reports.model.comparison import Comparison, comparisons, placebo, verdict
from mixnorm_lab.reports.model.groups import (
    Family,
    Group,
    average,
    best,
    final_loss,
    in_the_end,
    is_busy,
    last_epochs,
    quarters,
    unsteadiness,
)
from mixnorm_lab.reports.model.measure import PLAIN, WAYS
from mixnorm_lab.reports.model.paper import paper_numbers
from mixnorm_lab.reports.model.sentences import BUSY
from mixnorm_lab.storage.records import Record
from mixnorm_lab.tables import Column, Measured, Table, Value, text_column

RUN = text_column("run", "run")
SEEDS = Column("seeds", "seeds", digits=0)
INTERVAL = (
    "In brackets: Welch's 95% interval of the difference over all seeds. n: the seeds of the norm and, if not as many, of "
    'batch norm. "Which is" counts all rows of its column (Holm\'s correction). "Cannot tell": chance could explain it.'
)
EVALUATED = "The evaluated train loss is of training {samples}, by the norms in evaluation."
PLACEBO = (
    "Batch norm, other seed: how far apart two seeds of batch norm are, in the mean over all pairs that got there. "
    "A saving of that size needs no better norm."
)


def ends(family: Family, key: str = PLAIN, *, paper: bool = True) -> Table:
    """For each norm what it is judged by, beside batch norm, and how it got there."""
    measure = family.judged_by(key)
    count = last_epochs(family.epochs)
    found = {id(made.group): made for made in comparisons(family, key)}
    unit = f", {measure.unit}" if measure.unit else ""
    columns = [
        RUN,
        SEEDS,
        Column("end", ("last epoch" if count == 1 else f"last {count} epochs") + unit, measure.digits),
        Column("above", ", ".join(part for part in ("beyond", measure.points) if part), measure.digits),
        text_column("verdict", "which is"),
        Column("best", f"{measure.best_word}{unit}", measure.digits),
        Column("average", f"all epochs{unit}", measure.digits),
        Column("unsteady", "± within 10 epochs", measure.digits),
        Column("train_loss", "train loss", digits=3),
        Column("train_eval_loss", "the same, evaluated", digits=3),
        Column("step_ms", "ms a step", digits=2),
    ]
    rows = []
    for group in with_key(family, key):
        said = paper_numbers(group, paper and key == PLAIN).get("max_accuracy")
        row: dict[str, Value] = {
            "run": group.label,
            "seeds": seeds(group),
            "end": Measured.over(in_the_end(run, measure) for run in group.runs),
            "best": Measured.over((best(run, measure) for run in group.runs), said),
            "average": Measured.over(average(run, measure) for run in group.runs),
            "unsteady": _there(unsteadiness(run, measure) for run in group.runs),
            "train_loss": _there(final_loss(run) for run in group.runs),
            "train_eval_loss": _there(final_loss(run, "train_eval_loss") for run in group.runs),
            "step_ms": None if _is_busy(group) else Measured.over(step_ms(run) for run in group.runs).mean,
        }
        if id(group) in found:
            row |= {"above": found[id(group)].end, "verdict": verdict(found[id(group)].end)}
        rows.append(row)
    notes = [INTERVAL] if any(row.get("above") for row in rows) else []
    if any(row.get("train_eval_loss") for row in rows):
        samples = samples_of(family.data)
        notes.append(EVALUATED.format(samples=samples + " without crops and flips" * (samples == "images")))
    notes += [f"{measure.name[:1].upper()}{measure.name[1:]}: {measure.metric.better} is better."] * (
        not measure.is_accuracy
    )
    return Table(
        f"{measure.name[:1].upper()}{measure.name[1:]} in the end: {family.title}{WAYS[key]}", columns, rows, notes
    ).used()


def by_quarters(family: Family, key: str = PLAIN, paper: bool = True) -> Table:
    """The best of one evaluation after each quarter of the training."""
    measure = family.judged_by(key)
    at = quarters(family.epochs)
    columns = [RUN, SEEDS]
    cut_off = any(group.cut_off for group in family.groups)  # which count for the quarters that they passed
    columns += [
        Column(f"after {epoch}", f"{part}%, epoch {epoch}", measure.digits, counted=cut_off)
        for part, epoch in zip((25, 50, 75, 100), at, strict=True)
    ]
    columns += [text_column("mixture", "layers, K, EM iter."), text_column("rate", "learning rate, weight decay")]
    rows = []
    for group in with_key(family, key):
        theirs = paper_numbers(group, paper and key == PLAIN).get("accuracy", {})
        said_best = paper_numbers(group, paper and key == PLAIN).get("max_accuracy")
        row: dict[str, Value] = {"run": group.label, "mixture": mixture_text(group), "seeds": seeds(group)}
        for epoch in at:
            said = theirs.get(epoch, said_best if epoch == family.epochs else None)
            row[f"after {epoch}"] = Measured.over((best(run, measure, epoch) for run in group.until(epoch)), said)
        row["rate"] = _rate(group) if len({_rate(other) for other in family.groups}) > 1 else None
        if any(isinstance(value, Measured) and value.mean is not None for value in row.values()):
            rows.append(row)
    word, name = measure.best_word.capitalize(), f"test {measure.name}" if measure.is_accuracy else measure.name
    unit = f" in {measure.unit}" if measure.unit else ""
    notes = [*seed_notes(family), *(paper_notes(family) if paper and key == PLAIN else [])]
    return Table(f"{word} {name}{unit}: {family.title}{WAYS[key]}", columns, rows, notes).used()


def steps(family: Family, key: str = PLAIN) -> Table:
    """Steps and seconds of each norm, and of batch norm, to the same fixed targets; and of batch norm by chance alone."""
    measure = family.judged_by(key)
    columns = [
        RUN,
        Column("target", "target", max(0, measure.digits - 1), measure.unit),
        Column("steps", "steps", digits=0, missing="never"),
        Column("base_steps", "batch norm's", digits=0, missing="never"),
        Column("fewer", "fewer steps, %", digits=0, missing="never", floor=-999),
        text_column("verdict", "which is"),
        Column("seconds", "seconds", digits=1, missing="never"),
        Column("less_time", "less time, %", digits=0, missing="never", floor=-999),
    ]
    rows: list[dict[str, Value]] = []
    made = comparisons(family, key)
    for base in dict.fromkeys(id(one.base) for one in made):
        beside = [one for one in made if id(one.base) == base]
        rows += [row for one in beside for row in _target_rows(one)]
        rows += _placebo_rows(beside[0], len({id(one.base) for one in made}) > 1)
    notes = [
        "Targets are what batch norm's mean curve has after a tenth, a fifth, a third and a half of the training: fixed "
        "before any other norm is looked at. Fewer and less are of geometric means; a minus sign is more."
    ]
    notes += [PLACEBO] * any(len(one.base.runs) > 1 for one in made)
    notes += [BUSY] * any(one.busy for one in made)
    return Table(f"Steps to fixed targets: {family.title}{WAYS[key]}", columns, rows, notes).used()


def steps_in_short(family: Family, key: str = PLAIN) -> Table:
    """% fewer steps to each target, a column for each, of many norms: under batch norm's row what chance alone does."""
    measure = family.judged_by(key)
    made = comparisons(family, key)
    columns = [RUN, *(text_column(str(i), heading) for i, heading in enumerate(("a tenth", "a fifth", "a third", "half")))]
    number = Column("", "", digits=0, floor=-999)
    rows: list[dict[str, Value]] = []
    for base in {id(one.base): one for one in made}.values():
        goals = base.targets
        digits = max(0, measure.digits - 1)
        told = [f"{goal.value:.{digits}f}{measure.unit}: {number.text(goal.base_steps)}" for goal in goals]
        rows.append({"run": base.base.label, **{str(i): text for i, text in enumerate(told)}})
        for row in _placebo_rows(base, named=False):
            place = next(i for i, goal in enumerate(goals) if goal.value == row["target"])
            if place == 0:
                rows.append({"run": f"{base.base.label}, other seed"})
            rows[-1][str(place)] = row["fewer"]
        for one in (one for one in made if one.base is base.base):
            cells = (number.text(target.fewer) + " •" * target.fewer.sure for target in one.targets)
            rows.append({"run": one.group.label, **{str(i): text for i, text in enumerate(cells)}})
    return Table(f"% fewer steps to fixed targets: {family.title}{WAYS[key]}", columns, rows).used()


def _target_rows(made: Comparison) -> list[dict[str, Value]]:
    return [
        {
            "run": made.group.label,
            "target": target.value,
            "steps": target.steps,
            "base_steps": target.base_steps,
            "fewer": target.fewer,
            "verdict": verdict(target.fewer, ("fewer", "more")),
            "seconds": None if made.busy else target.seconds,
            "less_time": target.less_time,
        }
        for target in made.targets
    ]


def _placebo_rows(made: Comparison, named: bool) -> list[dict[str, Value]]:
    """Batch norm held against itself, where it has two seeds."""
    if len(made.base.runs) < 2:
        return []
    label = f"{made.base.label}, other seed" if named else "batch norm, other seed"
    found: list[dict[str, Value]] = []
    for target in made.targets:
        apart = placebo(made.base, target.value, made.measure)
        told = None if apart.mean is None else f"±{apart.mean:.0f} in {apart.n} pair{'s' * (apart.n > 1)}"
        found.append({"run": label, "target": target.value, "fewer": told, "base_steps": target.base_steps})
    return found


def _there(numbers: Iterable[float | None]) -> Measured | None:
    """None where no run has the number, so that its column goes."""
    made = Measured.over(numbers)
    return None if made.mean is None else made


def _is_busy(group: Group) -> bool:
    return any(is_busy(run) for run in group.runs)


def with_key(family: Family, key: str) -> list[Group]:
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


def seed_notes(family: Family) -> list[str]:
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


def paper_notes(family: Family) -> list[str]:
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
