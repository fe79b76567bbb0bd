"""What runs are judged by: directions, units and digits of accuracy and of other metrics."""

import numpy as np
import pytest
from record_helpers import MIXTURE, config, record

from mixnorm_lab.reports.model import groups
from mixnorm_lab.reports.model.comparison import comparisons
from mixnorm_lab.reports.model.measure import RECALIBRATED, measure_of
from mixnorm_lab.reports.plots import curves
from mixnorm_lab.reports.tables import details, results
from mixnorm_lab.reports.tables.outcome import Outcome

ERROR = "mean squared error"


def run(name, seed, values, metric=ERROR, mixture=None, **changes):
    made = record(config(name, len(values), seed, mixture, metric=metric, **changes), [None] * len(values))
    for epoch, value in zip(made.epochs, values, strict=True):
        epoch |= {"test_metric": value, "recalibrated_metric": value, "train_error": None}
    return made


def pairs(bn, mn, **changes):
    made = [run("bn", seed, values, **changes) for seed, values in enumerate(bn)]
    return [*made, *(run("mn", seed, values, mixture=MIXTURE, **changes) for seed, values in enumerate(mn))]


def test_accuracy_is_what_is_left_of_the_error():
    made = record(config(epochs=3), [0.5, None, 0.2])
    measure = measure_of(made.config)
    assert measure.values(made) == pytest.approx([50, np.nan, 80], nan_ok=True)
    assert measure.shown(made) == pytest.approx([50, np.nan, 20], nan_ok=True)
    assert (measure.name, measure.unit, measure.digits, measure.axis_label) == ("accuracy", "%", 2, "test error in %")
    assert measure_of(made.config, RECALIBRATED).title == "Test error, statistics refilled"


def test_a_share_is_shown_in_percent():
    made = run("bn", 0, [0.5, 0.625], "mean IoU")
    measure = measure_of(made.config)
    assert measure.values(made) == pytest.approx([50, 62.5])
    assert measure.shown(made) == pytest.approx([50, 62.5])
    assert (measure.points, measure.sign, measure.axis_label) == ("points", 1, "mean IoU in %")
    assert not measure.shown_lower_is_better


@pytest.mark.parametrize(("values", "digits"), [([0.213, 0.2], 3), ([24.0, 21.0], 1), ([0.00021, 0.00025], 6), ([0, 0], 3)])
def test_digits_tell_values_apart(values, digits):
    made = run("bn", 0, values)
    assert measure_of(made.config, runs=[made]).digits == digits


def test_the_best_is_the_lowest_where_lower_is_better():
    made = run("bn", 0, [0.5, 0.2, 0.3])
    measure = measure_of(made.config, runs=[made])
    assert groups.best(made, measure) == 0.2
    assert groups.reached(made, 0.3, measure)["epoch"] == 2
    assert measure.so_far(measure.values(made)) == pytest.approx([0.5, 0.2, 0.2])
    assert measure.easier(0.2139) == 0.22
    assert measure_of(config()).easier(61.29) == 61.2


@pytest.mark.parametrize(
    ("metric", "bn", "mn", "words"),
    [
        (
            ERROR,
            [[0.5, 0.224], [0.5, 0.225], [0.5, 0.223]],
            [[0.4, 0.213], [0.4, 0.212], [0.4, 0.214]],
            "Mixture norm is better than batch norm: mean squared error 0.213 against 0.224, 0.011 lower [0.009, 0.013] (3",
        ),
        (
            ERROR,
            [[0.5, 0.213], [0.5, 0.212], [0.5, 0.214]],
            [[0.4, 0.224], [0.4, 0.225], [0.4, 0.223]],
            "is worse than batch norm: mean squared error 0.224 against 0.213, 0.011 higher [0.009, 0.013]",
        ),
        (
            "mean IoU",
            [[0.5, 0.60], [0.5, 0.61], [0.5, 0.62]],
            [[0.5, 0.70], [0.5, 0.71], [0.5, 0.72]],
            "is better than batch norm: mean IoU 71.00% against 61.00%, 10.00 points higher",
        ),
        (
            "dice:higher",
            [[0.5, 0.60], [0.5, 0.61], [0.5, 0.62]],
            [[0.5, 0.70], [0.5, 0.71], [0.5, 0.72]],
            "is better than batch norm: dice 0.710 against 0.610, 0.100 higher [0.077, 0.123]",
        ),
    ],
)
def test_a_metric_has_its_own_name_unit_and_direction(metric, bn, mn, words):
    outcome = Outcome(pairs(bn, mn, metric=metric))
    [answer] = outcome.answers
    assert words in answer
    assert "accuracy" not in " ".join([answer, *(table.markdown() for table in outcome.tables)])
    assert "−" not in answer


def test_steps_to_a_lower_value():
    [family] = groups.families(pairs([[0.5, 0.4, 0.3, 0.2]] * 2, [[0.4, 0.25, 0.2, 0.15]] * 2))
    [made] = comparisons(family)
    assert [target.value for target in made.targets] == [0.5, 0.4]
    assert made.furthest.fewer.mean == pytest.approx(50)
    assert made.furthest.steps.mean == 195
    [first, *_] = results.steps(family).rows
    assert first["target"] == 0.5
    table = results.ends(family)
    assert table.title.startswith("Mean squared error in the end")
    assert "Mean squared error: lower is better." in table.notes
    assert results.by_quarters(family).title.startswith("Lowest mean squared error: ")


def test_runs_of_two_metrics_are_two_tables():
    made = [*pairs([[0.5, 0.4]], [[0.4, 0.3]]), record(config("bn", 2), [0.5, 0.4])]
    families = groups.families(made)
    assert [family.metric for family in families] == [ERROR, "accuracy"]
    first, second = details.runs(families)
    assert (first.title, second.title) == ("Every run, mean squared error", "Every run, accuracy")
    assert first.rows[0]["best"] == 0.4


def test_pictures_show_the_metric(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = curves.draw(groups.families(pairs([[0.5, 0.4, 0.3]] * 2, [[0.4, 0.3, 0.2]] * 2, metric="mean IoU")), tmp_path)
    assert {picture.title.partition(":")[0] for picture in drawn} >= {"Mean IoU", "Mean IoU, statistics refilled"}
    svg = (tmp_path / f"{drawn[0].name}.svg").read_text()
    assert "mean IoU in %" in svg
    assert "error" not in svg
