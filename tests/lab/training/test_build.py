"""From a configuration to a model and data: the paper's layers, and functions of the user's own that work or do not."""

import dataclasses
import re
import sys

import pytest
import torch
from torch import nn

from mixnorm import MixtureNorm2d
from mixnorm_lab import models
from mixnorm_lab.config import catalog
from mixnorm_lab.config.parts.mixture import Mixture
from mixnorm_lab.config.presets import DIGITS, OWN, defaults, of_norm, with_norm
from mixnorm_lab.data import Resident
from mixnorm_lab.data.sources import Loaders
from mixnorm_lab.norms import GhostBatchNorm
from mixnorm_lab.own import functions
from mixnorm_lab.training import build
from mixnorm_lab.training.not_finite import NotFinite
from mixnorm_lab.training.team import Team

CPU = torch.device("cpu")
MODULE = """
import torch
from torch import nn

def build(num_classes=3):
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, num_classes))

def loaders():
    batches = [(torch.randn(6, 1, 4, 4), torch.arange(6) % 3) for _ in range(2)]
    return batches, batches

def needs_more(depth): ...
def raises(): raise KeyError("no such\\nthing")
def nothing(): ...
def one(): return [1]
def words(): return "a", "b"
value = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module in the current folder."""
    name = f"users_module_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield name
    sys.modules.pop(name, None)


def own(model, data="digits", mixture=False):
    return with_norm(dataclasses.replace(OWN, model=model, data=data, batch_size=4), "own", 0, mixture=mixture)


@pytest.mark.parametrize(("layers", "count"), [("*", 20), ("stage2", 5), ("relu", 9), ("sum", 11)])
def test_an_activation_is_moved_into_norms_that_a_relu_follows(layers, count):
    """In a residual block the second norm's output is added first, so that a ReLU inside would change the model."""
    mixture = Mixture((layers,), {"num_components": 2, "activation": "relu"})
    config = dataclasses.replace(defaults("cifar10", "cifar-cnn"), model="resnet-18", mixture=mixture)
    with torch.device("meta"):
        model = build.make_model(config, 10, (3, 32, 32))
    norms = {name: m.activation for name, m in model.named_modules() if isinstance(m, MixtureNorm2d)}
    assert len(norms) == count
    for name, activation in norms.items():
        assert activation == ("relu" if name == "stem.norm" or "conv1" in name else None), name


# --- the paper's models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, e in catalog.EXPERIMENTS.items() if e.config.gan is None])
def test_every_experiment_converts_the_layers_that_it_names(name, monkeypatch):
    for layer in (nn.Conv2d, nn.Linear):
        monkeypatch.setattr(layer, "reset_parameters", lambda self: None)  # initial weights take the most time
    config = catalog.get(name).config
    model = build.make_model(config, 10 if config.data == "cifar10" else 100, (3, 32, 32))
    converted = {name for name, module in model.named_modules() if isinstance(module, MixtureNorm2d)}
    layers = config.mixture.layers if config.mixture else ()
    if layers == ("*",):
        assert converted
        assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    else:
        assert converted == {norm for layer in layers for norm in models.last_norms(config.model, layer)}
    for module in model.modules():
        if isinstance(module, MixtureNorm2d):
            options = config.mixture.options
            assert (module.num_components, module.em_iters) == (options["num_components"], options["em_iters"])


def test_an_option_may_be_for_some_layers_alone():
    config = of_norm(
        defaults("cifar10", "resnet-18"), "mixture:num_components=2:deviation@relu=learned:history@stage4.*+stem=4"
    )
    assert config.name == "mixture-norm,num_components=2,deviation@relu=learned,history@stage4.-+stem=4"
    model = build.make_model(config, 10, (3, 32, 32))
    norms = {name: norm for name, norm in model.named_modules() if isinstance(norm, MixtureNorm2d)}
    assert len(norms) == 20
    for name, norm in norms.items():
        assert norm.num_components == 2
        assert norm.deviation == (0.0 if "conv2" in name or "shortcut" in name else "learned")
        assert norm.history == (4 if name.startswith(("stage4", "stem")) else 10)
    with pytest.raises(ValueError, match="'stage9' matches no batch norm"):
        build.make_model(of_norm(defaults("cifar10", "resnet-18"), "mixture:history@stage9=4"), 10, (3, 32, 32))


