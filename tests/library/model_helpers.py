"""Models and small functions that several test files share."""

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import ResNetConfig, ResNetForImageClassification

from mixnorm import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d

MIXTURE_OF = {nn.BatchNorm1d: MixtureNorm1d, nn.BatchNorm2d: MixtureNorm2d, nn.BatchNorm3d: MixtureNorm3d}
MIXTURES = tuple(MIXTURE_OF.values())


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()


class Nested(nn.Module):
    """Norms two levels deep, in a list and in a dictionary, of two ranks and with unusual settings."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-3, momentum=None))
        self.blocks = nn.ModuleList([Block(4), Block(4)])
        self.head = nn.ModuleDict({"norm": nn.BatchNorm1d(4, momentum=0.3, affine=False), "linear": nn.Linear(4, 5)})

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head["linear"](self.head["norm"](x.mean((2, 3))))


class Shared(nn.Module):
    """One norm under two names, and one block in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.alias = self.norm
        block = Block(3)
        self.first, self.second = nn.Sequential(block), nn.Sequential(block)

    def forward(self, x):
        return self.alias(self.second(self.first(self.norm(x))))


def sequential():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5))


def resnet():
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 2], layer_type="basic", num_labels=3)
    return ResNetForImageClassification(config)


MODELS = {"sequential": sequential, "nested": Nested, "shared": Shared, "root": lambda: nn.BatchNorm2d(3), "resnet": resnet}


def images(count=8, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 9, 9, generator=generator).mul(2).add(1).to(dtype)


def output(model, x):
    y = model(x)
    return y if isinstance(y, torch.Tensor) else y.logits


def evaluate(model, x):
    """The output in evaluation mode, with the training flags left as they are."""
    with torch.no_grad():
        return output(copy.deepcopy(model).eval(), x)


def step(model, x, seed=0):
    """A forward and a backward pass with a random upstream gradient."""
    y = output(model, x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype))
    return y.detach()


def statistics(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def batch_norms(model):
    return [m for m in model.modules() if isinstance(m, _BatchNorm)]


def mixture_norms(model):
    return [m for m in model.modules() if isinstance(m, MIXTURES)]


def trained_model(name):
    """One of ``MODELS``, with parameters and running statistics that are not those of a new one."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for norm in batch_norms(model):
        if norm.affine:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias, -1, 1)
    with torch.no_grad():
        for seed in range(3):
            model(images(seed=seed))
    return model
