"""How well mixtures of few and of more components describe a norm's input, as plain numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Likelihood:
    """A mixture of so many components, fitted to half of the images.

    Args:
        components: K.
        fitted: the log-likelihood of a point of that half, in nats.
        held_out: that of a point of the other half.
        bic: the Bayesian information criterion for a point of the first half, in nats; less is better.
        modes: how many maxima its density has.
        one_mode: how many channels have a single maximum, each looked at by itself.
        between: the share of a channel's variance that lies between the components' means, in the mean over the channels:
            0 where they share a centre.
        widths: how many times as wide as the narrowest component the widest is, in the geometric mean over all directions.
    """

    components: int
    fitted: float
    held_out: float
    bic: float
    modes: int
    one_mode: int
    between: float
    widths: float


@dataclass(frozen=True)
class LayerLikelihoods:
    """Mixtures of a layer's input, by their components, and of what it is to be held against.

    Args:
        epochs: of the training before it.
        points: those of each half.
        rows: of components without covariances, as those of mixture norm.
        normal: the same of other points, drawn from one normal distribution with the input's covariances.
        covariances: of components with covariances.
    """

    layer: str
    epochs: int
    points: int
    channels: int
    rows: tuple[Likelihood, ...]
    normal: tuple[Likelihood, ...]
    covariances: tuple[Likelihood, ...]


def save(view: LayerLikelihoods, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"likelihood-{view.layer.replace('.', '-')}-epoch-{view.epochs}.json"
    path.write_text(json.dumps(asdict(view), indent=1) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> LayerLikelihoods:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rows = {name: tuple(Likelihood(**row) for row in found[name]) for name in ("rows", "normal", "covariances")}
    return LayerLikelihoods(**found | rows)
