"""Queues of trainings that go on by themselves: what has no finished record yet is trained, until the time is over.

    python benchmarks/queues.py NAME [--data OFFICIAL_FILES] [--out runs/queue] [--seconds 540] [--jobs 3]

NAME is a queue below. A run with a finished record in the queue's folder of results/ is left out. New ones go into --out,
where an unfinished run keeps its checkpoint and goes on with the next call. Finished records are packed into --packed, if it
is given, to be moved into results/.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mixnorm_lab.comparison import plan
from mixnorm_lab.config import presets
from mixnorm_lab.launch.display import RunDisplay
from mixnorm_lab.launch.one_run import Files
from mixnorm_lab.launch.suite import Suite
from mixnorm_lab.storage import records
from mixnorm_lab.storage.folders import run_name


@dataclass(frozen=True)
class Queue:
    """Norms and how many seeds each has, in the order of their turns; ``settings`` are options of ``mixnorm compare``."""

    results: str
    data: str
    settings: Mapping[str, Any]
    turns: tuple[tuple[str, range], ...]
    recipe: str | None = None

    def configs(self, device):
        preset, _ = plan.preset_of(self.data, dict(self.settings), device, self.recipe, plan.Own())
        for norm, seeds in self.turns:
            config = presets.of_norm(preset, norm)
            yield from (replace(config, seed=seed) for seed in seeds)


RESNET = {"model": "resnet-18", "precision": "bf16"}
HELD_OUT = {**RESNET, "validation": 0.1, "train_eval": True}
PARABOLA = "mixture:layers=relu:deviation=learned"
ALONE = "mixture:layers=relu:num_components=1:deviation=learned:activation=None"
EVERYWHERE = "mixture:num_components=1:deviation=learned:num_components@relu=3"
EIGHT = range(8)


def on_test_images(model, data, recipe, *norms, **settings):
    """Eight seeds of each norm, the seeds in turns so that all norms have as many at any time."""
    turns = tuple((norm, range(seed, seed + 1)) for seed in EIGHT for norm in norms)
    return Queue(f"results/{model}/{data}", data, {"model": model, "precision": "bf16", **settings}, turns, recipe)


# Chosen on held-out images: the form with modes that gained most there, and that with its noise in place of the modes. The
# wide ResNet was named before any of its results were seen.
CHOSEN = ("batch", "ghost-32", PARABOLA, "parabola-32:layers=relu")

QUEUES = {
    "resnet-18-cifar100": on_test_images("resnet-18", "cifar100", "one-cycle", *CHOSEN),
    "resnet-18-cifar10": on_test_images("resnet-18", "cifar10", "one-cycle", *CHOSEN),
    "wide-resnet-cifar100": on_test_images("wide-resnet-16-4", "cifar100", "one-cycle", *CHOSEN),
    "resnet-18-held-out": Queue(
        "results/resnet-18/cifar100-held-out",
        "cifar100",
        HELD_OUT,
        (
            ("parabola-32:layers=relu", range(2)),
            (f"{PARABOLA}:scale=unit", range(2)),
            ("batch", range(5)),
            ("ghost-32", range(5)),
            (PARABOLA, range(5)),
            ("parabola-16:layers=relu", range(2)),
            ("parabola-32", range(2)),
            (EVERYWHERE, range(3)),
            ("parabola-32:layers=relu", range(4)),
            (f"{PARABOLA}:num_components=5", range(1)),
            ("batch", EIGHT),
            ("ghost-32", EIGHT),
            (PARABOLA, EIGHT),
            (ALONE, EIGHT),
            ("ghost-16", EIGHT),
        ),
        recipe="one-cycle",
    ),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=QUEUES)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/queue"))
    parser.add_argument("--packed", type=Path)
    parser.add_argument("--seconds", type=int, default=0, help="stop after so many; 0: when all is done")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--list", action="store_true", help="only say which runs there are to do")
    arguments = parser.parse_args()
    queue = QUEUES[arguments.name]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = Path(queue.results)
    found = records.find(results) if results.is_dir() else []
    done = {run_name(record.config) for record in found if record.finished}
    todo = list({run_name(config): config for config in queue.configs(device) if run_name(config) not in done}.values())
    if arguments.list:
        print("\n".join(run_name(config) for config in todo))
        return
    root = arguments.out / arguments.name
    suite = Suite(todo, root, Files(arguments.data))
    suite.check(here=device)
    if arguments.seconds:
        signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C: what is done is kept
        signal.alarm(arguments.seconds)
    try:
        with RunDisplay([run_name(config) for config in todo]) as display:
            for name, failure in suite.run(device=device, display=display, jobs=arguments.jobs).items():
                print(f"{name} failed: {failure.sentence}")
    except KeyboardInterrupt:
        print("the time is over")
    finally:
        signal.alarm(0)
    if arguments.packed:
        records.keep((record for record in suite.recorded_now() if record.finished), arguments.packed)


if __name__ == "__main__":
    main()
