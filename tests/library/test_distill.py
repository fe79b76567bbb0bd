"""distill: one mixture in place of T, with the same overall moments and nearly the same output."""

import copy

import pytest
import torch
import torch.nn.functional as F
from layer_helpers import CHANNELS, WITH_HISTORY, WITHOUT_HISTORY, assert_same, evaluate, points, trained
from torch import nn

import mixnorm
from mixnorm import MixtureNorm1d, MixtureNorm2d
from mixnorm.distill import agreement
from mixnorm_lab import data
from mixnorm_lab.models import DigitsCNN

X = points(8, CHANNELS, 6, 5, seed=9)


def overall(layer):
    """The mean and variance of the history as one distribution, by the law of total variance."""
    tau = torch.tensor([0.9**age for age in range(layer.history - 1, -1, -1)], dtype=torch.float64)
    lead = layer.history_weights.dim() - 2
    share = layer.history_weights.double() * (tau / tau.sum()).view(*[1] * lead, -1, 1)
    means, variances = layer.history_means.double(), layer.history_vars.double()
    mean = torch.einsum("...tk,...tkd->...d", share, means)
    square = torch.einsum("...tk,...tkd->...d", share, variances + means**2)
    return mean, square - mean**2


@pytest.mark.parametrize("num_components", [1, 3, 5])
@pytest.mark.parametrize("population", ["batch", "channel"])
def test_the_overall_mean_and_variance_stay(population, num_components):
    layer = trained(MixtureNorm2d(CHANNELS, population=population, num_components=num_components, history=4), batches=6)
    expected = overall(layer)
    distilled = mixnorm.distill(layer)
    assert distilled is layer
    assert layer.history_means.shape[-3:-1] == (1, num_components)
    torch.testing.assert_close(layer.history_weights.sum((-2, -1)), torch.ones(layer.history_weights.shape[:-2]))
    torch.testing.assert_close(overall(layer), expected, atol=1e-5, rtol=1e-5)


def permuted_history(noise, dropped=(), history=5, num_components=4):
    """A layer whose slots hold one mixture, each in its own order and a little changed; and the slots in one order."""
    torch.manual_seed(0)
    layer = MixtureNorm1d(3, num_components=num_components, history=history)
    weights = torch.softmax(torch.randn(history, num_components) * noise + torch.randn(num_components), -1)
    means = 10 * torch.randn(num_components, 3) + noise * torch.randn(history, num_components, 3)
    variances = (1 + torch.rand(num_components, 3)) * (noise * torch.randn(history, num_components, 3)).exp()
    for slot, component in dropped:
        weights[slot, component] = means[slot, component] = variances[slot, component] = 0
        weights[slot] /= weights[slot].sum()
    for slot in range(history):
        order = torch.randperm(num_components)
        layer.history_weights[slot], layer.history_means[slot] = weights[slot, order], means[slot, order]
        layer.history_vars[slot] = variances[slot, order]
    layer.num_batches_tracked += history
    return layer.eval(), (weights, means, variances)


