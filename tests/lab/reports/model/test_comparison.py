"""What reports make of records that were made up, so that every figure is known."""

import dataclasses
import re

import numpy as np
import pytest
from record_helpers import BN_ERRORS, MIXTURE, MN_ERRORS, catalog_record, config, pair, record

from mixnorm_lab.reports.model import comparison, groups, sentences
from mixnorm_lab.reports.model.measure import PLAIN, RECALIBRATED, measure_of
from mixnorm_lab.reports.tables import claims, cost, details, results
from mixnorm_lab.reports.tables.outcome import Outcome
from mixnorm_lab.tables import Difference

ACCURACY = measure_of(config())


def compared(made, key=PLAIN):
    [family] = groups.families(made)
    [found] = comparison.comparisons(family, key)
    return found


def couple(bn, mn, **changes):
    """Batch norm and mixture norm with these curves of errors, a seed each."""
    made = [record(config("bn", epochs=len(errors), seed=seed), errors, **changes) for seed, errors in enumerate(bn)]
    for seed, errors in enumerate(mn):
        made.append(record(config("mn", epochs=len(errors), seed=seed, mixture=MIXTURE), errors, **changes))
    return made


def rows(table):
    return {row["run"]: row for row in table.rows}


# Groups


def test_runs_are_grouped_over_seeds_with_batch_norm_first():
    made = pair(seeds=3)
    [family] = groups.families(reversed(made))
    assert [(g.label, len(g.runs)) for g in family.groups] == [("bn", 3), ("mn", 3)]
    assert [run.config.seed for run in family.groups[0].runs] == [0, 1, 2]
    assert groups.partner(family.groups[1], family.groups) is family.groups[0]


def test_other_settings_are_another_group_and_no_partner():
    slow = dataclasses.replace(config().optimizer, lr=0.5)
    made = [
        record(config("bn", epochs=4), BN_ERRORS),
        record(config("bn", epochs=4, optimizer=slow), BN_ERRORS),
        record(config("mn", epochs=4, mixture=MIXTURE, optimizer=slow), MN_ERRORS),
        record(config("other", epochs=4, mixture=MIXTURE, batch_size=32), MN_ERRORS),
        record(config("bn", epochs=4, data="cifar10"), BN_ERRORS),
    ]
    first, second = groups.families(made)
    assert (second.data, len(second.groups)) == ("cifar10", 1)
    by_label = {group.label: group for group in first.groups}
    assert set(by_label) == {"bn (optimizer.lr: 0.01)", "bn (optimizer.lr: 0.5)", "mn", "other"}
    assert groups.partner(by_label["mn"], first.groups) is by_label["bn (optimizer.lr: 0.5)"]
    assert groups.partner(by_label["other"], first.groups) is None
    assert {row["run"] for row in results.steps(first).rows} == {"mn"}


def test_a_copy_of_a_run_counts_once_and_the_longer_wins():
    run = config("bn", epochs=4)
    [family] = groups.families([record(run, BN_ERRORS[:2], end=None), record(run, BN_ERRORS), record(run, BN_ERRORS[:3])])
    assert [len(r.epochs) for r in family.groups[0].runs] == [4]


def test_a_run_that_was_done_twice_with_other_figures_is_told():
    run, again = config("bn", epochs=4), [0.5, 0.4, 0.3, 0.21]
    [family] = groups.families([record(run, BN_ERRORS), record(run, BN_ERRORS), record(run, BN_ERRORS[:2], end=None)])
    assert not any("counts for nothing" in note for note in results.by_quarters(family).notes)  # copies say nothing else
    [family] = groups.families([record(run, BN_ERRORS), record(run, again)])
    assert "1 run has the settings and the seed of another that stands here, and counts for nothing." in (
        results.by_quarters(family).notes
    )


