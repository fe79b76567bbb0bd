"""One of many runs, which is trained the same way in this process, in one of several, and on a cluster."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.generators import build as gan_build
from mixnorm_lab.generators.gan import GanLoop
from mixnorm_lab.storage.folders import run_folder
from mixnorm_lab.training import build
from mixnorm_lab.training.classifier import ClassifierLoop
from mixnorm_lab.training.loop import TrainingLoop
from mixnorm_lab.training.not_finite import NotFinite
from mixnorm_lab.training.progress import UPDATE_SECONDS, RunProgress
from mixnorm_lab.training.run import train
from mixnorm_lab.training.team import ALONE, Team

# Of one run: the others go on. An OSError is not among them: a full disk, or a folder in use, concerns them all.
MISTAKES = (ValueError, NotFinite)


@dataclass(frozen=True)
class Files:
    """The places of what runs need: the official files of the data set (the cache, unless given), and for generators the
    network of the features: the folder of a classifier's run, or a file of weights."""

    data: Path | None = None
    features: Path | None = None


NO_FILES = Files()


@dataclass(frozen=True)
class Failure:
    """The reason why a run failed: the sentence for its user, and the traceback for whoever looks into it."""

    sentence: str
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        return cls(" ".join(str(error).split()), "".join(traceback.format_exception(error)))


@dataclass(frozen=True)
class Place:
    """The place where runs are trained: the folder that they have theirs in, the device, and the files that they need.

    ``shared`` is whether others are trained there at the same time.
    """

    root: Path
    device: torch.device
    files: Files = NO_FILES
    shared: bool = False


def train_one(config: RunConfig, place: Place, progress: RunProgress, team: Team = ALONE) -> Failure | None:
    """Trains one run, or the rest of it; returns why it failed. An OSError is raised: the other runs would meet it, too."""
    try:
        with build.explained(config):
            folder = run_folder(place.root, config)
            try:
                begin = _prepared(config, folder, place, team)
            except BaseException:
                progress.end("failed")
                raise

            def begin_watched() -> TrainingLoop:
                loop = begin()
                loop.watch.shared = place.shared
                return loop

            train(config, folder, begin_watched, device=place.device, progress=progress, team=team)
    except MISTAKES as error:
        return Failure.of(error)
    return None


def _prepared(config: RunConfig, folder: Path, place: Place, team: Team) -> Callable[[], TrainingLoop]:
    """Makes the networks and the data of a run; the function that it returns makes the loop that trains them."""
    device, files = place.device, place.files
    if config.gan is None:
        model, source = build.prepare(config, device, files.data, team)
        return lambda: ClassifierLoop(config, model, source, device, team)
    dataset, features = gan_build.load(config, device, files.features, files.data)
    networks = gan_build.prepare(config, device, dataset, features)
    images = dataset.train.images
    return lambda: GanLoop(config, *networks, device, features=features, images=images, folder=folder)


def attempt(config: RunConfig, place: Place, send: Callable[[str, Any], None]) -> tuple[str, Failure | None]:
    """:func:`train_one` in a process that others wait for: its progress is sent, and its end is a message for them."""
    try:
        return "done", train_one(config, place, Forwarded(send))
    except OSError as error:
        return "stop", Failure.of(error)


class Forwarded:
    """RunProgress that another process shows. A step is told now and then: it may take less time than the telling."""

    def __init__(self, send: Callable[[str, Any], None]) -> None:
        self.send = send
        self.next_step = 0.0

    def start(self, name: str, epochs: int, steps: int, done: int) -> None:
        self.send("start", (name, epochs, steps, done))

    def step(self, done: int) -> None:
        now = time.monotonic()
        if now >= self.next_step:
            self.next_step = now + UPDATE_SECONDS
            self.send("step", (done,))

    def epoch(self, row: Mapping[str, Any]) -> None:
        self.send("epoch", (dict(row),))

    def end(self, reason: str) -> None:
        self.send("end", (reason,))
