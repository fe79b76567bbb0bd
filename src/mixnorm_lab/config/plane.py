"""Points in the plane that a generator can learn, a grid and a ring of modes, and how it is trained on them.

Both, and what counts as a good sample (within three deviations of a mode), are those of VEEGAN (Srivastava et al., 2017) and
Unrolled GAN (Metz et al., 2017).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

NORMS = ("batch norm", "mixture norm")


@dataclass(frozen=True)
class PlaneData:
    """Normal distributions in the plane that are equally likely: their centres, and the deviation of each."""

    name: str
    centres: tuple[tuple[float, float], ...]
    deviation: float


GRID = PlaneData("grid", tuple((2.0 * x, 2.0 * y) for x in range(-2, 3) for y in range(-2, 3)), deviation=0.05)
# Angles in fp32, as the data was first made: to the bit, so that kept results can be computed again.
_ANGLES = (np.arange(8, dtype=np.float32) * np.float32(math.pi / 4)).tolist()
RING = PlaneData("ring", tuple((2 * math.cos(angle), 2 * math.sin(angle)) for angle in _ANGLES), deviation=0.02)
DATA = {data.name: data for data in (GRID, RING)}


@dataclass(frozen=True)
class PlaneSettings:
    """How generators of both norms are trained alike; ``components`` and ``em_iters`` are of the mixture norms."""

    steps: int = 3000
    batch_size: int = 256
    latent: int = 2
    width: int = 128
    lr: float = 2e-3
    beta1: float = 0.0
    components: int = 3
    em_iters: int = 2
