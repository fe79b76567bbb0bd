"""The forms of the transform (scale, within, between, component_affine) against their equation, and where they start."""

import copy
import math
import re

import pytest
import torch
from form_helpers import LEARNED, SCALES, batch_norm_model, draw, of_components, statistics_of
from layer_helpers import points, randn
from torch import nn

import mixnorm
from mixnorm import MixtureNorm1d, MixtureNorm2d
from mixnorm.functional import mixture_inference, mixture_normalize

BACKENDS = ["reference", "auto"]


def transcribed(x, resp, statistics, overall, eps, gamma, beta, g, b, scale):
    """x̂ = Σ_k ν_k [(x - μ_k)((1 - g)/√(σ² + ε) + g·a_k/√(σ_k² + ε)) + b (μ_k - μ)/√(σ² + ε)], point by point."""
    mean, deviation = overall[0], (overall[1] + eps).sqrt()
    rows = []
    for i in range(len(x)):
        row = torch.zeros_like(x[i])
        for k, (lam, mu, var) in enumerate(statistics):
            own = g * SCALES[scale](lam) / (var + eps).sqrt()
            row = row + resp[i, k] * ((x[i] - mu) * ((1 - g) / deviation + own) + b * (mu - mean) / deviation)
        rows.append(gamma * row + beta)
    return torch.stack(rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("components", [1, 3, 4])
def test_output_and_gradients_are_the_equation(components, scale, backend):
    x, resp, gamma, beta, g, b, upstream = draw(components=components)
    inputs = [t.clone().requires_grad_() for t in (x, gamma, beta, g, b)]
    x, gamma, beta, g, b = inputs
    overall = x.mean(0), x.var(0, unbiased=False)
    expected = transcribed(x, resp, statistics_of(x, resp), overall, 1e-3, gamma, beta, g, b, scale)
    y = mixture_normalize(x, resp, 1e-3, gamma, beta, scale=scale, within=g, between=b, backend=backend)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad(y, inputs, upstream)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, inputs, upstream), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradcheck(activation, backend):
    x, resp, *parameters, _ = draw(11, 3)

    def function(x, gamma, beta, g, b):
        options = {"scale": "unit", "within": g, "between": b, "backend": backend}
        return mixture_normalize(x, resp, 1e-2, gamma, beta, activation, **options)

    inputs = [t.clone().requires_grad_() for t in (x, *parameters)]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", SCALES)
def test_evaluation_is_the_equation(scale, backend):
    """Each of the T mixtures has its own posterior; μ and σ² of all points are the mean over the T."""
    x, _, gamma, beta, g, b, upstream = draw()
    generator = torch.Generator().manual_seed(3)
    weights = torch.softmax(torch.randn(2, 3, generator=generator, dtype=torch.float64), -1)
    means = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    variances = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64) + 0.3
    tau = torch.tensor([0.3, 0.7], dtype=torch.float64)
    of_slots = (weights[..., None] * means).sum(1)
    spread = (weights[..., None] * (variances + (means - of_slots[:, None]) ** 2)).sum(1)
    overall = (tau[:, None] * of_slots).sum(0), (tau[:, None] * spread).sum(0)
    inputs = [t.clone().requires_grad_() for t in (x, gamma, beta, g, b)]
    x, gamma, beta, g, b = inputs
    expected = 0
    for t in range(2):
        log_density = -0.5 * (((x.detach()[:, None] - means[t]) ** 2 / variances[t]) + variances[t].log()).sum(-1)
        resp = torch.softmax(log_density + weights[t].log(), -1)
        statistics = [(weights[t, k].item(), means[t, k], variances[t, k]) for k in range(3)]
        expected = expected + tau[t] * transcribed(x, resp, statistics, overall, 1e-3, gamma, beta, g, b, scale)
    options = {"scale": scale, "within": g, "between": b, "backend": backend}
    y = mixture_inference(x, weights, means, variances, tau, "ensemble", 1e-3, gamma, beta, **options)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    found = torch.autograd.grad(y, inputs, upstream)
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs, upstream), rtol=1e-9, atol=1e-9)
    with torch.no_grad():  # one pass of the loops
        again = mixture_inference(x, weights, means, variances, tau, "ensemble", 1e-3, gamma, beta, **options)
    torch.testing.assert_close(again, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [LEARNED, {"within": 0.0, "between": 1.0, "scale": "unit"}], ids=["learned", "numbers"])