def test_the_momentum_is_that_of_every_norm():
    config = catalog.get("cifar-cnn/cifar100/mn-2").config
    for wanted, found in ((None, 0.1), (0.5, 0.5)):
        model = build.make_model(dataclasses.replace(config, norm_momentum=wanted), 100, (3, 32, 32))
        assert [model.get_submodule(f"conv{i}.norm").momentum for i in range(1, 5)] == [found] * 4


def test_both_norms_begin_with_the_same_weights_and_another_seed_with_others():
    states = []
    for seed, mixture in ((0, False), (0, True), (1, True)):
        model, source = build.prepare(with_norm(DIGITS, "run", seed, mixture=mixture), CPU)
        assert isinstance(source, Resident)
        states.append({name: value for name, value in model.named_parameters() if "conv" in name and "norm" not in name})
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert not any(torch.equal(value, states[2][name]) for name, value in states[0].items())


def test_layers_are_the_papers_names_or_globs_of_modules():
    assert build.modules_of("inception-v3", ("inc2/0", "red*")) == [*models.last_norms("inception-v3", "inc2/0"), "red*"]
    assert build.modules_of("my_module:build", ("conv3",)) == ["conv3"]


def test_a_model_for_other_images_is_refused_before_it_is_built():
    with pytest.raises(ValueError, match="for images of 3 × 32 × 32, but digits has 1 × 8 × 8: choose another model"):
        build.check([with_norm(dataclasses.replace(DIGITS, model="inception-v3"), "run", 0, mixture=False)])


def test_held_out_images_take_the_place_of_the_test_images():
    whole, part = (
        build.make_source(with_norm(dataclasses.replace(DIGITS, validation=share), "run", 0, mixture=False), CPU)
        for share in (0.0, 0.25)
    )
    count = sum(len(labels) for _, labels in part.test_batches(500))
    assert count == pytest.approx(0.25 * 64 * whole.steps_per_epoch, rel=0.05)
    assert part.steps_per_epoch == pytest.approx(0.75 * whole.steps_per_epoch, abs=1)


# --- functions of the user's own ----------------------------------------------------------------------------------------


def test_a_users_model_and_data(module):
    config = own(f"{module}:build", f"{module}:loaders", mixture=True)
    build.check([config])
    model, source = build.prepare(config, CPU)
    assert isinstance(source, Loaders)
    assert isinstance(model[1], MixtureNorm2d)
    assert model[3].out_features == 3


def test_a_users_model_is_told_the_number_of_classes_if_it_asks(module):
    model = build.make_model(own(f"{module}:build"), 10, (1, 8, 8))
    assert model[3].out_features == 10


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("build2", "has no function 'build2': it has build, loaders, needs_more, raises, nothing, one, words"),
        ("value", "has no function 'value': it has build"),
        ("raises", "{module}:raises raised KeyError: 'no such.*thing': mend it, --debug shows where"),
        ("needs_more", "{module}:needs_more raised TypeError: .*argument: 'depth': mend it"),
        ("nothing", "{module}:nothing must return a torch.nn.Module, but returned nothing"),
        ("words", "must return a torch.nn.Module, but returned a tuple of 2"),
    ],
)
def test_a_function_that_makes_no_model(function, sentence, module):
    with pytest.raises(ValueError, match=sentence.format(module=module)) as caught:
        build.check([own(f"{module}:{function}", f"{module}:loaders")])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("raises", "{module}:raises raised KeyError"),
        ("one", r"{module}:one must return two loaders, \(train, test\), but returned a list of 1"),
        ("nothing", "must return two loaders, .* but returned nothing"),
        ("build", "must return two loaders, .* but returned an object of the type Sequential"),
    ],
)
def test_a_function_that_makes_no_data(function, sentence, module):
    with pytest.raises(ValueError, match=sentence.format(module=module)):
        build.check([own(f"{module}:build", f"{module}:{function}")])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("import no_such_package", "users_other needs the module no_such_package: install it"),
        ("def build(:", r"users_other cannot be imported \(SyntaxError: .*\): mend it"),
        ("1 / 0", r"users_other cannot be imported \(ZeroDivisionError: division by zero\): mend it"),
    ],
)
def test_a_module_that_cannot_be_imported(content, sentence, module, tmp_path):
    (tmp_path / "users_other.py").write_text(content)
    with pytest.raises(ValueError, match=sentence):
        functions.find("users_other:build")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no_such_module:build", "there is no module 'no_such_module': run the command in the folder of no_such_module.py"),
        ("no_such.module:build", "there is no module 'no_such': run the command in the folder of no_such.py"),
        ("my_module.py:build", r"write my_module.py:build as Python imports it, such as my_module:build"),
        ("folder/my_module:build", "as Python imports it"),
    ],
)
def test_a_module_that_does_not_exist(name, sentence, module):
    with pytest.raises(ValueError, match=sentence):
        functions.find(name)


