"""A distribution with two modes through batch norm and two forms of mixture norm, and a picture of them.

python -m mixnorm_lab.demo [PICTURE.png]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mixnorm import MixtureNorm1d

INK, GREY, BLUE, ORANGE, GREEN, RED = "#333333", "#777777", "#4477aa", "#ee7733", "#117733", "#aa3333"
FORM: dict[str, Any] = {"scale": "unit", "between": 1.0}
NORMS = ("batch norm", "mixture norm, the paper's", "mixture norm, scale='unit', between=1.0")
TITLES = ("Input", "Batch norm", "Mixture norm, the paper's form", "Mixture norm, side by side")


def two_modes(count: int = 20_000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points in the plane around two centers, one tight and one wide, with the mode (0 or 1) of each."""
    g = torch.Generator().manual_seed(seed)
    mode = (torch.rand(count, generator=g) < 0.35).long()
    centers = torch.tensor([[-2.0, -1.0], [3.0, 2.0]])
    deviations = torch.tensor([[0.6, 0.9], [1.6, 0.5]])
    return centers[mode] + deviations[mode] * torch.randn(count, 2, generator=g), mode


def normalize(x: Tensor) -> tuple[list[Tensor], MixtureNorm1d]:
    """x through each of ``NORMS``, and the paper's mixture norm; both forms fit the same mixture of two components."""
    found, layers = [], [MixtureNorm1d(x.shape[1], num_components=2, em_iters=6, **form) for form in ({}, FORM)]
    with torch.no_grad():
        for norm in (nn.BatchNorm1d(x.shape[1]), *layers):
            torch.manual_seed(0)
            found.append(norm(x))
    return found, layers[0]


def deviations(y: Tensor, mode: Tensor) -> tuple[float, float]:
    """The deviation of the first coordinate in each of the two modes."""
    return float(y[mode == 0, 0].std()), float(y[mode == 1, 0].std())


def separation(y: Tensor, mode: Tensor) -> float:
    """The distance between the two modes' centers, in deviations of the wider one."""
    first, second = y[mode == 0], y[mode == 1]
    gap = first.mean(0) - second.mean(0)
    return float((gap.abs() / torch.maximum(first.std(0), second.std(0))).max())


def told(y: Tensor, mode: Tensor) -> float:
    """The share of the points whose mode can be told from its place, by the likelier of two Gaussians."""
    scores = []
    for value in (0, 1):
        part = y[mode == value]
        mean, variance = part.mean(0), part.var(0)
        scores.append(math.log(len(part)) - 0.5 * (variance.log() + (y - mean).square() / variance).sum(1))
    return float(((scores[1] > scores[0]).long() == mode).float().mean())


def draw(path: Path) -> Path:
    """The picture: the input, and what each norm makes of it, with what is gained and what is lost."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    x, mode = two_modes()
    outputs, layer = normalize(x)
    with mpl.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK}):
        figure = Figure(figsize=(6.6, 7.4), dpi=144, layout="constrained")
        figure.get_layout_engine().set(hspace=0.06, wspace=0.05)  # type: ignore[call-arg, union-attr]
        axes = figure.subplots(2, 2).ravel()
        for axis, title, points, notes in zip(axes, TITLES, (x, *outputs), _notes(x, outputs, mode), strict=True):
            _scatter(axis, title, notes, points, mode)
        for axis in axes[1:]:  # one scale for the norms, so that widths can be compared
            axis.set(xlim=(-5.5, 5.5), ylim=(-5.5, 5.5))
        _fitted_components(axes[0], layer)
        axes[0].legend(loc="lower right", frameon=False, fontsize=9)
        axes[0].set_xticks(range(-4, 9, 2))
        figure.savefig(path)
    return path


def _notes(x: Tensor, outputs: list[Tensor], mode: Tensor) -> list[tuple[tuple[str, str], ...]]:
    """What stands over each panel: lines with their colors."""
    first, second = deviations(x, mode)
    batch_norm, paper, beside = (f"{told(y, mode):.1%}" for y in outputs)
    guess = max(float((mode == value).float().mean()) for value in (0, 1))
    return [
        ((f"one mode {second / first:.1f} times as wide as the other", GREY), ("", GREY)),
        (("no gain: the narrow mode stays narrow", GREY), (f"no loss: mode known for {batch_norm}", GREY)),
        (("+ both modes fill the same range", GREEN), (f"− mode known for {paper} (a guess: {guess:.1%})", RED)),
        (("+ both modes are equally wide", GREEN), (f"− they overlap: mode known for {beside}", RED)),
    ]


def _scatter(axis: Any, title: str, notes: tuple[tuple[str, str], ...], points: Tensor, mode: Tensor) -> None:
    axis.text(0, 1.165, title, transform=axis.transAxes, color=INK, fontsize=13)
    for line, (text, color) in enumerate(notes):
        axis.text(0, 1.09 - 0.065 * line, text, transform=axis.transAxes, color=color, fontsize=9.5)
    axis.axhline(0, color="#dddddd", lw=1, zorder=0)
    axis.axvline(0, color="#dddddd", lw=1, zorder=0)
    for value, color in enumerate((BLUE, ORANGE)):
        part = points[mode == value][:1500]
        axis.scatter(part[:, 0], part[:, 1], s=4, color=color, alpha=0.35, linewidths=0)
    axis.tick_params(labelsize=9)


def _fitted_components(axis: Any, layer: MixtureNorm1d) -> None:
    from matplotlib.patches import Ellipse

    mixture = layer.mixture
    assert mixture is not None
    for k, (mean, variance) in enumerate(zip(mixture.means.tolist(), mixture.variances.tolist(), strict=True)):
        label = "fitted components" if k == 0 else None
        size = [4 * v**0.5 for v in variance]
        axis.add_patch(Ellipse(mean, *size, fill=False, color=INK, lw=1.5, label=label))


def main() -> None:
    """Draws the picture, and says what it shows."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "mixnorm-demo.png").resolve()
    x, mode = two_modes()
    outputs, layer = normalize(x)
    fitted = layer.mixture
    assert fitted is not None
    print("A batch of 20,000 points with two modes, through batch norm and through two forms of mixture norm (K = 2).\n")
    for k, (share, mean) in enumerate(zip(fitted.weights.tolist(), fitted.means.tolist(), strict=True), start=1):
        print(f"  component {k}: {share:5.1%} of the points around ({mean[0]:+.2f}, {mean[1]:+.2f})")
    print("\n  deviation of each mode in the first coordinate; the distance between them in deviations of the wider one;")
    print("  and the share of the points whose mode can be told from where they are\n")
    for name, y in zip(("input", *NORMS), (x, *outputs), strict=True):
        first, second = deviations(y, mode)
        print(f"    {name:<41}{first:5.2f}{second:7.2f}{separation(y, mode):10.2f}{told(y, mode):9.1%}")
    print("\n  Batch norm keeps the shape. The paper's mixture norm moves every mode to the origin, with its own scale:")
    print("  what lies within a narrow mode is gained, and which mode a point was in is lost.")
    print('  With scale="unit" and between=1.0 both modes are equally wide and lie side by side.')
    try:
        print(f"\nPicture: {draw(path)}")
    except ModuleNotFoundError:
        sys.exit("The picture needs matplotlib: pip install matplotlib")
    except OSError as error:
        sys.exit(f"The picture cannot be written to {path}: {error.strerror}. Name another file as the first argument.")


if __name__ == "__main__":
    main()
