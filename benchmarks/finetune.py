"""What fine-tuning does to a checkpoint under batch norm, and converted: the accuracy all along the first steps.

    python benchmarks/finetune.py RUN [--folder OFFICIAL_FILES] [--steps 200] [--every 10] [--images 10000]

RUN is the folder of a run of batch norm with its checkpoint, such as `mixnorm train --model resnet-18 --data cifar10` makes.
Every arm starts with its weights and sees the same batches. Accuracies are in %, on the images that the run was tested on.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F

import mixnorm
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.storage import checkpoint
from mixnorm_lab.training import build
from mixnorm_lab.training.classifier import evaluate

BATCH = 250
ARMS = {
    "batch norm": None,
    "gated": {"form": "gated"},
    "gated, all layers": {"form": "gated", "select": "*"},
    "the paper's form": {"form": "paper", "select": "*"},
}


def fine_tune(model, source, config, *, steps, every, lr, images, device):
    """The accuracy before the first step, and after every so many."""
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    source.start_epoch(config.seed + 1, 0)

    def accuracy():
        batches = islice(source.test_batches(BATCH), images // BATCH)
        return 100 * (1 - evaluate(model.eval(), batches, device=device, bf16=False).error)

    found = [accuracy()]
    for step in range(steps):
        batch, labels = source.batch(torch.tensor(step, device=device))
        F.cross_entropy(model.train()(batch), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0:
            found.append(accuracy())
    return torch.tensor(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--images", type=int, default=10_000, help="at most, that an accuracy is of")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    saved = checkpoint.read(arguments.run)
    if saved is None:
        parser.error(f"{arguments.run} has no checkpoint: name the folder of a run that was trained here")
    config = RunConfig.from_json(saved["config"])
    print(f"{'':20} {'before':>7} {'first':>7} {'lowest':>7} {'last':>7}  most below batch norm")
    base = None
    for name, options in ARMS.items():
        model, source = build.prepare(config, device, arguments.folder)
        model.load_state_dict(saved["model"])
        if options is not None:
            mixnorm.convert(model, **options)
        torch.manual_seed(config.seed)
        settings = {name: getattr(arguments, name) for name in ("steps", "every", "lr", "images")}
        found = fine_tune(model.to(device), source, config, device=device, **settings)
        base = found if base is None else base
        figures = [found[0], found[1], found.min(), found[-1]]
        print(f"{name:20} {' '.join(f'{figure:7.2f}' for figure in figures)}  {(base - found).max():.2f}", flush=True)


if __name__ == "__main__":
    main()
