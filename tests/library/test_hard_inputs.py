"""Inputs that break naive implementations: degenerate, empty, not finite, badly scaled, low precision, large."""

import copy

import pytest
import torch
from layer_helpers import all_finite, randn
from torch import nn

from mixnorm import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d
from mixnorm.functional import mixture_normalize

POPULATIONS = [
    {"population": "batch"},
    {"population": "instance"},
    {"population": "layer"},
    {"population": "group", "num_groups": 2},
    {"population": "channel"},
]
WITH_HISTORY = [p for p in POPULATIONS if p["population"] in ("batch", "channel")]


def gradients(layer, x, seed=1):
    """The output, and the gradients of input, γ and β under a random upstream gradient."""
    x = x.detach().requires_grad_()
    y = layer(x)
    inputs = [x, *layer.parameters()]
    return [y.detach(), *torch.autograd.grad(y, inputs, randn(*y.shape, seed=seed, dtype=y.dtype))]


def state(layer):
    return {name: value.clone() for name, value in layer.state_dict().items()}


def assert_same(a, b):
    torch.testing.assert_close(a, b, atol=0, rtol=0, equal_nan=True)


# --- degenerate batches -------------------------------------------------------------------------------------------------


def constant_channels():
    x = randn(3, 4, 4, 3)
    x[:, 1], x[:, 2] = 7.0, 0.0
    return x


def two_distinct_points():
    x = torch.zeros(3, 4, 4, 3)
    x[..., 1:] = torch.tensor([1.0, -2.0, 3.0, 0.5])[:, None, None]
    return x


DEGENERATE = {
    "constant channels": constant_channels,
    "all points equal": lambda: torch.full((3, 4, 4, 3), -5.0),
    "all zero": lambda: torch.zeros(3, 4, 4, 3),
    "two distinct points": two_distinct_points,
    "fewer points than components": lambda: randn(1, 4, 1, 2),
    "one point far away": lambda: randn(3, 4, 4, 3).index_fill_(3, torch.tensor([0]), 1e6),
}


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("affine_mode", ["output", "statistics"])
@pytest.mark.parametrize("num_components", [3, 16])
@pytest.mark.parametrize("options", POPULATIONS, ids=lambda o: o["population"])
@pytest.mark.parametrize("batch", DEGENERATE)
def test_degenerate_batches_give_finite_numbers(batch, options, num_components, affine_mode, activation):
    layer = MixtureNorm2d(4, num_components=num_components, affine_mode=affine_mode, activation=activation, **options)
    x = DEGENERATE[batch]()
    for mode in (True, False):
        assert all_finite(*gradients(layer.train(mode), x))
    assert all_finite(*layer.state_dict().values())
    assert torch.as_tensor(layer.effective_components()).ge(1).all()


@pytest.mark.parametrize("seeding", ["kmeans++", "warm"])
@pytest.mark.parametrize("options", WITH_HISTORY, ids=lambda o: o["population"])
def test_a_degenerate_batch_does_not_spoil_the_next(options, seeding):
    layer = MixtureNorm2d(4, num_components=3, seeding=seeding, **options)
    for batch in DEGENERATE.values():
        layer(batch())
    for seed in range(3):
        y = layer(randn(8, 4, 6, 6, seed=seed))
        assert 0.5 < y.std() < 2.5  # with the 1/√λ scale it is not 1
    assert torch.as_tensor(layer.effective_components()).ge(2).all()


def test_constant_batch_gives_beta():
    """As batch norm does: no deviation, nothing to divide."""
    layer = MixtureNorm2d(4)
    nn.init.uniform_(layer.bias)
    y = layer(torch.full((3, 4, 2, 2), 11.0))
    torch.testing.assert_close(y, layer.bias.view(-1, 1, 1).expand_as(y), atol=1e-6, rtol=1e-6)


# --- empty batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", POPULATIONS, ids=lambda o: o["population"])
def test_empty_batch_passes_through(options, training, dtype):
    """A rank may get no sample: it must keep its part in the graph, and learn nothing."""
    layer = MixtureNorm2d(4, activation="relu", **options)
    layer(randn(3, 4, 5, 5))
    before = state(layer)
    y, *grads = gradients(layer.train(training), torch.empty(0, 4, 5, 5, dtype=dtype))
    assert y.shape == (0, 4, 5, 5)
    assert y.dtype == dtype
    assert [g.shape for g in grads] == [(0, 4, 5, 5), (4,), (4,)]
    assert not any(g.any() for g in grads)
    assert_same(state(layer), before)


