"""Evaluation under T mixtures of K components in one read and one write: ``reference.inference`` with "ensemble".

A tile of points stays in registers while the T mixtures pass by. Each gives its K log-densities, their softmax, and what
its components contribute to the result. Distances are differences x - μ, never expanded squares: behind a ReLU a component
may be a thousand times narrower than its distance from the others, and an expanded square would keep none of its digits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixnorm.ops import reference
from mixnorm.ops.kernels import Form, History, Parameters
from mixnorm.ops.triton import tiles
from mixnorm.ops.triton.components import (
    activate,
    component_scale,
    line,
    load_parameter,
    taken_together,
    transform_options,
)
from mixnorm.ops.triton.em import posteriors
from mixnorm.ops.triton.launch import PLANS, Plan, launch
from mixnorm.ops.triton.tiles import (
    channels_of_rows,
    load_tile,
    over_channels,
    row_offsets,
    rows_of_tile,
    store_tile,
    tall,
    wide,
)

TABLE_COLUMNS = 256
VECTOR = tl.constexpr(4)  # fp32 numbers of a table that a thread reads at once


def inference(points: Tensor, history: History, parameters: Parameters, form: Form) -> Tensor:
    """The transform under given mixtures: λ (B, T, K), μ and σ² (B, T, K, D), τ (B, T)."""
    y = torch.empty_like(points)
    weights, means, variances, tau = (t.contiguous() for t in history[:4])  # type: ignore[union-attr]
    options = transform_options(parameters, form)
    tables_plan, plan = _plans(
        tiles.describe(points), y.stride(), tuple(weights.shape[1:]), history.bounded, form.eps, options
    )
    rows = torch.empty(tables_plan.info["rows"], dtype=torch.float32, device=points.device)
    numbers = torch.empty(2, *weights.shape, dtype=torch.float32, device=points.device)
    launch(tables_plan, (weights, tau, means, variances, *parameters), (rows, numbers))
    launch(plan, (points, means, tau, parameters.bias), (rows, numbers, y))
    return y


@functools.lru_cache(maxsize=PLANS)
def _plans(
    points: tiles.Described, y_strides: tuple[int, ...], history: tuple[int, int], bounded: bool, eps: float,
    options: tuple[Any, ...],
) -> tuple[Plan, Plan]:  # fmt: skip
    batch, outer, inner, dim = points.shape
    slots, components = history
    floor, constants = max(eps, reference.MIN_VARIANCE), dict(options)
    offset = constants["HAS_BETWEEN"] or constants["HAS_DEVIATION"] or constants["PER_COMPONENT"]
    tables_plan = Plan(
        _tables, (slots * components, batch), (slots, dim, eps, floor),
        {**constants, "K": components, "OFFSET": offset, "COLUMNS": TABLE_COLUMNS},
        rows=(2 + offset + constants["HAS_DEVIATION"], batch, slots, components, dim),
    )  # fmt: skip
    # One component at a time is in the registers, however many there are.
    shape = tiles.tile(points, 1, "evaluation")
    x, y = tiles.walk(points, shape), tiles.walk(points._replace(strides=y_strides), shape)
    used = {name: constants[name] for name in ("HAS_BIAS", "HAS_DEVIATION", "ACTIVATION", "IN_STATISTICS", "PER_COMPONENT")}
    constants = {
        **used, **shape._asdict(), "K": components, "OFFSET": offset, "BOUNDED": bounded,
        "PATH": x.path, "ALIGN": x.align, "Y_PATH": y.path, "Y_ALIGN": y.align,
    }  # fmt: skip
    del constants["STAGES"]
    numbers = (outer * inner, inner, dim // x.align, slots, batch, reference.farthest(dim), *x[:4], *y[:4])
    return tables_plan, Plan(_inference, (tiles.programs(points, shape, "evaluation"), batch), numbers, constants)


@triton.jit
def _overall(weights_ptr, slot_weights_ptr, means_ptr, variances_ptr, slots, d, dim, K: tl.constexpr):
    """The mean and the variance of a batch, averaged over the slots: ``reference.overall_statistics``."""
    mean, variance = tl.zeros(d.shape, tl.float32), tl.zeros(d.shape, tl.float32)
    for slot in range(slots):
        tau = tl.load(slot_weights_ptr + slot)
        weights, means, variances = (), (), ()
        for k in tl.static_range(K):
            row = (slot * K + k) * dim + d
            # A component that is not in use counts for nothing; in a slot without any, nothing is divided by 0.
            weights = weights + (tl.load(weights_ptr + slot * K + k) + tl.where(tau > 0, 0.0, 1.0),)
            means = means + (tl.load(means_ptr + row, mask=d < dim, other=0.0),)
            variances = variances + (tl.load(variances_ptr + row, mask=d < dim, other=1.0),)
        of_slot, spread = taken_together(weights, means, variances, K)
        mean += tau * of_slot
        variance += tau * spread
    return mean, variance


@triton.jit
def _tables(
    weights_ptr,  # λ (B, T, K)
    slot_weights_ptr,  # τ (B, T)
    means_ptr,  # (B, T, K, D)
    variances_ptr,  # (B, T, K, D)
    gamma_ptr,  # (D,), or (K, D) if PER_COMPONENT
    beta_ptr,  # as γ
    within_ptr,  # g (D,)
    between_ptr,  # b (D,)
    deviation_ptr,  # d (D,)
    rows_ptr,  # (2 to 4, B, T, K, D), written: 1/σ of the density; slope, offset and bend of the transform
    numbers_ptr,  # (2, B, T, K), written: log λ - ½ Σ log σ², and τ, with a_k if that is not in the slope
    slots,
    dim,
    eps,
    floor,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WITHIN: tl.constexpr,
    HAS_BETWEEN: tl.constexpr,
    HAS_DEVIATION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IN_STATISTICS: tl.constexpr,
    UNIT: tl.constexpr,
    PER_COMPONENT: tl.constexpr,
    INSIDE: tl.constexpr,
    K: tl.constexpr,
    OFFSET: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    n, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, component = b * slots + n // K, n % K
    place, all_places = b * slots * K + n, tl.num_programs(1).to(tl.int64) * slots * K
    weight = tl.load(weights_ptr + place)
    scale = component_scale(weight, UNIT)
    filled = 0.0
    for k in tl.static_range(K):
        filled += tl.load(weights_ptr + slot * K + k)
    if PER_COMPONENT:
        gamma_ptr += component * dim
        beta_ptr += component * dim
    log_volume = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, dim, COLUMNS):
        d = start + tl.arange(0, COLUMNS)
        mean = tl.load(means_ptr + place * dim + d, mask=d < dim, other=0.0)
        variance = tl.load(variances_ptr + place * dim + d, mask=d < dim, other=1.0)
        positive = tl.maximum(variance, floor)
        log_volume += tl.where(d < dim, tl.log(positive), 0.0)
        gamma = load_parameter(gamma_ptr, d, dim, 1.0, HAS_WEIGHT)
        beta = load_parameter(beta_ptr, d, dim, 0.0, HAS_BIAS)
        within = load_parameter(within_ptr, d, dim, 1.0, HAS_WITHIN)
        between = load_parameter(between_ptr, d, dim, 0.0, HAS_BETWEEN)
        deviation = load_parameter(deviation_ptr, d, dim, 0.0, HAS_DEVIATION)
        overall_mean, overall_root = beta, beta  # nobody looks at them
        if HAS_WITHIN or HAS_BETWEEN:
            first = b * slots * K
            overall_mean, overall_variance = _overall(
                weights_ptr + first, slot_weights_ptr + b * slots, means_ptr + first * dim, variances_ptr + first * dim,
                slots, d, dim, K,
            )  # fmt: skip
            overall_root = 1.0 / tl.sqrt(overall_variance + eps)
        slope, _, offset, bend = line(
            mean, variance, scale if INSIDE else 1.0, gamma, beta, within, between, deviation, overall_mean, overall_root,
            eps, HAS_WITHIN, HAS_BETWEEN, HAS_DEVIATION, IN_STATISTICS,
        )  # fmt: skip
        tl.store(rows_ptr + place * dim + d, 1.0 / tl.sqrt(positive), mask=d < dim)
        tl.store(rows_ptr + (all_places + place) * dim + d, slope, mask=d < dim)
        if OFFSET:
            if PER_COMPONENT or ACTIVATION != 0:
                offset += beta
            tl.store(rows_ptr + (2 * all_places + place) * dim + d, offset, mask=d < dim)
        if HAS_DEVIATION:
            tl.store(rows_ptr + (3 * all_places + place) * dim + d, bend, mask=d < dim)
    # As reference.inference_factors: an empty slot has no posterior; a uniform one, times τ = 0, keeps it out without a NaN.
    constant = tl.log(tl.where(filled > 0, weight, 1.0)) - 0.5 * tl.sum(log_volume, axis=0)
    tau = tl.load(slot_weights_ptr + slot)
    tl.store(numbers_ptr + place, constant)
    tl.store(numbers_ptr + all_places + place, tau if INSIDE else tau * scale)


@triton.jit
def _inference(
    x_ptr,  # (B, outer, inner, D)
    means_ptr,  # (B, T, K, D)
    slot_weights_ptr,  # τ (B, T)
    beta_ptr,  # (D,)
    rows_ptr,  # (2 to 4, B, T, K, D)
    numbers_ptr,  # (2, B, T, K)
    y_ptr,  # (B, outer, inner, D), written
    m,
    inner,
    dim_units,
    slots,
    batch,
    farthest,
    x_b,
    x_o,
    x_i,
    x_d,
    y_b,
    y_o,
    y_i,
    y_d,
    HAS_BIAS: tl.constexpr,
    HAS_DEVIATION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IN_STATISTICS: tl.constexpr,
    PER_COMPONENT: tl.constexpr,
    K: tl.constexpr,
    OFFSET: tl.constexpr,
    BOUNDED: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    V: tl.constexpr,
    BY_ROWS: tl.constexpr,
    PATH: tl.constexpr,
    ALIGN: tl.constexpr,
    Y_PATH: tl.constexpr,
    Y_ALIGN: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    dim = dim_units * ALIGN
    # In the loop every warp reads the tables for itself, and the points in vectors of as many elements, so that nothing is
    # exchanged.
    d = channels_of_rows(W, S, V, BY_ROWS)
    if BY_ROWS:
        d = tl.max_contiguous(d, (1, 1, 1, VECTOR))
    beta = load_parameter(beta_ptr, d, dim, 0.0, HAS_BIAS)
    components = slots * K
    slopes_ptr = rows_ptr + (batch + b) * components * dim
    offsets_ptr = rows_ptr + (2 * batch + b) * components * dim
    bends_ptr = rows_ptr + (3 * batch + b) * components * dim
    factors_ptr = numbers_ptr + (batch + b) * components
    means_ptr += b * components * dim
    rows_ptr += b * components * dim
    numbers_ptr += b * components
    slot_weights_ptr += b * slots
    for tile in range(tl.program_id(0), tl.cdiv(m, W * R), tl.num_programs(0)):
        points, exists = rows_of_tile(tile, m, W, R)
        x_rows = row_offsets(tile, points, inner, x_o, x_i, PATH, ALIGN, W, R)
        x = load_tile(x_ptr + b * x_b, x_rows, exists, d, dim, x_d)
        y = tl.zeros((W, R, S, V), tl.float32)
        total = tl.zeros((W, R), tl.float32)
        missing = tl.zeros((W, R), tl.float32)
        for slot in range(slots):
            squares, constant = (), ()
            for k in tl.static_range(K):
                row = (slot * K + k) * dim + d
                mean = tl.load(means_ptr + row, mask=d < dim, other=0.0)
                inverse = tl.load(rows_ptr + row, mask=d < dim, other=0.0)
                t = (x - wide(mean)) * wide(inverse)
                squares = squares + (over_channels(t * t),)
                constant = constant + (tl.load(numbers_ptr + slot * K + k),)
            resp = posteriors(squares, constant, exists, K)
            trust = 1.0
            if BOUNDED:  # reference.slot_trust
                far = resp[0] * squares[0]
                for k in tl.static_range(1, K):
                    far += resp[k] * squares[k]
                trust = tl.where(far > farthest, farthest / far, 1.0)
                tau = tl.load(slot_weights_ptr + slot)
                total += tau * trust
                missing += tau * (1.0 - trust)
            for k in tl.static_range(K):
                row = (slot * K + k) * dim + d
                centre = tl.load(means_ptr + row, mask=d < dim, other=0.0)
                slope = tl.load(slopes_ptr + row, mask=d < dim, other=0.0)
                mixing = resp[k] * tl.load(factors_ptr + slot * K + k) * trust
                if IN_STATISTICS:
                    centre += beta
                z = x - wide(centre)
                if OFFSET:
                    offset = tl.load(offsets_ptr + row, mask=d < dim, other=0.0)
                    if HAS_DEVIATION:
                        bend = tl.load(bends_ptr + row, mask=d < dim, other=0.0)
                        z *= wide(slope) + wide(bend) * z
                    else:
                        z *= wide(slope)
                    y += tall(mixing) * activate(z + wide(offset), ACTIVATION)
                elif ACTIVATION == 0:
                    y += tall(mixing) * wide(slope) * z
                else:
                    z = wide(slope) * z
                    if not IN_STATISTICS:
                        z += wide(beta)
                    y += tall(mixing) * activate(z, ACTIVATION)
        if BOUNDED:
            y *= tall(tl.where(missing > 0, 1.0 / total, 1.0))
        if ACTIVATION == 0 and not IN_STATISTICS and not PER_COMPONENT:
            y += wide(beta)
        y_rows = row_offsets(tile, points, inner, y_o, y_i, Y_PATH, Y_ALIGN, W, R)
        store_tile(y_ptr + b * y_b, y, y_rows, exists, d, dim, y_d)
