"""The document of results: what it says of differences, and that the one in docs/ is what the kept records give."""

import dataclasses
import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from record_helpers import MIXTURE, config, epoch, record

from mixnorm_lab import reports
from mixnorm_lab.config import catalog
from mixnorm_lab.inspect import likelihood
from mixnorm_lab.inspect.likelihood import LayerLikelihoods, Likelihood
from mixnorm_lab.reports.model import groups
from mixnorm_lab.reports.model.measure import PLAIN
from mixnorm_lab.reports.render import document
from mixnorm_lab.reports.render.commands import commands
from mixnorm_lab.reports.tables import claims, expectations, provenance, results
from mixnorm_lab.storage import records
from mixnorm_lab.tables import Difference

ROOT = Path(__file__).parents[4]
RESULTS, DOCUMENT, BENCH = ROOT / "results", ROOT / "docs" / "results.md", ROOT / "benchmarks" / "h200.csv"
PAGES = DOCUMENT.with_suffix("")


def family(bn, mn, **changes):
    """Runs with these test errors, a list of curves each; a seed each."""
    made = [record(config("a/bn", len(errors), seed, **changes), errors) for seed, errors in enumerate(bn)]
    made += [record(config("a/mn", len(errors), seed, MIXTURE, **changes), errors) for seed, errors in enumerate(mn)]
    [found] = groups.families(made)
    return found


def test_claims_by_hand():
    found = family([[0.5, 0.4, 0.3, 0.2], [0.5, 0.4, 0.3, 0.3]], [[0.4, 0.2, 0.2, 0.1], [0.6, 0.5, 0.3, 0.25]])
    row, chance = claims.claims(found).rows
    assert chance == {"run": "bn, other seed", "saved": "0 in 1 of 2 pairs"}
    assert row["end"].mean == pytest.approx(82.5 - 75)
    assert row["best"].mean == pytest.approx(82.5 - 75)
    assert row["saved"].mean == pytest.approx(100 * (1 - (2 * 4 / (4 * 3)) ** 0.5))  # to 75%, and to batch norm's own best
    [lead] = claims.early_lead(found).rows
    assert lead[PLAIN].mean == pytest.approx(50 - 50)
    assert lead[f"{PLAIN}_is"] == "cannot tell"


@pytest.mark.parametrize(
    ("mean", "low", "high", "sure", "paper", "verdict"),
    [
        (1.0, 0.5, 1.5, True, 0.7, "confirmed"),
        (1.0, 0.5, 1.5, True, 2.0, "confirmed, but smaller"),
        (1.0, 0.8, 1.5, True, 0.7, "confirmed"),
        (0.2, -0.3, 0.7, False, 1.0, "not confirmed"),
        (0.2, -0.3, 0.7, False, 0.5, "undecided"),
        (1.0, 0.1, 1.9, False, 0.5, "undecided"),
        (-1.0, -1.5, -0.5, True, 0.5, "not confirmed"),
        (1.0, None, None, False, 0.5, "undecided: too few seeds"),
        (0.5, 0.2, 0.8, True, None, "confirmed"),
        (-0.5, -0.8, -0.2, True, None, "not confirmed"),
        (None, None, None, False, 0.5, "undecided"),
    ],
)
def test_the_rule_of_the_verdicts(mean, low, high, sure, paper, verdict):
    assert expectations.judge(Difference(mean, low, high, sure=sure, paper=paper)) == verdict


def test_chance_gets_to_a_best_sooner_as_well():
    """Three seeds with the bests 80, 80 and 70% after 4, 3 and 2 epochs: of six pairs, four get there."""
    found = family([[0.5, 0.4, 0.3, 0.2], [0.5, 0.4, 0.2, 0.2], [0.5, 0.3, 0.4, 0.4]], [[0.5, 0.4, 0.3, 0.2]])
    expected = [100 * (1 - ours / theirs) for ours, theirs in ((3, 4), (4, 3), (3, 2), (3, 2))]
    told = claims.placebo_in_the_paper(found.groups[0])
    assert (told.mean, told.n, told.of) == (pytest.approx(np.mean(expected)), 4, 6)
    assert claims.claims(found).rows[-1]["saved"].endswith(" in 4 of 6 pairs")


def test_fewer_steps_in_short_have_a_row_of_chance():
    errors = [[0.5, 0.4, 0.3, 0.2], [0.5, 0.45, 0.3, 0.2]]
    found = results.steps_in_short(family(errors, [[0.4, 0.2, 0.15, 0.1]] * 2))
    base, chance, ours = ([row[str(i)] for i in range(2)] for row in found.rows)
    assert base == ["50.0%: 195 ± 0", "57.5%: 488 ± 138"]
    assert chance == ["±0 in 1 pair", "±33 in 1 pair"]
    assert ours == ["+0, n 2", "+59 [−437, 97], n 2"]


