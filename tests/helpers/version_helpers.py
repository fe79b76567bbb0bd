"""What the results of version 0.1 in ``fixtures/v0_1`` are results of: inputs, layers, models, and how to compare.

The script that made them and the tests that compare with them share this file.
"""

import functools
import io
import json
import lzma
import platform
import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import mixnorm
from mixnorm.ops import fit
from mixnorm.ops.kernels import Kernels
from mixnorm.ops.numba import NumbaKernels

FOLDER = Path(__file__).parents[1] / "fixtures" / "v0_1"
BACKENDS = ("reference", "auto")
BATCHES = 5  # of a layer's training
STEPS = 4  # of a model's

# --- inputs ---------------------------------------------------------------------------------------------------------------


def points(shape, modes, seed, dtype=torch.float32):
    """An activation (N, C, ...) whose points lie around well separated modes, each with an equal share of every sample.

    It is made of whole numbers and of powers of two, so that it is the same to the bit on every machine.
    """
    generator = torch.Generator().manual_seed(seed)
    samples, channels, *sides = shape
    places = int(np.prod(sides))
    if places == 1:
        mode = torch.randperm(samples, generator=generator).view(samples, 1) % modes
    else:
        mode = torch.stack([torch.randperm(places, generator=generator) % modes for _ in range(samples)])
    mode = mode.unsqueeze(1)  # (N, 1, L)
    centre = 4 * ((mode + torch.arange(channels).view(1, -1, 1)) % modes) + 1
    noise = torch.randint(-32, 33, (4, samples, channels, places), generator=generator).sum(0)
    return (centre + noise * (4 + mode) / 256).to(dtype).view(shape)


