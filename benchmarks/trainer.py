"""What the trainer costs beside the bare step of its model: the same update on one fixed batch, without data or records.

    python benchmarks/trainer.py [--model digits-cnn] [--data digits] [--mixture] [--steps 200]

On a GPU the bare step is a CUDA graph, as the trainer's is. The two are timed in turns; the figure is the ratio of medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from mixnorm_lab.config import presets
from mixnorm_lab.launch.display import RunDisplay
from mixnorm_lab.training import build
from mixnorm_lab.training.classifier import ClassifierLoop
from mixnorm_lab.training.optimizers import build_optimizer
from mixnorm_lab.training.step import autocast


def bare_step(config, device, folder):
    """The update of the trainer's model on a fixed batch, as a function without arguments."""
    model, source = build.prepare(config, device, folder)
    model = model.to(device, memory_format=torch.channels_last if config.channels_last else torch.preserve_format).train()
    optimizer = build_optimizer(model.parameters(), config.optimizer, device)
    forward = torch.compile(model) if config.compile else model
    source.start_epoch(0, 0)
    images, labels = (t.clone() for t in source.batch(torch.zeros((), dtype=torch.long, device=device)))

    def step():
        with autocast(device, config.precision == "bf16"):
            logits = forward(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which makes the batch
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()

    def replay(_kept=step):  # the graph alone would not keep the model and the batch, which it reads where they were
        graph.replay()

    return replay


def seconds(function, device):
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--folder", type=Path, help="of the data's official files")
    parser.add_argument("--mixture", action="store_true", help="with the mixture norms of a comparison")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--compile", action="store_true", help="both with torch.compile")
    parser.add_argument("--epochs", type=int, default=5, help="that are timed")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True  # as in the trainer
    chosen = dataclasses.replace(
        presets.defaults(arguments.data, arguments.model), precision=arguments.precision,
        channels_last=device.type == "cuda", compile=arguments.compile,
    )  # fmt: skip
    config = presets.with_norm(chosen, "overhead", 0, mixture=arguments.mixture)
    bare = bare_step(config, device, arguments.folder)
    model, source = build.prepare(config, device, arguments.folder)
    training = ClassifierLoop(config, model, source, device)
    count = source.steps_per_epoch
    with tempfile.TemporaryFile("w") as file, RunDisplay(["overhead"], file=file) as display:
        progress = display.run("overhead")
        progress.start("overhead", config.epochs, count, 0)

        def epoch():
            progress.epoch(training.run_epoch(progress))

        def bare_epoch():
            for _ in range(count):
                bare()

        epoch(), bare_epoch()  # what is compiled is compiled
        timed, wholes, bares = [], [], []
        for _ in range(arguments.epochs):
            before = training.train_seconds
            wholes.append(seconds(epoch, device))
            timed.append(training.train_seconds - before)
            bares.append(seconds(bare_epoch, device))
    bare_ms, step_ms, whole_ms = (1e3 * statistics.median(values) / count for values in (bares, timed, wholes))
    print(f"{config.model} on {config.data}, {device}: bare step {bare_ms:.3f} ms, trainer's {step_ms:.3f} ms "
          f"({100 * (step_ms / bare_ms - 1):+.1f}%), with evaluation and all else {whole_ms:.3f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