def test_what_to_expect_says_what_chance_does():
    errors = [[0.5, 0.4, 0.3, 0.2], [0.5, 0.41, 0.3, 0.2]]
    found = family(errors, [[0.4, 0.2, 0.15, 0.1], [0.4, 0.2, 0.15, 0.11]])
    [row] = expectations.expected([found], []).rows
    assert (row["norm"], row["verdict"], row["chance"]) == ("conv3", "better", "±33")
    assert row[PLAIN].mean == pytest.approx(100 * (1 - 1 / 6**0.5))  # one epoch; two and three of batch norm
    assert row["gain"].mean == pytest.approx(9.5)


def test_a_version_of_the_evaluation_is_told():
    run = record(config("a/mn", 4, mixture=MIXTURE), [0.5, 0.4, 0.3, 0.2])
    assert provenance.evaluation(run) == "0.1"
    assert provenance.evaluation(dataclasses.replace(run, environment={"mixnorm": "0.2.0"})) == "0.2"
    early = {"mixnorm": "0.1.0", "commit": provenance.BOUNDED[0]}
    assert provenance.evaluation(dataclasses.replace(run, environment=early)) == "0.2"


def test_settings_that_are_not_the_papers_are_listed():
    start = catalog.get("cifar-cnn/cifar10/bn-2").config
    made = [record(dataclasses.replace(start, precision="bf16", epochs=4), [0.5, 0.4, 0.3, 0.2])]
    told = {row["what"]: row["where"] for row in provenance.deviations(groups.families(made)).rows}
    assert told == {"epochs: 4, not 100": "cifar-cnn/cifar10", "precision: bf16, not fp32": "cifar-cnn/cifar10"}


def test_what_refilled_statistics_add():
    errors = [0.5, 0.4, 0.3, 0.2]
    made = record(config("a/bn", 4), errors, recalibrated_error=lambda number: errors[number - 1] - 0.01 * number)
    [found] = groups.families([made])
    [row] = claims.staleness(found).rows
    assert [row[str(at)].mean for at in (1, 2, 3, 4)] == pytest.approx([1, 2, 3, 4])
    assert row["most"].mean == pytest.approx(4)


def test_the_most_that_refilled_statistics_add_is_to_one_evaluation():
    errors = [0.5, 0.9, 0.3, 0.2]  # the second is far off with running statistics, and the largest accuracy does not show it
    made = record(config("a/bn", 4), errors, recalibrated_error=lambda number: min(errors[number - 1], 0.4))
    [found] = groups.families([made])
    [row] = claims.staleness(found).rows
    assert row["most"].mean == pytest.approx(50)
    assert row["4"].mean == pytest.approx(0)


def test_the_commands_make_the_runs_again():
    start = catalog.get("cifar-cnn/cifar10/bn-2").config
    whole = [dataclasses.replace(e.config, recalibrate=20, epochs=4) for e in catalog.match("cifar-cnn/cifar10/*")]
    half = dataclasses.replace(start, precision="bf16", epochs=4, validation=0.1)
    made = [record(one, [0.5, 0.4, 0.3, 0.2]) for one in (*whole, half)]
    test, held_out = groups.families(made)
    assert commands(test) == ("mixnorm reproduce 'cifar-cnn/cifar10/*' --seeds 1 --epochs 4 --recalibrate 20",)
    name = "cifar-cnn/cifar10/bn-2 --seeds 1 --epochs 4 --precision bf16 --validation 0.1"
    assert commands(held_out) == (f"mixnorm reproduce {name}",)
    assert "held-out" in held_out.title


def test_the_commands_of_generators_train_their_features_first():
    start = catalog.get("dcgan/cifar10/bn").config
    end = {"kind": "end", "reason": "finished", "message": None, "seconds": 1.0}
    [family] = groups.families([records.Record(start, {}, [], [end], running=False)])
    first, second = commands(family)
    assert first == "mixnorm reproduce cifar-cnn/cifar10/bn-2"
    assert second == f"mixnorm reproduce {start.name} --seeds 1 --features runs/reproduce/cifar-cnn/cifar10/bn-2/seed-0"


