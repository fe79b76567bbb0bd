"""The documents as people meet them: the site builds without a warning, and the code of its first pages runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def blocks(path):
    """The Python of a document, each block with the line that it begins in."""
    text = (ROOT / path).read_text()
    return [(text[: found.start()].count("\n") + 1, found[1]) for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)]


def run(path):
    """Runs the blocks of a document in their order, as one program. A traceback names the document's own lines."""
    torch.manual_seed(0)
    names = {"__name__": "__main__"}
    for line, code in blocks(path):
        exec(compile("\n" * line + code, path, "exec"), names)
    return names


def test_the_five_minute_start_runs(capsys):
    names = run("docs/start.md")
    assert names["accuracy"] > 0.9
    assert isinstance(names["model"][4], torch.nn.BatchNorm2d)  # as the last block leaves it
    assert "accuracy" in capsys.readouterr().out


def test_the_readmes_code_runs():
    names = run("README.md")
    assert not any(type(module).__module__.startswith("mixnorm") for module in names["model"].modules())  # reverted at the end


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    found = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    return folder


def test_the_site_builds_without_a_warning_and_fetches_nothing(site):
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    assert {"index.html", "start.html", "when.html", "look-inside.html", "api/layers.html", "results.html"} <= pages.keys()
    for name, page in pages.items():
        fetched = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\" >]+)", page)
        assert not fetched, f"{name} fetches {fetched}"
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?https?:", style.read_text()), style


def test_every_public_name_is_in_the_reference(site):
    import mixnorm

    reference = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    modules = {"functional", "gmm", "fisher"}
    for name in set(mixnorm.__all__) - modules:
        assert re.search(rf'<span class="doc doc-object-name[^>]*>mixnorm\.{name}<', reference), name
    for module, name in (
        ("functional", "mixture_normalize"),
        ("functional", "mixture_inference"),
        ("gmm", "fit_mixture"),
        ("gmm", "GaussianMixture"),
        ("gmm", "kmeans_plus_plus"),
        ("fisher", "gaussian_fisher_vector"),
        ("fisher", "mixture_fisher_vector"),
    ):
        assert f'id="mixnorm.{module}.{name}"' in reference, name


def test_equations_are_marked_for_the_browser(site):
    page = (site / "api" / "layers.html").read_text()
    assert page.count('class="arithmatex"') >= 3
    assert ".. math::" not in page
    assert ":func:" not in page
