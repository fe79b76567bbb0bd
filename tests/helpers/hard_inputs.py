"""Inputs that are hard in fp32, and the errors of training and evaluation under their mixtures."""

import kernel_helpers as ops
import torch

from mixnorm import MixtureNorm2d
from mixnorm.ops import fit, reference

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
    "mean of 1e6 deviations": lambda seed: (noise(seed).double() * 0.01 + 1e4).float(),
    "nearly constant channels": lambda seed: noise(seed) * 1e-4 + mask(seed) + 3,
    "three distinct points": lambda seed: (
        (normal(8, 1, 8, 8, seed=seed) * 2).round().clamp(-1, 1).expand(-1, CHANNELS, -1, -1)
    ),
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
    options = {"mode": "ensemble", "bounded": True, "activation": activation}
    in_fp64 = reference.History(*(t.double() for t in history), "ensemble", True)
    exact = reference.inference(
        x.double().flatten(1, 2), in_fp64, reference.Parameters(), reference.Form(activation=activation)
    )
    largest, errors = exact.abs().max().clamp_min(1), []
    for backend in ("reference", *backends):
        found = ops.inference(x.to(device), *(t.to(device) for t in history), None, None, backend=backend, **options)
        errors.append(((found.cpu().double().flatten(1, 2) - exact).abs().max() / largest).item())
    return errors


def training_errors_of(name, dtype, activation, *backends, components=4, device="cpu"):
    """The errors of the transform of a batch and of its gradients against fp64, each relative to the largest number.

    All get the same mixture, which is fitted in fp64. First of the reference in the same dtype, then of each backend.
    """
    x = INPUTS[name](9).to(dtype).flatten(2).transpose(1, 2).unsqueeze(0)
    assert x.isfinite().all()
    uniforms = torch.rand(1, fit.num_uniforms(components), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    options = fit.Options(1, 3, 1e-5, 0.01)
    mixture = [t.float() for t in fit.fit(x.double().flatten(1, 2), components, uniforms, options)]
    upstream = normal(*x.shape, seed=70).to(dtype)
    weight, bias = 1 + 0.3 * normal(CHANNELS, seed=71), normal(CHANNELS, seed=72)

    def run(backend, compute, device):
        points = (x.to(compute) if compute == torch.float64 else x).to(device, copy=True).requires_grad_()
        parameters = [p.to(device, compute, copy=True).requires_grad_() for p in (weight, bias)]
        given = [t.to(device, compute) for t in mixture]
        form = {"eps": 1e-5, "activation": activation, "affine_mode": "output"}
        y, found = ops.transform_batch(points, given, *parameters, backend=backend, **form)
        gradients = torch.autograd.grad(y, (points, *parameters), upstream.to(device, y.dtype))
        names = ("output", "weights", "means", "variances", "gradient", "gradient of γ", "gradient of β")
        numbers = dict(zip(names, (y, *found, *gradients), strict=True))
        numbers["means"] = numbers["means"] / (mixture[2].to(device, compute) + 1e-5).sqrt()  # in deviations
        return {name: t.detach().cpu().double() for name, t in numbers.items()}

    exact, errors = run("reference", torch.float64, "cpu"), []
    for backend in ("reference", *backends):
        found = run(backend, torch.float32, device)
        errors.append({n: ((found[n] - t).abs().max() / _largest(n, t)).item() for n, t in exact.items()})
    return errors


def _largest(name, numbers):
    """What an error is measured by: a variance beside eps, a gradient of γ beside the upstream one."""
    least = {"variances": 1e-5, "gradient of γ": 1.0}.get(name, 0.0)
    return 1.0 if name == "means" else numbers.abs().max().clamp_min(least)


def beyond_four_times(plain, found, dtype):
    """The errors that are above four times the reference's, plus the rounding of a result; of a mean, 1e-5 deviations."""
    rounding = {"output": DTYPES[dtype], "gradient": DTYPES[dtype], "means": 1e-5}
    rounding = {name: rounding.get(name, DTYPES[torch.float32]) for name in plain}
    return {name: (plain[name], found[name]) for name in plain if not found[name] <= 4 * plain[name] + rounding[name]}