def test_numbers_in_names_are_sorted_as_numbers():
    names = ["x/mn-10", "x/mn-2", "x/mn-1"]
    [family] = groups.families([record(config(name, epochs=4, mixture=MIXTURE), BN_ERRORS) for name in names])
    assert [group.label for group in family.groups] == ["mn-1", "mn-2", "mn-10"]


# Figures


def test_targets_are_of_batch_norms_mean_curve():
    """Of ten epochs after the first, the second, the fourth and the fifth, of what it has best till then."""
    rise = [0.9, 0.8, 0.7, 0.6, 0.65, 0.5, 0.4, 0.3, 0.2, 0.1]
    [family] = groups.families(couple([rise, [error - 0.02 for error in rise]], [rise]))
    assert comparison.targets(family.groups[0], ACCURACY) == pytest.approx((11.0, 21.0, 41.0))  # 41 is not undone by 36
    assert ACCURACY.easier(61.29) == 61.2
    assert len(comparison.targets(groups.families(pair())[0].groups[0], ACCURACY)) == 2  # of four epochs


def test_steps_to_a_target_by_hand():
    """Mixture norm has batch norm's 60% of the second epoch in the first of one seed, and in the second of the other."""
    bn = [[0.5, 0.4, 0.3, 0.2], [0.5, 0.4, 0.3, 0.2]]
    found = compared(couple(bn, [[0.4, 0.3, 0.2, 0.1], [0.5, 0.4, 0.2, 0.1]]))
    first, second = found.targets
    assert (first.value, second.value) == (50, 60)
    assert (second.steps.mean, second.base_steps.mean) == (1.5 * 195, 2 * 195)
    assert second.fewer.mean == pytest.approx(100 * (1 - 2**0.5 / 2))  # of geometric means
    assert (second.seconds.mean, second.base_seconds.mean) == (3.0, 4.0)
    assert second.less_time.mean == pytest.approx(second.fewer.mean)
    assert found.furthest is second


def test_a_target_that_a_run_did_not_reach_has_no_saving():
    found = compared(couple([BN_ERRORS] * 2, [[0.45, 0.3, 0.2, 0.1], [0.45, 0.45, 0.42, 0.41]]))
    first, second = found.targets
    assert first.fewer.mean == pytest.approx(0)
    assert second.fewer.mean is None
    assert found.furthest is first
    told = results.steps(groups.families(couple([BN_ERRORS] * 2, [[0.45, 0.3, 0.2, 0.1], [0.45] * 4]))[0])
    assert "1 of 2 runs" in told.markdown()


def test_a_run_is_judged_by_its_last_epochs():
    assert [groups.last_epochs(epochs) for epochs in (1, 3, 19, 20, 55, 100, 200)] == [1, 1, 1, 2, 5, 10, 10]
    errors = [0.5] * 18 + [0.1, 0.3]
    found = compared(couple([[0.5] * 20], [errors]))
    assert found.ended.mean == pytest.approx(80)
    assert found.end.mean == pytest.approx(30)
    assert found.best.mean == pytest.approx(40)
    assert found.average.mean == pytest.approx((18 * 50 + 90 + 70) / 20 - 50)


def test_unsteadiness_is_the_deviation_within_ten_epochs():
    run = record(config(epochs=20), [0.5, 0.4] * 10)
    assert groups.unsteadiness(run, ACCURACY) == pytest.approx(np.std([50, 60] * 5, ddof=1))
    assert groups.unsteadiness(record(config(epochs=19), [0.5] * 19), ACCURACY) is None
    climbs = record(config(epochs=20), [0.5 - 0.01 * number for number in range(20)])
    assert groups.unsteadiness(climbs, ACCURACY) == pytest.approx(np.std(range(10), ddof=1))


def test_all_seeds_of_batch_norm_count():
    found = compared(couple([[0.5, 0.2], [0.5, 0.3], [0.5, 0.4]], [[0.5, 0.1]]))
    assert found.base_ended.mean == pytest.approx(70)
    assert found.end.mean == pytest.approx(20)
    assert (found.end.n, found.end.base_n) == (1, 3)


