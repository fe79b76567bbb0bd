"""The transform and inference against transcriptions of the paper's equations, for the reference and the compiled path."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from mixnorm.functional import mixture_inference, mixture_normalize
from mixnorm.gmm import GaussianMixture

BACKENDS = ["reference", "auto"]
ACTIVATIONS = {
    None: lambda z: z,
    "relu": lambda z: z.clamp_min(0),
    "leaky_relu": lambda z: torch.where(z > 0, z, 0.01 * z),
    "silu": lambda z: z / (1 + (-z).exp()),
    "gelu": lambda z: z * 0.5 * (1 + torch.erf(z / math.sqrt(2))),
}


def transcribed(
    x: Tensor, resp: Tensor, eps: float, gamma: Tensor, beta: Tensor, activation: str | None, mode: str
) -> Tensor:
    """Eqs. (mixture_normalization0 and 1), (responsibility) and (relu_mixturenorm), as sums over i and k."""
    m, components = resp.shape
    act = ACTIVATIONS[activation]
    rows = []
    lam, mu, var = [], [], []
    for k in range(components):
        total = sum(resp[j, k] for j in range(m))
        nu_hat = [resp[j, k] / total for j in range(m)]
        lam.append(total / m)
        mu.append(sum(nu_hat[j] * x[j] for j in range(m)))
        var.append(sum(nu_hat[j] * (x[j] - mu[k]) ** 2 for j in range(m)))
    for i in range(m):
        row = torch.zeros_like(x[i])
        for k in range(components):
            if mode == "statistics":
                z = act((x[i] - (mu[k] + beta)) / torch.sqrt(gamma * var[k] + eps))
            else:
                z = (x[i] - mu[k]) / torch.sqrt(var[k] + eps)
                z = act(gamma * z + beta) if activation else z
            row = row + resp[i, k] / torch.sqrt(lam[k]) * z
        rows.append(gamma * row + beta if mode == "output" and not activation else row)
    return torch.stack(rows)


def draw(m: int, dim: int, components: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, dim, generator=g, dtype=torch.float64) * 2 + 1
    resp = torch.softmax(3 * torch.randn(m, components, generator=g, dtype=torch.float64), -1)
    gamma = torch.rand(dim, generator=g, dtype=torch.float64) + 0.5
    beta = torch.randn(dim, generator=g, dtype=torch.float64)
    upstream = torch.randn(m, dim, generator=g, dtype=torch.float64)
    return x, resp, gamma, beta, upstream


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mode", ["output", "statistics"])
@pytest.mark.parametrize(("m", "dim", "components"), [(7, 1, 1), (13, 5, 3), (9, 2, 6)])
def test_output_and_gradients_are_the_equations(m, dim, components, mode, activation, backend):
    x, resp, gamma, beta, upstream = draw(m, dim, components)
    inputs = [t.requires_grad_() for t in (x, gamma, beta)]
    expected = transcribed(x, resp, 1e-3, gamma, beta, activation, mode)
    expected_grads = torch.autograd.grad(expected, inputs, upstream)
    y = mixture_normalize(x, resp, 1e-3, gamma, beta, activation, affine_mode=mode, backend=backend)
    grads = torch.autograd.grad(y, inputs, upstream)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["output", "statistics"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradcheck(mode, activation, backend):
    x, resp, gamma, beta, _ = draw(11, 3, 3)

    def function(x, gamma, beta):
        return mixture_normalize(x, resp, 1e-2, gamma, beta, activation, affine_mode=mode, backend=backend)

    inputs = [t.requires_grad_() for t in (x, gamma, beta)]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_gradients_never_reach_the_responsibilities():
    x, resp, gamma, beta, upstream = draw(11, 3, 3)
    resp.requires_grad_()
    x.requires_grad_()
    mixture_normalize(x, resp, 1e-5, gamma, beta).backward(upstream)
    assert resp.grad is None
    assert x.grad is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dimensions_are_independent_transforms(backend):
    parts = [[draw(10, 3, 2, seed=2 * i + j) for j in range(2)] for i in range(3)]
    x = torch.stack([torch.stack([p[0] for p in row]) for row in parts])
    resp = torch.stack([torch.stack([p[1] for p in row]) for row in parts])
    gamma, beta = parts[0][0][2], parts[0][0][3]
    y = mixture_normalize(x, resp, 1e-5, gamma, beta, backend=backend)
    for i, j in itertools.product(range(3), range(2)):
        alone = mixture_normalize(x[i, j], resp[i, j], 1e-5, gamma, beta, backend=backend)
        torch.testing.assert_close(y[i, j], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_dropped_component_leaves_no_trace(activation, backend):
    x, resp, gamma, beta, upstream = draw(20, 3, 3)
    with_dropped = torch.cat((resp[:, :1], torch.zeros(20, 1, dtype=resp.dtype), resp[:, 1:]), dim=1)
    inputs = [t.requires_grad_() for t in (x, gamma, beta)]
    found = []
    for r in (resp, with_dropped):
        y = mixture_normalize(x, r, 1e-5, gamma, beta, activation, backend=backend)
        found.append([y, *torch.autograd.grad(y, inputs, upstream)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_weight_may_differ_from_point_to_point():
    x, resp, _, _, _ = draw(10, 1, 2)
    gamma, beta = torch.rand(10, 1, dtype=torch.float64), torch.rand(10, 1, dtype=torch.float64)
    plain = mixture_normalize(x, resp)
    torch.testing.assert_close(mixture_normalize(x, resp, 1e-5, gamma, beta), gamma * plain + beta)


def mixture(dim: int, components: int, seed: int = 0) -> GaussianMixture:
    g = torch.Generator().manual_seed(seed)
    weights = torch.softmax(torch.randn(components, generator=g, dtype=torch.float64), 0)
    means = torch.randn(components, dim, generator=g, dtype=torch.float64)
    return GaussianMixture(weights, means, torch.rand(components, dim, generator=g, dtype=torch.float64) + 0.3)


def transform_of(x: Tensor, gmm: GaussianMixture, eps: float) -> Tensor:
    """The training transform with the parameters of a mixture that is given."""
    resp = gmm.responsibilities(x)
    z = (x.unsqueeze(1) - gmm.means) / (gmm.variances + eps).sqrt()
    return (resp / gmm.weights.sqrt()).unsqueeze(-1).mul(z).sum(1)


def decay(slots: int, zeta: float = 0.9) -> Tensor:
    """Eq. (decay_factor)."""
    return torch.tensor(
        [(1 - zeta) / (1 - zeta**slots) * zeta ** (slots - t - 1) for t in range(slots)], dtype=torch.float64
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots", [1, 4, 10])
def test_equal_mixtures_give_the_training_transform(slots, backend):
    gmm, tau = mixture(4, 3), decay(slots)
    x = torch.randn(50, 4, dtype=torch.float64)
    history = [t.expand(slots, *t.shape) for t in (gmm.weights, gmm.means, gmm.variances)]
    expected = transform_of(x, gmm, 1e-5)
    for mode, factor in {"ensemble": 1.0, "mixture": 1.0, "paper": tau.sqrt().sum()}.items():
        y = mixture_inference(x, *history, tau, mode, backend=backend)
        torch.testing.assert_close(y, factor * expected, rtol=1e-10, atol=1e-10)
    if slots == 10:
        assert abs(tau.sqrt().sum() - 3.127) < 1e-3  # how far off the printed equation is by default


def transcribed_inference(x: Tensor, gmms: list[GaussianMixture], tau: Tensor, mode: str, eps: float) -> Tensor:
    """Eq. (mixture_normalization_test) and its two corrected forms, sums over t and k."""
    rows = []
    for xi in x:

        def density(t, k, xi=xi):
            mean, var = gmms[t].means[k], gmms[t].variances[k]
            return torch.exp(-0.5 * ((xi - mean) ** 2 / var + torch.log(2 * math.pi * var)).sum())

        every = [(t, k) for t in range(len(gmms)) for k in range(gmms[0].num_components)]
        joint = {(t, k): tau[t] * gmms[t].weights[k] * density(t, k) for t, k in every}
        row = torch.zeros_like(xi)
        for t, k in every:
            lam = gmms[t].weights[k]
            if mode == "ensemble":
                own = sum(joint[t, j] for j in range(gmms[0].num_components))
                factor = tau[t] * joint[t, k] / own / torch.sqrt(lam)
            else:
                factor = joint[t, k] / sum(joint.values()) / torch.sqrt(lam * (tau[t] if mode == "paper" else 1))
            row = row + factor * (xi - gmms[t].means[k]) / torch.sqrt(gmms[t].variances[k] + eps)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["ensemble", "mixture", "paper"])
def test_inference_is_the_equation(mode, backend):
    gmms, tau = [mixture(3, 2, seed=s) for s in range(4)], decay(4)
    x = torch.randn(17, 3, dtype=torch.float64, requires_grad=True)
    history = [torch.stack([getattr(g, name) for g in gmms]) for name in ("weights", "means", "variances")]
    y = mixture_inference(x, *history, tau, mode, eps=1e-3, backend=backend)
    torch.testing.assert_close(y, transcribed_inference(x, gmms, tau, mode, 1e-3), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["ensemble", "mixture", "paper"])
def test_empty_slots_and_dropped_components_count_for_nothing(mode):
    gmms, tau = [mixture(3, 2, seed=s) for s in range(2)], decay(2)
    x = torch.randn(17, 3, dtype=torch.float64)
    history = [torch.stack([getattr(g, name) for g in gmms]) for name in ("weights", "means", "variances")]
    wide = [torch.nn.functional.pad(history[0], (0, 1, 1, 0))]
    wide += [torch.nn.functional.pad(t, (0, 0, 0, 1, 1, 0), value=v) for t, v in zip(history[1:], (7.0, 0.0), strict=True)]
    y = mixture_inference(x, *wide, torch.nn.functional.pad(tau, (1, 0)), mode)
    torch.testing.assert_close(y, mixture_inference(x, *history, tau, mode), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("mode", ["output", "statistics"])
def test_inference_gradients_treat_the_posterior_as_a_constant(mode, activation):
    gmms, tau = [mixture(3, 2, seed=s) for s in range(3)], decay(3)
    history = [torch.stack([getattr(g, name) for g in gmms]) for name in ("weights", "means", "variances")]
    x, _, gamma, beta, upstream = draw(9, 3, 1)
    inputs = [t.requires_grad_() for t in (x, gamma, beta)]
    options = {"activation": activation, "affine_mode": mode}
    found = [
        torch.autograd.grad(
            mixture_inference(x, *history, tau, "ensemble", 1e-5, gamma, beta, backend=backend, **options), inputs, upstream
        )
        for backend in BACKENDS
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)
    if activation is None and mode == "output":
        # Then y is linear in x with the posterior's slope: Σ_t τ_t Σ_k ν^t_k / (√λ^t_k σ^t_k) · γ.
        slope = sum(
            t * (g.responsibilities(x.detach()) / g.weights.sqrt()) @ (g.variances + 1e-5).rsqrt()
            for t, g in zip(tau, gmms, strict=True)
        )
        torch.testing.assert_close(found[0][0], upstream * slope * gamma.detach(), rtol=1e-9, atol=1e-9)


def test_shapes_that_do_not_fit_are_named():
    x = torch.randn(5, 3)
    with pytest.raises(ValueError, match=r"resp of shape \(4, 2\)"):
        mixture_normalize(x, torch.rand(4, 2))
    with pytest.raises(ValueError, match="do not fit together"):
        mixture_inference(x, torch.rand(2, 2), torch.rand(2, 2, 4), torch.rand(2, 2, 4), torch.rand(2))
    with pytest.raises(ValueError, match="mode='median'"):
        mixture_inference(x, torch.rand(2, 2), torch.rand(2, 2, 3), torch.rand(2, 2, 3), torch.rand(2), "median")
    for slot_weights in (torch.rand(3), torch.rand(1), torch.rand(4, 2)):
        with pytest.raises(ValueError, match=rf"slot_weights \({slot_weights.shape[0]},.*do not fit together.*\(T,\)"):
            mixture_inference(x, torch.rand(2, 2), torch.rand(2, 2, 3), torch.rand(2, 2, 3), slot_weights)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_only_real_numbers_can_be_normalized(dtype):
    """Whole numbers would come back rounded."""
    x, mixtures = torch.ones(5, 3, dtype=dtype), (torch.rand(2, 2), torch.rand(2, 2, 3), torch.rand(2, 2, 3), torch.rand(2))
    with pytest.raises(ValueError, match=rf"{dtype}: convert it to a floating point"):
        mixture_normalize(x, torch.rand(5, 2))
    with pytest.raises(ValueError, match=rf"{dtype}: convert it to a floating point"):
        mixture_inference(x, *mixtures)
