"""What reports make of records that were made up, so that every figure is known."""

import dataclasses

import numpy as np
import pytest
from record_helpers import BN_ERRORS, MIXTURE, MN_ERRORS, catalog_record, config, pair, record

from mixnorm_lab.reports.model import comparison, groups
from mixnorm_lab.reports.tables import claims, cost, details, results
from mixnorm_lab.reports.tables.outcome import Outcome


def compared(made, key=groups.PLAIN):
    [family] = groups.families(made)
    [found] = comparison.best_comparisons(family, key)
    return found


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
    assert rows(results.speed(first))["other"].get("steps") is None


def test_a_copy_of_a_run_counts_once_and_the_longer_wins():
    run = config("bn", epochs=4)
    [family] = groups.families([record(run, BN_ERRORS[:2], end=None), record(run, BN_ERRORS), record(run, BN_ERRORS[:3])])
    assert [len(r.epochs) for r in family.groups[0].runs] == [4]


def test_a_run_that_was_done_twice_with_other_figures_is_told():
    run, again = config("bn", epochs=4), [0.5, 0.4, 0.3, 0.21]
    [family] = groups.families([record(run, BN_ERRORS), record(run, BN_ERRORS), record(run, BN_ERRORS[:2], end=None)])
    assert not any("counts for nothing" in note for note in results.accuracies(family).notes)  # copies say nothing else
    [family] = groups.families([record(run, BN_ERRORS), record(run, again)])
    assert "1 run has the settings and the seed of another that stands here, and counts for nothing." in (
        results.accuracies(family).notes
    )


def test_numbers_in_names_are_sorted_as_numbers():
    names = ["x/mn-10", "x/mn-2", "x/mn-1"]
    [family] = groups.families([record(config(name, epochs=4, mixture=MIXTURE), BN_ERRORS) for name in names])
    assert [group.label for group in family.groups] == ["mn-1", "mn-2", "mn-10"]


# Figures


def test_steps_to_batch_norms_best_by_hand():
    found = compared(pair())
    assert found.base_best.mean == pytest.approx(80)
    assert (found.steps.mean, found.base_steps.mean) == (3 * 195, 4 * 195)
    assert found.fewer_steps == pytest.approx(25)
    assert found.gain.mean == pytest.approx(5)
    assert (found.seconds.mean, found.base_seconds.mean) == (6.0, 8.0)


def test_seeds_are_paired():
    made = [
        *(
            record(config("bn", epochs=3, seed=seed), errors)
            for seed, errors in enumerate([[0.5, 0.4, 0.3], [0.5, 0.2, 0.3]])
        ),
        *(
            record(config("mn", epochs=3, seed=seed, mixture=MIXTURE), errors)
            for seed, errors in enumerate([[0.29, 0.3, 0.3], [0.5, 0.3, 0.16]])
        ),
    ]
    found = compared(made)
    assert found.steps.mean == 195 * (1 + 3) / 2
    assert found.base_steps.mean == 195 * (3 + 2) / 2
    gains = [71 - 70, 84 - 80]
    assert (found.gain.mean, found.gain.deviation) == pytest.approx((np.mean(gains), np.std(gains, ddof=1)))


def test_a_seed_without_its_batch_norm_is_held_against_the_mean_of_all():
    made = [
        *(record(config("bn", epochs=2, seed=seed), [0.5, best]) for seed, best in enumerate([0.2, 0.4])),
        record(config("mn", epochs=2, seed=7, mixture=MIXTURE), [0.31, 0.3]),
    ]
    found = compared(made)
    assert found.base_best.mean == pytest.approx(70)
    assert found.steps.mean == 2 * 195
    assert found.gain.mean == pytest.approx(0)


@pytest.mark.parametrize(
    ("mn", "seeds", "words"),
    [
        (MN_ERRORS, 2, "reached batch norm's best accuracy (80.00%) in 25% fewer steps (585 instead of 780), and its best "),
        (MN_ERRORS, 2, "5.00 ± 0.00 points higher (2 seeds). In training time that is 6.0 s instead of 8.0 s."),
        (MN_ERRORS, 1, "5.00 points higher (one seed, so the spread is not known)"),
        (
            [0.5, 0.4, 0.3, 0.25],
            1,
            "did not reach batch norm's best accuracy (80.00%) in 4 epochs: its best accuracy is 5.00",
        ),
        ([0.5, 0.4, 0.3, 0.25], 1, "points lower"),
        (BN_ERRORS, 2, "in as many steps (780 instead of 780), and its best accuracy is the same (2 seeds)"),
    ],
)
def test_the_answer_says_what_came_out(mn, seeds, words):
    [answer] = Outcome(pair(mn=mn, seeds=seeds)).answers
    assert words in answer


def test_the_answer_when_it_took_longer_or_only_some_seeds_got_there():
    slower = [
        record(config("bn", epochs=4), [0.5, 0.2, 0.3, 0.3]),
        record(config("mn", epochs=4, mixture=MIXTURE), BN_ERRORS),
    ]
    assert "in 100% more steps (780 instead of 390)" in Outcome(slower).answers[0]
    some = pair(seeds=2)
    some[-1] = record(some[-1].config, [0.5, 0.5, 0.5, 0.5])
    [answer] = Outcome(some).answers
    assert "in 1 of 2 runs" in answer
    assert "lower (2 seeds), which is within the spread of the seeds" in answer


