"""Pictures of any size as one tensor of uint8, decoded once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_BYTES = 16 << 30  # of all pictures together; and at most half of the machine's memory
LARGEST = 256  # pictures that all have one size up to this keep it
SIDES = (224, 64, 32)  # others become squares of the largest of these that their shorter side reaches
DEEP = ("I", "F")  # modes with more than 8 bits a channel begin with these


def load_pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ValueError("Images need Pillow: pip install pillow") from None
    return Image


def shape_for(examples: Sequence[Any], image_size: int | None) -> tuple[int, int, int]:
    """(C, H, W) for pictures such as these: one channel if all are gray, and the size that was asked for or suits them."""
    channels = 1 if all(picture.mode in ("1", "L") for picture in examples) else 3
    if image_size is not None:
        return channels, image_size, image_size
    sizes = {picture.size for picture in examples}
    width, height = next(iter(sizes))
    if len(sizes) == 1 and max(width, height) <= LARGEST:
        return channels, height, width
    shortest = min(min(size) for size in sizes)
    side = next((side for side in SIDES if shortest >= side), SIDES[-1])
    return channels, side, side


def decoded(names: Sequence[Any], open_one: Callable[[Any], Any], shape: tuple[int, int, int], what: str) -> Tensor:
    """Pictures (N, C, H, W) in uint8. One of another size is scaled to cover it, and what is over is cut off around it.

    Args:
        open_one: a picture of Pillow by its name.
        what: they are of, for the sentence about too many of them.
    """
    size = len(names) * int(np.prod(shape))
    most = min(MOST_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    if size > most:
        raise ValueError(
            f"the {len(names):,} images of {what} take {size / 2**30:.1f} GB at {' × '.join(map(str, shape))}, and at most "
            f"{most / 2**30:.1f} GB are kept in memory: use a smaller --image-size, or your own loaders, my_module:loaders"
        )
    images = torch.empty(len(names), *shape, dtype=torch.uint8)

    def put(number: int) -> None:
        try:
            with open_one(names[number]) as picture:
                images[number] = _pixels(picture, shape)
        except (OSError, SyntaxError, ValueError, load_pillow().DecompressionBombError) as error:
            raise ValueError(f"{names[number]} cannot be read as an image ({error}): mend it, or remove it") from None

    with ThreadPoolExecutor() as pool:  # to decode a picture needs no interpreter
        list(pool.map(put, range(len(names))))
    return images


def _pixels(picture: Any, shape: tuple[int, int, int]) -> Tensor:
    channels, height, width = shape
    if picture.mode.startswith(DEEP):
        raise ValueError(f"its pixels are {picture.mode}, not 8 bits a channel")
    picture = picture.convert("L" if channels == 1 else "RGB")
    if picture.size != (width, height):
        scale = max(width / picture.width, height / picture.height)
        size = max(width, round(picture.width * scale)), max(height, round(picture.height * scale))
        picture = picture.resize(size, load_pillow().Resampling.BICUBIC)
        left, top = (size[0] - width) // 2, (size[1] - height) // 2
        picture = picture.crop((left, top, left + width, top + height))
    pixels = torch.from_numpy(np.array(picture))
    return pixels.unsqueeze(0) if channels == 1 else pixels.permute(2, 0, 1)
