"""Evaluation under T mixtures of K components in one read and one write: ``reference.inference`` with "ensemble".

A tile of points stays in registers while the T mixtures pass by. Each gives its K log-densities, their softmax, and what
its components contribute to the result. Distances are differences x - μ, never expanded squares: behind a ReLU a component
may be a thousand times narrower than its distance from the others, and an expanded square would keep none of its digits.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixnorm.ops import reference
from mixnorm.ops.triton import tiles
from mixnorm.ops.triton.components import activate, inverse_sqrt, line, load_parameter, transform_options
from mixnorm.ops.triton.em import posteriors
from mixnorm.ops.triton.launch import PLANS, Plan, launch
from mixnorm.ops.triton.tiles import channels, load_tile, over_channels, row_offsets, rows_of_tile, store_tile, tall, wide

TABLE_COLUMNS = 256


def inference(
    points: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    slot_weights: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    bounded: bool,
    eps: float,
    activation: str | None,
    affine_mode: str,
) -> Tensor:
    """The transform under given mixtures: λ (B, T, K), μ and σ² (B, T, K, D), τ (B, T), γ and β (D,)."""
    y = torch.empty_like(points)
    tables_plan, plan = _plans(
        tiles.describe(points), y.stride(), tuple(weights.shape[1:]), weight is not None, bias is not None, bounded, eps,
        activation, affine_mode,
    )  # fmt: skip
    means = means.contiguous()
    rows = torch.empty(2, *means.shape, dtype=torch.float32, device=points.device)
    numbers = torch.empty(2, *weights.shape, dtype=torch.float32, device=points.device)
    slot_weights = slot_weights.contiguous()
    launch(tables_plan, (weights.contiguous(), slot_weights, variances.contiguous(), weight), (rows, numbers))
    launch(plan, (points, means, slot_weights, bias), (rows, numbers, y))
    return y


@functools.lru_cache(maxsize=PLANS)
def _plans(
    points: tiles.Described, y_strides: tuple[int, ...], history: tuple[int, int], has_weight: bool, has_bias: bool,
    bounded: bool, eps: float, activation: str | None, affine_mode: str,
) -> tuple[Plan, Plan]:  # fmt: skip
    batch, outer, inner, dim = points.shape
    slots, components = history
    floor = max(eps, reference.MIN_VARIANCE)
    options = transform_options(has_weight, has_bias, activation, affine_mode)
    tables_plan = Plan(
        _tables, (slots * components, batch), (slots, dim, eps, floor),
        {"HAS_WEIGHT": has_weight, "IN_STATISTICS": options["IN_STATISTICS"], "K": components, "COLUMNS": TABLE_COLUMNS},
    )  # fmt: skip
    # One component at a time is in the registers, however many there are.
    shape = tiles.tile(points, 1, "evaluation")
    x, y = tiles.walk(points, shape), tiles.walk(points._replace(strides=y_strides), shape)
    constants = {
        **options, **shape._asdict(), "K": components, "BOUNDED": bounded,
        "PATH": x.path, "ALIGN": x.align, "Y_PATH": y.path, "Y_ALIGN": y.align,
    }  # fmt: skip
    del constants["HAS_WEIGHT"], constants["STAGES"]  # γ is in the tables
    numbers = (outer * inner, inner, dim // x.align, slots, batch, reference.farthest(dim), *x[:4], *y[:4])
    return tables_plan, Plan(_inference, (tiles.programs(points, shape, "evaluation"), batch), numbers, constants)


@triton.jit
def _tables(
    weights_ptr,  # λ (B, T, K)
    slot_weights_ptr,  # τ (B, T)
    variances_ptr,  # (B, T, K, D)
    gamma_ptr,  # (D,)
    rows_ptr,  # (2, B, T, K, D), written: 1/σ of the density, and the slope of the transform
    numbers_ptr,  # (2, B, T, K), written: log λ - ½ Σ log σ², and τ/√λ
    slots,
    dim,
    eps,
    floor,
    HAS_WEIGHT: tl.constexpr,
    IN_STATISTICS: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    n, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = b * slots + n // K
    place, all_places = b * slots * K + n, tl.num_programs(1).to(tl.int64) * slots * K
    weight = tl.load(weights_ptr + place)
    filled = 0.0
    for k in tl.static_range(K):
        filled += tl.load(weights_ptr + slot * K + k)
    log_volume = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, dim, COLUMNS):
        d = start + tl.arange(0, COLUMNS)
        variance = tl.load(variances_ptr + place * dim + d, mask=d < dim, other=1.0)
        positive = tl.maximum(variance, floor)
        log_volume += tl.where(d < dim, tl.log(positive), 0.0)
        gamma = load_parameter(gamma_ptr, d, dim, 1.0, HAS_WEIGHT)
        slope, _ = line(variance, variance, gamma, gamma, eps, IN_STATISTICS)
        tl.store(rows_ptr + place * dim + d, 1.0 / tl.sqrt(positive), mask=d < dim)
        tl.store(rows_ptr + (all_places + place) * dim + d, slope, mask=d < dim)
    # As reference.inference_factors: an empty slot has no posterior; a uniform one, times τ = 0, keeps it out without a NaN.
    constant = tl.log(tl.where(filled > 0, weight, 1.0)) - 0.5 * tl.sum(log_volume, axis=0)
    tl.store(numbers_ptr + place, constant)
    tl.store(numbers_ptr + all_places + place, tl.load(slot_weights_ptr + slot) * inverse_sqrt(weight))


@triton.jit
def _inference(
    x_ptr,  # (B, outer, inner, D)
    means_ptr,  # (B, T, K, D)
    slot_weights_ptr,  # τ (B, T)
    beta_ptr,  # (D,)
    rows_ptr,  # (2, B, T, K, D)
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
    ACTIVATION: tl.constexpr,
    IN_STATISTICS: tl.constexpr,
    K: tl.constexpr,
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
    d = channels(S, V)
    beta = load_parameter(beta_ptr, d, dim, 0.0, HAS_BIAS)
    components = slots * K
    slopes_ptr = rows_ptr + (batch + b) * components * dim
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
                if ACTIVATION == 0:
                    y += tall(mixing) * wide(slope) * z
                else:
                    z = wide(slope) * z
                    if not IN_STATISTICS:
                        z += wide(beta)
                    y += tall(mixing) * activate(z, ACTIVATION)
        if BOUNDED:
            y *= tall(tl.where(missing > 0, 1.0 / total, 1.0))
        if ACTIVATION == 0 and not IN_STATISTICS:
            y += wide(beta)
        y_rows = row_offsets(tile, points, inner, y_o, y_i, Y_PATH, Y_ALIGN, W, R)
        store_tile(y_ptr + b * y_b, y, y_rows, exists, d, dim, y_d)
