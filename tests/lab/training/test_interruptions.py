"""Runs that are cut off, or meet a folder that cannot be used: nothing is lost, and the end is the same to the bit."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import run_helpers
import torch
from run_helpers import Interrupt, build, config, lines, numbers, run, same, weights
from torch import nn

from mixnorm_lab.config.parts.optimizer import Optimizer, Schedule
from mixnorm_lab.storage import checkpoint, records
from mixnorm_lab.storage.lock import locked, wait_until_free
from mixnorm_lab.training.progress import Silent

EPOCHS = 16  # of the runs that are interrupted


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The figures and the weights that every interrupted run must end with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    record, model = run(config(epochs=EPOCHS), tmp_path_factory.mktemp("run"))
    torch.set_num_threads(threads)
    return numbers(record), weights(model)


@pytest.mark.parametrize("moment", [1, 4, 17, 45])
def test_an_interrupted_run_resumes_to_the_same_bit(moment, tmp_path, uninterrupted):
    with pytest.raises(KeyboardInterrupt):
        run(config(epochs=EPOCHS), tmp_path, progress=Interrupt(moment))
    # Other initial weights: those of the run are in its checkpoint.
    record, model = run(config(epochs=EPOCHS), tmp_path, model=build(config(), seed=9))
    assert record.finished
    assert (numbers(record), True) == (uninterrupted[0], same(weights(model), uninterrupted[1]))
    # Ctrl-C costs no more than its epoch.
    assert [line["epoch"] for line in lines(tmp_path) if line["kind"] == "resume"] == [(moment - 1) // 4]


@pytest.mark.parametrize("optimizer", ["nesterov", "adamw"])
def test_a_schedule_by_steps_resumes_to_the_same_bit(optimizer, tmp_path):
    """The rates of the steps are those of a training without the interruption."""
    settings = {"label_smoothing": 0.1, "schedule": Schedule("one-cycle")}
    settings["optimizer"] = Optimizer(optimizer, 0.02, 5e-4, decayed="weights")
    whole, model = run(config(**settings), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(config(**settings), tmp_path / "cut", progress=Interrupt(7))
    record, resumed = run(config(**settings), tmp_path / "cut")
    assert numbers(record) == numbers(whole)
    assert same(weights(model), weights(resumed))


def test_a_killed_run_resumes_to_the_same_bit(tmp_path, uninterrupted):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, run_helpers.__file__, str(tmp_path), str(EPOCHS)], env=environment)
    path, deadline = tmp_path / records.NAME, time.monotonic() + 60
    try:
        while not path.exists() or path.read_bytes().count(b'"kind": "epoch"') < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.013)  # somewhere in an epoch, an evaluation or a checkpoint
    finally:
        process.kill()
        process.wait()
    assert not records.read(path).finished
    record, model = run(config(epochs=EPOCHS), tmp_path)
    assert numbers(record) == uninterrupted[0]
    assert same(weights(model), uninterrupted[1])
    assert any(line["kind"] == "resume" and line["epoch"] >= 2 for line in lines(tmp_path))


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread alone")
def test_sigterm_leaves_a_folder_that_can_be_used(tmp_path, uninterrupted):
    class Terminate(Silent):
        def step(self, done):
            if done == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        run(config(epochs=EPOCHS), tmp_path, progress=Terminate())
    assert signal.getsignal(signal.SIGTERM) is before
    assert records.read(tmp_path / records.NAME).reason == "interrupted"
    record, model = run(config(epochs=EPOCHS), tmp_path)
    assert numbers(record) == uninterrupted[0]
    assert same(weights(model), uninterrupted[1])


def test_ctrl_c_is_recorded_and_raised(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(config(), tmp_path, progress=Interrupt(6))
    record = records.read(tmp_path / records.NAME)
    assert (record.reason, len(record.epochs)) == ("interrupted", 1)
    state = checkpoint.read(tmp_path)
    assert state["epoch"] == 1
    assert state["model"]._metadata["1"] == {"version": 1}  # as any state dict has it


@pytest.mark.parametrize("cut", [b"", b'{"kind": "run", "ver'])
def test_a_run_that_was_killed_at_its_very_start_begins_anew(cut, tmp_path):
    (tmp_path / records.NAME).write_bytes(cut)
    record, _ = run(config(epochs=1), tmp_path)
    assert record.finished


def test_a_finished_folder_is_returned_at_once(tmp_path):
    record, _ = run(config(), tmp_path)
    content = (tmp_path / records.NAME).read_bytes()
    again, model = run(config(name="another name"), tmp_path)
    assert again.epochs == record.epochs
    assert same(weights(model), weights(build(config())))
    assert (tmp_path / records.NAME).read_bytes() == content


# --- what goes wrong ----------------------------------------------------------------------------------------------------


def test_a_folder_of_another_configuration_is_refused(tmp_path):
    run(config(), tmp_path)
    content = (tmp_path / records.NAME).read_bytes()
    with pytest.raises(
        ValueError, match=r"another configuration \(.*optimizer.lr: 0.005, not 0.1.*\): choose another folder"
    ):
        run(config(optimizer=Optimizer("rmsprop", 0.1, 2e-5)), tmp_path)
    assert (tmp_path / records.NAME).read_bytes() == content


def test_a_run_need_not_be_resumed(tmp_path):
    run(config(epochs=1), tmp_path)
    with pytest.raises(ValueError, match="already holds a run: choose another folder"):
        run(config(epochs=1), tmp_path, resume=False)


def test_a_damaged_checkpoint_says_what_to_do_which_works(tmp_path):
    whole, _ = run(config(), tmp_path / "whole")
    folder = tmp_path / "damaged"
    with pytest.raises(KeyboardInterrupt):
        run(config(), folder, progress=Interrupt(14), checkpoint_seconds=0)
    path = folder / checkpoint.NAME
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{checkpoint.NAME} is damaged.*delete it to go on from {checkpoint.PREVIOUS}"):
        run(config(), folder)
    path.unlink()
    record, _ = run(config(), folder)
    assert numbers(record) == numbers(whole)
    assert [line["epoch"] for line in lines(folder) if line["kind"] == "resume"] == [2]


def test_a_checkpoint_that_does_not_fit_the_model(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(config(), tmp_path, progress=Interrupt(5))
    model = build(config())
    model[8] = nn.Linear(128, 11)
    with pytest.raises(ValueError, match="does not fit the model"):
        run(config(), tmp_path, model=model)


def test_two_runs_in_one_folder_at_once(tmp_path):
    errors = []

    class Second(Silent):
        def step(self, done):
            if not errors:
                with pytest.raises(OSError, match=f"is in use by process {os.getpid()}: wait") as caught:
                    run(config(), tmp_path)
                errors.append(caught.value)

    record, _ = run(config(epochs=1), tmp_path, progress=Second())
    assert errors
    assert record.finished


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_child_that_outlives_its_process_does_not_hold_the_folder(tmp_path):
    """As a loader's worker may, for seconds, when the process that trains is killed."""
    there, here = os.pipe()
    with locked(tmp_path):
        child = os.fork()
        if child == 0:
            os.write(here, b"!")
            time.sleep(60)
            os._exit(0)
        os.read(there, 1)
        with pytest.raises(OSError, match="is in use"), locked(tmp_path):
            pass
    try:
        with locked(tmp_path):
            assert os.waitpid(child, os.WNOHANG) == (0, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_waiting_for_a_folder(tmp_path):
    wait_until_free(tmp_path / "of a run that never began", 60)
    with locked(tmp_path):
        start = time.monotonic()
        wait_until_free(tmp_path, 0.1)
        assert 0.1 <= time.monotonic() - start < 30
        release = threading.Event()

    def hold():
        with locked(tmp_path):
            held.set()
            release.wait(60)

    held, start = threading.Event(), time.monotonic()
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    threading.Timer(0.2, release.set).start()
    wait_until_free(tmp_path, 60)
    holder.join()
    assert 0.2 <= time.monotonic() - start < 30


@pytest.mark.parametrize("below", ["", "inside"])
def test_a_folder_that_cannot_be_written(below, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be written \(.*\): choose another folder"):
        run(config(), tmp_path / "file" / below)


@pytest.mark.parametrize("call", [1, 4, 5])
def test_a_disk_that_fills_up_loses_nothing(call, tmp_path, monkeypatch, uninterrupted):
    """At the first checkpoint, and at either of the two renames of the third."""
    replace, calls = os.replace, []

    def until_it_is_full(*paths):
        calls.append(paths)
        if len(calls) >= call:
            raise OSError(28, "No space left on device")
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", until_it_is_full)
        with pytest.raises(OSError, match=r"cannot be written \(No space left on device\).*make room"):
            run(config(epochs=EPOCHS), tmp_path, checkpoint_seconds=0)
    record, model = run(config(epochs=EPOCHS), tmp_path)
    assert numbers(record) == uninterrupted[0]
    assert same(weights(model), uninterrupted[1])
