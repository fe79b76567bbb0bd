"""A document about many runs: for each model and data set what was found, beside the paper, and how to run it again."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mixnorm_lab.config import catalog
from mixnorm_lab.config.run_config import OPTIONS
from mixnorm_lab.reports.model import groups
from mixnorm_lab.reports.model.generators import FRESH_DISTANCE
from mixnorm_lab.reports.model.generators import title as distance_title
from mixnorm_lab.reports.model.groups import PLAIN, RECALIBRATED, Family, Group
from mixnorm_lab.reports.plots import curves, densities, distance_curves, plane_points
from mixnorm_lab.reports.plots.style import Picture, slug
from mixnorm_lab.reports.render import markdown
from mixnorm_lab.reports.render.report import READING, REFILLED, Report, Section
from mixnorm_lab.reports.tables import claims, cost, details, distances, inference, plane_scores
from mixnorm_lab.reports.tables.inference import Evaluation
from mixnorm_lab.reports.tables.outcome import Outcome
from mixnorm_lab.reports.tables.results import accuracies, speed
from mixnorm_lab.storage.folders import INSPECTION
from mixnorm_lab.storage.measurements import Row
from mixnorm_lab.storage.plane_results import Result
from mixnorm_lab.storage.records import Record

FINDINGS = "findings.md"  # beside the records: what people say of them, under the titles of the sections
TITLE = "Mixture norm, measured again"
FORMAT = "svg"  # small, and the same bytes each time
KINDS = (PLAIN, RECALIBRATED, "steps", "train_loss", "test_loss")  # the curves that are shown
COST, INSIDE, EVERY_RUN = "What it costs", "Inside the training", "Every run"
# Runs in a folder of this name had the device for themselves: their seconds count, and their other numbers stand elsewhere.
ALONE, BY_ITSELF = "alone", "Seconds of runs that had the GPU for themselves"


def write(
    path: Path,
    records: Sequence[Record],
    *,
    findings: Path | None = None,
    points: Mapping[str, Sequence[Result]] | None = None,
    evaluations: Sequence[Evaluation] = (),
    cost_rows: Sequence[Row] = (),
) -> Path:
    """Writes the document, and its pictures into a folder beside it that has its name.

    Args:
        points: generators of points in the plane, by their data.
        evaluations: of ``benchmarks/average.py``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    report = assemble(records, path.with_suffix(""), read_findings(findings), points or {}, evaluations, cost_rows)
    path.write_text(markdown.build(report, path.parent, FORMAT), encoding="utf-8")
    return path


def assemble(
    records: Sequence[Record],
    pictures: Path,
    said: Mapping[str, Sequence[str]],
    points: Mapping[str, Sequence[Result]],
    evaluations: Sequence[Evaluation] = (),
    cost_rows: Sequence[Row] = (),
) -> Report:
    """The document before it is Markdown. ``said``: paragraphs by the title of their section; "" is the beginning."""
    alone = [record for record in records if record.path is not None and ALONE in record.path.parts]
    records = [record for record in records if all(record is not other for other in alone)]
    outcome = Outcome(records)
    families, generators = outcome.classifiers, outcome.generators
    sections = [_measured(family, pictures) for family in families if not family.validation]
    for family, lowest in zip(generators, outcome.distances, strict=True):
        drawn = distance_curves.draw([family], pictures, (FORMAT,))
        tables = (lowest, distances.evaluations(family), distances.evaluations(family, FRESH_DISTANCE))
        there = tuple(table for table in tables if table.rows)
        sections.append(Section(distance_title(family), (), there, tuple(drawn), commands=commands(family)))
    for data, results in points.items():
        made = plane_points.draw(data, results, pictures, (FORMAT,))
        seeds = len({result.seed for result in results})
        again = f"mixnorm compare --task gan --data {data} --seeds {seeds}"
        sections.append(Section(f"The {data}", (), (plane_scores.table(data, results),), (made,), commands=(again,)))
    sections += [_chosen(family) for family in families if family.validation]
    if evaluations:
        sections.append(
            Section(inference.TITLE, tables=(inference.table(evaluations),), commands=inference.commands(evaluations))
        )
    for family in groups.families(alone):
        both = tuple(table for table in (speed(family), speed(family, RECALIBRATED)) if table.rows)
        sections.append(Section(BY_ITSELF, tables=both, commands=commands(family)))
    sections.append(Section(INSIDE, pictures=tuple(_inside(families, pictures))))
    if cost_rows:
        sections.append(Section(COST, tables=(cost.table(cost_rows),)))
    cut = details.unfinished([*families, *generators])
    every = details.runs(families), *([cut] if cut.rows else []), details.environments(records)
    sections.append(Section(EVERY_RUN, tables=every))
    sections = [section for section in sections if section.tables or section.pictures]
    unknown = sorted(said.keys() - {"", *(section.title for section in sections)})
    if unknown:
        titles = ", ".join(section.title for section in sections)
        raise ValueError(
            f"the findings have a section {unknown[0]!r}, but the document has {titles}: name it as one of them"
        )
    summary = claims.in_short([family for family in families if not family.validation])
    first = Section(
        "How to read this",
        (READING, f"{REFILLED} Both ways are told."),
        (summary,) if summary.rows else (),
        said=tuple(said.get("", ())),
    )
    told = [replace(section, said=tuple(said.get(section.title, ()))) for section in sections]
    return Report(TITLE, (), (), (first, *told), pictures)


