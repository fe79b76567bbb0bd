"""What mixture norm takes away, and what it brings out: which mode a point is in, and where in its mode it lies."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mixnorm import MixtureNorm1d

CENTRES = torch.tensor([[2.0, 0, 0, 0], [0, -2.0, 0, 1], [-1.0, 1, 2, 0]])
STEPS = 400


def accuracy(norm, which):
    """Of a network with one hidden layer in training mode, at the end of a short training; ``which`` label it learns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16, bias=False), norm, nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    right = []
    for _ in range(STEPS):
        modes, noise = torch.randint(3, (128,)), torch.randn(128, 4)
        labels = {"mode": modes, "side": (noise.sum(1) > 0).long()}[which]
        logits = model(CENTRES[modes] + 0.5 * noise)
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        right.append((logits.argmax(1) == labels).float().mean().item())
    return sum(right[-50:]) / 50


@pytest.mark.parametrize(("which", "lost"), [("mode", True), ("side", False)])
def test_the_mode_is_lost_and_the_place_in_it_is_not(which, lost):
    batch_norm = accuracy(nn.BatchNorm1d(16), which)
    mixture_norm = accuracy(MixtureNorm1d(16, num_components=3, sample_fraction=1.0, backend="reference"), which)
    if lost:
        assert batch_norm > 0.97
        assert mixture_norm < 0.6
    else:
        assert mixture_norm > batch_norm + 0.02


@pytest.mark.parametrize(("which", "least"), [("mode", 0.95), ("side", 0.895)])  # batch norm: 0.998 and 0.875
def test_with_its_place_a_mode_is_not_lost(which, least):
    form = {"scale": "unit", "between": 1.0}
    assert accuracy(MixtureNorm1d(16, num_components=3, sample_fraction=1.0, backend="reference", **form), which) > least
