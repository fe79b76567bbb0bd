"""Recipes by name, and the presets that take one."""

from dataclasses import replace

import pytest

from mixnorm_lab.config import catalog
from mixnorm_lab.config.presets import DIGITS, defaults
from mixnorm_lab.config.recipes import RECIPES, with_recipe


def test_one_cycle_is_the_recipe_for_residual_networks():
    run = defaults("cifar100", "resnet-18")
    assert (run.model, run.data, run.epochs, run.batch_size, run.label_smoothing) == ("resnet-18", "cifar100", 30, 256, 0.1)
    optimizer = run.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.momentum) == ("nesterov", 0.2, 0.9)
    assert (optimizer.weight_decay, optimizer.decayed) == (5e-4, "weights")
    assert (run.schedule.name, run.schedule.rise, run.augment) == ("one-cycle", 0.3, None)  # CIFAR's images are cropped
    assert run.mixture.layers == ("*",)
    rates = [rate for epoch in range(30) for rate in run.schedule.rates(0.2, epoch, 30, 195)]
    assert rates.index(max(rates)) in (1754, 1755)  # 30% of 5,850 steps
    assert max(rates) == pytest.approx(0.2, rel=1e-3)
    assert max(rates[0], rates[-1]) < 1e-4


def test_a_recipe_is_of_any_model():
    run = with_recipe(DIGITS, "adamw-cosine")
    assert (run.model, run.mixture) == (DIGITS.model, DIGITS.mixture)
    assert (run.optimizer.name, run.schedule.name) == ("adamw", "cosine")


@pytest.mark.parametrize(
    ("name", "experiment"), [("paper-cnn", "cifar-cnn/cifar100/mn-2"), ("paper-densenet", "densenet-40/cifar100/mn")]
)
def test_the_papers_recipes_are_those_of_its_experiments(name, experiment):
    config = catalog.get(experiment).config
    changed = replace(config, epochs=1, batch_size=1, optimizer=DIGITS.optimizer, schedule=DIGITS.schedule)
    assert with_recipe(changed, name) == config


def test_an_unknown_recipe_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"there is no recipe 'onecycle': use one-cycle$"):
        with_recipe(DIGITS, "onecycle")
    with pytest.raises(ValueError, match=" or ".join(RECIPES)):
        with_recipe(DIGITS, "?")
