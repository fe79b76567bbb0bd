"""The configuration of a run: model, data, optimizer, schedule and mixture norms, as plain values that go to JSON and back.

A field is stated once, here: its type and default, the option that sets it and how a report tells it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mixnorm_lab.config import fields, norm_names
from mixnorm_lab.config.fields import Option, setting
from mixnorm_lab.config.losses import CROSS_ENTROPY, LOSSES
from mixnorm_lab.config.metrics import ACCURACY, metric_of

OPTIMIZERS = ("rmsprop", "nesterov", "adam", "sgd", "adamw")
PER_STEP = ("one-cycle", "cosine")  # schedules whose rate changes with every step
SCHEDULES = ("exponential", "step", "constant", *PER_STEP)
DECAYED = ("all", "weights")
PRECISIONS = ("fp32", "bf16")
# What the distance of each kind of features is called. FID is the name for those of the 2015 Inception alone.
FEATURES = {"cifar-features": "CIFAR-feature Fréchet distance", "inception-2015": "FID"}
BETAS = (0.9, 0.999)
ALL_LAYERS = ("*",)
RECOMMENDED_LAYERS = ("recommended",)  # those that mixnorm.convert takes by itself
# What stands before the colon in names that are no functions of the user's: models of other packages, and data on disk.
RESERVED = ("timm", "torchvision", "transformers", "images", "dataset", "table")


@dataclass(frozen=True)
class Optimizer:
    """An optimizer and its constants.

    Args:
        name: "rmsprop" (without momentum, as the paper's framework has it), "nesterov", "adam", "sgd" (with momentum, but
            not Nesterov's) or "adamw" (whose weight decay is not part of the gradient).
        smoothing: RMSprop's α, which the paper calls its momentum.
        momentum: Nesterov's and that of "sgd".
        betas: Adam's.
        decayed: what the weight decay is of: "all", or "weights", which leaves norms and biases out.
    """

    name: str = field(
        metadata=setting(
            Option("--optimizer", "rmsprop, nesterov, adam, sgd or adamw.", choices=OPTIMIZERS),
            label="optimizer",
            text=lambda optimizer: optimizer.name + optimizer.constants,
        )
    )
    lr: float = field(
        metadata=setting(
            Option("--lr", "The initial learning rate, or the largest one of one-cycle and cosine."), label="learning rate"
        )
    )
    weight_decay: float = field(
        default=0.0,
        metadata=setting(
            Option("--weight-decay"),
            label="weight decay",
            text=lambda o: f"{o.weight_decay:g}" + (", without norms and biases" if o.decayed == "weights" else ""),
        ),
    )
    smoothing: float = 0.9
    momentum: float = field(
        default=0.9,
        metadata=setting(Option("--momentum", "That of nesterov and sgd; 0 is plain SGD.", minimum=0, maximum=0.9999)),
    )
    betas: tuple[float, float] = field(default=BETAS, metadata=setting(later=True))
    decayed: str = field(
        default="all",
        metadata=setting(
            Option("--decayed", "all, or weights: the weight decay leaves norms and biases out.", choices=DECAYED),
            later=True,
        ),
    )

    def __post_init__(self) -> None:
        _one_of("optimizer", self.name, OPTIMIZERS)
        _one_of("choice of decayed parameters", self.decayed, DECAYED)
        object.__setattr__(self, "betas", tuple(self.betas))
        _check(math.isfinite(self.lr) and self.lr > 0, "the learning rate", self.lr, "a number above 0")
        _check(
            math.isfinite(self.weight_decay) and self.weight_decay >= 0, "the weight decay", self.weight_decay, "0 or more"
        )
        _check(0 <= self.smoothing < 1, "RMSprop's smoothing", self.smoothing, "from 0 up to but not 1")
        _check(0 <= self.momentum < 1, "the momentum", self.momentum, "from 0 up to but not 1")
        inside = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        _check(inside, "Adam's betas", self.betas, "two numbers from 0 up to but not 1")

    @property
    def constants(self) -> str:
        """The constants that only this optimizer has, as a report adds them to its name."""
        return {
            "rmsprop": f", smoothing {self.smoothing:g}",
            "nesterov": f", momentum {self.momentum:g}",
            "adam": f", β₁ {self.betas[0]:g}, β₂ {self.betas[1]:g}",
            "sgd": f", momentum {self.momentum:g}",
            "adamw": f", β₁ {self.betas[0]:g}, β₂ {self.betas[1]:g}",
        }[self.name]


@dataclass(frozen=True)
class Schedule:
    """How the learning rate changes over the training.

    Args:
        name: "exponential": times ``factor`` after every ``every`` epochs; "step": times ``factor`` at each of the shares
            of the training in ``at`` (0.5 is half of the epochs); "constant"; and, changing with every step, "one-cycle":
            linearly up from 0 and linearly down to 0; "cosine": down to 0 as half a period of a cosine.
        warmup: the share of the steps in which the rate rises from 0. None is 0.3 for "one-cycle" and 0 for "cosine".
    """

    name: str = field(
        metadata=setting(
            Option("--schedule", "one-cycle, cosine or constant.", choices=(*PER_STEP, "constant")),
            label="schedule",
            text=lambda schedule: schedule.text,
        )
    )
    factor: float = 0.93
    every: int = 2
    at: tuple[float, ...] = ()
    warmup: float | None = field(
        default=None,
        metadata=setting(
            Option(
                "--warmup",
                "The share of the steps in which a one-cycle or cosine schedule rises from 0.",
                minimum=0,
                maximum=0.99,
            ),
            later=True,
        ),
    )

    def __post_init__(self) -> None:
        _one_of("schedule", self.name, SCHEDULES)
        object.__setattr__(self, "at", tuple(self.at))
        _check(math.isfinite(self.factor) and self.factor > 0, "the schedule's factor", self.factor, "a number above 0")
        _check(self.every >= 1, "the schedule's every", self.every, "at least 1 epoch")
        _check(all(0 <= share <= 1 for share in self.at), "the schedule's at", self.at, "shares of the training from 0 to 1")
        _check(self.warmup is None or 0 <= self.warmup < 1, "the schedule's warmup", self.warmup, "from 0 up to but not 1")

    @property
    def rise(self) -> float:
        """The share of the steps in which the rate rises."""
        return self.warmup if self.warmup is not None else 0.3 if self.name == "one-cycle" else 0.0

    @property
    def text(self) -> str:
        """How the learning rate changes, in the words of a report."""
        up = f"up in {100 * self.rise:g}% of the steps, " if self.rise else ""
        return {
            "constant": "constant",
            "exponential": f"× {self.factor:g} every {f'{self.every} epochs' if self.every > 1 else 'epoch'}",
            "step": f"× {self.factor:g} at {', '.join(f'{100 * share:g}%' for share in self.at)} of the training",
            "one-cycle": f"one cycle: {up}then linearly down to 0",
            "cosine": f"cosine: {up}then down to 0",
        }[self.name]

    def rate(self, lr: float, epoch: int, epochs: int) -> float:
        """The learning rate of an epoch, which counts from 0, of a training of ``epochs``; where it changes with every step,
        that in the middle of the epoch."""
        if self.name in PER_STEP:
            return lr * self._share((epoch + 0.5) / epochs)
        if self.name == "exponential":
            return lr * self.factor ** (epoch // self.every)
        if self.name == "step":
            passed = sum(epoch >= share * epochs - 1e-9 for share in self.at)  # 0.7 · 10 is a little more than 7
            return lr * self.factor**passed
        return lr

    def rates(self, lr: float, epoch: int, epochs: int, steps: int) -> list[float]:
        """The learning rate of each of the ``steps`` of an epoch, which counts from 0. That of a step is the one in its
        middle, so that none is 0."""
        if self.name not in PER_STEP:
            return [self.rate(lr, epoch, epochs)] * steps
        return [lr * self._share((epoch * steps + step + 0.5) / (epochs * steps)) for step in range(steps)]

    def _share(self, done: float) -> float:
        """The part of the largest rate where a share of the training is done, from 0 to 1."""
        if done < self.rise:
            return done / self.rise
        left = (1 - done) / (1 - self.rise)
        return left if self.name == "one-cycle" else (1 - math.cos(math.pi * left)) / 2


@dataclass(frozen=True)
class Mixture:
    """The choice of batch norms that become mixture norms, and the options of these.

    Args:
        layers: the paper's layer names ("conv3", "inc2/0") for the models of the paper, and names or globs of modules as
            :func:`mixnorm.convert` takes them ("conv3.norm", "features.*"). When the model is built, a name that
            ``models.last_norms`` knows for that model becomes module names; any other goes to ``convert`` as it is.
            "recommended" alone is all but those that ``convert`` leaves out by itself.
        options: of :class:`mixnorm.MixtureNorm2d`: num_components, em_iters, activation, ...; with "@" and layers behind its
            name, with "+" between several, an option is for these alone. "form" is that of ``convert``, "paper" by default.
    """

    layers: tuple[str, ...] = field(
        metadata=setting(
            Option(
                "--layers",
                "The batch norms to replace: the paper's layer names, globs of modules, or recommended; with commas.",
                kind=str,
                read=lambda text: tuple(layer.strip() for layer in text.split(",")),
            ),
            label="layers",
            text=lambda mixture: ", ".join(mixture.layers),
        )
    )
    options: dict[str, Any] = field(
        default_factory=dict,
        metadata=setting(
            Option(
                "--components -k",
                "K, the number of components of a mixture.",
                minimum=1,
                kind=int,
                key="num_components",
                generators=True,
            ),
            Option(
                "--em-iters",
                "EM iterations, the paper's EM iter.",
                minimum=0,
                kind=int,
                key="em_iters",
                generators=True,
            ),
            Option(
                "--option -o",
                "Any other option of MixtureNorm2d, such as inference=mixture.",
                kind=list[str],
                read=lambda texts: dict(map(assignment, texts)),
            ),
        ),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "options", dict(self.options))

    @property
    def for_convert(self) -> dict[str, Any]:
        """The options as :func:`mixnorm.convert` takes them."""
        return {"form": "paper", **self.options}


@dataclass(frozen=True)
class Gan:
    """The settings of a generator and its discriminator, which a run trains in place of a classifier.

    Args:
        updates: of each network in an epoch, which is what a line of the record stands for.
        evaluate_every: epochs between two measurements of the distance; the last epoch always has one.
        samples: images that the generator makes for one. The other side is all training images.
        features: "cifar-features", of a classifier that this package trained, or "inception-2015", whose distance is FID.
        latent: the dimensions of the noise.
        channels: of the smallest map in both networks.
    """

    updates: int = field(default=1000, metadata=setting(label="updates an epoch", text=lambda gan: f"{gan.updates:,}"))
    evaluate_every: int = field(
        default=10,
        metadata=setting(
            label="measured",
            text=lambda gan: f"every {gan.evaluate_every} epochs, of {gan.samples:,} samples",
            row_before="latent",
        ),
    )
    samples: int = 50_000
    features: str = field(
        default="cifar-features", metadata=setting(label="distance", text=lambda gan: FEATURES[gan.features])
    )
    latent: int = field(
        default=128,
        metadata=setting(label="networks", text=lambda gan: f"{gan.latent} dimensions of noise, {gan.channels} channels"),
    )
    channels: int = 512

    def __post_init__(self) -> None:
        _one_of("feature network", self.features, tuple(FEATURES))
        for name in ("updates", "evaluate_every", "samples", "latent"):
            _check(getattr(self, name) >= 1, f"the GAN's {name}", getattr(self, name), "at least 1")
        _check(self.channels >= 8 and self.channels % 8 == 0, "the GAN's channels", self.channels, "a multiple of 8")


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
        validation: share of the training images that is held out and tested on instead of the test set, to choose settings.
        gan: None is a classifier.
        norm_momentum: of the statistics of every norm, batch norm and mixture norm alike; None leaves them their own.
        average: what is evaluated has the weights of the last updates, averaged with this decay as the running statistics
            are; 0 is the last weights alone.
        label_smoothing: the share of a label that the training spreads over all classes; evaluations do not.
        train_eval: the last epoch's row tells the loss and the error of training images in evaluation as well.
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
        metadata=setting(Option("--epochs", "Passes over the training images.", minimum=1, generators=True), label="epochs")
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
            Option("--validation", "Test on this share of the training images, to choose settings.", minimum=0, maximum=0.9)
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
                "--train-eval", "At the end, evaluate on training images as well, without crops, flips and the norms' noise."
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
        _check(self.epochs >= 1, "the number of epochs", self.epochs, "at least 1")
        _check(self.batch_size >= 1, "the batch size", self.batch_size, "at least 1")
        _check(self.seed >= 0, "the seed", self.seed, "0 or more")
        _check(self.recalibrate >= 0, "the number of batches to recalibrate with", self.recalibrate, "0 or more")
        _check(0 <= self.validation < 1, "the share of validation images", self.validation, "from 0 up to but not 1")
        metric_of(self.metric)
        on_disk = self.data.partition(":")[0] in RESERVED
        if not on_disk and (self.image_size is not None or self.target is not None):
            what = "--target" if self.image_size is None else "--image-size"
            raise ValueError(f"{what} is for data on disk, a folder or a table: leave it out with {self.data}")
        if ":" not in self.loss:
            _one_of("loss", self.loss, LOSSES)
        if self.label_smoothing and (self.loss != CROSS_ENTROPY or self.step):
            raise ValueError(f"the {self.step or self.loss} spreads no labels: leave --label-smoothing out")
        if self.compile and self.step:
            raise ValueError(f"{self.step} calls the model itself: compile it there, and leave --compile out")
        whole = self.subset < 1 or self.subset == int(self.subset)
        _check(self.subset >= 0 and whole, "the subset", self.subset, "a whole number of samples, or a share below 1")
        _one_of("precision", self.precision, PRECISIONS)
        momentum = self.norm_momentum
        _check(momentum is None or 0 < momentum <= 1, "the momentum of the norms", momentum, "above 0 and at most 1")
        _check(0 <= self.average < 1, "the decay of the averaged weights", self.average, "from 0 up to but not 1")
        _check(0 <= self.label_smoothing < 1, "the label smoothing", self.label_smoothing, "from 0 up to but not 1")
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
            return norm_names.parse(self.norm).text
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


def assignment(text: str, where: str = "--option") -> tuple[str, Any]:
    """ "inference=mixture" as a name and a value; ``where`` it stands is for the sentence about one that is neither."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{where} {text} says no value: write it as name=value, such as inference=mixture")
    words: dict[str, Any] = {"none": None, "true": True, "false": False}
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, words.get(value.lower(), value)


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"there is no {what} {value!r}: choose one of {', '.join(allowed)}")


def _check(holds: bool, what: str, value: Any, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{what} is {value}, but must be {allowed}")
