"""``mixnorm_lab.compare``: a comparison of norms from Python, for models, data, losses and metrics of any project."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mixnorm_lab.comparison import plan, run
from mixnorm_lab.comparison.run import Compared, Machine
from mixnorm_lab.config.run_config import OPTIONS
from mixnorm_lab.launch.one_run import Files
from mixnorm_lab.own import functions

Function = Callable[..., Any]


def compare(
    build: str | Function,
    loaders: str | Function,
    *,
    loss: str | Function | None = None,
    metric: str | tuple[Function, str] | None = None,
    step: str | Function | None = None,
    norms: str | Sequence[str] | None = None,
    recipe: str | None = None,
    seeds: int = 5,
    epochs: int | None = None,
    layers: str | Sequence[str] | None = None,
    out: str | Path | None = None,
    device: str | torch.device = "auto",
    jobs: int = 1,
    show: bool = True,
    mixture: Mapping[str, Any] | None = None,
    **options: Any,
) -> Compared:
    """Trains a model with batch norm and with mixture norm, several seeds each, and reports which is better.

    What is done is kept in a folder: the same call goes on after an interruption, and trains nothing twice. ``mixnorm
    compare`` is this function as a command.

    Args:
        build: returns a new model with batch norms; or its name, such as "my_module:build" or "resnet-18".
        loaders: returns two loaders, for training and for testing, whose batches are pairs (inputs, labels) or dictionaries
            with labels; or its name, or that of a data set such as "cifar10".
        loss: a function (output, labels), or "cross-entropy", "mean squared error", "mean absolute error" or "binary
            cross-entropy"; by default what suits the labels of the first batch.
        metric: "accuracy", "mean squared error", "mean IoU" or "loss"; or a pair of a function (output, labels) that returns
            a number, or an object with ``reset``, ``update`` and ``compute``, and "higher" or "lower", which says what is
            better. By default what suits the labels.
        step: a function (model, batch) that returns the loss, for batches or models that are like no others.
        norms: those to compare, such as ["batch", "mixture", "ghost-32"]; by default batch norm and mixture norm.
        recipe: how to train, by name; options change it.
        seeds: runs of each norm.
        layers: the batch norms that are replaced, as globs of module names; by default all.
        out: the folder; by default one below runs/ for these settings.
        device: "auto" is a GPU where there is one.
        jobs: how many runs to train at once. Their processes import ``build`` and the other functions by name.
        show: whether to show the progress.
        mixture: further options of mixture norm, such as ``{"inference": "mixture"}``.
        **options: those of the command by their names, such as ``components=5``, ``lr=0.01``, ``optimizer="adamw"`` or
            ``validation=0.1``.

    Example:
        >>> outcome = mixnorm_lab.compare(build, loaders, seeds=3, epochs=10)
        >>> print(outcome)
    """
    given = {name: value for name, value in options.items() if value is not None}
    unknown = [name for name in given if name not in OPTIONS or name in ("model", "option")]
    if unknown:
        known = ", ".join(name for name in OPTIONS if name not in ("model", "option", "layers", "epochs"))
        raise TypeError(f"compare() has no option {unknown[0]!r}: choose from {known}")
    if epochs is not None:
        given["epochs"] = epochs
    if layers is not None:
        given["layers"] = layers if isinstance(layers, str) else ",".join(layers)
    if mixture:
        given["option"] = [f"{name}={value}" for name, value in mixture.items()]
    if seeds < 1:
        raise ValueError(f"seeds={seeds} trains nothing: use at least 1")
    given["model"] = functions.name_of(build, "build")
    own = plan.Own(
        loss=None if loss is None else functions.name_of(loss, "loss"),
        metric=metric if metric is None or isinstance(metric, str) else _metric_name(metric),
        step=None if step is None else functions.name_of(step, "step"),
    )
    where = _device(device)
    planned = plan.comparison(
        functions.name_of(loaders, "loaders"), given, where, own=own, recipe=recipe,
        norms=norms if norms is None or isinstance(norms, str) else ",".join(norms),
        seeds=seeds, out=None if out is None else Path(out),
    )  # fmt: skip

    def say(sentence: str) -> None:
        if show:
            print(sentence, file=sys.stderr)

    for note in planned.notes:
        say(note)
    with Path(os.devnull).open("w") as nowhere:
        compared = run.run(
            planned.configs, planned.root, Machine(where, where, jobs), Files(planned.files), say=say, title=planned.title,
            inside=True, file=None if show else nowhere,
        )  # fmt: skip
    for name, failure in compared.failed.items():
        say(f"{name}: {failure.sentence}")
    if compared.outcome is None and compared.failed:
        raise ValueError(next(iter(compared.failed.values())).sentence)
    return compared


def _metric_name(metric: tuple[Function, str]) -> str:
    function, better = metric
    if better not in ("higher", "lower"):
        raise ValueError(f"a metric is better {better!r}: say 'higher' or 'lower' behind its function")
    return f"{functions.name_of(function, 'metric')}:{better}"


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)
