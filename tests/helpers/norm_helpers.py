"""Norms by hand: data, parameters that are not those of the start, and what definitions have in common."""

import torch

from mixnorm_lab.norms import BatchNormDropout

SHAPE = (12, 6, 4, 3)


def data(*shape, seed=0):
    """Channels of different means and deviations."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    wide = (1, -1, *[1] * (len(shape) - 2))
    return x * torch.linspace(0.5, 3, shape[1]).double().view(wide) + torch.linspace(-4, 4, shape[1]).double().view(wide)


def with_affine(norm, seed=1):
    """In fp64, with γ and β that are not those of the start."""
    generator = torch.Generator().manual_seed(seed)
    norm = norm.double()
    owner = norm.norm if isinstance(norm, BatchNormDropout) else norm
    owner.weight.data = 0.5 + torch.rand(owner.weight.shape, generator=generator, dtype=torch.float64)
    owner.bias.data = torch.randn(owner.bias.shape, generator=generator, dtype=torch.float64)
    return norm


def standardized(x, dims, eps=1e-5):
    mean = x.mean(dims, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(dims, keepdim=True) + eps).sqrt()


def affine(y, norm):
    wide = (1, -1, *[1] * (y.dim() - 2))
    return y * norm.weight.view(wide) + norm.bias.view(wide)


def gradients(function, x, parameters, seed=2):
    """Of the input and the parameters, under a random gradient of the output."""
    x = x.clone().requires_grad_()
    y = function(x)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.autograd.grad(y, [x, *parameters], upstream)
