"""Norms on held-out images, side by side: a table from the records of `mixnorm compare --norms ... --train-eval`.

    python benchmarks/arms.py results/resnet-18/cifar100-held-out

For each norm the accuracy in the last epoch, its difference from batch norm's with Welch's 95% interval where both have two
seeds or more, the training loss, and the loss on training images in evaluation, without crops, flips and the norm's noise.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import mean

from scipy import stats

from mixnorm_lab.storage import records

BASE = "batch-norm"


def last_epochs(folder):
    """The last lines of all finished runs, by the name of their norm and in the order of their seeds."""
    found = defaultdict(list)
    for record in sorted(records.find(folder), key=lambda record: record.config.seed):
        if record.finished:
            found[record.config.name].append(record.epochs[-1])
    return found


def accuracies(epochs):
    return [100 * (1 - epoch["test_error"]) for epoch in epochs]


def difference(ours, base):
    """ "+0.74 [0.12, 1.36]", or without the interval where one seed says nothing of it."""
    text = f"{mean(ours) - mean(base):+.2f}"
    if min(len(ours), len(base)) < 2:
        return text
    low, high = stats.ttest_ind(ours, base, equal_var=False).confidence_interval(0.95)
    return f"{text} [{low:.2f}, {high:.2f}]"


def average(epochs, key):
    values = [epoch[key] for epoch in epochs if epoch.get(key) is not None]
    return f"{mean(values):.3f}" if values else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    found = last_epochs(parser.parse_args().folder)
    base = accuracies(found[BASE])
    print("| norm | seeds | accuracy of each | mean | beyond batch norm | training loss | the same in evaluation |")
    print("|---|---|---|---|---|---|---|")
    for name, epochs in sorted(found.items(), key=lambda item: -mean(accuracies(item[1]))):
        own = accuracies(epochs)
        cells = [
            name.replace(",", ", "),
            str(len(own)),
            ", ".join(f"{value:.2f}" for value in own),
            f"{mean(own):.2f}",
            "" if name == BASE else difference(own, base),
            average(epochs, "train_loss"),
            average(epochs, "train_eval_loss"),
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
