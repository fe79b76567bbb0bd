"""One batch cannot spoil an evaluation: not by its scale, its place or its size."""

import copy
import functools
import math
import random
import warnings

import pytest
import torch
from layer_helpers import randn
from torch import nn

import mixnorm
from mixnorm import MixtureNorm1d, MixtureNorm2d
from mixnorm.ops import reference

BATCHES = 10
MOST = 1.5  # what one batch may change the rms of an evaluation by, beyond what it does to batch norm


def ordinary(kind, count, channels, seed):
    x = randn(count, channels, 4, 4, seed=seed)
    if kind == "modes":
        x = x + 4 * torch.randint(0, 2, (count, 1, 1, 1), generator=torch.Generator().manual_seed(seed))
    return (x - 0.5).relu() if kind == "relu" else x


def few(count):
    return lambda x: x.flatten(2).transpose(1, 2).reshape(-1, x.shape[1])[:count, :, None, None]


UNUSUAL = {
    **{f"times {scale:g}": (lambda x, scale=scale: x * scale) for scale in (1e-6, 1e-3, 0.1, 0.25, 0.4, 2, 10, 1e3, 1e6)},
    **{f"plus {shift:g}": (lambda x, shift=shift: x + shift) for shift in (0.3, 1, 3, 10, 100, 1e4, 1e8)},
    **{f"{count} points": few(count) for count in (2, 3, 5, 8, 13, 16, 20, 24, 30, 40)},
    "constant": lambda x: torch.full_like(x, 3.0),
    "zeros": torch.zeros_like,
}


@functools.cache
def evaluated(kind, channels, components, where=None, change=None, **options):
    """The rms of an evaluation after ten batches, one of them unusual: mixture norm's, and batch norm's."""
    torch.manual_seed(0)
    norms = MixtureNorm2d(channels, num_components=components, **options), nn.BatchNorm2d(channels)
    x = ordinary(kind, 64, channels, seed=100)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(BATCHES):
            batch = ordinary(kind, 16, channels, seed)
            batch = change(batch) if seed == where else batch
            for norm in norms:
                norm(batch)
        return [norm.eval()(x).square().mean().sqrt().item() for norm in norms]


@pytest.mark.parametrize("unusual", UNUSUAL)
@pytest.mark.parametrize("kind", ["one mode", "modes", "relu"])
def test_one_unusual_batch_of_ten(kind, unusual):
    for channels, components, where in ((4, 3, BATCHES - 1), (16, 5, 2), (64, 3, BATCHES - 1)):
        expected = evaluated(kind, channels, components)
        found = evaluated(kind, channels, components, where, UNUSUAL[unusual])
        changed, batch_norm = (abs(math.log(a / b)) for a, b in zip(found, expected, strict=True))
        assert changed <= batch_norm + math.log(MOST), (channels, components, where, found, expected)


@pytest.mark.parametrize("options", [{"activation": "relu"}, {"affine_mode": "statistics"}, {"population": "channel"}])
def test_in_every_form(options):
    expected = evaluated("one mode", 8, 3, **options)[0]
    for unusual in ("times 0.001", "plus 1e+08", "2 points"):
        found = evaluated("one mode", 8, 3, BATCHES - 1, UNUSUAL[unusual], **options)[0]
        assert expected / MOST < found < expected * MOST, unusual


def test_ordinary_slots_are_the_plain_ensemble():
    """To the bit: nothing is taken from a slot that describes a point."""
    torch.manual_seed(0)
    for backend in ("auto", "reference"):
        layer = MixtureNorm2d(8, backend=backend)
        with torch.no_grad():
            for seed in range(5):
                layer(ordinary("modes", 16, 8, seed))
            x = ordinary("modes", 16, 8, seed=9)
            found = layer.eval()(x)
            layer.bounded = False
            assert torch.equal(found, layer(x))


