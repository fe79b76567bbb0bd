"""Norms side by side: batch norm is the base of every one, in tables, sentences and pictures."""

import math
import statistics

import pytest
from record_helpers import MIXTURE, config, record

from mixnorm_lab.config.run_config import Mixture
from mixnorm_lab.reports import Outcome, write
from mixnorm_lab.reports.model.comparison import interval
from mixnorm_lab.tables import Measured

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
    assert rows["batch-norm"]["last"].mean == pytest.approx(78)
    assert "above" not in rows["batch-norm"]
    ghost = rows["ghost-32"]["above"]
    assert (ghost.mean, ghost.deviation) == pytest.approx((2, 1))  # 1, 2 and 3 points
    half = 4.303 * 1 / 3**0.5
    assert rows["ghost-32"]["interval"] == f"−{half - 2:.2f} to +{2 + half:.2f}"
    assert rows["layer"]["above"].mean == pytest.approx(-20)
    assert "train_eval_loss" not in [column.key for column in table.columns]


def test_a_sentence_for_every_norm():
    ghost, layer, mixture = Outcome(runs()).answers
    assert ghost.startswith("Ghost batch norm (ghost-32) reached batch norm's best accuracy (78.00%)")
    assert "In the last epoch it is 2.00 ± 1.00 points above batch norm" in ghost
    assert ghost.endswith("(95% interval of the mean: −0.48 to +4.48).")
    assert layer.startswith("Layer norm did not reach batch norm's best accuracy (78.00%) in 2 epochs")
    assert "20.00 ± 0.00 points below batch norm" in layer
    assert mixture.startswith("Mixture norm reached")


def test_mixture_norm_with_other_options_is_a_norm_of_its_own():
    made = [run for run in runs() if run.config.norm is None]
    for seed in range(3):
        options = config("mixture-norm,em_iters=0", epochs=2, seed=seed, mixture=Mixture(("conv3",), {"em_iters": 0}))
        made.append(record(options, [0.3, 0.2]))
    outcome = Outcome(made)
    assert [sentence.partition(" reached")[0] for sentence in outcome.answers] == [
        "Mixture norm",
        "Mixture norm (mixture-norm,em_iters=0)",
    ]
    [table] = outcome.tables
    assert len(table.rows) == 3


def test_the_report_has_the_table_the_sentences_and_every_curve(tmp_path):
    page = write(tmp_path, Outcome(runs()))
    text = page.with_suffix(".md").read_text()
    assert text.startswith("# Norms side by side: cifar-cnn on cifar100\n")
    assert "### Norms side by side: cifar-cnn on cifar100, 2 epochs" in text
    assert "for all norms alike" in text
    assert "ghost batch norm, groups of 32 images" in text
    if (tmp_path / "figures").exists():
        [picture] = (tmp_path / "figures").glob("*test-error.svg")
        drawn = picture.read_text()
        for colour in ("#4477aa", "#228833", "#aa3377", "#ee7733"):  # batch norm's, two others', mixture norm's
            assert colour in drawn


@pytest.mark.parametrize("values", [(1.0, 2.0), (0.5, 0.75, 0.1, 0.3), tuple(range(30))])
def test_an_interval_is_students(values):
    """Against the distribution, of which 2.5% must lie beyond t: integrated by the trapezoidal rule."""
    measured = Measured.over(values)
    low, high = (float(end.replace("−", "-")) for end in interval(measured).split(" to "))
    error = statistics.stdev(values) / len(values) ** 0.5
    assert (low + high) / 2 == pytest.approx(statistics.mean(values), abs=0.01)
    t, freedom = (high - low) / 2 / error, len(values) - 1
    step = t / 20_000
    density = [(1 + (i * step) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(20_001)]
    inside = step * (sum(density) - (density[0] + density[-1]) / 2)
    whole = math.sqrt(math.pi * freedom) * math.gamma(freedom / 2) / math.gamma((freedom + 1) / 2) / 2
    assert inside / whole == pytest.approx(0.95, abs=0.003)


def test_one_seed_has_no_interval():
    assert interval(Measured.over([1.0])) == ""
