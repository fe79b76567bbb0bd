"""The tables that are read first: what to expect, what of the paper is confirmed, and what the gain is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from mixnorm_lab.config import catalog
from mixnorm_lab.reports.model.comparison import Comparison, as_in_the_paper, compare, placebo, verdict
from mixnorm_lab.reports.model.generators import DISTANCE, lowest_distances, paper_fid
from mixnorm_lab.reports.model.groups import Family, Group, last_value, quarters
from mixnorm_lab.reports.model.measure import PLAIN, RECALIBRATED, values
from mixnorm_lab.reports.model.paper import paper_speed
from mixnorm_lab.reports.model.statistics import difference, fewer, holm
from mixnorm_lab.reports.tables.claims import chance, compared, early
from mixnorm_lab.storage.records import Record
from mixnorm_lab.tables import Column, Difference, Measured, Table, Value, text_column

OURS = ("best/", "averaged/")  # panels of what the paper does not have
SIDE_BY_SIDE = "mixture-norm"  # as it is named where norms are compared side by side
EXPECT, CONFIRMED, EFFECTS = "What to expect", "What of the paper is confirmed", "Two effects"


def expected(families: Sequence[Family], generators: Sequence[Family]) -> Table:
    """The recommended form in each model and, where it was not run to the end, every mixture norm that was."""
    columns = [
        text_column("where", "model and data"),
        text_column("norm", "norm"),
        Column("base", "batch norm"),
        Column("ours", "mixture norm"),
        Column("gain", "difference"),
        text_column("verdict", "so it is"),
        Column(RECALIBRATED, "% fewer steps half-way, refilled", digits=0, missing="never there", floor=-999),
        Column(PLAIN, "the same, running", digits=0, missing="never there", floor=-999),
        text_column("chance", "by chance"),
    ]
    rows: list[dict[str, Value]] = []
    for family in families:
        for made in _shown(family):
            where = family.title.removesuffix(", on held-out training images")
            rows.append({"where": where + " (held-out)" * bool(family.validation), "norm": name_of(made.group)})
            rows[-1] |= {"base": made.base_ended, "ours": made.ended, "gain": made.end}
            rows[-1] |= _half_way(made)
    for family in generators:
        for group, base in compared(family):
            if group.has(DISTANCE) and base.has(DISTANCE):
                ours, theirs = lowest_distances(group), lowest_distances(base)
                rows.append({"where": f"{family.model} on {family.data}, lowest distance", "norm": name_of(group)})
                rows[-1] |= {"base": Measured.over(theirs), "ours": Measured.over(ours), "gain": difference(ours, theirs)}
    for row, found in zip(rows, holm([_difference(row["gain"]) for row in rows]), strict=True):
        lower = "lowest distance" in str(row["where"])
        words = ("worse", "better") if lower else ("better", "worse")
        row |= {"gain": found, "verdict": words[(found.mean or 0) < 0] if found.sure else "cannot tell"}
    return Table(EXPECT, columns, rows)


def name_of(group: Group) -> str:
    """A form as a reader knows it."""
    mixture = group.config.mixture
    if mixture is None:
        return group.config.norm_text
    everywhere = group.name.startswith("best/") or "all-layers" in group.name or mixture.layers == ("*",)
    told = "all layers" if everywhere else " + ".join(mixture.layers)
    more = [f"{mixture.options['inference']} inference"] if "inference" in mixture.options else []
    more += [f"T = {mixture.options['history']}"] if "history" in mixture.options else []
    more += [f"weights averaged, {group.config.average:g}"] if group.config.average else []
    return ", ".join([told, *more])


def _shown(family: Family) -> list[Comparison]:
    whole = [(group, base) for group, base in compared(family) if group.finished and group.has(PLAIN) and base.has(PLAIN)]
    if family.validation:
        whole = [(group, base) for group, base in whole if group.name == SIDE_BY_SIDE]
    ours = [pair for pair in whole if any(panel.startswith(OURS) for panel in catalog.panels_of(pair[0].name))]
    return [compare(group, base) for group, base in ours or whole]


def _half_way(made: Comparison) -> dict[str, Value]:
    """% fewer steps to what batch norm has after half of its training, in both ways; and what seeds alone make of it."""
    found: dict[str, Value] = {}
    for key in (PLAIN, RECALIBRATED):
        if made.group.has(key) and made.base.has(key):
            one = compare(made.group, made.base, key)
            found[key] = one.targets[-1].fewer
            apart = placebo(made.base, one.targets[-1].value, one.measure)
            found["chance"] = None if apart.mean is None else f"±{apart.mean:.0f}"
    return found


def _difference(value: Value) -> Difference:
    assert isinstance(value, Difference)
    return value


# The paper's claims

Kind = Literal["largest", "steps", "early", "early, refilled", "unsteady", "distance"]


@dataclass(frozen=True)
class Claim:
    """What the paper says, and the experiment that it says it of."""

    text: str
    experiment: str
    kind: Kind


C10, C100 = "cifar-cnn/cifar10", "cifar-cnn/cifar100"
CLAIMS = (
    Claim("conv3, CIFAR-10: a higher accuracy", f"{C10}/mn-2", "largest"),
    Claim("conv3, CIFAR-100: a higher accuracy", f"{C100}/mn-2", "largest"),
    Claim("conv2 and conv3, CIFAR-100: a higher accuracy", f"{C100}/mn-8", "largest"),
    Claim("8 EM iterations, CIFAR-100: a higher accuracy", f"{C100}/mn-6", "largest"),
    Claim("large learning rate, CIFAR-10: a higher accuracy", f"{C10}/mn-4", "largest"),
    Claim("large learning rate, CIFAR-100: a higher accuracy", f"{C100}/mn-4", "largest"),
    Claim("the same, more weight decay: a higher accuracy", f"{C100}/mn-3", "largest"),
    Claim("Inception-V3, CIFAR-100: a higher accuracy", "inception-v3/cifar100/mn-4", "largest"),
    Claim("conv2 and conv3, CIFAR-100: batch norm's best in fewer steps, %", f"{C100}/mn-8", "steps"),
    Claim("conv3, CIFAR-100: a lead after 25 epochs", f"{C100}/mn-2", "early"),
    Claim("the same, statistics refilled", f"{C100}/mn-2", "early, refilled"),
    Claim("conv3, CIFAR-100: steadier, by the deviation in ten epochs", f"{C100}/mn-2", "unsteady"),
    Claim("conv2 and conv3, CIFAR-100: steadier", f"{C100}/mn-8", "unsteady"),
    Claim("DCGAN: a lower distance, %", "dcgan/cifar10/mn", "distance"),
)
RULE = (
    "Confirmed: the interval excludes 0 on the paper's side, after Holm's correction for this table; if it also ends below "
    "the paper's figure, \"but smaller\". Not confirmed: it excludes the paper's figure and not 0, or lies on the other "
    "side of 0. Undecided: anything else."
)


def confirmed(families: Sequence[Family], generators: Sequence[Family]) -> Table:
    """The paper's claims, each with its figure, ours, and a verdict by a rule."""
    columns = [text_column("claim", "the paper's claim"), Column("paper", "its figure"), Column("ours", "here")]
    columns.append(text_column("verdict", "verdict"))
    pairs = {
        group.name: (group, base)
        for family in (*families, *generators)
        if not family.validation
        for group, base in compared(family)
        if group.finished and base.finished and not group.config.average
    }
    there = [claim for claim in CLAIMS if claim.experiment in pairs]
    found = holm([_measured(claim, *pairs[claim.experiment]) for claim in there])
    rows: list[dict[str, Value]] = []
    for claim, ours in zip(there, found, strict=True):
        paper = ours.paper if isinstance(ours.paper, (int, float)) else None
        wanted = -1 if claim.kind == "unsteady" else 1
        rows.append({"claim": claim.text, "paper": paper, "ours": replace(ours, paper=None), "verdict": judge(ours, wanted)})
        if claim.kind == "steps":
            rows.append({"claim": "the same by another seed of batch norm, %", "ours": chance(pairs[claim.experiment][1])})
            rows[-1]["verdict"] = "by chance"
    return Table(CONFIRMED, columns, rows, (RULE,))


