"""Runs, records and reports of version 0.1: its checkpoints are resumed, and its records reported on as they were then."""

import json
import shutil

import pytest
import torch
from version_helpers import FOLDER, same_machine
from version_lab_helpers import COMPARISONS, FOLDERS, MODULE, RUNS, ended, lines, measured, report, start

LAB = FOLDER / "lab"
# Statistics are taken about each component's own mean since then, and other machines have other instructions: the last bit
# of the first step grows with each of the next ones. Training losses were found to differ by 0.7% after three epochs, and
# test losses, in the middle of a training, by 4%.
ALIKE = ("epoch", "steps", "learning_rate", "components")
LOSSES, ERRORS = 0.01, 0.01  # relative, and of all test images


def assert_same(found, expected, tolerance=0.0):
    """Equality of JSON, with floats to the bit on a machine like the one that made it."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same(found[name], value, tolerance)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_same(*pair, tolerance)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance)
    else:
        assert found == expected


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_of_version_0_1_is_resumed(name, tmp_path):
    """To the end of the run that was never interrupted."""
    folder = tmp_path / FOLDERS[name]
    folder.mkdir(parents=True)
    shutil.copy(LAB / MODULE, tmp_path)
    shutil.copy(LAB / name / "checkpoint.pt", folder)
    shutil.copy(LAB / name / "interrupted.jsonl", folder / "record.jsonl")
    before = lines(folder / "record.jsonl")
    done = torch.load(folder / "checkpoint.pt", weights_only=True)["epoch"]
    assert done >= 1
    ended(start(*RUNS[name], cwd=tmp_path))

    after = lines(folder / "record.jsonl")
    assert after[: len(before)] == before
    assert (after[len(before)]["kind"], after[len(before)]["epoch"]) == ("resume", done)
    assert (after[-1]["kind"], after[-1]["reason"]) == ("end", "finished")
    found, expected = measured(folder / "record.jsonl"), measured(LAB / name / "whole.jsonl")
    assert found[:done] == expected[:done]
    for ours, theirs in zip(found, expected, strict=True):
        assert {key: ours[key] for key in ALIKE} == {key: theirs[key] for key in ALIKE}
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            if key == "train_loss":
                assert ours[key] == pytest.approx(value, rel=LOSSES)
            elif key == "train_error" or (key == "test_error" and name == "digits"):
                assert ours[key] == pytest.approx(value, abs=ERRORS)


@pytest.mark.parametrize("name", COMPARISONS)
def test_records_of_version_0_1_are_reported_on(name, tmp_path):
    """The page's tables, of classifiers and of generators; what came out is told with more certainty since then."""
    shutil.copytree(LAB / name / "out", tmp_path / "out")
    expected = json.loads((LAB / name / "report.json").read_text(encoding="utf-8"))
    found = report(tmp_path / "out")
    if name == "ring":  # the means of a few numbers, which differ by no more than their rounding
        assert_same(found, expected, 0 if same_machine() else 1e-9)
        return
    first = expected["page"].index(f"### {expected['tables'][1]['title']}")  # steps to a target that is another one now
    runs = next(i for i, line in enumerate(expected["page"]) if line.startswith("| run | seed |"))
    every = [line.split(" | ") for line in found["page"] if "/seed-" in line]
    assert set(expected["page"][:first]) <= set(found["page"])
    assert set(expected["page"][first + 5 : runs]) <= set(found["page"])
    assert set(expected["page"][runs + 6 :]) <= set(found["page"])
    for line, ours in zip(expected["page"][runs + 2 : runs + 6], every, strict=True):
        run, seed, epochs, best, in_epoch, last, *times, folder = line.split(" | ")
        assert ours == [run, seed, epochs, last, best, in_epoch, *times, folder]
