"""The Python of a layer's training step on a GPU, with the launches left out: so it can be measured on any machine.

    PYTHONPATH=src python benchmarks/python_time.py [--option activation=relu ...]

Everything runs that runs on a GPU, but for the kernels themselves: choosing them, allocations, views, autograd. Beside it
batch norm's step, which on a CPU has its work in it; of a tensor this small that is next to nothing.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import mixnorm
from mixnorm.ops import triton as triton_kernels
from mixnorm.ops.triton import launch

SHAPE = (8, 16, 4, 4)
ROUNDS, CALLS = 15, 200


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--option", action="append", default=[], help="of mixture norm, such as activation=relu")
    arguments = parser.parse_args()
    leave_out_launches()
    torch.set_num_threads(1)
    x = torch.randn(SHAPE).to(memory_format=torch.channels_last).requires_grad_()
    grad = torch.randn_like(x)
    options = dict(option.split("=", 1) for option in arguments.option)
    layers = {
        "batch norm": nn.BatchNorm2d(SHAPE[1]),
        "mixture norm": mixnorm.MixtureNorm2d(SHAPE[1], backend="triton", **options),
    }
    for name, layer in layers.items():
        forward, step = microseconds(layer, x), microseconds(layer, x, grad)
        print(f"{name}: forward {forward:.0f} µs, forward and backward {step:.0f} µs")


def leave_out_launches():
    """What the launcher does in a call is kept, up to the kernel that it would start."""

    def run(plan, given, own, extra):
        key = launch.key_of(given, extra)
        plan.compiled.setdefault(key, plan.kernel)

    launch._run = run
    triton_kernels.INTERPRETED = True  # tensors on a CPU are taken


def microseconds(layer, x, grad=None):
    """The first decile of many rounds: what disturbs only adds."""
    times = []
    for _ in range(ROUNDS * CALLS):
        start = time.perf_counter()
        y = layer(x)
        if grad is not None:
            torch.autograd.grad(y, (x, *layer.parameters()), grad)
        times.append(time.perf_counter() - start)
    return 1e6 * sorted(times)[len(times) // 10]


if __name__ == "__main__":
    main()