def test_what_did_not_finish_is_not_compared(tmp_path):
    pytest.importorskip("matplotlib")
    whole = record(config("a/bn", 4), [0.5, 0.4, 0.3, 0.2])
    half = record(config("a/mn", 4, mixture=MIXTURE), [0.5, 0.3, 0.3, 0.2])
    half = dataclasses.replace(half, epochs=half.epochs[:2], ends=[], running=True)
    first = reports.write_document(tmp_path / "results.md", tmp_path, [whole, half]).read_text()
    text = (tmp_path / "results" / "cifar-cnn.md").read_text()
    assert "Some runs are not finished" in text
    assert "### Runs that are not finished" in (tmp_path / "results" / "method.md").read_text()
    assert "Against batch norm" not in text
    assert "What to expect" not in first
    assert "| mn | 1 | 50.00 | 70.00 | — | — |" in text


def test_a_run_that_was_trained_to_look_inside_is_told_of_there_alone(tmp_path):
    pytest.importorskip("matplotlib")
    start = catalog.get("cifar-cnn/cifar100/bn-2").config
    for folder, run in ((".", dataclasses.replace(start, epochs=2)), ("inspected", dataclasses.replace(start, epochs=1))):
        with records.Writer(tmp_path / "results" / folder / run.name / "seed-0" / records.NAME) as writer:
            writer.run(run, {"gpu": None})
            for number in range(1, run.epochs + 1):
                writer.epoch(epoch(number))
            writer.end("finished", 1.0)
    rows = tuple(Likelihood(k, -9.0, 0.5 * k - 9, 18.0 - k, 1, 128, 0.1, 1.5) for k in (1, 2))
    seen = tmp_path / "results" / "inspected" / start.name / "seed-0" / "inspection"
    likelihood.save(LayerLikelihoods("conv2.norm", 1, 100, 128, rows, rows, rows), seen)
    (seen / "mixtures-conv2-norm.svg").write_text("<svg/>")
    reports.write_document(tmp_path / "results.md", tmp_path, records.find(tmp_path / "results"))
    page = (tmp_path / "results" / "cifar-cnn.md").read_text()
    before, inside = page.split("## Inside the training: CIFAR CNN\n")
    assert "How many components conv2.norm wants" in inside
    assert "| input | 0.0 | 0.5 | 2 | 1, 1 | 100% | 10% | 1.5 |" in inside
    assert "(mixtures-conv2-norm.svg)" in inside
    assert f"mixnorm reproduce {start.name} --seeds 1 --epochs 1\n" in inside
    assert f"mixnorm inspect runs/reproduce/{start.name}/seed-0 --layer conv2.norm --likelihood\n" in inside
    assert "1 epoch\n" not in before
    assert "inspected" not in (tmp_path / "results" / "method.md").read_text()


def test_a_record_is_not_replaced_by_a_shorter_one(tmp_path):
    found = []
    for name, epochs in (("long", 3), ("short", 2)):
        with records.Writer(tmp_path / name / records.NAME) as writer:
            writer.run(config("a/bn", 3), {"gpu": None})
            for number in range(1, epochs + 1):
                writer.epoch(epoch(number))
        found += records.find(tmp_path / name)
    for order in (found, found[::-1]):
        records.keep(order, tmp_path / "results")
        [kept] = records.find(tmp_path / "results")
        assert len(kept.epochs) == 3


def test_paragraphs_must_belong_to_a_section(tmp_path):
    (tmp_path / "findings.md").write_text("First,\nin two lines.\n\n## Nowhere\n\nText.\n")
    assert document.read_findings(tmp_path / "findings.md") == {"": ["First, in two lines."], "Nowhere": ["Text."]}
    made = [record(config("a/bn", 4), [0.5, 0.4, 0.3, 0.2])]
    with pytest.raises(ValueError, match=r"a section 'Nowhere', but the document has .*cifar-cnn on cifar100, 4 epochs"):
        reports.write_document(tmp_path / "results.md", tmp_path, made)


def test_kept_records_say_the_same_and_a_damaged_one_is_told(tmp_path):
    run = tmp_path / "runs" / "anywhere"
    with records.Writer(run / records.NAME) as writer:
        writer.run(config("a/bn", 1, seed=3), {"gpu": None})
        writer.epoch(epoch(1))
        writer.end("finished", 1.0)
    [found] = records.find(tmp_path / "runs")
    [path] = records.keep([found], tmp_path / "results")
    assert path == tmp_path / "results" / "a" / "bn" / "seed-3" / "record.jsonl.gz"
    [kept] = records.find(tmp_path / "results")
    assert (kept.config, kept.epochs, kept.ends) == (found.config, found.epochs, found.ends)
    before = path.read_bytes()
    records.keep([kept], tmp_path / "results")
    assert path.read_bytes() == before
    for damaged in (before[:-9], b"\x00" + before[1:], before[:20] + b"\xff" + before[21:]):
        path.write_bytes(damaged)
        with pytest.raises(records.RecordError, match="is damaged"):
            records.find(tmp_path / "results")


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory):
    pytest.importorskip("matplotlib")
    path = tmp_path_factory.mktemp("docs") / "results.md"
    reports.write_document(path, RESULTS, records.find(RESULTS), bench=BENCH)
    return path


