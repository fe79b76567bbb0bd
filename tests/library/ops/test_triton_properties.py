"""What must hold for a layer with backend="triton", whatever the numbers."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from triton_helpers import BF16, DEVICE, DTYPES, rand

import mixnorm
from mixnorm import MixtureNorm2d
from mixnorm.functional import mixture_normalize

pytestmark = pytest.mark.usefixtures("poisoned")
POPULATIONS = [
    {"population": "batch"},
    {"population": "instance"},
    {"population": "layer"},
    {"population": "group", "num_groups": 2},
    {"population": "channel"},
]
WITH_HISTORY = [POPULATIONS[0], POPULATIONS[-1]]
FORMATS = [torch.contiguous_format, torch.channels_last]


def population_id(options):
    return options["population"]


def make_layer(channels=4, backend="triton", **options):
    return MixtureNorm2d(channels, backend=backend, device=DEVICE, **options)


def images(*shape, seed=0):
    return rand(*(shape or (3, 4, 5, 5)), seed=seed).float().to(DEVICE)


def gradients(layer, x, seed=1):
    x = x.detach().requires_grad_()
    y = layer(x)
    upstream = rand(*y.shape, seed=seed).to(y.dtype).to(DEVICE)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], upstream)]


def state(layer):
    return {name: value.clone() for name, value in layer.state_dict().items()}


def assert_same(a, b):
    torch.testing.assert_close(a, b, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("of_gradient", FORMATS, ids=str)
@pytest.mark.parametrize("of_input", FORMATS, ids=str)
@pytest.mark.parametrize("channels", [1, 7, 33])
def test_one_component_is_batch_norm(channels, of_input, of_gradient):
    x = (3 * images(5, channels, 6, 7) + 2).contiguous(memory_format=of_input)
    upstream = images(5, channels, 6, 7, seed=1).contiguous(memory_format=of_gradient)
    results = []
    for layer in (make_layer(channels, num_components=1), nn.BatchNorm2d(channels, device=DEVICE)):
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 2, channels))
            layer.bias.copy_(torch.linspace(-1, 1, channels))
        leaf = x.detach().requires_grad_()
        y = layer(leaf)
        results.append([y.detach(), *torch.autograd.grad(y, [leaf, layer.weight, layer.bias], upstream)])
        assert y.is_contiguous(memory_format=of_input)
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seeding", ["kmeans++", "warm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", WITH_HISTORY, ids=population_id)
def test_a_batch_that_is_not_finite_never_enters_the_history(options, value, seeding):
    layer = make_layer(seeding=seeding, **options)
    layer(images())
    before = state(layer)
    bad = images(seed=1)
    bad[1, 2, 3, 4] = value
    layer(bad)
    assert_same(state(layer), before)
    assert layer(images(seed=2)).isfinite().all()
    assert layer.num_batches_tracked == 2
    assert layer.eval()(images()).isfinite().all()


@pytest.mark.parametrize("seeding", ["kmeans++", "warm"])
def test_training_recovers_from_a_first_batch_that_is_not_finite(seeding):
    layer = make_layer(seeding=seeding)
    layer(images() * torch.nan)
    assert layer.num_batches_tracked == 0
    for mode in (False, True, False):
        assert layer.train(mode)(images(seed=1)).isfinite().all()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_batch_passes_through(dtype, training):
    layer = make_layer(activation="relu")
    layer(images())
    before = state(layer)
    y, *grads = gradients(layer.train(training), images(0, 4, 5, 5).to(dtype))
    assert (y.shape, y.dtype) == ((0, 4, 5, 5), dtype)
    assert not any(g.any() for g in grads)
    assert_same(state(layer), before)


@pytest.mark.parametrize("options", [{"momentum": 0}, {"momentum": 1}, {"min_weight": 0}, {"eps": 0}, {"eps": 1}], ids=str)
def test_whole_numbers_are_numbers(options):
    """An option may be 1 where 1.0 is meant; what is kept of one must not spoil the other."""
    results = []
    for number in (int, float, int):
        torch.manual_seed(0)
        layer = make_layer(activation="relu", **{name: number(value) for name, value in options.items()})
        results.append([*gradients(layer, images()), *gradients(layer.eval(), images(seed=1))])
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


DEGENERATE = {
    "constant channel": lambda: images().index_fill_(1, torch.tensor(1, device=DEVICE), 7.0),
    "all points equal": lambda: torch.full((3, 4, 5, 5), -5.0, device=DEVICE),
    "all zero": lambda: torch.zeros(3, 4, 5, 5, device=DEVICE),
    "fewer points than components": lambda: images(1, 4, 1, 2),
    "one point far away": lambda: images().index_put((torch.tensor(0),) * 4, torch.tensor(1e6, device=DEVICE)),
}


@pytest.mark.parametrize("affine_mode", ["output", "statistics"])
@pytest.mark.parametrize("batch", DEGENERATE)
def test_degenerate_batches_give_finite_numbers(batch, affine_mode):
    layer = make_layer(num_components=5, affine_mode=affine_mode)
    for mode in (True, False):
        assert all(t.isfinite().all() for t in gradients(layer.train(mode), DEGENERATE[batch]()))
    assert all(t.isfinite().all() for t in layer.state_dict().values())
    assert layer.effective_components() >= 1


def test_constant_batch_gives_beta():
    layer = make_layer()
    nn.init.uniform_(layer.bias)
    y = layer(torch.full((3, 4, 2, 2), 11.0, device=DEVICE))
    torch.testing.assert_close(y, layer.bias.view(-1, 1, 1).expand_as(y), atol=1e-6, rtol=1e-6)


def modes_far_apart(offset=0.0):
    x = images(8, 4, 4, 4)
    x[::2] += 1000
    x[1::2] -= 1000
    return x + offset


@pytest.mark.parametrize("inference", ["ensemble", "mixture", "paper"])
@pytest.mark.parametrize("offset", [0.0, 3000.0])
def test_modes_far_apart_keep_their_digits(offset, inference):
    """Two modes, 2,000 deviations apart: the same layer in fp64, where the fit is unambiguous."""
    results = []
    for dtype, backend in ((torch.float32, "triton"), (torch.float64, "reference")):
        torch.manual_seed(0)
        layer = make_layer(num_components=2, backend=backend, inference=inference).to(dtype)
        x = modes_far_apart(offset).to(dtype)
        found = gradients(layer, x)
        for step in range(3):  # several batches, so that the history has mixtures that are nearly the same
            layer(x + 0.1 * step)
        results.append([t.float() for t in (*found, *gradients(layer.eval(), x))])
    torch.testing.assert_close(*results, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("options", "dtype"), [({}, torch.float32), ({"activation": "silu"}, torch.float32), ({}, BF16)])
def test_a_gradient_penalty(options, dtype, training):
    """The gradient of a gradient's norm, which the kernels leave to the reference."""
    results = []
    for backend in ("triton", "reference"):
        torch.manual_seed(0)
        layer = make_layer(backend=backend, **options)
        layer(images(seed=3))
        leaf = images().to(dtype).requires_grad_()
        torch.manual_seed(1)
        y = layer.train(training)(leaf)
        upstream = images(seed=1).to(dtype).requires_grad_()
        (first,) = torch.autograd.grad(y, leaf, upstream, create_graph=True)
        penalty = first.float().square().sum()
        # In evaluation and without an activation the output is linear in the input: its gradient does not depend on it.
        found = torch.autograd.grad(penalty, [leaf, layer.weight, upstream], allow_unused=True, materialize_grads=True)
        assert found[0].any() == bool(training or options)
        assert all(g.any() for g in found[1:])
        results.append([first.detach(), *found])
    tolerance = 1e-4 if dtype == torch.float32 else 2**-6
    for found, expected in zip(*results, strict=True):
        scale = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(found, expected, atol=tolerance * scale, rtol=tolerance)


