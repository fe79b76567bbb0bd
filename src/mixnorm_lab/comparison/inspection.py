"""What a norm of a trained run sees and does, as pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mixnorm_lab.inspect import norm_inputs
from mixnorm_lab.inspect.component_counts import COMPONENTS, layer_likelihoods
from mixnorm_lab.inspect.densities import LayerDensities
from mixnorm_lab.inspect.likelihood import LayerLikelihoods, save
from mixnorm_lab.reports.plots import densities
from mixnorm_lab.storage.folders import INSPECTION
from mixnorm_lab.storage.records import Record
from mixnorm_lab.tasks.task import Task
from mixnorm_lab.training import build


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
    """Looks at a norm of a run. With ``likelihood`` the densities have mixtures of 1 to 5 components, and how well each
    describes other images is kept beside the pictures."""
    assert record.path is not None
    folder = record.path.parent
    model, source = build.prepare(record.config, device, data)
    epochs = norm_inputs.load_weights(model, folder)
    inputs = next(iter(source.train_batches(1, seed=record.config.seed)))
    with build.explained(record.config):
        model, feed = model.to(device), Task.of(record.config).feed
        components = COMPONENTS if likelihood else norm_inputs.COMPONENTS
        view = norm_inputs.layer_densities(model, inputs, layer, components=components, feed=feed)
        found = None
        if likelihood:
            found = layer_likelihoods(norm_inputs.layer_input(model, inputs, view.layer, feed=feed), view.layer)
    out = out or folder / INSPECTION
    try:
        paths = densities.write(out, densities=view, record=record, layer=view.layer)
    except ModuleNotFoundError:
        raise ValueError(
            "Pictures need matplotlib: install the extra, pip install '.[tools]' from a checkout of mixnorm"
        ) from None
    if found is not None:
        save(found, out)
    return Inspection(view, epochs, paths, found)
