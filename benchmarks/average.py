"""How stale running statistics are early in a training, and what is left of that for weights averaged as they are.

    python benchmarks/average.py --folder FOLDER [--experiment cifar-cnn/cifar100/bn-2] [--steps 300] [--every 100]

Trains an experiment on nine tenths of the training images, and now and then prints the accuracy on images of the last tenth,
with running statistics and with refilled ones, for the last weights and for averages with several decays; in the end, their
means, and the most that refilling adds. A mixture norm's training does not depend on its inference, so that several ways
(--inferences; "unbounded" is the plain mean of the T transforms) and lengths of its history (--histories) are evaluated in
one training. FOLDER holds CIFAR's official files.
--out adds every figure to a table, which a document shows if it lies beside its records (results/inference.csv).
"""

from __future__ import annotations

import argparse
import copy
import csv
import dataclasses
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F

import mixnorm
from mixnorm_lab.config import catalog
from mixnorm_lab.reports.tables.inference import COLUMNS
from mixnorm_lab.training import build
from mixnorm_lab.training.classifier import evaluate
from mixnorm_lab.training.optimizers import build_optimizer, set_rate

LAST = 0.0  # the decay of an average that is the last weights
BATCH = 500  # images of an evaluation at a time


def mixture_norms(model):
    return [module for module in model.modules() if isinstance(module, mixnorm.MixtureNorm2d)]


def with_weights(model, weights):
    made = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter, value in zip(made.parameters(), weights, strict=True):
            parameter.copy_(value)
    return made


def with_inference(model, inference, history):
    """A copy that evaluates the newest mixtures alone, in this way."""
    made = copy.deepcopy(model)
    for norm in mixture_norms(made):
        norm.inference = "ensemble" if inference == "unbounded" else inference
        norm.bounded = inference != "unbounded"
        norm.history_weights[: norm.history - history] = 0  # as if they had never been filled
    return made


def add_row(path, *values):
    """Writes one evaluation at once: what was measured stays when the rest is cut off."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, values] if new else [values])


def report(measured):
    """``measured``: the accuracies with running and with refilled statistics, (evaluations, 2) by what was evaluated."""
    print("\nmean of all evaluations with running statistics / refilled; refilling adds at most, in points")
    for name, pairs in measured.items():
        running, refilled = torch.tensor(pairs).T
        print(f"{name:40} {running.mean():.2f} / {refilled.mean():.2f}  {(refilled - running).max():.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of the data's official files")
    parser.add_argument("--experiment", default="cifar-cnn/cifar100/bn-2")
    parser.add_argument("--decays", type=float, nargs="+", default=[0.8, 0.9, 0.95])
    parser.add_argument("--inferences", nargs="+", default=["ensemble"])
    parser.add_argument("--histories", type=int, nargs="+", default=[10])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=100, help="steps between two evaluations")
    parser.add_argument("--images", type=int, default=2000, help="of an evaluation")
    parser.add_argument("--refill", type=int, default=10, help="batches that statistics are refilled from")
    parser.add_argument("--bf16", action="store_true", help="evaluate under autocast")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a CSV to add every figure to")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = dataclasses.replace(catalog.get(arguments.experiment).config, validation=0.1, seed=arguments.seed)
    variants = [("", 0)]
    if config.mixture is not None:
        options = {**config.mixture.options, "history": max(arguments.histories)}
        config = dataclasses.replace(config, mixture=dataclasses.replace(config.mixture, options=options))
        variants = list(itertools.product(arguments.inferences, arguments.histories))
    model, source = build.prepare(config, device, arguments.folder)
    model = model.to(device).train()
    optimizer = build_optimizer(model.parameters(), config.optimizer, device)
    averages = {decay: [p.detach().clone() for p in model.parameters()] for decay in (LAST, *arguments.decays)}
    held_out = [batch for batch, _ in zip(source.test_batches(BATCH), range(arguments.images // BATCH), strict=False)]

    def accuracy(network):
        return 100 - 100 * evaluate(network, held_out, device=device, bf16=arguments.bf16).error

    def name(decay, inference, history):
        return f"decay {decay:g}" + (f", {inference}, T = {history}" if inference else "")

    measured = {name(decay, *variant): [] for decay in averages for variant in variants}
    print("step, then accuracy in % with running statistics / refilled:", *measured, sep="  ")
    for done in range(1, arguments.steps + 1):
        epoch, number = divmod(done - 1, source.steps_per_epoch)
        if number == 0:
            source.start_epoch(config.seed, epoch)
            set_rate(optimizer, config.schedule.rate(config.optimizer.lr, epoch, config.epochs))
        images, labels = source.batch(torch.tensor(number, device=device))
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for decay, average in averages.items():
                torch._foreach_lerp_(average, list(model.parameters()), 1 - decay)
        if done % arguments.every:
            continue
        figures = []
        for decay, average in averages.items():
            tested = with_weights(model, average)
            refilled = copy.deepcopy(tested)
            mixnorm.recalibrate(refilled, source.train_batches(arguments.refill, seed=done))
            refilled.eval()
            for variant in variants:
                networks = (with_inference(network, *variant) if variant[0] else network for network in (tested, refilled))
                pair = tuple(accuracy(network) for network in networks)
                measured[name(decay, *variant)].append(pair)
                figures.append(f"{pair[0]:.2f} / {pair[1]:.2f}")
                if arguments.out is not None:
                    told = (arguments.experiment, arguments.seed, done, decay, *variant, arguments.refill)
                    add_row(arguments.out, *told, *(f"{figure:.2f}" for figure in pair))
        print(f"{done:5}", *figures, sep="  ", flush=True)
    report(measured)


if __name__ == "__main__":
    main()