@pytest.mark.parametrize("inference", ["ensemble", "mixture"])
def test_equal_mixtures_in_any_order_become_that_mixture(inference):
    layer, _ = permuted_history(0)
    layer.inference = inference
    x = 10 * torch.randn(200, 3)
    expected = layer(x)
    torch.testing.assert_close(mixnorm.distill(layer)(x), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dropped", [[], [(1, 2), (3, 0), (4, 1)]], ids=["all in use", "some dropped"])
def test_components_that_belong_together_are_merged(dropped):
    layer, slots = permuted_history(0.2, dropped)
    weights, means, variances = (t.double() for t in slots)
    tau = torch.tensor([0.9**age for age in range(4, -1, -1)], dtype=torch.float64)
    share = weights * (tau / tau.sum()).unsqueeze(1)
    total = share.sum(0)
    mean = (share.unsqueeze(-1) * means).sum(0) / total.unsqueeze(-1)
    variance = (share.unsqueeze(-1) * (variances + (means - mean) ** 2)).sum(0) / total.unsqueeze(-1)
    mixnorm.distill(layer)
    order = layer.history_means[0, :, 0].argsort()
    expected = mean[:, 0].argsort()
    torch.testing.assert_close(layer.history_weights[0, order], total[expected].float())
    torch.testing.assert_close(layer.history_means[0, order], mean[expected].float())
    torch.testing.assert_close(layer.history_vars[0, order], variance[expected].float())


@pytest.mark.parametrize("options", [c for c in WITH_HISTORY if c["inference"] == "pooled"], ids=str)
def test_a_pooled_mixture_is_kept(options):
    layer = trained(MixtureNorm2d(CHANNELS, **options))
    expected = evaluate(layer, X)
    mixnorm.distill(layer)
    torch.testing.assert_close(evaluate(layer, X), expected)
    assert "history_samples" not in layer.state_dict()


@pytest.mark.parametrize("options", WITHOUT_HISTORY, ids=str)
def test_layers_without_a_history_stay_as_they_are(options):
    layer = trained(MixtureNorm2d(CHANNELS, **options))
    expected = evaluate(layer, X)
    assert_same(evaluate(mixnorm.distill(layer), X), expected)


@pytest.mark.parametrize("batches", [0, 2])
@pytest.mark.parametrize("options", [c for c in WITH_HISTORY if c.get("bias", True)], ids=str)
def test_a_batch_norms_history_and_an_empty_one(options, batches):
    """One component alone in use: nothing is lost."""
    norm = nn.BatchNorm2d(CHANNELS)
    for seed in range(batches):
        norm(points(seed=seed))
    expected = norm.eval()(X)
    layer = mixnorm.distill(mixnorm.convert(copy.deepcopy(norm), form="paper", **options))
    torch.testing.assert_close(evaluate(layer, X), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_state_dict(dtype):
    layer = trained(MixtureNorm2d(CHANNELS, num_components=2)).to(dtype)
    distilled = mixnorm.distill(copy.deepcopy(layer))
    assert distilled.history_means.dtype == dtype
    other = MixtureNorm2d(CHANNELS, num_components=2, history=1).to(dtype)
    other.load_state_dict(distilled.state_dict())
    assert_same(evaluate(other, X.to(dtype)), evaluate(distilled, X.to(dtype)))


def test_training_goes_on_from_the_last_batch_alone():
    layer = mixnorm.distill(trained(MixtureNorm2d(CHANNELS))).train()
    torch.manual_seed(0)
    layer(X)
    assert layer.num_batches_tracked == 4
    assert_same(layer.mixture.means, layer.history_means[0])


@pytest.mark.parametrize("population", ["batch", "channel"])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.1, 10, 1e3, 1e6])
@pytest.mark.parametrize("where", [2, 11])
def test_one_batch_at_another_scale_does_not_spoil_it(where, scale, population):
    """Of twelve: the distilled layer is as the history, and as without it. Its variance would outweigh all others."""

    def rms(scale):
        torch.manual_seed(0)
        layer = MixtureNorm2d(CHANNELS, population=population)
        with torch.no_grad():
            for seed in range(12):
                layer(points(16, CHANNELS, 4, 4, seed=seed) * (scale if seed == where else 1))
        history = evaluate(copy.deepcopy(layer), X)
        return history.square().mean().sqrt(), evaluate(mixnorm.distill(layer), X).square().mean().sqrt()

    expected, (before, after) = rms(1.0)[1], rms(scale)
    for rms_of in (expected, before):
        assert rms_of / 1.5 < after < rms_of * 1.5


def test_slots_that_agree_keep_their_weight():
    """To the bit, whatever the order of their components; and how far one agrees that the others contradict, by hand."""
    layer, _ = permuted_history(0.2)
    slots = [t.double() for t in (*layer.slot_weights(), layer.history_means, layer.history_vars)]
    assert_same(agreement(*slots, 1e-5), torch.ones(5).double())
    # One component of one channel: a variance of 10⁴ among two of 1. q = 4·1 + 16 = 20.
    weights, tau = torch.ones(3, 1).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    variances = torch.tensor([1.0, 1.0, 1e4]).double().view(3, 1, 1)
    apart = (20 / 1e4) ** 2
    expected = torch.tensor([(0.3 + 0.5 * apart) / 0.8, (0.2 + 0.5 * apart) / 0.7, apart]).double()
    torch.testing.assert_close(agreement(weights, tau, torch.zeros(3, 1, 1).double(), variances, 1e-5), expected)


def test_a_model_without_mixture_norms_is_an_error():
    with pytest.raises(ValueError, match="no mixture norm to distill: convert it first"):
        mixnorm.distill(nn.Sequential(nn.BatchNorm2d(3)))


def test_digits_lose_little():
    """Trained for a few epochs with three mixture norms, a model keeps its accuracy to half a point."""
    digits = data.load("digits")
    torch.manual_seed(0)
    model = mixnorm.convert(DigitsCNN(), activation="relu")
    x, labels = digits.train.images.float() / 16, digits.train.labels
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(4):
        for index in torch.randperm(len(x)).split(64)[:-1]:
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]), labels[index]).backward()
            optimizer.step()

    # On all images: of the 359 test images, half a point would be two.
    images, labels = torch.cat((x, digits.test.images.float() / 16)), torch.cat((labels, digits.test.labels))

    def accuracy():
        return 100 * (evaluate(model, images).argmax(1) == labels).float().mean().item()

    before = accuracy()
    assert before > 95
    mixnorm.distill(model)
    assert accuracy() > before - 0.5
