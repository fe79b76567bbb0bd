"""A report as one HTML page that needs nothing else: no script, no other file, no network."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from mixnorm_lab.reports.plots.style import Picture
from mixnorm_lab.reports.render.report import Report, Section

NARROW_PAGE = 720  # pixels: below, the text of a wide picture would be too small; style.css knows it, too


def build(report: Report) -> str:
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    answers = "".join(f"<p>{escape(answer)}</p>" for answer in report.answers)
    keys = "".join(f"<div><dt>{escape(what)}</dt><dd>{escape(number)}</dd></div>" for number, what in report.key_numbers)
    keys = f'<dl class="keys">{keys}</dl>' if keys else ""
    sections = "".join(_section(section, report.pictures) for section in report.sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{style}</style></head>\n"
        f"<body><main><header><h1>{escape(report.title)}</h1>"
        f'<div class="answer">{answers}</div>{keys}</header>\n{sections}</main></body></html>\n'
    )


def _section(section: Section, folder: Path) -> str:
    parts = [f"<p>{escape(text)}</p>" for text in section.text]
    for table in section.tables:
        heading = "" if table.title == section.title else f"<h3>{escape(table.title)}</h3>"
        parts.append(heading + table.html())
    if section.pictures:
        parts.append(f'<div class="pictures">{"".join(_picture(picture, folder) for picture in section.pictures)}</div>')
    body, title = "\n".join(parts), escape(section.title)
    if section.folded:
        return f"<section><details><summary><h2>{title}</h2></summary>{body}</details></section>\n"
    return f"<section><h2>{title}</h2>{body}</section>\n"


def _picture(picture: Picture, folder: Path) -> str:
    """An SVG as an image of its own, so that the names inside two of them cannot clash; another one on a narrow page."""
    wide = _embedded(folder / f"{picture.name}.svg")
    image = f'<img src="{wide}" alt="{escape(picture.title, quote=True)}">'
    if picture.narrow:
        source = f'<source media="(max-width: {NARROW_PAGE}px)" srcset="{_embedded(folder / picture.narrow_file)}">'
        image = f"<picture>{source}{image}</picture>"
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>" if picture.caption else ""
    kind = ' class="wide"' if picture.wide else ""
    return f"<figure{kind}>{image}{caption}</figure>"


def _embedded(path: Path) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"
