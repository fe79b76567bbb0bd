"""A report as Markdown, with its pictures as files beside it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from mixnorm_lab.reports.render.report import Report, Section
from mixnorm_lab.tables import escape_markdown


def build(report: Report, folder: Path, pictures: str = "png") -> str:
    """The text of a file in ``folder``, from which the pictures are linked, in the format named."""
    lines = [f"# {escape_markdown(report.title)}"]
    one = len(report.answers) == 1
    lines += [""] if report.answers else []
    lines += [f"**{escape_markdown(answer)}**" if one else f"- {escape_markdown(answer)}" for answer in report.answers]
    for section in report.sections:
        lines += ["", *_section(section, report.pictures, folder, pictures)]
    return "\n".join(lines) + "\n"


def _section(section: Section, pictures: Path, folder: Path, kind: str) -> list[str]:
    lines = [f"## {escape_markdown(section.title)}"] if section.title else []
    for text in (*section.said, *map(escape_markdown, section.text)):
        lines += [*([""] if lines else []), text]
    for table in section.tables:
        lines += [] if table.title == section.title else ["", f"### {escape_markdown(table.title)}"]
        lines += ["", table.markdown()]
    for picture in section.pictures:
        path = Path(pictures / f"{picture.name}.{kind}").resolve().relative_to(folder.resolve()).as_posix()
        lines += ["", f"![{escape_markdown(picture.title)}]({quote(path)})"]
        lines += ["", escape_markdown(picture.caption)] if picture.caption else []
    lines += ["", "To run it again:", "", "```", *section.commands, "```"] if section.commands else []
    return lines
