"""Training a generator: what a step computes, the record, resuming to the bit, and evaluation sample by sample."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from gan_helpers import GAN, MIXTURE, config, dataset, features, images, run
from run_helpers import Interrupt, lines, numbers, same, weights

import mixnorm
from mixnorm_lab import models
from mixnorm_lab.data import DataSet, Images, Resident
from mixnorm_lab.generators import build, samples
from mixnorm_lab.generators.build import make_networks
from mixnorm_lab.generators.frechet import distance, statistics
from mixnorm_lab.generators.gan import GanStep
from mixnorm_lab.launch.one_run import Place, train_one
from mixnorm_lab.storage import checkpoint, records
from mixnorm_lab.storage.folders import SAMPLES, recorded
from mixnorm_lab.training.not_finite import NotFinite
from mixnorm_lab.training.progress import Silent

# --- a step -------------------------------------------------------------------------------------------------------------


def test_a_step_is_what_two_separate_passes_give():
    """The same updates as from each loss by itself, with networks of its own."""
    source = Resident(dataset(), 8, device="cpu", augment=False, signed=True)
    source.start_epoch(0, 0)
    generator, discriminator = make_networks(config(mixture=None))
    others = make_networks(config(mixture=None))
    make = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (generator, discriminator)]
    step = GanStep(generator, discriminator, tuple(make), source, 3, 4, device=torch.device("cpu"))
    torch.manual_seed(7)
    step()

    torch.manual_seed(7)
    noise = torch.rand(8, 4) * 2 - 1
    real, _ = source.batch(torch.tensor(0))
    losses = []
    for i, loss in enumerate(
        (
            lambda g, d: -torch.log(torch.sigmoid(d(g(noise)))).mean(),
            lambda g, d: -torch.log(torch.sigmoid(d(real))).mean() - torch.log(1 - torch.sigmoid(d(g(noise)))).mean(),
        )
    ):
        made = loss(*others)
        gradients = torch.autograd.grad(made, list(others[i].parameters()))
        losses.append(made.item())
        expected = [p - 0.1 * g for p, g in zip(others[i].parameters(), gradients, strict=True)]
        for ours, theirs in zip((generator, discriminator)[i].parameters(), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(step.curve[0], torch.tensor(losses))
    assert not any(p.grad is not None for network in (generator, discriminator) for p in network.parameters())


def test_real_images_are_in_the_generators_range():
    source = Resident(dataset(), 40, device="cpu", augment=False, signed=True)
    batch, _ = source.batch(torch.tensor(0))
    assert batch.min() >= -1
    assert batch.max() <= 1
    assert sorted(samples.to_pixels(batch).flatten().tolist()) == sorted(images().flatten().tolist())


# --- a run --------------------------------------------------------------------------------------------------------------


def test_a_run_and_its_record(tmp_path):
    record = run(config(), tmp_path)
    assert record.finished
    assert [row["steps"] for row in record.epochs] == [3, 6, 9, 12]
    assert [row["distance"] is None for row in record.epochs] == [True, False, True, False]
    last = record.epochs[-1]
    assert (last["features"], last["samples"]) == ("cifar-features 01234567", 20)
    assert last["distance"] > 0
    assert 0 < last["generator_loss"] < 10
    assert 0 < last["discriminator_loss"] < 10
    assert last["components"].keys() == {"deconv1.norm", "deconv2.norm"}
    assert [line["kind"] for line in lines(tmp_path)] == ["run", *["epoch"] * 4, "end"]
    assert sorted(path.name for path in (tmp_path / SAMPLES).iterdir()) == ["00000006.png", "00000012.png"]
    assert run(config(), tmp_path).epochs == record.epochs  # finished: nothing is trained again


def test_the_distance_is_that_of_the_generator_in_the_checkpoint(tmp_path):
    """From a set of other noise: the two differ by chance alone, of which 500 samples leave little."""
    record = run(config(gan=dataclasses.replace(GAN, samples=500), epochs=2), tmp_path)
    generator, _ = make_networks(config())
    generator.load_state_dict(checkpoint.read(tmp_path)["generator"])
    with torch.no_grad():
        made = samples.to_pixels(generator.eval()(torch.rand(500, 4) * 2 - 1))
    expected = distance(statistics(features().network(made)), statistics(features().network(images())))
    assert record.epochs[-1]["distance"] == pytest.approx(expected, rel=0.05)


def test_a_discriminator_learns_to_tell(tmp_path):
    """Against a generator that hardly moves: its loss falls below that of a coin, 2 log 2."""
    long = config(mixture=None, gan=dataclasses.replace(GAN, updates=20, evaluate_every=9), epochs=2)
    record = run(long, tmp_path)
    assert record.epochs[-1]["discriminator_loss"] < record.epochs[0]["discriminator_loss"] < 2
    assert record.epochs[-1]["discriminator_loss"] < 1


@pytest.mark.parametrize("mixture", [None, MIXTURE])
@pytest.mark.parametrize("where", [{"step": 8}, {"epoch": 2}])
def test_resuming_is_exact(where, mixture, tmp_path):
    whole = run(config(mixture=mixture), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(config(mixture=mixture), tmp_path / "cut", progress=Interrupt(**where))
    assert not records.read(tmp_path / "cut" / records.NAME).finished
    resumed = run(config(mixture=mixture), tmp_path / "cut")
    assert numbers(resumed) == numbers(whole)
    ends = [checkpoint.read(tmp_path / name) for name in ("whole", "cut")]
    for network in ("generator", "discriminator"):
        assert same(ends[0][network], ends[1][network])
    pictures = [(tmp_path / name / SAMPLES / "00000012.png").read_bytes() for name in ("whole", "cut")]
    assert pictures[0] == pictures[1]


def test_recalibration_measures_a_second_distance_and_does_not_disturb_the_training(tmp_path):
    plain, both = run(config(), tmp_path / "plain"), run(config(recalibrate=3), tmp_path / "both")
    for ours, theirs in zip(numbers(plain), numbers(both), strict=True):
        again = theirs.pop("recalibrated_distance")
        assert ours.pop("recalibrated_distance") is None
        assert (again is None) == (ours["distance"] is None)
        assert again is None or again != ours["distance"]
        assert ours == theirs


def test_both_norms_start_from_the_same_weights():
    (a, c), (b, d) = make_networks(config(mixture=None)), make_networks(config())
    assert isinstance(b.deconv1.norm, mixnorm.MixtureNorm2d)
    assert isinstance(b.deconv3.norm, torch.nn.BatchNorm2d)
    assert same(weights(c), weights(d))
    assert all(torch.equal(dict(a.named_parameters())[name], value) for name, value in b.named_parameters())


def test_what_is_not_finite_is_named(tmp_path):
    broken = dataclasses.replace(config(), optimizer=dataclasses.replace(config().optimizer, lr=1e30))
    with pytest.raises(NotFinite, match=r"the loss of step \d of epoch 1 .* (generator|discriminator).*learning rate"):
        run(broken, tmp_path)
    assert records.read(tmp_path / records.NAME).reason == "not finite"


def test_a_classifiers_record_and_a_generators_do_not_mix(tmp_path):
    run(config(), tmp_path)
    with pytest.raises(ValueError, match=r"another configuration .*gan.updates: 3, not 5"):
        run(config(gan=dataclasses.replace(GAN, updates=5)), tmp_path)


# --- evaluation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inference", ["mixture", "pooled"])
def test_a_sample_does_not_depend_on_the_others_in_its_batch(inference):
    torch.manual_seed(0)
    generator = models.Generator(6, 16)
    mixnorm.convert(generator, MIXTURE.layers, **MIXTURE.for_convert | {"num_components": 3}, inference=inference)
    for _ in range(5):
        generator(torch.rand(16, 6) * 2 - 1)
    generator.eval()
    noise = torch.rand(33, 6) * 2 - 1
    with torch.no_grad():
        together = generator(noise)
        alone = torch.cat([generator(one[None]) for one in noise])
        mixed = generator(noise.flip(0))[[*range(32, -1, -1)]]
        crowd = generator(torch.cat((noise, 100 * torch.ones(200, 6))))[:33]  # others that are far from any seen
    for other in (alone, mixed, crowd):
        torch.testing.assert_close(together, other, atol=1e-5, rtol=1e-5)
    assert (together[0] - together[1]).abs().max() > 1e-3


# --- mistakes -----------------------------------------------------------------------------------------------------------


def test_mistakes(tmp_path):
    small = DataSet("digits", Images(torch.zeros(9, 1, 8, 8, dtype=torch.uint8), torch.zeros(9).long()), None, 10, False)
    for changes, options, words in (
        ({}, {"dataset": small}, "images of 3 × 32 × 32, but digits has 1 × 8 × 8"),
        ({}, {"features": features("inception-2015")}, "of cifar-features, not of inception-2015"),
        ({"gan": dataclasses.replace(GAN, samples=4)}, {}, "4 generated samples are too few .* 4 .*use at least 5"),
        ({"validation": 0.1}, {}, "leave --validation out"),
        ({"gan": None}, {}, "no generator 'dcgan'"),
        ({"model": "cifar-cnn"}, {}, "no generator 'cifar-cnn'"),
    ):
        with pytest.raises(ValueError, match=words):
            run(config(**changes), tmp_path, **options)
    assert not (tmp_path / records.NAME).exists()


def test_prepared_from_names(tmp_path, monkeypatch):
    monkeypatch.setattr(build.data, "prepare", lambda name, folder: dataset(name=name))
    place = Place(tmp_path, torch.device("cpu"))
    assert "needs the weights of its feature network" in train_one(config(), place, Silent()).sentence
    monkeypatch.setattr(build.feature_networks, "load", lambda *_: features())
    assert train_one(config(), place, Silent()) is None
    assert recorded(config(), tmp_path).finished


# --- pictures -----------------------------------------------------------------------------------------------------------


def test_a_grid_as_a_png(tmp_path):
    reader = pytest.importorskip("matplotlib.image")
    many = images(6)
    samples.write_png(tmp_path / "a" / "grid.png", samples.grid(many, 4))
    found = torch.from_numpy((reader.imread(tmp_path / "a" / "grid.png")[..., :3] * 255).round()).to(torch.uint8)
    assert found.shape == (2 * 32 + 1, 4 * 32 + 3, 3)
    assert torch.equal(found[33:, 33:65].movedim(2, 0), many[5])
    assert found[:, 32].eq(255).all()
    assert found[33:, 66:].eq(255).all()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["grid.png"]


def test_pixels():
    x = torch.tensor([-1.0, -0.5, 0.0, 1.0, 1.5])
    assert samples.to_pixels(x).tolist() == [0, 64, 128, 255, 255]
    assert torch.equal(samples.to_pixels(images().float() / 127.5 - 1), images())
    assert F.mse_loss(samples.to_pixels(torch.tanh(x)).float() / 127.5 - 1, torch.tanh(x)) < 1e-4