def upstream(shape, seed, dtype=torch.float32):
    """A gradient that comes from above, the same to the bit on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-64, 65, shape, generator=generator) / 64).to(dtype)


# --- layers ---------------------------------------------------------------------------------------------------------------


def make_layer(case, backend, **changes):
    """The layer of a case, with γ and β that are not those of a new layer."""
    options = case["options"] | {"backend": backend} | changes
    channels = case["shape"][1]
    layer = getattr(mixnorm, case["layer"])(channels, dtype=getattr(torch, case["dtype"]), **options)
    with torch.no_grad():
        if layer.weight is not None:
            layer.weight.copy_(0.75 + 0.25 * torch.arange(channels))
        if layer.bias is not None:
            layer.bias.copy_(0.25 * torch.arange(channels) - 0.5)
    return layer


def batch(case, number):
    """A batch of a case: the first are for training, the next one for evaluation."""
    x = points(case["shape"], case["modes"], 100 * case["seed"] + number, getattr(torch, case["dtype"]))
    return x.contiguous(memory_format=torch.channels_last) if case.get("channels_last") else x


def evaluate(module, x):
    """The evaluation of version 0.1: the plain mean of the T transforms, however far a slot is from a point."""
    for layer in module.modules():
        if hasattr(layer, "bounded"):
            layer.bounded = False
    with torch.no_grad():
        return module.eval()(x).contiguous()


def kept(state):
    """A state dict with storage of its own, and the versions of its modules as any state dict has them."""
    copy = type(state)((name, value.detach().clone()) for name, value in state.items())
    copy._metadata = state._metadata
    return copy


def exercise(case, backend, start=None):
    """What a layer leaves after training, with the output and the gradients of the last batch, and the layer itself.

    ``start`` is the state dict of a batch norm that it begins with.
    """
    layer, found = make_layer(case, backend), {}
    if start is not None:
        layer.load_state_dict(start, strict=True)
        found["loaded"] = evaluate(layer, batch(case, BATCHES))
    layer.train()
    torch.manual_seed(case["seed"])
    with torch.no_grad():
        for number in range(BATCHES - 1):
            layer(batch(case, number))
    x = batch(case, BATCHES - 1).requires_grad_()
    y = layer(x)
    y.backward(upstream(x.shape, case["seed"], x.dtype))
    found |= {"output": y.detach().contiguous(), "gradient": x.grad.contiguous()}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in layer.named_parameters()}
    if case.get("distilled"):
        mixnorm.distill(layer)
    found |= {"state": kept(layer.state_dict()), "evaluation": evaluate(layer, batch(case, BATCHES))}
    return layer, found


# --- models ---------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block whose two convolutions share one norm."""

    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.norm2 = self.norm1

    def forward(self, x):
        return (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()


class Residual(nn.Module):
    """A small network with a norm in its stem, and a block whose norm is in two places."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.block = Block(6)
        self.linear = nn.Linear(6, 5)

    def forward(self, x):
        return self.linear(self.block(self.stem(x)).mean((2, 3)))


def sequential():
    """Two convolutions, each with a norm and a ReLU, and a linear layer."""
    first = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()]
    second = [nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(72, 5))


# Of each model: how it is made, which norms are converted, and the mixture norms' options.
MODELS = {
    "sequential": (sequential, None, {"num_components": 3}),
    "residual": (Residual, "block", {"num_components": 2, "history": 3, "inference": "steady", "momentum": 0.3}),
}
IMAGES = (16, 3, 9, 9)


def images(number):
    return points(IMAGES, 3, 900 + number) / 4


def new_model(name):
    """A model after some batches, as it was before it was converted."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    with torch.no_grad():
        for number in range(3):
            model(images(number))
    return model


def convert(name, backend, before):
    """A converted model, which began with the state dict ``before``."""
    make, select, options = MODELS[name]
    model = make()
    model.load_state_dict(before, strict=True)
    mixnorm.convert(model, select or "*", form="paper", backend=backend, **options)
    for layer in model.modules():
        if isinstance(layer, mixnorm.MixtureNorm2d):  # there a batch norm's statistics counted for one batch
            layer.history_weights.clamp_(max=1)
    return model


def surgery(name, backend, before):
    """What a model gives when it is converted, trained, recalibrated, distilled and reverted."""
    x, labels = images(50), torch.arange(IMAGES[0]) % 5
    model = convert(name, backend, before)
    found = {"converted": evaluate(model, x)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    model.train()
    losses = []
    for number in range(STEPS):
        loss = F.cross_entropy(model(images(10 + number)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found |= {"losses": torch.stack(losses), "state": kept(model.state_dict()), "trained": evaluate(model, x)}
    torch.manual_seed(2)
    mixnorm.recalibrate(model, [images(20 + number) for number in range(3)])
    found["recalibrated"] = evaluate(model, x)
    mixnorm.distill(model)
    found["distilled"] = evaluate(model, x)
    model = convert(name, backend, before)
    model.load_state_dict(found["state"])
    mixnorm.revert(model)
    found |= {"reverted state": kept(model.state_dict()), "reverted": evaluate(model, x)}
    return found


# --- comparing ------------------------------------------------------------------------------------------------------------


def machine():
    """What decides on the last bit of a result: the processor, the instructions in use, and who made the loops."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        told = dict(re.split(r"\s*:\s?", line, maxsplit=1) for line in lines if ":" in line)
        processor = ", ".join(told[key] for key in ("model name", "cpu family", "model", "stepping") if key in told)
    try:
        import numba

        compiler = numba.__version__
    except ModuleNotFoundError:
        compiler = None
    versions = {"torch": torch.__version__, "numba": compiler, "numpy": np.__version__}
    return {"processor": processor, "capability": torch.backends.cpu.get_cpu_capability(), **versions}


@functools.cache
def same_machine():
    """Whether results must be those of version 0.1 to the bit.

    Vectorized sums have another order with other instructions, and another compiler contracts other multiplications and
    additions: there, results agree within the rounding of their dtype alone.
    """
    return machine() == json.loads((FOLDER / "machine.json").read_text())


def sample_indices(count, size, draws):
    """Which points version 0.1 fitted to: those at the ends of a batch less often than the others."""
    stretch, rest = count // size, count % size
    place = (draws[:size] * stretch).long().clamp_max(stretch - 1)
    return torch.arange(size) * stretch + place + (draws[size] * (rest + 1)).long().clamp_max(rest)


def fit_to_the_sample_of_version_0_1(setattr=setattr):
    setattr(fit, "sample_indices", sample_indices)
    setattr(NumbaKernels, "sample", Kernels.sample)


def assert_matches(found, expected, tolerance):
    """Equality within a tolerance, relative to a tensor's largest element: small gradients are differences of large terms.

    Not to the bit: since then, distances and moments are taken about each component's own mean.
    """
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_matches(found[name], value, tolerance)
            continue
        scale = value.nan_to_num().abs().max().clamp_min(1).item() if value.is_floating_point() else 0
        torch.testing.assert_close(
            found[name],
            value,
            rtol=0,
            atol=tolerance * scale,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def save(path, content):
    """A file of ``torch.save``, compressed, with the same bytes each time."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))


@functools.cache
def load(name):
    """What :func:`save` has written, without running anything that may be in it."""
    return torch.load(io.BytesIO(lzma.decompress((FOLDER / name).read_bytes())), weights_only=True)


@functools.cache
def cases():
    return json.loads((FOLDER / "cases.json").read_text())
