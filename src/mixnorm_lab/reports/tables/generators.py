"""What records of generators say: the lowest distance, updates to batch norm's lowest, its curve, and samples."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mixnorm_lab.config import catalog
from mixnorm_lab.config.run_config import FEATURES
from mixnorm_lab.generators import samples
from mixnorm_lab.reports.model.groups import Family, Group, partner, values
from mixnorm_lab.reports.plots.curves import FORMATS, STYLE, Picture, new_figure, save
from mixnorm_lab.reports.plots.panels import slug, styles
from mixnorm_lab.reports.tables.results import RUN, SEEDS, mixture_text, seeds
from mixnorm_lab.reports.tables.table import Column, Measured, Table, Value, text_column
from mixnorm_lab.storage.records import Record, kept_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEY, FRESH = "distance", "recalibrated_distance"  # with running statistics, and with refilled ones


def title(family: Family) -> str:
    """Names the features, without which a distance says nothing."""
    gan = family.groups[0].config.gan
    assert gan is not None
    return f"{FEATURES[gan.features]}: {family.model} on {family.data}, {family.epochs * gan.updates:,} updates"


def lowest(run: Record) -> dict[str, Any] | None:
    """The epoch with the lowest distance."""
    measured = [epoch for epoch in run.epochs if epoch.get(KEY) is not None]
    return min(measured, key=lambda epoch: epoch[KEY]) if measured else None


def updates_to(run: Record, target: float) -> int | None:
    """Updates until the distance was first measured to be as low."""
    return next((epoch["steps"] for epoch in run.epochs if epoch.get(KEY) is not None and epoch[KEY] <= target), None)


def distances(family: Family, paper: bool = True) -> Table:
    """The lowest distance, and the updates to batch norm's lowest with the same seed."""
    columns = [
        RUN, SEEDS, Column("best", "lowest distance"), Column("at", "after updates", digits=0),
        Column("steps", "updates to batch norm's lowest", digits=0, missing="never"),
        Column("fewer", "fewer updates", digits=0, unit="%"), Column("ms", "ms an update"),
        text_column("features", "features"), text_column("mixture", "layers, K, EM iter."),
    ]  # fmt: skip
    rows: list[dict[str, Value]] = []
    for group in (group for group in family.groups if group.has(KEY)):
        base = partner(group, family.groups)
        told = _paper(group) if paper else {}
        best = [epoch for run in group.runs if (epoch := lowest(run)) is not None]
        row: dict[str, Value] = {"run": group.label, "seeds": seeds(group), "mixture": mixture_text(group)}
        row["best"] = Measured.over((epoch[KEY] for epoch in best), told.get("fid") if _is_fid(group) else None)
        row["at"] = Measured.over(epoch["steps"] for epoch in best)
        row["ms"] = Measured.over(1e3 * run.epochs[-1]["train_seconds"] / run.epochs[-1]["steps"] for run in group.runs)
        row["features"] = ", ".join(_labels(group))
        if base is not None and base.has(KEY) and _labels(base) == _labels(group):
            ours, theirs = _to_lowest(group, base), _to_lowest(base, base)
            row["steps"] = replace(ours, paper=told.get("steps_to_bn"))
            if not group.is_batch_norm and ours.mean is not None and theirs.mean and ours.n == ours.of:
                said = _paper(base).get("steps_to_bn") if paper else None
                share = 100 * (1 - told["steps_to_bn"] / said) if said and "steps_to_bn" in told else None
                row["fewer"] = Measured(100 * (1 - ours.mean / theirs.mean), paper=share)
        rows.append(row)
    return Table(title(family), columns, rows, _notes(family, paper)).used()


def evaluations(family: Family, key: str = KEY) -> Table:
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
    way = "after updates" if key == KEY else "after updates, statistics refilled"
    return Table(f"{title(family).partition(':')[0]} {way}", columns, rows).used()


def answers(families: Sequence[Family]) -> list[str]:
    """A sentence for each mixture norm with a batch norm beside it."""
    found, number = [], Column("", "")
    for family in families:
        for group in family.groups:
            base = partner(group, family.groups)
            if group.is_batch_norm or base is None or not (group.has(KEY) and base.has(KEY)):
                continue
            name = FEATURES[group.config.gan.features]  # type: ignore[union-attr]
            if _labels(group) != _labels(base):
                found.append(f"{group.label}: its {name} is of other features than batch norm's, and cannot be compared.")
                continue
            ours, theirs = (Measured.over(lowest(run)[KEY] for run in g.runs) for g in (group, base))  # type: ignore[index]
            steps, of_base = _to_lowest(group, base), _to_lowest(base, base)
            when = f"in {steps.mean:,.0f} updates instead of {of_base.mean:,.0f}" if steps.n == steps.of else ""
            when = when or f"in {steps.n} of {steps.of} runs"
            runs = f"{len(group.runs)} seed{'s' * (len(group.runs) > 1)}"
            found.append(
                f"Mixture norm's generator reached batch norm's lowest {name} ({number.text(theirs)}) {when}; its own "
                f"lowest is {number.text(ours)} ({runs})."
            )
    return found


