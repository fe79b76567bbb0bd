"""What trainers do to a model: mixed precision, accumulated gradients, averages of weights, functional calls."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from layer_helpers import CHANNELS, CONFIGURATIONS, assert_same, points, trained
from torch import nn
from torch.autograd import forward_ad
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import mixnorm
from mixnorm import MixtureNorm2d

SHAPE = (3, 7, 6)
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def network(**options):
    """Two norms in a row, so that what one does wrong reaches the other."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), MixtureNorm2d(6, history=3, **options), nn.ReLU(), nn.Conv2d(6, 6, 3),
        MixtureNorm2d(6, history=3, **options), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


def norms(model):
    return [module for module in model.modules() if isinstance(module, MixtureNorm2d)]


def buffers(model):
    return dict(copy.deepcopy(model).named_buffers())


def batches(count=4, size=8):
    return [(points(size, *SHAPE, seed=seed), torch.arange(size) % 3) for seed in range(count)]


# --- mixed precision and accumulated gradients --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_autocast_with_gradient_scaling_trains_and_survives_an_overflow(device, dtype):
    model = network(num_components=2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8)

    def step(x, labels):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype):
            loss = F.cross_entropy(model(x.to(device)), labels.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    losses = [step(*batch) for batch in batches(1) * 20]
    assert losses[-1] < 0.5 * losses[0]
    assert scaler.get_scale() == 2.0**8  # no step was left out
    before, weights, scale = buffers(model), copy.deepcopy(list(model.parameters())), scaler.get_scale()
    x, labels = batches(1)[0]
    step(x * torch.inf, labels)
    assert scaler.get_scale() < scale
    assert_same(list(model.parameters()), weights)
    assert_same(buffers(model), before)
    assert step(x, labels) < 0.5 * losses[0]


def test_gradient_accumulation_adds_up_and_counts_every_part():
    model = network()
    parts = batches(2)
    alone = []
    for x, labels in parts:
        torch.manual_seed(1)
        alone.append(torch.autograd.grad(F.cross_entropy(model(x), labels), list(model.parameters())))
    accumulated = network()
    for x, labels in parts:
        torch.manual_seed(1)
        F.cross_entropy(accumulated(x), labels).backward()
    expected = [sum(gradients) for gradients in zip(*alone, strict=True)]
    torch.testing.assert_close([p.grad for p in accumulated.parameters()], expected)
    assert_same(buffers(accumulated), buffers(model))
    assert all(norm.num_batches_tracked == 2 for norm in norms(accumulated))


# --- averages of weights ------------------------------------------------------------------------------------------------


AVERAGES = {
    "swa": {},
    "swa of buffers too": {"use_buffers": True},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema of buffers too": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


def averaged_model(steps=5, *, inference="ensemble", **options):
    """A model after some steps of training, and the average of its weights on the way."""
    model = network(inference=inference)
    model(batches(1)[0][0])
    average = AveragedModel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, labels in batches(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
        average.update_parameters(model)
    return model, average


@pytest.mark.parametrize("inference", ["ensemble", "pooled"])
@pytest.mark.parametrize("options", [AVERAGES["swa"], AVERAGES["ema"]], ids=["swa", "ema"])
def test_an_average_of_weights_has_the_history_of_the_model(options, inference):
    """Also where it was evaluated on the way, and its pooled mixture was fitted to older samples."""
    model, average = averaged_model(inference=inference, **options)
    x = batches(1)[0][0]
    average.eval()(x)
    model(2 * x)
    average.update_parameters(model)
    assert_same(buffers(average.module), buffers(model))
    reference = network(inference=inference)
    reference.load_state_dict(average.module.state_dict())
    assert_same(average(x), reference.eval()(x))


@pytest.mark.parametrize("options", AVERAGES.values(), ids=AVERAGES.keys())
def test_recalibrate_gives_an_average_its_own_statistics(options):
    """An average of histories is of components in any order: whatever it is, nothing of it stays."""
    _, average = averaged_model(**options)
    fresh = copy.deepcopy(average.module)
    for norm in norms(fresh):
        norm.reset_running_stats()
    torch.manual_seed(1)
    mixnorm.recalibrate(average, batches(5))
    torch.manual_seed(1)
    with torch.no_grad():
        for x, _ in batches(5):
            fresh.train()(x)
    assert_same(buffers(average.module), buffers(fresh))


def modes(seed, size=64):
    """Points of three modes that are far apart: their components have no order that an average would respect."""
    generator = torch.Generator().manual_seed(seed)
    mode = torch.randint(0, 3, (size, 1, 4, 4), generator=generator)
    return torch.randn(size, 16, 4, 4, generator=generator) + 8 * mode * torch.linspace(-1, 1, 16).view(1, -1, 1, 1)


@pytest.mark.parametrize("population", ["batch", "channel"])
@pytest.mark.parametrize("options", AVERAGES.values(), ids=AVERAGES.keys())
@torch.no_grad()
def test_an_average_of_histories_says_that_it_needs_recalibration(options, population):
    """Once; a history that was copied, as averages do unless they are told otherwise, says nothing."""
    torch.manual_seed(0)
    layer = MixtureNorm2d(16, population=population)
    layer(modes(0))
    average = AveragedModel(layer, **options)
    for seed in range(1, 25):
        layer(modes(seed))
        average.update_parameters(layer)

    def told():
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            rms = [module.eval()(modes(99)).square().mean().sqrt() for module in (average, layer)]
        return [str(w.message) for w in record], rms[0] / rms[1]

    messages, _ = told()
    if options.get("use_buffers"):
        (message,) = messages
        assert "call mixnorm.recalibrate(model, batches)" in message
    else:
        assert not messages
    assert told()[0] == []
    mixnorm.recalibrate(average, [modes(seed) for seed in range(10)])
    messages, ratio = told()
    assert not messages
    assert 1 / 1.5 < ratio < 1.5


@torch.no_grad()
def test_update_bn_refills_the_history_where_there_is_a_batch_norm_too():
    model = network()
    model.insert(0, nn.BatchNorm2d(3))
    old = points(8, *SHAPE, seed=50) + 100
    for _ in range(3):
        model(old)
    found, expected = copy.deepcopy(model), copy.deepcopy(model)
    torch.manual_seed(1)
    update_bn(batches(3), found)
    torch.manual_seed(1)
    mixnorm.recalibrate(expected, [x for x, _ in batches(3)])
    for a, b in zip(norms(found), norms(expected), strict=True):
        assert_same(a.history_means, b.history_means)


@torch.no_grad()
def test_update_bn_looks_for_batch_norms_alone():
    """Where all norms are mixture norms it returns at once. If this fails, PyTorch has changed, and docs/tools.md is old."""
    model = network()
    before = buffers(model)
    update_bn(itertools.repeat(points(8, *SHAPE), 4), model)
    assert_same(buffers(model), before)
    mixnorm.recalibrate(model, itertools.repeat(points(8, *SHAPE), 4))
    assert all(norm.num_batches_tracked == 4 for norm in norms(model))


# --- functional calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@torch.no_grad()
def test_functional_call_uses_and_updates_what_it_is_given(training):
    model, other = network(), network()
    for x, _ in batches(3):
        other(x + 1)
    for parameter in other.parameters():
        parameter.mul_(1.1)
    model.train(training), other.train(training)
    own = copy.deepcopy(model.state_dict())
    given = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    x = points(8, *SHAPE, seed=9)
    torch.manual_seed(1)
    found = torch.func.functional_call(model, given, (x,))
    torch.manual_seed(1)
    assert_same(found, other(x))
    assert_same(given, other.state_dict())
    assert_same(model.state_dict(), own)


def test_functional_gradients_are_autograds():
    """Of many models at once, too: per-sample gradients and ensembles are made of these."""
    model = network()
    with torch.no_grad():
        for x, _ in batches(3):
            model(x)
    model.eval()
    parameters, state = dict(model.named_parameters()), dict(model.named_buffers())
    x, labels = batches(1)[0]

    def loss(weights, x, labels):
        return F.cross_entropy(torch.func.functional_call(model, (weights, state), (x,)), labels)

    found = torch.func.grad(loss)(parameters, x, labels)
    expected = torch.autograd.grad(loss(parameters, x, labels), list(parameters.values()))
    torch.testing.assert_close(list(found.values()), list(expected), atol=1e-6, rtol=1e-4)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x.unsqueeze(1), labels.unsqueeze(1))
    torch.testing.assert_close([g.mean(0) for g in each.values()], list(expected), atol=1e-6, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"inference": "mixture"}, {"population": "channel"}], ids=str)