@pytest.mark.parametrize("components", [1, 2, 5])
def test_without_a_scale_of_its_own_a_component_is_batch_norm(components, options, backend):
    """In training with all gradients, and in evaluation with the mean of the batches' statistics."""
    layer = MixtureNorm2d(4, num_components=components, backend=backend, dtype=torch.float64, **options)
    norm = nn.BatchNorm2d(4, momentum=None, dtype=torch.float64)
    layer.momentum = None
    for parameter, other in zip((layer.weight, layer.bias), (norm.weight, norm.bias), strict=True):
        nn.init.uniform_(parameter, 0.5, 1.5)
        other.data.copy_(parameter.data)
    for seed in range(4):
        x = points(8, 4, 5, 5, seed=seed).double()
        found, upstream = [], randn(8, 4, 5, 5, seed=9, dtype=torch.float64)
        for module in (layer, norm):
            mine = x.clone().requires_grad_()
            module.zero_grad()
            y = module(mine)
            y.backward(upstream)
            found.append((y.detach(), mine.grad, module.weight.grad, module.bias.grad))
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    norm.running_var.mul_(199 / 200)  # batch norm's own is that of n - 1
    torch.testing.assert_close(layer.eval()(x), norm.eval()(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        LEARNED,
        LEARNED | {"component_affine": True, "seeding": "warm"},
        LEARNED | {"scale": "unit", "activation": "relu"},
        LEARNED | {"deviation": "learned"},
    ],
    ids=["learned", "for each component", "activation", "deviation"],
)
def test_a_converted_model_starts_as_it_was(options):
    """In evaluation and in training: to fine-tune it begins where batch norm ended."""
    model, x, found = batch_norm_model(), points(8, 3, 10, 10, seed=7), []
    converted = mixnorm.convert(copy.deepcopy(model), **options)
    loaded = mixnorm.convert(batch_norm_model(), **options)
    loaded.load_state_dict(model.state_dict())
    for module in (model, converted, loaded):
        found.append([module.train(mode)(x) for mode in (False, True)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[2], found[0], rtol=1e-4, atol=1e-5)


def test_revert_leaves_no_parameter_of_a_form_behind():
    model = mixnorm.revert(mixnorm.convert(batch_norm_model(), **LEARNED, deviation="learned"))
    assert model.state_dict().keys() == batch_norm_model().state_dict().keys()


@pytest.mark.parametrize("population", ["channel", "instance", "layer", "group"])
def test_other_populations_have_the_forms(population):
    """At g = 0 and b = 1 any of them is its own norm of one mode, whatever K is."""
    groups = {"num_groups": 2} if population == "group" else {}
    layers = [
        MixtureNorm2d(4, num_components=k, population=population, within=0.0, between=1.0, **groups, **more)
        for k, more in ((3, {}), (1, {"backend": "reference"}))
    ]
    x = points(6, 4, 7, 5)
    torch.testing.assert_close(layers[0](x), layers[1](x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": "unit"},
        {"scale": "unit", "between": 1.0},
        {"scale": "unit", "within": 0.5, "between": 1.0},
        LEARNED,
        {"deviation": 0.5},
        {"component_affine": True, "seeding": "warm", "scale": "unit"},
    ],
    ids=str,
)
def test_evaluation_has_the_scale_of_training(options):
    layer, rms = MixtureNorm1d(8, **options), []
    for seed in range(12):
        rms.append(layer(points(512, 8, seed=seed)).square().mean().sqrt().item())
    found = layer.eval()(points(512, 8, seed=99)).square().mean().sqrt().item()
    assert 0.8 <= found / (sum(rms[-5:]) / 5) <= 1.25


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({}, 0.65, 0.85),
        ({"scale": "unit"}, 0.98, 1.02),
        ({"scale": "unit", "between": 1.0}, 0.98, 1.02),
        (LEARNED, 0.98, 1.02),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [128, 512])
def test_the_scale_of_evaluation_where_components_are_arbitrary(count, options, least, most):
    """One mode in many channels, which every batch divides differently: the figures of docs/mathematics.md."""
    layer, rms = MixtureNorm1d(512, **options), []
    torch.manual_seed(0)
    for seed in range(12):
        rms.append(layer(randn(count, 512, seed=seed)).square().mean().sqrt().item())
    found = layer.eval()(randn(count, 512, seed=99)).square().mean().sqrt().item()
    assert least <= found / (sum(rms) / len(rms)) <= most


def test_a_unit_scale_keeps_the_variance_near_1():
    """1/√λ makes it about K; "unit" does not."""
    x = points(2000, 6)
    of_fisher, of_unit = (MixtureNorm1d(6, scale=scale)(x).var().item() for scale in ("fisher", "unit"))
    assert of_fisher > 2
    assert 0.5 < of_unit < 1.1


