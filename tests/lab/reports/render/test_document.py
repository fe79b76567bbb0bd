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
from mixnorm_lab.reports.model import groups
from mixnorm_lab.reports.model.groups import PLAIN
from mixnorm_lab.reports.render import document
from mixnorm_lab.reports.tables import claims
from mixnorm_lab.storage import records
from mixnorm_lab.tables import Measured

ROOT = Path(__file__).parents[4]
RESULTS, DOCUMENT, BENCH = ROOT / "results", ROOT / "docs" / "results.md", ROOT / "benchmarks" / "h200.csv"


def family(bn, mn, **changes):
    """Runs with these test errors, a list of curves each; a seed each."""
    made = [record(config("a/bn", len(errors), seed, **changes), errors) for seed, errors in enumerate(bn)]
    made += [record(config("a/mn", len(errors), seed, MIXTURE, **changes), errors) for seed, errors in enumerate(mn)]
    [found] = groups.families(made)
    return found


def test_the_steps_saved_are_of_pairs_with_the_same_seed():
    """Seed 0 of mixture norm has batch norm's best after 2 of its 4 epochs, seed 1 after 3 of 3."""
    found = family([[0.5, 0.4, 0.3, 0.2], [0.5, 0.4, 0.3, 0.3]], [[0.4, 0.2, 0.2, 0.1], [0.6, 0.5, 0.3, 0.25]])
    [row] = claims.claims(found).rows
    assert row["saved"].mean == pytest.approx(np.mean([50, 0]))
    assert row["saved"].deviation == pytest.approx(np.std([50, 0], ddof=1))
    assert row["gain"].mean == pytest.approx(np.mean([10, 5]))
    [lead] = claims.early_lead(found).rows
    assert lead[PLAIN].mean == pytest.approx(np.mean([10, -10]))


@pytest.mark.parametrize(
    ("mean", "deviation", "n", "paper", "words"),
    [
        (0.4, 0.5, 3, 1.0, "inside the spread"),
        (-0.5, 0.5, 3, None, "inside the spread"),
        (1.0, 0.5, 3, None, "higher"),
        (-1.0, 0.5, 3, 0.2, "lower, less than in the paper"),
        (1.0, 0.5, 3, 0.7, "higher, as in the paper"),
        (1.0, 0.2, 3, 0.7, "higher, more than in the paper"),
        (1.0, 0.2, 2, 0.7, "in 2 of 3 runs only"),
        (1.0, None, 3, 0.7, "of one seed"),
        (None, None, 0, 0.7, ""),
    ],
)
def test_a_difference_in_words(mean, deviation, n, paper, words):
    assert claims.verdict(Measured(mean, deviation, n, 3, paper)) == words


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
    assert document.commands(test) == ("mixnorm reproduce 'cifar-cnn/cifar10/*' --seeds 1 --epochs 4 --recalibrate 20",)
    name = "cifar-cnn/cifar10/bn-2 --seeds 1 --epochs 4 --precision bf16 --validation 0.1"
    assert document.commands(held_out) == (f"mixnorm reproduce {name}",)
    assert "held-out" in held_out.title


def test_the_commands_of_generators_train_their_features_first():
    start = catalog.get("dcgan/cifar10/bn").config
    end = {"kind": "end", "reason": "finished", "message": None, "seconds": 1.0}
    [family] = groups.families([records.Record(start, {}, [], [end], running=False)])
    first, second = document.commands(family)
    assert first == "mixnorm reproduce cifar-cnn/cifar10/bn-2"
    assert second == f"mixnorm reproduce {start.name} --seeds 1 --features runs/reproduce/cifar-cnn/cifar10/bn-2/seed-0"


