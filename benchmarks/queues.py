"""Queues of trainings that go on by themselves: what has no finished record yet is trained, until the time is over.

    python benchmarks/queues.py NAME... [--data OFFICIAL_FILES] [--out runs/queue] [--seconds 540] [--jobs 3]

NAME is a queue below; several are trained one after another. A run with a finished record in the queue's folder of results/
is left out. New ones go into --out, where an unfinished run keeps its checkpoint and goes on with the next call. Finished
records are packed into --packed, if it is given, to be moved into results/.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mixnorm_lab.comparison import plan
from mixnorm_lab.config import catalog, presets
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.launch.display import RunDisplay
from mixnorm_lab.launch.one_run import Files
from mixnorm_lab.launch.suite import Suite
from mixnorm_lab.storage import records
from mixnorm_lab.storage.folders import run_name

EIGHT, FOUR = range(8), range(4)
GPU = torch.device("cuda")  # that the runs are for


@dataclass(frozen=True)
class Norms:
    """Norms side by side, as ``mixnorm compare --norms`` has them.

    Args:
        results: where their records are kept.
        settings: options of ``mixnorm compare``.
        turns: norms, and seeds of each, in the order of their turns.
    """

    results: str
    data: str
    settings: Mapping[str, Any]
    turns: Sequence[tuple[str, range]]
    recipe: str | None = None

    def configs(self) -> Iterator[RunConfig]:
        preset, _ = plan.preset_of(self.data, dict(self.settings), GPU, self.recipe, plan.Own())
        for norm, seeds in self.turns:
            config = presets.of_norm(preset, norm)
            yield from (replace(config, seed=seed) for seed in seeds)


@dataclass(frozen=True)
class Rows:
    """Rows of the paper, as ``mixnorm reproduce`` has them, and the same with something changed.

    Args:
        names: of experiments, in the order of their turns; each has all its seeds before the next one begins.
        options: of mixture norm, and ``settings`` of a run, that differ from the experiments'. A run is called after them.
    """

    names: Sequence[str]
    seeds: range
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    results: str = "results"

    def configs(self) -> Iterator[RunConfig]:
        changed = "".join(f",{name}={value}" for name, value in {**self.options, **self.settings}.items())
        for name in self.names:
            config = plan.as_given(catalog.get(name).config, {"precision": "bf16", "recalibrate": 20}, GPU)
            config = replace(config, name=config.name + changed, **self.settings)
            if config.mixture is not None:
                mixture = replace(config.mixture, options={**config.mixture.options, **self.options})
                config = replace(config, mixture=mixture)
            yield from (replace(config, seed=seed) for seed in self.seeds)


def in_turns(seeds: range, *norms: str) -> tuple[tuple[str, range], ...]:
    """All norms with the first seed, then all with the second, so that they have as many at any time."""
    return tuple((norm, range(seed, seed + 1)) for seed in seeds for norm in norms)


def on_test_images(model: str, data: str, recipe: str, *norms: str) -> Norms:
    settings = {"model": model, "precision": "bf16"} | ({"recalibrate": 20} if recipe == "paper-cnn" else {})
    return Norms(f"results/{model}/{data}-{recipe}", data, settings, in_turns(EIGHT, *norms), recipe)


HELD_OUT = {"precision": "bf16", "validation": 0.1, "train_eval": True}
PARABOLA = "mixture:layers=relu:deviation=learned"
ALONE = "mixture:layers=relu:num_components=1:deviation=learned:activation=None"
EVERYWHERE = "mixture:num_components=1:deviation=learned:num_components@relu=3"
# Chosen on held-out images: the form with modes that gained most there, and that with its noise in place of the modes. The
# wide ResNet was named before any of its results were seen.
CHOSEN = ("batch", "ghost-32", PARABOLA, "parabola-32:layers=relu")

# What the gain of the small CNN is made of: the paper's form in all layers, and one thing changed at a time.
CNN = "mixture:layers=conv1+conv2+conv3+conv4"
CNN_ARMS = (
    "batch",
    "ghost-64",
    "ghost-32",
    "ghost-16",
    "dropout-0.1",
    CNN,
    f"{CNN}:history=1",
    f"{CNN}:history=40",
    f"{CNN}:em_iters=0",
    f"{CNN}:em_iters=8",
    f"{CNN}:sample_fraction=1.0:max_samples=None",
    f"{CNN}:seeding=warm",
    f"{CNN}:fit=ahead",
    "shuffled-3",
    f"{CNN}:num_components=2",
    f"{CNN}:num_components=5",
    f"{CNN}:num_components=8",
    f"{CNN}:scale=unit",
    f"{CNN}:deviation=learned",
    "parabola-32",
)
CIFAR100 = "cifar-cnn/cifar100"

QUEUES: dict[str, tuple[Norms | Rows, ...]] = {
    "resnet-18-cifar100": (on_test_images("resnet-18", "cifar100", "one-cycle", *CHOSEN),),
    "resnet-18-cifar10": (on_test_images("resnet-18", "cifar10", "one-cycle", *CHOSEN),),
    "wide-resnet-cifar100": (on_test_images("wide-resnet-16-4", "cifar100", "one-cycle", *CHOSEN),),
    "cifar-cnn-cifar100": tuple(
        on_test_images("cifar-cnn", "cifar100", recipe, "batch", "ghost-32", "ghost-16", CNN)
        for recipe in ("one-cycle", "paper-cnn")
    ),
    "cifar-cnn-held-out": (
        Norms(
            "results/cifar-cnn/cifar100-held-out",
            "cifar100",
            {"model": "cifar-cnn", "recalibrate": 20, **HELD_OUT},
            in_turns(FOUR, *CNN_ARMS),
            "paper-cnn",
        ),
        Norms(
            "results/cifar-cnn/cifar100-held-out-smoothed",
            "cifar100",
            {"model": "cifar-cnn", "recalibrate": 20, "label_smoothing": 0.1, **HELD_OUT},
            in_turns(FOUR, "batch", "ghost-32", CNN),
            "paper-cnn",
        ),
    ),
    "resnet-18-held-out": (
        Norms(
            "results/resnet-18/cifar100-held-out",
            "cifar100",
            {"model": "resnet-18", **HELD_OUT},
            (
                ("batch", EIGHT),
                ("ghost-32", EIGHT),
                (PARABOLA, EIGHT),
                ("parabola-32:layers=relu", EIGHT),
                (ALONE, EIGHT),
                ("ghost-16", EIGHT),
                *in_turns(
                    FOUR,
                    "mixture",
                    "mixture:fit=ahead",
                    f"{PARABOLA}:fit=ahead",
                    "mixture:scale=unit:within=learned:between=learned:activation=None",
                    "mixture:em_iters=0",
                    "mixture:em_iters=8",
                    "mixture:sample_fraction=1.0:max_samples=None",
                    "mixture:seeding=warm",
                    "shuffled-3",
                    "mixture:num_components=5",
                    "mixture:scale=unit:activation=None",
                    "dropout-0.1",
                    f"{PARABOLA}:scale=unit",
                    "parabola-16:layers=relu",
                    "enhanced",
                    "enhanced-32",
                ),
                (EVERYWHERE, range(3)),
                (f"{PARABOLA}:num_components=5", range(1)),
                ("parabola-32", range(2)),
            ),
            "one-cycle",
        ),
    ),
    # What there is to gain from an image's own statistics, which no mixture of the batch has; and each norm at half and at
    # twice the rate of the recipe.
    "resnet-18-enhanced": (
        Norms(
            "results/resnet-18/cifar100-held-out",
            "cifar100",
            {"model": "resnet-18", **HELD_OUT},
            in_turns(FOUR, "enhanced", "enhanced-32"),
            "one-cycle",
        ),
    ),
    "resnet-18-rates": tuple(
        Norms(
            f"results/resnet-18/cifar100-held-out-rate-{rate}",
            "cifar100",
            {"model": "resnet-18", "lr": rate, **HELD_OUT},
            in_turns(FOUR, "batch", "ghost-32", PARABOLA),
            "one-cycle",
        )
        for rate in (0.1, 0.4)
    ),
    # The paper's argument rests on the batch. Its printed equation, and its sample of 25% of all points, have no record yet.
    "cifar-cnn-rows": (
        Rows((f"{CIFAR100}/mn-2",), range(3), options={"inference": "paper"}),
        Rows((f"{CIFAR100}/mn-2",), range(3), options={"inference": "pooled"}),
        Rows((f"{CIFAR100}/mn-2",), range(3), options={"max_samples": None}),
        *(
            Rows((f"{CIFAR100}/bn-2", f"{CIFAR100}/mn-2"), range(3), settings={"batch_size": size})
            for size in (512, 128, 64, 32)
        ),
    ),
    "inception-v3-rows": (
        Rows(("inception-v3/cifar100/bn-5", "inception-v3/cifar100/mn-5"), range(1)),
        Rows(("inception-v3/cifar10/bn-1", "inception-v3/cifar10/mn-3"), range(1)),
        Rows(("inception-v3/cifar100/nesterov-bn-1", "inception-v3/cifar100/nesterov-mn-1"), range(1)),
        Rows(("inception-v3/cifar100/mn-2", "inception-v3/cifar10/mn-2"), range(1)),
    ),
    "densenet-40-rows": (Rows(("densenet-40/cifar100/bn", "densenet-40/cifar100/mn"), range(1)),),
}


def to_do(queue: Norms | Rows) -> list[RunConfig]:
    """The runs without a finished record, each once, in the order of their turns."""
    results = Path(queue.results)
    found = records.find(results) if results.is_dir() else []
    done = {told(record.config) for record in found if record.finished}
    return list({told(config): config for config in queue.configs() if told(config) not in done}.values())


def by_place(queues: Sequence[Norms | Rows]) -> dict[Path, list[RunConfig]]:
    """The runs to do by the folder of their records, so that those of one folder share the jobs and none is idle between."""
    found: dict[Path, list[RunConfig]] = {}
    for queue in queues:
        found.setdefault(Path(queue.results).relative_to("results"), []).extend(to_do(queue))
    return {place: configs for place, configs in found.items() if configs}


def told(config: RunConfig) -> tuple[str, int]:
    return config.identity(), config.seed


def train(suite: Suite, device: torch.device, jobs: int) -> None:
    suite.check(here=device)
    with RunDisplay([run_name(config) for config in suite.configs]) as display:
        for name, failure in suite.run(device=device, display=display, jobs=jobs).items():
            print(f"{name} failed: {failure.sentence}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=QUEUES, metavar="NAME")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/queue"))
    parser.add_argument("--packed", type=Path)
    parser.add_argument("--seconds", type=int, default=0, help="stop after so many; 0: when all is done")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--list", action="store_true", help="only say which runs there are to do")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    queues = [queue for name in arguments.names for queue in QUEUES[name]]
    if arguments.list:
        for queue in queues:
            print("\n".join(f"{queue.results}: {run_name(config)}" for config in to_do(queue)))
        return
    if arguments.seconds:
        signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C: what is done is kept
        signal.alarm(arguments.seconds)
    suites = []
    try:
        for place, configs in by_place(queues).items():
            suites.append((place, Suite(configs, arguments.out / place, Files(arguments.data))))
            train(suites[-1][1], device, arguments.jobs)
    except KeyboardInterrupt:
        print("the time is over")
    finally:
        signal.alarm(0)
    for place, suite in suites if arguments.packed else ():
        records.keep((record for record in suite.recorded_now() if record.finished), arguments.packed / place)


if __name__ == "__main__":
    main()
