"""The main figures of the document, computed a second time: from the lines of the records, with nothing of the reports."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parents[3]
RESULTS, DOCUMENT = ROOT / "results", ROOT / "docs" / "results.md"


def epochs(folder):
    """The epochs of every finished run of a folder, in the order of their seeds."""
    found = {}
    for path in (RESULTS / folder).glob("seed-*/record.jsonl.gz"):
        lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        if lines[-1]["kind"] == "end" and lines[-1]["reason"] == "finished":
            by_number = {line["epoch"]: line for line in lines if line["kind"] == "epoch"}  # of one done again, the last
            found[int(path.parent.name.removeprefix("seed-"))] = [by_number[number] for number in sorted(by_number)]
    return [found[seed] for seed in sorted(found)]


def column(folder, key="test_error"):
    """(runs, epochs) of a number; errors as accuracies in %."""
    values = np.array([[epoch[key] for epoch in run] for run in epochs(folder)], dtype=float)
    return 100 - 100 * values if key.endswith("error") else values


def welch(ours, base):
    """A difference of means with Welch's 95% interval, by scipy's own test."""
    interval = stats.ttest_ind(ours, base, equal_var=False).confidence_interval(0.95)
    return np.mean(ours) - np.mean(base), interval.low, interval.high


def written(mean, low, high, digits=2):
    """As the document writes it, with the brackets that Markdown wants escaped."""
    numbers = [f"{value:.{digits}f}".replace("-", "−") for value in (mean, low, high)]
    zero = f"−{0:.{digits}f}"
    mean, low, high = (number.replace(zero, zero[1:]) if number == zero else number for number in numbers)
    return f"{mean if mean.startswith('−') else f'+{mean}'} \\[{low}, {high}\\]"


def row(page, table, *begins):
    """The cells of the row that begins with these, in the table below this heading."""
    text = page.read_text(encoding="utf-8").partition(f"{table}\n")[2]
    [line] = [line for line in re.split(r"\n#+ ", text)[0].splitlines() if line.startswith("| " + " | ".join(begins) + " |")]
    return line


def last(folder, key="test_error", count=10):
    return column(folder, key)[:, -count:].mean(axis=1)


def first(values, level):
    """The first epoch, from 1, in which each run has this level."""
    assert (values >= level).any(axis=1).all()
    return (values >= level).argmax(axis=1) + 1


PAIRS = {
    "cifar-cnn on cifar10, 100 epochs | all layers": ("best/cifar10", "cifar-cnn/cifar10/bn-2"),
    "cifar-cnn on cifar100, 100 epochs | all layers": ("best/cifar100", "cifar-cnn/cifar100/bn-2"),
    "cifar-cnn on cifar100, 100 epochs | all layers, weights averaged, 0.9": (
        "with-average-0.9/best/cifar100",
        "with-average-0.9/cifar-cnn/cifar100/bn-2",
    ),
    "cifar-cnn on cifar100, 100 epochs | all layers, steady inference, T = 40, weights averaged, 0.9": (
        "with-average-0.9/forms/cifar100/all-layers-steady-history-40",
        "with-average-0.9/cifar-cnn/cifar100/bn-2",
    ),
}


@pytest.mark.parametrize("begins", PAIRS)
def test_what_to_expect(begins):
    ours, base = (last(folder) for folder in PAIRS[begins])
    line = row(DOCUMENT, "## What to expect", begins)
    assert f"| {written(*welch(ours, base))}, n {len(ours)}" in line
    for part in (base, ours):
        assert f"| {part.mean():.2f} ± {part.std(ddof=1):.2f} |" in line


@pytest.mark.parametrize("begins", PAIRS)
@pytest.mark.parametrize("key", ["recalibrated_error", "test_error"])
def test_steps_half_way(begins, key):
    """To what the mean of batch norm's curves had reached in 50 epochs, rounded down to a tenth of a percent."""
    ours, base = (column(folder, key) for folder in PAIRS[begins])
    level = np.floor(10 * base.mean(axis=0)[:50].max() + 1e-9) / 10
    mean, low, high = (100 * (1 - np.exp(value)) for value in welch(np.log(first(ours, level)), np.log(first(base, level))))
    assert f"| {written(mean, high, low, digits=0)}, n {len(ours)}" in row(DOCUMENT, "## What to expect", begins)


