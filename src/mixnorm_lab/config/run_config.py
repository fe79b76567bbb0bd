"""What a run is: model, data, optimizer, schedule and mixture norms, as plain values that go to JSON and back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OPTIMIZERS = ("rmsprop", "nesterov", "adam")
SCHEDULES = ("exponential", "step", "constant")
PRECISIONS = ("fp32", "bf16")
# What the distance of each kind of features is called. FID is the name for those of the 2015 Inception alone.
FEATURES = {"cifar-features": "CIFAR-feature Fréchet distance", "inception-2015": "FID"}
BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class Optimizer:
    """An optimizer and its constants.

    Args:
        name: "rmsprop" (without momentum, as the paper's framework has it), "nesterov" or "adam".
        smoothing: RMSprop's α, which the paper calls its momentum.
        momentum: Nesterov's.
        betas: Adam's.
    """

    name: str
    lr: float
    weight_decay: float = 0.0
    smoothing: float = 0.9
    momentum: float = 0.9
    betas: tuple[float, float] = BETAS

    def __post_init__(self) -> None:
        _one_of("optimizer", self.name, OPTIMIZERS)
        object.__setattr__(self, "betas", tuple(self.betas))
        _check(math.isfinite(self.lr) and self.lr > 0, "the learning rate", self.lr, "a number above 0")
        _check(
            math.isfinite(self.weight_decay) and self.weight_decay >= 0, "the weight decay", self.weight_decay, "0 or more"
        )
        _check(0 <= self.smoothing < 1, "RMSprop's smoothing", self.smoothing, "from 0 up to but not 1")
        _check(0 <= self.momentum < 1, "the momentum", self.momentum, "from 0 up to but not 1")
        inside = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        _check(inside, "Adam's betas", self.betas, "two numbers from 0 up to but not 1")


@dataclass(frozen=True)
class Schedule:
    """How the learning rate falls over the epochs.

    Args:
        name: "exponential": times ``factor`` after every ``every`` epochs; "step": times ``factor`` at each of the shares
            of the training in ``at`` (0.5 is half of the epochs); "constant".
    """

    name: str
    factor: float = 0.93
    every: int = 2
    at: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _one_of("schedule", self.name, SCHEDULES)
        object.__setattr__(self, "at", tuple(self.at))
        _check(math.isfinite(self.factor) and self.factor > 0, "the schedule's factor", self.factor, "a number above 0")
        _check(self.every >= 1, "the schedule's every", self.every, "at least 1 epoch")
        _check(all(0 <= share <= 1 for share in self.at), "the schedule's at", self.at, "shares of the training from 0 to 1")

    def rate(self, lr: float, epoch: int, epochs: int) -> float:
        """The learning rate of an epoch, which counts from 0, of a training of ``epochs``."""
        if self.name == "exponential":
            return lr * self.factor ** (epoch // self.every)
        if self.name == "step":
            passed = sum(epoch >= share * epochs - 1e-9 for share in self.at)  # 0.7 · 10 is a little more than 7
            return lr * self.factor**passed
        return lr


@dataclass(frozen=True)
class Mixture:
    """Which batch norms become mixture norms, and with which options.

    Args:
        layers: the paper's layer names ("conv3", "inc2/0") for the models of the paper, and names or globs of modules as
            :func:`mixnorm.convert` takes them ("conv3.norm", "features.*"). When the model is built, a name that
            ``models.last_norms`` knows for that model becomes module names; any other goes to ``convert`` as it is.
        options: of :class:`mixnorm.MixtureNorm2d`: num_components, em_iters, activation, ...
    """

    layers: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "options", dict(self.options))


@dataclass(frozen=True)
class Gan:
    """What a run trains where it trains a generator against a discriminator, in place of a classifier.

    Args:
        updates: of each network in an epoch, which is what a line of the record stands for.
        evaluate_every: epochs between two measurements of the distance; the last epoch always has one.
        samples: images that the generator makes for one. The other side is all training images.
        features: "cifar-features", of a classifier that this package trained, or "inception-2015", whose distance is FID.
        latent: the dimensions of the noise.
        channels: of the smallest map in both networks.
    """

    updates: int = 1000
    evaluate_every: int = 10
    samples: int = 50_000
    features: str = "cifar-features"
    latent: int = 128
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
        mixture: None is batch norm everywhere.
        augment: crops and flips; None is what suits the data.
        recalibrate: batches that all statistics are refilled from before each evaluation, which is then done both ways.
        validation: share of the training images that is held out and tested on instead of the test set, to choose settings.
        gan: None is a classifier.
        norm_momentum: of the statistics of every norm, batch norm and mixture norm alike; None leaves them their own.
        average: what is evaluated has the weights of the last updates, averaged with this decay as the running statistics
            are; 0 is the last weights alone.
        compile: the training step's passes go through ``torch.compile``; evaluations do not.
    """

    name: str
    model: str
    data: str
    epochs: int
    batch_size: int
    optimizer: Optimizer
    schedule: Schedule
    mixture: Mixture | None = None
    seed: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    channels_last: bool = False
    augment: bool | None = None
    recalibrate: int = 0
    validation: float = 0.0
    gan: Gan | None = None
    norm_momentum: float | None = None
    average: float = 0.0
    compile: bool = False

    def __post_init__(self) -> None:
        _check(self.epochs >= 1, "the number of epochs", self.epochs, "at least 1")
        _check(self.batch_size >= 1, "the batch size", self.batch_size, "at least 1")
        _check(self.seed >= 0, "the seed", self.seed, "0 or more")
        _check(self.recalibrate >= 0, "the number of batches to recalibrate with", self.recalibrate, "0 or more")
        _check(0 <= self.validation < 1, "the share of validation images", self.validation, "from 0 up to but not 1")
        _one_of("precision", self.precision, PRECISIONS)
        momentum = self.norm_momentum
        _check(momentum is None or 0 < momentum <= 1, "the momentum of the norms", momentum, "above 0 and at most 1")
        _check(0 <= self.average < 1, "the decay of the averaged weights", self.average, "from 0 up to but not 1")
        if self.compile and self.gan is not None:  # two losses go back through one pass, which compiled code frees
            raise ValueError(f"{self.name} trains a generator, which is not compiled: leave --compile out")

    def to_json(self) -> dict[str, Any]:
        values = json.loads(json.dumps(dataclasses.asdict(self)))
        # These came later. Where they are at their defaults, runs keep the identity that they had before.
        if self.gan is None:
            del values["gan"]
        if self.norm_momentum is None:
            del values["norm_momentum"]
        for name in ("average", "compile"):
            if not values[name]:
                del values[name]
        if self.optimizer.betas == BETAS:
            del values["optimizer"]["betas"]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunConfig:
        values = dict(values)
        values["optimizer"] = _build(Optimizer, values.get("optimizer"))
        values["schedule"] = _build(Schedule, values.get("schedule"))
        if values.get("mixture") is not None:
            values["mixture"] = _build(Mixture, values["mixture"])
        if values.get("gan") is not None:
            values["gan"] = _build(Gan, values["gan"])
        return _build(cls, values)

    def identity(self) -> str:
        """Equal for two runs that compute the same, whatever they are called."""
        text = json.dumps(_comparable(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def differences(self, other: RunConfig) -> list[str]:
        """The fields, such as "optimizer.lr: 0.01, not 0.05", that differ; the values of ``other`` stand second."""
        ours, theirs = _comparable(self), _comparable(other)
        missing = object()
        differing = [k for k in {**ours, **theirs} if ours.get(k, missing) != theirs.get(k, missing)]
        return [f"{k}: {_text(ours.get(k))}, not {_text(theirs.get(k))}" for k in differing]


def is_own(name: str) -> bool:
    """Whether a model or data set is the user's: "my_module:function"."""
    return ":" in name


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


def _build(kind: type, values: Any) -> Any:
    """A dataclass from the dict that JSON made of it."""
    if not isinstance(values, Mapping):
        raise ValueError(f"a configuration needs the fields of {kind.__name__}, but holds {values!r}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ValueError(f"a configuration has the unknown field {unknown[0]!r}; {kind.__name__} has {', '.join(fields)}")
    try:
        return kind(**values)
    except TypeError as error:  # a field is missing, or has another type
        raise ValueError(f"a configuration does not fit: {error}") from error


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"there is no {what} {value!r}: choose one of {', '.join(allowed)}")


def _check(holds: bool, what: str, value: Any, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{what} is {value}, but must be {allowed}")
