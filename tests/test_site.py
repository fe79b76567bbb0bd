"""The documents as people meet them: the site builds without a warning, and the code of the first pages runs as it stands.

The figures of the guide are those of the records, the measurements and the notebook that it names.
"""

import csv
import importlib.util
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
    return [
        (text[: found.start()].count("\n") + 1, found[1]) for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)
    ]


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
    assert not any(
        type(module).__module__.startswith("mixnorm") for module in names["model"].modules()
    )  # reverted at the end


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
        assert re.search(rf'<h[23] id="mixnorm\.[\w.]+" class="doc[^>]*>(?:\s|<[^>]*>)*mixnorm\.{name}\s*<', reference), name
    for module, name in (
        ("functional", "mixture_normalize"),
        ("functional", "mixture_inference"),
        ("gmm", "fit_mixture"),
        ("gmm", "GaussianMixture"),
        ("gmm", "kmeans_plus_plus"),
        ("fisher", "gaussian_fisher_vector"),
        ("fisher", "mixture_fisher_vector"),
        ("integrations.transformers", "save_pretrained"),
        ("integrations.transformers", "from_pretrained"),
        ("integrations.transformers", "record"),
        ("integrations.lightning", "MixtureNorms"),
        ("integrations.watch", "watch"),
        ("integrations.watch", "numbers"),
    ):
        assert f'id="mixnorm.{module}.{name}"' in reference, name


def test_equations_are_marked_for_the_browser(site):
    page = (site / "api" / "layers.html").read_text()
    assert page.count('class="arithmatex"') >= 3
    assert ".. math::" not in page
    assert ":func:" not in page


@pytest.fixture(scope="module")
def guide():
    return (ROOT / "docs" / "when.md").read_text()


def cells(text, first):
    """The other cells of the table's row that begins with this one."""
    [row] = re.findall(rf"^\| {re.escape(first)} \|(.*)\|$", text, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


def test_the_guides_gains_are_those_of_the_records(guide):
    place = ROOT / "docs" / "site" / "pictures.py"
    spec = importlib.util.spec_from_file_location("pictures", place)
    pictures = importlib.util.module_from_spec(spec)
    sys.modules["pictures"] = pictures
    spec.loader.exec_module(pictures)
    gains = pictures.gains()
    assert len(gains) == 8
    table = guide.partition("| model and data |")[2].partition("\n\n")[0]
    told = [tuple(cell.strip() for cell in row.split("|")[-3:-1]) for row in table.splitlines()[2:]]
    seeds = [" and ".join(str(count) for count in dict.fromkeys(gain.seeds)) for gain in gains]
    assert told == [(str(gain), count) for gain, count in zip(gains, seeds, strict=True)]


MEASURED = (("layer", "graph"), ("layer", "eager"), ("inference", "graph"))


def test_the_guides_costs_on_a_gpu_are_those_of_the_measurements(guide):
    with (ROOT / "benchmarks" / "h200.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["ratio"] and row["num_components"] in ("3", "")]
    ratios = {  # the last row of each thing counts
        (row["benchmark"], row["case"], row["dtype"], row["mode"], row["variant"]): f"{float(row['ratio']):.2f}"
        for row in rows
        if row["series"] in ("", "training")
    }
    layers = {(case, dtype) for what, case, dtype, *_ in ratios if what == "layer"}
    assert len(layers) == 7
    for case, dtype in layers:
        of_case = [ratios.get((what, case, dtype, mode, "triton"), "") for what, mode in MEASURED]
        assert cells(guide, f"{case.replace('x', '×')}, {dtype}") == of_case
    for told, case in (("CIFAR CNN, 4 norms", "cifar-cnn-b256"), ("ResNet-18, 20 norms", "resnet-18-b256")):
        variants = ("ghost-32", *(f"triton {form}" for form in ("paper", "relu", "ahead", "gated")))
        assert cells(guide, told) == [ratios.get(("models", case, "bf16", "graph", name), "") for name in variants]


def test_the_guides_costs_on_a_cpu_are_those_of_the_measurements(guide):
    """And README's, in which the first two are small and the third is medium."""
    with (ROOT / "benchmarks" / "cpu.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["num_components"] == "3" and not row["series"]]
    small, medium = ("64x128x8x8", "64x448x8x8"), ("64x64x32x32",)

    def told(what, layout, cases):
        wanted = (what, layout)
        of_these = [row for row in rows if (row["benchmark"], row["layout"]) == wanted and row["case"] in cases]
        assert len(of_these) == 6 * len(cases)  # three runs of two kinds of data
        found = [float(row["ratio"]) for row in of_these]
        return f"{min(found):.1f} to {max(found):.1f}"

    layouts = ("contiguous", "channels_last")
    for case in (*small, *medium):
        expected = [told(what, layout, (case,)) for what in ("layer", "inference") for layout in layouts]
        assert cells(guide, case.replace("x", "×")) == expected
    readme = (ROOT / "README.md").read_text()
    for first, layout in zip(("CPU, with numba", "the same, `channels_last`"), layouts, strict=True):
        assert cells(readme, first) == [told("layer", layout, small), told("layer", layout, medium), ""]


def test_the_notebook_runs_and_shows_what_its_text_and_the_guide_say(guide):
    import nbformat
    from jupyter_client import AsyncKernelManager
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "docs" / "look-inside.ipynb", as_version=4)
    kept = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    told = re.findall(r"[\d.]+%", "".join(re.findall(r"^\| (?:digits|a table).*$", guide, re.MULTILINE)))
    assert len(told) == 12
    assert all(figure in kept for figure in told)

    notebook.cells.append(
        nbformat.v4.new_code_cell(
            """
            batch_norm, paper, gated = (min(seen.values()) for seen in tuned.values())
            assert batch_norm > 0.97 and gated > batch_norm - 0.01 and paper < batch_norm - 0.03
            batch_norm, paper, gated = (sum(found) / len(found) for found in tabular.values())
            assert batch_norm > 0.95 and gated > 0.95 and paper < 0.9
            assert (skew > 0).sum() > len(skew) / 2  # long tails
            centres, widths = (mixture.means - points.mean(0)).abs(), mixture.variances.sqrt()
            assert (centres.mean(1) < widths.mean(1)).all()
            """.replace("\n" + 12 * " ", "\n")
        )
    )
    NotebookClient(notebook, km=AsyncKernelManager(transport="ipc"), timeout=300).execute()