def test_the_document_is_what_the_records_give(rebuilt):
    assert rebuilt.read_text(encoding="utf-8") == DOCUMENT.read_text(encoding="utf-8")
    pages = PAGES.glob("*.md")
    made = {path.name: path.read_text(encoding="utf-8") for path in rebuilt.with_suffix("").glob("*.md")}
    assert made == {path.name: path.read_text(encoding="utf-8") for path in pages}
    assert {path.name for path in rebuilt.with_suffix("").iterdir()} == {path.name for path in PAGES.iterdir()}


def test_every_picture_is_shown_and_every_link_leads_somewhere():
    shown = set()
    for page in (DOCUMENT, *PAGES.glob("*.md")):
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            path, _, section = link.partition("#")
            target = (page.parent / path).resolve()
            assert target.exists(), (page.name, link)
            shown.add(target.name)
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if section else []
            assert not section or section in {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}
    assert {path.name for path in PAGES.iterdir()} <= shown


# Numbers that are settings, versions or sizes of data sets, which no table of results has.
SETTINGS = [
    "10",
    "100",
    "CIFAR-10",
    "CIFAR-100",
    "95%",
    "0.1",
    "0.2",
    "0.5",
    "0.9",
    "1",
    "20",
    "25",
    "32",
    "40",
    "64",
    "86",
    "125",
    "128",
    "200",
    "256",
    "4,096",
    "6%",
    "1.6%",
    "2,000",
    "10,000",
    "18",
    "39",
    "0",
]


NAMES = r"\([^)]*\.md[^)]*\)|`[^`]*`|[BM]N-\d|conv\d\S*|[vV]3|H200|ResNet-18|DenseNet-40|inc2\S*"  # which have digits


def test_every_figure_in_the_text_stands_in_a_table_of_its_page():
    """Or in one of the pages that its sentence links to."""
    text = {page: page.read_text(encoding="utf-8") for page in (DOCUMENT, *PAGES.glob("*.md"))}
    cells = {page: " ".join(line for line in of.splitlines() if line.startswith("|")) for page, of in text.items()}
    found = 0
    for title, paragraphs in document.read_findings(RESULTS / document.FINDINGS).items():
        [page] = [page for page, of in text.items() if f"\n## {title}\n" in of] if title else [DOCUMENT]
        for sentence in re.split(r"(?<=[.:;?]) |\n", " ".join(paragraphs)):
            linked = [(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+\.md)", sentence)]
            tables = " ".join(cells[one] for one in (page, *linked))
            plain = re.sub(NAMES, "", sentence)
            for number in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?%?", plain):
                number = number.rstrip(",")
                if number in SETTINGS:
                    continue
                found += 1
                bare = re.escape(number.removesuffix("%"))
                assert re.search(rf"(?<![\d.,]){bare}(?![\d.])", tables), f"{number} in {sentence!r} of {title!r}"
    assert found > 80


def test_the_first_pages_are_short_enough_to_be_read():
    text = DOCUMENT.read_text(encoding="utf-8")
    words = sum(len(line.split()) for line in text.splitlines() if not line.startswith(("|", "!")))
    assert words < 1000
    assert text.count("\n| --- ") == 3
    assert text.count("\n![") == 3


def test_every_kept_run_is_finished_or_told_not_to_be():
    found = records.find(RESULTS)
    assert found
    told = (PAGES / "method.md").read_text(encoding="utf-8").partition("### Runs that are not finished")[2]
    for one in found:
        done = one.epochs[-1]["epoch"]
        assert one.finished == (done == one.config.epochs)
        name = f"| {one.config.name} | {one.config.seed} | running, or killed | {done} of {one.config.epochs} |"
        assert one.finished == (name not in told)
    assert all(gzip.decompress(path.read_bytes()) for path in RESULTS.rglob(records.KEPT))


def test_other_documents_say_what_this_one_says():
    """A difference with its interval, as "+2.97 [2.50, 3.44]", is one of a table here."""
    tables = "".join(page.read_text(encoding="utf-8") for page in (DOCUMENT, *PAGES.glob("*.md"))).replace("\\", "")
    others = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page != DOCUMENT)]
    told = [
        (page.name, figure)
        for page in others
        for figure in re.findall(r"[+−]?\d+\.\d+ \[[−\d.]+, [−\d.]+\]", page.read_text(encoding="utf-8"))
    ]
    assert told
    assert [one for one in told if one[1] not in tables] == []
