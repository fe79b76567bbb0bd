"""The trainer: it learns, records what it did, and says where a loss that is not finite comes from."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from run_helpers import DIGITS, Interrupt, build, config, lines, numbers, run, same, weights
from torch import nn

from mixnorm_lab import norms
from mixnorm_lab.config import norm_names
from mixnorm_lab.config.parts.mixture import Mixture
from mixnorm_lab.config.parts.optimizer import Optimizer, Schedule
from mixnorm_lab.data.resident import Resident
from mixnorm_lab.data.sources import Loaders
from mixnorm_lab.own import functions
from mixnorm_lab.storage import records
from mixnorm_lab.training.classifier import evaluate
from mixnorm_lab.training.not_finite import NotFinite
from mixnorm_lab.training.progress import Silent


def test_the_schedule_is_followed(tmp_path):
    record, _ = run(config(schedule=Schedule("step", factor=0.1, at=(0.5, 0.75))), tmp_path)
    assert [row["learning_rate"] for row in record.epochs] == pytest.approx([0.005, 0.005, 0.0005, 0.00005])


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
    record, _ = run(config(optimizer=Optimizer(name, rate), mixture=None), tmp_path, source=digits())
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
    pooled = Mixture(("1",), {"num_components": 2, "backend": "reference", "inference": "pooled"})
    plain, model = run(config(mixture=pooled), tmp_path / "plain")
    both, recalibrated = run(config(mixture=pooled, recalibrate=3), tmp_path / "both")
    assert same(weights(model), weights(recalibrated))
    for ours, theirs in zip(numbers(plain), numbers(both), strict=True):
        assert ours["test_loss"] == theirs["test_loss"]
        assert theirs["recalibrated_loss"] != theirs["test_loss"]
        assert ours["recalibrated_loss"] is None


def test_the_same_seed_gives_the_same_run_and_another_another(tmp_path):
    runs = [run(config(seed=seed), tmp_path / str(number)) for number, seed in enumerate((1, 1, 2))]
    (first, a), (again, b), (other, c) = runs
    assert numbers(first) == numbers(again)
    assert same(weights(a), weights(b))
    assert not same(weights(a), weights(c))
    assert numbers(first) != numbers(other)


# --- a loss that is not finite ------------------------------------------------------------------------------------------


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


def spoiled_loss(every, forward=1.0, backward=1.0):
    """Cross-entropy, which a factor spoils at every call of such a number, in its value or in its gradient alone."""
    calls = 0

    def spoiled(output, labels):
        nonlocal calls
        calls += 1
        value, slope = (forward, backward) if calls % every == 0 else (1.0, 1.0)
        output.register_hook(lambda gradient: gradient * slope)
        return F.cross_entropy(output, labels) * value

    return spoiled


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            {"forward": torch.nan},
            "the loss of the first batch, before any update, is not finite, though the model's output is: look at NAME and "
            "at the labels",
        ),
        (
            {"backward": torch.nan},
            "the loss of step 2 of epoch 1 is not finite, which began at step 1 with the gradient of 8.weight, before any "
            "update: look at the slope of that layer and of the loss",
        ),
    ],
)
def test_what_is_not_finite_before_any_update_is_not_blamed_on_the_rate(spoil, sentence, tmp_path):
    name = functions.name_of(spoiled_loss(1, **spoil), "loss")
    with pytest.raises(NotFinite) as caught:
        run(config(mixture=None, loss=name), tmp_path)
    assert str(caught.value) == sentence.replace("NAME", name)


def test_a_loss_whose_gradient_is_finite_where_it_is_not_itself(tmp_path):
    name = functions.name_of(lambda output, labels: (output - 100).log().mean(), "loss")
    with pytest.raises(NotFinite, match="the first batch, before any update, is not finite, though the model's output is"):
        run(config(mixture=None, loss=name), tmp_path)


def test_a_loss_that_is_not_finite_later_is_that_of_the_rate(tmp_path):
    name = functions.name_of(spoiled_loss(3, torch.inf), "loss")
    with pytest.raises(NotFinite, match=r"the loss of step 3 of epoch 1 .* began at step 3 with the loss: use a .* smaller"):
        run(config(mixture=None, loss=name), tmp_path)


def test_labels_that_are_not_finite(tmp_path):
    labels = torch.randn(64, 10)
    labels[5, 0] = torch.nan
    images = torch.randn(64, 1, 8, 8)
    batches = [(images, labels.nan_to_num()), (images, labels)]
    numbers = config(mixture=None, loss="mean squared error", metric="mean squared error")
    with pytest.raises(NotFinite, match=r"the loss of step 2 .* began at step 2 with the labels: remove what is"):
        run(numbers, tmp_path, source=Loaders(batches, batches, device="cpu"))


def test_images_that_are_not_finite(tmp_path):
    images = torch.randn(64, 1, 8, 8)
    images[3, 0, 2, 2] = torch.nan
    batches = [(images, torch.arange(64) % 10)]
    with pytest.raises(NotFinite, match="began at step 1 with the inputs: remove"):
        run(config(mixture=None), tmp_path, source=Loaders(batches, batches, device="cpu"))


def test_images_to_test_on_that_are_not_finite(tmp_path):
    images = torch.randn(64, 1, 8, 8)
    batches = [(images, torch.arange(64) % 10)]
    spoiled = [(torch.where(torch.arange(64).view(-1, 1, 1, 1) == 5, torch.nan, images), batches[0][1])]
    with pytest.raises(NotFinite, match="the test data is not finite: remove"):
        run(config(mixture=None), tmp_path, source=Loaders(batches, spoiled, device="cpu"))


def test_an_output_that_is_not_a_number_is_an_error_whatever_the_label():
    labels = torch.zeros(4, dtype=torch.long)
    logits = torch.tensor([[2.0, 1.0], [torch.nan, torch.nan], [torch.inf, 0.0], [0.0, 1.0]])
    error = evaluate(nn.Identity(), [(logits, labels)], device=torch.device("cpu"), bf16=False).error
    assert error == 0.5


def test_a_learning_rate_that_is_too_large(tmp_path):
    with pytest.raises(NotFinite, match=r"began at step \d+ with .*: use a learning rate smaller than 1e\+30"):
        run(config(optimizer=Optimizer("nesterov", 1e30), mixture=None), tmp_path)


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
    assert numbers(record) == numbers(whole)
    assert same(weights(model), weights(resumed))


@pytest.mark.parametrize(
    ("train_data", "sentence"),
    [
        (iter([]), "can be read only once"),
        ([], "has no batch"),
        ([torch.zeros(2, 1, 8, 8)], "a batch of the data is a Tensor: make each a pair"),
        ([(torch.zeros(2, 1, 8, 8), [1, 2])], "a batch of the data is a tuple of Tensor, list"),
        ([(torch.zeros(2, 1, 8, 8), torch.zeros(3))], r"\(2, 1, 8, 8\) and \(3,\): there must be a label for each input"),
    ],
)
def test_data_that_cannot_be_used(train_data, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        run(config(), tmp_path, source=Loaders(train_data, [], device="cpu"))


class Missing(torch.utils.data.Dataset):
    """A data set whose file is not there."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise FileNotFoundError(2, "No such file or directory", "photo.png")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("side", ["train", "test"])