@pytest.mark.parametrize(
    ("claim", "ours", "base"),
    [
        ("conv3, CIFAR-10: a higher accuracy", "cifar10/mn-2", "cifar10/bn-2"),
        ("conv3, CIFAR-100: a higher accuracy", "cifar100/mn-2", "cifar100/bn-2"),
        ("conv2 and conv3, CIFAR-100: a higher accuracy", "cifar100/mn-8", "cifar100/bn-2"),
        ("8 EM iterations, CIFAR-100: a higher accuracy", "cifar100/mn-6", "cifar100/bn-2"),
        ("large learning rate, CIFAR-100: a higher accuracy", "cifar100/mn-4", "cifar100/bn-4"),
        ("the same, more weight decay: a higher accuracy", "cifar100/mn-3", "cifar100/bn-3"),
    ],
)
def test_the_largest_accuracies_of_the_papers_rows(claim, ours, base):
    ours, base = (column(f"cifar-cnn/{folder}").max(axis=1) for folder in (ours, base))
    assert f"| {written(*welch(ours, base))}, n {len(ours)}" in row(DOCUMENT, "## What of the paper is confirmed", claim)


def test_the_lead_after_a_quarter():
    for claim, key in (
        ("conv3, CIFAR-100: a lead after 25 epochs", "test_error"),
        ("the same, statistics refilled", "recalibrated_error"),
    ):
        ours, base = (column(f"cifar-cnn/cifar100/{kind}", key)[:, :25].max(axis=1) for kind in ("mn-2", "bn-2"))
        assert f"| {written(*welch(ours, base))}, n 8 |" in row(DOCUMENT, "## What of the paper is confirmed", claim)


def test_the_deviation_within_ten_epochs():
    def unsteady(values):
        return np.array([[np.std(run[i : i + 10], ddof=1) for i in range(len(run) - 9)] for run in values]).mean(axis=1)

    ours, base = (unsteady(column(f"cifar-cnn/cifar100/{kind}")) for kind in ("mn-8", "bn-2"))
    assert f"| {written(*welch(ours, base))}, n 8 |" in row(
        DOCUMENT, "## What of the paper is confirmed", "conv2 and conv3, CIFAR-100: steadier"
    )


@pytest.mark.parametrize(
    ("begins", "ours", "base"),
    [
        (("cifar10", "all layers, learning rate 0.01, best"), "best/cifar10", "cifar-cnn/cifar10/bn-2"),
        (("cifar100", "all layers, learning rate 0.01, best"), "best/cifar100", "cifar-cnn/cifar100/bn-2"),
        (("cifar100", "conv3, learning rate 0.05, mn-4"), "cifar-cnn/cifar100/mn-4", "cifar-cnn/cifar100/bn-4"),
    ],
)
def test_two_effects(begins, ours, base):
    line = row(DOCUMENT, "## Two effects", *begins)
    assert f"| {written(*welch(last(ours), last(base)))}, n" in line
    assert f"| {written(*welch(last(ours, 'train_loss'), last(base, 'train_loss')), digits=3)}, n" in line
    higher = column(ours, "train_loss").mean(axis=0) > column(base, "train_loss").mean(axis=0)
    assert line.endswith(f"| {100 * higher.mean():.0f}% |")


def test_where_the_gain_comes_from():
    folder = "resnet-18/cifar100-held-out"
    page = DOCUMENT.with_suffix("") / "resnet-18.md"
    base = last(f"{folder}/batch-norm", count=3)
    for begins, name in (
        ("noise: batch norm over 32 images", "ghost-32"),
        ("a parabola, no modes", "mixture-norm,num_components=1,deviation=learned,activation=None"),
        ("a parabola and modes where a ReLU follows", "mixture-norm,layers=relu,deviation=learned"),
    ):
        ours = last(f"{folder}/{name}", count=3)
        assert f"| {written(*welch(ours, base))}, n {len(ours)}" in row(page, "## Where does the gain come from?", begins)


def test_holms_correction_of_what_to_expect():
    """Of eight rows, six have an interval; the four that are certain have p far below 0.05 / 6."""
    tested = [stats.ttest_ind(*(last(folder) for folder in pair), equal_var=False).pvalue for pair in PAIRS.values()]
    assert max(tested) < 0.05 / 6
    text = DOCUMENT.read_text(encoding="utf-8").partition("## What to expect")[2].partition("\n## ")[0]
    assert [text.count(f"| {verdict} |") for verdict in ("better", "cannot tell", "worse")] == [4, 4, 0]
