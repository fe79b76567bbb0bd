"""What a release would be: what is in the wheel and the source distribution, and the README as a package index shows it."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import mixnorm

ROOT = Path(__file__).parents[1]
VERSION = mixnorm.__version__


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A wheel and a source distribution, built as ``make dist`` builds them."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(release):
    with zipfile.ZipFile(release / f"mixnorm-{VERSION}-py3-none-any.whl") as archive:
        yield archive


def test_the_wheel_has_both_packages_and_nothing_else(wheel):
    names = set(wheel.namelist())
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert sources <= names
    assert "mixnorm/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"mixnorm", "mixnorm_lab", f"mixnorm-{VERSION}.dist-info"}
    assert not [name for name in names if name.endswith((".jsonl", ".pt", ".pyc", ".csv"))]
    assert sum(entry.compress_size for entry in wheel.infolist()) < 1_000_000


def test_the_source_distribution_has_no_results(release):
    with tarfile.open(release / f"mixnorm-{VERSION}.tar.gz") as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "docs/start.md", "src/mixnorm/__init__.py", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith(("results", "benchmarks", "docs/results"))]
    assert (release / f"mixnorm-{VERSION}.tar.gz").stat().st_size < 2_000_000


def test_the_metadata(wheel):
    metadata = wheel.read(f"mixnorm-{VERSION}.dist-info/METADATA").decode()
    assert "\nLicense-Expression: BSD-3-Clause\n" in metadata
    assert "\nDescription-Content-Type: text/markdown\n" in metadata
    assert "Project-URL" not in metadata  # there is none yet
    assert "mixnorm = mixnorm.__main__:main" in wheel.read(f"mixnorm-{VERSION}.dist-info/entry_points.txt").decode()


def test_a_package_index_shows_the_readme_without_dead_links(wheel):
    from readme_renderer import markdown

    text = wheel.read(f"mixnorm-{VERSION}.dist-info/METADATA").decode().partition("\n\n")[2]
    page = markdown.render(text)
    assert page is not None
    assert "<table>" in page
    assert "<img" not in page
    assert not [target for target in re.findall(r'href="([^"]*)"', page) if not target.startswith("#")]
    assert "](" not in re.sub(r"<pre.*?</pre>", "", page, flags=re.DOTALL)
    assert "docs/start.md" in page


def test_every_link_of_the_readme_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)(?:#([\w-]+))?\)", (ROOT / "README.md").read_text())
    assert len(links) > 20
    for target, anchor in links:
        assert (ROOT / target).exists(), target
        headings = re.findall(r"^#+ (.+)$", (ROOT / target).read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}, anchor