def test_a_users_data_needs_a_users_model(module):
    with pytest.raises(ValueError, match="needs a model of yours as well: --model my_module:build"):
        defaults(f"{module}:loaders", None)
    with pytest.raises(ValueError, match="the model must be yours, too: --model my_module:build"):
        build.check([own("digits-cnn", f"{module}:loaders")])


def test_what_goes_wrong_in_training_names_the_users_functions():
    config = own("mine:build", "mine:loaders")
    begin = "training mine:build with mine:loaders failed with IndexError: "
    with pytest.raises(ValueError, match=begin + "what is this: mend it, --debug shows where"), build.explained(config):
        raise IndexError("what is\nthis")
    for error in (ValueError("a sentence"), OSError("full"), NotFinite("where")):
        with pytest.raises(type(error), match=str(error)), build.explained(config):
            raise error


@pytest.mark.parametrize(
    ("labels", "inputs", "remedy"),
    [
        (torch.tensor([0, 7]), torch.zeros(2, 4), "give the model an output for each class"),
        (torch.tensor([0, 1]), torch.zeros(2, 4).double(), "fp32, with .float()"),
        (torch.tensor([0, 1]), torch.zeros(2, 4, dtype=torch.long), "fp32, with .float()"),
        (torch.tensor([0, 1]), torch.zeros(2, 5), "the inputs must have the size"),
    ],
    ids=["label", "double", "integer", "size"],
)
def test_what_pytorch_says_of_data_has_a_remedy(labels, inputs, remedy):
    with pytest.raises(ValueError, match=re.escape(remedy)), build.explained(own("mine:build", "mine:loaders")):
        torch.nn.functional.cross_entropy(torch.nn.Linear(4, 3)(inputs), labels)


def test_a_batch_of_one_says_what_to_do():
    config = own("mine:build", "mine:loaders")
    sentence = r"Expected more than 1 value.*: use larger batches, or drop_last=True in your loader"
    with pytest.raises(ValueError, match=sentence), build.explained(config):
        torch.nn.BatchNorm1d(3)(torch.zeros(1, 3))


def test_a_fault_of_this_package_keeps_its_traceback():
    with pytest.raises(IndexError), build.explained(with_norm(DIGITS, "run", 0, mixture=False)):
        raise IndexError


def test_memory_that_is_full_says_what_to_do():
    config = with_norm(DIGITS, "run", 0, mixture=False)
    with pytest.raises(ValueError, match="use a smaller batch, or run fewer --jobs"), build.explained(config):
        raise torch.OutOfMemoryError


# --- norms to compare with ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "replaced"), [(("*",), 3), (("conv1", "conv3"), 2)])
def test_a_norm_replaces_batch_norms(layers, replaced):
    config = dataclasses.replace(DIGITS, mixture=None, norm="ghost-16", norm_layers=layers, norm_momentum=0.3)
    torch.manual_seed(0)
    model = build.make_model(config, 10, (1, 8, 8))
    found = [norm for norm in model.modules() if isinstance(norm, GhostBatchNorm)]
    assert [(norm.size, norm.momentum) for norm in found] == [(16, 0.3)] * replaced
    torch.manual_seed(0)
    plain = build.make_model(dataclasses.replace(config, norm=None), 10, (1, 8, 8))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_norm_has_no_place_beside_mixture_norms_nor_in_several_processes():
    with pytest.raises(ValueError, match="mixture norms, where layer has no place: leave one of the two out"):
        dataclasses.replace(DIGITS, norm="layer")
    alone = dataclasses.replace(DIGITS, mixture=None, norm="layer")
    build.check_shared(alone, Team())
    with pytest.raises(ValueError, match="layer takes its statistics in one process: leave torchrun out"):
        build.check_shared(alone, Team(size=2))
