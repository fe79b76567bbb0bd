"""Evaluation of one layer in two Python threads beside one, as a server runs it: python benchmarks/threads.py"""

from __future__ import annotations

import threading
import time

import torch
from torch import nn

from mixnorm import MixtureNorm2d

CALLS, ROUNDS = 30, 3


def evaluate(layer: nn.Module, x: torch.Tensor) -> None:
    torch.set_num_threads(1)
    with torch.no_grad():
        for _ in range(CALLS):
            layer(x)


def calls_per_second(layer: nn.Module, x: torch.Tensor, count: int) -> float:
    """The best of a few rounds, because what disturbs only takes time."""
    rates = []
    for _ in range(ROUNDS):
        threads = [threading.Thread(target=evaluate, args=(layer, x)) for _ in range(count)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rates.append(count * CALLS / (time.perf_counter() - start))
    return max(rates)


def main() -> None:
    x = torch.randn(64, 64, 16, 16)
    layers = {"batch norm": nn.BatchNorm2d(64), "T = 1": MixtureNorm2d(64, history=1), "T = 10": MixtureNorm2d(64)}
    for name, layer in layers.items():
        for _ in range(10):
            layer(x)
        evaluate(layer.eval(), x)
        one, two = (calls_per_second(layer, x, count) for count in (1, 2))
        print(f"{name}: {one:.0f} a second in one thread, {two:.0f} in two, {two / one:.2f} times")


if __name__ == "__main__":
    main()