def test_the_answer_says_where_fewer_steps_are_within_the_spread():
    """Batch norm gets to its best after 4, 4 and 2 epochs, mixture norm after 3, 3 and 4."""
    late, early = BN_ERRORS, [0.5, 0.2, 0.3, 0.3]
    made = []
    for seed, (bn, mn) in enumerate([(late, MN_ERRORS), (late, MN_ERRORS), (early, late)]):
        made += pair(bn, mn)
        made[-2:] = [dataclasses.replace(one, config=dataclasses.replace(one.config, seed=seed)) for one in made[-2:]]
    [answer] = Outcome(made).answers
    assert "in as many steps (650 instead of 650), and" in answer
    made[-1] = record(made[-1].config, [0.4, 0.25, 0.15, 0.15])  # after 3 epochs, too: 0.33 ± 1.15 epochs fewer
    [answer] = Outcome(made).answers
    assert "in 10% fewer steps (585 instead of 650, which is within the spread of the seeds), and" in answer


def test_the_answer_where_batch_norm_has_one_seed_alone():
    [answer] = Outcome(pair(seeds=3)[:2] + pair(seeds=3)[3::2]).answers
    assert "5.00 points higher (3 seeds, but one of batch norm, so the spread is not known)" in answer


def test_many_comparisons_say_how_many_are_beyond_the_spread():
    made = []
    for i, errors in enumerate([(0.15, 0.15), (0.15, 0.15), (0.1, 0.24), (0.3, 0.3)]):  # batch norm has 0.2
        for seed, error in enumerate(errors):
            made.append(record(config("bn", epochs=1, seed=seed, batch_size=8 + i), [0.2]))
            made.append(record(config("mn", epochs=1, seed=seed, batch_size=8 + i, mixture=MIXTURE), [error]))
    [answer] = Outcome(made).answers
    assert "in 3, its own best accuracy is higher (by 3.00 to 5.00 points), in 2 of these by more than the spread" in answer


def test_many_comparisons_have_one_sentence():
    made = []
    for i in range(5):
        for name, mixture, errors in (("bn", None, BN_ERRORS), ("mn", MIXTURE, MN_ERRORS if i else [0.9] * 4)):
            made.append(record(config(f"{name}-{i}", epochs=4, mixture=mixture, batch_size=8 + i), errors))
    [answer] = Outcome(made).answers
    assert "In 4 of 5 settings" in answer
    assert "25 to 25% fewer steps" in answer
    assert "in 4, its own best accuracy is higher (by 5.00 to 5.00 points); in 1, no run got there" in answer


def test_the_table_says_how_its_shares_are_made():
    """It has a share of the means, and the table of a document a mean of the shares."""
    [family] = groups.families(pair(seeds=2))
    assert any(note.startswith("Fewer steps and less time are of the means") for note in results.speed(family).notes)
    assert any("the share is a mean over the seeds" in note for note in claims.claims(family).notes)
    [alone] = groups.families([record(config("bn", epochs=4), BN_ERRORS)])
    assert not any("Fewer steps" in note for note in results.speed(alone).notes)


def test_accuracy_after_each_quarter():
    errors = list(np.linspace(0.9, 0.1, 20))
    errors[3] = 0.35  # the largest so far is not the last
    [family] = groups.families([record(config("bn", epochs=20), errors)])
    [row] = results.accuracies(family).rows
    assert [row[f"after {at}"].mean for at in (5, 10, 15, 20)] == pytest.approx(
        [100 - 100 * min(errors[:at]) for at in (5, 10, 15, 20)]
    )
    assert groups.quarters(100) == [25, 50, 75, 100]
    assert groups.quarters(2) == [1, 1, 1, 2]


def test_epochs_that_are_not_finite_do_not_count():
    errors = [0.5, None, 0.3, None]
    run = record(config("bn", epochs=4), errors)
    assert groups.accuracy(run) == pytest.approx(70)
    assert groups.reached(run, 70)["epoch"] == 3
    assert groups.accuracy(record(config("bn", epochs=2), [None, None])) is None


def test_refilled_statistics_have_tables_of_their_own():
    made = pair(seeds=2, recalibrated_error=lambda n: 0.1 / n)
    [family] = groups.families(made)
    table = results.accuracies(family, groups.RECALIBRATED)
    assert rows(table)["mn"]["after 4"].mean == pytest.approx(97.5)
    assert compared(made, groups.RECALIBRATED).gain.mean == pytest.approx(0)
    assert not any(group.has(groups.RECALIBRATED) for group in groups.families(pair())[0].groups)


