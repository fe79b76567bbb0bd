"""The experiments of the paper as data: every row of its tables and every curve of its plots, with the paper's numbers.

Beside them, the forms of mixture norm that the paper does not have.
What the paper leaves open is in :attr:`Experiment.note`. Its "RMSprop with 0.9 momentum" is RMSprop's smoothing constant.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mixnorm_lab.config.mixture_forms import FOLLOWING, FORMS, RECOMMENDED
from mixnorm_lab.config.parts.gan import Gan
from mixnorm_lab.config.parts.mixture import Mixture
from mixnorm_lab.config.parts.optimizer import Optimizer, Schedule
from mixnorm_lab.config.run_config import RunConfig

# Iterations a second of the network (Titan X, batch norm without a native kernel): by (batch, channels), then K; 1 is BN.
COST = {
    (64, 196): {1: 16.40, 2: 14.46, 3: 14.42, 4: 13.91, 5: 13.69},
    (64, 448): {1: 9.26, 2: 8.83, 3: 8.51, 4: 8.52, 5: 8.41},
    (128, 448): {1: 7.35, 2: 6.59, 3: 6.51, 4: 6.41, 5: 6.38},
}

# The panels of test-error curves: the paper's, and those of the recommended form and of averaged weights. DenseNet's also
# shows training error and both losses.
PANELS = {
    "cifar-cnn/small-lr/cifar10": "CIFAR CNN, CIFAR-10, small learning rate",
    "cifar-cnn/small-lr/cifar100": "CIFAR CNN, CIFAR-100, small learning rate",
    "cifar-cnn/large-lr/cifar10": "CIFAR CNN, CIFAR-10, large learning rate",
    "cifar-cnn/large-lr/cifar100": "CIFAR CNN, CIFAR-100, large learning rate",
    "cifar-cnn/em-iterations": "CIFAR CNN, CIFAR-100: effect of the EM iterations",
    "cifar-cnn/layers": "CIFAR CNN, CIFAR-100: effect of the layers",
    "best/cifar10": "CIFAR CNN, CIFAR-10: the recommended form",
    "best/cifar100": "CIFAR CNN, CIFAR-100: the recommended form",
    "averaged/cifar10": "CIFAR CNN, CIFAR-10: weights averaged as the statistics are",
    "averaged/cifar100": "CIFAR CNN, CIFAR-100: weights averaged as the statistics are",
    "inception-v3/cifar10": "Inception-V3, CIFAR-10",
    "inception-v3/cifar100": "Inception-V3, CIFAR-100",
    "inception-v3/large-lr": "Inception-V3, CIFAR-100, large learning rate",
    "inception-v3/nesterov": "Inception-V3, CIFAR-100, Nesterov's accelerated gradient",
    "densenet": "DenseNet, CIFAR-100",
    "components": "Components in use over training: MN-4 of Inception-V3",
    "dcgan": "DCGAN, CIFAR-10",
}

# ReLU follows every norm of these models, and the paper applies it to each component inside the sum.
# The model's own ReLU then changes nothing.
FORM = {"activation": "relu"}

FEATURE_CLASSIFIER = "cifar-cnn/cifar10/bn-2"  # whose features a generator's distance is of, unless it is FID


@dataclass(frozen=True)
class Experiment:
    """One run of the paper, or beside it, and what the paper says of it.

    Args:
        name: also the name of its config, such as "cifar-cnn/cifar100/mn-2".
        paper: "accuracy": {epochs: largest test accuracy in % after them}; "max_accuracy" in %; "steps_to_bn": gradient
            updates to batch norm's largest accuracy, None where it was never reached. The paper does not say all of these.
            Of generators, "fid" is the lowest, and "steps_to_bn" are updates to batch norm's lowest.
        table: the paper's table that it is a row of.
        panels: those of ``PANELS`` that it is a curve of.
        note: what was assumed where the paper does not say.
    """

    name: str
    config: RunConfig
    paper: dict[str, Any]
    table: str | None = None
    panels: tuple[str, ...] = ()
    note: str = ""


def get(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}: {_nearest(name)}")
    return EXPERIMENTS[name]


def match(pattern: str) -> list[Experiment]:
    """The experiments that a name or a glob stands for: "cifar-cnn/cifar100/*"."""
    names = fnmatch.filter(EXPERIMENTS, pattern)
    if not names:
        raise ValueError(f"there is no experiment {pattern!r}: {_nearest(pattern)}")
    return [EXPERIMENTS[name] for name in names]


def panels_of(name: str) -> tuple[str, ...]:
    """Those of ``PANELS`` that an experiment is a curve of; none for a run of another name."""
    return EXPERIMENTS[name].panels if name in EXPERIMENTS else ()


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), EXPERIMENTS, n=3, cutoff=0.5)
    named = f"the nearest are {', '.join(near)}; " if near else ""
    return f"{named}mixnorm reproduce --list names all {len(EXPERIMENTS)}"


# model, layers, K, EM iterations, learning rate, weight decay, largest accuracy after each quarter, steps to batch norm's.
# Steps are () where the paper has none, None where it says that the accuracy was never reached.
Row = tuple[str, tuple[str, ...], int, int, float, float, tuple[float, float, float, float], Any]

CIFAR_CNN: dict[str, list[Row]] = {
    "cifar10": [
        ("bn-1", (), 1, 0, 0.01, 1e-4, (79.37, 84.34, 86.24, 86.74), ()),
        ("bn-2", (), 1, 0, 0.01, 2e-5, (84.11, 86.92, 87.65, 87.95), 1.95e4),
        ("bn-3", (), 1, 0, 0.05, 1e-4, (68.77, 71.68, 75.25, 77.35), ()),
        ("bn-4", (), 1, 0, 0.05, 2e-5, (73.84, 77.84, 81.43, 82.58), ()),
        ("mn-1", ("conv3",), 3, 2, 0.01, 1e-4, (81.91, 85.10, 86.51, 87.08), ()),
        ("mn-2", ("conv3",), 3, 2, 0.01, 2e-5, (85.56, 87.28, 88.05, 88.47), 1.34e4),
        ("mn-3", ("conv3",), 3, 2, 0.05, 1e-4, (67.84, 73.09, 74.80, 77.33), ()),
        ("mn-4", ("conv3",), 3, 2, 0.05, 2e-5, (76.70, 80.82, 83.31, 83.87), ()),
    ],
    "cifar100": [
        ("bn-1", (), 1, 0, 0.01, 1e-4, (52.54, 57.83, 60.37, 62.11), ()),
        ("bn-2", (), 1, 0, 0.01, 2e-5, (56.09, 60.05, 61.46, 62.14), 1.81e4),
        ("bn-3", (), 1, 0, 0.05, 1e-4, (23.13, 28.12, 33.21, 36.80), ()),
        ("bn-4", (), 1, 0, 0.05, 2e-5, (36.98, 43.89, 46.95, 49.08), ()),
        ("mn-1", ("conv3",), 3, 2, 0.01, 1e-4, (55.30, 60.47, 61.46, 62.20), ()),
        ("mn-2", ("conv3",), 3, 2, 0.01, 2e-5, (59.04, 60.86, 61.77, 62.29), 1.77e4),
        ("mn-3", ("conv3",), 3, 2, 0.05, 1e-4, (29.80, 36.30, 40.66, 43.77), ()),
        ("mn-4", ("conv3",), 3, 2, 0.05, 2e-5, (42.31, 48.96, 51.98, 52.62), ()),
        ("mn-5", ("conv3",), 3, 4, 0.01, 2e-5, (59.05, 61.94, 62.56, 62.76), 1.07e4),
        ("mn-6", ("conv3",), 3, 8, 0.01, 2e-5, (58.98, 61.83, 62.67, 63.12), 1.09e4),
        ("mn-7", ("conv2",), 3, 2, 0.01, 2e-5, (57.63, 61.23, 62.15, 62.63), 1.34e4),
        ("mn-8", ("conv2", "conv3"), 3, 2, 0.01, 2e-5, (59.79, 61.67, 62.50, 62.96), 1.03e4),
    ],
}
EM_ITERATIONS, LAYERS = ("bn-2", "mn-2", "mn-5", "mn-6"), ("bn-2", "mn-2", "mn-7", "mn-8")

INCEPTION: dict[str, list[Row]] = {
    "cifar10": [
        ("bn-1", (), 1, 0, 0.001, 5e-4, (89.18, 90.62, 91.08, 91.50), 7.34e4),
        ("mn-1", ("red1", "red2"), 3, 8, 0.001, 5e-4, (89.47, 91.03, 91.70, 91.91), 4.29e4),
        ("mn-2", ("red1", "red2", "inc3/0"), 3, 4, 0.001, 5e-4, (89.73, 91.69, 92.09, 92.55), 3.86e4),
        ("mn-3", ("inc2/0", "inc3/0"), 3, 2, 0.001, 5e-4, (90.49, 91.52, 92.17, 92.30), 3.82e4),
        ("mn-4", ("inc2/0", "inc3/0"), 5, 2, 0.001, 5e-4, (90.26, 91.77, 92.00, 92.25), 3.58e4),
    ],
    "cifar100": [
        ("bn-1", (), 1, 0, 0.001, 5e-4, (66.88, 69.44, 71.03, 71.30), 7.34e4),
        ("bn-5", (), 1, 0, 0.005, 5e-4, (40.68, 47.47, 51.13, 52.63), ()),
        ("mn-1", ("red1", "red2"), 3, 8, 0.001, 5e-4, (66.60, 68.86, 70.01, 70.43), None),
        ("mn-2", ("red1", "red2", "inc3/0"), 3, 4, 0.001, 5e-4, (68.26, 70.78, 71.78, 72.23), 4.57e4),
        ("mn-4", ("inc2/0", "inc3/0"), 5, 2, 0.001, 5e-4, (68.40, 70.99, 71.98, 72.74), 3.93e4),
        ("mn-5", ("inc2/0", "inc3/0"), 5, 2, 0.005, 5e-4, (50.41, 55.69, 57.88, 59.10), ()),
    ],
}
# Policy: factor, shares of the training where it falls; largest accuracy and steps to batch norm's, of BN and of MN.
NESTEROV = {
    1: (0.1, (0.5, 0.75), {"bn": (75.75, 2.78e4), "mn": (77.30, 1.52e4)}),
    2: (0.2, (0.3, 0.6, 0.8), {"bn": (75.20, 2.41e4), "mn": (77.32, 1.79e4)}),
}
DENSENET_ERRORS = {40: {"bn": 25.10, "mn": 24.63}, 100: {"bn": 21.93, "mn": 20.97}}  # best test error in %

DCGAN = {"bn": {"fid": 37.56, "steps_to_bn": 6e4}, "mn": {"fid": 33.35, "steps_to_bn": 2.5e4}}


def _mixture(layers: Sequence[str], num_components: int, em_iters: int) -> Mixture | None:
    if not layers:
        return None
    return Mixture(tuple(layers), {"num_components": num_components, "em_iters": em_iters, **FORM})


def _rmsprop(table: str, data: str, row: Row, epochs: int, batch_size: int, every: int, panels: Sequence[str]) -> Experiment:
    kind, layers, num_components, em_iters, lr, weight_decay, quarters, steps = row
    config = RunConfig(
        name=f"{table}/{data}/{kind}",
        model=table,
        data=data,
        epochs=epochs,
        batch_size=batch_size,
        optimizer=Optimizer("rmsprop", lr, weight_decay, smoothing=0.9),
        schedule=Schedule("exponential", factor=0.93, every=every),
        mixture=_mixture(layers, num_components, em_iters),
    )
    accuracy = {epochs * quarter // 4: value for quarter, value in enumerate(quarters, start=1)}
    paper = {"accuracy": accuracy, "max_accuracy": quarters[-1]} | ({} if steps == () else {"steps_to_bn": steps})
    return Experiment(config.name, config, paper, table, tuple(panels))


def _cifar_cnn() -> list[Experiment]:
    found = []
    for data, rows in CIFAR_CNN.items():
        for row in rows:
            kind, lr = row[0], row[4]
            panels = []
            if kind[-1] in "1234":
                panels.append(f"cifar-cnn/{'small' if lr < 0.05 else 'large'}-lr/{data}")
            panels += [f"best/{data}", f"averaged/{data}"] * (kind == "bn-2")
            if data == "cifar100":
                panels += ["cifar-cnn/em-iterations"] * (kind in EM_ITERATIONS) + ["cifar-cnn/layers"] * (kind in LAYERS)
            found.append(_rmsprop("cifar-cnn", data, row, epochs=100, batch_size=256, every=2, panels=panels))
    return found


def _inception() -> list[Experiment]:
    found = []
    for data, rows in INCEPTION.items():
        for row in rows:
            panels = [f"inception-v3/{data}" if row[4] == 0.001 else "inception-v3/large-lr"]
            panels += ["components"] * (row[0] == "mn-4")
            found.append(_rmsprop("inception-v3", data, row, epochs=200, batch_size=128, every=4, panels=panels))
    return found


def _nesterov() -> list[Experiment]:
    found = []
    for policy, (factor, at, measured) in NESTEROV.items():
        for kind, (best, steps) in measured.items():
            config = RunConfig(
                name=f"inception-v3/cifar100/nesterov-{kind}-{policy}",
                model="inception-v3",
                data="cifar100",
                epochs=150,
                batch_size=256,
                optimizer=Optimizer("nesterov", lr=0.14, weight_decay=5e-4, momentum=0.9),
                schedule=Schedule("step", factor=factor, at=at),
                mixture=_mixture(("inc2/1", "inc3/0") if kind == "mn" else (), 5, 2),
            )
            paper = {"max_accuracy": best, "steps_to_bn": steps}
            note = "the weight decay is that of the other runs of this model"
            note += ", and K = 5 and EM iter. 2 are those of MN-4" if kind == "mn" else ""
            found.append(Experiment(config.name, config, paper, "nesterov", ("inception-v3/nesterov",), note))
    return found


def _densenet() -> list[Experiment]:
    found = []
    for depth, errors in DENSENET_ERRORS.items():
        for kind, error in errors.items():
            layers = ("transition1", "transition2", "last_norm") if kind == "mn" else ()
            config = RunConfig(
                name=f"densenet-{depth}/cifar100/{kind}",
                model=f"densenet-{depth}-12",
                data="cifar100",
                epochs=200,
                batch_size=64,
                optimizer=Optimizer("nesterov", lr=0.1, weight_decay=1e-4, momentum=0.9),
                schedule=Schedule("step", factor=0.1, at=(0.5, 0.75)),
                mixture=_mixture(layers, 5, 2),
            )
            found.append(Experiment(config.name, config, {"max_accuracy": round(100 - error, 2)}, None, ("densenet",)))
    return found


def _dcgan() -> list[Experiment]:
    found = []
    for kind, paper in DCGAN.items():
        config = RunConfig(
            name=f"dcgan/cifar10/{kind}",
            model="dcgan",
            data="cifar10",
            epochs=100,  # of 1,000 updates
            batch_size=64,
            optimizer=Optimizer("adam", lr=0.0002, betas=(0.0, 0.9)),
            schedule=Schedule("constant"),
            mixture=_mixture(("deconv1.norm", "deconv2.norm") if kind == "mn" else (), 3, 2),
            gan=Gan(updates=1000, evaluate_every=10, samples=50_000),
        )
        note = "the sizes of the networks and the batch are the defaults of a library for the paper's framework"
        found.append(Experiment(config.name, config, dict(paper), None, ("dcgan",), note))
    return found


def _form(start: Experiment, form: str, name: str, panels: tuple[str, ...] = ()) -> Experiment:
    """An experiment with one of the forms in :mod:`mixnorm_lab.config.mixture_forms` in place of its own."""
    (layers, options), old = FORMS[form], start.config.mixture
    assert old is not None
    config = replace(start.config, name=name, mixture=Mixture(layers, old.options | options))
    return Experiment(name, config, {}, panels=panels)


def _forms(paper: dict[str, Experiment]) -> list[Experiment]:
    """All forms on CIFAR-100, which they were chosen on, and the recommended one on both data sets."""
    found = []
    for form in FORMS:
        name = f"forms/cifar100/{form}"
        found.append(_form(paper["cifar-cnn/cifar100/mn-2"], form, name, ("averaged/cifar100",) * (form == FOLLOWING)))
    for data in CIFAR_CNN:
        name, start = f"best/{data}", paper[f"cifar-cnn/{data}/mn-2"]
        found.append(_form(start, RECOMMENDED, name, (name, f"averaged/{data}")))
    return found


def _elsewhere(paper: dict[str, Experiment]) -> list[Experiment]:
    """The recommended form in other models: all of their norms."""
    found = []
    for start in ("densenet-40/cifar100/bn", "inception-v3/cifar100/bn-1"):
        name = f"best/{start.rpartition('/')[0]}"
        config = replace(paper[start].config, name=name, mixture=_mixture(("*",), 3, 2))
        found.append(Experiment(name, config, {}, panels=paper[start].panels))
    return found


_PAPER = {found.name: found for found in (*_cifar_cnn(), *_inception(), *_nesterov(), *_densenet(), *_dcgan())}
EXPERIMENTS = _PAPER | {found.name: found for found in (*_forms(_PAPER), *_elsewhere(_PAPER))}
