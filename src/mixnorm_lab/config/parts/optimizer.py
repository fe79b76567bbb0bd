"""The optimizer of a run, and how its learning rate changes over the training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mixnorm_lab.config.fields import Option, setting
from mixnorm_lab.config.parts.checks import check, one_of

OPTIMIZERS = ("rmsprop", "nesterov", "adam", "sgd", "adamw")
PER_STEP = ("one-cycle", "cosine")  # schedules whose rate changes with every step
SCHEDULES = ("exponential", "step", "constant", *PER_STEP)
DECAYED = ("all", "weights")
BETAS = (0.9, 0.999)


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
        one_of("optimizer", self.name, OPTIMIZERS)
        one_of("choice of decayed parameters", self.decayed, DECAYED)
        object.__setattr__(self, "betas", tuple(self.betas))
        check(math.isfinite(self.lr) and self.lr > 0, "the learning rate", self.lr, "a number above 0")
        check(
            math.isfinite(self.weight_decay) and self.weight_decay >= 0, "the weight decay", self.weight_decay, "0 or more"
        )
        check(0 <= self.smoothing < 1, "RMSprop's smoothing", self.smoothing, "from 0 up to but not 1")
        check(0 <= self.momentum < 1, "the momentum", self.momentum, "from 0 up to but not 1")
        inside = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check(inside, "Adam's betas", self.betas, "two numbers from 0 up to but not 1")

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
        one_of("schedule", self.name, SCHEDULES)
        object.__setattr__(self, "at", tuple(self.at))
        check(math.isfinite(self.factor) and self.factor > 0, "the schedule's factor", self.factor, "a number above 0")
        check(self.every >= 1, "the schedule's every", self.every, "at least 1 epoch")
        check(all(0 <= share <= 1 for share in self.at), "the schedule's at", self.at, "shares of the training from 0 to 1")
        check(self.warmup is None or 0 <= self.warmup < 1, "the schedule's warmup", self.warmup, "from 0 up to but not 1")

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
