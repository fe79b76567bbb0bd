"""Mode collapse that can be counted: points in the plane from 25 or 8 normal distributions, and generators of them.

The grid and the ring, and what counts as a good sample (within three deviations of a mode), are those of VEEGAN (Srivastava
et al., 2017) and Unrolled GAN (Metz et al., 2017).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mixnorm import convert, recalibrate
from mixnorm_lab.generators.gan import GanStep
from mixnorm_lab.storage import records
from mixnorm_lab.training.not_finite import NotFinite
from mixnorm_lab.training.optimizers import set_rate

NORMS = ("batch norm", "mixture norm")
GOOD = 3.0  # deviations from the nearest mode
SAMPLES, SHOWN = 10_000, 1_000  # to count, and to keep for a picture
REFILL = 20  # batches that the statistics are refilled from before samples are drawn, of both norms
NAME = "modes-{}.json"


@dataclass(frozen=True)
class Modes:
    """``centres`` (M, 2) of normal distributions that are equally likely, and the deviation of each."""

    name: str
    centres: Tensor
    deviation: float

    def draw(self, count: int) -> Tensor:
        chosen = self.centres[torch.randint(len(self.centres), (count,))]
        return chosen + self.deviation * torch.randn(count, 2)


def _grid() -> Modes:
    side = torch.arange(-4.0, 5.0, 2.0)
    return Modes("grid", torch.cartesian_prod(side, side), 0.05)


def _ring() -> Modes:
    angles = torch.arange(8) * (2 * math.pi / 8)
    return Modes("ring", 2 * torch.stack((angles.cos(), angles.sin()), dim=1), 0.02)


DATA = {"grid": _grid(), "ring": _ring()}


@dataclass(frozen=True)
class Score:
    """
    Args:
        reached: how many modes have a good sample.
        good: the share of samples within three deviations of a mode.
        divergence: Kullback-Leibler, in nats, of how the samples fall to their nearest modes from a uniform fall: 0 if all
            modes get the same, log M if one gets everything.
    """

    reached: int
    good: float
    divergence: float


def score(points: Tensor, modes: Modes) -> Score:
    """``points`` (N, 2)."""
    distances, nearest = torch.cdist(points, modes.centres).min(dim=1)
    good = distances <= GOOD * modes.deviation
    count = len(modes.centres)
    shares = torch.bincount(nearest, minlength=count).double() / len(points)
    divergence = torch.special.xlogy(shares, shares * count).sum().item()
    return Score(len(nearest[good].unique()), good.double().mean().item(), divergence)


@dataclass(frozen=True)
class Settings:
    """Of both norms alike; ``components`` and ``em_iters`` of the mixture norms."""

    steps: int = 3000
    batch_size: int = 256
    latent: int = 2
    width: int = 128
    lr: float = 2e-3
    beta1: float = 0.0
    components: int = 3
    em_iters: int = 2


@dataclass(frozen=True)
class Result:
    """One generator: its score, and some of its samples (N, 2) as a list."""

    norm: str
    seed: int
    score: Score
    points: list[list[float]]


def make_networks(norm: str, settings: Settings, seed: int) -> tuple[nn.Module, nn.Module]:
    """The generator has a norm after each of its two hidden layers, the discriminator none; equal weights for both norms."""
    torch.manual_seed(seed)
    width = settings.width
    hidden = [nn.Linear(settings.latent, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
    hidden += [nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
    generator = nn.Sequential(*hidden, nn.Linear(width, 2))
    told = [nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)]
    if norm == "mixture norm":
        # Pooled statistics: samples of a generator in evaluation mode are then closest to those of its training.
        convert(generator, num_components=settings.components, em_iters=settings.em_iters, inference="pooled")
    return generator, nn.Sequential(*told, nn.Flatten(0))


class _Points:
    """A source of the trainer: every batch is drawn anew."""

    def __init__(self, modes: Modes, batch_size: int) -> None:
        self.modes, self.batch_size = modes, batch_size

    def batch(self, step: Tensor) -> tuple[Tensor, Tensor]:
        return self.modes.draw(self.batch_size), step


def run(modes: Modes, norm: str, seed: int, settings: Settings) -> Result:
    """Trains one generator on the CPU, and counts what it reaches."""
    device = torch.device("cpu")
    generator, discriminator = make_networks(norm, settings, seed)
    both = _adam(generator, settings), _adam(discriminator, settings)
    source: Any = _Points(modes, settings.batch_size)
    step = GanStep(generator, discriminator, both, source, settings.steps, settings.latent, device=device)
    for done in step.run_epoch():
        for optimizer in both:
            set_rate(optimizer, settings.lr * (1 - done / settings.steps))  # falls to 0, so that modes get sharp
    if not step.curve.isfinite().all():
        raise NotFinite(f"the losses of {norm} with seed {seed} are not finite: use a learning rate below {settings.lr:g}")
    points = samples(generator, settings)
    shown = [[round(x, 3), round(y, 3)] for x, y in points[:SHOWN].tolist()]
    return Result(norm, seed, score(points, modes), shown)


def _adam(network: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.Adam(network.parameters(), settings.lr, betas=(settings.beta1, 0.999), fused=True)


@torch.no_grad()
def samples(generator: nn.Module, settings: Settings, count: int = SAMPLES) -> Tensor:
    """Points (count, 2) of the generator in evaluation mode, with statistics that are those of its weights."""

    def noise(size: int) -> Tensor:
        return torch.rand(size, settings.latent) * 2 - 1

    recalibrate(generator, (noise(settings.batch_size) for _ in range(REFILL)))
    generator.eval()
    return generator(noise(count))


def compare(
    data: str,
    folder: Path,
    *,
    seeds: int = 10,
    settings: Settings | None = None,
    done: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Generators with batch norm and with mixture norm on the grid or the ring, for several seeds.

    Results are kept in ``folder`` one by one, and those that are there are not computed again.

    Args:
        done: called with each result.
    """
    if data not in DATA:
        raise ValueError(f"there are no points {data!r}: choose one of {', '.join(DATA)}")
    settings = settings or Settings()
    path = folder / NAME.format(data)
    found = {(result.norm, result.seed): result for result in read(path, settings)}
    for seed in range(seeds):
        for norm in NORMS:
            if (norm, seed) not in found:
                found[norm, seed] = run(DATA[data], norm, seed, settings)
                _write(path, settings, list(found.values()))
            if done is not None:
                done(found[norm, seed])
    return [found[norm, seed] for norm in NORMS for seed in range(seeds)]


def read(path: Path, settings: Settings | None = None) -> list[Result]:
    """The results in a file; none where there is no file. With ``settings``, the file must be of those."""
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        told = Settings(**content["settings"])
        found = [Result(r["norm"], r["seed"], Score(**r["score"]), r["points"]) for r in content["results"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it to run the comparison again") from error
    if settings is not None and told != settings:
        raise ValueError(f"{path} was computed with other settings ({told}): choose another folder, or remove it")
    return found


def _write(path: Path, settings: Settings, results: Sequence[Result]) -> None:
    content = {
        "settings": asdict(settings),
        "environment": records.environment("cpu"),
        "results": [asdict(result) for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content) + "\n", encoding="utf-8")
    os.replace(new, path)


def by_norm(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    for norm in NORMS:
        if found := [result for result in results if result.norm == norm]:
            yield norm, found
