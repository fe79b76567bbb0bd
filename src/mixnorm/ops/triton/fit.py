"""The fit in one launch: sample, greedy k-means++, Lloyd and EM: ``reference_fit.fit``.

The programs of a mixture share its sample and step through the phases together. Between phases they wait for one another at
a barrier in global memory, so all of them must run at once: a cooperative launch, which CUDA refuses rather than hangs on.
Every sum over the sample is added up in a fixed order, and every program draws the same numbers.

=========  ==============================================================================================
phase      each program, for its own blocks of points
=========  ==============================================================================================
start      copies its points from the tensor; squared distances to the first seed
K - 1 ×    chooses the best candidate of the last round, draws the next, squared distances to those
L times    nearest center; sums; then, a slice of the channels each, the new centers
once       nearest center; sums; the means and variances of the clusters
E times    responsibilities; sums; means and variances
=========  ==============================================================================================
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixnorm.ops import reference, reference_fit
from mixnorm.ops.triton import tiles
from mixnorm.ops.triton.em import add_sums, nearest, posteriors, scaled_distances, tables
from mixnorm.ops.triton.tiles import load_tile, no_sums, over_width, row_offsets

Statistics = tuple[Tensor, Tensor, Tensor]
MAX_BLOCKS = 4096  # of points; a program adds up their sums at once


def fit(
    points: Tensor,
    size: int,
    draws: Tensor,
    num_components: int,
    *,
    lloyd_iters: int,
    em_iters: int,
    min_variance: float,
    min_weight: float,
) -> tuple[Tensor, Statistics]:
    """``size`` of the points (B, outer, inner, D) as a sample (B, size, D), and its mixture.

    ``draws`` are the uniform numbers of :func:`mixnorm.gmm.draw`.
    """
    if num_components == 1:  # nothing to seed and nothing to iterate
        lloyd_iters = em_iters = 0
    batch, _, _, dim = points.shape
    mixture = _new_mixture(points, batch, num_components)
    sample = torch.empty(batch, size, dim, dtype=torch.float32, device=points.device)
    _launch(
        points, sample, draws, mixture, lloyd_iters, em_iters, min_variance, min_weight,
        candidates=reference_fit.num_candidates(num_components), seeded=True,
    )  # fmt: skip
    return sample, mixture


def em(
    sample: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    *,
    iterations: int,
    min_variance: float,
    min_weight: float,
) -> Statistics:
    """EM steps on a sample (B, m, D) from a given mixture."""
    mixture = (weights.clone(), means.clone(), variances.clone())
    _launch(
        sample.unsqueeze(2), sample, None, mixture, 0, iterations, min_variance, min_weight, candidates=1, seeded=False
    )
    return mixture


def _new_mixture(points: Tensor, batch: int, components: int) -> Statistics:
    shape = (batch, components, points.shape[-1])
    weights, means, variances = (torch.empty(s, dtype=torch.float32, device=points.device) for s in (shape[:2], shape, shape))
    return weights, means, variances


def _launch(
    points: Tensor,
    sample: Tensor,
    draws: Tensor | None,
    mixture: Statistics,
    lloyd_iters: int,
    em_iters: int,
    min_variance: float,
    min_weight: float,
    *,
    candidates: int,
    seeded: bool,
) -> None:
    batch, size, dim = sample.shape
    count = points.shape[1] * points.shape[2]
    components = mixture[0].shape[1]
    shape = tiles.tile(sample, 2 * components, rows_at_once=1)
    rows = max(1, min(8, 32 // shape.W)) if shape.BLOCK_D <= 256 else 2
    shape = shape._replace(R=rows)
    way = tiles.walk(points, shape)
    per_block = shape.W * shape.R * max(1, triton.next_power_of_2(triton.cdiv(size, MAX_BLOCKS * shape.W * shape.R)))
    blocks = triton.cdiv(size, per_block)
    programs = min(blocks, _programs_at_once(points.device) // batch) or 1
    new = {"dtype": torch.float32, "device": points.device}
    stride = count // size
    with tiles.on_device(points):
        _fit[(programs, batch)](
            points, sample, draws, *mixture,
            torch.empty(batch, 2, candidates, size, **new),
            torch.empty(batch, 2, candidates, blocks, **new),
            torch.empty(batch, programs, components, **new),
            torch.empty(batch, programs, 2, components, dim, **new),
            torch.empty(batch, components, dim, **new),
            torch.zeros(batch, dtype=torch.int32, device=points.device) if programs > 1 else None,
            size, blocks, stride, count - size * stride, points.shape[2], dim,
            *way[:4], lloyd_iters, em_iters, min_variance, min_weight, reference.MIN_VARIANCE,
            PATH=way.path if way.path != tiles.WITHIN else tiles.ANY, ALIGN=way.align,
            K=components, CANDIDATES=candidates, UNIFORMS=reference_fit.num_uniforms(components),
            W=shape.W, R=shape.R, BLOCK_D=shape.BLOCK_D, PER_BLOCK=per_block,
            BLOCKS_PAD=triton.next_power_of_2(blocks), PROGRAMS_PAD=triton.next_power_of_2(programs),
            ALONE=programs == 1, SEEDED=seeded, num_warps=shape.num_warps,
            **({"launch_cooperative_grid": True} if programs > 1 else {}),
        )  # fmt: skip


@functools.cache
def _programs_at_once(device: torch.device) -> int:
    """How many programs surely run at the same time. One on a CPU, where they run one after another."""
    return 1 if device.type != "cuda" else tiles.processors(device)


@triton.jit
def _wait(barrier_ptr, arrived, ALONE: tl.constexpr):
    """Waits until ``arrived`` programs have come here in all; what they wrote before can then be read."""
    tl.debug_barrier()
    if not ALONE:
        tl.atomic_add(barrier_ptr, 1, sem="acq_rel", scope="gpu")
        while tl.atomic_add(barrier_ptr, 0, sem="acquire", scope="gpu") < arrived:
            pass
        tl.debug_barrier()


@triton.jit
def _source(sample_index, draws_ptr, size, stride, rest):
    """Which point of the tensor is the sample's i-th: a random one of each stretch of equal length."""
    jitter = (tl.load(draws_ptr + sample_index, mask=sample_index < size, other=0.0) * stride).to(tl.int32)
    offset = (tl.load(draws_ptr + size) * (rest + 1)).to(tl.int32)
    return sample_index * stride + tl.minimum(jitter, stride - 1) + tl.minimum(offset, rest)


