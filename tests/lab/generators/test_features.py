"""Feature networks: the classifier's features are what its last layer gets; the Inception's come from a checked file."""

import dataclasses
import hashlib
import sys
import types

import pytest
import torch
from gan_helpers import config as gan_config
from gan_helpers import dataset, images
from run_helpers import run

from mixnorm_lab import models
from mixnorm_lab.cli.generators import with_features
from mixnorm_lab.config import catalog
from mixnorm_lab.config.parts.mixture import Mixture
from mixnorm_lab.config.parts.optimizer import Optimizer, Schedule
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.data import Resident
from mixnorm_lab.generators import features
from mixnorm_lab.generators.frechet import distance
from mixnorm_lab.training.build import make_model

CPU = torch.device("cpu")


def trained(folder, mixture=None):
    """The folder of a run of the paper's CNN that saw one batch."""
    settings = (Optimizer("adam", 0.001), Schedule("constant"))
    config = RunConfig("cnn", "cifar-cnn", "cifar10", 1, 40, *settings, mixture=mixture)
    torch.manual_seed(0)
    model = make_model(config, 10, (3, 32, 32))
    run(config, folder, model=model, source=Resident(dataset(), 40, device="cpu"))
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("classifier"))


def test_a_classifier_may_have_mixture_norms(tmp_path):
    folder = trained(tmp_path, Mixture(("conv4",), {"num_components": 2, "backend": "reference"}))
    found = features.load("cifar-features", folder, dataset(), CPU)
    assert found.network(images(5)).shape == (5, 256)


def test_features_are_the_inputs_of_the_last_layer(classifier):
    found = features.load("cifar-features", classifier, dataset(), CPU)
    assert (found.name, found.dimensions) == ("cifar-features", 256)
    assert found.label == f"cifar-features {found.digest[:8]}"
    model = models.build("cifar-cnn", 10)
    model.load_state_dict(torch.load(classifier / "checkpoint.pt", weights_only=True)["model"])
    source = Resident(dataset(), 40, device="cpu", augment=False)
    standardized, _ = next(source.test_batches(10))
    with torch.no_grad():
        logits = model.eval()(standardized)
        ours = model.linear(found.network(dataset().test.images))
    torch.testing.assert_close(ours, logits, atol=1e-4, rtol=1e-4)


