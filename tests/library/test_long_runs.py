"""A training of 20,000 steps: memory stays flat, steps stay as fast, and the history stays what a fresh estimate is."""

import copy
import gc
import statistics
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mixnorm
from mixnorm import MixtureNorm1d

pytestmark = pytest.mark.slow
STEPS, WINDOW = 20_000, 2_000
CENTRES = torch.tensor([[2.0, 0, 0, 0], [0, -2.0, 0, 1], [-1.0, 1, 2, 0]])


def batch(count=64):
    """Points of three modes, and on which side of their mode they lie: which mode it is, mixture norm takes away."""
    noise = torch.randn(count, 4)
    return CENTRES[torch.randint(3, (count,))] + 0.5 * noise, (noise.sum(1) > 0).long()


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("options", [{}, {"seeding": "warm"}, {"inference": "pooled"}, {"population": "channel"}], ids=str)
def test_20_000_steps(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16, bias=False), MixtureNorm1d(16, **options), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    milliseconds, memory, objects = [], [], []
    for step in range(STEPS):
        if step % WINDOW == 0:
            gc.collect()
            memory.append(resident_bytes())
            objects.append(len(gc.get_objects()))
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / STEPS)
        start = time.perf_counter()
        x, labels = batch()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        milliseconds.append(1e3 * (time.perf_counter() - start))
    # The first window allocates; after it nothing grows. The median of a window does not mind what else the machine does.
    assert memory[-1] - memory[1] < 4 << 20
    assert objects[-1] - objects[1] < 1_000
    first, last = (statistics.median(part) for part in (milliseconds[WINDOW : 2 * WINDOW], milliseconds[-WINDOW:]))
    assert last < 1.5 * first
    # The weights have come to rest: the history of the last batches is as far from fresh ones as those are from each other.
    x, labels = batch(5_000)
    with torch.no_grad():
        ours = model.eval()(x)
        fresh = [mixnorm.recalibrate(copy.deepcopy(model), (batch()[0] for _ in range(10))).eval()(x) for _ in range(6)]
    assert (ours.argmax(1) == labels).float().mean() > 0.75
    between = [(a - b).abs().mean().item() for i, a in enumerate(fresh) for b in fresh[:i]]
    assert statistics.mean((ours - other).abs().mean().item() for other in fresh) < 1.5 * max(between)