@pytest.mark.parametrize(("layer", "shape"), [(MixtureNorm1d(4), (0, 4)), (MixtureNorm3d(4, affine=False), (0, 4, 2, 3, 3))])
def test_empty_batch_of_other_ranks(layer, shape):
    assert layer(torch.empty(shape)).shape == shape
    assert layer.num_batches_tracked == 0


# --- NaN and infinity ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("inference", ["ensemble", "pooled"])
@pytest.mark.parametrize("seeding", ["kmeans++", "warm"])
@pytest.mark.parametrize("options", WITH_HISTORY, ids=lambda o: o["population"])
def test_a_batch_that_is_not_finite_never_enters_the_history(options, seeding, inference, value):
    layer = MixtureNorm2d(4, seeding=seeding, inference=inference, **options)
    for seed in range(2):
        layer(randn(3, 4, 5, 5, seed=seed))
    before, mixture = state(layer), copy.deepcopy(layer.mixture)
    bad = randn(3, 4, 5, 5)
    bad[1, 2, 3, 4] = value
    layer(bad)
    assert_same(state(layer), before)
    assert_same(vars(layer.mixture), vars(mixture))
    assert all_finite(layer(randn(3, 4, 5, 5, seed=3)))
    assert layer.num_batches_tracked == 3
    assert all_finite(layer.history_weights, layer.history_means, layer.history_vars)
    assert all_finite(layer.eval()(randn(3, 4, 5, 5)))


@pytest.mark.parametrize("options", WITH_HISTORY, ids=lambda o: o["population"])
def test_samples_whose_squares_are_not_finite_do_not_spoil_the_pool(options):
    """Their numbers are finite, and would be kept, but their variance is not."""
    layer = MixtureNorm2d(4, inference="pooled", history=3, **options)
    layer(randn(3, 4, 5, 5))
    layer(3e38 * randn(3, 4, 5, 5).clamp(-1, 1))
    for sign in (1, -1):  # each can be kept, but not both be fitted together
        layer(sign * 1.5e19 + 1e10 * randn(3, 4, 5, 5))
        assert all_finite(layer.eval()(randn(3, 4, 5, 5)))
        layer.train()


@pytest.mark.parametrize("seeding", ["kmeans++", "warm"])
@pytest.mark.parametrize("options", [*POPULATIONS, {"population": "batch", "track_running_stats": False}], ids=str)
def test_training_recovers_from_a_first_batch_that_is_not_finite(options, seeding):
    layer = MixtureNorm2d(4, seeding=seeding, **options)
    bad = randn(3, 4, 5, 5)
    bad[1, 2, 3, 4] = torch.nan
    layer(bad)
    for mode in (True, False):
        assert all_finite(layer.train(mode)(randn(3, 4, 5, 5, seed=1)))


# --- precision ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("affine_mode", ["output", "statistics"])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_mean_large_beside_the_deviation_keeps_its_digits(activation, affine_mode):
    """Mean 1000, deviation 1: variances as E[x²] - E[x]² would have no digit left in fp32."""
    x, resp = 1000 + randn(500, 6), randn(500, 3, seed=2).mul(2).softmax(-1)
    upstream = randn(500, 6, seed=3)

    def run(dtype):
        leaf, weight, bias = (
            t.to(dtype).requires_grad_() for t in (x, torch.linspace(0.5, 2, 6), torch.linspace(-0.3, 0.4, 6))
        )
        y = mixture_normalize(leaf, resp.to(dtype), 1e-5, weight, bias, activation, affine_mode=affine_mode)
        return [t.float() for t in (y.detach(), *torch.autograd.grad(y, (leaf, weight, bias), upstream.to(dtype)))]

    torch.testing.assert_close(run(torch.float32), run(torch.float64), atol=1e-3, rtol=1e-3)


