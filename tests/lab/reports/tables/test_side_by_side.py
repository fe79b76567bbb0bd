"""Norms side by side: batch norm is the base of every one, in tables, sentences and pictures."""

import pytest
from record_helpers import MIXTURE, config, record
from scipy import stats

from mixnorm_lab.config.parts.mixture import Mixture
from mixnorm_lab.reports import Outcome, write

LAST = {  # the last epoch's error of three seeds, after one of 0.3
    "batch-norm": ({}, (0.20, 0.22, 0.24)),
    "ghost-32": ({"norm": "ghost-32"}, (0.19, 0.20, 0.21)),
    "layer": ({"norm": "layer"}, (0.40, 0.42, 0.44)),
    "mixture-norm": ({"mixture": MIXTURE}, (0.18, 0.21, 0.22)),
}


def runs(**changes):
    made = []
    for name, (fields, errors) in LAST.items():
        for seed, error in enumerate(errors):
            made.append(record(config(name, epochs=2, seed=seed, **fields), [0.3, error], **changes))
    return made


def test_one_table_with_the_differences_from_batch_norm():
    [table] = Outcome(runs()).tables
    rows = {row["run"]: row for row in table.rows}
    assert list(rows) == ["batch-norm", "ghost-32", "layer", "mixture-norm"]
    assert rows["batch-norm"]["end"].mean == pytest.approx(78)
    assert "above" not in rows["batch-norm"]
    ghost = rows["ghost-32"]["above"]
    interval = stats.ttest_ind([81, 80, 79], [80, 78, 76], equal_var=False).confidence_interval(0.95)
    assert (ghost.mean, ghost.low, ghost.high) == pytest.approx((2, interval.low, interval.high))
    assert rows["layer"]["above"].mean == pytest.approx(-20)
    assert [rows[name].get("verdict") for name in rows] == [None, "cannot tell", "lower", "cannot tell"]
    assert "train_eval_loss" not in [column.key for column in table.columns]


def test_a_sentence_for_every_norm():
    ghost, layer, mixture = Outcome(runs()).answers
    assert ghost.startswith(
        "Ghost batch norm (ghost-32) cannot be told apart from batch norm with these seeds: accuracy 80.00% against"
    )
    assert layer.startswith("Layer norm is worse than batch norm: accuracy 58.00% against 78.00%, 20.00 points lower")
    assert mixture.startswith("Mixture norm cannot be told apart")


def test_mixture_norm_with_other_options_is_a_norm_of_its_own():
    made = [run for run in runs() if run.config.norm is None]
    for seed in range(3):
        options = config("mixture-norm,em_iters=0", epochs=2, seed=seed, mixture=Mixture(("conv3",), {"em_iters": 0}))
        made.append(record(options, [0.3, 0.2]))
    outcome = Outcome(made)
    assert [sentence.partition(" cannot be told apart")[0] for sentence in outcome.answers] == [
        "Mixture norm",
        "Mixture norm (mixture-norm,em_iters=0)",
    ]
    [table] = outcome.tables
    assert len(table.rows) == 3


def test_the_report_has_the_table_the_sentences_and_every_curve(tmp_path):
    page = write(tmp_path, Outcome(runs()))
    text = page.with_suffix(".md").read_text()
    assert text.startswith("# Norms side by side: cifar-cnn on cifar100\n")
    assert "### Accuracy in the end: cifar-cnn on cifar100, 2 epochs" in text
    assert "ghost batch norm, groups of 32 images" in text
    if (tmp_path / "figures").exists():
        [picture] = (tmp_path / "figures").glob("*test-error.svg")
        drawn = picture.read_text()
        for colour in ("#4477aa", "#228833", "#aa3377", "#ee7733"):  # batch norm's, two others', mixture norm's
            assert colour in drawn
