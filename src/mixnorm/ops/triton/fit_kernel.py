"""The kernel of the fit: sample, greedy k-means++, Lloyd and EM in one launch.

The programs of a mixture share its sample and step through the phases together. Between phases they wait for one another at
a barrier in global memory, so all of them must run at once: a cooperative launch, which CUDA refuses rather than hangs on.
All programs draw the same seeds, and each keeps its own copy of the components in registers.

=========  ==============================================================================================
phase      each program, for its own blocks of points
=========  ==============================================================================================
start      copies its points from the tensor; squared distances to the first seed
K - 1 ×    chooses the best candidate of the last round, draws the next, squared distances to those
L times    nearest center, sums; then all compute the new centers
once       nearest center, sums; the means and variances of the clusters
E times    responsibilities, sums; means and variances
=========  ==============================================================================================

The sums over the programs are atomic additions. In PyTorch's deterministic mode they are added in order instead, which takes
one more barrier a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mixnorm.ops.triton.em import add_sums, load_components, nearest, posteriors, scaled_distances, tables
from mixnorm.ops.triton.tiles import (
    channels,
    channels_of_rows,
    load_tile,
    no_sums,
    over_channels,
    over_width,
    row_offsets,
    tall,
    wide,
)

_ARRIVE = tl.constexpr(
    """{
    .reg .pred first;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first red.release.gpu.global.add.s32 [$1], 1;
    mov.u32 $0, 0;
    }"""
)


# One thread looks for all: more of them would only be in the way of those that still arrive.
_POLL = tl.constexpr(
    """{
    .reg .pred other, early;
    .reg .u32 thread;
    .reg .s32 seen;
    mov.u32 thread, %tid.x;
    setp.ne.u32 other, thread, 0;
    @other bra DONE;
    AGAIN:
    ld.acquire.gpu.global.s32 seen, [$1];
    setp.lt.s32 early, seen, $2;
    @early bra AGAIN;
    DONE:
    mov.u32 $0, 0;
    }"""
)


@triton.jit
def _wait(barrier_ptr, arrivals, ALONE: tl.constexpr):
    """Waits until ``arrivals`` programs have come here in all; what they wrote before can then be read."""
    tl.debug_barrier()
    if not ALONE:
        tl.inline_asm_elementwise(_ARRIVE, "=r,l", [barrier_ptr], tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise(_POLL, "=r,l,r", [barrier_ptr, arrivals], tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()


@triton.jit
def _uniform(i, draws_ptr, seed, exists, COUNTED: tl.constexpr):
    """The i-th random number of this fit; with COUNTED, of the stream that the seed and the counter name."""
    if COUNTED:
        return tl.rand(seed + tl.load(draws_ptr), i)
    else:
        return tl.load(draws_ptr + i, mask=exists, other=0.0)


@triton.jit
def _source(number, draws_ptr, seed, size, count, COUNTED: tl.constexpr, INTEGER: tl.constexpr):
    """Which point of the tensor is the sample's, as in ``ops.fit.sample_indices``: a random one of its stretch."""
    u = _uniform(size, draws_ptr, seed, True, COUNTED).to(tl.float64)
    begin = tl.where(count % size == 0, 0.0, u * size * count).to(INTEGER)
    before = number.to(INTEGER) * count + begin
    first = before // size
    length = (before + count) // size - first
    jitter = (_uniform(number, draws_ptr, seed, number < size, COUNTED) * length.to(tl.float32)).to(INTEGER)
    place = first + tl.minimum(jitter, length - 1)
    return tl.where(place < count, place, place - count).to(tl.int32)


@triton.jit
def _own_tile(block, part, size, PER_BLOCK: tl.constexpr, W: tl.constexpr, R: tl.constexpr):
    """The numbers (W, R) in the sample of a tile's points, and which of them exist."""
    points = block * PER_BLOCK + part * (W * R) + tl.arange(0, W)[:, None] + tl.arange(0, R)[None, :] * W
    return points, points < size


