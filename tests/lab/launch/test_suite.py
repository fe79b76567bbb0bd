"""Many runs in one folder: skipped, resumed, failed, at once."""

import dataclasses
import io
import multiprocessing
import os
import shutil
import struct
import sys
import types

import pytest
import torch
from cli_helpers import measured

from mixnorm_lab.config.parts.mixture import Mixture
from mixnorm_lab.config.presets import DIGITS, OWN, pair, with_norm
from mixnorm_lab.launch import local_processes
from mixnorm_lab.launch.display import RunDisplay
from mixnorm_lab.launch.one_run import Forwarded
from mixnorm_lab.launch.suite import Suite
from mixnorm_lab.storage import checkpoint, records
from mixnorm_lab.storage.folders import run_folder, run_name
from mixnorm_lab.storage.lock import locked
from mixnorm_lab.training.progress import Silent

OPTIONS = {"num_components": 2, "em_iters": 1, "backend": "reference"}
SETTINGS = dataclasses.replace(DIGITS, epochs=1, batch_size=256, mixture=Mixture(("conv2",), OPTIONS))
NOT_FINITE = "the loss of the first batch, before any update, is not finite, which began with the output of 0"
MODULE = """
import os
import torch
from torch import nn

def build():
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)
    if torch.initial_seed() == 1:  # an unlucky beginning
        nn.init.constant_(layers[0].weight, float("inf"))
    return nn.Sequential(*layers)

def dies():
    if torch.initial_seed() == 0:
        os._exit(9)
    if torch.initial_seed() == 2 and not os.path.exists("died"):
        open("died", "w").close()
        os._exit(9)
    return build()

def loaders():
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(6, 1, 4, 4, generator=generator), torch.arange(6) % 3) for _ in range(2)]
    return batches, batches

def wrong_labels():
    batches = [(torch.randn(6, 1, 4, 4), torch.arange(6)) for _ in range(2)]
    return batches, batches
"""