def draw(families: Sequence[Family], folder: Path, formats: Sequence[str] = FORMATS) -> list[Picture]:
    """The distance against updates, and the samples of the first seed at the lowest distance."""
    import matplotlib as mpl

    made: list[tuple[Picture, Figure]] = []
    with mpl.rc_context(STYLE):
        for family in families:
            there = [group for group in family.groups if group.has(KEY)]
            if there:
                made += [_curve(family, there), *_samples(family, there)]
        save(made, folder, formats)
    return [picture for picture, _ in made]


def _curve(family: Family, there: Sequence[Group]) -> tuple[Picture, Figure]:
    name = title(family)
    figure, axis = new_figure(name, "thousand updates", name.partition(":")[0])
    cut = ""
    for group, style in zip(there, styles(there), strict=True):
        count = min(len(run.epochs) for run in group.runs)
        lines = np.array([values(run, KEY)[:count] for run in group.runs])
        measured = ~np.isnan(lines).any(axis=0)
        x = np.array([epoch["steps"] for epoch in group.runs[0].epochs[:count]])[measured] / 1000
        mean = lines[:, measured].mean(axis=0)
        axis.plot(x, mean, marker="o", ms=3, label=group.label, **style)
        if len(lines) > 1:
            spread = lines[:, measured].std(axis=0, ddof=1)
            axis.fill_between(x, mean - spread, mean + spread, color=style["color"], alpha=0.18, linewidth=0)
        for run in group.left_out:  # its distances are as good as another's, but their lowest may be still to come
            found = [(epoch["steps"] / 1000, epoch[KEY]) for epoch in run.epochs if epoch.get(KEY) is not None]
            if found:
                axis.plot(*zip(*found, strict=True), color=style["color"], lw=0.9, ls=":", marker="o", ms=2)
                cut = " Dotted: runs that did not finish."
    axis.legend(loc="upper right")
    labels = ", ".join(dict.fromkeys(label for group in there for label in _labels(group)))
    return Picture(f"{slug(family.model)}-{slug(family.data)}-distance", name, f"Features: {labels}.{cut}"), figure


def _samples(family: Family, there: Sequence[Group]) -> list[tuple[Picture, Figure]]:
    """Grids side by side, where their files are still there."""
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    found = []
    for group in there:
        run = group.runs[0]
        best = lowest(run)
        if run.path is not None and best is not None:
            file = _picture(run.path, best)
            if file.is_file():
                found.append((f"{group.label}: {best[KEY]:.2f} after {best['steps']:,}", imread(file)))
    if not found:
        return []
    figure = Figure(figsize=(4 * len(found), 4.4), layout="constrained")
    for axis, (label, pixels) in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        axis.imshow(pixels, interpolation="nearest")
        axis.set_title(label)
        axis.set_axis_off()
    name = f"{slug(family.model)}-{slug(family.data)}-samples"
    return [(Picture(name, f"Samples at the lowest distance: {family.model}", "The same noise for all.", wide=True), figure)]


def keep_samples(records: Iterable[Record], folder: Path) -> None:
    """Copies the samples at each generator's lowest distance to beside its kept record, in place of what is there."""
    for run in records:
        best = lowest(run)
        if run.path is None or best is None:
            continue
        file = _picture(run.path, best)
        kept = _picture(kept_path(run, folder), best)
        if file.is_file() and file != kept:
            shutil.rmtree(kept.parent, ignore_errors=True)
            kept.parent.mkdir(parents=True)
            shutil.copyfile(file, kept)


def _picture(record: Path, epoch: dict[str, Any]) -> Path:
    """The samples of an epoch, beside the record."""
    return record.parent / samples.FOLDER / f"{epoch['steps']:08}.png"


def _to_lowest(group: Group, base: Group) -> Measured:
    """Updates to the lowest distance of batch norm with the same seed or, where there is none, of all its seeds."""
    lows = {run.config.seed: epoch[KEY] for run in base.runs if (epoch := lowest(run)) is not None}
    mean = float(np.mean(list(lows.values())))
    return Measured.over(updates_to(run, lows.get(run.config.seed, mean)) for run in group.runs)


def _labels(group: Group) -> list[str]:
    return sorted({epoch["features"] for run in group.runs for epoch in run.epochs if epoch.get("features")})


def _is_fid(group: Group) -> bool:
    return group.config.gan is not None and group.config.gan.features == "inception-2015"


def _paper(group: Group) -> dict[str, Any]:
    """The paper's figures of a group, if it trained as long."""
    found = catalog.EXPERIMENTS.get(group.name)
    return found.paper if found is not None and found.config.epochs == group.config.epochs else {}


def _notes(family: Family, paper: bool) -> list[str]:
    notes = ["Batch norm's lowest is that with the same seed. The distance is from all training images."]
    fids = {_paper(group)["fid"]: group.label for group in family.groups if paper and "fid" in _paper(group)}
    if fids and not _is_fid(family.groups[0]):
        told = ", ".join(f"{value:.2f} for {label}" for value, label in fids.items())
        notes.append(f"This is not FID. The paper's updates are to batch norm's lowest FID; its lowest are {told}.")
    if any(len(group.runs) > 1 for group in family.groups):
        notes.append("Mean ± standard deviation over the seeds.")
    return notes