@triton.jit
def _draw(u, block_sums_ptr, remaining_ptr, size, blocks, PER_BLOCK: tl.constexpr, BLOCKS_PAD: tl.constexpr):
    """Points with probability proportional to their squared distance, one for each u: first the block, then the place."""
    i = tl.arange(0, BLOCKS_PAD)
    sums = tl.load(block_sums_ptr + i, mask=i < blocks, other=0.0).to(tl.float64)
    target = u.to(tl.float64) * tl.sum(sums, axis=0)
    passed = (tl.cumsum(sums, axis=0)[None, :] <= target[:, None]) & (i < blocks)[None, :]
    # Rounding must not lead past the last block or point that has any distance, to a point that is a seed already.
    last = tl.max(tl.where(sums > 0, i, 0), axis=0)
    block = tl.minimum(tl.sum(passed.to(tl.int32), axis=1), last)
    within = target - tl.sum(tl.where(i[None, :] < block[:, None], sums[None, :], 0.0), axis=1)
    j = tl.arange(0, PER_BLOCK)
    places = block[:, None] * PER_BLOCK + j[None, :]
    squares = tl.load(remaining_ptr + places, mask=places < size, other=0.0).to(tl.float64)
    passed = (tl.cumsum(squares, axis=1) <= within[:, None]) & (places < size)
    last = tl.max(tl.where(squares > 0, j[None, :], 0), axis=1)
    return block * PER_BLOCK + tl.minimum(tl.sum(passed.to(tl.int32), axis=1), last)


@triton.jit
def _pick(vector, place, PAD: tl.constexpr):
    """One number of a vector."""
    return tl.sum(tl.where(tl.arange(0, PAD) == place, vector, 0), axis=0)


