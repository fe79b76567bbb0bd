"""Whole reports: what must be in them, and how they look in a browser."""

import base64
import csv
import html
import json
import re
import shutil
import subprocess
import sys

import pytest
from record_helpers import BN_ERRORS, ENVIRONMENT, MIXTURE, config, curve, epoch, pair, record

from mixnorm_lab import reports
from mixnorm_lab.reports.model import groups
from mixnorm_lab.reports.plots import curves
from mixnorm_lab.reports.render import html as html_report
from mixnorm_lab.reports.render import report as content
from mixnorm_lab.reports.tables.outcome import Outcome
from mixnorm_lab.storage import records
from mixnorm_lab.tables import Column, Table, text_column

NAME = 'mn <script>alert("x")</script> & co'


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A folder of runs as a training leaves it, and the text of its report.html."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        for name, mixture, final, rate in (("batch norm", None, 0.2, 3), (NAME, MIXTURE, 0.1, 5)):
            run = config(name, epochs=8, seed=seed, mixture=mixture, recalibrate=2, model="digits-cnn", data="digits")
            with records.Writer(folder / f"{'bn' if mixture is None else 'mn'}-{seed}" / "record.jsonl") as writer:
                writer.run(run, ENVIRONMENT)
                for number, error in enumerate(curve(8, 0.6, final, rate, 0.002, seed), 1):
                    more = {
                        "recalibrated_error": error,
                        "recalibrated_loss": 1.0,
                        "components": {"conv3.norm": 3} if mixture else {},
                    }
                    writer.epoch(epoch(number, float(error), **more))
                writer.end("finished", seconds=20.0)
    with records.Writer(folder / "bad" / "record.jsonl") as writer:
        writer.run(
            config(NAME, epochs=8, seed=2, mixture=MIXTURE, recalibrate=2, model="digits-cnn", data="digits"), ENVIRONMENT
        )
        writer.epoch(epoch(1, 0.9))
        writer.end("not finite", seconds=1.0, message="the loss is <nan> from step 7 on")
    path = reports.write(folder, Outcome(records.find(folder)))
    assert path == folder / "report.html"
    return folder, path.read_text(encoding="utf-8")


def test_the_page_needs_nothing_else(report):
    _, page = report
    sources = re.findall(r'(?:src|href|srcset|action|data)\s*=\s*["\']?([^"\'>\s]+)', page)
    assert sources
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL).group(1)
    assert "url(" not in style
    assert "@import" not in style
    assert "<script" not in page
    for source in sources:
        picture = base64.b64decode(source.partition(",")[2]).decode()
        assert not re.search(r'href="(?!#)', picture)


def test_the_page_begins_with_the_answer(report):
    folder, page = report
    [answer] = Outcome(records.find(folder)).answers
    assert html.escape(answer) in page
    assert page.index(html.escape(answer)) < page.index("<table>")
    assert "1 of 5 runs is not finished" in page


def test_names_and_messages_are_escaped(report):
    folder, page = report
    assert html.escape(NAME) in page
    assert "the loss is &lt;nan&gt; from step 7 on" in page
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    assert "<script" not in markdown.replace(r"\<", "")


def test_every_table_and_picture_is_in_both_forms(report):
    folder, page = report
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    links = re.findall(r"!\[.*\]\((.+)\)", markdown)
    assert len(links) == page.count("<img ") == len(list((folder / "figures").glob("*.svg")))
    assert all((folder / link).stat().st_size > 5000 for link in links)
    titles = [html.unescape(title) for title in re.findall(r"<h[123]>(.*?)</h[123]>", page)]
    headings = [line.lstrip("# ").replace("\\", "") for line in markdown.splitlines() if line.startswith("#")]
    assert titles == headings
    assert {"Results", "Results with refilled statistics", "Runs that are not finished", "Every run"} <= set(titles)


def test_where_the_figures_come_from_is_there(report):
    _, page = report
    for value in ("abc1234", "2.8.0", "rmsprop, smoothing 0.9", "× 0.93 every 2 epochs", "mn-1"):
        assert value in page


def test_pictures_are_the_same_each_time(report, tmp_path):
    folder, _ = report
    families = groups.families(records.find(folder))
    for picture in curves.draw(families[:1], tmp_path)[:2]:
        name = f"{picture.name}.svg"
        assert (tmp_path / name).read_bytes() == (folder / "figures" / name).read_bytes()


