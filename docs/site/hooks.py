"""What mkdocs does beside Markdown: pages from notebooks and from files outside of docs/, links, parts of the results."""

import ast
import re
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
# Files of the repository that are pages of the site, too.
PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "benchmarks/LOG.md": "project/benchmarks.md",
}
_REFERENCE = re.compile(r"^::: mixnorm\.([a-z]\w+)$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)\s:#]+)(#[\w-]+)?\)")


def on_config(config: MkDocsConfig) -> None:
    """The results' parts follow the results in the navigation, whatever parts there are."""
    assert config.nav is not None
    [results] = [entry["Results"] for entry in config.nav if "Results" in entry]
    results[1:1] = sorted(f"results/{path.name}" for path in (ROOT / "docs" / "results").glob("*.md"))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for notebook in (ROOT / "docs").glob("*.ipynb"):
        _add_notebook(notebook, files, config)
    return files


def _add_notebook(path: Path, files: Files, config: MkDocsConfig) -> None:
    """A notebook's page is what nbconvert makes of it, with the outputs that are kept in it."""
    text, resources = MarkdownExporter().from_filename(str(path))
    text = re.sub(r"^!\[png\]\(", "![](", text, flags=re.MULTILINE)
    files.append(File.generated(config, f"{path.stem}.md", content=text))
    for name, content in resources["outputs"].items():
        files.append(File.generated(config, name, content=content))


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """A link to a file of the repository that is no page of the site becomes the file's path."""
    here = page.file.src_uri
    source = next((source for source, uri in PAGES.items() if uri == here), f"docs/{here}")

    def follow(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = normpath(f"{dirname(source)}/{target}".lstrip("/"))
        uri = PAGES.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(uri) and (path in PAGES or path.startswith("docs/")):
            return f"[{text}]({relpath(uri, dirname(here) or '.')}{anchor})"
        if (ROOT / path).exists():
            return text if text.strip("`") == path else f"{text} (`{path}`)"
        return found[0]  # a mistake, which mkdocs tells of

    return _LINK.sub(follow, _REFERENCE.sub(_defined_in, markdown))


def _defined_in(found: re.Match[str]) -> str:
    """A function of mixnorm, by its module: ``mixnorm.convert`` is the name of a module as well."""
    for statement in ast.parse((ROOT / "src" / "mixnorm" / "__init__.py").read_text()).body:
        if isinstance(statement, ast.ImportFrom) and found[1] in {alias.name for alias in statement.names}:
            options = f"{{heading: mixnorm.{found[1]}, toc_label: {found[1]}}}"
            return f"::: {statement.module}.{found[1]}\n    options: {options}"
    return found[0]


def on_post_page(output: str, page: Any, **_: Any) -> str:
    return _with_own_scripts(output, relpath("assets", dirname(page.file.dest_uri) or "."))


def on_post_template(output_content: str, **_: Any) -> str:
    return _with_own_scripts(output_content, "/assets")


def _with_own_scripts(html: str, assets: str) -> str:
    """Search in pages opened from a disk needs a script that the theme would fetch; it is among the assets."""
    return html.replace("https://unpkg.com/iframe-worker/shim", f"{assets}/iframe-worker/shim.js")