def test_the_definition_of_trust():
    """Written out for one point and two slots of one component, one of them far from the point."""
    x, means = torch.tensor([[3.0, 0.0]]).double(), torch.tensor([[[0.0, 0.0]], [[2.0, 1.0]]]).double()
    variances, tau = torch.tensor([[[0.0625, 1.0]], [[1.0, 1.0]]]).double(), torch.tensor([0.25, 0.75]).double()
    history = reference.History(torch.ones(2, 1).double(), means, variances, tau, "ensemble", bounded=True)
    found = reference.inference(x, history, reference.Parameters(), reference.Form(eps=0.0))
    farthest = 24.0  # 4 for each of two channels, and 16
    trust = farthest / (3.0**2 / 0.0625)
    slots = torch.tensor([12.0, 0.0]).double(), torch.tensor([1.0, -1.0]).double()
    expected = (0.25 * trust * slots[0] + 0.75 * slots[1]) / (0.25 * trust + 0.75)
    torch.testing.assert_close(found[0], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("count", [2, 3, 7, 15])
def test_a_batch_of_few_points_is_batch_norms(count):
    """Never exact zeros, which a component for each point would make of it."""
    layer, batch_norm = MixtureNorm1d(6), nn.BatchNorm1d(6)
    x = randn(count, 6, seed=1)
    with pytest.warns(UserWarning, match=rf"a batch of {count} points is too small for 3 components.*drop_last"):
        found = layer(x)
    torch.testing.assert_close(found, batch_norm(x), atol=1e-5, rtol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)  # it was said once


def test_few_points_count_for_few():
    layer = MixtureNorm1d(6)
    layer(randn(64, 6, seed=0))
    with pytest.warns(UserWarning, match="too small"):
        layer(randn(6, 6, seed=1))
    assert layer.history_weights[-1].sum() == pytest.approx(6 / 24)
    assert layer.mixture.weights.sum() == pytest.approx(1)
    _, tau = layer.slot_weights()
    assert tau[-1] / tau[-2] == pytest.approx(6 / 24 / 0.9, rel=1e-5)
    assert layer.effective_components() == 1


def test_the_rest_of_a_data_set():
    """Nine batches of 64 and one of two: the evaluation has the scale of the training."""
    torch.manual_seed(0)
    layer = MixtureNorm1d(64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(9):
            trained = layer(randn(64, 64, seed=seed)).std()
        layer(randn(2, 64, seed=9))
        evaluated = layer.eval()(randn(64, 64, seed=10)).std()
    assert trained / 1.5 < evaluated < trained * 1.5


SIZES = [[2], [2, 2], [2] * 12, [3] * 12, [64] * 9 + [2], [2] * 12 + [64], [16], [3, 16, 5, 3, 2]]
FORMS = [
    {},
    {"scale": "unit"},
    {"scale": "unit", "within": 0.0, "between": 1.0},
    {"scale": "unit", "within": 0.5, "between": 1.0},
]


@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("channels", [4, 64])
def test_any_sequence_of_batch_sizes_leaves_evaluation_the_scale_of_training(channels, options):
    """Within the scales of the training outputs, which differ where small batches get fewer components, and half more."""
    choose, wrong = random.Random(1), []
    sequences = SIZES + [
        [choose.choice([2, 2, 3, 4, 5, 8, 16, 32, 64]) for _ in range(choose.randint(1, 14))] for _ in range(30)
    ]
    for number, sizes in enumerate(sequences):
        layer, scales = MixtureNorm1d(channels, **options), []
        torch.manual_seed(0)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for place, size in enumerate([*sizes, 256]):
                if place == len(sizes):
                    evaluated = copy.deepcopy(layer).eval()(randn(256, channels, seed=1000 * number)).square().mean().sqrt()
                trained = layer(randn(size, channels, seed=1000 * number + place + 1))
                scales.append(trained.square().mean().sqrt())
        if not min(scales) / 1.5 <= evaluated <= max(scales) * 1.5:
            wrong.append((sizes, float(evaluated), float(min(scales)), float(max(scales))))
    assert not wrong


def test_channels_keep_their_own_scale_where_all_batches_are_small():
    layer, scale = MixtureNorm1d(8), 10.0 ** torch.linspace(-2, 2, 8)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(40):
            layer(randn(4, 8, seed=seed) * scale)
        evaluated = layer.eval()(randn(256, 8, seed=99) * scale).square().mean(0).sqrt()
    assert 1 / 1.5 < evaluated.min() <= evaluated.max() < 1.5


def test_distill_after_few_points():
    torch.manual_seed(0)
    layer = MixtureNorm1d(8)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(9):
            layer(randn(64, 8, seed=seed))
        layer(randn(2, 8, seed=9))
        x = randn(256, 8, seed=10)
        before = layer.eval()(x).std()
        after = mixnorm.distill(layer)(x).std()
    assert before / 1.5 < after < before * 1.5


@pytest.mark.parametrize("value", [1e8, 1e10])
def test_digits_after_one_huge_value(value):
    """The mixture that it made is far from all others, whose digits must not suffer for it."""
    torch.manual_seed(0)
    layer = MixtureNorm2d(8)
    for seed in range(BATCHES):
        x = randn(16, 8, 4, 4, seed=seed)
        x[0, 0, 0, 0] = value if seed == 4 else 0
        layer(x)
    x = randn(16, 8, 4, 4, seed=20)
    found, expected = layer.eval()(x), layer.double()(x.double())
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("count", [2, 3, 5, 8, 12])
def test_components_that_keep_their_place_after_small_batches_alone(count):
    """Their variances, of one point or two, are averaged with those of the batch before."""
    found = []
    for seed in range(8):
        torch.manual_seed(seed)
        layer, batch_norm = MixtureNorm1d(8, component_affine=True, seeding="warm", scale="unit"), nn.BatchNorm1d(8)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(30):
                x = torch.randn(count, 8)
                layer(x)
                batch_norm(x)
            x = torch.randn(500, 8)
            found.append(layer.eval()(x).std() / batch_norm.eval()(x).std())
    assert 1 / MOST < torch.stack(found).log().mean().exp() < MOST


def test_a_history_that_stays_changes_no_mixture_of_a_small_batch():
    layer, x = MixtureNorm1d(4, momentum=0.0), randn(4, 4, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer(x)
    torch.testing.assert_close(layer.mixture.variances[0], x.var(0, unbiased=False))