def modes_far_apart():
    x = randn(16, 4, 6, 6)
    x[::2] += 1000
    x[1::2] -= 1000
    return x


@pytest.mark.parametrize(
    ("num_components", "batch"),
    [(1, lambda: 1000 + randn(16, 4, 6, 6)), (2, modes_far_apart), (2, lambda: 3000 + modes_far_apart())],
    ids=["one mode", "two modes", "two modes off center"],
)
@pytest.mark.parametrize("options", WITH_HISTORY, ids=lambda o: o["population"])
def test_whole_layer_keeps_its_digits(options, num_components, batch):
    """The same layer in fp64, where the fit is unambiguous: output, gradients, history and evaluation."""
    results = []
    for dtype in (torch.float32, torch.float64):
        layer = MixtureNorm2d(4, num_components=num_components, **options).to(dtype)
        x = batch().to(dtype)
        found = gradients(layer, x)
        # Components are in no particular order: sort them by their means.
        order = layer.mixture.means[..., :1].argsort(-2)
        means, variances = (t.gather(-2, order.expand_as(t)) for t in (layer.mixture.means, layer.mixture.variances))
        results.append([t.detach().float() for t in (*found, means, variances, *gradients(layer.eval(), x))])
    torch.testing.assert_close(*results, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-10)])
@pytest.mark.parametrize("options", POPULATIONS, ids=lambda o: o["population"])
def test_half_precision_input_is_computed_in_fp32(options, dtype, tolerance):
    """The only rounding is that of the result: the dtype of the input comes out, the statistics are fp32."""
    x = randn(6, 4, 5, 5, dtype=dtype)
    low, full = MixtureNorm2d(4, **options), MixtureNorm2d(4, **options)
    for training in (True, False):
        torch.manual_seed(0)
        y = low.train(training)(x)
        torch.manual_seed(0)
        expected = full.train(training)(x.float())
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), expected, atol=1e-6, rtol=tolerance)
    assert all(b.dtype == torch.float32 for b in low.buffers() if b.is_floating_point())
    torch.testing.assert_close(state(low), state(full), atol=1e-6, rtol=1e-6)

    torch.manual_seed(0)
    _, *found = gradients(low.train(), x)
    torch.manual_seed(0)
    upstream = randn(*x.shape, seed=1, dtype=dtype)
    leaf = x.float().requires_grad_()
    expected = torch.autograd.grad(full.train()(leaf), [leaf, *full.parameters()], upstream.float())
    assert found[0].dtype == dtype
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.float(), b, atol=4 * tolerance, rtol=4 * tolerance)


