"""What each of two ranks does for ``test_team.py``: all of it in one launch, because a launch costs seconds."""

import dataclasses
import traceback
from datetime import timedelta
from pathlib import Path

import run_helpers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from run_helpers import DIGITS, build, config, weights

from mixnorm.data import Images, Resident
from mixnorm.experiments.config import Optimizer
from mixnorm.experiments.progress import Silent
from mixnorm.experiments.team import ALONE, Team
from mixnorm.experiments.train import train

RANKS = 2
LIMIT = 60  # seconds that a rank waits for another, and a multiple of what all take


@dataclasses.dataclass(frozen=True)
class Case:
    """A run in fp64, where what the order of sums changes stays far below what any mistake would."""

    run: object
    dataset: object = DIGITS
    dropout: float = 0.0


def run_config(**changes):
    return config(epochs=3, recalibrate=2, optimizer=Optimizer("nesterov", lr=0.05), **changes)


ODD = dataclasses.replace(DIGITS, test=Images(DIGITS.test.images[:257], DIGITS.test.labels[:257]))
CASES = {
    "batch norm": Case(run_config(mixture=None), ODD),
    "mixture norm": Case(run_config(), ODD),
    "rmsprop": Case(dataclasses.replace(run_config(), optimizer=Optimizer("rmsprop", lr=0.005))),
    "warm, pooled": Case(
        run_config(
            mixture=run_helpers.Mixture(("1", "5"), {"seeding": "warm", "inference": "pooled", "backend": "reference"})
        )
    ),
}


def train_case(case, folder, team=ALONE, **options):
    """A run of a case, by a team or one process: its record, and the weights at the end."""
    model = build(case.run).double()
    model[3].p = case.dropout
    source = Resident(
        case.dataset, 64, device="cpu", dtype=torch.float64, augment=True, pad=1, share=(team.rank, team.size)
    )  # fmt: skip
    record = train(case.run, folder, model=model, source=source, device="cpu", team=team, **options)
    return record, weights(model)
