"""``--average``: what is evaluated has the weights of the last updates, averaged as running statistics are."""

import pytest
import torch
from gan_helpers import config as gan_config
from gan_helpers import run as run_gan
from run_helpers import DIGITS, Interrupt, build, config, numbers, run, same, weights

from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.data.resident import Resident
from mixnorm_lab.storage import checkpoint
from mixnorm_lab.training.classifier import ClassifierLoop, evaluate
from mixnorm_lab.training.progress import Silent

DECAY = 0.8


class Follow(Silent):
    """Averages a model's weights after every step with PyTorch's own tool."""

    def __init__(self, model):
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)
        self.model = model
        self.average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
        self.average.n_averaged += 1  # the first average is that of the initial weights

    def step(self, done):
        self.average.update_parameters(self.model)


def test_the_average_is_pytorchs_and_the_training_is_not_changed_by_it(tmp_path):
    _, plain = run(config(), tmp_path / "plain")
    model = build(config())
    follow = Follow(model)
    record, _ = run(config(average=DECAY), tmp_path / "averaged", model=model, progress=follow)
    assert same(weights(model), weights(plain))
    averages = checkpoint.read(tmp_path / "averaged")["average"]
    for name, expected in follow.average.module.named_parameters():
        torch.testing.assert_close(averages[name], expected.detach())
    follow.average.module.load_state_dict({**model.state_dict(), **averages})
    source = Resident(DIGITS, 64, device="cpu")
    test = evaluate(follow.average.module.eval(), source.test_batches(256), device=torch.device("cpu"), bf16=False)
    assert record.epochs[-1]["test_loss"] == pytest.approx(test.loss, rel=1e-6)


def test_running_means_are_those_of_the_averaged_weights():
    """The mean of a linear layer's output is linear in its weights. So with the decay that belongs to the momentum, batch
    norm's running means are what the averaged weights give for the same inputs, and not what the last weights do."""
    torch.manual_seed(0)
    x = torch.randn(256, 8, dtype=torch.float64) + 3
    model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False), torch.nn.BatchNorm1d(4)).double()
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
    for _ in range(300):
        with torch.no_grad():
            model[0].weight += 0.1 * torch.randn(4, 8, dtype=torch.float64)
        averaged.update_parameters(model)
        model(x)
    true, last = (network(x).mean(0) for network in (averaged.module[0], model[0]))
    torch.testing.assert_close(model[1].running_mean, true, atol=1e-9, rtol=1e-9)
    assert (model[1].running_mean - last).abs().max() > 0.1


def test_it_goes_on_where_it_was_interrupted(tmp_path):
    whole, _ = run(config(average=DECAY, recalibrate=2), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(config(average=DECAY, recalibrate=2), tmp_path / "cut", progress=Interrupt(epoch=2))
    resumed, _ = run(config(average=DECAY, recalibrate=2), tmp_path / "cut")
    assert numbers(resumed) == numbers(whole)


def test_generators_have_an_average_too(tmp_path):
    plain = run_gan(gan_config(), tmp_path / "plain")
    averaged = run_gan(gan_config(average=DECAY), tmp_path / "averaged")
    assert [row["generator_loss"] for row in averaged.epochs] == [row["generator_loss"] for row in plain.epochs]
    assert averaged.epochs[-1]["distance"] != plain.epochs[-1]["distance"]
    kept = checkpoint.read(tmp_path / "averaged")
    assert kept["average"].keys() == {name for name in kept["generator"] if name in kept["average"]}


def test_a_configuration_says_so_only_where_it_is():
    for one in (config(), config(average=DECAY)):
        assert RunConfig.from_json(one.to_json()) == one
        assert ("average" in one.to_json()) == bool(one.average)
    with pytest.raises(ValueError, match="the decay of the averaged weights is 1, but must be from 0 up to but not 1"):
        config(average=1)


def test_frozen_weights_stay_frozen():
    model = build(config())
    model[0].weight.requires_grad_(False)
    source = Resident(DIGITS, 64, device="cpu")
    for decay in (0.0, DECAY):
        ClassifierLoop(config(average=decay), model, source, torch.device("cpu"))
        assert not model[0].weight.requires_grad
        assert model[1].weight.requires_grad