def test_forward_mode_derivatives_are_those_of_backward_mode(options, training):
    """u·(J v) = (uᵀJ)·v: both stop at the posterior."""
    layer = trained(MixtureNorm2d(CHANNELS, num_components=2, dtype=torch.float64, **options), 3).train(training)
    x, v, u = (points(seed=seed).double() for seed in (7, 8, 9))

    def transform(x):
        torch.manual_seed(1)
        return copy.deepcopy(layer)(x)

    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(transform(leaf), leaf, u)[0].mul(v).sum()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(transform(forward_ad.make_dual(x, v))).tangent
    torch.testing.assert_close(torch.func.jvp(transform, (x,), (v,))[1].mul(u).sum(), expected)
    torch.testing.assert_close(tangent.mul(u).sum(), expected)


def test_vmap_over_batches():
    """Each of them is normalized by itself; without a history, which only one of them could enter."""
    layer, x = (
        MixtureNorm2d(CHANNELS, num_components=1, track_running_stats=False),
        torch.stack([points(seed=i) for i in range(3)]),
    )
    found = torch.func.vmap(layer, randomness="different")(x)
    torch.testing.assert_close(found, torch.stack([layer(batch) for batch in x]))


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("images", [1, 4])
def test_an_operation_in_place_behind_the_layer(options, images):
    """As behind batch norm: the output is a tensor of its own, and gradients are those of an operation out of place."""

    def gradients(backend, training, act):
        layer = trained(MixtureNorm2d(CHANNELS, backend=backend, **options)).train(training)
        x = points(images, CHANNELS, 6, 5).requires_grad_()
        torch.manual_seed(1)
        y = layer(x * 1)
        assert not y._is_view()
        act(y).square().sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    for backend in ("auto", "reference"):
        for training in (True, False):
            assert_same(gradients(backend, training, torch.relu_), gradients(backend, training, torch.relu))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("again", [False, True], ids=["once", "differentiated again"])
def test_a_hook_of_an_input_or_a_parameter_changes_its_gradient_once(again, training):
    layer = trained(MixtureNorm2d(CHANNELS)).train(training)

    def gradients(factor):
        norm, x = copy.deepcopy(layer), points(seed=9).requires_grad_()
        inputs = [x, *norm.parameters()]
        for tensor in inputs:
            tensor.register_hook(lambda grad: factor * grad)
        torch.manual_seed(1)
        return torch.autograd.grad(norm(x), inputs, points(seed=10), create_graph=again)

    for found, expected in zip(gradients(2), gradients(1), strict=True):
        torch.testing.assert_close(found, 2 * expected)
