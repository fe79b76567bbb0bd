"""Mode collapse that can be counted: generators of points in the plane, whose modes are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mixnorm import convert, recalibrate
from mixnorm_lab.config.plane import DATA, NORMS, PlaneData, PlaneSettings
from mixnorm_lab.generators.gan import GanStep
from mixnorm_lab.storage import environment, plane_results
from mixnorm_lab.storage.folders import check_writable
from mixnorm_lab.storage.plane_results import Result, Score
from mixnorm_lab.training.not_finite import NotFinite
from mixnorm_lab.training.optimizers import set_rate

GOOD = 3.0  # deviations from the nearest mode
SAMPLES, SHOWN = 10_000, 1_000  # to count, and to keep for a picture
REFILL = 20  # batches that the statistics are refilled from before samples are drawn, of both norms


def draw(data: PlaneData, count: int) -> Tensor:
    """Real points, (count, 2)."""
    centres = torch.tensor(data.centres)
    chosen = centres[torch.randint(len(centres), (count,))]
    return chosen + data.deviation * torch.randn(count, 2)


def score(points: Tensor, data: PlaneData) -> Score:
    """What generated points (N, 2) reach of the data's modes."""
    distances, nearest = torch.cdist(points, torch.tensor(data.centres)).min(dim=1)
    good = distances <= GOOD * data.deviation
    count = len(data.centres)
    shares = torch.bincount(nearest, minlength=count).double() / len(points)
    divergence = torch.special.xlogy(shares, shares * count).sum().item()
    return Score(len(nearest[good].unique()), good.double().mean().item(), divergence)


def make_networks(norm: str, settings: PlaneSettings, seed: int) -> tuple[nn.Module, nn.Module]:
    """The generator has a norm after each of its two hidden layers, the discriminator none; equal weights for both norms."""
    torch.manual_seed(seed)
    width = settings.width
    hidden = [nn.Linear(settings.latent, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
    hidden += [nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
    generator = nn.Sequential(*hidden, nn.Linear(width, 2))
    told = [nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)]
    if norm == "mixture norm":
        # Pooled statistics: samples of a generator in evaluation mode are then closest to those of its training.
        options: Any = {"num_components": settings.components, "em_iters": settings.em_iters, "inference": "pooled"}
        convert(generator, "*", form="paper", **options)
    return generator, nn.Sequential(*told, nn.Flatten(0))


class _Points:
    """A source of the trainer: every batch is drawn anew."""

    def __init__(self, data: PlaneData, batch_size: int) -> None:
        self.data, self.batch_size = data, batch_size

    def batch(self, step: Tensor) -> tuple[Tensor, Tensor]:
        return draw(self.data, self.batch_size), step


def run(data: PlaneData, norm: str, seed: int, settings: PlaneSettings) -> Result:
    """Trains one generator on the CPU, and counts what it reaches."""
    device = torch.device("cpu")
    generator, discriminator = make_networks(norm, settings, seed)
    both = _adam(generator, settings), _adam(discriminator, settings)
    source: Any = _Points(data, settings.batch_size)
    step = GanStep(generator, discriminator, both, source, settings.steps, settings.latent, device=device)
    for done in step.run_epoch():
        for optimizer in both:
            set_rate(optimizer, settings.lr * (1 - done / settings.steps))  # falls to 0, so that modes get sharp
    if not step.curve.isfinite().all():
        raise NotFinite(f"the losses of {norm} with seed {seed} are not finite: use a learning rate below {settings.lr:g}")
    points = samples(generator, settings)
    shown = [[round(x, 3), round(y, 3)] for x, y in points[:SHOWN].tolist()]
    return Result(norm, seed, score(points, data), shown)


def _adam(network: nn.Module, settings: PlaneSettings) -> torch.optim.Optimizer:
    return torch.optim.Adam(network.parameters(), settings.lr, betas=(settings.beta1, 0.999), fused=True)


@torch.no_grad()
def samples(generator: nn.Module, settings: PlaneSettings, count: int = SAMPLES) -> Tensor:
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
    settings: PlaneSettings | None = None,
    done: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Generators with batch norm and with mixture norm on the grid or the ring, for several seeds.

    Results are kept in ``folder`` one by one, and those that are there are not computed again.

    Args:
        done: called with each result.
    """
    if data not in DATA:
        raise ValueError(f"there are no points {data!r}: choose one of {', '.join(DATA)}")
    settings = settings or PlaneSettings()
    path = plane_results.path(folder, data)
    found = {(result.norm, result.seed): result for result in plane_results.read(path, settings)}
    check_writable(folder)
    for seed in range(seeds):
        for norm in NORMS:
            if (norm, seed) not in found:
                found[norm, seed] = run(DATA[data], norm, seed, settings)
                plane_results.write(path, settings, environment.of_run("cpu"), list(found.values()))
            if done is not None:
                done(found[norm, seed])
    return [found[norm, seed] for norm in NORMS for seed in range(seeds)]
