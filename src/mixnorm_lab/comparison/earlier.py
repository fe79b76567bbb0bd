"""Runs of a comparison that were trained before its source files changed: where they are, and what changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mixnorm_lab.config.parts.mixture import ALL_LAYERS, RECOMMENDED_LAYERS, Mixture
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.own.sources import changed
from mixnorm_lab.storage import records
from mixnorm_lab.storage.folders import recorded
from mixnorm_lab.storage.records import Record, RecordError


def older_settings(config: RunConfig) -> list[RunConfig]:
    """What the same command meant before: without notes of sources, and with the paper's form in all layers of a user's
    model."""
    plain = replace(config, sources="")
    mixture = config.mixture
    if mixture is None or mixture.options.get("form") != "gated":
        return [plain] if config.sources else []
    options = {name: value for name, value in mixture.options.items() if name != "form"}
    layers = ALL_LAYERS if mixture.layers == RECOMMENDED_LAYERS else mixture.layers
    return [*([plain] if config.sources else []), replace(plain, mixture=Mixture(layers, options))]


def note(configs: Sequence[RunConfig], root: Path) -> str | None:
    """A sentence about runs of such configurations in a folder; None where it holds none."""
    for config in configs:
        record = recorded(config, root)
        if record is None or record.config.identity() != config.identity():
            continue
        gated = any(one.mixture is not None and one.mixture.options.get("form") == "gated" for one in configs)
        form = "" if gated or all(one.mixture is None for one in configs) else ", and of the paper's form, the default then"
        return f"The runs in {root} are older than notes of source files{form}: what was edited since then is not seen."
    return None


def change(configs: Sequence[RunConfig], root: Path, runs: Path, name: str) -> str | None:
    """A sentence about runs with other sources, in one of the folders of ``runs`` that begin with ``name``."""
    if any(recorded(config, root) for config in configs):
        return None  # it goes on, or is another's
    wanted = {_without_sources(config) for config in configs}
    folders = [folder for folder in runs.glob(f"{name}-*") if folder != root and folder.is_dir()]
    folders.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    found = [(folder, one.config) for folder in folders for one in _first(folder) if _without_sources(one.config) in wanted]
    if not found or any(config.sources == configs[0].sources for _, config in found):
        return None
    folder, config = found[0]
    files = changed(config.sources, configs[0].sources)
    return f"{files} changed since the runs in {folder}: they are kept there, and new ones are trained in {root}."


def _first(folder: Path) -> list[Record]:
    """The records with the smallest seeds of a folder, which are enough to know whose it is."""
    found = []
    for path in folder.glob(f"*/seed-0/{records.NAME}"):
        try:
            found.append(records.read(path))
        except RecordError:  # which says nothing of this comparison
            continue
    return found


def _without_sources(config: RunConfig) -> str:
    return replace(config, sources="", seed=0).identity()
