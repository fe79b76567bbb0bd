"""The configuration of a run: model, data, optimizer, schedule and mixture norms, as plain values that go to JSON and back.

A field is stated once, here: its type and default, the option that sets it and how a report tells it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mixnorm_lab.config import fields, norm_names
from mixnorm_lab.config.fields import Option, setting
from mixnorm_lab.config.losses import CROSS_ENTROPY, LOSSES
from mixnorm_lab.config.metrics import ACCURACY, metric_of
from mixnorm_lab.config.parts.checks import check, one_of
from mixnorm_lab.config.parts.gan import Gan
from mixnorm_lab.config.parts.mixture import ALL_LAYERS, Mixture
from mixnorm_lab.config.parts.optimizer import Optimizer, Schedule

PRECISIONS = ("fp32", "bf16")
# What stands before the colon in names that are no functions of the user's: models of other packages, and data on disk.
RESERVED = ("timm", "torchvision", "transformers", "images", "dataset", "table")


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Args:
        name: what the run is called in records and reports; all else decides what it computes.
        mixture: None is no mixture norm.
        norm: the name of a norm in place of batch norm, such as "ghost-32" (``config.norm_names``); None is batch norm, or
            mixture norm where ``mixture`` says.
        norm_layers: the batch norms that it replaces, as in :class:`Mixture`.
        augment: crops and flips; None is what suits the data.
        recalibrate: batches that all statistics are refilled from before each evaluation, which is then done both ways.
        validation: share of the training data that is held out and tested on instead of the test set, to choose settings.
        gan: None is a classifier.
        norm_momentum: of the statistics of every norm, batch norm and mixture norm alike; None leaves them their own.
        average: what is evaluated has the weights of the last updates, averaged with this decay as the running statistics
            are; 0 is the last weights alone.
        label_smoothing: the share of a label that the training spreads over all classes; evaluations do not.
        train_eval: the last epoch's row tells the loss and the error of training data in evaluation as well.
        metric: what it is judged by, as ``config.metrics.metric_of`` takes it.
        image_size: the height and width of the images of a folder; None is what suits them.
        target: the column of a table, or of a saved data set, that is predicted.
        contents: a digest of data on disk, which differs where the data does.
        metric_function: the user's function that computes it, such as "my_module:dice".
        loss: one of ``config.losses.LOSSES``, or a function of the user's, of the output and the labels.
        step: a function of the user's, of the model and a batch, that returns the loss and takes its place.
        subset: so many training samples, or below 1 that share of them, and at most as many test samples; 0 is all.
        sources: the files of the user's functions, each with a digest of what it holds, with ", " between them.
        compile: the training step's passes go through ``torch.compile``; evaluations do not.
    """

    name: str
    model: str = field(
        metadata=setting(
            Option(
                "--model",
                "cifar-cnn, resnet-18, wide-resnet-16-4, densenet-40-12, inception-v3, digits-cnn, mlp, timm:NAME, "
                "torchvision:NAME, transformers:CLASS or my_module:build.",
            ),
            label="model",
        )
    )
    data: str = field(
        metadata=setting(
            label="data",
            text=lambda run: run.data + (f", {100 * run.validation:g}% held out to test on" if run.validation else ""),
        )
    )
    epochs: int = field(
        metadata=setting(Option("--epochs", "Passes over the training data.", minimum=1, generators=True), label="epochs")
    )
    batch_size: int = field(
        metadata=setting(
            Option("--batch-size", minimum=1),
            label="batch size",
            text=lambda run: "that of the loaders" if is_own(run.data) else str(run.batch_size),
        )
    )
    optimizer: Optimizer
    schedule: Schedule
    mixture: Mixture | None = field(
        default=None,
        metadata=setting(
            label="norm",
            text=lambda run: run.norm_text,
            option_before="epochs",
            row_before="norm_momentum",
        ),
    )
    seed: int = 0
    precision: Literal["fp32", "bf16"] = field(
        default="fp32",
        metadata=setting(
            Option("--precision", "fp32 or bf16 (autocast).", choices=PRECISIONS, generators=True), label="precision"
        ),
    )
    channels_last: bool = field(
        default=False,
        metadata=setting(label="memory format", text=lambda run: "channels_last" if run.channels_last else "contiguous"),
    )
    augment: bool | None = field(
        default=None,
        metadata=setting(
            label="crops and flips",
            text=lambda run: {None: "as suits the data", True: "yes", False: "no"}[run.augment],
        ),
    )
    recalibrate: int = field(
        default=0,
        metadata=setting(
            Option(
                "--recalibrate",
                "Evaluate a second time with statistics refilled from N training batches.",
                minimum=0,
                generators=True,
            ),
            label="refilled from",
            text=lambda run: f"{run.recalibrate} batches" if run.recalibrate else "never",
            option_before="precision",
        ),
    )
    validation: float = field(
        default=0.0,
        metadata=setting(
            Option("--validation", "Test on this share of the training data, to choose settings.", minimum=0, maximum=0.9)
        ),
    )
    gan: Gan | None = field(default=None, metadata=setting(later=True))
    norm_momentum: float | None = field(
        default=None,
        metadata=setting(
            Option("--norm-momentum", "The momentum of every norm's running statistics; 1 keeps the last batch alone."),
            label="momentum of the norms",
            later=True,
        ),
    )
    average: float = field(
        default=0.0,
        metadata=setting(
            Option(
                "--average",
                "Test weights averaged over the last updates with this decay; 0.9 suits the norms' statistics.",
                minimum=0,
                maximum=0.9999,
                generators=True,
            ),
            label="evaluated",
            text=lambda run: f"weights averaged with a decay of {run.average:g}" if run.average else "the last weights",
            later=True,
            row_before="channels_last",
        ),
    )
    compile: bool = field(
        default=False,
        metadata=setting(
            Option(
                "--compile", "Train with torch.compile, which compiles once a run and then takes fewer operations a step."
            ),
            label="compiled",
            text=lambda run: "yes" if run.compile else "no",
            later=True,
            row_before="channels_last",
        ),
    )
    label_smoothing: float = field(
        default=0.0,
        metadata=setting(
            Option("--label-smoothing", "Spread this share of a label over all classes.", minimum=0, maximum=0.99),
            label="label smoothing",
            text=lambda run: f"{run.label_smoothing:g}" if run.label_smoothing else "",
            later=True,
            row_before="precision",
        ),
    )

    train_eval: bool = field(
        default=False,
        metadata=setting(
            Option(
                "--train-eval", "At the end, evaluate on training data as well, without crops, flips and the norms' noise."
            ),
            later=True,
        ),
    )
    metric: str = field(
        default=ACCURACY.name,
        metadata=setting(
            label="judged by",
            text=lambda run: "" if run.metric == ACCURACY.name else metric_of(run.metric).name,
            later=True,
        ),
    )
    image_size: int | None = field(
        default=None,
        metadata=setting(
            Option(
                "--image-size", "For a folder of images: their height and width; by default, what suits them.", minimum=4
            ),
            label="image size",
            later=True,
        ),
    )
    target: str | None = field(
        default=None,
        metadata=setting(
            Option("--target", "For a table: the column to predict.", kind=str),
            label="target",
            later=True,
        ),
    )
    contents: str = field(default="", metadata=setting(later=True))
    metric_function: str = field(default="", metadata=setting(later=True))
    loss: str = field(
        default=CROSS_ENTROPY,
        metadata=setting(
            label="loss", text=lambda run: "" if run.loss == CROSS_ENTROPY or run.step else run.loss, later=True
        ),
    )
    step: str = field(default="", metadata=setting(label="step", text=lambda run: run.step, later=True))
    subset: float = field(
        default=0.0,
        metadata=setting(
            Option(
                "--subset",
                "For a quick look: train on so many samples, or on this share of them, and test on at most as many.",
                minimum=0,
            ),
            label="subset",
            text=lambda run: run.subset_text,
            later=True,
            row_before="epochs",
        ),
    )
    sources: str = field(default="", metadata=setting(later=True))
    norm: str | None = field(default=None, metadata=setting(later=True))
    norm_layers: tuple[str, ...] = field(
        default=ALL_LAYERS,
        metadata=setting(
            label="replaced",
            text=lambda run: "" if run.norm_layers == ALL_LAYERS else ", ".join(run.norm_layers),
            later=True,
        ),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm_layers", tuple(self.norm_layers))
        if self.norm is not None:
            norm_names.parse(self.norm)
            if self.mixture is not None or self.gan is not None:
                other = "mixture norms" if self.gan is None else "a generator"
                raise ValueError(f"{self.name} has {other}, where {self.norm} has no place: leave one of the two out")
        check(self.epochs >= 1, "the number of epochs", self.epochs, "at least 1")
        check(self.batch_size >= 1, "the batch size", self.batch_size, "at least 1")
        check(self.seed >= 0, "the seed", self.seed, "0 or more")
        check(self.recalibrate >= 0, "the number of batches to recalibrate with", self.recalibrate, "0 or more")
        check(0 <= self.validation < 1, "the share of validation data", self.validation, "from 0 up to but not 1")
        metric_of(self.metric)
        on_disk = self.data.partition(":")[0] in RESERVED
        if not on_disk and (self.image_size is not None or self.target is not None):
            what = "--target" if self.image_size is None else "--image-size"
            raise ValueError(f"{what} is for data on disk, a folder or a table: leave it out with {self.data}")
        if ":" not in self.loss:
            one_of("loss", self.loss, LOSSES)
        if self.label_smoothing and (self.loss != CROSS_ENTROPY or self.step):
            raise ValueError(f"the {self.step or self.loss} spreads no labels: leave --label-smoothing out")
        if self.compile and self.step:
            raise ValueError(f"{self.step} calls the model itself: compile it there, and leave --compile out")
        whole = self.subset < 1 or self.subset == int(self.subset)
        check(self.subset >= 0 and whole, "the subset", self.subset, "a whole number of samples, or a share below 1")
        one_of("precision", self.precision, PRECISIONS)
        momentum = self.norm_momentum
        check(momentum is None or 0 < momentum <= 1, "the momentum of the norms", momentum, "above 0 and at most 1")
        check(0 <= self.average < 1, "the decay of the averaged weights", self.average, "from 0 up to but not 1")
        check(0 <= self.label_smoothing < 1, "the label smoothing", self.label_smoothing, "from 0 up to but not 1")
        if self.label_smoothing and self.gan is not None:
            raise ValueError(f"{self.name} trains a generator, which has no labels: leave --label-smoothing out")
        if self.train_eval and (self.gan is not None or is_own(self.data)):
            why = "trains a generator" if self.gan is not None else "has loaders of its own, which may crop and flip"
            raise ValueError(f"{self.name} {why}: leave --train-eval out")
        if self.compile and self.gan is not None:  # two losses go back through one pass, which compiled code frees
            raise ValueError(f"{self.name} trains a generator, which is not compiled: leave --compile out")

    @property
    def subset_text(self) -> str:
        """How much of the data it has, in the words of a report."""
        if not self.subset:
            return ""
        if self.subset < 1:
            return f"{100 * self.subset:g}% of the training and of the test data"
        return f"{self.subset:,.0f} samples to train on, and at most as many to test on"

    @property
    def own_functions(self) -> list[str]:
        """The names of the user's functions that it runs."""
        names = (self.model, self.data, self.step or self.loss, self.step, self.metric_function)
        return list(dict.fromkeys(name for name in names if is_own(name)))

    @property
    def norm_text(self) -> str:
        """Which norm it has, in the words of a report."""
        if self.norm is not None:
            return norm_names.parse(self.norm).text(samples_of(self.data))
        return "batch norm" if self.mixture is None else "mixture norm"

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(fields.to_dict(self)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunConfig:
        return fields.from_dict(cls, values)

    def with_options(self, given: Mapping[str, Any]) -> RunConfig:
        """This configuration with the values of options, by their names in ``OPTIONS``."""
        config = self
        for name, value in given.items():
            config = fields.with_value(config, OPTIONS[name], value)
        return config

    def identity(self) -> str:
        """A digest that is equal for two runs that compute the same, whatever they are called."""
        text = json.dumps(_comparable(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def differences(self, other: RunConfig) -> list[str]:
        """The fields, such as "optimizer.lr: 0.01, not 0.05", that differ; the values of ``other`` stand second."""
        ours, theirs = _comparable(self), _comparable(other)
        missing = object()
        differing = [k for k in {**ours, **theirs} if ours.get(k, missing) != theirs.get(k, missing)]
        return [f"{k}: {_text(ours.get(k))}, not {_text(theirs.get(k))}" for k in differing]


OPTIONS = {option.name: option for option in fields.options(RunConfig)}  # by their names, such as "em_iters"


def is_own(name: str) -> bool:
    """Whether a model or data set is the user's: "my_module:function", and not what a reserved word begins."""
    first, colon, _ = name.partition(":")
    return bool(colon) and first not in RESERVED


def samples_of(data: str) -> str:
    """What the data set of a name consists of: "images", "rows" of a table, or "samples" where the name does not say."""
    kind, colon, _ = data.partition(":")
    return {"table": "rows", "images": "images"}.get(kind, "samples") if colon else "images"


def _comparable(config: RunConfig) -> dict[str, Any]:
    """Everything but the name, flat: "optimizer.lr" → 0.01. Numbers are floats, so that 1 and 1.0 are equal in JSON, too."""

    def flat(value: Any, name: str) -> dict[str, Any]:
        if isinstance(value, dict) and value:
            parts = [flat(inner, f"{name}.{key}" if name else key) for key, inner in value.items()]
            return {key: inner for part in parts for key, inner in part.items()}
        return {name: float(value) if isinstance(value, int) and not isinstance(value, bool) else value}

    return flat({key: value for key, value in config.to_json().items() if key != "name"}, "")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None or value == {} else json.dumps(value).strip('"')
