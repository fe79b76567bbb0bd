"""γ and β for each component: the equation, and components that keep their place."""

import copy
import math
import pickle

import pytest
import torch
from form_helpers import LEARNED, batch_norm_model, draw, of_components, statistics_of
from layer_helpers import points, randn, trained
from torch import nn

import mixnorm
from mixnorm import MixtureNorm1d, MixtureNorm2d
from mixnorm.ops.choose import kernels_for
from mixnorm.ops.kernels import Form, Parameters

BACKENDS = ["reference", "auto"]


def three_modes(count=600, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mode = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), count, True, generator=generator)
    centers = torch.tensor([[0.0, 0], [10, 0], [0, 10]])
    return torch.randn(count, 2, generator=generator) * 0.5 + centers[mode]


def with_places(**options):
    """A layer that knows three modes, with a β of 100, 200 and 300 for them."""
    torch.manual_seed(0)
    layer = MixtureNorm1d(2, **of_components(**options))
    for seed in range(12):
        layer(three_modes(seed=seed))
    with torch.no_grad():
        layer.bias[:] = torch.tensor([[100.0], [200.0], [300.0]])
    return layer


def test_components_keep_their_place():
    """Two modes that trade their shares: with a warm start, each component stays with its own."""
    layer = MixtureNorm1d(4, num_components=2, component_affine=True, seeding="warm")
    means = []
    for seed in range(6):
        labels = (torch.arange(1000) % 10) < (3 if seed % 2 else 7)
        layer(randn(1000, 4, seed=seed) + 6.0 * labels[:, None])
        means.append(layer.mixture.means.mean(-1))
    assert all(torch.equal(found.argsort(), means[0].argsort()) for found in means)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_parameters_for_each_component(activation, backend):
    """Σ_k ν_k·(γ_k·a_k·x̂_k + β_k), or with an activation Σ_k ν_k·a_k·act(γ_k·x̂_k + β_k)."""
    x, resp, *_, upstream = draw()
    gamma, beta = (randn(3, 4, seed=s, dtype=torch.float64).requires_grad_() for s in (1, 2))
    x.requires_grad_()
    act = {None: lambda z: z, "relu": torch.relu, "silu": nn.functional.silu}[activation]
    expected = torch.zeros_like(x)
    for k, (lam, mu, var) in enumerate(statistics_of(x, resp)):
        hat = (x - mu) / (var + 1e-3).sqrt()
        a = 1 / math.sqrt(lam)
        term = a * act(gamma[k] * hat + beta[k]) if activation else gamma[k] * a * hat + beta[k]
        expected = expected + resp[:, k, None] * term
    kernels = kernels_for(x.view(1, 13, 1, 4), 3, backend)
    form = Form(1e-3, activation, component_affine=True)
    y = kernels.normalize(x.view(1, 13, 1, 4), resp.unsqueeze(0), Parameters(gamma, beta), form).view(13, 4)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    inputs = (x, gamma, beta)
    found = torch.autograd.grad(y, inputs, upstream)
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs, upstream), rtol=1e-9, atol=1e-9)


def test_a_batch_norm_fills_every_component_and_gets_their_mean_back():
    model = batch_norm_model()
    nn.init.uniform_(model[1].weight), nn.init.uniform_(model[1].bias)
    weight, bias = model[1].weight.detach().clone(), model[1].bias.detach().clone()
    mixnorm.convert(model, component_affine=True, seeding="warm")
    assert model[1].weight.shape == (3, 6)
    torch.testing.assert_close(model[1].weight.detach(), weight.expand(3, 6))
    with torch.no_grad():
        model[1].weight.add_(torch.tensor([[0.0], [1.0], [2.0]]))
    mixnorm.revert(model)
    torch.testing.assert_close(model[1].weight.detach(), weight + 1)
    torch.testing.assert_close(model[1].bias.detach(), bias)


def test_a_batch_of_few_points_does_not_take_a_component_from_its_place():
    layer, x = with_places(), three_modes(seed=99)
    before = copy.deepcopy(layer).eval()(x)
    few = layer(three_modes(20, seed=7))
    assert torch.equal(copy.deepcopy(layer).eval()(x), before)
    assert few.min() > 90  # each has the β of its mode
    for seed in range(20, 32):
        layer(three_modes(seed=seed))
    assert (layer.eval()(x) - before).abs().max() < 5


def test_a_first_batch_of_few_points_gets_the_mean_of_the_components_parameters():
    layer, plain = MixtureNorm1d(4, **of_components()), MixtureNorm1d(4, num_components=1)
    nn.init.uniform_(layer.weight), nn.init.uniform_(layer.bias)
    plain.weight.data.copy_(layer.weight.data.mean(0)), plain.bias.data.copy_(layer.bias.data.mean(0))
    with pytest.warns(UserWarning, match="too small for 3 components"):
        y = layer(points(8, 4))
    torch.testing.assert_close(y, plain(points(8, 4)))


@pytest.mark.parametrize("seed", range(3))
def test_recalibrate_leaves_components_in_their_place(seed):
    layer, x = with_places().eval(), three_modes(seed=99)
    before = layer(x)
    torch.manual_seed(seed)
    mixnorm.recalibrate(layer, [three_modes(seed=50 + i) for i in range(12)])
    assert (layer(x) - before).abs().max() < 5


def test_gradients_of_parameters_that_lie_column_by_column():
    layer, plain = (MixtureNorm1d(4, **of_components(backend=b)) for b in ("auto", "reference"))
    state = layer.state_dict()
    state["weight"] = torch.ones(4, 3).t()
    layer.load_state_dict(state, assign=True)
    for each in (layer, plain):
        torch.manual_seed(0)
        each(points(200, 4)).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["deepcopy", "pickle"]
)
def test_copies_with_parameters_for_each_component(copied):
    layer = trained(MixtureNorm2d(4, **of_components(**LEARNED)))
    other, fresh = copied(layer), MixtureNorm2d(4, **of_components(**LEARNED))
    fresh.load_state_dict(layer.state_dict())
    expected = layer.eval()(points(seed=9))
    assert all(torch.equal(each.eval()(points(seed=9)), expected) for each in (other, fresh))
    for each in (layer, other, fresh):  # each goes on from the last batch's components
        torch.manual_seed(3)
        each.train()(points(seed=10))
    assert all(torch.equal(each.history_means, layer.history_means) for each in (other, fresh))
