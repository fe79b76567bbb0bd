"""``mixnorm bench start``: new processes with empty caches, of which some take too long."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mixnorm_lab.bench import display, goals, run
from mixnorm_lab.bench.cases import all_cases, cpu_cases, gpu_cases
from mixnorm_lab.bench.run import BenchOptions
from mixnorm_lab.bench.steps import Variant
from mixnorm_lab.bench.whole import first_step, start

BATCH_NORM, MIXTURE = Variant("batch_norm"), Variant("reference", 3, "gated")


def of_start(cases):
    return [case for case in cases if case.benchmark == "start"]


def resnet():
    return next(case for case in of_start(gpu_cases()) if case.model == "resnet-18")


@pytest.fixture
def process(monkeypatch):
    """Puts a program in place of the one that trains."""
    return lambda program: monkeypatch.setattr(start, "COMMAND", (sys.executable, "-c", program))


def test_a_new_process_trains_for_a_step_with_either_norm():
    [case] = of_start(all_cases("cpu", quick=True))
    for variant in (BATCH_NORM, MIXTURE):
        found, failure = start.measure(case, variant, "cpu", 120)
        assert failure == ""
        assert 0 < found["first-step"] < found["with-import"]


def test_batch_norm_does_without_the_library():
    code = "import sys, mixnorm_lab.bench.whole.models; print('mixnorm' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_caches_are_empty_and_of_this_process_alone(process, tmp_path, monkeypatch):
    for name in start.CACHES:
        monkeypatch.setenv(name, str(tmp_path))
    seen = tmp_path / "seen.json"
    process(f"import json, os; json.dump(dict(os.environ), open({str(seen)!r}, 'w'))")
    start.measure(resnet(), BATCH_NORM, "cpu", 60)
    environment = json.loads(seen.read_text())
    folders = {environment[name] for name in start.CACHES}
    assert len(folders) == 3
    assert str(tmp_path) not in folders
    assert not any(os.path.exists(folder) for folder in folders)  # gone with the process
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(Path(start.__file__).parents[3])


def test_a_process_that_takes_too_long_is_ended_and_what_came_before_is_kept(process):
    process("import time; print('first-step 1.5\\nwith-import 4.0', flush=True); time.sleep(600)")
    before = time.monotonic()
    found, failure = start.measure(resnet(), BATCH_NORM, "cuda", 2.0)
    assert time.monotonic() - before < 60
    assert found == {"first-step": 1.5, "with-import": 4.0}
    assert failure == "it was not there after 2 seconds, when the process was ended"


def test_a_process_that_fails_says_why(process):
    process("print('a warning of someone else'); raise RuntimeError('no kernel image')")
    assert start.measure(resnet(), BATCH_NORM, "cuda", 60) == ({}, "RuntimeError: no kernel image")


def rows_of(monkeypatch, case, answers):
    monkeypatch.setattr(start, "measure", lambda case, variant, device, limit: answers[variant.name])
    return [
        row | {"device": "a GPU", "torch": "2.11", "triton": "3.6", "commit": "", "date": "2026-01-01"}
        for row in run.measure_case(case, "triton", BenchOptions("cuda"), math.inf, lambda _: None)
    ]


ANSWERS = {
    "batch_norm": ({"first-step": 2.0, "with-import": 6.0, "compile": 30.0}, ""),
    "triton": ({"first-step": 4.0, "with-import": 9.0}, "it was not there after 300 seconds, when the process was ended"),
}


def test_a_row_for_each_figure(monkeypatch):
    rows = rows_of(monkeypatch, resnet(), ANSWERS)
    assert [(row["series"], row["mode"], row["variant"], row["time_ms"], row["ratio"]) for row in rows] == [
        ("first-step", "eager", "batch_norm", 2e3, 1),
        ("first-step", "eager", "triton gated", 4e3, 2),
        ("with-import", "eager", "batch_norm", 6e3, 1),
        ("with-import", "eager", "triton gated", 9e3, 1.5),
        ("compile", "compiled", "batch_norm", 3e4, 1),
        ("compile", "compiled", "triton gated", None, None),
    ]
    assert [bool(row["failure"]) for row in rows] == [False] * 5 + [True]
    assert all(row["case"] == "resnet-18-b256" for row in rows)


def test_goals_are_seconds_for_the_first_step_and_a_ratio_for_the_compilation(monkeypatch):
    rows = rows_of(monkeypatch, resnet(), ANSWERS)
    assert [goals.seconds_goal(row) for row in rows] == [None, 5, None, None, None, None]
    assert goals.seconds_goal({**rows[1], "mode": "cpu"}) == 10
    assert [goals.goal(row, rows) for row in rows] == [None] * 5 + [1.5]
    [table] = display.tables(rows)
    assert [row["time"] for row in table.rows] == ["2.0 s", "4.0 s", "6.0 s", "9.0 s", "30.0 s", "failed"]
    assert (table.rows[1]["goal"], table.rows[1]["met"]) == ("≤ 5 s", "✓")


def test_what_is_left_of_the_time_is_shared_out(monkeypatch):
    limits = []
    monkeypatch.setattr(start, "measure", lambda case, variant, device, limit: limits.append(limit) or ({}, "ended"))
    deadline = time.monotonic() + 20
    rows = list(run.measure_case(resnet(), "triton", BenchOptions("cuda"), deadline, lambda _: None))
    assert {row["failure"] for row in rows} == {"ended"}
    assert 5 < limits[0] <= 10  # the other half is for the other norm
    assert 10 < limits[1] <= 20
    list(run.measure_case(resnet(), "triton", BenchOptions("cuda"), math.inf, lambda _: None))
    assert limits[2:] == [start.LIMIT] * 2


def test_resnet_18_and_inception_are_compiled_on_either_device():
    for cases in (gpu_cases(), cpu_cases()):
        found = {case.model: case.mode == "compiled" for case in of_start(cases)}
        assert found == {"cifar-cnn": False, "resnet-18": True, "inception-v3": True}


def test_what_is_compiled_is_a_new_model_after_the_first_step(monkeypatch, capsys):
    import torch

    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    job = {
        "began": time.time(),
        "device": "cpu",
        "model": "digits-cnn",
        "shape": [8, 1, 8, 8],
        "bf16": False,
        "compile": True,
    }
    first_step.main(job | {"mixture": {"num_components": 2, "backend": "reference"}, "form": "gated"})
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["first-step", "with-import", "compile"]
    assert len(compiled) == 1


def test_the_picture_has_seconds_with_goals(monkeypatch):
    plots = pytest.importorskip("mixnorm_lab.bench.plots")
    answers = {**ANSWERS, "triton": ({"first-step": 4.0, "with-import": 9.0, "compile": 40.0}, "")}
    rows = rows_of(monkeypatch, resnet(), answers)
    with plots.mpl.rc_context(plots.STYLE):
        figure = plots.whole.start(rows)
        figure.draw_without_rendering()
    assert [[text.get_text() for text in axis.texts] for axis in figure.axes] == [
        ["2.0", "4.0"],
        ["6.0", "9.0"],
        ["30.0", "40.0"],
    ]
    marks = [[float(line.get_segments()[0][0][1]) for line in axis.collections] for axis in figure.axes]
    assert marks == [[5.0], [], [45.0]]
