"""The pictures of the documents, drawn again: python docs/site/pictures.py [FOLDER]

``demo.png`` is of mixnorm_lab.demo. ``result.png`` is made from the records in results/.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor

from mixnorm.functional import mixture_inference, mixture_normalize
from mixnorm.gmm import GaussianMixture
from mixnorm_lab import demo
from mixnorm_lab.storage import records

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
INK, GREY, LIGHT = demo.INK, demo.GREY, "#dddddd"
SHADES = ("#bbccee", "#6699cc", "#224488")
WEIGHTS, MEANS, DEVIATIONS = (0.65, 0.35), (-1.5, 2.5), (0.5, 1.2)
STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK, "savefig.dpi": 144}


def two_modes() -> GaussianMixture:
    """A narrow and a wide mode on a line."""
    as_column = (torch.tensor(values)[:, None] for values in (MEANS, DEVIATIONS))
    means, deviations = as_column
    return GaussianMixture(torch.tensor(WEIGHTS), means, deviations.square())


def forms(path: Path) -> None:
    """What g, b and d do to a point: its place after the norm against its place before it."""
    panels = (
        (
            "within: g",
            "the scale, from that of all points (0) to the component's own (1); b = 1",
            "within",
            {"between": 1.0},
        ),
        ("between: b", "how much of the component's place stays; g = 1", "between", {"within": 1.0}),
        ("deviation: d", "a bend in each component; g = 0, b = 1", "deviation", {"within": 0.0, "between": 1.0}),
    )
    figure = Figure(figsize=(6.6, 7.4), layout="constrained")
    figure.get_layout_engine().set(hspace=0.05)  # type: ignore[call-arg, union-attr]
    mixture, x = two_modes(), torch.linspace(-4, 6.5, 600)[:, None]
    for axis, (title, note, option, others) in zip(figure.subplots(3, 1, sharex=True), panels, strict=True):
        _density_below(axis, mixture, x)
        for value, color in zip((0.0, 0.5, 1.0), SHADES, strict=True):
            y = _through(mixture, x, **{option: value}, **others)
            axis.plot(x[:, 0], y[:, 0], color=color, lw=2.2, label=f"{title[-1]} = {value:g}")
        axis.axhline(0, color=LIGHT, lw=1, zorder=0)
        axis.set(ylim=(-4.2, 4.2), ylabel="after the norm")
        axis.set_title(title, loc="left", color=INK, pad=22)
        axis.text(0, 1.03, note, transform=axis.transAxes, color=GREY, fontsize=9.5)
        axis.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.1), ncols=3, fontsize=10)
    figure.axes[-1].set_xlabel("before the norm (shaded: how many points are there)")
    figure.savefig(path)


def clouds(path: Path) -> None:
    """The two modes of the demo through six forms."""
    chosen: tuple[tuple[str, dict[str, Any]], ...] = (
        ("the paper's form", {}),
        ('scale="unit"', {"scale": "unit"}),
        ('scale="unit", between=1', {"scale": "unit", "between": 1.0}),
        ("within=0, between=1: batch norm", {"scale": "unit", "within": 0.0, "between": 1.0}),
        ("within=0.5, between=1", {"scale": "unit", "within": 0.5, "between": 1.0}),
        ("the same, deviation=0.5", {"scale": "unit", "within": 0.5, "between": 1.0, "deviation": 0.5}),
    )
    x, mode = demo.two_modes()
    _, layer = demo.normalize(x)
    assert layer.mixture is not None
    resp = layer.mixture.responsibilities(x)
    figure = Figure(figsize=(6.6, 9.2), layout="constrained")
    for axis, (title, options) in zip(figure.subplots(3, 2, sharex=True, sharey=True).ravel(), chosen, strict=True):
        y = mixture_normalize(x, resp, **options)
        axis.axhline(0, color=LIGHT, lw=1, zorder=0)
        axis.axvline(0, color=LIGHT, lw=1, zorder=0)
        for value, color in enumerate((demo.BLUE, demo.ORANGE)):
            part = y[mode == value][:1500]
            axis.scatter(part[:, 0], part[:, 1], s=4, color=color, alpha=0.35, linewidths=0)
        axis.set_title(title, loc="left", color=INK, fontsize=11)
        axis.set(xlim=(-5, 5), ylim=(-5, 5))
    figure.savefig(path)


def terms(path: Path) -> None:
    """Modes, components and responsibilities of points on a line."""
    mixture, x = two_modes(), torch.linspace(-4, 6.5, 600)[:, None]
    points = mixture.sample(20_000, generator=torch.Generator().manual_seed(0))
    figure = Figure(figsize=(6.6, 4.1), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1.7, 1]})
    above.hist(points[:, 0].tolist(), 120, density=True, color="#cccccc")
    normal = torch.distributions.Normal(mixture.means[:, 0], mixture.variances[:, 0].sqrt())
    density = mixture.weights * normal.log_prob(x).exp()
    for k, color in enumerate((demo.BLUE, demo.ORANGE)):
        above.plot(x[:, 0], density[:, k], color=color, lw=2.2)
        below.plot(x[:, 0], mixture.responsibilities(x)[:, k], color=color, lw=2.2)
    for k, (place, color) in enumerate((((-0.8, 0.43), demo.BLUE), ((3.6, 0.12), demo.ORANGE))):
        text = f"component {k + 1}: λ = {WEIGHTS[k]:g}, μ = {MEANS[k]:g}, σ = {DEVIATIONS[k]:g}"
        above.text(*place, text.replace("μ = -", "μ = −").replace(", μ", ",\nμ"), color=color, fontsize=10)
    above.text(1.2, 0.26, "points (grey): two modes,\neach with a component\nfitted to it", color=GREY, fontsize=10)
    above.set(ylabel="density", yticks=[], ylim=(0, None))
    below.set(ylabel="responsibility", ylim=(-0.05, 1.05), yticks=[0, 0.5, 1], xlabel="a feature")
    below.text(-3.9, 0.75, "of component 1", color=demo.BLUE, fontsize=10)
    below.text(3.6, 0.75, "of component 2", color=demo.ORANGE, fontsize=10)
    figure.savefig(path)


CONFIRMED = 3  # seeds, from which on an interval is worth drawing


@dataclass(frozen=True)
class Gain:
    """How far a norm is above batch norm, in points of accuracy, with Welch's 95% interval."""

    where: str
    norm: str
    points: float
    interval: tuple[float, float] | None
    seeds: tuple[int, int]  # of the norm and of batch norm

    def __str__(self) -> str:
        text = f"{self.points:+.2f}"
        if self.interval is not None:
            text += f" [{self.interval[0]:.2f}, {self.interval[1]:.2f}]"
        return text.replace("-", "−")