def _measured(claim: Claim, group: Group, base: Group) -> Difference:
    told = paper_speed(group, base)
    said = {name: value for name, value in told.items() if isinstance(value, (int, float))}
    if claim.kind == "steps":
        return as_in_the_paper(group, base, said.get("fewer"))
    if claim.kind.startswith("early"):
        return early(group, base, RECALIBRATED if "refilled" in claim.kind else PLAIN, quarters(group.config.epochs)[0])
    if claim.kind == "distance":
        ours, theirs = (paper_fid(one).get("fid") for one in (group, base))
        return fewer(lowest_distances(group), lowest_distances(base), 100 * (1 - ours / theirs) if ours and theirs else None)
    made = compare(group, base)
    return made.unsteady if claim.kind == "unsteady" else replace(made.best, paper=said.get("gain"))


def judge(ours: Difference, wanted: int = 1) -> str:
    """The verdict of the rule. ``wanted``: the side of 0 that the paper claims, where it has no figure."""
    if ours.mean is None or ours.low is None or ours.high is None:
        return "undecided: too few seeds" if ours.mean is not None else "undecided"
    paper = ours.paper if isinstance(ours.paper, (int, float)) else None
    side = wanted if paper is None else int(np.sign(paper))
    if ours.sure and ours.mean * side > 0:
        short = paper is not None and (ours.high if side > 0 else -ours.low) < abs(paper)
        return "confirmed, but smaller" if short else "confirmed"
    beyond = paper is not None and not ours.low <= paper <= ours.high
    return "not confirmed" if beyond or ours.sure else "undecided"


# Two effects


