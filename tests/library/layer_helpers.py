"""A layer's configurations, its input and its training, for the tests of its state."""

import torch
from torch import nn

INFERENCE = ("ensemble", "mixture", "paper", "pooled", "steady")
SEEDING = ("kmeans++", "warm")
CHANNELS = 4

# Every population, in every mode of inference where it has a history.
CONFIGURATIONS = [
    *({"population": population, "inference": mode} for population in ("batch", "channel") for mode in INFERENCE),
    {"population": "batch", "inference": "ensemble", "bias": False},
    {"population": "batch", "inference": "ensemble", "scale": "unit", "within": "learned", "between": "learned"},
    {"population": "batch", "inference": "ensemble", "scale": "unit", "within": 0.5, "between": 0.7},
    {"population": "batch", "inference": "ensemble", "deviation": "learned"},
    *({"population": population, "inference": "ensemble", "fit": "ahead"} for population in ("batch", "channel")),
    {"population": "instance"},
    {"population": "layer"},
    {"population": "group", "num_groups": 2},
    {"population": "batch", "track_running_stats": False},
]
WITH_HISTORY = [c for c in CONFIGURATIONS if "inference" in c]
WITHOUT_HISTORY = [c for c in CONFIGURATIONS if "inference" not in c]


def seeded(options, seeding):
    """Options with a seeding; fit="ahead" has one alone."""
    return options if options.get("fit") == "ahead" else {**options, "seeding": seeding}


def points(*shape, seed=0):
    """Random points with two broad modes, which overlap enough for the fit to depend on its seeding."""
    generator = torch.Generator().manual_seed(seed)
    shape = shape or (4, CHANNELS, 6, 5)
    mode = torch.randint(0, 2, (shape[0], 1, *shape[2:]), generator=generator)
    return torch.randn(shape, generator=generator) * 1.5 + 3 * mode


def trained(layer, batches=3, *shape, seed=0):
    """The layer after some training batches, with γ and β that are not those of a new layer."""
    torch.manual_seed(seed)
    if layer.affine:
        nn.init.uniform_(layer.weight, 0.5, 1.5)
    if layer.bias is not None:
        nn.init.uniform_(layer.bias, -1, 1)
    layer.train()
    with torch.no_grad():
        for i in range(batches):
            layer(points(*shape, seed=100 * seed + i))
    return layer


def evaluate(layer, x):
    with torch.no_grad():
        return layer.eval()(x)


def assert_same(a, b):
    torch.testing.assert_close(a, b, atol=0, rtol=0, equal_nan=True)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def all_finite(*tensors):
    return all(bool(t.isfinite().all()) for t in tensors)
