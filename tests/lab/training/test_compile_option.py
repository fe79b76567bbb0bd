"""``--compile``: the same training through torch.compile, and what it cannot do is said in a sentence."""

import dataclasses
import functools

import pytest
import torch
from run_helpers import DIGITS, Interrupt, build, config, numbers, run, same, weights

from mixnorm_lab.config import catalog, presets
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.data.resident import Resident
from mixnorm_lab.training.classifier import ClassifierStep
from mixnorm_lab.training.not_finite import NotFinite
from mixnorm_lab.training.team import Team


@pytest.fixture
def quickly(monkeypatch):
    """The compiler's first half alone, which needs no seconds and changes no digit."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def test_a_compiled_run_is_the_same_run(tmp_path, quickly):
    plain, model = run(config(recalibrate=2), tmp_path / "plain")
    made, compiled = run(config(recalibrate=2, compile=True), tmp_path / "compiled")
    for ours, theirs in zip(numbers(made), numbers(plain), strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-3)
    assert weights(compiled).keys() == weights(model).keys()


def test_it_goes_on_where_it_was_interrupted(tmp_path, quickly):
    whole, model = run(config(compile=True), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(config(compile=True), tmp_path / "cut", progress=Interrupt(epoch=2))
    resumed, again = run(config(compile=True), tmp_path / "cut")
    assert numbers(resumed) == numbers(whole)
    assert same(weights(again), weights(model))


def test_the_layer_that_is_not_finite_is_still_named(tmp_path, quickly):
    broken = config(compile=True, optimizer=dataclasses.replace(config().optimizer, lr=1e30))
    with pytest.raises(NotFinite, match="is not finite, which began at step 2 with the output of 1:"):
        run(broken, tmp_path)


def test_a_model_that_it_does_not_take(tmp_path, monkeypatch):
    def refuses(*_):
        raise RuntimeError("no such operation")

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=refuses))
    with pytest.raises(ValueError, match=r"torch.compile does not take this model \(.*\): leave --compile out"):
        run(config(compile=True), tmp_path)


def test_generators_and_teams_are_not_compiled():
    with pytest.raises(ValueError, match="dcgan/cifar10/mn trains a generator, which is not compiled: leave --compile out"):
        dataclasses.replace(catalog.get("dcgan/cifar10/mn").config, compile=True)
    model = build(config())
    source = Resident(DIGITS, 64, device="cpu")
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="several processes that train together are not compiled: leave --compile out"):
        ClassifierStep(
            model, optimizer, source, device=torch.device("cpu"), bf16=False, team=Team(size=2), torch_compile=True
        )  # fmt: skip


def test_a_configuration_says_so_only_where_it_is():
    for one in (config(), config(compile=True)):
        assert RunConfig.from_json(one.to_json()) == one
        assert ("compile" in one.to_json()) == one.compile
    assert config().identity() != config(compile=True).identity()
    assert dataclasses.replace(presets.DIGITS, compile=True).run("a", 0, mixture=True).compile


@pytest.mark.slow
def test_the_whole_compiler(tmp_path):
    torch._dynamo.reset()
    plain, _ = run(config(), tmp_path / "plain")
    made, _ = run(config(compile=True), tmp_path / "compiled")
    assert made.epochs[-1]["train_loss"] == pytest.approx(plain.epochs[-1]["train_loss"], rel=0.2)  # its dropout differs
