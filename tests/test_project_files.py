"""The files about the project: they are there, agree with one another on the version, and name what exists."""

import re
from pathlib import Path

import pytest

import mixnorm

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
CITATION = (ROOT / "CITATION.cff").read_text()
TITLE = "Training Faster by Separating Modes of Variation in Batch-normalized Models"


def test_the_license_is_the_one_that_the_metadata_name():
    text = (ROOT / "LICENSE").read_text()
    assert text.startswith("BSD 3-Clause License\n\nCopyright (c) 2026, the mixnorm authors\n")
    assert all(f"\n{number}. " in text for number in (1, 2, 3))
    assert 'license = "BSD-3-Clause"' in PYPROJECT
    assert 'license-files = ["LICENSE"]' in PYPROJECT
    assert "License ::" not in PYPROJECT  # beside an expression, a classifier is an error


def test_the_newest_version_in_the_changelog_is_this_one():
    versions = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (unreleased|\d{4}-\d\d-\d\d)$", CHANGELOG, re.MULTILINE)
    assert len(versions) == CHANGELOG.count("\n## ")
    numbers = [tuple(map(int, version.split("."))) for version, _ in versions]
    assert numbers == sorted(set(numbers), reverse=True)
    assert versions[0][0] == mixnorm.__version__
    assert all(when != "unreleased" for _, when in versions[1:])


def test_the_citation_has_the_version_and_the_paper():
    assert re.findall(r"^version: (\S+)$", CITATION, re.MULTILINE) == [mixnorm.__version__]
    assert re.findall(r"^license: (\S+)$", CITATION, re.MULTILINE) == ["BSD-3-Clause"]
    assert f'title: "{TITLE}"' in CITATION


def test_the_citation_is_yaml_with_what_its_format_asks_for():
    citation = pytest.importorskip("yaml").safe_load(CITATION)
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    assert citation["version"] == mixnorm.__version__
    [paper] = citation["references"]
    assert paper["title"] == TITLE
    assert [author["family-names"] for author in paper["authors"]] == ["Kalayeh", "Shah"]


def test_the_oldest_versions_that_are_tested_are_those_that_are_claimed():
    tested = dict(re.findall(r"^(\w+)==([\d.]+)$", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE))
    claimed = dict(re.findall(r'"(torch|numpy|numba)>=([\d.]+)"', PYPROJECT))
    assert tested == {name: f"{version}.0" for name, version in claimed.items()}


def test_the_hooks_run_what_make_lint_runs():
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    commands = re.findall(r"\$\(BIN\)/(.+)", recipe)
    assert commands == re.findall(r"entry: .* exec (.+)'$", hooks, re.MULTILINE)
    assert all(f"\n{command.split()[0]}==" in (ROOT / "constraints.txt").read_text() for command in commands)


def test_every_path_that_contributing_names_is_there():
    """Those with a slash or a file's ending, inside backticks or as the target of a link."""
    named = re.findall(r"(?<!`)`([\w.][\w./-]*)`(?!`)", CONTRIBUTING) + re.findall(r"\]\(([\w./-]+)\)", CONTRIBUTING)
    first = {path.name for path in ROOT.iterdir()}
    paths = {name for name in named if name.split("/")[0] in first}
    assert len(paths) > 30
    assert not {name for name in paths if not (ROOT / name).exists()}
    endings = re.compile(r".+\.(py|md|toml|txt|cff|yaml|csv)")
    assert not {name for name in named if endings.fullmatch(name)} - paths


def test_every_target_that_contributing_names_is_in_the_makefile():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"\bmake ([a-z-]+)(?= *#|`)", CONTRIBUTING)) <= set(targets)


@pytest.mark.parametrize("package", ["mixnorm", "mixnorm_lab"])
def test_the_map_has_every_file_and_room_of_a_package(package):
    source = ROOT / "src" / package
    there = {path.name for path in source.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    named = {name.rstrip("/") for name in re.findall(rf"^\| `src/{package}/([\w.]+)`", CONTRIBUTING, re.MULTILINE)}
    assert there - {"__init__.py", "__main__.py"} == named
