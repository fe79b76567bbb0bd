"""The Python of a layer's training step and evaluation on a GPU, which any machine can measure: no kernel is started.

    PYTHONPATH=src python benchmarks/python_time.py [--option activation=relu ...]

Everything runs that runs on a GPU, down to Triton's launcher, whose function in C is one that does nothing: choosing
the kernels, allocations, views, autograd. Beside it is batch norm on a CPU with its work, which for a tensor this small
is next to nothing. `PYTHONPATH=BEFORE/src:src` measures an older library.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import nn

import mixnorm
from mixnorm.ops import triton as triton_kernels
from mixnorm.ops.triton import launch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
import launcher_stand_in

SHAPE = (8, 16, 4, 4)
ROUNDS, CALLS = 15, 200


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--option", action="append", default=[], help="of mixture norm, such as activation=relu")
    arguments = parser.parse_args()
    start_nothing()
    torch.set_num_threads(1)
    x = torch.randn(SHAPE).to(memory_format=torch.channels_last).requires_grad_()
    grad = torch.randn_like(x)
    options = dict(option.split("=", 1) for option in arguments.option)
    layers = {
        "batch norm": nn.BatchNorm2d(SHAPE[1]),
        "mixture norm": mixnorm.MixtureNorm2d(SHAPE[1], backend="triton", **options),
    }
    for name, layer in layers.items():
        forward, step = microseconds(lambda: layer(x)), microseconds(lambda: training_step(layer, x, grad))  # noqa: B023
        layer.eval()
        with torch.no_grad():
            evaluation = microseconds(lambda: layer(x))  # noqa: B023
        print(f"{name}: forward {forward:.0f} µs, forward and backward {step:.0f} µs, evaluation {evaluation:.0f} µs")


class Kernel:
    """A kernel that is compiled already, and does nothing."""

    def __init__(self, kernel):
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid):
        return lambda *arguments, **options: launcher_stand_in.compiled_kernel(lambda *arguments: None)


def start_nothing():
    launcher_stand_in.pretend_a_gpu(lambda owner, name, value, raising=True: setattr(owner, name, value))
    triton_kernels.INTERPRETED = True  # tensors on a CPU are taken
    make = launch.Plan.__init__
    launch.Plan.__init__ = lambda plan, kernel, *rest, **info: make(plan, Kernel(kernel), *rest, **info)


def training_step(layer, x, grad):
    torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)


def microseconds(work):
    """The first decile of many rounds: what disturbs only adds."""
    times = []
    for _ in range(ROUNDS * CALLS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e6 * sorted(times)[len(times) // 10]


if __name__ == "__main__":
    main()
