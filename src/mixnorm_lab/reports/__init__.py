"""Reports: pure functions of records, so that a table or a page can be made again without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mixnorm_lab.config.plane import DATA
from mixnorm_lab.reports.plots import plane_points
from mixnorm_lab.reports.plots.style import Picture
from mixnorm_lab.reports.render import document, html, markdown, report
from mixnorm_lab.reports.render.report import Report, Section
from mixnorm_lab.reports.tables import inference, plane_scores
from mixnorm_lab.reports.tables.outcome import Outcome
from mixnorm_lab.storage import measurements, plane_results
from mixnorm_lab.storage.plane_results import Result
from mixnorm_lab.storage.records import Record
from mixnorm_lab.tables import Table

__all__ = ["Outcome", "points_in", "write", "write_document", "write_plane"]


def write(
    folder: Path,
    outcome: Outcome,
    title: str | None = None,
    bench: Path | None = None,
) -> Path:
    """Writes report.html, report.md and the pictures in figures/ into a folder, and returns the path of report.html.

    Args:
        outcome: of the runs to report on. The paper's numbers stand beside those that are named as in the catalog.
        bench: a table of ``mixnorm bench cost``, for the cost table.
    """
    _check(outcome.records, folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [] if bench is None else measurements.read(bench)
    made = report.assemble(outcome, title=title, pictures_folder=folder / "figures", cost_rows=rows)
    return _both(made, folder)


def write_document(path: Path, folder: Path, records: Sequence[Record], bench: Path | None = None) -> Path:
    """Writes a Markdown document about many experiments, with what ``findings.md`` in the folder of the records says.

    Generators of points in the plane are there, too, if the folder has what ``mixnorm compare --task gan`` keeps of them,
    and ways of inference if it has what ``benchmarks/average.py`` writes.
    """
    _check(records, folder)
    findings = folder / document.FINDINGS
    rows = [] if bench is None else measurements.read(bench)
    return document.write(
        path,
        records,
        findings=findings if findings.exists() else None,
        points=points_in(folder),
        evaluations=inference.read(folder / inference.NAME),
        cost_rows=rows,
    )


def points_in(folder: Path) -> dict[str, list[Result]]:
    """The generators of points in the plane that a folder has, by their data."""
    return {data: found for data in DATA if (found := plane_results.read(plane_results.path(folder, data)))}


def write_plane(folder: Path, data: str, results: Sequence[Result]) -> tuple[Path, Table, str]:
    """Writes the report about generators of points in the plane; returns its path, the table and what came out."""
    table, answer = plane_scores.table(data, results), plane_scores.answer(data, results)
    pictures = folder / "figures"
    shown: tuple[Picture, ...] = ()
    missing: tuple[str, ...] = ()
    try:
        shown = (plane_points.draw(data, results, pictures, narrow=True),)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        missing = (report.NO_PICTURES,)
    sections = (Section("Results", missing, (table,)), Section("Samples", (), (), shown))
    kept = tuple(section for section in sections if section.tables or section.pictures)
    made = Report(f"Batch norm and mixture norm in generators: the {data}", (answer,), (), kept, pictures)
    return _both(made, folder), table, answer


def _both(made: Report, folder: Path) -> Path:
    """A report as report.md and report.html; the path of the latter."""
    (folder / "report.md").write_text(markdown.build(made, folder), encoding="utf-8")
    path = folder / "report.html"
    path.write_text(html.build(made), encoding="utf-8")
    return path


def _check(records: Sequence[Record], folder: Path) -> None:
    if not any(record.epochs for record in records):
        why = "there are no runs" if not records else "no run has finished an epoch"
        raise ValueError(f"{why} in {folder}: mixnorm compare or mixnorm reproduce trains some, then report again")
