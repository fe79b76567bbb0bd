"""A layer's training step and evaluation in two versions of the source, in turns on one machine.

    git worktree add ../before v0.1
    python benchmarks/versions.py ../before/src src

Each figure is a ratio to batch norm in the same process; on a GPU in a CUDA graph and eager.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

# Small tensors, where launches and Python count, to large ones, where memory does.
SHAPES = {
    "cuda": [
        ((256, 128, 8, 8), torch.float32),
        ((256, 128, 8, 8), torch.bfloat16),
        ((64, 448, 8, 8), torch.float32),
        ((256, 128, 16, 16), torch.float32),
        ((256, 64, 32, 32), torch.bfloat16),
        ((256, 256, 56, 56), torch.bfloat16),
    ],
    "cpu": [((256, 64), torch.float32), ((64, 128, 8, 8), torch.float32), ((32, 64, 32, 32), torch.float32)],
}
FORMATS = {"last": torch.channels_last, "first": torch.contiguous_format}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", help="folders that hold the package mixnorm, the older one first")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shapes", type=int, help="the first so many shapes alone")
    parser.add_argument("--channels", choices=FORMATS, default="last")
    parser.add_argument("--option", action="append", default=[], help="of mixture norm, such as activation=relu")
    arguments = parser.parse_args()
    if not arguments.sources:  # the measurement itself, in a process of its own
        measure(arguments.shapes, FORMATS[arguments.channels], arguments.option)
        return
    options = ["--channels", arguments.channels, *(f"--option={option}" for option in arguments.option)]
    options += ["--shapes", str(arguments.shapes)] if arguments.shapes else []
    for number in range(arguments.rounds):
        for source in arguments.sources:
            environment = os.environ | {"PYTHONPATH": source}
            command = [sys.executable, __file__, *options]
            with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    print(f"round {number + 1}, {source}: {line}", end="", flush=True)


def measure(count: int | None, memory_format: torch.memory_format, options: list[str]) -> None:
    from mixnorm import MixtureNorm1d, MixtureNorm2d

    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = dict(option.split("=", 1) for option in options)
    chosen = {name: {"True": True}.get(value, value) for name, value in chosen.items()}
    for shape, dtype in SHAPES[device][:count]:
        x = torch.randn(shape, device=device, dtype=dtype)
        if len(shape) == 4:
            x = x.contiguous(memory_format=memory_format)
        x.requires_grad_()
        grad, channels = torch.randn_like(x), shape[1]
        pair = (nn.BatchNorm2d, MixtureNorm2d) if len(shape) == 4 else (nn.BatchNorm1d, MixtureNorm1d)
        ratios = {}
        for name, work in (("step", step), ("evaluation", evaluation)):
            for way in ("graph", "eager") if device == "cuda" else ("eager",):
                times = []
                for norm in pair:
                    layer = norm(channels, **(chosen if norm is pair[1] else {})).to(device)
                    for _ in range(11):  # a full history
                        layer(x)
                    times.append(timed(partial(work, layer, x, grad), in_graph=way == "graph"))
                ratios[f"{name}, {way}"] = f"{times[1] / times[0]:.2f} ({times[1] * 1e6:.0f} µs)"
        print("×".join(map(str, shape)), str(dtype)[6:], json.dumps(ratios, ensure_ascii=False), flush=True)


def step(layer: nn.Module, x: Tensor, grad: Tensor) -> None:
    torch.autograd.backward(layer.train()(x), grad)
    x.grad = None


def evaluation(layer: nn.Module, x: Tensor, grad: Tensor) -> None:
    with torch.no_grad():
        layer.eval()(x)


def timed(work: Callable[[], None], *, in_graph: bool, repeats: int = 20, calls: int = 4) -> float:
    """Seconds of one call: the first quartile of many, because what disturbs only adds."""
    with torch.cuda.stream(torch.cuda.Stream()) if in_graph else nullcontext():
        for _ in range(3):
            work()
    if in_graph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                work()
    times = []
    for _ in range(repeats):
        _wait()
        start = time.perf_counter()
        if in_graph:
            graph.replay()
        else:
            for _ in range(calls):
                work()
        _wait()
        times.append((time.perf_counter() - start) / calls)
    return sorted(times)[repeats // 4]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
