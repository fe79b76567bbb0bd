"""The kernels of a whole training step, by their time: where a model with mixture norms spends more than with batch norms.

    python benchmarks/kernels.py [--model resnet-18] [--batch 256] [--norms batch,ghost-32,paper,gated] [--top 12]

A norm is "batch", a form of ``mixnorm_lab.bench.whole.models.FORMS``, or a name such as "ghost-32". The step is in bf16, in
a CUDA graph. The times are of each kernel, of all of them together, and of the step, which has gaps between them.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from torch import nn

from mixnorm_lab.bench.whole import models

WARM_UP, REPLAYS = 5, 20
SHAPES = {models.RESNET_50: (3, 224, 224)}
LONGEST = 70  # letters of a kernel's name


def of_norm(model: str, norm: str) -> nn.Module:
    built = models.build(model, SHAPES.get(model, (3, 32, 32)))
    if norm == "batch":
        return built
    if norm in models.FORMS:
        return models.with_mixture_norms(built, model, norm, num_components=3)
    return models.with_norm(built, norm)


def captured(model: str, norm: str, batch: int) -> torch.cuda.CUDAGraph:
    """A training step of the model, as a graph."""
    images = torch.randn(batch, *SHAPES.get(model, (3, 32, 32)), device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.randint(models.num_classes(model), (batch,), device="cuda")
    step = models.training(of_norm(model, norm), images, labels, bf16=True)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of one replay."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(WARM_UP):
        graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / REPLAYS


def kernels(graph: torch.cuda.CUDAGraph) -> tuple[Counter[str], Counter[str]]:
    """Microseconds and launches of each kernel in one replay."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time / REPLAYS
            launches[event.name] += 1
    return times, Counter({name: count // REPLAYS for name, count in launches.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet-18")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--norms", default="batch,ghost-32,paper,gated")
    parser.add_argument("--top", type=int, default=12)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    for norm in arguments.norms.split(","):
        graph = captured(arguments.model, norm, arguments.batch)
        step, (times, launches) = milliseconds(graph), kernels(graph)
        in_kernels = sum(times.values()) / 1e3
        print(f"\n{arguments.model}, batch {arguments.batch}, {norm}: {step:.3f} ms, kernels {in_kernels:.3f} ms")
        for name, time in times.most_common(arguments.top):
            print(f"{time:9.1f} µs  {launches[name]:4d}  {name[:LONGEST]}")
        rest = sum(time for name, time in times.items() if name not in dict(times.most_common(arguments.top)))
        print(f"{rest:9.1f} µs        the rest", flush=True)
        del graph
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