def effects(families: Sequence[Family]) -> Table:
    """For each form, the accuracy that it gains beside the training loss that it has."""
    columns = [
        text_column("where", "data"),
        text_column("norm", "mixture norm"),
        Column("gain", "accuracy, points"),
        Column("loss", "training loss, last ten epochs", digits=3),
        Column("higher", "epochs with a higher training loss", digits=0, unit="%"),
    ]
    rows: list[dict[str, Value]] = []
    names = ("best/cifar10", "best/cifar100", f"{C100}/mn-8", f"{C100}/mn-2", f"{C100}/mn-4", f"{C100}/mn-3", f"{C10}/mn-4")
    found = {
        group.name: (family, group, base)
        for family in families
        if not family.validation
        for group, base in compared(family)
        if group.finished and not group.config.average
    }
    for family, group, base in (found[name] for name in names if name in found):
        made = compare(group, base)
        rate = group.config.optimizer.lr
        rows.append({"where": family.data, "norm": f"{name_of(group)}, learning rate {rate:g}, {group.label}"})
        rows[-1] |= {"gain": made.end, "loss": made.loss, "higher": _higher(group, base)}
    return Table(EFFECTS, columns, rows)


def _higher(group: Group, base: Group) -> float | None:
    """In how many % of the epochs the mean training loss is higher than batch norm's."""
    ours, theirs = (_mean_line(one.runs, "train_loss") for one in (group, base))
    length = min(len(ours), len(theirs))
    return float(100 * np.mean(ours[:length] > theirs[:length])) if length else None


def _mean_line(runs: Iterable[Record], key: str) -> np.ndarray:
    lines = [values(run, key) for run in runs]
    length = min(len(line) for line in lines)
    return np.mean([line[:length] for line in lines], axis=0)


# Where the gain comes from

GAIN = "Where does the gain come from?"
CAUSES = {  # norms of ResNet-18 on held-out images, and what each has that batch norm has not
    "ghost-32": "noise: batch norm over 32 images",
    "ghost-16": "more noise: over 16 images",
    "enhanced": "a gate of each image for its channels",
    "enhanced-32": "the same, and noise: batch norm over 32 images",
    "mixture-norm": "the paper's form: modes, and noise",
    "mixture-norm,history=40": "the same, T = 40 in evaluation",
    "mixture-norm,em_iters=0": "the same without EM: more noise",
    "mixture-norm,scale=unit,activation=None": "modes without 1/√λ",
    "mixture-norm,scale=unit,between=1.0,activation=None": "the same, keeping the modes apart",
    "mixture-norm,scale=unit,within=learned,between=learned,activation=None": "learned gates, which start as batch norm",
    "mixture-norm,component_affine=True,seeding=warm,scale=unit,within=0.0,between=1.0,activation=None": (
        "γ and β of each mode, without noise"
    ),
    "mixture-norm,num_components=1,deviation=learned,activation=None": "a parabola, no modes",
    "mixture-norm,layers=relu,num_components=1,deviation=learned,activation=None": "a parabola where a ReLU follows",
    "mixture-norm,layers=relu,deviation=learned": "a parabola and modes where a ReLU follows",
    "mixture-norm,layers=relu,deviation=learned,scale=unit": "the same without 1/√λ",
    "mixture-norm,layers=relu,deviation=learned,num_components=5": "the same with 1/√λ, K = 5",
    "parabola-32,layers=relu": "a parabola and noise, no modes: over 32 images, where a ReLU follows",
    "parabola-16,layers=relu": "the same, over 16 images",
    "parabola-32": "a parabola and noise, over 32 images, everywhere",
    "mixture-norm,num_components=1,deviation=learned,num_components@relu=3": (
        "modes where a ReLU follows, a parabola everywhere"
    ),
    "mixture-norm,deviation=learned": "a parabola and modes everywhere",
}


def causes(family: Family) -> Table:
    """Norms that have one part of mixture norm each, beside batch norm."""
    columns = [
        text_column("what", "what the norm has"),
        Column("end", "accuracy, points"),
        text_column("verdict", "which is"),
        Column("last", "by the last epoch alone"),
        Column("loss", "training loss", digits=3),
        Column("evaluated", "the same, evaluated", digits=3),
    ]
    pairs = {group.name: (group, base) for group, base in compared(family)}
    there = [pairs[name] for name in CAUSES if name in pairs]
    made = [compare(group, base) for group, base in there]
    rows: list[dict[str, Value]] = []
    for one, end in zip(made, holm([found.end for found in made]), strict=True):
        ours, theirs = ([float(one.measure.values(run)[-1]) for run in part.runs] for part in one.both)
        first, second = ([last_value(run, "train_eval_loss") for run in part.runs] for part in one.both)
        rows.append({"what": CAUSES[one.group.name], "end": end, "verdict": verdict(end), "last": difference(ours, theirs)})
        rows[-1] |= {"loss": one.loss, "evaluated": difference(first, second)}
    return Table(GAIN, columns, rows)
