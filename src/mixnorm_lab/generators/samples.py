"""Generated images as files: pixels in uint8, a grid of them, and a PNG that is whole or not there at all."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

GAP = 1  # pixels between two images


def to_pixels(images: Tensor) -> Tensor:
    """Images between −1 and 1 in uint8."""
    return images.float().add(1).mul(127.5).round_().clamp_(0, 255).to(torch.uint8)


def grid(images: Tensor, columns: int) -> Tensor:
    """Images (N, 3, H, W) in uint8 in rows of ``columns``, (height, width, 3), white between them."""
    _, channels, height, width = images.shape
    rows = -(-len(images) // columns)
    cells = torch.full((rows * columns, channels, height + GAP, width + GAP), 255, dtype=torch.uint8)
    cells[: len(images), :, :height, :width] = images.cpu()
    cells = cells.view(rows, columns, channels, height + GAP, width + GAP).permute(0, 3, 1, 4, 2)
    return cells.reshape(rows * (height + GAP), columns * (width + GAP), channels)[:-GAP, :-GAP]


def write_png(path: Path, pixels: Tensor) -> None:
    """Writes ``pixels`` (height, width, 3) in uint8 as a PNG, which is whole or not there at all."""
    from PIL import Image

    new = path.with_suffix(".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.numpy()).save(new, format="PNG")
        os.replace(new, path)
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror or error}): make room or choose another folder, and run the same "
            "command again"
        ) from error