def _measured(family: Family, folder: Path) -> Section:
    """What did not finish has its accuracies here, but its best is not compared with that of a whole training."""
    done = replace(family, groups=tuple(group for group in family.groups if group.finished))
    tables = [claims.claims(done), accuracies(family), speed(done)]
    if any(group.has(RECALIBRATED) for group in family.groups):
        tables += [accuracies(family, RECALIBRATED), speed(done, RECALIBRATED)]
        tables += [claims.early_lead(family), claims.staleness(family)]
    drawn = curves.draw([family], folder, KINDS, (FORMAT,))
    return Section(family.title, (), tuple(table for table in tables if table.rows), tuple(drawn), commands=commands(family))


def _chosen(family: Family) -> Section:
    text = "The test images were not looked at here: what is called test accuracy is that of training images held out."
    tables = [
        claims.claims(family),
        accuracies(family, paper=False),
        accuracies(family, RECALIBRATED),
        claims.staleness(family),
    ]
    return Section(family.title, (text,), tuple(table for table in tables if table.rows), commands=commands(family))


def _inside(families: Sequence[Family], folder: Path) -> list[Picture]:
    """The runs that ``mixnorm inspect`` has looked at: densities, and the components over the training."""
    found: list[Picture] = []
    for run in (run for family in families for group in family.groups for run in group.runs):
        looked_at = [] if run.path is None else sorted((run.path.parent / INSPECTION).glob("densities-*.svg"))
        if not looked_at:
            continue
        name = run.config.name
        for path in looked_at:
            shutil.copyfile(path, folder / path.name)
            found.append(Picture(path.stem, f"Densities before and after the norms: {name}", "", wide=True))
        names = [layer for epoch in run.epochs for layer in epoch["mixtures"] or ()]
        seen = next((layer for layer in names if looked_at[0].stem == f"densities-{slug(layer)}"), None)
        found += densities.draw(folder, record=run, layer=seen, counts=True, formats=(FORMAT,))
    return found


def commands(family: Family) -> tuple[str, ...]:
    """What makes the records of a family."""
    by_settings: dict[tuple[str, ...], list[str]] = {}
    for group in family.groups:
        if group.runs and group.name in catalog.EXPERIMENTS:
            by_settings.setdefault(_options(group), []).append(group.name)
    made = [" ".join(["mixnorm reproduce", *_patterns(names), *options]) for options, names in by_settings.items()]
    needs_features = any(group.config.gan is not None for group in family.groups)
    return (f"mixnorm reproduce {catalog.FEATURE_CLASSIFIER}", *made) if needs_features else tuple(made)


def _options(group: Group) -> tuple[str, ...]:
    """What the command says beside the names: where the runs are not as the catalog has them."""
    config, known = group.config, catalog.EXPERIMENTS[group.name].config
    told = [f"--seeds {len({run.config.seed for run in group.all_runs})}"]
    for name, option in OPTIONS.items():
        if name == "epochs" or option.shared:  # which are those of mixnorm reproduce
            value = getattr(config, name)
            told += [option.on_command_line(value)] if value != getattr(known, name) else []
    told += [f"--features runs/reproduce/{catalog.FEATURE_CLASSIFIER}/seed-0"] if config.gan is not None else []
    return tuple(told)


def _patterns(names: Sequence[str]) -> list[str]:
    """The names, or a glob for those of a folder that are all there."""
    found: dict[str, None] = {}
    for name in names:
        pattern = f"{name.rpartition('/')[0]}/*"
        whole = {match.name for match in catalog.match(pattern)} <= set(names)
        found[f"'{pattern}'" if whole else name] = None
    return list(found)


def read_findings(path: Path | None) -> dict[str, list[str]]:
    """Paragraphs by the "## title" that they stand under."""
    if path is None:
        return {}
    found: dict[str, list[str]] = {"": []}
    title = ""
    for block in _blocks(path.read_text(encoding="utf-8").splitlines()):
        if block.startswith("## "):
            title = block.removeprefix("## ").strip()
            found[title] = []
        else:
            found[title].append(block)
    return found


def _blocks(lines: Iterable[str]) -> list[str]:
    """What empty lines separate, each on one line."""
    text = "\n".join(line.strip() for line in lines)
    return [" ".join(block.split("\n")) for block in text.split("\n\n") if block.strip()]