def gains() -> list[Gain]:
    """From the records in results/."""
    paper = "mixture norm, the paper's form"
    gates = "mixture-norm,scale=unit,within=learned,between=learned,activation=None"
    parabola = "mixture-norm,num_components=1,deviation=learned,activation=None"
    found = []
    for data, name in (("cifar100", "CIFAR-100"), ("cifar10", "CIFAR-10")):
        base, own = (_accuracies(RESULTS / run) for run in (f"cifar-cnn/{data}/bn-2", f"best/{data}"))
        found.append(_gain(f"Small CNN, {name}, test images", paper, own, base))
    held_out = RESULTS / "resnet-18" / "cifar100-held-out"
    base = _accuracies(held_out / "batch-norm")
    for norm, folder in (
        (paper, "mixture-norm"),
        ("ghost batch norm of 32", "ghost-32"),
        ("the deviation part alone (K = 1)", parabola),
        ("modes + deviation, before ReLU", "mixture-norm,layers=relu,deviation=learned"),
        ("ghost + deviation, before ReLU", "parabola-32,layers=relu"),
        ("mixture norm, the gated form", gates),
    ):
        found.append(_gain("ResNet-18, CIFAR-100, held-out images", norm, _accuracies(held_out / folder), base))
    return found


def _accuracies(folder: Path) -> list[float]:
    """The accuracy of each run in percent, the mean over its last ten epochs, or its last tenth if that is shorter."""
    found = []
    for record in records.find(folder):
        last = record.epochs[-min(10, len(record.epochs) // 10) :]
        found.append(100 * (1 - mean(epoch["test_error"] for epoch in last)))
    return found


def _gain(where: str, norm: str, own: list[float], base: list[float]) -> Gain:
    interval = None
    if len(own) >= CONFIRMED:
        low, high = stats.ttest_ind(own, base, equal_var=False).confidence_interval(0.95)
        interval = float(low), float(high)
    return Gain(where, norm, mean(own) - mean(base), interval, (len(own), len(base)))


def result(path: Path) -> None:
    """The gains, hollow where there are too few seeds for an interval."""
    figure = Figure(figsize=(6.6, 4.8))
    axis = figure.subplots(gridspec_kw={"left": 0.4, "right": 0.7, "top": 0.99, "bottom": 0.12})
    beside = axis.get_yaxis_transform()  # x in widths of the axis, y in rows
    row = -1.4
    for where, group in groupby(gains(), key=lambda gain: gain.where):
        row += 1.4
        axis.text(-1.32, row, where, color=INK, fontweight="bold", va="center", transform=beside)
        members = list(group)
        axis.plot((0, 0), (row + 0.5, row + len(members) + 0.5), color=INK, lw=1)
        for gain in members:
            row += 1
            color = demo.ORANGE if gain.norm.startswith("ghost") else demo.BLUE
            if gain.interval:
                axis.plot(gain.interval, (row, row), color=color, lw=2)
            axis.scatter(gain.points, row, color=color if gain.interval else "white", edgecolors=color, s=45, zorder=3)
            seeds = "1 seed" if gain.seeds[0] == 1 else f"{gain.seeds[0]} seeds"
            axis.text(-1.27, row, gain.norm, color=INK, fontsize=10, va="center", transform=beside)
            axis.text(1.03, row, f"{gain}\n{seeds}", color=INK, fontsize=9, va="center", transform=beside)
    axis.set(xlim=(-0.7, 4), ylim=(row + 0.5, -0.7), yticks=[], xticks=range(5))
    axis.set_xlabel("points of accuracy above batch norm")
    axis.spines["left"].set_visible(False)
    figure.savefig(path)


def _density_below(axis: Any, mixture: GaussianMixture, x: Tensor) -> None:
    density = mixture.log_prob(x).exp()
    axis.fill_between(x[:, 0], -4.2, -4.2 + 3 * density, color="#eeeeee", zorder=0)


def _through(mixture: GaussianMixture, x: Tensor, **form: float) -> Tensor:
    """x through a norm in evaluation, with one mixture in its history."""
    history = (mixture.weights[None], mixture.means[None], mixture.variances[None], torch.ones(1))
    return mixture_inference(x, *history, scale="unit", **form)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "pictures")
    folder.mkdir(parents=True, exist_ok=True)
    demo.draw(folder / "demo.png")
    with mpl.rc_context(STYLE):
        for draw in (terms, clouds, forms, result):
            draw(folder / f"{draw.__name__}.png")


if __name__ == "__main__":
    main()