def test_a_loader_that_cannot_read_a_file(side, workers, tmp_path):
    """It is the loader's to mend: an OSError is a folder that the trainer cannot write."""
    there = [(torch.randn(8, 1, 8, 8), torch.arange(8))]
    broken = torch.utils.data.DataLoader(Missing(), batch_size=4, num_workers=workers)
    both = (broken, there) if side == "train" else (there, broken)
    sentence = r"the data cannot be read \(FileNotFoundError: .*No such file or directory: 'photo.png'\): mend the loader"
    with pytest.raises(ValueError, match=sentence) as raised:
        run(config(mixture=None), tmp_path, source=Loaders(*both, device="cpu"))
    assert len(str(raised.value)) < 200


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


def test_events_that_find_no_room_end_a_run_and_print_nothing(tmp_path, monkeypatch):
    """They are written by a thread, whose traceback Python prints by itself."""
    writer = pytest.importorskip("tensorboard.summary.writer.record_writer", reason="without tensorboard there are none")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.RecordWriter, "write", full)
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    with pytest.raises(OSError, match="No space left on device"):
        run(config(), tmp_path)
    assert printed == []
    thread = threading.Thread(target=full)
    thread.start()
    thread.join()
    assert len(printed) == 1  # that of other threads is as it was


def test_it_runs_in_a_thread(tmp_path):
    """Where no signal can be handled."""
    results = []
    thread = threading.Thread(target=lambda: results.append(run(config(epochs=1), tmp_path)))
    thread.start()
    thread.join()
    assert results[0][0].finished


