"""How a layer's time depends on the tiles of its kernels: every tuning of one kernel at a time, the others as they are.

    PYTHONPATH=src python3 benchmarks/tuning.py [--shapes 256x64x32x32 ...] [--components 3 8] [--out tuning.csv]

Forward and backward of a layer in a CUDA graph, channels last, for each kernel of ``tiles.TUNING`` and each variant of what
its threads hold. The kernels are compiled first, in all processes at once; then one process measures. A row says the time,
and what share that is of the present tuning's, measured in turns with it.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from mixnorm import MixtureNorm2d
from mixnorm.ops.triton import gradient, tiles, transform
from mixnorm.ops.triton import statistics as em

KERNELS = ("statistics", "transform", "gradient_sums", "gradient")
ROUNDS, REPLAYS = 5, 20


def variants(kernel):
    """The present tuning of a kernel, and others."""
    now = tiles.TUNING[kernel]
    others = [now._replace(most=most, rows=rows) for most, rows in itertools.product((64, 32, 16), (4, 2, 1))]
    others += [other._replace(stages=1) for other in others if other.rows == 1]
    others += [other._replace(per_processor=2 * now.per_processor) for other in others if other.rows == 1]
    return [now, *(other for other in dict.fromkeys(others) if other != now)]


def forget_plans():
    for module in (em, transform, gradient):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def layer_and_input(case):
    shape, dtype, components, activation, deviation = case
    torch.manual_seed(0)
    layer = MixtureNorm2d(shape[1], num_components=components, activation=activation, deviation=deviation, device="cuda")
    x = torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    return layer, x


def run_once(task):
    """Compiles the kernels of a case with a tuning, into Triton's cache."""
    case, kernel, tuning = task
    tiles.TUNING[kernel] = tuning
    forget_plans()
    layer, x = layer_and_input(case)
    layer(x).sum().backward()
    torch.cuda.synchronize()


def captured(case):
    layer, x = layer_and_input(case)
    upstream = torch.randn_like(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(x).backward(upstream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x).backward(upstream)
    return graph


def microseconds(graph):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / REPLAYS


def measure(case, kernel):
    """(tuning, µs, share of the present tuning's µs) of every variant."""
    graphs = []
    present = tiles.TUNING[kernel]
    for tuning in variants(kernel):
        tiles.TUNING[kernel] = tuning
        forget_plans()
        graphs.append((tuning, captured(case)))
    tiles.TUNING[kernel] = present
    forget_plans()
    times = [[microseconds(graph) for _, graph in graphs] for _ in range(ROUNDS)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return [(tuning, found, found / medians[0]) for (tuning, _), found in zip(graphs, medians, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["256x64x32x32", "256x128x16x16", "256x256x8x8", "256x512x4x4"])
    parser.add_argument("--components", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--activations", nargs="+", default=["relu"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--deviation", type=float, default=0.0)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU to tune for")
    cases = [
        (
            tuple(map(int, shape.split("x"))),
            getattr(torch, dtype),
            components,
            None if act == "none" else act,
            arguments.deviation,
        )
        for shape, dtype, components, act in itertools.product(
            arguments.shapes, arguments.dtypes, arguments.components, arguments.activations
        )
    ]
    tasks = [(case, kernel, tuning) for case in cases for kernel in arguments.kernels for tuning in variants(kernel)]
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        for future in [pool.submit(run_once, task) for task in tasks]:
            if error := future.exception():
                print("not compiled:", error, file=sys.stderr)
    rows = []
    for case, kernel in itertools.product(cases, arguments.kernels):
        found = measure(case, kernel)
        shape, dtype, components, activation, deviation = case
        label = [
            "x".join(map(str, shape)),
            str(dtype).removeprefix("torch."),
            components,
            activation or "none",
            deviation,
            kernel,
        ]
        best = sorted(found, key=lambda row: row[1])[:3]
        told = "; ".join(f"{t.most}/{t.rows}/{t.stages}/{t.per_processor} {share:.3f}" for t, _, share in best)
        print(*label, f"now {found[0][1]:.1f} µs, best (most/rows/stages/programs):", told, flush=True)
        rows += [[*label, *tuning, round(time, 2), round(share, 4)] for tuning, time, share in found]
        if arguments.out:
            with arguments.out.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                fields = ["shape", "dtype", "components", "activation", "deviation", "kernel"]
                writer.writerow([*fields, *tiles.Tuning._fields, "microseconds", "share"])
                writer.writerows(rows)


if __name__ == "__main__":
    main()