def test_recomputation_counts_a_batch_once():
    x = images().requires_grad_()
    plain, recomputed = make_layer(), make_layer()
    torch.manual_seed(0)
    expected = plain(x)
    torch.manual_seed(0)
    y = checkpoint(recomputed, x, use_reentrant=False)
    upstream = images(seed=1)
    torch.testing.assert_close(*(torch.autograd.grad(t, x, upstream)[0] for t in (y, expected)))
    assert recomputed.num_batches_tracked == 1
    assert_same(state(recomputed), state(plain))


def test_function_transforms_go_through_the_reference():
    x, resp, upstream = images(20, 3), images(20, 2, seed=1).softmax(-1), images(20, 3, seed=2)
    found = torch.func.grad(lambda x: (mixture_normalize(x, resp, backend="triton") * upstream).sum())(x)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(mixture_normalize(leaf, resp, backend="reference"), leaf, upstream)
    torch.testing.assert_close(found, expected)


def test_a_frozen_layer_still_learns_its_parameters():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), make_layer()).to(DEVICE)
    model(images(3, 3, 7, 7))
    mixnorm.freeze(model)
    before = state(model[1])
    y = model.train()(images(3, 3, 7, 7, seed=1))
    y.backward(rand(*y.shape, seed=2).to(y))
    assert all(p.grad.any() for p in model.parameters())
    assert_same(state(model[1]), before)


def test_two_layers_with_the_same_numbers_are_the_same_to_the_bit():
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = make_layer(activation="relu")
        results.append([*gradients(layer, images()), *gradients(layer.eval(), images(seed=1)), *layer.buffers()])
    if DEVICE == "cpu":  # where nothing runs at the same time; on a GPU see test_gpu_layers.py
        assert_same(*results)
    else:
        torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", POPULATIONS, ids=population_id)
def test_a_model_in_channels_last(options):
    """``to(memory_format=...)`` reorders every buffer of four dimensions, of which the history of "channel" has two."""
    results = []
    for memory_format in (torch.channels_last, torch.contiguous_format):
        layer = make_layer(**options).to(memory_format=memory_format)
        found = []
        for step in range(2):
            torch.manual_seed(step)
            found.append(layer(images(2, 4, 4, 4, seed=step).contiguous(memory_format=memory_format)))
        results.append([*found, *layer.buffers(), layer.eval()(images(2, 4, 4, 4, seed=4))])
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def test_copies_and_moves_keep_the_history():
    layer = make_layer()
    layer(images())
    again = copy.deepcopy(layer)
    x = images(seed=1)
    assert_same(again.eval()(x), layer.eval()(x))
    restored = make_layer()
    restored.load_state_dict(layer.state_dict())
    assert_same(restored.eval()(x), layer.eval()(x))
