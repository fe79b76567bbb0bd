"""The trainer: from a configuration and a loop to a record, through interruptions of any kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.storage import checkpoint, environment, records
from mixnorm_lab.storage.checkpoint import CheckpointError
from mixnorm_lab.storage.lock import locked
from mixnorm_lab.storage.records import Record
from mixnorm_lab.storage.signals import stopped_by_sigterm
from mixnorm_lab.storage.tensorboard import Events
from mixnorm_lab.training.loop import TrainingLoop
from mixnorm_lab.training.not_finite import NotFinite
from mixnorm_lab.training.progress import RunProgress, Silent
from mixnorm_lab.training.team import ALONE, Team

CHECKPOINT_SECONDS = 5.0


def train(
    config: RunConfig,
    folder: Path,
    begin: Callable[[], TrainingLoop],
    *,
    device: torch.device,
    progress: RunProgress | None = None,
    resume: bool = True,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    team: Team = ALONE,
) -> Record:
    """Trains as ``config`` says, and leaves a record, checkpoints and TensorBoard events in ``folder``.

    A folder with a part of this run goes on from its last checkpoint, with the weights that are there; on a CPU the end is
    the same to the bit as without the interruption. The record of a finished run is returned at once; nothing is trained
    then.

    Args:
        begin: makes the loop, of a classifier or of a generator, if there is something left to train. Its networks are
            trained in place.
        device: that the loop is on.
        resume: False refuses a folder that holds a run.
        checkpoint_seconds: an epoch is followed by a checkpoint if the last one is this old. A kill costs no more than
            that and an epoch, Ctrl-C the epoch alone.
        team: the processes that train it together, which all call this with a loop whose source gives each its share of the
            batches. The first alone reads and writes the folder; weights are those that it has.

    Raises:
        NotFinite: the loss is not a finite number; says in which layer and at which step that began.
        ValueError: the folder is of another configuration, or a file in it is damaged.
        OSError: the folder is in use, or cannot be written.
    """
    folder = Path(folder)
    progress = Silent() if progress is None else progress
    if not team.is_first:
        with team.explained():
            return _follow(config, begin, device, team)
    with locked(folder), team.explained():
        record = _existing(config, folder, resume)
        reason = "failed"
        try:
            if record is not None and record.finished:
                team.from_first({"epochs": record.epochs, "state": None})
                show_finished(record, progress)
            else:
                with _on(device), stopped_by_sigterm():
                    record = _run(begin(), folder, record, progress, checkpoint_seconds)
            reason = "finished"
        except NotFinite:
            reason = "not finite"
            raise
        except (KeyboardInterrupt, SystemExit):
            reason = "interrupted"
            raise
        finally:
            progress.end(reason)
    return record


def show_finished(record: Record, progress: RunProgress) -> None:
    """Tells of a run that is done already; its end is left to the caller."""
    config, last = record.config, record.epochs[-1]
    progress.start(config.name, config.epochs, last["steps"] // last["epoch"], done=config.epochs)
    progress.epoch(last | {"metric": config.metric})


def _existing(config: RunConfig, folder: Path, resume: bool) -> Record | None:
    """The record of this run as far as it came; an error where the folder holds another run."""
    path = folder / records.NAME
    if not path.exists() or b"\n" not in path.read_bytes():  # or it was killed while its first line was written
        return None
    record = records.read(path)
    if record.config.identity() != config.identity():
        differences = "; ".join(record.config.differences(config))
        raise ValueError(
            f"{folder} holds a run of another configuration ({differences}): choose another folder, or the settings of that "
            "run to go on with it"
        )
    if not resume:
        raise ValueError(f"{folder} already holds a run: choose another folder, or resume it")
    return record


def _follow(config: RunConfig, begin: Callable[[], TrainingLoop], device: torch.device, team: Team) -> Record:
    """The training of all ranks but the first: the same, without a folder. Its record is in no file."""
    told = team.from_first()
    record = Record(config, environment.of_run(device), told["epochs"])
    if told["state"] is not None:
        with _on(device), stopped_by_sigterm():
            training = begin()
            training.restore(told["state"])
            while training.epoch < config.epochs:
                record.epochs.append(training.run_epoch(Silent()))
    return record


def _run(
    training: TrainingLoop, folder: Path, record: Record | None, progress: RunProgress, checkpoint_seconds: float
) -> Record:
    """The first rank's training: all epochs that are left, each in the record, and checkpoints; returns the record."""
    config = training.config

    def save(state: dict[str, Any]) -> tuple[int, float]:
        checkpoint.write(folder, {"identity": config.identity(), "config": config.to_json(), **state})
        return state["epoch"], time.monotonic()

    state = None if record is None else _checkpoint_for(config, folder)
    if state is None:
        # The initial weights; before the record's first line, so that no older checkpoint is taken for the record's.
        saved_epoch, saved_at = save(training.state())
        checkpoint.forget_previous(folder)
    else:
        _restore(training, state, folder)
        saved_epoch, saved_at = training.epoch, time.monotonic()
    if training.team.size > 1:
        earlier = [] if record is None else [row for row in record.epochs if row["epoch"] <= training.epoch]
        training.team.from_first({"epochs": earlier, "state": training.state()})
    progress.start(config.name, config.epochs, training.step.steps, done=training.epoch)
    with ExitStack() as stack:
        writer = stack.enter_context(records.Writer(folder / records.NAME, record))
        if record is None:
            writer.run(config, _environment(training))
        else:
            writer.resume(training.epoch, _environment(training))
        try:
            events = stack.enter_context(Events(folder, training.epoch))
            while training.epoch < config.epochs:
                row = training.run_epoch(progress)
                writer.epoch(row)  # before the checkpoint: what comes after it is measured again
                events.epoch(row)
                progress.epoch(row | {"metric": config.metric})
                if time.monotonic() - saved_at >= checkpoint_seconds or training.epoch == config.epochs:
                    saved_epoch, saved_at = save(training.state())
        except NotFinite as error:
            writer.end("not finite", training.seconds, str(error))
            raise
        except (KeyboardInterrupt, SystemExit, RuntimeError) as error:
            if training.team.size > 1 or not isinstance(error, RuntimeError):  # that one is of a rank that is no more
                if training.latest is not None and training.latest["epoch"] > saved_epoch:
                    save(training.latest)
                writer.end("interrupted", training.seconds)
            raise
        writer.end("finished", training.seconds)
    checkpoint.forget_previous(folder)
    assert writer.record is not None
    return writer.record


def _environment(training: TrainingLoop) -> dict[str, Any]:
    team = training.team
    return environment.of_run(training.device) | ({"processes": team.size} if team.size > 1 else {})


def _checkpoint_for(config: RunConfig, folder: Path) -> dict[str, Any] | None:
    state = checkpoint.read(folder)
    if state is not None and state["identity"] != config.identity():
        raise CheckpointError(
            f"the checkpoint in {folder} is of another configuration than the record beside it: delete it to start this run "
            "again from the beginning"
        )
    return state


def _restore(training: TrainingLoop, state: dict[str, Any], folder: Path) -> None:
    try:
        training.restore(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"the checkpoint in {folder} does not fit the model, which must be the one that the run began with: choose "
            f"another folder to train this one ({reason})"
        ) from error


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Makes a GPU the current one, and lets cuDNN time its algorithms for the shapes at hand, which do not change here."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with torch.cuda.device(device):
            yield
    finally:
        torch.backends.cudnn.benchmark = before
