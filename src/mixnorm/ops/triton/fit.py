"""The fit in one launch: sample, greedy k-means++, Lloyd and EM: ``ops.fit.fit``."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from mixnorm.ops import fit as fitting
from mixnorm.ops import reference
from mixnorm.ops.kernels import Mixture
from mixnorm.ops.triton import tiles
from mixnorm.ops.triton.fit_kernel import fit_kernel
from mixnorm.ops.triton.launch import PLANS, Plan, cdiv, launch, power_of_two

MAX_BLOCKS = 4096  # of points; a program looks at the sums of all of them at once


def sample_and_fit(
    points: Tensor,
    size: int,
    draws: Tensor | tuple[int, Tensor],
    num_components: int,
    lloyd_iters: int,
    em_iters: int,
    min_variance: float,
    min_weight: float,
) -> tuple[Tensor, Mixture]:
    """``size`` of the points (B, outer, inner, D) as a sample (B, size, D), and its mixture.

    ``draws`` are uniform numbers, size + 1 for the sample and then those of the seeding of each mixture, or a seed and a
    counter on the device, from which the kernel makes them.
    """
    if num_components == 1:  # nothing to seed and nothing to iterate
        lloyd_iters = em_iters = 0
    sample = torch.empty(points.shape[0], size, points.shape[3], dtype=torch.float32, device=points.device)
    mixture = _launch(
        points,
        sample,
        draws,
        None,
        num_components,
        lloyd_iters + 1,
        em_iters,
        min_variance=min_variance,
        min_weight=min_weight,
    )
    return sample, mixture


def em(sample: Tensor, start: Mixture, iterations: int, min_variance: float, min_weight: float) -> Mixture:
    """EM steps on a sample (B, m, D) from a given mixture."""
    sample, start = sample.contiguous(), Mixture(*(t.contiguous() for t in start))
    return _launch(
        sample.unsqueeze(2), sample, None, start, start.weights.shape[1], 0, iterations,
        min_variance=min_variance, min_weight=min_weight,
    )  # fmt: skip


def _launch(
    points: Tensor,
    sample: Tensor,
    draws: Tensor | tuple[int, Tensor] | None,
    start: Mixture | None,
    components: int,
    hard_steps: int,
    soft_steps: int,
    *,
    min_variance: float,
    min_weight: float,
) -> Mixture:
    counted = isinstance(draws, tuple)
    plan = _plan(
        tiles.describe(points), sample.shape[1], components, hard_steps, soft_steps, min_variance, min_weight, start is None,
        counted, torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    seed, uniforms = draws if isinstance(draws, tuple) else (0, draws)
    new: Any = {"dtype": torch.float32, "device": points.device}
    batch, dim, totals = points.shape[0], points.shape[3], plan.info["totals"]
    mixture = Mixture(
        torch.empty(batch, components, **new),
        torch.empty(batch, components, dim, **new),
        torch.empty(batch, components, dim, **new),
    )
    zeros = torch.zeros(totals + batch, **new)
    scratch = (None if shape is None else torch.empty(shape, **new) for shape in plan.info["scratch"])
    given = (points, sample, uniforms, *(start or (None, None, None)))
    launch(plan, given, (*mixture, *scratch, zeros, zeros[totals:].view(torch.int32)), seed)
    return mixture


@functools.lru_cache(maxsize=PLANS)
def _plan(
    points: tiles.Described, size: int, components: int, hard_steps: int, soft_steps: int, min_variance: float,
    min_weight: float, seeded: bool, counted: bool, deterministic: bool,
) -> Plan:  # fmt: skip
    batch, outer, inner, dim = points.shape
    count = outer * inner
    candidates = fitting.num_candidates(components)
    shape = tiles.tile(points._replace(dtype=torch.float32, strides=(0, dim, dim, 1)), components, "fit")  # of the sample
    way = tiles.walk(points, shape)
    rows = shape.W * shape.R
    per_block = rows * power_of_two(cdiv(size, MAX_BLOCKS * rows))
    blocks = cdiv(size, per_block)
    programs = min(blocks, _programs_at_once(points.device) // batch) or 1
    in_order = deterministic and programs > 1
    numbers = components * (2 * dim + 1)
    constants = {
        "PATH": way.path if way.path != tiles.WITHIN else tiles.ANY,
        "ALIGN": way.align,
        "K": components,
        "K_PAD": power_of_two(components),
        "CANDIDATES": candidates,
        "CANDIDATES_PAD": power_of_two(candidates),
        "UNIFORMS": fitting.num_uniforms(components),
        "PER_BLOCK": per_block,
        "BLOCKS_PAD": power_of_two(blocks),
        "PROGRAMS_PAD": power_of_two(programs),
        "ALONE": programs == 1,
        "IN_ORDER": in_order,
        "SEEDED": seeded,
        "COUNTED": counted,
        "INTEGER": tl.int32 if 2 * size * count < 2**31 else tl.int64,
        **shape._asdict(),
    }
    if programs > 1:
        constants["launch_cooperative_grid"] = True
    return Plan(
        fit_kernel, (programs, batch),
        (size, blocks, count, inner, dim, *way[:4], hard_steps, soft_steps, min_variance, min_weight,
         reference.MIN_VARIANCE),
        constants,
        totals=(hard_steps + soft_steps) * batch * numbers,
        scratch=(
            (batch, 2, candidates, size) if seeded else None,
            (batch, 2, candidates, blocks) if seeded else None,
            (batch, programs, numbers) if in_order else None,
        ),
    )  # fmt: skip


def _programs_at_once(device: torch.device) -> int:
    """How many programs surely run at the same time. One on a CPU, where they run one after another."""
    return 1 if device.type != "cuda" else tiles.processors(device) * tiles.TUNING["fit"].per_processor