def test_the_place_of_a_mode_stays():
    """Two modes six deviations apart: the paper's form puts one on the other, between keeps them apart."""
    labels = torch.arange(4000) % 2
    x = randn(4000, 4) + 6.0 * labels[:, None]
    apart = []
    for options in ({}, {"scale": "unit", "between": 1.0}):
        y = MixtureNorm1d(4, num_components=2, em_iters=8, **options)(x)
        apart.append((y[labels == 1].mean() - y[labels == 0].mean()).item())
    assert abs(apart[0]) < 0.1
    assert 1.5 < apart[1] < 2.5  # in units of the deviation of all points


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"scale": "other"}, "scale='other' is unknown: choose one of 'fisher', 'unit'"),
        ({"within": "all"}, "within='all' must be a number, or 'learned'"),
        ({"between": None}, "between=None must be a number, or 'learned'"),
        ({"within": 0.5, "activation": "relu"}, "within with an activation inside needs scale='unit'"),
        ({"between": "learned", "affine_mode": "statistics"}, "between does not go with affine_mode='statistics'"),
        ({"within": "learned", "inference": "paper"}, "inference='paper' is for the paper's transform"),
        ({"deviation": "some"}, "deviation='some' must be a number, or 'learned'"),
        ({"deviation": 0.5, "affine_mode": "statistics"}, "deviation does not go with affine_mode='statistics'"),
        ({"deviation": "learned", "inference": "paper"}, "inference='paper' is for the paper's transform"),
        ({"scale": "unit", "inference": "paper"}, "inference='paper' is for the paper's transform"),
        ({"component_affine": True}, "component_affine=True needs components that keep their place: use seeding='warm'"),
        ({"component_affine": True, "seeding": "warm", "affine": False}, "component_affine=True needs affine=True"),
        ({"component_affine": True, "seeding": "warm", "track_running_stats": False}, "needs a history that training fills"),
        ({"component_affine": True, "seeding": "warm", "momentum": 0}, "needs a history that training fills"),
        ({"component_affine": "yes"}, "component_affine='yes' must be True or False"),
        ({"within": math.nan}, "within=nan must be a number, or 'learned'"),
        ({"seeding": 2.0}, "seeding=2.0 is unknown: choose one of 'kmeans++', 'warm', or a number of batches"),
        ({"seeding": 5, "population": "batc"}, "population='batc' is unknown"),
        ({"component_affine": True, "seeding": "warm", "population": "channel"}, "needs population='batch', not 'channel'"),
        ({"component_affine": True, "seeding": "warm", "inference": "pooled"}, "does not go with inference='pooled'"),
        ({"component_affine": True, "seeding": "warm", "affine_mode": "statistics"}, "does not go with affine_mode"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_one_sentence(options, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        MixtureNorm2d(4, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("options", [LEARNED, {"deviation": "learned"}, of_components(), of_components(**LEARNED)], ids=str)
def test_a_lazy_layer_has_the_forms(options):
    layer, lazy = MixtureNorm2d(4, **options), mixnorm.LazyMixtureNorm2d(**options)
    x = points()
    for each in (layer, lazy):
        torch.manual_seed(0)
        each(x)
    assert type(lazy) is MixtureNorm2d
    assert {n: p.shape for n, p in lazy.named_parameters()} == {n: p.shape for n, p in layer.named_parameters()}
    assert torch.equal(lazy.eval()(x), layer.eval()(x))
    converted = mixnorm.convert(nn.Sequential(nn.LazyBatchNorm2d()), **options)
    assert converted(x).shape == x.shape
    assert converted[0].weight.shape == layer.weight.shape


def test_a_lazy_layer_counts_batches_too():
    layer = mixnorm.LazyMixtureNorm1d(seeding=5)
    layer(points(100, 4))
    assert layer.seeding == 5
    lazy, other = (mixnorm.LazyMixtureNorm1d(**of_components()) for _ in range(2))
    other.load_state_dict(lazy.state_dict())


def test_functions_without_points_have_the_gates_in_their_graph():
    g = torch.full((4,), 0.5, requires_grad=True)
    y = mixture_normalize(torch.empty(2, 0, 4), torch.empty(2, 0, 3), within=g)
    assert torch.autograd.grad(y.sum(), g)[0].abs().max() == 0
    with pytest.raises(ValueError, match="within='learned' must be a number or a tensor"):
        mixture_normalize(torch.ones(5, 4), torch.ones(5, 1), within="learned")


def test_revert_of_batch_norm_in_another_form_is_batch_norm():
    layer = MixtureNorm1d(4, within=0.0, between=1.0)
    for seed in range(12):
        layer(points(200, 4, seed=seed) + seed)
    model = nn.Sequential(layer).eval()
    before = model(points(50, 4))
    torch.testing.assert_close(mixnorm.revert(model)(points(50, 4)), before, rtol=1e-4, atol=1e-5)
