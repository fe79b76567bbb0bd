"""Tables of generators, the lowest distances and every distance, and the sentence that says what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mixnorm_lab.config.parts.gan import FEATURES
from mixnorm_lab.reports.model.comparison import verdict
from mixnorm_lab.reports.model.generators import (
    DISTANCE,
    feature_labels,
    is_fid,
    lowest,
    lowest_distances,
    paper_fid,
    title,
    to_lowest,
)
from mixnorm_lab.reports.model.groups import Family, partner
from mixnorm_lab.reports.model.statistics import difference, holm
from mixnorm_lab.reports.tables.results import RUN, SEEDS, mixture_text, seeds
from mixnorm_lab.tables import Column, Difference, Measured, Table, Value, text_column


def distances(family: Family, paper: bool = True) -> Table:
    """The lowest distance, and the updates to batch norm's lowest with the same seed."""
    columns = [
        RUN, SEEDS, Column("best", "lowest distance"), Column("beyond", "beyond batch norm's"),
        text_column("verdict", "which is"), Column("at", "after updates", digits=0),
        Column("steps", "updates to batch norm's lowest", digits=0, missing="never"),
        Column("fewer", "fewer updates", digits=0, unit="%"), Column("ms", "ms an update"),
        text_column("features", "features"), text_column("mixture", "layers, K, EM iter."),
    ]  # fmt: skip
    rows: list[dict[str, Value]] = []
    for group in (group for group in family.groups if group.has(DISTANCE)):
        base = partner(group, family.groups)
        told = paper_fid(group) if paper else {}
        best = [epoch for run in group.runs if (epoch := lowest(run)) is not None]
        row: dict[str, Value] = {"run": group.label, "seeds": seeds(group), "mixture": mixture_text(group)}
        row["best"] = Measured.over((epoch[DISTANCE] for epoch in best), told.get("fid") if is_fid(group) else None)
        row["at"] = Measured.over(epoch["steps"] for epoch in best)
        row["ms"] = Measured.over(1e3 * run.epochs[-1]["train_seconds"] / run.epochs[-1]["steps"] for run in group.runs)
        row["features"] = ", ".join(feature_labels(group))
        if base is not None and base.has(DISTANCE) and feature_labels(base) == feature_labels(group):
            ours, theirs = to_lowest(group, base), to_lowest(base, base)
            row["steps"] = replace(ours, paper=told.get("steps_to_bn"))
            if not group.is_batch_norm:
                [found] = holm([difference(lowest_distances(group), lowest_distances(base))])
                row |= {"beyond": found, "verdict": verdict(found)}
            if not group.is_batch_norm and ours.mean is not None and theirs.mean and ours.n == ours.of:
                said = paper_fid(base).get("steps_to_bn") if paper else None
                share = 100 * (1 - told["steps_to_bn"] / said) if said and "steps_to_bn" in told else None
                row["fewer"] = Measured(100 * (1 - ours.mean / theirs.mean), paper=share)
        rows.append(row)
    return Table(title(family), columns, rows, _notes(family, paper)).used()


def evaluations(family: Family, key: str = DISTANCE) -> Table:
    """Every distance of every run, those that did not finish as well."""
    runs = [(group, run) for group in family.groups for run in group.all_runs]
    found = [{epoch["steps"]: epoch[key] for epoch in run.epochs if epoch.get(key) is not None} for _, run in runs]
    at = sorted({steps for measured in found for steps in measured})
    columns = [RUN, Column("seed", "seed", digits=0), *(Column(str(steps), f"{steps:,}") for steps in at)]
    columns.append(text_column("state", "state"))
    rows: list[dict[str, Value]] = []
    for (group, run), measured in zip(runs, found, strict=True):
        if measured:
            state = ["counts for nothing: another run of this seed"] if run in group.repeated else []
            state += [] if run.finished else [f"not finished: {run.epochs[-1]['steps']:,} updates"]
            rows.append({"run": group.label, "seed": run.config.seed, "state": "; ".join(state)})
            rows[-1] |= {str(steps): value for steps, value in measured.items()}
    way = "after updates" if key == DISTANCE else "after updates, statistics refilled"
    return Table(f"{title(family).partition(':')[0]} {way}", columns, rows).used()


def answers(families: Sequence[Family]) -> list[str]:
    """A sentence for each mixture norm with a batch norm beside it."""
    found, number = [], Column("", "")
    for family in families:
        for group in family.groups:
            base = partner(group, family.groups)
            if group.is_batch_norm or base is None or not (group.has(DISTANCE) and base.has(DISTANCE)):
                continue
            name = FEATURES[group.config.gan.features]  # type: ignore[union-attr]
            if feature_labels(group) != feature_labels(base):
                found.append(f"{group.label}: its {name} is of other features than batch norm's, and cannot be compared.")
                continue
            ours, theirs = (Measured.over(lowest_distances(one)) for one in (group, base))
            [made] = holm([difference(lowest_distances(group), lowest_distances(base))])
            steps, of_base = to_lowest(group, base), to_lowest(base, base)
            when = f"in {steps.mean:,.0f} updates instead of {of_base.mean:,.0f}" if steps.n == steps.of else ""
            when = when or f"in {steps.n} of {steps.of} runs"
            runs = f"{len(group.runs)} seed{'s' * (len(group.runs) > 1)}"
            found.append(
                f"Mixture norm's generator reached batch norm's lowest {name} ({number.text(theirs)}) {when}; its own "
                f"lowest is {number.text(ours)} ({runs}). {_told(made)}"
            )
    return found


def _told(made: Difference) -> str:
    """Whether the norms can be told apart."""
    if made.mean is None or made.low is None:
        return "One seed each cannot tell the norms apart." if min(made.n, made.base_n) < 2 else ""
    inside = f"{Column('', '').text(made).partition(', n ')[0]}"
    return f"The difference, {inside}, is certain." if made.sure else f"The difference, {inside}, may be chance."


def _notes(family: Family, paper: bool) -> list[str]:
    notes = ["Batch norm's lowest is that with the same seed. The distance is from all training images."]
    fids = {paper_fid(group)["fid"]: group.label for group in family.groups if paper and "fid" in paper_fid(group)}
    if fids and not is_fid(family.groups[0]):
        told = ", ".join(f"{value:.2f} for {label}" for value, label in fids.items())
        notes.append(f"This is not FID. The paper's updates are to batch norm's lowest FID; its lowest are {told}.")
    if any(len(group.runs) > 1 for group in family.groups):
        notes.append("Mean ± standard deviation over the seeds.")
    return notes
