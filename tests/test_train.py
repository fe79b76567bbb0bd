"""The trainer: it learns, an interruption changes nothing, and what goes wrong is said in a sentence."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import run_helpers
import torch
from run_helpers import DIGITS, build, config, run
from torch import nn

from mixnorm.data.resident import Resident
from mixnorm.experiments import checkpoint, records
from mixnorm.experiments import config as settings
from mixnorm.experiments.progress import Silent
from mixnorm.experiments.schedule import build_optimizer, set_rate
from mixnorm.experiments.source import Loaders
from mixnorm.experiments.watch import NotFinite

CPU = torch.device("cpu")
EPOCHS = 16  # of the runs that are interrupted


@pytest.fixture(autouse=True)
def one_thread():
    """Sums are added up in the same order, whatever else runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def figures(record):
    """What a run measured, without the time that it took."""
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in record.epochs]


def lines(folder):
    return [json.loads(line) for line in (folder / records.NAME).read_text().splitlines()]


class Interrupt(Silent):
    """Raises at a step, counted over the whole run."""

    def __init__(self, at, error=KeyboardInterrupt):
        self.left, self.error = at, error

    def step(self, done):
        self.left -= 1
        if self.left == 0:
            raise self.error


# --- optimizers and schedules -------------------------------------------------------------------------------------------


def train_on_numbers(optimizer, parameter, gradients):
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    return parameter.detach().numpy()


def test_rmsprop_is_the_rule_of_the_papers_framework():
    """Chainer: ms = α·ms + (1 − α)·g², p = p − lr·g / (√ms + ε); its weight decay adds rate·p to g first."""
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=7), rng.normal(size=(20, 7))
    parameter = nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = build_optimizer([parameter], settings.Optimizer("rmsprop", 0.01, 0.1, smoothing=0.8), CPU)
    p, ms = start.copy(), np.zeros(7)
    for g in gradients:
        g = g + 0.1 * p
        ms = 0.8 * ms + 0.2 * g * g
        p = p - 0.01 * g / (np.sqrt(ms) + 1e-8)
    np.testing.assert_allclose(train_on_numbers(optimizer, parameter, gradients), p, rtol=1e-12)


def test_nesterov_looks_ahead():
    """v = μ·v + g, p = p − lr·(g + μ·v), with the weight decay in g."""
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=7), rng.normal(size=(20, 7))
    parameter = nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = build_optimizer([parameter], settings.Optimizer("nesterov", 0.01, 0.1, momentum=0.8), CPU)
    p, v = start.copy(), np.zeros(7)
    for g in gradients:
        g = g + 0.1 * p
        v = 0.8 * v + g
        p = p - 0.01 * (g + 0.8 * v)
    np.testing.assert_allclose(train_on_numbers(optimizer, parameter, gradients), p, rtol=1e-12)


def test_adams_first_step_is_the_learning_rate():
    parameter = nn.Parameter(torch.zeros(3))
    build = build_optimizer([parameter], settings.Optimizer("adam", 0.01), CPU)
    moved = train_on_numbers(build, parameter, np.array([[5.0, -0.1, 2.0]], dtype=np.float32))
    np.testing.assert_allclose(moved, [-0.01, 0.01, -0.01], rtol=1e-5)


def test_parameters_that_do_not_train_are_left_out_and_the_rate_can_change():
    frozen, parameter = nn.Parameter(torch.ones(1), requires_grad=False), nn.Parameter(torch.ones(1))
    optimizer = build_optimizer([frozen, parameter], settings.Optimizer("nesterov", 0.5, momentum=0.0), CPU)
    set_rate(optimizer, 0.25)
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert (frozen.item(), parameter.item()) == (1.0, 0.75)


def test_the_schedule_is_followed(tmp_path):
    record, _ = run(config(schedule=settings.Schedule("step", factor=0.1, at=(0.5, 0.75))), tmp_path)
    assert [row["learning_rate"] for row in record.epochs] == pytest.approx([0.005, 0.005, 0.0005, 0.00005])