@triton.jit
def _own_tile(block, part, size, PER_BLOCK: tl.constexpr, W: tl.constexpr, R: tl.constexpr):
    """The numbers (W, R) in the sample of a tile's points, and which of them exist."""
    points = block * PER_BLOCK + part * (W * R) + tl.arange(0, W)[:, None] + tl.arange(0, R)[None, :] * W
    return points, points < size


@triton.jit
def _fit(
    x_ptr,  # (B, outer, inner, D)
    sample_ptr,  # (B, s, D), written if SEEDED
    draws_ptr,  # (s + 1 + B·UNIFORMS,)
    weights_ptr,  # (B, K), written
    means_ptr,  # (B, K, D), written
    variances_ptr,  # (B, K, D), written
    remaining_ptr,  # (B, 2, CANDIDATES, s): squared distances to the nearest seed, by candidate, of this round and the last
    block_sums_ptr,  # (B, 2, CANDIDATES, blocks)
    counts_ptr,  # (B, G, K)
    sums_ptr,  # (B, G, 2, K, D)
    scales_ptr,  # (B, K, D): the variances that distances are measured by
    barrier_ptr,  # (B,) zeros
    size,
    blocks,
    stretch,
    rest,
    inner,
    dim,
    x_b,
    x_o,
    x_i,
    x_d,
    lloyd_iters,
    em_iters,
    min_variance,
    min_weight,
    floor,
    PATH: tl.constexpr,
    ALIGN: tl.constexpr,
    K: tl.constexpr,
    CANDIDATES: tl.constexpr,
    UNIFORMS: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    PROGRAMS_PAD: tl.constexpr,
    ALONE: tl.constexpr,
    SEEDED: tl.constexpr,
):
    program, programs, b = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    x_ptr += b * x_b
    sample_ptr += b * size * dim
    weights_ptr += b * K
    means_ptr += b * K * dim
    variances_ptr += b * K * dim
    scales_ptr += b * K * dim
    remaining_ptr += b * 2 * CANDIDATES * size
    block_sums_ptr += b * 2 * CANDIDATES * blocks
    counts_ptr += b * programs * K
    sums_ptr += b * programs * 2 * K * dim
    if not ALONE:
        barrier_ptr += b
    arrived = programs

    if SEEDED:
        uniforms_ptr = draws_ptr + size + 1 + b * UNIFORMS
        # Start: the sample, and the distances to its first seed.
        seed = tl.minimum((tl.load(uniforms_ptr) * size).to(tl.int32), size - 1)
        first = _source(seed, draws_ptr, size, stretch, rest)
        first_offset = row_offsets(0, first, inner, x_o, x_i, PATH, ALIGN, W, R)
        center = tl.load(x_ptr + first_offset + d * x_d, mask=d < dim, other=0.0).to(tl.float32)
        for block in range(program, blocks, programs):
            total = tl.zeros((W,), tl.float32)
            for part in range(PER_BLOCK // (W * R)):
                points, exists = _own_tile(block, part, size, PER_BLOCK, W, R)
                source = _source(points, draws_ptr, size, stretch, rest)
                offsets = row_offsets(0, source, inner, x_o, x_i, PATH, ALIGN, W, R)
                x = load_tile(x_ptr, offsets, exists, d, dim, x_d)
                pointers = sample_ptr + points.to(tl.int64)[:, :, None] * dim + d[None, None, :]
                tl.store(pointers, x, mask=exists[:, :, None] & (d < dim)[None, None, :])
                difference = x - center[None, None, :]
                squares = tl.where(exists, tl.sum(difference * difference, axis=2), 0.0)
                tl.store(remaining_ptr + points, squares, mask=exists)
                total += tl.sum(squares, axis=1)
            tl.store(block_sums_ptr + block, tl.sum(total, axis=0))
        _wait(barrier_ptr, arrived, ALONE)
        arrived += programs

        # k-means++: a round draws from the distances that the last round's best candidate left.
        if program == 0:
            tl.store(means_ptr + d, center, mask=d < dim)
        best = 0
        for k in range(1, K):
            old = ((k - 1) % 2) * CANDIDATES + best
            now = (k % 2) * CANDIDATES
            drawn = ()
            for c in tl.static_range(CANDIDATES):
                u = tl.load(uniforms_ptr + 1 + (k - 1) * CANDIDATES + c)
                drawn = drawn + (
                    _draw(u, block_sums_ptr + old * blocks, remaining_ptr + old * size, size, blocks, PER_BLOCK, BLOCKS_PAD),
                )
            for block in range(program, blocks, programs):
                total = ()
                for _ in tl.static_range(CANDIDATES):
                    total = total + (tl.zeros((W,), tl.float32),)
                for part in range(PER_BLOCK // (W * R)):
                    points, exists = _own_tile(block, part, size, PER_BLOCK, W, R)
                    x = load_tile(sample_ptr, points.to(tl.int64) * dim, exists, d, dim, 1)
                    closest = tl.load(remaining_ptr + old * size + points, mask=exists, other=0.0)
                    new_total = ()
                    for c in tl.static_range(CANDIDATES):
                        candidate = tl.load(sample_ptr + drawn[c].to(tl.int64) * dim + d, mask=d < dim, other=0.0)
                        difference = x - candidate[None, None, :]
                        squares = tl.where(exists, tl.minimum(closest, tl.sum(difference * difference, axis=2)), 0.0)
                        tl.store(remaining_ptr + (now + c) * size + points, squares, mask=exists)
                        new_total = new_total + (total[c] + tl.sum(squares, axis=1),)
                    total = new_total
                for c in tl.static_range(CANDIDATES):
                    tl.store(block_sums_ptr + (now + c) * blocks + block, tl.sum(total[c], axis=0))
            _wait(barrier_ptr, arrived, ALONE)
            arrived += programs
            best = 0
            least = _sum(block_sums_ptr + now * blocks, blocks, BLOCKS_PAD)
            chosen = drawn[0]
            for c in tl.static_range(1, CANDIDATES):
                left = _sum(block_sums_ptr + (now + c) * blocks, blocks, BLOCKS_PAD)
                better = left < least
                best = tl.where(better, c, best)
                chosen = tl.where(better, drawn[c], chosen)
                least = tl.where(better, left, least)
            # The centers are read after the next barrier only, and by their program before.
            if program == 0:
                row = tl.load(sample_ptr + chosen.to(tl.int64) * dim + d, mask=d < dim, other=0.0)
                tl.store(means_ptr + k * dim + d, row, mask=d < dim)
        for flat in range(program * BLOCK_D, K * dim, programs * BLOCK_D):
            tl.store(scales_ptr + flat + d, tl.full((BLOCK_D,), 1.0, tl.float32), mask=flat + d < K * dim)
        if program == 0:
            for k in tl.static_range(K):
                tl.store(weights_ptr + k, 1.0)
        _wait(barrier_ptr, arrived, ALONE)
        arrived += programs
    else:
        for flat in range(program * BLOCK_D, K * dim, programs * BLOCK_D):
            variance = tl.load(variances_ptr + flat + d, mask=flat + d < K * dim, other=1.0)
            tl.store(scales_ptr + flat + d, variance, mask=flat + d < K * dim)
        _wait(barrier_ptr, arrived, ALONE)
        arrived += programs

    # Lloyd, the statistics of the clusters, EM: the same sums, with hard or soft responsibilities.
    hard_steps = 0
    if SEEDED:
        hard_steps = lloyd_iters + 1
    steps = hard_steps + em_iters
    for step in range(steps):
        hard = step < hard_steps
        anchor, inverse, shift, constant = tables(weights_ptr, means_ptr, scales_ptr, d, dim, floor, K)
        count, first_sum, second_sum = (), (), ()
        for _ in tl.static_range(K):
            count = count + (tl.zeros((W,), tl.float32),)
            first_sum = first_sum + (no_sums(W, BLOCK_D, True),)
            second_sum = second_sum + (no_sums(W, BLOCK_D, True),)
        for block in range(program, blocks, programs):
            for part in range(PER_BLOCK // (W * R)):
                points, exists = _own_tile(block, part, size, PER_BLOCK, W, R)
                centred = load_tile(sample_ptr, points.to(tl.int64) * dim, exists, d, dim, 1) - anchor[None, None, :]
                scaled, squares = scaled_distances(centred, inverse, shift, K)
                if hard:
                    resp = nearest(squares, exists, K)
                else:
                    resp = posteriors(squares, constant, exists, K)
                count, first_sum, second_sum = add_sums(count, first_sum, second_sum, resp, scaled, K, True)
        for k in tl.static_range(K):
            tl.store(counts_ptr + program * K + k, tl.sum(count[k], axis=0))
            row = (program * 2 * K + k) * dim + d
            tl.store(sums_ptr + row, over_width(first_sum[k], True), mask=d < dim)
            tl.store(sums_ptr + row + K * dim, over_width(second_sum[k], True), mask=d < dim)
        _wait(barrier_ptr, arrived, ALONE)
        arrived += programs
        # Lloyd moves the centers alone.
        only_means = step + 1 < hard_steps
        _new_components(
            weights_ptr, means_ptr, variances_ptr, scales_ptr, counts_ptr, sums_ptr, program, programs, size, dim,
            only_means, min_variance, floor, K, PROGRAMS_PAD,
        )  # fmt: skip
        _wait(barrier_ptr, arrived, ALONE)
        arrived += programs
    _prune(weights_ptr, means_ptr, variances_ptr, program, programs, dim, d, min_weight, barrier_ptr, arrived, K, ALONE)


@triton.jit
def _sum(ptr, count, PAD: tl.constexpr):
    i = tl.arange(0, PAD)
    return tl.sum(tl.load(ptr + i, mask=i < count, other=0.0).to(tl.float64), axis=0)


@triton.jit
def _draw(u, block_sums_ptr, remaining_ptr, size, blocks, PER_BLOCK: tl.constexpr, BLOCKS_PAD: tl.constexpr):
    """A point with probability proportional to its squared distance: first its block, then its place there."""
    i = tl.arange(0, BLOCKS_PAD)
    sums = tl.load(block_sums_ptr + i, mask=i < blocks, other=0.0).to(tl.float64)
    upto = tl.cumsum(sums, axis=0)
    target = u.to(tl.float64) * tl.sum(sums, axis=0)
    # The last block or point that has any distance: rounding must not lead past it, to a point that is a seed already.
    last = tl.max(tl.where(sums > 0, i, 0), axis=0)
    block = tl.minimum(tl.sum(((upto <= target) & (i < blocks)).to(tl.int32), axis=0), last)
    within = target - tl.sum(tl.where(i < block, sums, 0.0), axis=0)
    j = tl.arange(0, PER_BLOCK)
    exists = block * PER_BLOCK + j < size
    squares = tl.load(remaining_ptr + block * PER_BLOCK + j, mask=exists, other=0.0).to(tl.float64)
    upto = tl.cumsum(squares, axis=0)
    last = tl.max(tl.where(squares > 0, j, 0), axis=0)
    return block * PER_BLOCK + tl.minimum(tl.sum(((upto <= within) & exists).to(tl.int32), axis=0), last)


@triton.jit
def _new_components(
    weights_ptr,
    means_ptr,
    variances_ptr,
    scales_ptr,
    counts_ptr,
    sums_ptr,
    program,
    programs,
    size,
    dim,
    only_means,
    min_variance,
    floor,
    K: tl.constexpr,
    PROGRAMS_PAD: tl.constexpr,
):
    """λ, μ and σ² from the programs' sums; each program does some channels of all components."""
    COLUMNS: tl.constexpr = 8
    g = tl.arange(0, PROGRAMS_PAD)
    parts = tl.cdiv(dim, COLUMNS)
    for part in range(program, K * parts, programs):
        k = part // parts
        column = (part % parts) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.sum(tl.load(counts_ptr + g * K + k, mask=g < programs, other=0.0), axis=0)
        mask = (g < programs)[:, None] & (column < dim)[None, :]
        pointers = sums_ptr + (g[:, None] * 2 * K + k) * dim + column[None, :]
        mean_t = tl.sum(tl.load(pointers, mask=mask, other=0.0), axis=0) / total
        var_t = tl.sum(tl.load(pointers + K * dim, mask=mask, other=0.0), axis=0) / total - mean_t * mean_t
        row = k * dim + column
        scale = tl.maximum(tl.load(scales_ptr + row, mask=column < dim, other=1.0), floor)
        mean = tl.load(means_ptr + row, mask=column < dim, other=0.0)
        empty = total == 0  # an empty cluster stays where it is
        tl.store(means_ptr + row, tl.where(empty, mean, mean + tl.sqrt(scale) * mean_t), mask=column < dim)
        variance = tl.maximum(tl.where(empty, 0.0, scale * var_t), min_variance, tl.PropagateNan.ALL)
        tl.store(variances_ptr + row, variance, mask=column < dim)
        tl.store(scales_ptr + row, tl.where(only_means, 1.0, variance), mask=column < dim)
        if part % parts == 0:
            tl.store(weights_ptr + k, tl.where(only_means, 1.0, total / size))


@triton.jit
def _prune(
    weights_ptr,
    means_ptr,
    variances_ptr,
    program,
    programs,
    dim,
    d,
    min_weight,
    barrier_ptr,
    arrived,
    K: tl.constexpr,
    ALONE: tl.constexpr,
):
    """Drops the components under ``min_weight``; each program the components of its number."""
    largest = tl.load(weights_ptr)
    for k in tl.static_range(1, K):
        largest = tl.maximum(largest, tl.load(weights_ptr + k), tl.PropagateNan.ALL)
    least = tl.minimum(largest, min_weight, tl.PropagateNan.ALL)
    kept = 0.0
    for k in tl.static_range(K):
        weight = tl.load(weights_ptr + k)
        kept += tl.where(weight >= least, weight, 0.0)
    for k in tl.static_range(K):
        if k % programs == program:
            keep = tl.load(weights_ptr + k) >= least
            row = k * dim + d
            mean = tl.load(means_ptr + row, mask=d < dim, other=0.0)
            variance = tl.load(variances_ptr + row, mask=d < dim, other=0.0)
            tl.store(means_ptr + row, tl.where(keep, mean, 0.0), mask=d < dim)
            tl.store(variances_ptr + row, tl.where(keep, variance, 0.0), mask=d < dim)
    # The weights are read by all, and written when all have read them.
    _wait(barrier_ptr, arrived, ALONE)
    if program == 0:
        for k in tl.static_range(K):
            weight = tl.load(weights_ptr + k)
            tl.store(weights_ptr + k, tl.where(weight >= least, weight, 0.0) / kept)
