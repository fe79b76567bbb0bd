"""How stale running statistics are early in a training, and what is left of that for weights averaged as they are.

    python benchmarks/average.py --folder FOLDER [--experiment cifar-cnn/cifar100/bn-2] [--steps 300] [--every 100]

Trains an experiment on nine tenths of the training images, and now and then prints the accuracy on images of the last tenth,
with running statistics and with refilled ones, for the last weights and for averages with several decays. FOLDER holds
CIFAR's official files.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from pathlib import Path

import torch
import torch.nn.functional as F

import mixnorm
from mixnorm.experiments import build, catalog
from mixnorm.experiments.schedule import build_optimizer, set_rate
from mixnorm.experiments.step import evaluate

LAST = 0.0  # the decay of an average that is the last weights
BATCH = 500  # images of an evaluation at a time


def with_weights(model, weights):
    made = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter, value in zip(made.parameters(), weights, strict=True):
            parameter.copy_(value)
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of the data's official files")
    parser.add_argument("--experiment", default="cifar-cnn/cifar100/bn-2")
    parser.add_argument("--decays", type=float, nargs="+", default=[0.8, 0.9, 0.95])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=100, help="steps between two evaluations")
    parser.add_argument("--images", type=int, default=2000, help="of an evaluation")
    parser.add_argument("--refill", type=int, default=10, help="batches that statistics are refilled from")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = dataclasses.replace(catalog.get(arguments.experiment).config, validation=0.1)
    model, source = build.prepare(config, device, arguments.folder)
    model = model.to(device).train()
    optimizer = build_optimizer(model.parameters(), config.optimizer, device)
    set_rate(optimizer, config.optimizer.lr)
    averages = {decay: [p.detach().clone() for p in model.parameters()] for decay in (LAST, *arguments.decays)}
    held_out = [batch for batch, _ in zip(source.test_batches(BATCH), range(arguments.images // BATCH), strict=False)]

    def accuracy(network):
        return 100 - 100 * evaluate(network, held_out, device=device, bf16=False)[1].item()

    print(
        "step, then accuracy in % with running statistics / refilled:", *(f"decay {decay:g}" for decay in averages), sep="  "
    )
    for done in range(1, arguments.steps + 1):
        epoch, number = divmod(done - 1, source.steps_per_epoch)
        if number == 0:
            source.start_epoch(config.seed, epoch)
        images, labels = source.batch(torch.tensor(number, device=device))
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for decay, average in averages.items():
                torch._foreach_lerp_(average, list(model.parameters()), 1 - decay)
        if done % arguments.every == 0:
            figures = []
            for average in averages.values():
                tested = with_weights(model, average)
                running = accuracy(tested)
                mixnorm.recalibrate(tested, source.train_batches(arguments.refill, seed=done))
                figures.append(f"{running:.2f} / {accuracy(tested.eval()):.2f}")
            print(f"{done:5}", *figures, sep="  ", flush=True)


if __name__ == "__main__":
    main()