# --- training -----------------------------------------------------------------------------------------------------------


def digits():
    """As they are: crops and flips are for the tests of interruptions."""
    return Resident(DIGITS, 64, device="cpu", augment=False)


def test_it_learns_digits_and_records_it(tmp_path):
    told = []

    class Listener(Silent):
        def step(self, done):
            told.append(done)

    record, model = run(config(epochs=10, recalibrate=3), tmp_path, source=digits(), progress=Listener())
    first, last = record.epochs[0], record.epochs[-1]
    assert record.finished
    assert last["train_loss"] < 0.3 * first["train_loss"]
    assert last["recalibrated_error"] < 0.25  # of ten classes
    assert (last["epoch"], last["steps"]) == (10, 40)
    assert told == [1, 2, 3, 4] * 10
    assert all(row["components"]["1"] in (1, 2) for row in record.epochs)
    assert 0 < last["train_seconds"] < last["seconds"]
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert [line["kind"] for line in lines(tmp_path)] == ["run", *["epoch"] * 10, "end"]


@pytest.mark.parametrize(("name", "rate"), [("nesterov", 0.1), ("adam", 0.01)])
def test_the_other_optimizers_learn_too(name, rate, tmp_path):
    record, _ = run(config(optimizer=settings.Optimizer(name, rate), mixture=None), tmp_path, source=digits())
    assert record.epochs[-1]["train_loss"] < 0.7 * record.epochs[0]["train_loss"]


def test_bf16_and_channels_last(tmp_path):
    record, model = run(config(precision="bf16", channels_last=True), tmp_path, source=digits())
    assert record.epochs[-1]["train_loss"] < 0.8 * record.epochs[0]["train_loss"]
    assert model[4].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[4].weight.dtype == torch.float32


def test_what_is_recorded_is_what_a_plain_evaluation_gives(tmp_path):
    record, model = run(config(epochs=2), tmp_path)
    images, labels = next(digits().test_batches(10_000))
    with torch.no_grad():
        logits = model.eval()(images)
    assert record.epochs[-1]["test_loss"] == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-4)
    assert record.epochs[-1]["test_error"] == pytest.approx((logits.argmax(1) != labels).float().mean().item())


def test_recalibration_does_not_disturb_the_training(tmp_path):
    pooled = settings.Mixture(("1",), {"num_components": 2, "backend": "reference", "inference": "pooled"})
    plain, model = run(config(mixture=pooled), tmp_path / "plain")
    both, recalibrated = run(config(mixture=pooled, recalibrate=3), tmp_path / "both")
    assert same(weights(model), weights(recalibrated))
    for ours, theirs in zip(figures(plain), figures(both), strict=True):
        assert ours["test_loss"] == theirs["test_loss"]
        assert theirs["recalibrated_loss"] != theirs["test_loss"]
        assert ours["recalibrated_loss"] is None


def test_the_same_seed_gives_the_same_run_and_another_another(tmp_path):
    runs = [run(config(seed=seed), tmp_path / str(number)) for number, seed in enumerate((1, 1, 2))]
    (first, a), (again, b), (other, c) = runs
    assert figures(first) == figures(again)
    assert same(weights(a), weights(b))
    assert not same(weights(a), weights(c))
    assert figures(first) != figures(other)


# --- interruptions ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The figures and the weights that every interrupted run must end with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    record, model = run(config(epochs=EPOCHS), tmp_path_factory.mktemp("run"))
    torch.set_num_threads(threads)
    return figures(record), weights(model)


