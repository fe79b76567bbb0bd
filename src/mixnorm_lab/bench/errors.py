"""How far a variant is from fp64: ‖found − exact‖ / ‖exact‖ of its output and of its input gradient."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from mixnorm import MixtureNorm2d
from mixnorm_lab.bench.cases import Case
from mixnorm_lab.bench.steps import Variant, after_training, make_inputs, make_norm
from mixnorm_lab.internals import Form, Mixture, Parameters, kernels_for, look_of

MAX_ELEMENTS = {"cuda": 2**22, "cpu": 2**20}  # enough for rounding to show, and quick in fp64 at any shape
EPS = 1e-5


def errors(case: Case, variant: Variant, device: str) -> tuple[float | None, float | None]:
    """Of the output and of the input gradient; ``None`` where that has no meaning."""
    if case.benchmark not in ("layer", "inference"):
        return None, None
    per_image = case.numel // case.shape[0]
    images = max(1, min(case.shape[0], MAX_ELEMENTS[device] // per_image))
    x, upstream = make_inputs(replace(case, shape=(images, *case.shape[1:])), device)
    if case.benchmark == "inference":
        return evaluation_error(after_training(case, make_norm(case, variant, x.device), x), x), None
    if variant.is_mixture:
        assert variant.num_components is not None
        mixture = given_mixture(x, variant.num_components)
        form = Form(EPS, "relu" if case.series == "relu" else None)
        found = transform(x, upstream, mixture, form, variant.backend)
        exact = transform(_double(x), upstream.double(), Mixture(*(t.double() for t in mixture)), form, "reference")
    else:
        norm = make_norm(case, variant, x.device)
        found = batch_norm(norm, x, upstream)
        exact = batch_norm(copy.deepcopy(norm).double(), _double(x), upstream.double())
    return relative(found[0], exact[0]), relative(found[1], exact[1])


def given_mixture(x: Tensor, num_components: int) -> Mixture:
    """A mixture for x (N, C, H, W) that does not come from a fit, so that every variant is given the same one.

    Its means are points of x, its variances those of x: every component has a share.
    """
    points = look_of("batch").points(x.detach()).flatten(1, 2).to(torch.float32)  # (1, m, C)
    stride = max(1, points.shape[1] // num_components)
    means = points[:, ::stride][:, :num_components].contiguous()
    k = means.shape[1]
    variances = points.var(1, keepdim=True).expand(-1, k, -1).contiguous()
    return Mixture(torch.full((1, k), 1 / k, device=x.device), means, variances)


def transform(x: Tensor, upstream: Tensor, mixture: Mixture, form: Form, backend: str) -> tuple[Tensor, Tensor]:
    """The output and the input gradient of the EM step and the transform that follows it, both (1, N, L, C)."""
    points = look_of("batch").points(x)
    weight, bias = (p.to(mixture.weights.dtype) for p in _affine(x))
    kernels = kernels_for(points, mixture.weights.shape[1], backend)
    y, _ = kernels.transform(points, mixture, Parameters(weight, bias), form)
    (gradient,) = torch.autograd.grad(y, x, look_of("batch").points(upstream))
    return y, gradient


def batch_norm(norm: nn.Module, x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    y = norm(x)
    return y, torch.autograd.grad(y, x, upstream)[0]


def evaluation_error(norm: nn.Module, x: Tensor) -> float:
    """Against the same layer, with the same history, in fp64."""
    exact = copy.deepcopy(norm).double()
    if isinstance(exact, MixtureNorm2d):
        exact.backend = "reference"
    with torch.no_grad():
        return relative(norm(x), exact(x.double()))


def relative(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach().double(), exact.detach()
    return float((found - exact).norm() / exact.norm())


def _double(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


def _affine(x: Tensor) -> tuple[Tensor, Tensor]:
    """γ and β (C,), the same for every dtype."""
    generator = torch.Generator(x.device).manual_seed(1)
    weight = 0.5 + torch.rand(x.shape[1], device=x.device, generator=generator)
    return weight, torch.randn(x.shape[1], device=x.device, generator=generator)
