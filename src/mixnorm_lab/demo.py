"""A distribution with two modes through batch norm and through mixture norm, and a picture of both.

python -m mixnorm_lab.demo [PICTURE.png]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mixnorm import MixtureNorm1d

INK, BLUE, ORANGE = "#333333", "#4477aa", "#ee7733"


def two_modes(count: int = 20_000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points in the plane around two centers, one tight and one wide, with the mode (0 or 1) of each."""
    g = torch.Generator().manual_seed(seed)
    mode = (torch.rand(count, generator=g) < 0.35).long()
    centers = torch.tensor([[-2.0, -1.0], [3.0, 2.0]])
    deviations = torch.tensor([[0.6, 0.9], [1.6, 0.5]])
    return centers[mode] + deviations[mode] * torch.randn(count, 2, generator=g), mode


def normalize(x: Tensor) -> tuple[Tensor, Tensor, MixtureNorm1d]:
    """x through batch norm and through mixture norm with two components, and the mixture norm."""
    torch.manual_seed(0)
    mixture_norm = MixtureNorm1d(x.shape[1], num_components=2, em_iters=6)
    with torch.no_grad():
        return nn.BatchNorm1d(x.shape[1])(x), mixture_norm(x), mixture_norm


def separation(y: Tensor, mode: Tensor) -> float:
    """The distance between the two modes' centers, in deviations of the wider one."""
    first, second = y[mode == 0], y[mode == 1]
    gap = first.mean(0) - second.mean(0)
    return float((gap.abs() / torch.maximum(first.std(0), second.std(0))).max())


def draw(path: Path) -> Path:
    """The picture: above, the points; below, their first coordinate. Input, batch norm, mixture norm."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    x, mode = two_modes()
    batch, mixture, layer = normalize(x)
    panels = [
        ("Input: two modes", x),
        ("Batch norm: shifted and scaled", batch),
        ("Mixture norm: each mode by itself", mixture),
    ]
    with mpl.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK}):
        figure = Figure(figsize=(12, 6), dpi=110, layout="constrained")
        axes = figure.subplots(2, 3, sharex="col", gridspec_kw={"height_ratios": [2.2, 1]})
        for column, (title, points) in enumerate(panels):
            _scatter(axes[0, column], title, points, mode)
            _densities(axes[1, column], points[:, 0], mode)
        _fitted_components(axes[0, 0], layer)
        axes[0, 0].legend(loc="upper left", frameon=False, fontsize=9)
        axes[1, 0].set_ylabel("density")
        figure.savefig(path)
    return path


def _scatter(axis: Any, title: str, points: Tensor, mode: Tensor) -> None:
    axis.set_title(title, loc="left", color=INK)
    axis.axhline(0, color="#dddddd", lw=1, zorder=0)
    axis.axvline(0, color="#dddddd", lw=1, zorder=0)
    for value, color in enumerate((BLUE, ORANGE)):
        part = points[mode == value][:1500]
        axis.scatter(part[:, 0], part[:, 1], s=4, color=color, alpha=0.35, linewidths=0)
    axis.set_ylabel("second coordinate")


def _densities(axis: Any, values: Tensor, mode: Tensor) -> None:
    bins = torch.linspace(float(values.min()), float(values.max()), 90).tolist()
    everything = len(values)
    for value, color in enumerate((BLUE, ORANGE)):
        part = values[mode == value].tolist()
        axis.hist(part, bins, weights=[1 / everything / (bins[1] - bins[0])] * len(part), color=color, alpha=0.75)
    axis.set_xlabel("first coordinate")
    axis.set_yticks([])


def _fitted_components(axis: Any, layer: MixtureNorm1d) -> None:
    from matplotlib.patches import Ellipse

    mixture = layer.mixture
    assert mixture is not None
    for k, (mean, variance) in enumerate(zip(mixture.means.tolist(), mixture.variances.tolist(), strict=True)):
        label = "fitted components (2 deviations)" if k == 0 else None
        size = [4 * v**0.5 for v in variance]
        axis.add_patch(Ellipse(mean, *size, fill=False, color=INK, lw=1.5, label=label))


def main() -> None:
    """Draws the picture, and says what it shows."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "mixnorm-demo.png").resolve()
    x, mode = two_modes()
    batch, mixture, layer = normalize(x)
    fitted = layer.mixture
    assert fitted is not None
    print("A batch of 20,000 points with two modes, through batch norm and through mixture norm (K = 2).\n")
    for k, (share, mean) in enumerate(zip(fitted.weights.tolist(), fitted.means.tolist(), strict=True), start=1):
        print(f"  component {k}: {share:5.1%} of the points around ({mean[0]:+.2f}, {mean[1]:+.2f})")
    print("\n  distance between the modes, in deviations of the wider one")
    for name, y in (("input", x), ("batch norm", batch), ("mixture norm", mixture)):
        print(f"    {name:<13}{separation(y, mode):5.2f}")
    print("\n  Batch norm keeps the shape; mixture norm moves every mode to the origin and gives it its own scale.")
    try:
        print(f"\nPicture: {draw(path)}")
    except ModuleNotFoundError:
        sys.exit("The picture needs matplotlib: pip install 'mixnorm[demo]'")
    except OSError as error:
        sys.exit(f"The picture cannot be written to {path}: {error.strerror}. Name another file as the first argument.")


if __name__ == "__main__":
    main()