@pytest.mark.parametrize("moment", [1, 4, 17, 45])
def test_an_interrupted_run_resumes_to_the_same_bit(moment, tmp_path, uninterrupted):
    with pytest.raises(KeyboardInterrupt):
        run(config(epochs=EPOCHS), tmp_path, progress=Interrupt(moment))
    # Other initial weights: those of the run are in its checkpoint.
    record, model = run(config(epochs=EPOCHS), tmp_path, model=build(config(), seed=9))
    assert record.finished
    assert (figures(record), True) == (uninterrupted[0], same(weights(model), uninterrupted[1]))
    # Ctrl-C costs no more than its epoch.
    assert [line["epoch"] for line in lines(tmp_path) if line["kind"] == "resume"] == [(moment - 1) // 4]


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
    assert figures(record) == uninterrupted[0]
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
    assert figures(record) == uninterrupted[0]
    assert same(weights(model), uninterrupted[1])


def test_ctrl_c_is_recorded_and_raised(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(config(), tmp_path, progress=Interrupt(6))
    record = records.read(tmp_path / records.NAME)
    assert (record.reason, len(record.epochs)) == ("interrupted", 1)
    assert checkpoint.read(tmp_path)["epoch"] == 1


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
    with pytest.raises(ValueError, match=r"another configuration \(.*optimizer.lr: 0.005, not 0.1.*\): choose another folder"):
        run(config(optimizer=settings.Optimizer("rmsprop", 0.1, 2e-5)), tmp_path)
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
    assert figures(record) == figures(whole)
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


@pytest.mark.parametrize("below", ["", "inside"])
def test_a_folder_that_cannot_be_written(below, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be written \(.*\): choose another folder"):
        run(config(), tmp_path / "file" / below)


def test_a_disk_that_fills_up_loses_nothing(tmp_path, monkeypatch, uninterrupted):
    def no_room(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", no_room)
        with pytest.raises(OSError, match=r"cannot be written \(No space left on device\).*make room"):
            run(config(epochs=EPOCHS), tmp_path, checkpoint_seconds=0)
    record, model = run(config(epochs=EPOCHS), tmp_path)
    assert figures(record) == uninterrupted[0]
    assert same(weights(model), uninterrupted[1])


class Breaks(nn.Module):
    """Passes its input on, until the training forward pass of a given number."""

    def __init__(self, at, forward=None, backward=None):
        super().__init__()
        self.at, self.forward_value, self.backward_value = at, forward, backward
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        y = x * self.scale
        if self.training:
            self.calls += 1
            if self.calls == self.at:
                if self.forward_value is not None:
                    y = y * self.forward_value
                if self.backward_value is not None and y.requires_grad:
                    y.register_hook(lambda gradient: gradient * self.backward_value)
        return y


@pytest.mark.parametrize(
    ("breaks", "step", "began"),
    [
        ({"at": 6, "forward": torch.inf}, "step 2 of epoch 2", "step 2 with the output of 4"),
        ({"at": 6, "forward": torch.nan}, "step 2 of epoch 2", "step 2 with the output of 4"),
        ({"at": 6, "backward": torch.inf}, "step 3 of epoch 2", "step 2 with the gradient of 4.scale"),
    ],
)
def test_a_loss_that_is_not_finite_names_layer_and_step(breaks, step, began, tmp_path):
    model = build(config())
    model.insert(4, Breaks(**breaks))
    with pytest.raises(NotFinite, match=f"the loss of {step} is not finite, which began at {began}.*smaller than 0.0045"):
        run(config(), tmp_path, model=model)
    record = records.read(tmp_path / records.NAME)
    assert record.reason == "not finite"
    assert began in record.ends[-1]["message"]
    assert len(record.epochs) == 1


def test_images_that_are_not_finite(tmp_path):
    images = torch.randn(64, 1, 8, 8)
    images[3, 0, 2, 2] = torch.nan
    batches = [(images, torch.arange(64) % 10)]
    with pytest.raises(NotFinite, match="began at step 1 with the images: remove"):
        run(config(mixture=None), tmp_path, source=Loaders(batches, batches, device="cpu"))


def test_a_learning_rate_that_is_too_large(tmp_path):
    with pytest.raises(NotFinite, match=r"began at step \d+ with .*: use a learning rate smaller than 1e\+30"):
        run(config(optimizer=settings.Optimizer("nesterov", 1e30), mixture=None), tmp_path)


# --- a user's own loaders -----------------------------------------------------------------------------------------------


def loaders(**options):
    images, labels = (DIGITS.train.images / 16.0, DIGITS.train.labels)
    data = torch.utils.data.TensorDataset(images, labels)
    train = torch.utils.data.DataLoader(data, batch_size=48, shuffle=True, **options)
    return Loaders(train, torch.utils.data.DataLoader(data, batch_size=100), device="cpu")


def test_loaders_train_and_resume_to_the_same_bit(tmp_path):
    whole, model = run(config(recalibrate=2), tmp_path / "whole", source=loaders())
    assert whole.epochs[-1]["train_loss"] < 0.8 * whole.epochs[0]["train_loss"]
    assert whole.epochs[-1]["steps"] == 4 * 6  # the last batch of an epoch is smaller
    with pytest.raises(KeyboardInterrupt):
        run(config(recalibrate=2), tmp_path / "cut", source=loaders(), progress=Interrupt(15))
    record, resumed = run(config(recalibrate=2), tmp_path / "cut", source=loaders())
    assert figures(record) == figures(whole)
    assert same(weights(model), weights(resumed))


@pytest.mark.parametrize(
    ("train_data", "sentence"),
    [
        (iter([]), "can be read only once"),
        ([], "has no batch"),
        ([torch.zeros(2, 1, 8, 8)], "a batch of the data is a Tensor: each must be a pair"),
        ([(torch.zeros(2, 1, 8, 8), [1, 2])], "a batch of the data is a tuple of Tensor, list"),
    ],
)
def test_data_that_cannot_be_used(train_data, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        run(config(), tmp_path, source=Loaders(train_data, [], device="cpu"))


def test_data_of_another_length_than_it_says(tmp_path):
    class Long(list):
        def __len__(self):
            return 3

    batches = [(torch.randn(8, 1, 8, 8), torch.arange(8))]
    with pytest.raises(ValueError, match="ended before its 3 batches"):
        run(config(), tmp_path, source=Loaders(Long(batches), batches, device="cpu"))


def test_events_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed, and then no events are written")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record, _ = run(config(), tmp_path)
    events = EventAccumulator(str(tmp_path)).Reload()
    found = [event.value for event in events.Scalars("error/test")]
    assert found == pytest.approx([row["test_error"] for row in record.epochs])
    assert "components/1" in events.Tags()["scalars"]


def test_it_runs_in_a_thread(tmp_path):
    """Where no signal can be handled."""
    results = []
    thread = threading.Thread(target=lambda: results.append(run(config(epochs=1), tmp_path)))
    thread.start()
    thread.join()
    assert results[0][0].finished


# --- on a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["rmsprop", "nesterov", "adam"])
@pytest.mark.parametrize("mixture", [None, settings.Mixture(("1",), {"num_components": 2})])
def test_a_captured_run_follows_the_eager_one(name, mixture, tmp_path):
    options = {"optimizer": settings.Optimizer(name, 0.002), "mixture": mixture, "epochs": 6, "recalibrate": 2}
    eager, _ = run(config(**options), tmp_path / "cpu")
    captured, _ = run(config(**options), tmp_path / "cuda", device="cuda")
    for ours, theirs in zip(captured.epochs, eager.epochs, strict=True):
        assert ours["learning_rate"] == theirs["learning_rate"]
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=0.2)
    with pytest.raises(KeyboardInterrupt):
        run(config(**options), tmp_path / "cut", device="cuda", progress=Interrupt(1))
    resumed, _ = run(config(**options), tmp_path / "cut", device="cuda")
    assert resumed.finished


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_loss_that_is_not_finite_is_found_after_the_epoch(tmp_path):
    with pytest.raises(NotFinite, match="is not finite, which began at step"):
        run(config(optimizer=settings.Optimizer("nesterov", 1e30), mixture=None), tmp_path, device="cuda")
