"""What a norm of a trained run sees and does, as pictures."""

from __future__ import annotations

from pathlib import Path

import torch

from mixnorm_lab.inspect import norm_inputs
from mixnorm_lab.inspect.densities import LayerDensities
from mixnorm_lab.reports.plots import densities
from mixnorm_lab.storage.folders import INSPECTION
from mixnorm_lab.storage.records import Record
from mixnorm_lab.tasks.task import Task
from mixnorm_lab.training import build


def inspect_run(
    record: Record, device: torch.device, data: Path | None, layer: str | None = None, out: Path | None = None
) -> tuple[LayerDensities, int, list[Path]]:
    """What a norm of a run sees on a training batch, after how many epochs, and the pictures of it."""
    assert record.path is not None
    folder = record.path.parent
    model, source = build.prepare(record.config, device, data)
    epochs = norm_inputs.load_weights(model, folder)
    inputs = next(iter(source.train_batches(1, seed=record.config.seed)))
    with build.explained(record.config):
        view = norm_inputs.layer_densities(model.to(device), inputs, layer, feed=Task.of(record.config).feed)
    try:
        paths = densities.write(out or folder / INSPECTION, densities=view, record=record, layer=view.layer)
    except ModuleNotFoundError:
        raise ValueError(
            "Pictures need matplotlib: install the extra, pip install '.[tools]' from a checkout of mixnorm"
        ) from None
    return view, epochs, paths