@triton.jit
def _add_up(partial_ptr, totals_ptr, numbers, program, programs, PROGRAMS_PAD: tl.constexpr):
    """Adds the programs' partial sums in order; each program a few of the numbers."""
    COLUMNS: tl.constexpr = 16
    g = tl.arange(0, PROGRAMS_PAD)
    for start in range(program * COLUMNS, numbers, programs * COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = (g < programs)[:, None] & (column < numbers)[None, :]
        values = tl.load(partial_ptr + g[:, None] * numbers + column[None, :], mask=mask, other=0.0)
        tl.store(totals_ptr + column, tl.sum(values, axis=0), mask=column < numbers)


@triton.jit(do_not_specialize=["seed"])
def fit_kernel(
    x_ptr,  # (B, outer, inner, D)
    sample_ptr,  # (B, s, D), written if SEEDED
    draws_ptr,  # (s + 1 + B·UNIFORMS,), or one counter if COUNTED
    start_weights_ptr,  # (B, K), unless SEEDED
    start_means_ptr,  # (B, K, D)
    start_variances_ptr,  # (B, K, D)
    weights_ptr,  # (B, K), written
    means_ptr,  # (B, K, D), written
    variances_ptr,  # (B, K, D), written
    remaining_ptr,  # (B, 2, CANDIDATES, s): squared distances to the nearest seed by candidate, of this round and the last
    block_sums_ptr,  # (B, 2, CANDIDATES, blocks)
    partial_ptr,  # (B, G, K·(1 + 2·D)) if IN_ORDER
    totals_ptr,  # (steps, B, K·(1 + 2·D)) zeros: Σν, Σν·t, Σν·t²
    barrier_ptr,  # (B,) zeros
    seed,
    size,
    blocks,
    m,
    inner,
    dim,
    x_b,
    x_o,
    x_i,
    x_d,
    hard_steps,
    soft_steps,
    min_variance,
    min_weight,
    floor,
    PATH: tl.constexpr,
    ALIGN: tl.constexpr,
    K: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CANDIDATES_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    UNIFORMS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    PROGRAMS_PAD: tl.constexpr,
    ALONE: tl.constexpr,
    IN_ORDER: tl.constexpr,
    SEEDED: tl.constexpr,
    COUNTED: tl.constexpr,
    INTEGER: tl.constexpr,  # the type that counts stretches of points
    W: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    V: tl.constexpr,
    BY_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program, programs, b = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    d = channels(S, V)
    if x_ptr.dtype.element_ty != tl.float32:
        d = channels_of_rows(W, S, V, BY_ROWS)
    numbers = K * (1 + 2 * dim)
    sample_ptr += b * size * dim
    totals_ptr += b * numbers
    barrier_ptr += b
    arrivals = programs

    if SEEDED:
        x_ptr += b * x_b
        remaining_ptr += b * 2 * CANDIDATES * size
        block_sums_ptr += b * 2 * CANDIDATES * blocks
        uniforms = size + 1 + tl.program_id(1) * UNIFORMS

        # Start: the sample, and the distances to its first seed.
        chosen = tl.minimum((_uniform(uniforms, draws_ptr, seed, True, COUNTED) * size).to(tl.int32), size - 1)
        first = _source(chosen, draws_ptr, seed, size, m, COUNTED, INTEGER)
        first = row_offsets(0, first, inner, x_o, x_i, PATH, ALIGN, W, R)
        center = tl.load(x_ptr + first + d * x_d, mask=d < dim, other=0.0).to(tl.float32)
        for block in range(program, blocks, programs):
            total = tl.zeros((W,), tl.float32)
            for part in range(PER_BLOCK // (W * R)):
                points, exists = _own_tile(block, part, size, PER_BLOCK, W, R)
                source = _source(points, draws_ptr, seed, size, m, COUNTED, INTEGER)
                x = load_tile(x_ptr, row_offsets(0, source, inner, x_o, x_i, PATH, ALIGN, W, R), exists, d, dim, x_d)
                pointers = sample_ptr + tall(points.to(tl.int64)) * dim + wide(d)
                tl.store(pointers, x, mask=tall(exists) & wide(d < dim))
                difference = x - wide(center)
                squares = tl.where(exists, over_channels(difference * difference), 0.0)
                tl.store(remaining_ptr + points, squares, mask=exists)
                total += tl.sum(squares, axis=1)
            tl.store(block_sums_ptr + block, tl.sum(total, axis=0))
        _wait(barrier_ptr, arrivals, ALONE)
        arrivals += programs

        # k-means++: a round draws from the distances that the last round's best candidate left.
        seeds = tl.where(tl.arange(0, K_PAD) == 0, chosen, 0)
        c = tl.arange(0, CANDIDATES_PAD)
        best = 0
        for turn in range(1, K):
            old, now = ((turn - 1) % 2) * CANDIDATES + best, (turn % 2) * CANDIDATES
            i = uniforms + 1 + (turn - 1) * CANDIDATES + c
            u = _uniform(i, draws_ptr, seed, c < CANDIDATES, COUNTED)
            drawn = _draw(u, block_sums_ptr + old * blocks, remaining_ptr + old * size, size, blocks, PER_BLOCK, BLOCKS_PAD)
            candidate = ()
            for j in tl.static_range(CANDIDATES):
                row = _pick(drawn, j, CANDIDATES_PAD).to(tl.int64) * dim
                candidate = candidate + (tl.load(sample_ptr + row + d, mask=d < dim, other=0.0),)
            for block in range(program, blocks, programs):
                total = ()
                for _ in tl.static_range(CANDIDATES):
                    total = total + (tl.zeros((W,), tl.float32),)
                for part in range(PER_BLOCK // (W * R)):
                    points, exists = _own_tile(block, part, size, PER_BLOCK, W, R)
                    x = load_tile(sample_ptr, points.to(tl.int64) * dim, exists, d, dim, 1)
                    closest = tl.load(remaining_ptr + old * size + points, mask=exists, other=0.0)
                    new_total = ()
                    for j in tl.static_range(CANDIDATES):
                        difference = x - wide(candidate[j])
                        squares = tl.where(exists, tl.minimum(closest, over_channels(difference * difference)), 0.0)
                        tl.store(remaining_ptr + (now + j) * size + points, squares, mask=exists)
                        new_total = new_total + (total[j] + tl.sum(squares, axis=1),)
                    total = new_total
                for j in tl.static_range(CANDIDATES):
                    tl.store(block_sums_ptr + (now + j) * blocks + block, tl.sum(total[j], axis=0))
            _wait(barrier_ptr, arrivals, ALONE)
            arrivals += programs
            every = tl.arange(0, BLOCKS_PAD)[None, :]
            pointers = block_sums_ptr + (now + c)[:, None] * blocks + every
            left = tl.load(pointers, mask=(c < CANDIDATES)[:, None] & (every < blocks), other=0.0).to(tl.float64)
            left = tl.where(c < CANDIDATES, tl.sum(left, axis=1), float("inf"))
            best = tl.argmin(left, axis=0)
            seeds = tl.where(tl.arange(0, K_PAD) == turn, _pick(drawn, best, CANDIDATES_PAD), seeds)

        weights, means, variances = (), (), ()
        for k in tl.static_range(K):
            row = _pick(seeds, k, K_PAD).to(tl.int64) * dim
            weights = weights + (tl.full((), 1.0 / K, tl.float32),)
            means = means + (tl.load(sample_ptr + row + d, mask=d < dim, other=0.0),)
            variances = variances + (tl.full(d.shape, 1.0, tl.float32),)
    else:
        start = b * K
        weights, means, variances = load_components(
            start_weights_ptr + start, start_means_ptr + start * dim, start_variances_ptr + start * dim, d, dim, K
        )

    # Lloyd, the statistics of the clusters, EM: the same sums, with hard or soft responsibilities.
    for step in range(hard_steps + soft_steps):
        inverse, constant = tables(weights, variances, d, dim, floor, K)
        count, sum1, sum2 = (), (), ()
        for _ in tl.static_range(K):
            count = count + (tl.zeros((W,), tl.float32),)
            sum1 = sum1 + (no_sums(W, S, V, BY_ROWS),)
            sum2 = sum2 + (no_sums(W, S, V, BY_ROWS),)
        for block in range(program, blocks, programs):
            for part in range(PER_BLOCK // (W * R)):
                points, exists = _own_tile(block, part, size, PER_BLOCK, W, R)
                x = load_tile(sample_ptr, points.to(tl.int64) * dim, exists, d, dim, 1)
                scaled, squares = scaled_distances(x, means, inverse, K)
                if step < hard_steps:
                    resp = nearest(squares, exists, K)
                else:
                    resp = posteriors(squares, constant, exists, K)
                count, sum1, sum2 = add_sums(count, sum1, sum2, resp, scaled, K, BY_ROWS)
        step_ptr = totals_ptr + step * tl.num_programs(1) * numbers
        column = channels(S, V)
        for k in tl.static_range(K):
            of_count = tl.sum(count[k], axis=0)
            of_sum1, of_sum2 = over_width(sum1[k], BY_ROWS), over_width(sum2[k], BY_ROWS)
            place = K + k * dim + column
            if IN_ORDER:
                own_ptr = partial_ptr + (b * programs + program) * numbers
                tl.store(own_ptr + k, of_count)
                tl.store(own_ptr + place, of_sum1, mask=column < dim)
                tl.store(own_ptr + place + K * dim, of_sum2, mask=column < dim)
            elif ALONE:
                tl.store(step_ptr + k, of_count)
                tl.store(step_ptr + place, of_sum1, mask=column < dim)
                tl.store(step_ptr + place + K * dim, of_sum2, mask=column < dim)
            else:
                tl.atomic_add(step_ptr + k, of_count, sem="relaxed")
                tl.atomic_add(step_ptr + place, of_sum1, mask=column < dim, sem="relaxed")
                tl.atomic_add(step_ptr + place + K * dim, of_sum2, mask=column < dim, sem="relaxed")
        _wait(barrier_ptr, arrivals, ALONE)
        arrivals += programs
        if IN_ORDER:
            _add_up(partial_ptr + b * programs * numbers, step_ptr, numbers, program, programs, PROGRAMS_PAD)
            _wait(barrier_ptr, arrivals, ALONE)
            arrivals += programs

        new_weights, new_means, new_variances = (), (), ()
        for k in tl.static_range(K):
            total = tl.load(step_ptr + k)
            place = K + k * dim + d
            mean_t = tl.load(step_ptr + place, mask=d < dim, other=0.0) / total
            var_t = tl.load(step_ptr + place + K * dim, mask=d < dim, other=0.0) / total - mean_t * mean_t
            old_variance = tl.maximum(variances[k], floor)
            # An empty cluster stays where it is.
            mean = tl.where(total == 0, means[k], means[k] + tl.sqrt(old_variance) * mean_t)
            variance = tl.where(total == 0, 0.0, old_variance * var_t)
            # Lloyd's iterations move the centers alone.
            only_means = step + 1 < hard_steps
            variance = tl.where(only_means, 1.0, tl.maximum(variance, min_variance, tl.PropagateNan.ALL))
            new_weights = new_weights + (total / size,)
            new_means = new_means + (mean,)
            new_variances = new_variances + (variance,)
        weights, means, variances = new_weights, new_means, new_variances

    # Components under min_weight are dropped; program k writes the k-th.
    largest = weights[0]
    for k in tl.static_range(1, K):
        largest = tl.maximum(largest, weights[k], tl.PropagateNan.ALL)
    least = tl.minimum(largest, min_weight, tl.PropagateNan.ALL)
    kept = tl.where(weights[0] >= least, weights[0], 0.0)
    for k in tl.static_range(1, K):
        kept += tl.where(weights[k] >= least, weights[k], 0.0)
    for k in tl.static_range(K):
        if k % programs == program:
            keep = weights[k] >= least
            place = (b * K + k) * dim + d
            tl.store(weights_ptr + b * K + k, tl.where(keep, weights[k], 0.0) / kept)
            tl.store(means_ptr + place, tl.where(keep, means[k], 0.0), mask=d < dim)
            tl.store(variances_ptr + place, tl.where(keep, variances[k], 0.0), mask=d < dim)
