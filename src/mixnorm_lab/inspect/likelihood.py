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
    """

    components: int
    fitted: float
    held_out: float
    bic: float
    modes: int


@dataclass(frozen=True)
class LayerLikelihoods:
    """Mixtures of a layer's input, by their components.

    Args:
        points: those of each half.
    """

    layer: str
    points: int
    channels: int
    rows: tuple[Likelihood, ...]


def save(view: LayerLikelihoods, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"likelihood-{view.layer.replace('.', '-')}.json"
    path.write_text(json.dumps(asdict(view), indent=1) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> LayerLikelihoods:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return LayerLikelihoods(**{**found, "rows": tuple(Likelihood(**row) for row in found["rows"])})
