"""The mixture norms in an epoch's row: how many components they use, and at some epochs what those look like.

A snapshot has an entry for each layer: ``channels``, the indices of a few evenly spaced ones; ``weights`` λ (K,);
``means`` and ``variances`` (K, channels). Where every channel has a mixture of its own, λ is (K, channels) too.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mixnorm import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d
from mixnorm_lab.internals import WITH_HISTORY
from mixnorm_lab.storage.snapshots import CHANNELS, spread


def components_in_use(model: nn.Module) -> dict[str, float]:
    """How many components the last batch used, for each mixture norm; the mean where a layer has several mixtures."""
    counts = {name: norm.effective_components() for name, norm in mixture_norms(model).items()}
    return {name: c if isinstance(c, int) else c.double().mean().item() for name, c in counts.items()}


def snapshot(model: nn.Module) -> dict[str, dict[str, list[Any]]] | None:
    """The mixtures of the last training batch; ``None`` where no layer has one.

    Mixtures of single images are left out: there are as many as images, and none belongs to the layer.
    """
    found: dict[str, dict[str, list[Any]]] = {}
    for name, norm in mixture_norms(model).items():
        mixture = norm.mixture
        if mixture is None or norm.population not in WITH_HISTORY:
            continue
        channels = spread(norm.num_features, CHANNELS)
        if norm.population == "channel":  # (C, K), (C, K, 1)
            weights = mixture.weights[channels].T
            means, variances = (t[channels, :, 0].T for t in (mixture.means, mixture.variances))
        else:
            weights = mixture.weights
            means, variances = (t[:, channels] for t in (mixture.means, mixture.variances))
        found[name] = {
            "channels": channels,
            "weights": _rounded(weights),
            "means": _rounded(means),
            "variances": _rounded(variances),
        }
    return found or None


def mixture_norms(model: nn.Module) -> dict[str, MixtureNorm1d | MixtureNorm2d | MixtureNorm3d]:
    return {name: m for name, m in model.named_modules() if isinstance(m, (MixtureNorm1d, MixtureNorm2d, MixtureNorm3d))}


def _rounded(values: Tensor) -> list[Any]:
    def shorten(value: Any) -> Any:
        return [shorten(inner) for inner in value] if isinstance(value, list) else float(f"{value:.6g}")

    return shorten(values.tolist())