def test_every_step_of_a_run_has_its_own_rate_and_labels_are_smoothed(tmp_path):
    """A run of the trainer beside the same steps written out."""
    settings = {
        "mixture": None,
        "epochs": 3,
        "batch_size": 128,
        "label_smoothing": 0.2,
        "schedule": Schedule("one-cycle"),
    }
    settings["optimizer"] = Optimizer("sgd", 0.5, momentum=0.0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    nn.init.zeros_(model[1].weight)
    by_hand = copy.deepcopy(model).double()
    source = Resident(DIGITS, 128, device="cpu", augment=False)
    record, _ = run(config(**settings), tmp_path, model=model, source=source)
    losses = []
    for epoch in range(3):
        source.start_epoch(0, epoch)
        for step in range(2):
            done = (2 * epoch + step + 0.5) / 6
            images, labels = source.batch(torch.tensor(step))
            logs = by_hand(images.double()).log_softmax(1)
            wanted = 0.8 * F.one_hot(labels, 10) + 0.2 / 10
            loss = -(wanted * logs).sum(1).mean()
            losses.append(loss.item())
            gradients = torch.autograd.grad(loss, [*by_hand.parameters()])
            for parameter, gradient in zip(by_hand.parameters(), gradients, strict=True):
                parameter.data -= 0.5 * min(done / 0.3, (1 - done) / 0.7) * gradient
    assert [row["train_loss"] for row in record.epochs] == pytest.approx([sum(losses[i : i + 2]) / 2 for i in (0, 2, 4)])
    for ours, right in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, right.float())


@pytest.mark.parametrize("name", norm_names.EXAMPLES)
def test_a_run_with_a_norm_of_another_kind_resumes_to_the_same_bit(name, tmp_path):
    def start():
        plain = build(config(mixture=None))
        return norms.replace_norms(plain, name)

    settings = config(mixture=None, norm=name, recalibrate=2, epochs=2, optimizer=Optimizer("nesterov", 0.02))
    whole, model = run(settings, tmp_path / "whole", model=start())
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "cut", model=start(), progress=Interrupt(6))
    record, resumed = run(settings, tmp_path / "cut", model=start())
    assert numbers(record) == numbers(whole)
    assert same(weights(model), weights(resumed))
    last = record.epochs[-1]
    if name in ("group-32", "layer", "instance"):
        assert last["recalibrated_loss"] == last["test_loss"]
    else:
        assert last["recalibrated_loss"] != last["test_loss"]


@pytest.mark.parametrize("average", [0.0, 0.5])
def test_training_images_are_evaluated_in_the_end_if_asked(average, tmp_path):
    """Against the model as it ends, on the images as they are: in evaluation, without dropout, crops and smoothing."""
    settings = config(train_eval=True, epochs=2, label_smoothing=0.3, recalibrate=1, average=average)
    record, model = run(settings, tmp_path / "asked")
    assert "train_eval_loss" not in record.epochs[0]
    if not average:
        images, labels = DIGITS.train.images.double(), DIGITS.train.labels
        images = (images - images.mean()) / images.std(correction=0)
        with torch.no_grad():
            logits = model.eval()(images.float())
        last = record.epochs[-1]
        assert last["train_eval_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)
        assert last["train_eval_error"] == pytest.approx((logits.argmax(1) != labels).double().mean().item())
    else:
        assert record.epochs[-1]["train_eval_loss"] > 0
    plain, _ = run(config(epochs=2, label_smoothing=0.3, recalibrate=1, average=average), tmp_path / "plain")
    rows = [{name: value for name, value in row.items() if "eval" not in name} for row in numbers(record)]
    assert rows == numbers(plain)
    assert record.epochs[-1].keys() - plain.epochs[-1].keys() == {"train_eval_loss", "train_eval_error"}
