"""Records of runs that never ran."""

from __future__ import annotations

import dataclasses

import numpy as np

from mixnorm_lab.config import catalog
from mixnorm_lab.config.parts.mixture import Mixture
from mixnorm_lab.config.parts.optimizer import Optimizer, Schedule
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.storage.records import Record

ENVIRONMENT = {"mixnorm": "0.1.0", "torch": "2.8.0", "python": "3.12.1", "device": "cpu", "gpu": None, "commit": "abc1234"}
MIXTURE = Mixture(("conv3",), {"num_components": 3, "em_iters": 2})
BN_ERRORS, MN_ERRORS = [0.5, 0.4, 0.3, 0.2], [0.4, 0.25, 0.2, 0.15]


def config(name="run", epochs=20, seed=0, mixture=None, **changes):
    optimizer = changes.pop("optimizer", Optimizer("rmsprop", lr=0.01, weight_decay=2e-5))
    schedule = changes.pop("schedule", Schedule("exponential"))
    values = {"model": "cifar-cnn", "data": "cifar100", "batch_size": 256, **changes}
    return RunConfig(name=name, epochs=epochs, seed=seed, mixture=mixture, optimizer=optimizer, schedule=schedule, **values)


def epoch(number, test_error=0.5, **changes):
    values = {
        "epoch": number,
        "steps": 195 * number,
        "train_loss": 1.0,
        "train_error": 0.4,
        "test_loss": 1.5,
        "test_error": test_error,
        "recalibrated_loss": None,
        "recalibrated_error": None,
        "learning_rate": 0.01,
        "train_seconds": 2.0 * number,
        "seconds": 2.5 * number,
        "components": None,
        "mixtures": None,
    }
    return {**values, **changes}


def record(run, errors, end="finished", message=None, **changes):
    """A run with these test errors; ``changes`` are functions of the epoch's number."""
    epochs = [
        epoch(number, error, **{name: value(number) for name, value in changes.items()})
        for number, error in enumerate(errors, 1)
    ]
    ends = [{"kind": "end", "reason": end, "message": message, "seconds": 2.5 * len(epochs)}] if end else []
    return Record(run, dict(ENVIRONMENT), epochs, ends, running=not ends)


def curve(epochs, start, final, rate, noise, seed):
    """Test errors that fall as they do: fast, then slowly, and less and less noisily."""
    share = np.arange(1, epochs + 1) / epochs
    generator = np.random.default_rng(seed)
    return final + (start - final) * np.exp(-rate * share) + noise * (1.1 - share) * generator.normal(size=epochs)


def pair(bn=BN_ERRORS, mn=MN_ERRORS, seeds=1, **changes):
    """Batch norm and mixture norm, the same for all seeds."""
    made = []
    for seed in range(seeds):
        made.append(record(config("bn", epochs=len(bn), seed=seed), bn, **changes))
        made.append(record(config("mn", epochs=len(mn), seed=seed, mixture=MIXTURE), mn, **changes))
    return made


def catalog_record(name, errors=None, **changes):
    """A run of the catalog that came out as no run does."""
    run = dataclasses.replace(catalog.get(name).config, **changes)
    return record(run, curve(run.epochs, 0.9, 0.35, 8, 0.0, 0) if errors is None else errors)
