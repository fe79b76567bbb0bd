"""What each of two ranks does for ``test_team.py``: all of it in one launch, because a launch costs seconds."""

import dataclasses
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import LIMIT, start_ranks
from run_helpers import DIGITS, MIXTURE, Interrupt, build, config, weights
from run_helpers import run as train_model

from mixnorm_lab.config.parts.mixture import Mixture
from mixnorm_lab.config.parts.optimizer import Optimizer
from mixnorm_lab.data import Images, Resident
from mixnorm_lab.training.not_finite import NotFinite
from mixnorm_lab.training.team import ALONE, Team

RANKS = 2
# Test images that two ranks cannot share evenly.
DATA = dataclasses.replace(DIGITS, test=Images(DIGITS.test.images[:257], DIGITS.test.labels[:257]))
BOTH_WARM = Mixture(("1", "5"), {"seeding": "warm", "num_components": 2, "backend": "reference"})
NESTEROV, RMSPROP = Optimizer("nesterov", lr=0.05), Optimizer("rmsprop", lr=0.005)
CASES = {
    name: config(epochs=2, recalibrate=2, mixture=mixture, optimizer=optimizer)
    for name, mixture, optimizer in (
        ("batch norm", None, NESTEROV),
        ("mixture norm", MIXTURE, NESTEROV),
        ("warm, rmsprop", BOTH_WARM, RMSPROP),
    )
}
INTERRUPTED, NOT_FINITE, FINISHED = "interrupted", "not finite", "finished"


class WithInfinity(Resident):
    """The second rank's images of the third step are not finite."""

    def batch(self, step):
        images, labels = super().batch(step)
        if self.share[0] == self.share[1] - 1 and step == 2:
            images[0] = torch.inf
        return images, labels


def train_case(run, folder, team=ALONE, *, source=Resident, seed=0, **options):
    """A run in fp64, where what the order of sums changes stays far below what a mistake would: its rows and weights."""
    model = build(run, seed).double()
    model[3].p = 0.0  # dropout draws other numbers on each rank
    share = team.rank, team.size
    data = source(DATA, 64, device="cpu", dtype=torch.float64, augment=True, pad=1, share=share)
    record = train_model(run, folder, model=model, source=data, team=team, **options)[0]
    return {"rows": record.epochs, "weights": weights(model)}


def interrupt_alone(folder):
    """One process begins the run that the ranks go on with."""
    try:
        train_case(CASES["mixture norm"], folder / INTERRUPTED, progress=Interrupt(step=6))
    except KeyboardInterrupt:
        return
    raise AssertionError("it was not interrupted")


def work(rank, folder):
    sys.modules["tensorboard"] = None  # as if it were not installed: its import takes as long as all the training here
    torch.set_num_threads(1)
    folder = Path(folder)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=LIMIT))
    team = Team(rank, RANKS)
    # Other weights on each rank: those of the first count, or of the checkpoint.
    found = {name: train_case(run, folder / name, team, seed=rank) for name, run in CASES.items()}
    found[INTERRUPTED] = train_case(CASES["mixture norm"], folder / INTERRUPTED, team, seed=3 + rank)
    found[FINISHED] = train_case(CASES["mixture norm"], folder / "mixture norm", team)["rows"]
    try:
        train_case(CASES["mixture norm"], folder / NOT_FINITE, team, source=WithInfinity)
    except NotFinite as error:
        found[NOT_FINITE] = str(error)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def launch(folder):
    """What each rank found; an error if one fails or waits for too long."""
    start_ranks(work, (str(folder),), RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]