def test_diverged_and_unfinished_runs_count_for_nothing_but_are_listed():
    made = pair(seeds=3)
    made[3] = record(made[3].config, [0.1, None], end="not finite", message="loss is nan at step 200")
    made[5] = record(made[5].config, [0.1], end=None)
    families = groups.families(made)
    row = rows(results.accuracies(families[0]))["mn"]
    assert row["seeds"] == "1 of 3"
    assert row["after 4"].mean == pytest.approx(85)
    listed = details.unfinished(families)
    assert [(r["seed"], r["state"], r["epochs"]) for r in listed.rows] == [
        (1, "diverged", "2 of 4"),
        (2, "running, or killed", "1 of 4"),
    ]
    assert listed.rows[0]["message"] == "loss is nan at step 200"
    notes = " ".join(results.accuracies(families[0]).notes)
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
    row = rows(results.accuracies(family))["mn"]
    assert row["after 2"].n == 3
    assert row["after 4"].n == row["after 4"].of == 2
    assert comparison.lead(group, base, groups.PLAIN, 2).n == 3
    steps = comparison.compare(group, base).steps
    assert (steps.n, comparison.saved_steps(group, base).n) == (3, 3)
    assert comparison.compare(group, base).gain.n == 2
    too_early = record(mn[2].config, [0.5, best[2] + 0.01], end=None)  # whether it would have got there is not known
    [family] = groups.families([*bn, *mn[:2], too_early])
    base, group = family.groups
    assert comparison.compare(group, base).steps.of == 2
    assert comparison.saved_steps(group, base).of == 2


def test_steps_to_a_little_less_than_the_best():
    """Batch norm is within half a point of its best in the second of four epochs, mixture norm in the first."""
    bn = record(config("a/bn", 4), [0.5, 0.204, 0.203, 0.2])
    mn = record(config("a/mn", 4, mixture=MIXTURE), [0.204, 0.2, 0.2, 0.2])
    [family] = groups.families([bn, mn])
    base, group = family.groups
    assert comparison.saved_steps(group, base).mean == pytest.approx(50)
    [row] = claims.claims(family).rows
    assert row["close"].mean == pytest.approx(50)
    mn = record(config("a/mn", 4, mixture=MIXTURE), [0.5, 0.5, 0.5, 0.206])
    [family] = groups.families([bn, mn])
    assert claims.claims(family).rows[0]["close"].mean is None


def test_the_lead_at_the_end_is_of_the_last_epoch():
    bn = record(config("a/bn", 3), [0.5, 0.1, 0.4])
    mn = record(config("a/mn", 3, mixture=MIXTURE), [0.5, 0.2, 0.3])
    [family] = groups.families([bn, mn])
    base, group = family.groups
    assert comparison.compare(group, base).gain.mean == pytest.approx(-10)
    assert comparison.lead_at_the_end(group, base).mean == pytest.approx(10)


def test_where_nothing_is_finished_the_epochs_there_are_count():
    made = [record(run.config, [e["test_error"] for e in run.epochs][:3], end="interrupted") for run in pair()]
    table = results.accuracies(groups.families(made)[0])
    assert rows(table)["mn"]["after 3"].mean == pytest.approx(80)
    assert rows(table)["mn"]["after 4"].mean is None
    assert any("not finished" in note for note in table.notes)


# The paper beside ours


def test_the_papers_figures_stand_beside_ours():
    made = [catalog_record(f"cifar-cnn/cifar100/{kind}") for kind in ("bn-2", "mn-2", "mn-8")]
    [family] = groups.families(made)
    accuracy, speed = rows(results.accuracies(family)), rows(results.speed(family))
    assert [accuracy["mn-8"][f"after {at}"].paper for at in (25, 50, 75, 100)] == [59.79, 61.67, 62.50, 62.96]
    assert speed["mn-8"]["steps"].paper == 10300
    assert speed["mn-8"]["fewer"].paper == pytest.approx(100 * (1 - 1.03 / 1.81))
    assert speed["mn-2"]["gain"].paper == pytest.approx(0.15)
    without = rows(results.accuracies(family, paper=False))
    assert without["mn-8"]["after 100"].paper is None


def test_a_shorter_training_is_not_held_against_the_paper():
    [family] = groups.families([catalog_record("cifar-cnn/cifar10/bn-2", epochs=20, precision="bf16")])
    table = results.accuracies(family)
    assert table.rows[0]["after 20"].paper is None
    assert any("epochs: 20, not 100" in note and "precision: bf16, not fp32" in note for note in table.notes)


def test_averaged_weights_are_not_held_against_the_paper():
    [family] = groups.families([catalog_record("cifar-cnn/cifar10/bn-2", average=0.9)])
    table = results.accuracies(family)
    assert table.rows[0]["after 100"].paper is None
    assert any("average: 0.9, not none" in note for note in table.notes)


def test_what_the_paper_never_reached_and_what_was_assumed():
    made = [catalog_record(f"inception-v3/cifar100/{kind}") for kind in ("bn-1", "mn-1", "nesterov-mn-1")]
    by_epochs = {family.epochs: family for family in groups.families(made)}
    assert rows(results.speed(by_epochs[200]))["mn-1"]["steps"].paper == "never"
    assert any("MN-4" in note for note in results.accuracies(by_epochs[150]).notes)


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
