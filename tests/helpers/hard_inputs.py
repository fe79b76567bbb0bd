"""Inputs that are hard in fp32, and the errors of evaluation under their mixtures."""

import kernel_helpers as ops
import torch

from mixnorm import MixtureNorm2d
from mixnorm.ops import reference

CHANNELS = 32
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}  # and relative: the rounding of the result


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mask(seed):
    return (torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) > 0.5).float()


def correlated(scale):
    directions = normal(CHANNELS, 4, seed=1000)
    return lambda seed: scale * torch.einsum("nkhw,ck->nchw", normal(8, 4, 8, 8, seed=seed), directions).relu()


def noise(seed):
    return normal(8, CHANNELS, 8, 8, seed=seed)


INPUTS = {
    "ReLU × 10": lambda seed: 10 * (noise(seed) - 0.5).relu(),
    "ReLU × 100": lambda seed: 100 * (noise(seed) - 0.5).relu(),
    "correlated ReLU": correlated(1),
    "correlated ReLU × 10": correlated(10),
    "correlated ReLU × 100": correlated(100),
    "background of zeros": lambda seed: mask(seed) * (1000 + noise(seed)),
    "modes 1,000 apart": lambda seed: 1000 * mask(seed) + noise(seed),
    "modes 10,000 apart": lambda seed: 1e4 * mask(seed) + noise(seed),
    "mean of 10,000 deviations": lambda seed: noise(seed) + 1e4,
    "constant channels": lambda seed: noise(seed) * (torch.arange(CHANNELS) % 3 > 0).view(-1, 1, 1) + 7,
    "scales from 1e-3 to 1e3": lambda seed: noise(seed) * torch.logspace(-3, 3, CHANNELS).view(-1, 1, 1),
    "outliers": lambda seed: noise(seed) + 1e4 * (normal(8, 1, 8, 8, seed=seed + 50) > 2.5),
}


def history_of(make, dtype, **options):
    torch.manual_seed(0)
    layer = MixtureNorm2d(CHANNELS, history=4, backend="reference", **options)
    with torch.no_grad():
        for seed in range(4):
            layer(make(seed).to(dtype))
    weights, tau = layer.slot_weights()
    return [t.unsqueeze(0) for t in (weights, layer.history_means, layer.history_vars, tau)]


def errors_of(name, dtype, activation, *backends, device="cpu"):
    """The errors of evaluation against fp64, relative to the largest output, and the reference's in the same dtype."""
    make = INPUTS[name]
    history = history_of(make, dtype)
    x = make(9).to(dtype).flatten(2).transpose(1, 2).unsqueeze(0)
    assert x.isfinite().all()
    options = {"mode": "ensemble", "bounded": True, "eps": 1e-5, "activation": activation, "affine_mode": "output"}
    exact = reference.inference(x.double().flatten(1, 2), *(t.double() for t in history), None, None, **options)
    largest, errors = exact.abs().max().clamp_min(1), []
    for backend in ("reference", *backends):
        found = ops.inference(x.to(device), *(t.to(device) for t in history), None, None, backend=backend, **options)
        errors.append(((found.cpu().double().flatten(1, 2) - exact).abs().max() / largest).item())
    return errors
