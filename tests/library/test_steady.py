"""``inference="steady"``: the ensemble, but for slots of the history that the others contradict."""

import copy

import numpy as np
import pytest
import torch
from layer_helpers import points
from torch import nn

import mixnorm
from mixnorm import MixtureNorm2d
from mixnorm.ops.reference import STEADY

SHAPE = (6, 4, 5, 3)


def trained(scales, dtype=torch.float64, **options):
    """A layer that saw a batch of each scale."""
    torch.manual_seed(0)
    layer = MixtureNorm2d(SHAPE[1], history=5, inference="steady", dtype=dtype, **options)
    for seed, scale in enumerate(scales):
        layer(scale * points(*SHAPE, seed=seed).to(dtype))
    return layer.eval()


def as_ensemble(layer):
    other = copy.deepcopy(layer)
    other.inference = "ensemble"
    return other


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("population", ["batch", "channel"])
@pytest.mark.parametrize("count", [0, 2, 5])
def test_slots_that_agree_are_the_ensemble(count, population, backend):
    layer = trained([1.0] * count, population=population, backend=backend)
    x = points(*SHAPE, seed=9).double()
    assert torch.equal(layer(x), as_ensemble(layer)(x))


@pytest.mark.parametrize("activation", [None, "relu"])
def test_the_definition(activation):
    """Written out with numpy, for a history with an empty slot."""
    layer = trained([1.0, 0.01, 2.0, 3.0], activation=activation, eps=1e-3)
    x = points(*SHAPE, seed=9).double()
    lam, mu, var = (buffer.numpy() for buffer in (layer.history_weights, layer.history_means, layer.history_vars))
    filled = lam.sum(1) > 0
    assert list(filled) == [False, True, True, True, True]
    tau = np.where(filled, 0.9 ** np.arange(4, -1, -1), 0.0)
    tau /= tau.sum()
    mean_t = (lam[..., None] * mu).sum(1)
    var_t = (lam[..., None] * (var + (mu - mean_t[:, None]) ** 2)).sum(1)
    mean = tau @ mean_t
    total = tau @ (var_t + (mean_t - mean) ** 2)
    expected = np.zeros((x.numel() // SHAPE[1], SHAPE[1]))
    flat = x.permute(0, 2, 3, 1).reshape(-1, SHAPE[1]).numpy()
    raised = 0
    for t in np.flatnonzero(filled):
        more = np.maximum(STEADY * total - var_t[t], 0)
        raised += (more > 0).sum()
        used = lam[t] > 0
        m, v, w = mu[t][used], (var[t] + more)[used], lam[t][used]
        log = np.log(w) - 0.5 * (((flat[:, None] - m) ** 2) / np.maximum(v, 1e-3) + np.log(np.maximum(v, 1e-3))).sum(-1)
        nu = np.exp(log - log.max(1, keepdims=True))
        nu /= nu.sum(1, keepdims=True)
        normalized = (flat[:, None] - m) / np.sqrt(v + 1e-3)
        if activation == "relu":
            normalized = np.maximum(normalized, 0)
        expected += tau[t] * ((nu / np.sqrt(w))[..., None] * normalized).sum(1)
    assert raised > 0
    found = layer(x).permute(0, 2, 3, 1).reshape(-1, SHAPE[1]).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-10)


def test_a_feature_that_was_constant_does_not_outweigh_the_rest():
    """Constant in four batches, and normal in the last: an average of variances copes, a plain one of outputs does not."""
    torch.manual_seed(0)
    layer = MixtureNorm2d(3, history=5, inference="steady")
    for seed in range(5):
        x = torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
        x[:, 0] *= seed == 4
        layer(x)
    x = torch.randn(64, 3, 4, 4, generator=torch.Generator().manual_seed(9))
    plain = as_ensemble(layer)
    plain.bounded = False
    steady, ensemble, unbounded = (one.eval()(x)[:, 0].std() for one in (layer, as_ensemble(layer), plain))
    assert unbounded > 50
    assert ensemble < 5
    assert steady < 5


def test_with_the_tools_around_a_model():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), trained([1.0, 0.01, 3.0], torch.float32)).eval()
    x = points(*SHAPE, seed=9)
    expected = model(x)
    loaded = nn.Sequential(nn.Conv2d(4, 4, 1), MixtureNorm2d(4, history=5, inference="steady")).eval()
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded(x), expected)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), expected, atol=1e-5, rtol=1e-5)
    assert model(x[:1]).allclose(expected[:1], atol=1e-6)  # whatever else is in the batch
    assert mixnorm.distill(model)(x).isfinite().all()