def test_what_did_not_finish_is_not_compared(tmp_path):
    pytest.importorskip("matplotlib")
    whole = record(config("a/bn", 4), [0.5, 0.4, 0.3, 0.2])
    half = record(config("a/mn", 4, mixture=MIXTURE), [0.5, 0.3, 0.3, 0.2])
    half = dataclasses.replace(half, epochs=half.epochs[:2], ends=[], running=True)
    text = reports.write_document(tmp_path / "results.md", tmp_path, [whole, half]).read_text()
    assert "Some runs are not finished" in text
    assert "### Runs that are not finished" in text
    assert "against batch norm" not in text
    assert "| mn | 1 | 50.00 | 70.00 | — | — |" in text


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
    with pytest.raises(ValueError, match="a section 'Nowhere', but the document has cifar-cnn on cifar100, 4 epochs"):
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
    drawn = {path.name for path in rebuilt.with_suffix("").iterdir()}
    assert drawn == {path.name for path in DOCUMENT.with_suffix("").iterdir()}
    assert all(f"results/{name}" in DOCUMENT.read_text(encoding="utf-8") for name in drawn)


def test_every_number_in_the_text_stands_in_a_table_of_its_section():
    sections = re.split(r"^## ", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = 0
    for title, paragraphs in document.read_findings(RESULTS / document.FINDINGS).items():
        [section] = [one for one in sections if one.startswith(f"{title or 'How to read this'}\n")]
        cells = " ".join(line for line in section.splitlines() if line.startswith("|"))
        for number in re.findall(r"\d+\.\d+|\d+(?=%)", " ".join(paragraphs)):
            found += 1
            assert re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d.])", cells), f"{number} in {title!r}"
    assert found > 10


def test_every_kept_run_is_finished_or_told_not_to_be():
    found = records.find(RESULTS)
    assert found
    told = DOCUMENT.read_text(encoding="utf-8").partition("### Runs that are not finished")[2]
    for one in found:
        done = one.epochs[-1]["epoch"]
        assert one.finished == (done == one.config.epochs)
        name = f"| {one.config.name} | {one.config.seed} | running, or killed | {done} of {one.config.epochs} |"
        assert one.finished == (name not in told)
    assert all(gzip.decompress(path.read_bytes()) for path in RESULTS.rglob(records.KEPT))


def test_the_readme_says_what_the_document_says():
    readme, found = (ROOT / "README.md").read_text(encoding="utf-8"), DOCUMENT.read_text(encoding="utf-8")
    [paragraph] = [text for text in readme.split("\n\n") if text.startswith("What to expect")]
    figures = re.findall(r"\d[\d.]* ± \d[\d.]*", " ".join(paragraph.split()))
    assert len(figures) == 4
    for data, told in (("cifar100", figures[:2]), ("cifar10", figures[2:])):
        section = found.partition(f"## cifar-cnn on {data}, 100 epochs\n")[2]
        row = next(line for line in section.splitlines() if line.startswith("| best "))
        assert all(figure in row for figure in told), (told, row)


def test_the_readme_has_the_documents_figures_of_averaged_weights():
    readme, found = (ROOT / "README.md").read_text(encoding="utf-8"), DOCUMENT.read_text(encoding="utf-8")
    [paragraph] = [" ".join(text.split()) for text in readme.split("\n\n") if text.startswith("In the middle of a training")]
    section = found.partition("## cifar-cnn on cifar100, 100 epochs\n")[2]
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in _table(section, "Largest test accuracy in %")}
    told = re.findall(r"\d\d\.\d\d", paragraph)
    following = "all-layers-steady-history-40 (average: 0.9)"
    for figure, name in zip(told, ("bn-2 (average: 0.9)", "bn-2", following, "best"), strict=True):
        assert rows[name].split(" | ")[2].startswith(f"{figure} ±"), (figure, rows[name])
    [fewer] = re.findall(r"(\d+ ± \d+)% fewer steps", paragraph)
    [claim] = [line for line in _table(section, "Mixture norm against") if line.startswith(f"| {following} |")]
    assert claim.split(" | ")[5] == fewer


def _table(section, title):
    """The lines of the first table under a title that begins with this."""
    return section.partition(f"### {title}")[2].partition("\n\n")[2].partition("\n\n")[0].splitlines()
