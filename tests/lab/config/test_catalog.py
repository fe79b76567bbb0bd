"""The figures here were copied from the paper by hand, beside those in the catalog."""

import dataclasses
from collections import Counter

import pytest

from mixnorm import MixtureNorm2d
from mixnorm_lab.config import catalog
from mixnorm_lab.config.mixture_forms import FORMS
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.generators.build import make_networks
from mixnorm_lab.training.build import make_model

EXPERIMENTS = catalog.EXPERIMENTS
PAPER = {name: found for name, found in EXPERIMENTS.items() if not name.startswith(("forms/", "best/"))}
FIT = {"num_components": 3, "em_iters": 2}


def test_every_row_is_there():
    tables = Counter((e.config.model, e.config.data, e.config.mixture is None) for e in PAPER.values())
    assert tables == {
        ("cifar-cnn", "cifar10", True): 4,
        ("cifar-cnn", "cifar10", False): 4,
        ("cifar-cnn", "cifar100", True): 4,
        ("cifar-cnn", "cifar100", False): 8,
        ("inception-v3", "cifar10", True): 1,
        ("inception-v3", "cifar10", False): 4,
        ("inception-v3", "cifar100", True): 2 + 2,  # RMSprop and Nesterov
        ("inception-v3", "cifar100", False): 4 + 2,
        ("densenet-40-12", "cifar100", True): 1,
        ("densenet-40-12", "cifar100", False): 1,
        ("densenet-100-12", "cifar100", True): 1,
        ("densenet-100-12", "cifar100", False): 1,
        ("dcgan", "cifar10", True): 1,
        ("dcgan", "cifar10", False): 1,
    }


def test_every_curve_is_there():
    curves = Counter(panel for e in EXPERIMENTS.values() for panel in e.panels)
    assert curves == {
        "cifar-cnn/small-lr/cifar10": 4,
        "cifar-cnn/small-lr/cifar100": 4,
        "cifar-cnn/large-lr/cifar10": 4,
        "cifar-cnn/large-lr/cifar100": 4,
        "cifar-cnn/em-iterations": 4,
        "cifar-cnn/layers": 4,
        "best/cifar10": 2,
        "best/cifar100": 2,
        "averaged/cifar10": 2,
        "averaged/cifar100": 3,
        "inception-v3/cifar10": 5,
        "inception-v3/cifar100": 5,
        "inception-v3/large-lr": 2,
        "inception-v3/nesterov": 4,
        "densenet": 5,
        "components": 2,
        "dcgan": 2,
    }
    assert set(curves) == set(catalog.PANELS)


