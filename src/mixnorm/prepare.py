"""Compiles the loops for the CPU, which the first training step does otherwise; they are then kept on disk.

python -m mixnorm.prepare
"""

from __future__ import annotations

import torch

from mixnorm.layers import MixtureNorm2d


def prepare() -> None:
    """One step and one evaluation, in both memory formats, with an activation and without."""
    for activation in (None, "relu"):
        layer = MixtureNorm2d(4, num_components=2, activation=activation)
        for memory_format in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(8, 4, 4, 4).contiguous(memory_format=memory_format).requires_grad_()
            layer.train()(x).sum().backward()
            layer.eval()(x.detach())  # γ and β have a gradient
            with torch.no_grad():
                layer(x)


if __name__ == "__main__":
    prepare()