def test_nothing_to_report_on(tmp_path):
    with pytest.raises(ValueError, match="mixnorm compare"):
        reports.write(tmp_path, Outcome(records.find(tmp_path)))
    with pytest.raises(ValueError, match="no folder"):
        reports.write(tmp_path, Outcome(records.find(tmp_path / "none")))
    with records.Writer(tmp_path / "a" / "record.jsonl") as writer:
        writer.run(config(), ENVIRONMENT)
    with pytest.raises(ValueError, match="no run has finished an epoch"):
        reports.write(tmp_path, Outcome(records.find(tmp_path)))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (pair()[:1], "only batch norm was trained"),
        (pair()[1:], "only mixture norm was trained"),
        ([pair()[0], record(config("mn", mixture=MIXTURE, epochs=3), BN_ERRORS[:3])], "not trained with the same settings"),
    ],
)
def test_no_comparison_is_said_so_and_no_pictures_are_no_failure(made, words, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = html_report.build(content.assemble(Outcome(made), pictures_folder=tmp_path))
    assert words in page
    assert "matplotlib is not installed" in page


def test_the_cost_table_comes_with_a_table_of_bench(tmp_path):
    from mixnorm_lab.storage.measurements import COLUMNS

    bench = tmp_path / "bench.csv"
    row = {
        "benchmark": "cost",
        "variant": "batch_norm",
        "m": 4096,
        "channels": 448,
        "time_ms": 4,
        "device": "GPU",
        "mode": "graph",
    }
    with bench.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerow(row)
    page = reports.write(tmp_path, Outcome(pair()[:1]), bench=bench).read_text(encoding="utf-8")
    assert "GPU, graph: steps/s" in page
    assert "250.0" in page
    assert "8.51" in page


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MEASURE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement, wide = [];
  for (const element of page.querySelectorAll("main *"))
    if (!element.closest(".box") && element.getBoundingClientRect().right > root.clientWidth + 0.5)
      wide.push(element.tagName);
  const sizes = [...page.querySelectorAll("img")].map(i => i.naturalWidth && Math.round(i.getBoundingClientRect().width));
  const boxes = [...page.querySelectorAll(".box")].map(b => b.getBoundingClientRect().right <= root.clientWidth + 0.5);
  const tables = [...page.querySelectorAll(".box")].map(box => ({
    name: box.ariaLabel, overflows: box.scrollWidth > box.clientWidth, hint: box.querySelector(".more").clientHeight > 0,
    shadow: getComputedStyle(box).backgroundImage.includes("gradient"),
    cards: getComputedStyle(box.querySelector("tbody tr")).display == "grid",
    labels: [...box.querySelectorAll("td")].map(td => getComputedStyle(td, "::before").content)}));
  const found = {width: root.clientWidth, scroll: root.scrollWidth, wide, images: sizes, boxes, tables,
    sources: [...page.querySelectorAll("img")].map(i => [i.alt, i.currentSrc.length])};
  document.body.innerHTML = "<pre>" + JSON.stringify(found) + "</pre>";
}, 0));
</script>
"""


def looked_at(page, folder, width):
    """What a browser makes of a page of that width."""
    frame = f'<iframe width="{width}" height="900" style="border:0" srcdoc="{html.escape(page)}"></iframe>'
    outer = folder / "outer.html"
    outer.write_text(f'<!doctype html><meta charset="utf-8"><body style="margin:0">{frame}{MEASURE}', encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    flags += "--disable-component-update --disable-sync --virtual-time-budget=5000"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={folder / 'profile'}", "--dump-dom", outer.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return json.loads(html.unescape(re.search(r"<pre>(.*?)</pre>", shown, re.DOTALL).group(1)))


needs_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@needs_a_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows_in_a_browser(report, tmp_path, width):
    _, page = report
    found = looked_at(page.replace("<details>", "<details open>"), tmp_path, width)
    assert found["width"] in (width, width - 15)  # less a scroll bar
    assert found["scroll"] <= found["width"]
    assert found["wide"] == []
    assert found["boxes"]
    assert all(found["boxes"])
    assert found["images"]
    assert all(0.6 * min(width, 440) < size <= width for size in found["images"])


def table(title, rows, columns):
    made = [Column(f"c{i}", f"column number {i}", digits=3) for i in range(columns)]
    return Table(title, [text_column("run", "run"), *made], [
        {"run": f"mixture-norm {row}", **{column.key: 1234.5 + row for column in made}} for row in range(rows)
    ])  # fmt: skip


@needs_a_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_a_table_that_is_too_wide_says_so_or_becomes_cards(tmp_path, width):
    tables = (table("many", 12, 9), table("slim", 12, 1), table("few", 3, 9), table("huge", 12, 20))
    made = content.Report("A title", ("An answer.",), (), (content.Section("Results", tables=tables),), tmp_path)
    found = looked_at(html_report.build(made), tmp_path, width)
    assert found["scroll"] <= found["width"]
    seen = {one["name"]: one for one in found["tables"]}
    assert {name for name, one in seen.items() if one["cards"]} == ({"few"} if width == 390 else set())
    assert all(one["overflows"] == one["hint"] for one in seen.values())
    assert {name for name, one in seen.items() if one["overflows"]} == ({"many", "huge"} if width == 390 else {"huge"})
    assert all(one["shadow"] for name, one in seen.items() if name != "few")
    if width == 390:
        assert seen["few"]["labels"][:2] == ['"column number 0"', '"column number 1"']


@needs_a_browser
@pytest.mark.parametrize(("width", "narrow"), [(390, True), (1280, False)])
def test_a_narrow_page_has_the_narrow_picture(tmp_path, width, narrow):
    for name, size in (("narrow-a", 400), ("a", 1000)):
        drawing = f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="300"></svg>' + "<!-- -->" * size
        (tmp_path / f"{name}.svg").write_text(drawing)
    picture = content.Picture("a", "A picture", "", wide=True, narrow=True)
    made = content.Report("A title", ("An answer.",), (), (content.Section("Results", pictures=(picture,)),), tmp_path)
    found = looked_at(html_report.build(made), tmp_path, width)
    [(_, length)] = found["sources"]
    assert (length < 6000) == narrow