@pytest.fixture
def users(tmp_path, monkeypatch):
    """Settings with functions of a module in the current folder."""
    name = f"users_suite_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def settings(build="build", loaders="loaders"):
        mixture = Mixture(("*",), OPTIONS)
        return dataclasses.replace(OWN, model=f"{name}:{build}", data=f"{name}:{loaders}", epochs=1, mixture=mixture)

    yield settings
    sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two norms with two seeds, one after the other."""
    folder = tmp_path_factory.mktemp("suite")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert run(pair(SETTINGS, 2), folder)[0] == {}
    torch.set_num_threads(threads)
    return folder


def run(configs, folder, **options):
    """The failures, and what was shown."""
    shown = io.StringIO()
    with RunDisplay([run_name(config) for config in configs], shown) as display:
        failed = Suite(configs, folder).run(device=torch.device("cpu"), display=display, **options)
    return failed, shown.getvalue()


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_every_run_has_a_folder(finished):
    folders = [path.relative_to(finished).as_posix() for path in sorted(finished.glob("*/*"))]
    assert folders == [f"{norm}/seed-{seed}" for norm in ("batch-norm", "mixture-norm") for seed in (0, 1)]
    assert all(record.finished and len(record.epochs) == 1 for record in records.find(finished))


def test_what_is_done_is_not_done_again(finished):
    before = contents(finished)
    failed, shown = run(pair(SETTINGS, 2), finished)
    assert not failed
    assert shown.count(": finished earlier, ") == 4
    steps = records.find(finished)[0].epochs[0]["steps"]
    assert shown.count(f"1 epoch of {steps} steps, 1 of them done") == 4
    assert contents(finished) == before


def test_the_record_of_a_finished_run_is_read_once(finished, monkeypatch):
    read = []
    monkeypatch.setattr(records, "read", lambda path, plain=records.read: read.append(path) or plain(path))
    suite = Suite(pair(SETTINGS, 2), finished)
    suite.check()
    with RunDisplay([run_name(config) for config in suite.configs], io.StringIO()) as display:
        assert suite.run(device=torch.device("cpu"), display=display) == {}
    assert all(record.finished for record in suite.recorded_now())
    assert len(read) == len(set(read)) == 4


def test_a_folder_of_another_configuration_is_refused_before_anything_runs(finished):
    before = contents(finished)
    other = dataclasses.replace(SETTINGS, optimizer=dataclasses.replace(SETTINGS.optimizer, lr=0.5))
    with pytest.raises(ValueError, match=r"another configuration \(optimizer.lr: 0.003, not 0.5\): choose another --out"):
        Suite(pair(other, 2), finished).check()
    assert contents(finished) == before


def test_what_is_done_needs_no_data(finished, monkeypatch):
    monkeypatch.setattr("mixnorm_lab.training.build._dataset", lambda *_: pytest.fail("read"))
    Suite(pair(SETTINGS, 2), finished).check()


def test_a_loss_that_is_not_finite_ends_its_run_and_not_the_others(users, tmp_path):
    configs = pair(users(), 3)
    Suite(configs, tmp_path).check()
    failed, shown = run(configs, tmp_path / "out")
    assert set(failed) == {"batch-norm seed 1", "mixture-norm seed 1"}
    for failure in failed.values():
        assert failure.sentence.startswith(NOT_FINITE)
        assert "NotFinite" in failure.trace
    assert "batch-norm seed 1: not finite" in shown
    found = records.find(tmp_path / "out")
    assert [record.config.seed for record in found if record.finished] == [0, 2, 0, 2]
    assert {record.reason for record in found} == {"finished", "not finite"}


def test_several_at_once_measure_the_same_to_the_bit_whatever_happens_beside_them(finished, users, tmp_path, monkeypatch):
    """One run kills its process each time, another once, one diverges, and the rest is as if they had not been there."""
    monkeypatch.setattr("mixnorm_lab.launch.run_queue.RETRIES", 1)
    others = [with_norm(users(build="dies"), "own", seed, mixture=False) for seed in (0, 1, 2)]
    failed, shown = run([*others, *pair(SETTINGS, 2)], tmp_path / "out", jobs=2)
    assert set(failed) == {"own seed 0", "own seed 1"}
    assert (
        failed["own seed 0"].sentence
        == "its process ended with code 9, as often as it was tried: run the command again to go on"
    )
    assert failed["own seed 1"].sentence.startswith(NOT_FINITE)
    assert "NotFinite" in failed["own seed 1"].trace
    assert "own seed 0: failed" in shown
    assert "own seed 1: not finite" in shown
    assert "own seed 2: finished" in shown
    assert (tmp_path / "died").exists()
    assert all(f"{run_name(config)}: finished after" in shown for config in pair(SETTINGS, 2))
    shutil.rmtree(tmp_path / "out" / "own")
    assert measured(tmp_path / "out") == measured(finished)
    assert {record.environment["threads"] for record in records.find(tmp_path / "out")} == {1}


def test_what_a_users_code_raises_while_it_trains_is_a_sentence(users, tmp_path):
    failed, shown = run(pair(users(loaders="wrong_labels"), 1), tmp_path / "out")
    assert len({failure.sentence for failure in failed.values()}) == 1
    assert "wrong_labels failed with IndexError: Target" in failed["batch-norm seed 0"].sentence
    assert "batch-norm seed 0: failed" in shown


def test_a_batch_that_is_larger_than_the_data(tmp_path):
    failed, shown = run(pair(dataclasses.replace(SETTINGS, batch_size=5000), 1), tmp_path)
    assert all("makes no batch of 1,4" in failure.sentence for failure in failed.values())
    assert shown.count(": failed after") == len(failed) == 2


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_folder_in_use_stops_everything(jobs, users, tmp_path):
    configs = pair(users(), 2)
    in_use = pytest.raises(OSError, match=f"is in use by process {os.getpid()}: wait until it is done")
    with locked(run_folder(tmp_path / "out", configs[0])), in_use:
        run(configs, tmp_path / "out", jobs=jobs)
    assert not run(pair(users(), 1), tmp_path / "out")[0]  # and then it is free


def test_a_damaged_checkpoint_concerns_its_run_alone(users, tmp_path, monkeypatch):
    configs = pair(users(), 1)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mixnorm_lab.training.run.Events.epoch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(configs, tmp_path / "out")
    path = run_folder(tmp_path / "out", configs[0]) / checkpoint.NAME
    damaged = path.read_bytes()[:-100]
    path.write_bytes(damaged)
    Suite(configs, tmp_path / "out").check()
    failed, _ = run(configs, tmp_path / "out")
    assert list(failed) == ["batch-norm seed 0"]
    assert "checkpoint.pt is damaged" in failed["batch-norm seed 0"].sentence
    assert path.read_bytes() == damaged
    path.unlink()  # as it says
    assert not run(configs, tmp_path / "out")[0]


def test_steps_are_told_now_and_then():
    class Parent:
        def __init__(self):
            self.sent = []

        def send(self, *message):
            self.sent.append(message)

    parent = Parent()
    forwarded = Forwarded(parent.send)
    forwarded.start("run", 2, 1000, 0)
    for step in range(1000):
        forwarded.step(step)
    forwarded.epoch({"epoch": 1, "test_error": 0.5})
    forwarded.end("finished")
    assert [message[0] for message in parent.sent if message[0] != "step"] == ["start", "epoch", "end"]
    assert 1 <= len(parent.sent) - 3 < 10
    for what, values in parent.sent:
        getattr(Silent(), what)(*values)


def test_a_process_that_is_killed_in_the_middle_of_a_message_is_lost():
    worker = object.__new__(local_processes._Worker)
    worker.messages, theirs = multiprocessing.Pipe()
    worker.process = multiprocessing.get_context("spawn").Process()
    worker.process.join, worker.process._popen = lambda: None, types.SimpleNamespace(poll=lambda: -9)
    os.write(theirs.fileno(), struct.pack("!i", 1000) + b"the first bytes of a thousand")
    theirs.close()
    assert worker.receive() == ("lost", "its process ended with code -9")