def test_the_correction_counts_every_norm_of_a_table():
    """A difference with p of 0.03 stands alone, and not among three."""
    bn, mn = [[0.20], [0.21], [0.22], [0.23]], [[0.19], [0.195], [0.205], [0.18]]
    [alone] = comparison.comparisons(groups.families(couple(bn, mn))[0])
    assert 0.0167 < alone.end.p < 0.05
    assert alone.end.sure
    made = couple(bn, mn)
    for name in ("mn-b", "mn-c"):
        for seed, errors in enumerate(mn):
            made.append(record(config(name, epochs=1, seed=seed, mixture=MIXTURE), errors))
    together = comparison.comparisons(groups.families(made)[0])
    assert [one.end.p for one in together] == pytest.approx([alone.end.p] * 3)
    assert not any(one.end.sure for one in together)
    assert {row.get("verdict") for row in results.ends(groups.families(made)[0]).rows} == {None, "cannot tell"}


def test_the_placebo_is_batch_norm_beside_its_other_seeds():
    """To 60%: after one, two and four epochs, so that one of a pair takes 50, 75 and 50% fewer steps."""
    bn = [[0.4, 0.4, 0.4, 0.4], [0.5, 0.4, 0.4, 0.4], [0.5, 0.5, 0.5, 0.4]]
    [family] = groups.families(couple(bn, [MN_ERRORS]))
    apart = comparison.placebo(family.groups[0], 60, ACCURACY)
    assert (apart.mean, apart.n) == (pytest.approx(np.mean([50, 75, 50])), 3)
    assert [row for row in results.steps(family).rows if row["run"] == "batch norm, other seed"]
    one = results.steps(groups.families(couple(bn[:1], [MN_ERRORS]))[0])
    assert not [row for row in one.rows if "other seed" in row["run"]]


def test_a_busy_machine_is_not_judged_by_its_time():
    made = couple([BN_ERRORS] * 2, [MN_ERRORS] * 2)
    made[0].epochs[2]["busy"] = True
    [family] = groups.families(made)
    [found] = comparison.comparisons(family)
    assert found.busy
    assert all(target.less_time is None for target in found.targets)
    [answer] = Outcome(made).answers
    assert "The machine was busy, so time is not judged." in answer
    assert "training time" not in answer
    keys = {column.key for column in results.steps(family).columns}
    assert not {"seconds", "less_time"} & keys
    assert "The machine was busy, so time is not judged." in results.steps(family).notes
    ended = {row["run"]: row["step_ms"] for row in results.ends(family).rows}
    assert ended == {"bn": None, "mn": pytest.approx(2000 / 195)}


# Sentences


def spread(error, seeds=3, by=0.001):
    """Curves of two epochs that end about an error."""
    return [[0.5, error + by * (seed - (seeds - 1) / 2)] for seed in range(seeds)]


@pytest.mark.parametrize(
    ("bn", "mn", "words"),
    [
        (
            spread(0.2),
            spread(0.15),
            "Mixture norm is better than batch norm: accuracy 85.00% against 80.00%, 5.00 points higher",
        ),
        (spread(0.2), spread(0.15), "5.00 points higher [4.77, 5.23] (3 seeds each; the last epoch)."),
        (
            spread(0.15),
            spread(0.2),
            "is worse than batch norm: accuracy 80.00% against 85.00%, 5.00 points lower [4.77, 5.23]",
        ),
        (spread(0.2, 5), spread(0.15), "(3 seeds, batch norm 5; the last epoch)"),
        (
            spread(0.2, by=0.05),
            spread(0.19),
            "cannot be told apart from batch norm with these seeds: accuracy 81.00% against 80.00%, 1.00",
        ),
        (
            spread(0.2, 1),
            spread(0.15, 1),
            "cannot be told apart from batch norm with one seed: accuracy 85.00% against 80.00%",
        ),
        (spread(0.2, 1), spread(0.15, 1), "5.00 points higher (one seed each; the last epoch)"),
        (spread(0.2, 1), spread(0.15, 1), "Five seeds of each norm would tell more."),
        (spread(0.2, by=0.01), spread(0.2, by=0.01), ", no difference [−2.27, 2.27]"),
        (spread(0.20006, 1), spread(0.20004, 1), "accuracy 80.00% against 79.99%, hardly any difference"),
    ],
)
def test_the_answer_says_what_is_certain(bn, mn, words):
    [answer] = Outcome(couple(bn, mn)).answers
    assert words in answer


