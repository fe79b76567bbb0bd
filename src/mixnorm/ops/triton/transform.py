"""The transform of a batch in one launch: ν and the statistics in one read of the tensor, then one read and one write.

Two phases with a barrier between them, in which every program reads the totals and computes the statistics for itself. Either
phase can run alone: ``reference.em_step`` and ``reference.moments`` are the first, ``reference.mix_components`` the second. The
second phase walks backward, so that it begins with what the cache still holds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixnorm.ops import reference
from mixnorm.ops.triton import tiles, together
from mixnorm.ops.triton.components import ACTIVATIONS, activate, lines, load_parameter
from mixnorm.ops.triton.em import (
    add_sums,
    contribute_sums,
    load_components,
    m_step,
    nothing_yet,
    posteriors,
    scaled_distances,
    tables,
)
from mixnorm.ops.triton.queue import push, shift
from mixnorm.ops.triton.tiles import channels, load_tile, row_offsets, rows_of_tile, store_tile, tall, wide
from mixnorm.ops.triton.together import meet, own_part

Statistics = tuple[Tensor, Tensor, Tensor]
History = tuple[Statistics, Tensor]


def em_step(points: Tensor, mixture: Statistics, history: History | None = None) -> tuple[Tensor, Statistics]:
    """ν (B, m, K) under the mixture, and λ (B, K), μ and σ² (B, K, D) of the points under that ν.

    The statistics go into the ``history`` as well, the queues and the count of :func:`mixnorm.ops.triton.queue.push`.
    """
    resp = _new_resp(points, mixture[0].shape[1])
    return resp, _first_phase(points, resp, mixture, history)


def moments(points: Tensor, resp: Tensor) -> Statistics:
    """λ, μ and σ² of the points under a given ν (B, m, K), which lies in memory as (B, K, m)."""
    center = points.mean((1, 2), dtype=torch.float32).unsqueeze(1).repeat(1, resp.shape[2], 1)
    return _first_phase(points, resp, (torch.ones_like(center[..., 0]), center, torch.ones_like(center)), None, given=True)


def mix(
    points: Tensor, resp: Tensor, statistics: Statistics, weight: Tensor | None, bias: Tensor | None, **options: Any
) -> Tensor:
    """Σ_k ν_k/√λ_k · act(x̂_k) with γ and β (D,); ``resp`` (B, m, K) lies in memory as (B, K, m)."""
    y = torch.empty_like(points)
    _launch(points, resp, statistics, None, y, weight, bias, None, second_only=True, **options)
    return y


def transform(
    points: Tensor,
    mixture: Statistics,
    weight: Tensor | None,
    bias: Tensor | None,
    history: History | None,
    **options: Any,
) -> tuple[Tensor, Tensor, Statistics]:
    """:func:`em_step` and :func:`mix` at once: the output, ν and the statistics."""
    resp, y, statistics = _new_resp(points, mixture[0].shape[1]), torch.empty_like(points), _like(mixture)
    fused = history if points.shape[0] == 1 else None
    _launch(points, resp, mixture, statistics, y, weight, bias, fused, **options)
    if history is not fused and history is not None:
        push(history[0], statistics, history[1])
    return y, resp, statistics


def _first_phase(
    points: Tensor, resp: Tensor, mixture: Statistics, history: History | None, given: bool = False
) -> Statistics:
    statistics = _like(mixture)
    fused = history if points.shape[0] == 1 else None  # of several mixtures, all must be known before any is pushed
    options = {"eps": 0.0, "activation": None, "affine_mode": "output"}
    _launch(points, resp, mixture, statistics, None, None, None, fused, given=given, **options)
    if history is not fused and history is not None:
        push(history[0], statistics, history[1])
    return statistics


def _new_resp(points: Tensor, components: int) -> Tensor:
    """Room for ν (B, m, K), component by component, so that neighbouring points lie side by side."""
    batch, outer, inner, _ = points.shape
    return torch.empty(batch, components, outer * inner, dtype=torch.float32, device=points.device).mT


def _like(mixture: Statistics) -> Statistics:
    weights, means, variances = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in mixture)
    return weights, means, variances


def _launch(
    points: Tensor,
    resp: Tensor,
    mixture: Statistics,
    statistics: Statistics | None,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    history: History | None,
    *,
    eps: float,
    activation: str | None,
    affine_mode: str,
    given: bool = False,
    second_only: bool = False,
) -> None:
    batch, outer, inner, dim = points.shape
    components, m = resp.shape[2], outer * inner
    shape = tiles.tile(points, components, "transform")
    tuning = tiles.TUNING["transform"]
    count = triton.cdiv(m, shape.W * shape.R)
    if second_only:  # nothing to wait for
        programs = max(1, min(count, triton.cdiv(2 * tuning.per_processor * tiles.processors(points.device), batch)))
        totals, barrier, partial, constants = None, None, None, {"ALONE": True, "IN_ORDER": False, "PROGRAMS_PAD": 1}
    else:
        numbers = components * (2 * dim + 1)
        programs, totals, barrier, partial, constants = together.group(
            points, count, shape.num_warps, tuning.per_processor, numbers
        )
    x_walk = tiles.walk(points, shape)
    y_walk = x_walk if y is None else tiles.walk(y, shape)
    queues, tracked = history or ((None, None, None), None)
    slots = 1 if history is None else history[0][0].shape[1]
    with tiles.on_device(points):
        _transform[(programs, batch)](
            points, *(t.contiguous() for t in mixture), resp, *(statistics or (None, None, None)), *queues, tracked,
            weight, bias, y, totals, partial, barrier, slots, m, inner, dim // x_walk.align, *x_walk[:4], *y_walk[:4],
            eps, reference.MIN_VARIANCE,
            FIRST=not second_only, GIVEN=given, PUSH=history is not None, SECOND=y is not None,
            HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, ACTIVATION=ACTIVATIONS[activation],
            IN_STATISTICS=affine_mode == "statistics", K=components, K_PAD=triton.next_power_of_2(components),
            SLOTS_PAD=triton.next_power_of_2(slots), PATH=x_walk.path, ALIGN=x_walk.align, Y_PATH=y_walk.path,
            Y_ALIGN=y_walk.align, **shape._asdict(), **constants,
        )  # fmt: skip


@triton.jit
def _transform(
    x_ptr,  # (B, outer, inner, D)
    weights_ptr,  # (B, K): the mixture of the posterior; if not FIRST, the statistics
    means_ptr,  # (B, K, D)
    variances_ptr,  # (B, K, D)
    resp_ptr,  # (B, K, m), written in the first phase unless GIVEN
    new_weights_ptr,  # (B, K), written in the first phase
    new_means_ptr,  # (B, K, D), written in the first phase
    new_variances_ptr,  # (B, K, D), written in the first phase
    weights_queue_ptr,  # (T, K), changed if PUSH
    means_queue_ptr,  # (T, K, D), changed if PUSH
    variances_queue_ptr,  # (T, K, D), changed if PUSH
    tracked_ptr,  # one number, changed if PUSH
    gamma_ptr,  # (D,)
    beta_ptr,  # (D,)
    y_ptr,  # (B, outer, inner, D), written in the second phase
    totals_ptr,  # (B, K·(1 + 2·D)), zeros at first
    partial_ptr,  # (B, G, K·(1 + 2·D)) if IN_ORDER
    barrier_ptr,  # (B,) zeros
    slots,
    m,
    inner,
    dim_units,
    x_b,
    x_o,
    x_i,
    x_d,
    y_b,
    y_o,
    y_i,
    y_d,
    eps,
    floor,
    FIRST: tl.constexpr,
    GIVEN: tl.constexpr,
    PUSH: tl.constexpr,
    SECOND: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IN_STATISTICS: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    PATH: tl.constexpr,
    ALIGN: tl.constexpr,
    Y_PATH: tl.constexpr,
    Y_ALIGN: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    V: tl.constexpr,
    BY_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMS_PAD: tl.constexpr,
    ALONE: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    program, programs, b = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    dim = dim_units * ALIGN
    d = channels(S, V)
    row = b * K * dim
    x_ptr += b * x_b
    resp_ptr += b * K * m
    tiles_in_all = tl.cdiv(m, W * R)
    weights, means, variances = load_components(weights_ptr + b * K, means_ptr + row, variances_ptr + row, d, dim, K)

    if FIRST:
        anchor, inverse, shifts, constant = tables(weights, means, variances, d, dim, floor, K)
        count, first, second = nothing_yet(K, W, S, V, BY_ROWS)
        for tile in tl.range(program, tiles_in_all, programs, num_stages=STAGES):
            points, exists = rows_of_tile(tile, m, W, R)
            offsets = row_offsets(tile, points, inner, x_o, x_i, PATH, ALIGN, W, R)
            centred = load_tile(x_ptr, offsets, exists, d, dim, x_d) - wide(anchor)
            scaled, squares = scaled_distances(centred, inverse, shifts, K)
            if GIVEN:
                resp = ()
                for k in tl.static_range(K):
                    resp = resp + (tl.load(resp_ptr + k * m + points, mask=exists, other=0.0),)
            else:
                resp = posteriors(squares, constant, exists, K)
                for k in tl.static_range(K):
                    tl.store(resp_ptr + k * m + points, resp[k], mask=exists)
            count, first, second = add_sums(count, first, second, resp, scaled, K, BY_ROWS)
        numbers = K * (1 + 2 * dim)
        totals_ptr += b * numbers
        own_ptr = own_part(totals_ptr, partial_ptr, numbers, b, program, programs, IN_ORDER)
        contribute_sums(own_ptr, count, first, second, d, dim, K, K_PAD, BY_ROWS, ALONE, IN_ORDER)
        barrier_ptr += b
        meet(totals_ptr, partial_ptr, numbers, barrier_ptr, programs, b, program, programs, PROGRAMS_PAD, ALONE, IN_ORDER)
        weights, means, variances = m_step(totals_ptr, means, variances, m, d, dim, floor, K)
        if program < K:
            _keep(
                new_weights_ptr + b * K, new_means_ptr + row, new_variances_ptr + row,
                weights_queue_ptr, means_queue_ptr, variances_queue_ptr, tracked_ptr,
                weights, means, variances, d, dim, slots, program, programs, PUSH, K, SLOTS_PAD, S, V,
            )  # fmt: skip

    if SECOND:
        gamma = load_parameter(gamma_ptr, d, dim, 1.0, HAS_WEIGHT)
        beta = load_parameter(beta_ptr, d, dim, 0.0, HAS_BIAS)
        factor, slope, centre = lines(weights, means, variances, gamma, beta, eps, K, IN_STATISTICS)
        own_tiles = tl.cdiv(tiles_in_all - program, programs)
        for back in tl.range(0, own_tiles, 1, num_stages=STAGES):
            tile = program + (own_tiles - 1 - back) * programs
            points, exists = rows_of_tile(tile, m, W, R)
            x_rows = row_offsets(tile, points, inner, x_o, x_i, PATH, ALIGN, W, R)
            x = load_tile(x_ptr, x_rows, exists, d, dim, x_d)
            y = tl.zeros((W, R, S, V), tl.float32)
            for k in tl.static_range(K):
                mixing = tl.load(resp_ptr + k * m + points, mask=exists, other=0.0) * factor[k]
                z = x - wide(centre[k])
                if ACTIVATION == 0:
                    y += tall(mixing) * wide(slope[k]) * z
                else:
                    z = wide(slope[k]) * z
                    if not IN_STATISTICS:
                        z += wide(beta)
                    y += tall(mixing) * activate(z, ACTIVATION)
            if ACTIVATION == 0 and not IN_STATISTICS:
                y += wide(beta)
            y_rows = row_offsets(tile, points, inner, y_o, y_i, Y_PATH, Y_ALIGN, W, R)
            store_tile(y_ptr + b * y_b, y, y_rows, exists, d, dim, y_d)


@triton.jit
def _keep(
    weights_ptr,
    means_ptr,
    variances_ptr,
    weights_queue_ptr,
    means_queue_ptr,
    variances_queue_ptr,
    tracked_ptr,
    weights,
    means,
    variances,
    d,
    dim,
    slots,
    program,
    programs,
    PUSH: tl.constexpr,
    K: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    S: tl.constexpr,
    V: tl.constexpr,
):
    """Writes the statistics, and pushes them if all of them are finite; program k the k-th component's."""
    number = weights[0]
    for k in tl.static_range(K):
        number += weights[k] + tl.sum(tl.sum(tl.where(d < dim, means[k] + variances[k], 0.0), axis=0), axis=0)
    finite = number - number == 0
    channel = tl.reshape(d, (S * V,))
    for k in tl.static_range(K):
        if k % programs == program:
            # A component without points has no mean.
            mean = tl.where(weights[k] == 0, 0.0, means[k])
            tl.store(weights_ptr + k, weights[k])
            tl.store(means_ptr + k * dim + d, mean, mask=d < dim)
            tl.store(variances_ptr + k * dim + d, variances[k], mask=d < dim)
            if PUSH:
                if finite:
                    place, exists = k * dim + channel, channel < dim
                    shift(means_queue_ptr, tl.reshape(mean, (S * V,)), place, exists, K * dim, slots, SLOTS_PAD)
                    shift(variances_queue_ptr, tl.reshape(variances[k], (S * V,)), place, exists, K * dim, slots, SLOTS_PAD)
                    one = k + tl.arange(0, 1)
                    weight = tl.full((1,), 0.0, tl.float32) + weights[k]
                    shift(weights_queue_ptr, weight, one, one >= 0, K, slots, SLOTS_PAD)
                    if k == 0:
                        tl.store(tracked_ptr, tl.load(tracked_ptr) + 1)
