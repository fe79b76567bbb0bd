"""The document about many experiments: two pages to read, and an appendix for each model, all made from records."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mixnorm_lab.config import catalog
from mixnorm_lab.inspect import likelihood
from mixnorm_lab.inspect.likelihood import LayerLikelihoods
from mixnorm_lab.reports.model import groups
from mixnorm_lab.reports.model.generators import FRESH_DISTANCE
from mixnorm_lab.reports.model.generators import title as distance_title
from mixnorm_lab.reports.model.groups import Family
from mixnorm_lab.reports.model.measure import PLAIN, RECALIBRATED
from mixnorm_lab.reports.plots import curves, densities, distance_curves, plane_points
from mixnorm_lab.reports.plots.style import Picture, slug
from mixnorm_lab.reports.render import markdown
from mixnorm_lab.reports.render.commands import commands
from mixnorm_lab.reports.render.report import Report, Section
from mixnorm_lab.reports.tables import claims, cost, details, distances, expectations, inference, plane_scores, provenance
from mixnorm_lab.reports.tables import likelihood as likelihood_table
from mixnorm_lab.reports.tables.inference import Evaluation
from mixnorm_lab.reports.tables.outcome import Outcome
from mixnorm_lab.reports.tables.results import by_quarters, ends, seed_notes, steps, steps_in_short
from mixnorm_lab.storage.folders import INSPECTION
from mixnorm_lab.storage.measurements import Row
from mixnorm_lab.storage.plane_results import Result
from mixnorm_lab.storage.records import Record
from mixnorm_lab.tables import Table

FINDINGS = "findings.md"  # beside the records: what people say of them, under the titles of the sections
TITLE = "Mixture norm, measured again"
FORMAT = "svg"  # small, and the same bytes each time
ELSEWHERE = ("above", "verdict", "step_ms")  # what other tables of a section have, or runs that had the GPU for themselves
KINDS = (PLAIN, RECALIBRATED)  # the curves that are shown
FIRST = ("best-cifar100-recalibrated-error", "averaged-cifar100-test-error", "densities-conv3-norm")  # on the first page
PICTURES, LIMITS, PAGES = "Three pictures", "Limits", "More"
METHOD, DEVIATIONS, EVERY_RUN = "How it was measured", "Every deviation from the paper", "Every run"
INSIDE, COST, GENERATORS = "Inside the training", "What it costs", "Generators"
MODELS = {
    "cifar-cnn": "CIFAR CNN",
    "densenet-40-12": "DenseNet-40",
    "inception-v3": "Inception-V3",
    "resnet-18": "ResNet-18",
}  # as a heading names them
# Runs in a folder of this name had the device for themselves: their seconds count, and their other numbers stand elsewhere.
ALONE, BY_ITSELF = "alone", "Seconds of runs that had the GPU for themselves"
# Those in a folder of this name were trained to look inside: nothing else is told of them.
INSPECTED = "inspected"
LOOKED_AT = {"densities": "Densities before and after the norms", "mixtures": "An input and mixtures of it"}
IN_USE_TOO = ("best/cifar10",)  # beside the runs that were looked at, those whose components in use are shown


@dataclass(frozen=True)
class Page:
    """A file of the document; the first one has no ``file``."""

    file: str
    title: str
    sections: tuple[Section, ...]


def write(
    path: Path,
    records: Sequence[Record],
    *,
    findings: Path | None = None,
    points: Mapping[str, Sequence[Result]] | None = None,
    evaluations: Sequence[Evaluation] = (),
    cost_rows: Sequence[Row] = (),
) -> Path:
    """Writes the document, and its appendices and pictures into a folder beside it that has its name.

    Args:
        points: generators of points in the plane, by their data.
        evaluations: of ``benchmarks/average.py``.
    """
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for page in assemble(records, folder, read_findings(findings), points or {}, evaluations, cost_rows):
        file = folder / page.file if page.file else path
        report = Report(page.title, (), (), page.sections, folder)
        file.write_text(markdown.build(report, file.parent, FORMAT), encoding="utf-8")
    return path


def assemble(
    records: Sequence[Record],
    pictures: Path,
    said: Mapping[str, Sequence[str]],
    points: Mapping[str, Sequence[Result]],
    evaluations: Sequence[Evaluation] = (),
    cost_rows: Sequence[Row] = (),
) -> list[Page]:
    """The pages before they are Markdown. ``said``: paragraphs by the title of their section; "" is the beginning."""
    alone, inspected = _in_folder(records, ALONE), _in_folder(records, INSPECTED)
    apart = {id(record) for record in (*alone, *inspected)}
    outcome = Outcome([record for record in records if id(record) not in apart])
    families, generators = outcome.classifiers, outcome.generators
    drawn = {picture.name: picture for picture in curves.draw(families, pictures, KINDS, (FORMAT,))}
    inside = _inside([*families, *groups.families(inspected)], pictures)
    drawn |= {picture.name: picture for found in inside.values() for picture in found}
    pages = _of_models(families, drawn, inside, evaluations, alone, inspected)
    pages += _of_generators(generators, outcome.distances, points, pictures)
    if cost_rows:
        pages.append(Page("cost.md", COST, (Section(COST, tables=(cost.table(cost_rows),)),)))
    pages.append(_method(families, generators, outcome.records))
    pages = [_with_sections(page, said) for page in (_first(families, generators, drawn, pages), *pages)]
    known = [section.title for page in pages for section in page.sections]
    unknown = sorted(said.keys() - {"", *known})
    if unknown:
        raise ValueError(
            f"the findings have a section {unknown[0]!r}, but the document has {', '.join(known)}: name it as one of them"
        )
    kept = {picture.name for page in pages for section in page.sections for picture in section.pictures}
    for path in pictures.glob(f"*.{FORMAT}"):
        if path.stem not in kept:
            path.unlink()
    return pages


def _in_folder(records: Sequence[Record], name: str) -> list[Record]:
    return [record for record in records if record.path is not None and name in record.path.parts]


def _with_sections(page: Page, said: Mapping[str, Sequence[str]]) -> Page:
    """With what people say, and without sections that have nothing."""
    told = [replace(section, said=(*section.said, *said.get(section.title, ()))) for section in page.sections]
    kept = (one for one in told if one.said or one.text or one.tables or one.pictures)
    first = tuple(said.get("", ())) if not page.file else ()
    return replace(page, sections=(Section("", said=first), *kept) if first else tuple(kept))


def _first(
    families: Sequence[Family], generators: Sequence[Family], drawn: Mapping[str, Picture], pages: Sequence[Page]
) -> Page:
    tables = (
        expectations.expected(families, generators),
        expectations.confirmed(families, generators),
        expectations.effects(families),
    )
    shown = tuple(drawn[name] for name in FIRST if name in drawn)
    expect, confirmed, effects = (Section(table.title, tables=(table,) if table.rows else ()) for table in tables)
    links = tuple(f"- [{page.title}](results/{page.file})" for page in pages)
    rest = Section(PAGES, said=("\n".join(links),))
    return Page("", TITLE, (expect, Section(PICTURES, pictures=shown), confirmed, effects, Section(LIMITS), rest))


def _of_models(
    families: Sequence[Family],
    drawn: Mapping[str, Picture],
    inside: Mapping[str, list[Picture]],
    evaluations: Sequence[Evaluation],
    alone: Sequence[Record],
    inspected: Sequence[Record],
) -> list[Page]:
    by_model: dict[str, list[Family]] = {}
    for family in families:
        by_model.setdefault(family.model, []).append(family)
    pages = []
    for model, found in by_model.items():
        names = {picture.name for family in found for picture in _curves_of(family, drawn)}
        causes = [expectations.causes(family) for family in found if family.side_by_side]
        sections = [Section(table.title, tables=(table,)) for table in causes if table.rows]
        sections += [_measured(family, [drawn[name] for name in sorted(names)]) for family in found if not family.validation]
        sections += [_measured(family, ()) for family in found if family.validation]
        if evaluations and any(row.experiment in catalog.EXPERIMENTS for row in evaluations) and _is_of(model, evaluations):
            table = inference.table(evaluations)
            sections.append(Section(inference.TITLE, tables=(table,), commands=inference.commands(evaluations)))
        for family in groups.families(record for record in alone if record.config.model == model):
            timed = (ends(family), steps(family), steps(family, RECALIBRATED))
            tables = tuple(_bare(table) for table in timed if table.rows)
            sections.append(Section(BY_ITSELF, tables=tables, commands=commands(family)))
        title = MODELS.get(model, model)
        looked_at = groups.families(record for record in inspected if record.config.model == model)
        wanted = _likelihoods([run for family in (*found, *looked_at) for run in _runs(family)])
        tables = (likelihood_table.table(wanted),) if wanted else ()
        again = tuple(command for family in looked_at for command in _look_again(family))
        sections.append(Section(f"{INSIDE}: {title}", (), tables, tuple(inside.get(model, ())), commands=again))
        pages.append(Page(f"{slug(title)}.md", title, tuple(sections)))
    return pages


def _is_of(model: str, evaluations: Sequence[Evaluation]) -> bool:
    return catalog.EXPERIMENTS[evaluations[0].experiment].config.model == model


def _curves_of(family: Family, drawn: Mapping[str, Picture]) -> list[Picture]:
    """The pictures of the panels that its groups are curves of."""
    panels = {slug(panel) for group in family.groups for panel in catalog.panels_of(group.name)}
    endings = tuple(f"{panel}-{key.replace('_', '-')}" for panel in panels for key in KINDS)
    return [picture for name, picture in drawn.items() if name in endings]


def _measured(family: Family, pictures: Iterable[Picture]) -> Section:
    """What did not finish has its accuracies here, but its end is not compared with that of a whole training."""
    done = replace(family, groups=tuple(group for group in family.groups if group.finished))
    tables = [provenance.with_evaluation(_bare(ends(done, paper=not family.validation)), done).without(*ELSEWHERE)]
    refilled = any(group.refilled for group in family.groups)
    tables += [claims.claims(done), claims.claims(done, RECALIBRATED)]
    if not family.validation:
        tables += [steps_in_short(done, RECALIBRATED), steps_in_short(done)]
    if not family.side_by_side:
        tables += [_bare(by_quarters(family, paper=not family.validation)), _bare(by_quarters(family, RECALIBRATED))]
        tables += [claims.early_lead(family), claims.staleness(family)] if refilled else []
    names = tuple(panel for group in family.groups for panel in catalog.panels_of(group.name))
    ours = tuple(one for one in pictures if any(one.name.startswith(f"{slug(panel)}-") for panel in names))
    notes = () if family.side_by_side else tuple(note for note in seed_notes(family) if not note.startswith("Mean ±"))
    shown = tuple(table for table in tables if table.rows and len(table.columns) > 1)
    return Section(family.title, notes, shown, ours, commands=commands(family))


def _bare(table: Table) -> Table:
    """Without its notes, which the page about the method has once for all."""
    return replace(table, notes=())


def _of_generators(
    families: Sequence[Family], lowest: Sequence[Table], points: Mapping[str, Sequence[Result]], pictures: Path
) -> list[Page]:
    sections = []
    for family, best in zip(families, lowest, strict=True):
        made = distance_curves.draw([family], pictures, (FORMAT,))
        tables = (best, distances.evaluations(family), distances.evaluations(family, FRESH_DISTANCE))
        there = tuple(table for table in tables if table.rows)
        sections.append(Section(distance_title(family), (), there, tuple(made), commands=commands(family)))
    for data, results in points.items():
        drawn = plane_points.draw(data, results, pictures, (FORMAT,))
        seeds = len({result.seed for result in results})
        again = f"mixnorm compare --task gan --data {data} --seeds {seeds}"
        sections.append(Section(f"The {data}", (), (plane_scores.table(data, results),), (drawn,), commands=(again,)))
    return [Page("generators.md", GENERATORS, tuple(sections))] if sections else []


def _method(families: Sequence[Family], generators: Sequence[Family], records: Sequence[Record]) -> Page:
    cut = details.unfinished([*families, *generators])
    every = (*details.runs(families), *([cut] if cut.rows else []), details.environments(records))
    deviations = Section(DEVIATIONS, tables=(provenance.deviations([*families, *generators]),))
    return Page("method.md", METHOD, (Section(METHOD), deviations, Section(EVERY_RUN, tables=every)))


def _inside(families: Sequence[Family], folder: Path) -> dict[str, list[Picture]]:
    """By the model, the runs that ``mixnorm inspect`` has looked at: densities, and the components over the training."""
    found: dict[str, list[Picture]] = {}
    for family in families:
        for run in _runs(family):
            shown = [] if run.path is None else _looked_at(run, run.path.parent / INSPECTION, folder)
            if not shown:
                continue
            names = [layer for epoch in run.epochs for layer in epoch["mixtures"] or ()]
            seen = next((layer for layer in names if shown[0].name == f"densities-{slug(layer)}"), None)
            shown += densities.draw(folder, record=run, layer=seen, counts=True, formats=(FORMAT,))
            found.setdefault(family.model, []).extend(shown)
    for family in families:
        too = replace(family, groups=tuple(group for group in family.groups if group.name in IN_USE_TOO))
        if family.model in found:
            found[family.model] += curves.draw([too], folder, ("components",), (FORMAT,))
    return found


def _runs(family: Family) -> list[Record]:
    return [run for group in family.groups for run in group.all_runs]


def _looked_at(run: Record, inspection: Path, folder: Path) -> list[Picture]:
    """The pictures of a run that ``mixnorm inspect`` made, copied into the folder of the document."""
    found = []
    for kind, what in LOOKED_AT.items():
        for path in sorted(inspection.glob(f"{kind}-*.{FORMAT}")):
            shutil.copyfile(path, folder / path.name)
            found.append(Picture(path.stem, f"{what}: {run.config.name}", "", wide=True))
    return found


def _likelihoods(runs: Sequence[Record]) -> list[LayerLikelihoods]:
    """How many components the norms want that ``mixnorm inspect --likelihood`` has looked at, those of a layer together."""
    folders = [run.path.parent / INSPECTION for run in runs if run.path is not None]
    found = [likelihood.read(path) for folder in folders for path in folder.glob("likelihood-*.json")]
    return sorted(found, key=lambda view: (view.layer, view.epochs))


def _look_again(family: Family) -> tuple[str, ...]:
    """What trains the runs of a family, and looks at them."""
    found = [*commands(family)]
    for run in _runs(family):
        folder = f"runs/reproduce/{run.config.name}/seed-{run.config.seed}"
        layers = dict.fromkeys(view.layer for view in _likelihoods([run]))
        found += [f"mixnorm inspect {folder} --layer {layer} --likelihood" for layer in layers]
    return tuple(found)


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
    """What empty lines separate, each on one line; lists stay lists."""
    text = "\n".join(line.strip() for line in lines)
    blocks = [block for block in text.split("\n\n") if block.strip()]
    return [
        "\n".join(f"- {item}" for item in _items(block)) if block.startswith("- ") else " ".join(block.split("\n"))
        for block in blocks
    ]


def _items(block: str) -> list[str]:
    return [" ".join(item.split("\n")) for item in block.removeprefix("- ").split("\n- ")]