def test_the_answer_says_how_many_seeds_it_would_take():
    wide = Outcome(couple(spread(0.2, 6, by=0.01), spread(0.195, 6, by=0.01))).answers[0]
    assert "To see a difference of 1 point, about 56 seeds of each norm would be needed." in wide
    few = Outcome(couple(spread(0.2, 2, by=0.01), spread(0.195, 2, by=0.01))).answers[0]
    assert "seeds of each norm would be needed (a rough estimate from so few)." in few
    far = Outcome(couple(spread(0.2, 3, by=0.04), spread(0.195, 3, by=0.04))).answers[0]
    assert "A difference of 1 point would not be seen with 100 seeds of each norm" in far
    close = Outcome(couple(spread(0.2, 6), spread(0.2, 6))).answers[0]
    assert "A difference of 1 point would probably have been seen." in close
    assert "seeds" not in Outcome(couple(spread(0.2), spread(0.15))).answers[0].partition("epoch).")[2]


def test_the_answer_says_how_much_sooner():
    rise = [0.5, 0.4, 0.3, 0.2]
    bn, mn = [rise] * 3, [[0.4, 0.2, 0.2, 0.1 + 0.001 * seed] for seed in range(3)]
    [answer] = Outcome(couple(bn, mn)).answers
    assert (
        "It reached 60.0% in 50% fewer steps (195 instead of 390), and in 50% less training time (2.0 s instead of" in answer
    )
    [alike] = Outcome(couple(bn, bn)).answers
    assert re.search(r"It reached [\d.]+% in as many steps \(390\)", alike)
    [slower] = Outcome(couple(mn, bn)).answers
    assert "more steps" in slower
    assert "more training time" in slower
    [never] = Outcome(couple([rise] * 2, [[0.9] * 4] * 2)).answers
    assert "Not every run reached what batch norm reaches in the first half." in never


def test_a_saving_that_chance_would_do_is_said_to_be_one():
    bn = [[0.5, 0.4, 0.3, 0.2], [0.5, 0.5, 0.4, 0.2], [0.5, 0.3, 0.3, 0.2]]
    mn = [[0.5, 0.4, 0.3, 0.2], [0.3, 0.3, 0.3, 0.2], [0.5, 0.3, 0.3, 0.2]]
    [answer] = Outcome(couple(bn, mn)).answers
    assert ", which may be chance (" in answer


def test_many_comparisons_have_one_sentence():
    made = []
    for i in range(5):
        for seed in range(3):
            made.append(record(config("bn", epochs=1, seed=seed, batch_size=8 + i), [0.2 + 0.001 * seed]))
            error = (0.15, 0.16, 0.2, 0.2, 0.25)[i] + 0.001 * seed
            made.append(record(config("mn", epochs=1, seed=seed, batch_size=8 + i, mixture=MIXTURE), [error]))
    [answer] = Outcome(made).answers
    assert answer == (
        "In 2 of 5 comparisons the norm is better than batch norm in the end, by 4.00 to 5.00 points; in 1 it is worse. "
        "The other 2 cannot be told from chance."
    )