def test_the_distance_tells_sets_apart(classifier):
    found = features.load("cifar-features", classifier, dataset(), CPU)
    first, second = (images(260, seed) for seed in (3, 4))
    a, b, dark = (found.statistics(some.split(100)) for some in (first, second, first // 4))
    assert (a.count, a.mean.shape) == (260, (256,))
    assert distance(a, b) < 0.5 * distance(a, dark)
    with pytest.raises(ValueError, match="40 samples are too few for the covariance of 256 features: use at least 257"):
        found.statistics([images(40)])


def test_the_digest_is_that_of_the_weights(classifier):
    state = torch.load(classifier / "checkpoint.pt", weights_only=True)["model"]
    before = features._digest(state)
    assert before == features.load("cifar-features", classifier, dataset(), CPU).digest
    state["linear.bias"][3] += 1e-6
    assert features._digest(state) != before


def test_mistakes_with_a_classifier(classifier, tmp_path):
    cases = [
        (None, dataset(), "CIFAR-feature Fréchet distance needs the weights.*mixnorm reproduce cifar-cnn/cifar10/bn-2"),
        (tmp_path, dataset(), "there is no run in"),
        (classifier, dataset(name="cifar100"), "a classifier of cifar10, but features come from a classifier of cifar100"),
        (classifier, dataclasses.replace(dataset(), num_classes=7), "are of another shape than those of cifar-cnn"),
    ]
    for where, data, words in cases:
        with pytest.raises(ValueError, match=words) as caught:
            features.load("cifar-features", where, data, CPU)
        assert "FID" not in str(caught.value)


def test_a_generator_is_no_classifier(tmp_path):
    from mixnorm_lab.storage import records

    with records.Writer(tmp_path / records.NAME) as writer:
        writer.run(gan_config(), {})
    with pytest.raises(ValueError, match="holds a generator"):
        features.load("cifar-features", tmp_path, dataset(), CPU)


def test_a_classifier_that_is_not_finished(classifier, tmp_path):
    first = (classifier / "record.jsonl").read_text().splitlines()[0]
    (tmp_path / "record.jsonl").write_text(first + "\n")
    with pytest.raises(ValueError, match="not trained to its end"):
        features.load("cifar-features", tmp_path, dataset(), CPU)


# --- the 2015 Inception -------------------------------------------------------------------------------------------------


@pytest.fixture
def library(monkeypatch):
    """In place of torch-fidelity: an extractor with its signature whose 2,048 features are a linear map of 12 means."""

    class Extractor(torch.nn.Module):
        def __init__(self, name, features_list, feature_extractor_weights_path=None, **_):
            super().__init__()
            assert features_list == ["2048"]
            self.fc = torch.nn.Linear(12, 2048)
            self.load_state_dict(torch.load(feature_extractor_weights_path, weights_only=False))

        def forward(self, x):
            assert x.dtype == torch.uint8
            return (self.fc(torch.nn.functional.avg_pool2d(x.float(), 16).flatten(1)),)

    module = types.ModuleType("torch_fidelity.feature_extractor_inceptionv3")
    module.FeatureExtractorInceptionV3 = Extractor
    monkeypatch.setitem(sys.modules, "torch_fidelity", types.ModuleType("torch_fidelity"))
    monkeypatch.setitem(sys.modules, "torch_fidelity.feature_extractor_inceptionv3", module)


def weights_file(path, monkeypatch, content=None):
    torch.save(torch.nn.Linear(12, 2048).state_dict() if content is None else content, path)
    state = torch.load(path, weights_only=False)
    if content is None:
        torch.save({f"fc.{name}": value for name, value in state.items()}, path)
    monkeypatch.setattr(features, "INCEPTION_CHECKSUM", hashlib.sha256(path.read_bytes()).hexdigest()[:8])
    return path


@pytest.mark.usefixtures("library")
def test_inception_features_come_from_the_file(tmp_path, monkeypatch):
    path = weights_file(tmp_path / "weights.pth", monkeypatch)
    found = features.load("inception-2015", path, dataset(), CPU)
    assert (found.name, found.dimensions, found.network(images(5)).shape) == ("inception-2015", 2048, (5, 2048))
    assert found.label.startswith("inception-2015 ")


@pytest.mark.usefixtures("library")
def test_another_file_is_no_inception(tmp_path, monkeypatch):
    path = weights_file(tmp_path / "weights.pth", monkeypatch)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="does not hold the 2015 Inception's weights"):
        features.load("inception-2015", path, dataset(), CPU)


@pytest.mark.usefixtures("library")
def test_nothing_but_tensors_is_unpickled(tmp_path, monkeypatch):
    path = weights_file(tmp_path / "weights.pth", monkeypatch, content={"fc.weight": pytest.approx(1)})
    with pytest.raises(ValueError, match="holds more than tensors"):
        features.load("inception-2015", path, dataset(), CPU)


def test_missing_file_and_missing_library(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="the FID needs the weights of its feature network: get weights-inception-2015"):
        features.load("inception-2015", None, dataset(), CPU)
    with pytest.raises(ValueError, match=r"there is no file .*nothing.pth .* get weights-inception-2015"):
        features.load("inception-2015", tmp_path / "nothing.pth", dataset(), CPU)
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    with pytest.raises(ValueError, match=r"install the extra, pip install '\.\[fid\]' from a checkout"):
        features.load("inception-2015", weights_file(tmp_path / "weights.pth", monkeypatch), dataset(), CPU)


def test_the_inception_is_downloaded_once_and_checked(tmp_path, monkeypatch):
    source = weights_file(tmp_path / "served.pth", monkeypatch)
    monkeypatch.setenv("MIXNORM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(features, "INCEPTION_URL", source.as_uri())
    path = features.fetch_inception()
    assert path.read_bytes() == source.read_bytes()
    source.unlink()
    assert features.fetch_inception() == path  # from the cache
    path.unlink()
    with pytest.raises(OSError, match=r"served.pth cannot be reached .*: get weights-inception-2015.* with --features"):
        features.fetch_inception()
    source.write_bytes(b"something else")
    with pytest.raises(ValueError, match="gave another file than it should"):
        features.fetch_inception()
    assert not path.exists()


def test_a_file_is_of_the_inception_and_a_folder_of_a_classifier(tmp_path):
    configs = [catalog.get(name).config for name in ("dcgan/cifar10/mn", "cifar-cnn/cifar10/bn-2")]
    (tmp_path / "weights.pth").touch()
    (gan, classifier), where = with_features(configs, str(tmp_path / "weights.pth"))
    assert (gan.gan.features, classifier, where) == ("inception-2015", configs[1], tmp_path / "weights.pth")
    assert with_features(configs, str(tmp_path)) == (configs, tmp_path)
    assert with_features(configs, None) == (configs, None)
