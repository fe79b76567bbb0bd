"""Compiles the loops for the CPU, which the first training step does otherwise; they are then kept on disk.

python -m mixnorm.prepare [float64]
"""

from __future__ import annotations

import sys

import torch

from mixnorm.layers import MixtureNorm2d


def prepare(dtype: torch.dtype = torch.float32) -> None:
    """One step and one evaluation, in both memory formats, with an activation and without, and a warm start."""
    for activation, seeding in ((None, "kmeans++"), ("relu", "warm")):
        layer = MixtureNorm2d(4, num_components=2, activation=activation, seeding=seeding, dtype=dtype)  # type: ignore[arg-type]
        for memory_format in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(8, 4, 4, 4, dtype=dtype).contiguous(memory_format=memory_format).requires_grad_()
            for _ in range(2):
                layer.train()(x).sum().backward()
            layer.eval()(x).sum().backward()
            with torch.no_grad():
                layer(x)


if __name__ == "__main__":
    prepare(getattr(torch, sys.argv[1]) if len(sys.argv) > 1 else torch.float32)
