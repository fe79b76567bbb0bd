"""Models of timm, torchvision and transformers by name: of those that are installed, the real ones."""

import importlib
import importlib.util
import json
import sys

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from mixnorm import MixtureNorm2d
from mixnorm_lab import models
from mixnorm_lab.config.presets import OWN, defaults
from mixnorm_lab.models import libraries
from mixnorm_lab.training import build

SMALL = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}


def imported(name):
    """The package; skips where there is none, or one for another PyTorch."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"{name} cannot be imported: {' '.join(str(error).split())}")


def write_config(folder, **changes):
    ResNetConfig(**SMALL, architectures=["ResNetForImageClassification"], **changes).save_pretrained(folder)
    return f"transformers:{folder}"


def check(name, shape, classes=7):
    torch.manual_seed(0)
    model = models.build(name, classes, shape)
    assert model(torch.randn(2, *shape)).shape == (2, classes)
    return model


# --- transformers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (4, 24, 40)])
def test_a_configuration_in_a_folder_takes_the_channels_and_classes_of_the_data(shape, tmp_path):
    name = write_config(tmp_path / "config")
    assert libraries.canonical(name) == f"transformers:{(tmp_path / 'config').resolve().as_posix()}"
    assert models.is_library(name)
    assert models.input_shape(name) is None
    model = check(name, shape)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 6


def test_a_class_of_transformers():
    model = check("transformers:MobileNetV2ForImageClassification", (3, 32, 32))
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def test_what_transformers_does_not_have_says_what_is_near(tmp_path):
    with pytest.raises(ValueError, match=r"'ResNetForImageClasification' is neither a folder nor a class .*: use ResNetFor"):
        check("transformers:ResNetForImageClasification", (3, 32, 32))
    with pytest.raises(ValueError, match="has no configuration of transformers"):
        check(f"transformers:{tmp_path}", (3, 32, 32))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    with pytest.raises(ValueError, match="is of BertModel, but a model ForImageClassification is needed"):
        check(f"transformers:{tmp_path / 'text'}", (3, 32, 32))
    with pytest.raises(ValueError, match="takes square images, but the data has 32 × 48: use --image-size"):
        check("transformers:MobileNetV2ForImageClassification", (3, 32, 48))
    with pytest.raises(ValueError, match=r"is for images, but the data has rows of 30 numbers: leave --model out"):
        check("transformers:ResNetForImageClassification", (30,))


def test_a_run_converts_a_model_of_a_package_and_knows_its_modules_by_their_names(tmp_path):
    name = write_config(tmp_path / "config")
    config = defaults("cifar10", name)
    assert (config.model, config.data, config.optimizer, config.batch_size) == (name, "cifar10", OWN.optimizer, 128)
    model = build.make_model(config.with_options({"layers": "*stages.0*", "components": 2}), 10, (3, 32, 32))
    converted = [name for name, module in model.named_modules() if isinstance(module, MixtureNorm2d)]
    assert len(converted) == 2
    assert all("stages.0" in name for name in converted)
    logits = model(torch.randn(4, 3, 32, 32))
    logits.backward(torch.randn_like(logits))
    with pytest.raises(ValueError, match="the model must be yours, too"):
        build.make_model(config)


def test_a_converted_model_of_a_package_is_no_other_than_the_packages(tmp_path):
    model = models.build(write_config(tmp_path / "config"), 7, (3, 32, 32)).eval()
    torch.manual_seed(0)
    plain = ResNetForImageClassification(ResNetConfig(**SMALL, num_labels=7)).eval()
    plain.load_state_dict({key.removeprefix("model."): value for key, value in model.state_dict().items()})
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(plain(x).logits, model(x))


# --- timm and torchvision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28)])
@pytest.mark.parametrize("model", ["resnet10t", "efficientnet_b0", "vit_tiny_patch16_224"])
def test_models_of_timm_take_channels_classes_and_the_size(model, shape):
    imported("timm")
    if model.startswith("vit"):
        shape = (shape[0], 32, 32)
    check(f"timm:{model}", shape)


@pytest.mark.parametrize("model", ["resnet18", "mobilenet_v3_small"])
def test_models_of_torchvision_take_classes(model):
    imported("torchvision")
    check(f"torchvision:{model}", (3, 32, 32))
    with pytest.raises(ValueError, match="is for images of 3 channels, but the data has 1: use timm"):
        check(f"torchvision:{model}", (1, 32, 32))


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_what_they_do_not_have_says_what_is_near(library):
    imported(library)
    with pytest.raises(ValueError, match=f"there is no {library}:resnet81: use resnet18"):
        check(f"{library}:resnet81", (3, 32, 32))
    with pytest.raises(ValueError, match=rf"there is no {library}:zzzzzz: [\d,]+ are there, such as "):
        check(f"{library}:zzzzzz", (3, 32, 32))


# A package as small as can be, in the place of one that is not there: what is asked of it has the names that it has.
STAND_IN = """
from torch import nn

def network(num_classes, in_chans=3):
    return nn.Sequential(nn.Conv2d(in_chans, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(num_classes))

def is_model(name): return name in list_models()
def list_models(module=None): return ["resnet18", "resnet34"]
def create_model(name, pretrained=False, num_classes=1000, in_chans=3):
    assert not pretrained
    return network(num_classes, in_chans)

class models:
    @staticmethod
    def list_models(module): return ["resnet18", "resnet34"]
    @staticmethod
    def get_model(name, weights, num_classes):
        assert weights is None
        return network(num_classes)
"""


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_the_calls_of_a_package(library, tmp_path, monkeypatch):
    (tmp_path / f"{library}.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    check(f"{library}:resnet18", (3, 8, 8))
    with pytest.raises(ValueError, match=f"there is no {library}:resnet19: use resnet18 or resnet34"):
        check(f"{library}:resnet19", (3, 8, 8))
    monkeypatch.delitem(sys.modules, library)


@pytest.mark.parametrize("library", libraries.PREFIXES)
def test_a_package_that_is_missing_or_broken_says_what_to_install(library, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=f"{library}:resnet18 needs {library}: pip install {library}$"):
        check(f"{library}:resnet18", (3, 32, 32))
    (tmp_path / f"{library}.py").write_text("raise RuntimeError('operator x::nms\\ndoes not exist')")
    monkeypatch.delitem(sys.modules, library)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ValueError, match=f"needs {library}, which cannot be imported .operator x::nms does not exist.: install"
    ):
        check(f"{library}:resnet18", (3, 32, 32))


# --- the perceptron -----------------------------------------------------------------------------------------------------


def test_the_perceptron_takes_rows():
    model = check("mlp", (30,), classes=2)
    assert sum(p.numel() for p in model.parameters()) == 30 * 128 + 128 * 128 + 2 * 2 * 128 + 2 * 128 + 2
    assert models.last_norms("mlp", "hidden1") == ["hidden1.norm"]
    assert models.without_relu("mlp") == []
    with pytest.raises(ValueError, match="mlp is for the rows of a table, but the data has 3 × 32 × 32: choose another"):
        check("mlp", (3, 32, 32))
    with pytest.raises(ValueError, match="mlp takes the shape that the data has: pass shape"):
        models.build("mlp", 10)
