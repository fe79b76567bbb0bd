"""What a norm of a trained run sees and does, as pictures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mixnorm_lab.inspect import norm_inputs
from mixnorm_lab.inspect.component_counts import layer_likelihoods
from mixnorm_lab.inspect.densities import LayerDensities
from mixnorm_lab.inspect.likelihood import LayerLikelihoods, save
from mixnorm_lab.reports.plots import densities
from mixnorm_lab.storage.folders import INSPECTION
from mixnorm_lab.storage.records import Record
from mixnorm_lab.tasks.task import Task
from mixnorm_lab.training import build

BATCHES = 8  # of training images, for the likelihoods


@dataclass(frozen=True)
class Inspection:
    """What a norm of a run sees on a training batch, after how many epochs, and the pictures of it.

    Args:
        likelihoods: how many components it wants, if that was asked for.
    """

    view: LayerDensities
    epochs: int
    pictures: list[Path]
    likelihoods: LayerLikelihoods | None = None


def inspect_run(
    record: Record,
    device: torch.device,
    data: Path | None,
    layer: str | None = None,
    out: Path | None = None,
    *,
    likelihood: bool = False,
) -> Inspection:
    """Looks at a norm of a run. With ``likelihood`` also fits mixtures of 1 to 5 components to its input: how well each
    describes other images is kept beside the pictures."""
    assert record.path is not None
    folder = record.path.parent
    model, source = build.prepare(record.config, device, data)
    epochs = norm_inputs.load_weights(model, folder)
    inputs = next(iter(source.train_batches(1, seed=record.config.seed)))
    with build.explained(record.config):
        model, feed = model.to(device), Task.of(record.config).feed
        view = norm_inputs.layer_densities(model, inputs, layer, feed=feed)
        found = fits = None
        if likelihood:
            few = source.train_batches(min(BATCHES, source.steps_per_epoch), seed=record.config.seed)  # no image twice
            batches = (norm_inputs.layer_input(model, batch, view.layer, feed=feed) for batch in few)
            found, seen = layer_likelihoods(batches, view.layer, epochs=epochs, channels=view.channels)
            fits = replace(view, points=found.points, norms=seen)
    out = out or folder / INSPECTION
    try:
        paths = densities.write(out, densities=view, fits=fits, record=record, layer=view.layer)
    except ModuleNotFoundError:
        raise ValueError(
            "Pictures need matplotlib: install the extra, pip install '.[tools]' from a checkout of mixnorm"
        ) from None
    if found is not None:
        save(found, out)
    return Inspection(view, epochs, paths, found)
