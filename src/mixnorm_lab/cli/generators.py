"""``mixnorm compare --task gan``: generators with batch norm and mixture norm, of points in the plane or of CIFAR-10."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mixnorm_lab import reports
from mixnorm_lab.cli.common import GOES_ON, INTERRUPTED, mistakes, print_json, typer
from mixnorm_lab.cli.options import Given
from mixnorm_lab.config import catalog
from mixnorm_lab.config.plane import DATA, PlaneSettings
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.generators import features as feature_networks
from mixnorm_lab.generators import plane
from mixnorm_lab.storage.plane_results import Result

PAIR = ("dcgan/cifar10/bn", "dcgan/cifar10/mn")
UPDATES = 1000  # an epoch
PLANE_OPTIONS = ("epochs", "components", "em_iters")  # of a run's, those that generators of points have


def is_plane(data: str) -> bool:
    """Whether the data are points in the plane, which need no network for their features and no GPU."""
    return data in DATA


def pair(seeds: int) -> list[RunConfig]:
    """DCGAN with both norms in turns, as in the catalog."""
    found = [catalog.get(name).config for name in PAIR]
    return [replace(config, seed=seed) for seed in range(seeds) for config in found]


def with_features(configs: Sequence[RunConfig], features: str | None) -> tuple[list[RunConfig], Path | None]:
    """The runs with the features that were asked for, and where their network is.

    A folder is that of a classifier's run, a file has the 2015 Inception's weights, and "fid" downloads those.
    """
    if features is None or not any(config.gan for config in configs):
        return list(configs), None
    where = feature_networks.fetch_inception() if features == "fid" else Path(features)
    if not where.is_file():
        return list(configs), where
    found = []
    for config in configs:
        gan = config.gan and replace(config.gan, features="inception-2015")
        found.append(replace(config, gan=gan))
    return found, where


def compare_points(data: str, seeds: int, given: Given, out: Path | None, *, as_json: bool) -> None:
    """Trains both generators on the grid or the ring with several seeds; says what each reached as it goes."""
    changes: Given = {name: given[name] for name in ("components", "em_iters") if name in given}
    if "epochs" in given:
        changes["steps"] = UPDATES * given["epochs"]
    settings = PlaneSettings(**changes)
    root = out or Path("runs") / f"gan-{data}-{settings.steps}-{settings.components}-{settings.em_iters}"
    total = len(DATA[data].centres)

    def tell(result: Result) -> None:
        score = result.score
        told = f"{score.reached} of {total} modes, {100 * score.good:.1f}% good samples"
        typer.echo(f"{result.norm} seed {result.seed}: {told}", err=as_json)

    with mistakes():
        typer.echo(f"Generators of the {data}, {settings.steps:,} updates each, {2 * seeds} of them", err=as_json)
        try:
            results = plane.compare(data, root, seeds=seeds, settings=settings, done=tell)
        except KeyboardInterrupt:
            typer.echo(GOES_ON, err=True)
            raise typer.Exit(INTERRUPTED) from None
        page, table, answer = reports.write_plane(root, data, results)
    if as_json:
        print_json({"answers": [answer], "tables": [table.json()], "folder": str(root), "report": str(page)})
        return
    from rich.console import Console

    console = Console()
    console.print("", table.rich(console.width), f"\n{answer}", sep="\n", highlight=False, markup=False)
    console.print(f"\nThe report is {page}", highlight=False, soft_wrap=True)