@pytest.mark.parametrize(
    ("name", "layers", "options", "lr", "weight_decay", "quarters", "steps"),
    [
        ("cifar-cnn/cifar10/mn-2", ("conv3",), (3, 2), 0.01, 2e-5, [85.56, 87.28, 88.05, 88.47], 13400),
        ("cifar-cnn/cifar100/mn-6", ("conv3",), (3, 8), 0.01, 2e-5, [58.98, 61.83, 62.67, 63.12], 10900),
        ("cifar-cnn/cifar100/mn-8", ("conv2", "conv3"), (3, 2), 0.01, 2e-5, [59.79, 61.67, 62.50, 62.96], 10300),
        ("cifar-cnn/cifar100/mn-3", ("conv3",), (3, 2), 0.05, 1e-4, [29.80, 36.30, 40.66, 43.77], "not said"),
        ("inception-v3/cifar10/mn-2", ("red1", "red2", "inc3/0"), (3, 4), 0.001, 5e-4, [89.73, 91.69, 92.09, 92.55], 38600),
        ("inception-v3/cifar100/mn-1", ("red1", "red2"), (3, 8), 0.001, 5e-4, [66.6, 68.86, 70.01, 70.43], None),
        ("inception-v3/cifar100/mn-5", ("inc2/0", "inc3/0"), (5, 2), 0.005, 5e-4, [50.41, 55.69, 57.88, 59.10], "not said"),
    ],
)
def test_rows_against_the_paper(name, layers, options, lr, weight_decay, quarters, steps):
    found = catalog.get(name)
    mixture, optimizer = found.config.mixture, found.config.optimizer
    assert mixture.layers == layers
    assert (mixture.options["num_components"], mixture.options["em_iters"]) == options
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay, optimizer.smoothing) == ("rmsprop", lr, weight_decay, 0.9)
    assert list(found.paper["accuracy"].values()) == quarters
    assert list(found.paper["accuracy"]) == [found.config.epochs * q // 4 for q in (1, 2, 3, 4)]
    assert found.paper.get("steps_to_bn", "not said") == steps


def test_nesterov_policies():
    first, second = (catalog.get(f"inception-v3/cifar100/nesterov-mn-{policy}") for policy in (1, 2))
    assert (first.config.batch_size, first.config.epochs, first.config.optimizer.lr) == (256, 150, 0.14)
    assert first.config.mixture.layers == ("inc2/1", "inc3/0")

    def rates(found, *epochs):
        return [found.config.schedule.rate(1.0, epoch, 150) for epoch in epochs]

    assert rates(first, 74, 75, 112, 113) == pytest.approx([1, 0.1, 0.1, 0.01])
    assert rates(second, 44, 45, 89, 90, 119, 120) == pytest.approx([1, 0.2, 0.2, 0.04, 0.04, 0.008])


def test_densenet_and_cost():
    deep = catalog.get("densenet-100/cifar100/mn")
    assert deep.paper["max_accuracy"] == 79.03  # a test error of 20.97%
    assert (deep.config.batch_size, deep.config.epochs, deep.config.optimizer.weight_decay) == (64, 200, 1e-4)
    assert deep.config.mixture.layers == ("transition1", "transition2", "last_norm")
    assert deep.config.schedule.rate(0.1, 100, 200) == pytest.approx(0.01)
    assert catalog.COST[64, 448] == {1: 9.26, 2: 8.83, 3: 8.51, 4: 8.52, 5: 8.41}


def test_dcgan():
    for kind, fid, steps in (("bn", 37.56, 60_000), ("mn", 33.35, 25_000)):
        found = catalog.get(f"dcgan/cifar10/{kind}")
        config = found.config
        assert (found.paper["fid"], found.paper["steps_to_bn"]) == (fid, steps)
        assert (config.optimizer.name, config.optimizer.lr, config.optimizer.betas) == ("adam", 0.0002, (0, 0.9))
        assert config.epochs * config.gan.updates == 100_000
        assert config.gan.evaluate_every * config.gan.updates == 10_000
        assert config.gan.samples == 50_000
        generator, _ = make_networks(config)
        norms = [name for name, module in generator.named_modules() if isinstance(module, MixtureNorm2d)]
        assert norms == (["deconv1.norm", "deconv2.norm"] if kind == "mn" else [])
    assert {name: config.mixture.options[name] for name in FIT} == FIT


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_consistent(name):
    found, config = EXPERIMENTS[name], EXPERIMENTS[name].config
    assert config.name == found.name == name
    assert RunConfig.from_json(config.to_json()) == config
    rates = [config.schedule.rate(config.optimizer.lr, epoch, config.epochs) for epoch in range(config.epochs)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == config.optimizer.lr
    assert (rates[0] == rates[-1]) if config.schedule.name == "constant" else (rates[0] > rates[-1] > 0)
    if "accuracy" in found.paper:
        assert max(found.paper["accuracy"].values()) == found.paper["max_accuracy"]
    if found.paper.get("steps_to_bn"):
        assert found.paper["steps_to_bn"] <= (50_000 // config.batch_size + 1) * config.epochs


def test_every_mixture_norm_has_one_batch_norm_partner():
    def settings(config):
        return {k: v for k, v in config.to_json().items() if k not in ("name", "mixture", "seed")}

    for found in EXPERIMENTS.values():
        if found.config.mixture is not None:
            partners = [
                e for e in EXPERIMENTS.values() if e.config.mixture is None and settings(e.config) == settings(found.config)
            ]
            assert len(partners) == 1


def test_names_and_globs():
    assert len(catalog.match("cifar-cnn/cifar100/*")) == 12
    assert [e.name for e in catalog.match("*/bn-2")] == ["cifar-cnn/cifar10/bn-2", "cifar-cnn/cifar100/bn-2"]
    with pytest.raises(ValueError, match="cifar-cnn/cifar100/mn-2"):
        catalog.get("cifar-cnn/cifar100/mn2")
    with pytest.raises(ValueError, match="--list"):
        catalog.match("imagenet/*")


def test_every_form_changes_the_papers_and_can_be_trained():
    """The options are those of the layer, the layers those of the model, and no two forms are the same."""
    start = catalog.get("cifar-cnn/cifar100/mn-2").config
    forms = [found.config for found in catalog.match("forms/cifar100/*")]
    assert len(forms) == len({form.identity() for form in forms}) == len(FORMS)
    assert forms[0].identity() == start.identity()
    for form in forms:
        assert dataclasses.replace(form, name=start.name, mixture=start.mixture) == start
        make_model(form, 100, (3, 32, 32))