def test_autocast_leaves_the_norm_in_fp32():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), MixtureNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), MixtureNorm2d(5))
    alone, seen = copy.deepcopy(model), {}
    for i in (1, 4):
        model[i].register_forward_hook(lambda _, inputs, y, i=i: seen.__setitem__(i, (inputs[0], y)))
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(randn(4, 3, 9, 9))
    torch.manual_seed(0)
    for i in (1, 4):
        x, out = seen[i]
        assert x.dtype == out.dtype == torch.bfloat16
        assert_same(alone[i](x), out)
        assert_same(state(alone[i]), state(model[i]))
    y.backward(randn(*y.shape, dtype=y.dtype))
    assert all_finite(*(p.grad for p in model.parameters()))
    assert all(p.grad.any() for p in model[4].parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.eval()(randn(4, 3, 9, 9)).dtype == torch.bfloat16


# --- size ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "num_components"),
    [((64, 2048), 3), ((2, 2048, 4, 4), 2), ((1_000_000, 2), 3), ((600, 8), 16)],
    ids=["2048 channels", "2048 channels, images", "a million points", "16 components"],
)
def test_large_sizes(shape, num_components):
    """Whatever ν is, the overall mean and variance of the mixture are those of the points."""
    layer = (MixtureNorm1d if len(shape) == 2 else MixtureNorm2d)(shape[1], num_components=num_components)
    x = 3 + randn(*shape)
    x[::2] += 2
    assert all_finite(*gradients(layer, x))
    weights, means, variances = (t.double() for t in vars(layer.mixture).values())
    rows = x.double().movedim(1, -1).reshape(-1, shape[1])
    mean = weights @ means
    assert weights.sum().item() == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(mean, rows.mean(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(weights @ (variances + (means - mean) ** 2), rows.var(0, correction=0), atol=1e-3, rtol=1e-3)
    assert all_finite(layer.eval()(x))


def test_a_million_points_in_three_clear_modes():
    centers = torch.tensor([[-30.0, 0.0], [30.0, 0.0], [0.0, 50.0]])
    labels = torch.arange(1_000_000) % 10 // 4  # 40%, 40%, 20%
    layer = MixtureNorm1d(2, num_components=3, affine=False)
    y = layer(centers[labels] + randn(1_000_000, 2))
    order = (layer.mixture.means[:, 0] + 3 * (layer.mixture.means[:, 1] > 25) * 50).argsort()
    torch.testing.assert_close(layer.mixture.means[order], centers, atol=0.01, rtol=0)
    torch.testing.assert_close(layer.mixture.weights[order], torch.tensor([0.4, 0.4, 0.2]), atol=1e-4, rtol=0)
    # Each mode is normalized on its own, and scaled by 1/√λ.
    for k, weight in enumerate((0.4, 0.4, 0.2)):
        mode = y[labels == k]
        torch.testing.assert_close(mode.mean(0), torch.zeros(2), atol=0.01, rtol=0)
        torch.testing.assert_close(mode.var(0), torch.full((2,), 1 / weight), atol=0.01, rtol=0.01)


# --- memory -------------------------------------------------------------------------------------------------------------

LAYOUTS = [
    ((3, 4, 5, 6), torch.channels_last, torch.contiguous_format),
    ((3, 4, 5, 6), torch.contiguous_format, torch.channels_last),
    ((2, 4, 3, 5, 2), torch.channels_last_3d, torch.contiguous_format),
    ((2, 4, 3, 5, 2), torch.contiguous_format, torch.channels_last_3d),
]


@pytest.mark.parametrize("options", POPULATIONS, ids=lambda o: o["population"])
@pytest.mark.parametrize(("shape", "given", "other"), LAYOUTS, ids=str)
def test_memory_format_is_kept_and_changes_no_number(shape, given, other, options):
    kind = MixtureNorm2d if len(shape) == 4 else MixtureNorm3d
    x = randn(*shape)
    a, b = kind(4, **options), kind(4, **options)
    for training in (True, False):
        torch.manual_seed(0)
        found = gradients(a.train(training), x.to(memory_format=given))
        torch.manual_seed(0)
        expected = gradients(b.train(training), x.to(memory_format=other))
        for output, gradient, memory_format in ((*found[:2], given), (*expected[:2], other)):
            assert output.is_contiguous(memory_format=memory_format)
            assert gradient.is_contiguous(memory_format=memory_format)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


SLICES = {
    "every second row": lambda: randn(6, 4, 10, 6)[:, :, ::2],
    "every second channel": lambda: randn(6, 8, 5, 6)[:, ::2],
    "every second sample": lambda: randn(12, 4, 5, 6)[1::2],
    "crop": lambda: randn(6, 4, 9, 9)[:, :, 2:7, 1:7],
    "crop of channels last": lambda: randn(6, 4, 9, 9).to(memory_format=torch.channels_last)[:, :, 2:7, 1:7],
    "transposed": lambda: randn(6, 4, 5, 6).transpose(2, 3),
    "permuted": lambda: randn(5, 4, 6, 6).permute(2, 1, 0, 3),
    "expanded": lambda: randn(6, 4, 5, 1).expand(6, 4, 5, 6),
}


@pytest.mark.parametrize("options", POPULATIONS, ids=lambda o: o["population"])
@pytest.mark.parametrize("view", SLICES)
def test_strided_input_gives_what_its_copy_gives(view, options):
    x = SLICES[view]()
    assert not x.is_contiguous()
    a, b = MixtureNorm2d(4, activation="relu", **options), MixtureNorm2d(4, activation="relu", **options)
    for training in (True, False):
        torch.manual_seed(0)
        found = gradients(a.train(training), x)
        torch.manual_seed(0)
        expected = gradients(b.train(training), x.contiguous())
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state(a), state(b), atol=1e-5, rtol=1e-5)
