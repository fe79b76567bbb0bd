"""A stand-in for CUDA: without a GPU, what can be known of the way that benchmarks go there."""

import time

import torch

from mixnorm_lab.bench import errors, measure, run, steps


class StandIn:
    """For a CUDA event, stream, graph or context: it takes every call, and does no more than an event does on a CPU."""

    def __init__(self, *_arguments, **_options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.time - self.time)

    def record(self):
        self.time = time.perf_counter()

    def synchronize(self, *_):
        pass

    replay = wait_stream = synchronize


def pretend_cuda(monkeypatch):
    """Lets benchmarks believe in a GPU, with tensors that are on the CPU; a new process would not."""
    for name in ("Event", "Stream", "CUDAGraph", "graph", "stream", "current_stream", "default_stream"):
        monkeypatch.setattr(torch.cuda, name, StandIn)
    for name in ("synchronize", "set_stream", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Stand-in")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 10**6)
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device, quick: 4e12)
    for module in (run, errors):
        monkeypatch.setattr(module, "make_inputs", lambda case, _device: steps.make_inputs(case, "cpu"))
