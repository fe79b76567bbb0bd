"""ν of every point and the statistics of the whole batch under it, in one read of the tensor: ``reference.em_step``."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixnorm.ops import reference
from mixnorm.ops.kernels import Mixture
from mixnorm.ops.triton import tiles
from mixnorm.ops.triton.em import add_sums, load_components, posteriors, scaled_distances, tables
from mixnorm.ops.triton.launch import PLANS, Plan, cdiv, launch, power_of_two
from mixnorm.ops.triton.tiles import channels, load_tile, no_sums, over_width, row_offsets, rows_of_tile

M_STEP_COLUMNS = 8


def em_step(points: Tensor, mixture: Mixture) -> tuple[Tensor, Mixture]:
    """ν (B, m, K) under the mixture, and λ (B, K), μ and σ² (B, K, D) of the points under that ν."""
    batch, outer, inner, _ = points.shape
    # Component by component, so that neighbouring points lie side by side.
    resp = torch.empty(batch, mixture[0].shape[1], outer * inner, dtype=torch.float32, device=points.device).mT
    return resp, _em_step_into(resp, points, mixture, given=False)


def moments(points: Tensor, resp: Tensor) -> Mixture:
    """λ, μ and σ² of the points under a given ν (B, m, K), which lies in memory as (B, K, m)."""
    means = points.mean((1, 2), dtype=torch.float32).unsqueeze(1).expand(-1, resp.shape[2], -1)
    for _ in range(2):  # about the mean of all points, then about the means of the components, which may be far from there
        found = _em_step_into(
            resp, points, Mixture(torch.ones_like(means[..., 0]), means, torch.ones_like(means)), given=True
        )
        means = found.means
    return found


def _em_step_into(resp: Tensor, points: Tensor, mixture: Mixture, *, given: bool) -> Mixture:
    em_plan, m_plan = _plans(tiles.describe(points), mixture[0].shape[1], given)
    weights, means, variances = mixture[0].contiguous(), mixture[1].contiguous(), mixture[2].contiguous()
    new: Any = {"dtype": torch.float32, "device": points.device}
    counts, sums = torch.empty(em_plan.info["counts"], **new), torch.empty(em_plan.info["sums"], **new)
    result = Mixture(torch.empty_like(weights), torch.empty_like(means), torch.empty_like(variances))
    launch(em_plan, (points, weights, means, variances, resp), (counts, sums))
    launch(m_plan, (means, variances), (counts, sums, *result))
    return result


@functools.lru_cache(maxsize=PLANS)
def _plans(points: tiles.Described, components: int, given: bool) -> tuple[Plan, Plan]:
    batch, outer, inner, dim = points.shape
    shape = tiles.tile(points, components, "statistics")
    way = tiles.walk(points, shape)
    count = tiles.programs(points, shape, "statistics")
    em_plan = Plan(
        _em_step, (count, batch), (outer * inner, inner, dim // way.align, *way[:4], reference.MIN_VARIANCE),
        {"K": components, "GIVEN": given, "PATH": way.path, "ALIGN": way.align, **shape._asdict()},
        counts=(batch, count, components), sums=(batch, count, 2, components, dim),
    )  # fmt: skip
    constants = {"K": components, "COLUMNS": M_STEP_COLUMNS, "PROGRAMS": min(512, power_of_two(count))}
    numbers = (outer * inner, dim, count, reference.MIN_VARIANCE)
    return em_plan, Plan(_m_step, (cdiv(dim, M_STEP_COLUMNS), components, batch), numbers, constants)


@triton.jit
def _em_step(
    x_ptr,  # (B, outer, inner, D)
    weights_ptr,  # (B, K)
    means_ptr,  # (B, K, D)
    variances_ptr,  # (B, K, D)
    resp_ptr,  # (B, K, m), written, or read if GIVEN
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
    GIVEN: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    V: tl.constexpr,
    BY_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PATH: tl.constexpr,
    ALIGN: tl.constexpr,
):
    program, programs, b = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    dim = dim_units * ALIGN
    d = channels(S, V)
    x_ptr += b * stride_b
    resp_ptr += b * K * m
    weights, means, variances = load_components(
        weights_ptr + b * K, means_ptr + b * K * dim, variances_ptr + b * K * dim, d, dim, K
    )
    inverse, constant = tables(weights, variances, d, dim, floor, K)
    count, first, second = (), (), ()
    for _ in tl.static_range(K):
        count = count + (tl.zeros((W,), tl.float32),)
        first = first + (no_sums(W, S, V, BY_ROWS),)
        second = second + (no_sums(W, S, V, BY_ROWS),)
    for tile in tl.range(program, tl.cdiv(m, W * R), programs, num_stages=STAGES):
        points, exists = rows_of_tile(tile, m, W, R)
        offsets = row_offsets(tile, points, inner, stride_o, stride_i, PATH, ALIGN, W, R)
        x = load_tile(x_ptr, offsets, exists, d, dim, stride_d)
        scaled, squares = scaled_distances(x, means, inverse, K)
        if GIVEN:
            resp = ()
            for k in tl.static_range(K):
                resp = resp + (tl.load(resp_ptr + k * m + points, mask=exists, other=0.0),)
        else:
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
    means_ptr,  # (B, K, D): of the mixture that ν belongs to
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
    COLUMNS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    k, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    counts_ptr += b * programs * K + k
    sums_ptr += (b * programs * 2 * K + k) * dim
    count = tl.zeros((PROGRAMS,), tl.float32)
    first = tl.zeros((PROGRAMS, COLUMNS), tl.float32)
    second = tl.zeros((PROGRAMS, COLUMNS), tl.float32)
    for start in range(0, programs, PROGRAMS):
        g = start + tl.arange(0, PROGRAMS)
        mask = (g < programs)[:, None] & (d < dim)[None, :]
        pointers = sums_ptr + g[:, None] * (2 * K) * dim + d[None, :]
        count += tl.load(counts_ptr + g * K, mask=g < programs, other=0.0)
        first += tl.load(pointers, mask=mask, other=0.0)
        second += tl.load(pointers + K * dim, mask=mask, other=0.0)
    total = tl.sum(count, axis=0)
    # A component of weight 0 has no point; one whose weight is not a number must show it.
    mean_t = tl.where(total == 0, 0.0, tl.sum(first, axis=0) / total)
    var_t = tl.where(total == 0, 0.0, tl.sum(second, axis=0) / total) - mean_t * mean_t
    row = (b * K + k) * dim + d
    variance = tl.maximum(tl.load(variances_ptr + row, mask=d < dim, other=1.0), floor)
    mean = tl.load(means_ptr + row, mask=d < dim, other=0.0) + tl.sqrt(variance) * mean_t
    mean = tl.where(total == 0, 0.0, mean)
    variance *= tl.maximum(var_t, 0.0, tl.PropagateNan.ALL)
    tl.store(new_means_ptr + row, mean, mask=d < dim)
    tl.store(new_variances_ptr + row, variance, mask=d < dim)
    if tl.program_id(0) == 0:
        tl.store(new_weights_ptr + b * K + k, total / m)
