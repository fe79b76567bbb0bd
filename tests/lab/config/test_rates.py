"""The rate and the weight decay follow the optimizer, unless they are said."""

import pytest

from mixnorm_lab.config import presets
from mixnorm_lab.config.parts.optimizer import OPTIMIZERS
from mixnorm_lab.config.rates import RATES, WEIGHT_DECAYS, with_optimizer
from mixnorm_lab.config.recipes import RECIPES, with_recipe


def asked(preset, **given):
    return with_optimizer(preset, given).with_options(given).optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_a_rate_and_a_weight_decay_of_its_own(name):
    found = asked(presets.DIGITS if name != "rmsprop" else presets.OWN, optimizer=name)
    assert (found.name, found.lr, found.weight_decay) == (name, RATES[name], WEIGHT_DECAYS[name])


@pytest.mark.parametrize("preset", [presets.OWN, presets.DIGITS, presets.NUMBERS, with_recipe(presets.OWN, "one-cycle")])
def test_what_is_said_wins(preset):
    found = asked(preset, optimizer="adam", lr=0.25, weight_decay=0.5)
    assert (found.name, found.lr, found.weight_decay) == ("adam", 0.25, 0.5)
    assert asked(preset, lr=0.25).lr == 0.25
    assert asked(preset, optimizer="sgd", lr=0.25, momentum=0.0).momentum == 0.0 if preset is presets.OWN else True


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_optimizer_that_is_there_already_keeps_its_settings(recipe):
    preset = with_recipe(presets.OWN, recipe)
    assert asked(preset, optimizer=preset.optimizer.name) == preset.optimizer
    assert asked(preset) == preset.optimizer


def test_plain_sgd_and_nesterov_go_by_the_same_rates():
    preset = with_recipe(presets.OWN, "paper-densenet")
    found = asked(preset, optimizer="sgd", momentum=0.0)
    assert (found.lr, found.weight_decay, found.momentum) == (0.1, 1e-4, 0.0)


@pytest.mark.parametrize(("given", "name"), [({"optimizer": "adam"}, "adam"), ({}, "rmsprop")])
def test_a_momentum_that_there_is_not(given, name):
    with pytest.raises(ValueError, match=f"{name} has no momentum to set: leave --momentum out, or add --optimizer sgd"):
        asked(presets.DIGITS, momentum=0.5, **given)
