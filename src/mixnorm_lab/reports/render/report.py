"""The content of a report, in order, before it is Markdown or HTML."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mixnorm_lab.reports.model.groups import Family
from mixnorm_lab.reports.plots import curves, densities, distance_curves
from mixnorm_lab.reports.plots.style import Picture
from mixnorm_lab.reports.tables import cost, details
from mixnorm_lab.reports.tables.outcome import Evaluated, Outcome
from mixnorm_lab.storage.folders import INSPECTION
from mixnorm_lab.storage.measurements import Row
from mixnorm_lab.tables import Table

READING = (
    "A run is judged by the mean of its last ten epochs; in a training of fewer than a hundred, of its last tenth, and at "
    "least the last one. A step is one gradient update. Seconds are of training alone, without evaluation."
)
REFILLED = (
    "Running statistics lag behind the weights while the learning rate is large, for every norm. "
    "Here they were refilled from training batches before each evaluation."
)

NO_PICTURES = "There are no pictures, because matplotlib is not installed: pip install matplotlib"


@dataclass(frozen=True)
class Section:
    """A section of a report.

    Args:
        said: paragraphs in Markdown, which only a document has.
        commands: for a terminal, to run it again.
        folded: whether it is there only for those who look for it.
    """

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    said: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    folded: bool = False


@dataclass(frozen=True)
class Report:
    """All that a report says, in order.

    Args:
        answers: the result, a sentence or two for each comparison.
        key_numbers: (number, what it is), where there is one comparison.
        pictures: the folder that holds the pictures' files.
    """

    title: str
    answers: tuple[str, ...]
    key_numbers: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    pictures: Path


def assemble(
    outcome: Outcome,
    *,
    title: str | None = None,
    pictures_folder: Path,
    cost_rows: Sequence[Row] = (),
) -> Report:
    """Everything that runs have to say. Draws the pictures.

    Args:
        cost_rows: of ``mixnorm bench cost``, for the cost table.
    """
    families, generators = outcome.classifiers, outcome.generators
    pictures: list[Picture] = []
    made: list[Picture] = []
    missing: tuple[str, ...] = ()
    try:
        pictures = curves.draw(families, pictures_folder)
        made = distance_curves.draw(generators, pictures_folder, narrow=True)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        missing = (NO_PICTURES,)
    sections = [Section("Results", *_results(outcome.plain, (READING,)))]
    told = tuple(table for table in outcome.distances if table.rows)
    sections.append(Section("Generators", tables=told, pictures=tuple(made)))
    open_runs = details.unfinished([*families, *generators])
    if open_runs.rows:
        sections.append(Section("Runs that are not finished", tables=(open_runs,)))
    first = [picture for picture in pictures if not _is_further(picture)]
    sections.append(Section("Curves", text=missing, pictures=tuple(first)))
    if any(group.refilled for family in families for group in family.groups):
        text = (REFILLED, *outcome.refilled.answers)
        sections.append(Section("Results with refilled statistics", *_results(outcome.refilled, text)))
    further = tuple(picture for picture in pictures if _is_further(picture))
    inside = () if missing else tuple(_inside(families, pictures_folder))
    sections.append(Section("Inside the training", pictures=further + inside))
    if any(row["benchmark"] == "cost" for row in cost_rows):
        sections.append(Section("What it costs", tables=(cost.table(cost_rows),)))
    every = tuple(table for family in (*families, *generators) for table in details.settings(family))
    sections.append(Section("Settings", tables=every, folded=True))
    sections.append(Section("Every run", tables=tuple(details.runs(families)), folded=True))
    sections.append(Section("Where the figures come from", tables=(details.environments(outcome.records),), folded=True))
    kept = tuple(section for section in sections if section.text or section.tables or section.pictures)
    answers = (*(_answers(outcome.plain) if families else ()), *outcome.distance_answers)
    return Report(title or _title([*families, *generators]), answers, _key_numbers(outcome.plain), kept, pictures_folder)


def _inside(families: Sequence[Family], folder: Path) -> list[Picture]:
    """The views of one run with mixture norms, where the report is about one comparison: how its components evolved and, if
    ``mixnorm inspect`` has looked at it, the densities."""
    mixtures = [group for family in families for group in family.groups if group.is_mixture_norm and group.runs]
    if len(mixtures) != 1:
        return []
    run = mixtures[0].runs[0]
    found = densities.draw(folder, record=run, narrow=True)
    looked_at = [] if run.path is None else sorted((run.path.parent / INSPECTION).glob("densities-*.svg"))
    for path in looked_at:
        picture = Picture(path.stem, "Densities before and after batch norm and mixture norm", "", wide=True)
        narrow = path.with_name(picture.narrow_file)  # which version 0.1 did not draw
        files = [path, path.with_suffix(".png"), *([narrow] if narrow.exists() else [])]
        for file in files:
            shutil.copyfile(file, folder / file.name)
        found.append(replace(picture, narrow=narrow.exists()))
    return found


def _is_further(picture: Picture) -> bool:
    return picture.name.startswith("components") or picture.name.endswith(("-loss", "train-error"))


def _results(way: Evaluated, text: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[Table, ...]]:
    """The tables of the families that were evaluated this way and, if there are any, the text before them."""
    found: list[Table] = []
    for family, tables in zip(way.families, way.tables, strict=True):
        if any(group.has(way.key) for group in family.groups):
            found += [table for table in tables if table.rows]
    return text if found else (), tuple(found)


def _title(families: Sequence[Family]) -> str:
    places = list(dict.fromkeys(f"{family.model} on {family.data}" for family in families))
    what = "Norms side by side" if any(family.side_by_side for family in families) else "Mixture norm against batch norm"
    return what + (f": {places[0]}" if len(places) == 1 else "")


def _answers(way: Evaluated) -> list[str]:
    """What came out, or why nothing did, and how many runs are not finished."""
    found, families = list(way.answers), way.families
    everything = [run for family in families for group in family.groups for run in (*group.runs, *group.left_out)]
    left = sum(not run.finished for run in everything)
    if not found:
        groups = [group for family in families for group in family.groups if group.runs]
        norms = {group.is_batch_norm for group in groups}
        others = "mixture norm" if all(group.is_batch_norm or group.is_mixture_norm for group in groups) else "other norms"
        trained = {
            (True,): "only batch norm was trained",
            (False,): f"only {others} {'was' if others == 'mixture norm' else 'were'} trained",
            (False, True): f"batch norm and {others} were not trained with the same settings",
        }
        found = [f"There is no comparison yet: {trained.get(tuple(sorted(norms)), 'nothing was trained')}."]
    if left:
        found.append(f"{left} of {len(everything)} runs {'is' if left == 1 else 'are'} not finished.")
    return found


def _key_numbers(way: Evaluated) -> tuple[tuple[str, str], ...]:
    """The numbers of a comparison, each with what it is, where there is one comparison."""
    if len(way.comparisons) != 1:
        return ()
    [(_, one)] = way.comparisons
    found = []
    measure, end, target = one.measure, one.end, one.furthest
    if end.mean is not None:
        sure = "" if end.sure else ", which may be chance"
        what = f"{measure.points} of {measure.name}" if measure.points else f"of {measure.name}"
        found.append((measure.text(end.mean, signed=True), f"{what} in the end{sure}"))
    if target is not None and target.fewer.mean is not None:
        word = "fewer" if target.fewer.mean >= 0.5 else "more" if target.fewer.mean <= -0.5 else "difference in"
        goal = f"{target.value:.{max(0, measure.digits - 1)}f}{measure.unit}"
        sure = "" if target.fewer.sure else ", which may be chance"
        found.append((f"{abs(target.fewer.mean):.0f}%", f"{word} steps to {goal}{sure}"))
        if target.less_time is not None and target.less_time.mean is not None:
            word = "less" if target.less_time.mean >= 0 else "more"
            sure = "" if target.less_time.sure else ", which may be chance"
            found.append((f"{abs(target.less_time.mean):.0f}%", f"{word} training time to it{sure}"))
    found.append((str(end.of), "seeds" if end.of > 1 else "seed"))
    return tuple(found)
