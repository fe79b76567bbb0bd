"""What the tests of the forms share: points with responsibilities, their statistics, a model, and options."""

import math

import torch
from layer_helpers import points
from torch import nn

SCALES = {"fisher": lambda lam: 1 / math.sqrt(lam), "unit": lambda lam: 1.0}
LEARNED = {"within": "learned", "between": "learned"}


def of_components(**options):
    return {"component_affine": True, "seeding": "warm", "scale": "unit", **options}


def statistics_of(x, resp):
    found = []
    for k in range(resp.shape[1]):
        share = resp[:, k] / resp[:, k].sum()
        mu = (share[:, None] * x).sum(0)
        found.append((resp[:, k].mean().item(), mu, (share[:, None] * (x - mu) ** 2).sum(0)))
    return found


def draw(m=13, dim=4, components=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, dim, generator=generator, dtype=torch.float64) * 2 + 1
    resp = torch.softmax(3 * torch.randn(m, components, generator=generator, dtype=torch.float64), -1)
    gamma, beta, g, b = torch.rand(4, dim, generator=generator, dtype=torch.float64) + 0.3
    upstream = torch.randn(m, dim, generator=generator, dtype=torch.float64)
    return x, resp, gamma, beta, g, b, upstream


def batch_norm_model():
    torch.manual_seed(0)
    first, second = nn.BatchNorm2d(6), nn.BatchNorm2d(4)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), first, nn.ReLU(), nn.Conv2d(6, 4, 3), second, nn.ReLU())
    for seed in range(5):
        model(points(8, 3, 10, 10, seed=seed))
    return model
