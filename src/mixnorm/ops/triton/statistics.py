"""ν of every point and the statistics of the whole batch under it, in one read of the tensor: ``reference.em_step``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixnorm.ops import reference
from mixnorm.ops.triton import tiles
from mixnorm.ops.triton.em import add_sums, posteriors, scaled_distances, tables
from mixnorm.ops.triton.tiles import load_tile, no_sums, over_width, row_offsets, rows_of_tile

Statistics = tuple[Tensor, Tensor, Tensor]


def em_step(points: Tensor, mixture: Statistics) -> tuple[Tensor, Statistics]:
    """ν (B, m, K) under the mixture, and λ (B, K), μ and σ² (B, K, D) of the points under that ν."""
    batch, outer, inner, dim = points.shape
    components = mixture[0].shape[1]
    shape = tiles.tile(points, 2 * components, rows_at_once=2)
    way = tiles.walk(points, shape)
    count = tiles.programs(points, shape.W * shape.R, per_processor=4)
    # Component by component, so that neighbouring points lie side by side.
    resp = torch.empty(batch, components, outer * inner, dtype=torch.float32, device=points.device).mT
    counts = torch.empty(batch, count, components, dtype=torch.float32, device=points.device)
    sums = torch.empty(batch, count, 2, components, dim, dtype=torch.float32, device=points.device)
    weights, means, variances = (t.contiguous() for t in mixture)
    result = tuple(torch.empty_like(t) for t in (weights, means, variances))
    with tiles.on_device(points):
        _em_step[(count, batch)](
            points, weights, means, variances, resp, counts, sums,
            outer * inner, inner, dim // way.align, way.stride_b, way.stride_o, way.stride_i, way.stride_d,
            reference.MIN_VARIANCE,
            K=components, W=shape.W, R=shape.R, BLOCK_D=shape.BLOCK_D, BY_ROWS=shape.BY_ROWS, PATH=way.path, ALIGN=way.align,
            num_warps=shape.num_warps,
        )  # fmt: skip
        block = min(16, shape.BLOCK_D)
        _m_step[(triton.cdiv(dim, block), batch)](
            weights, means, variances, counts, sums, *result, outer * inner, dim, count, reference.MIN_VARIANCE,
            K=components, BLOCK_D=block, BLOCK_G=64, num_warps=4,
        )  # fmt: skip
    return resp, result  # type: ignore[return-value]


@triton.jit
def _em_step(
    x_ptr,  # (B, outer, inner, D)
    weights_ptr,  # (B, K)
    means_ptr,  # (B, K, D)
    variances_ptr,  # (B, K, D)
    resp_ptr,  # (B, K, m), written
    counts_ptr,  # (B, G, K), written
    sums_ptr,  # (B, G, 2, K, D), written
    m,
    inner,
    dim_units,
    stride_b,
    stride_o,
    stride_i,
    stride_d,
    floor,
    K: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BY_ROWS: tl.constexpr,
    PATH: tl.constexpr,
    ALIGN: tl.constexpr,
):
    program, programs, b = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    dim = dim_units * ALIGN
    d = tl.arange(0, BLOCK_D)
    x_ptr += b * stride_b
    resp_ptr += b * K * m
    anchor, inverse, shift, constant = tables(
        weights_ptr + b * K, means_ptr + b * K * dim, variances_ptr + b * K * dim, d, dim, floor, K
    )
    count, first, second = (), (), ()
    for _ in tl.static_range(K):
        count = count + (tl.zeros((W,), tl.float32),)
        first = first + (no_sums(W, BLOCK_D, BY_ROWS),)
        second = second + (no_sums(W, BLOCK_D, BY_ROWS),)
    for tile in range(program, tl.cdiv(m, W * R), programs):
        points, exists = rows_of_tile(tile, m, W, R)
        offsets = row_offsets(tile, points, inner, stride_o, stride_i, PATH, ALIGN, W, R)
        centred = load_tile(x_ptr, offsets, exists, d, dim, stride_d) - anchor[None, None, :]
        scaled, squares = scaled_distances(centred, inverse, shift, K)
        resp = posteriors(squares, constant, exists, K)
        for k in tl.static_range(K):
            tl.store(resp_ptr + k * m + points, resp[k], mask=exists)
        count, first, second = add_sums(count, first, second, resp, scaled, K, BY_ROWS)
    counts_ptr += (b * programs + program) * K
    sums_ptr += (b * programs + program) * 2 * K * dim
    for k in tl.static_range(K):
        tl.store(counts_ptr + k, tl.sum(count[k], axis=0))
        tl.store(sums_ptr + k * dim + d, over_width(first[k], BY_ROWS), mask=d < dim)
        tl.store(sums_ptr + (K + k) * dim + d, over_width(second[k], BY_ROWS), mask=d < dim)


@triton.jit
def _m_step(
    weights_ptr,  # (B, K): the mixture that ν belongs to
    means_ptr,  # (B, K, D)
    variances_ptr,  # (B, K, D)
    counts_ptr,  # (B, G, K)
    sums_ptr,  # (B, G, 2, K, D)
    new_weights_ptr,  # (B, K), written
    new_means_ptr,  # (B, K, D), written
    new_variances_ptr,  # (B, K, D), written
    m,
    dim,
    programs,
    floor,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    counts_ptr += b * programs * K
    sums_ptr += b * programs * 2 * K * dim
    for k in tl.static_range(K):
        count = tl.zeros((BLOCK_G,), tl.float32)
        first = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        second = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        for start in range(0, programs, BLOCK_G):
            g = start + tl.arange(0, BLOCK_G)
            mask = (g < programs)[:, None] & (d < dim)[None, :]
            pointers = sums_ptr + (g[:, None] * 2 * K + k) * dim + d[None, :]
            count += tl.load(counts_ptr + g * K + k, mask=g < programs, other=0.0)
            first += tl.load(pointers, mask=mask, other=0.0)
            second += tl.load(pointers + K * dim, mask=mask, other=0.0)
        total = tl.sum(count, axis=0)
        # A component of weight 0 has no point; one whose weight is not a number must show it.
        mean_t = tl.where(total == 0, 0.0, tl.sum(first, axis=0) / total)
        var_t = tl.maximum(tl.where(total == 0, 0.0, tl.sum(second, axis=0) / total) - mean_t * mean_t, 0.0, tl.PropagateNan.ALL)
        row = (b * K + k) * dim + d
        deviation = tl.sqrt(tl.maximum(tl.load(variances_ptr + row, mask=d < dim, other=1.0), floor))
        mean = tl.load(means_ptr + row, mask=d < dim, other=0.0) + deviation * mean_t
        tl.store(new_means_ptr + row, tl.where(total == 0, 0.0, mean), mask=d < dim)
        tl.store(new_variances_ptr + row, deviation * deviation * var_t, mask=d < dim)
        if tl.program_id(0) == 0:
            tl.store(new_weights_ptr + b * K + k, total / m)