@pytest.mark.parametrize(
    ("mean", "low", "high", "sure", "paper", "words"),
    [
        (1.0, None, None, False, 0.2, "cannot tell"),
        (0.4, -0.2, 1.0, False, 0.7, "cannot tell"),
        (0.4, -0.2, 1.0, False, 1.4, "cannot tell, less than in the paper"),
        (1.0, 0.2, 1.8, True, None, "higher"),
        (1.0, 0.2, 1.8, True, 0.7, "higher, as in the paper"),
        (-1.0, -1.8, -0.2, True, 0.7, "lower, less than in the paper"),
        (1.0, 0.8, 1.2, True, 0.7, "higher, more than in the paper"),
        (None, None, None, False, 0.7, ""),
    ],
)
def test_a_difference_in_words(mean, low, high, sure, paper, words):
    assert comparison.verdict(Difference(mean, low, high, sure=sure, paper=paper)) == words


def test_accuracy_after_each_quarter():
    errors = list(np.linspace(0.9, 0.1, 20))
    errors[3] = 0.35  # the largest so far is not the last
    [family] = groups.families([record(config("bn", epochs=20), errors)])
    [row] = results.by_quarters(family).rows
    assert [row[f"after {at}"].mean for at in (5, 10, 15, 20)] == pytest.approx(
        [100 - 100 * min(errors[:at]) for at in (5, 10, 15, 20)]
    )
    assert groups.quarters(100) == [25, 50, 75, 100]
    assert groups.quarters(2) == [1, 1, 1, 2]


def test_epochs_that_are_not_finite_do_not_count():
    errors = [0.5, None, 0.3, None]
    run = record(config("bn", epochs=4), errors)
    assert groups.best(run, ACCURACY) == pytest.approx(70)
    assert groups.reached(run, 70, ACCURACY)["epoch"] == 3
    assert groups.best(record(config("bn", epochs=2), [None, None]), ACCURACY) is None


def test_refilled_statistics_have_tables_of_their_own():
    made = pair(seeds=2, recalibrated_error=lambda n: 0.1 / n)
    [family] = groups.families(made)
    table = results.by_quarters(family, RECALIBRATED)
    assert rows(table)["mn"]["after 4"].mean == pytest.approx(97.5)
    assert compared(made, RECALIBRATED).end.mean == pytest.approx(0)
    assert not any(group.has(RECALIBRATED) for group in groups.families(pair())[0].groups)


def test_diverged_and_unfinished_runs_count_for_nothing_but_are_listed():
    made = pair(seeds=3)
    made[3] = record(made[3].config, [0.1, None], end="not finite", message="loss is nan at step 200")
    made[5] = record(made[5].config, [0.1], end=None)
    families = groups.families(made)
    row = rows(results.by_quarters(families[0]))["mn"]
    assert row["seeds"] == "1 of 3"
    assert row["after 4"].mean == pytest.approx(85)
    listed = details.unfinished(families)
    assert [(r["seed"], r["state"], r["epochs"]) for r in listed.rows] == [
        (1, "diverged", "2 of 4"),
        (2, "running, or killed", "1 of 4"),
    ]
    assert listed.rows[0]["message"] == "loss is nan at step 200"
    notes = " ".join(results.by_quarters(families[0]).notes)
    assert "1 run diverged and counts for nothing" in notes
    assert "1 run did not finish and counts in the quarters passed alone." in notes


def test_a_run_that_was_cut_off_counts_for_what_it_reached():
    made = pair(seeds=3)
    bn, mn = ([run for run in made if (run.config.mixture is None) == batch] for batch in (True, False))
    best = [min(epoch["test_error"] for epoch in run.epochs) for run in bn]
    cut = record(mn[2].config, [0.5, best[2] - 0.01], end=None)
    [family] = groups.families([*bn, *mn[:2], cut])
    base, group = family.groups
    assert group.cut_off == (cut,)
    assert [len(group.until(epoch)) for epoch in (1, 2, 3, 4)] == [3, 3, 2, 2]
    row = rows(results.by_quarters(family))["mn"]
    assert row["after 2"].n == 3
    assert row["after 4"].n == row["after 4"].of == 2
    assert comparison.lead(group, base, PLAIN, 2).n == 3
    assert comparison.compare(group, base).end.n == 2


