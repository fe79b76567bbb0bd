"""The table of ways of inference: what benchmarks/average.py wrote, over the evaluations and the seeds."""

import csv

import pytest

from mixnorm_lab.reports.tables import inference
from mixnorm_lab.reports.tables.inference import Evaluation


def row(seed, step, running, refilled, decay=0.9, way="steady", history=40):
    return Evaluation("forms/cifar100/all-layers", seed, step, decay, way, history, 20, running, refilled)


ROWS = [
    row(0, 100, 10.0, 14.0),
    row(0, 200, 20.0, 21.0),
    row(1, 100, 12.0, 12.0),
    row(1, 200, 22.0, 24.0),
    row(0, 100, 5.0, 9.0, decay=0.0),
]


def write(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / inference.NAME
    assert inference.read(path) == []
    write(path, [inference.COLUMNS, *([getattr(one, name) for name in inference.COLUMNS] for one in ROWS)])
    assert inference.read(path) == ROWS


@pytest.mark.parametrize("rows", [[("a", "b"), (1, 2)], [inference.COLUMNS, ["x"] * 9], [inference.COLUMNS, ["x"] * 3]])
def test_another_file_is_told(tmp_path, rows):
    write(tmp_path / inference.NAME, rows)
    with pytest.raises(ValueError, match=r"is not a table of benchmarks/average\.py: write it again"):
        inference.read(tmp_path / inference.NAME)


def test_means_are_over_evaluations_and_spreads_over_seeds():
    averaged, last = inference.table(ROWS).rows
    assert averaged["running"].mean == pytest.approx((15 + 17) / 2)
    assert averaged["running"].deviation == pytest.approx(2**0.5)
    assert averaged["refilled"].mean == pytest.approx((17.5 + 18) / 2)
    assert averaged["most"].mean == pytest.approx((4 + 2) / 2)
    assert (averaged["seeds"], last["seeds"]) == (2, 1)
    assert last["decay"] == "last weights"


def test_the_commands_measure_it_again():
    first, second = inference.commands(ROWS)
    options = "--decays 0.9 --inferences steady --histories 40 --refill 20 --steps 200 --every 100"
    start = "python benchmarks/average.py --folder OFFICIAL_FILES --experiment forms/cifar100/all-layers"
    assert first == f"{start} {options} --seed 0 --out inference.csv"
    assert second == f"{start} {options} --seed 1 --out inference.csv"
