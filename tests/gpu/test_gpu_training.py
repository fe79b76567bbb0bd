"""Runs on a GPU: a captured step is the step that it was captured from, and interrupted runs go on."""

import pytest
import torch
from run_helpers import Interrupt, build, config, lines, run

from mixnorm_lab import norms
from mixnorm_lab.config import norm_names
from mixnorm_lab.config.parts.mixture import Mixture
from mixnorm_lab.config.parts.optimizer import Optimizer, Schedule
from mixnorm_lab.storage import checkpoint
from mixnorm_lab.training.not_finite import NotFinite

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("name", ["rmsprop", "nesterov", "adam", "sgd", "adamw"])
@pytest.mark.parametrize("mixture", [None, Mixture(("1",), {"num_components": 2})])
def test_a_captured_run_follows_the_eager_one(name, mixture, tmp_path):
    options = {"optimizer": Optimizer(name, 0.002), "mixture": mixture, "epochs": 6, "recalibrate": 2}
    eager, _ = run(config(**options), tmp_path / "cpu")
    captured, _ = run(config(**options), tmp_path / "cuda", device="cuda")
    for ours, theirs in zip(captured.epochs, eager.epochs, strict=True):
        assert ours["learning_rate"] == theirs["learning_rate"]
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=0.2)
    with pytest.raises(KeyboardInterrupt):
        run(config(**options), tmp_path / "cut", device="cuda", progress=Interrupt(epoch=2))
    resumed, _ = run(config(**options), tmp_path / "cut", device="cuda")
    assert resumed.finished
    assert [line["epoch"] for line in lines(tmp_path / "cut") if line["kind"] == "resume"] == [1]


@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_a_captured_step_has_the_rate_of_its_number(name, tmp_path):
    options = {"optimizer": Optimizer(name, 0.05, 5e-4, decayed="weights"), "mixture": None, "epochs": 6}
    options |= {"schedule": Schedule("one-cycle"), "label_smoothing": 0.1}
    eager, _ = run(config(**options), tmp_path / "cpu")
    captured, _ = run(config(**options), tmp_path / "cuda", device="cuda")
    for ours, theirs in zip(captured.epochs, eager.epochs, strict=True):
        assert ours["learning_rate"] == theirs["learning_rate"]
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=0.1)


@pytest.mark.parametrize("name", norm_names.EXAMPLES)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_with_a_norm_to_compare_with_is_captured(name, channels_last, precision, tmp_path):
    options = {"mixture": None, "norm": name, "epochs": 4, "channels_last": channels_last, "precision": precision}
    options["optimizer"] = Optimizer("nesterov", 0.002)
    made = []
    for device in ("cpu", "cuda"):
        start = norms.replace_norms(build(config(mixture=None)), name)
        start[3].p = 0.0  # which values are dropped depends on the device
        record, _ = run(config(**options), tmp_path / device, model=start, device=device)
        made.append([row["train_loss"] for row in record.epochs])
    assert made[1] == pytest.approx(made[0], rel=0.1)


def test_a_loss_that_is_not_finite_is_found_after_the_epoch(tmp_path):
    with pytest.raises(NotFinite, match="is not finite, which began at step"):
        run(config(optimizer=Optimizer("nesterov", 1e30), mixture=None), tmp_path, device="cuda")


def test_an_average_is_captured(tmp_path):
    model = build(config())
    run(config(average=0.8, epochs=2), tmp_path / "cuda", model=model, device="cuda")
    kept = checkpoint.read(tmp_path / "cuda")
    apart = [(kept["average"][name] - value.cpu()).abs().max().item() for name, value in model.named_parameters()]
    assert 0 < max(apart) < 1


def test_a_compiled_step_is_captured(tmp_path):
    torch._dynamo.reset()
    options = {"mixture": Mixture(("1",), {"num_components": 2}), "epochs": 6}
    plain, _ = run(config(**options), tmp_path / "plain", device="cuda")
    made, _ = run(config(**options, compile=True), tmp_path / "compiled", device="cuda")
    for ours, theirs in zip(made.epochs, plain.epochs, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=0.2)