def test_where_nothing_is_finished_the_epochs_there_are_count():
    made = [record(run.config, [e["test_error"] for e in run.epochs][:3], end="interrupted") for run in pair()]
    table = results.by_quarters(groups.families(made)[0])
    assert rows(table)["mn"]["after 3"].mean == pytest.approx(80)
    assert rows(table)["mn"]["after 4"].mean is None
    assert any("not finished" in note for note in table.notes)


# The paper beside ours


def test_the_papers_figures_stand_beside_ours():
    made = [catalog_record(f"cifar-cnn/cifar100/{kind}") for kind in ("bn-2", "mn-2", "mn-8")]
    [family] = groups.families(made)
    accuracy, told, ended = (
        rows(table) for table in (results.by_quarters(family), claims.claims(family), results.ends(family))
    )
    assert [accuracy["mn-8"][f"after {at}"].paper for at in (25, 50, 75, 100)] == [59.79, 61.67, 62.50, 62.96]
    assert told["mn-8"]["saved"].paper == pytest.approx(100 * (1 - 1.03 / 1.81))
    assert told["mn-2"]["best"].paper == pytest.approx(0.15)
    assert ended["mn-8"]["best"].paper == 62.96
    without = rows(results.by_quarters(family, paper=False))
    assert without["mn-8"]["after 100"].paper is None


def test_a_shorter_training_is_not_held_against_the_paper():
    [family] = groups.families([catalog_record("cifar-cnn/cifar10/bn-2", epochs=20, precision="bf16")])
    table = results.by_quarters(family)
    assert table.rows[0]["after 20"].paper is None
    assert any("epochs: 20, not 100" in note and "precision: bf16, not fp32" in note for note in table.notes)


def test_averaged_weights_are_not_held_against_the_paper():
    [family] = groups.families([catalog_record("cifar-cnn/cifar10/bn-2", average=0.9)])
    table = results.by_quarters(family)
    assert table.rows[0]["after 100"].paper is None
    assert any("average: 0.9, not none" in note for note in table.notes)


def test_what_the_paper_never_reached_and_what_was_assumed():
    made = [catalog_record(f"inception-v3/cifar100/{kind}") for kind in ("bn-1", "mn-1", "nesterov-mn-1")]
    by_epochs = {family.epochs: family for family in groups.families(made)}
    assert rows(claims.claims(by_epochs[200]))["mn-1"]["saved"].paper is None
    assert any("MN-4" in note for note in results.by_quarters(by_epochs[150]).notes)


def test_cost_table(tmp_path):
    def row(variant, k, ms, benchmark="cost"):
        values = {"benchmark": benchmark, "variant": variant, "num_components": k, "m": 64 * 64, "channels": 448}
        return {**values, "device": "GPU", "mode": "graph", "time_ms": ms}

    table = cost.table(
        [row("batch_norm", None, 4.0), row("triton", 3, 5.0), row("reference", 3, 9.0), row("triton", 3, 1.0, "layer")]
    )
    assert len(table.rows) == 15
    [found] = [r for r in table.rows if (r["batch"], r["channels"], r["k"]) == (64, 448, 3)]
    assert (found["paper_rate"], found["paper_ratio"]) == (8.51, pytest.approx(8.51 / 9.26))
    assert (found["rate0"], found["ratio0"]) == (200.0, 0.8)
    assert "rate0" not in {column.key for column in cost.table().columns}


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        (Difference(41.0, 20.0, 60.0, sure=True), "in 41% fewer steps [20, 60]"),
        (Difference(-41.0, -200.0, 98.0), "in 41% more steps [−98, 200], which may be chance"),
        (Difference(-41.0, -11461.0, 98.0), "in 41% more steps, which may be chance"),
        (Difference(0.2, -11.0, 12.0), "in as many steps"),
    ],
)
def test_an_interval_that_says_nothing_is_left_out(difference, text):
    assert sentences._share(difference, "steps") == text
