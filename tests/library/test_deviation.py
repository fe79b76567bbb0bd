"""The Fisher vector's deviation part in the transform: against its equation, the Fisher vector itself, and batch norm."""

import math

import pytest
import torch
from form_helpers import SCALES, draw, statistics_of
from layer_helpers import points, randn
from torch import nn

from mixnorm import MixtureNorm1d, MixtureNorm2d, fisher
from mixnorm.functional import mixture_inference, mixture_normalize
from mixnorm.gmm import GaussianMixture

BACKENDS = ["reference", "auto"]
ACTIVATIONS = {None: lambda z: z, "relu": torch.relu, "gelu": nn.functional.gelu}


def transcribed(x, resp, statistics, eps, gamma, beta, d, scale, activation):
    """Σ_k ν_k a_k · act(γ·(z_k + d·(z_k² - 1)/√2) + β), z_k = (x - μ_k)/√(σ_k² + ε), point by point; β once without act."""
    rows = []
    for i in range(len(x)):
        row = torch.zeros_like(x[i]) if activation else beta
        for k, (lam, mu, var) in enumerate(statistics):
            z = (x[i] - mu) / (var + eps).sqrt()
            inside = gamma * (z + d * (z**2 - 1) / math.sqrt(2)) + (beta if activation else 0)
            row = row + resp[i, k] * SCALES[scale](lam) * ACTIVATIONS[activation](inside)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("components", [1, 3, 4])
def test_output_and_gradients_are_the_equation(components, scale, activation, backend):
    x, resp, gamma, beta, d, _, upstream = draw(components=components)
    inputs = [t.clone().requires_grad_() for t in (x, gamma, beta, d)]
    x, gamma, beta, d = inputs
    expected = transcribed(x, resp, statistics_of(x, resp), 1e-3, gamma, beta, d, scale, activation)
    y = mixture_normalize(x, resp, 1e-3, gamma, beta, activation, scale=scale, deviation=d, backend=backend)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad(y, inputs, upstream)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, inputs, upstream), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradcheck_with_all_gates(activation, backend):
    x, resp, *parameters, _ = draw(11, 3)

    def function(x, gamma, beta, g, b, d):
        options = {"scale": "unit", "within": g, "between": b, "deviation": d, "backend": backend}
        return mixture_normalize(x, resp, 1e-2, gamma, beta, activation, **options)

    inputs = [t.clone().requires_grad_() for t in (x, *parameters, parameters[0] - 0.5)]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scale", SCALES)
def test_evaluation_is_the_equation(scale, activation, backend):
    x, _, gamma, beta, d, _, upstream = draw()
    weights = torch.softmax(randn(2, 3, dtype=torch.float64), -1)
    means, variances = randn(2, 3, 4, seed=1, dtype=torch.float64), randn(2, 3, 4, seed=2, dtype=torch.float64).exp()
    tau = torch.tensor([0.3, 0.7], dtype=torch.float64)
    inputs = [t.clone().requires_grad_() for t in (x, gamma, beta, d)]
    x, gamma, beta, d = inputs
    expected = 0
    for t in range(2):
        log_density = -0.5 * (((x.detach()[:, None] - means[t]) ** 2 / variances[t]) + variances[t].log()).sum(-1)
        resp = torch.softmax(log_density + weights[t].log(), -1)
        statistics = [(weights[t, k].item(), means[t, k], variances[t, k]) for k in range(3)]
        expected = expected + tau[t] * transcribed(x, resp, statistics, 1e-3, gamma, beta, d, scale, activation)
    history, options = (weights, means, variances, tau), {"scale": scale, "deviation": d, "backend": backend}
    y = mixture_inference(x, *history, "ensemble", 1e-3, gamma, beta, activation, **options)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    found = torch.autograd.grad(y, inputs, upstream)
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs, upstream), rtol=1e-9, atol=1e-9)
    with torch.no_grad():  # one pass of the loops
        again = mixture_inference(x, *history, "ensemble", 1e-3, gamma, beta, activation, **options)
    torch.testing.assert_close(again, expected, rtol=1e-10, atol=1e-10)


def test_it_is_the_second_part_of_the_fisher_vector():
    """With d = 1 the transform is the sum over the components of both parts of the mixture's Fisher vector."""
    mixture = GaussianMixture(
        torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64),
        randn(3, 4, dtype=torch.float64),
        randn(3, 4, seed=1, dtype=torch.float64).exp(),
    )
    x = randn(20, 4, seed=2, dtype=torch.float64)
    slot = (t.unsqueeze(0) for t in (mixture.weights, mixture.means, mixture.variances))
    y = mixture_inference(x, *slot, torch.ones(1, dtype=torch.float64), eps=0.0, deviation=1.0)
    torch.testing.assert_close(y, fisher.mixture_fisher_vector(x, mixture).sum((-3, -2)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_one_component_it_is_batch_norm_and_a_parabola(backend):
    layer = MixtureNorm2d(4, num_components=1, deviation=0.5, backend=backend, dtype=torch.float64)
    x = points(8, 4, 5, 5).double()
    z = nn.BatchNorm2d(4, affine=False, dtype=torch.float64)(x)
    torch.testing.assert_close(layer(x), z + 0.5 * (z**2 - 1) / math.sqrt(2), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("components", [1, 3])
def test_it_starts_at_nothing_and_learns(components):
    torch.manual_seed(0)
    layer, plain = (MixtureNorm1d(6, num_components=components, **more) for more in ({"deviation": "learned"}, {}))
    assert torch.equal(layer.deviation_weight, torch.zeros(6))
    found = []
    for each in (layer, plain):
        torch.manual_seed(1)
        found.append(each(points(200, 6)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    found[0].square().mul(found[0]).sum().backward()
    assert layer.deviation_weight.grad.abs().min() > 0
    assert "deviation='learned'" in repr(layer)


@pytest.mark.parametrize(("deviation", "least", "most"), [("learned", 0.95, 1.0), (0.0, 0.5, 0.75)])
def test_a_model_learns_what_a_line_cannot(deviation, least, most):
    """Whether a point is near the centre or far from it: z² says so, and no line through z does."""
    torch.manual_seed(0)
    model = nn.Sequential(MixtureNorm1d(2, num_components=1, deviation=deviation), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    x = randn(500, 2)
    labels = (x.square().sum(1) > 1.4).long()
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    assert least < (model(x).argmax(1) == labels).float().mean() <= most
