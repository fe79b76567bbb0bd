"""Evaluation under T mixtures of K components in one read and one write: ``reference.inference`` with "ensemble".

T·K is some tens of components, too many to go through one by one: the squared distances, and without an activation the sum
over the components too, are matrix products. Relative to an anchor (the mean of all mixtures) and with w = 1/σ²,

    log λ + log p(x) = Σ_d [-½·w·(x - anchor)² + w·(μ - anchor)·(x - anchor)] + constant,
    y = (x - anchor)·Σ ν·slope + Σ ν·offset.

For fp32 and fp16 the products are of numbers split into parts, so that nothing is lost to the matrix units' short format;
for bf16 that format is finer than the result. Components are laid out as (TP, KP), T and K rounded up to powers of two, so
that the softmax over one mixture's components is over an axis. A tile is many points tall, because every tile reads all the
rows of the components again.

The squares are expanded, which costs a component that is d of its deviations away from the anchor d²·6e-8 of its
log-density. Between the components of one mixture that decides nothing. With one posterior over the components of all T
mixtures it would, because those of one mode compete: so the other two forms of inference are the reference's.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixnorm.ops import reference
from mixnorm.ops.triton import tiles
from mixnorm.ops.triton.components import ACTIVATIONS, activate, inverse_sqrt, line, load_parameter
from mixnorm.ops.triton.launch import PLANS, Plan, cdiv, launch, power_of_two

MAX_COMPONENTS = 256
MIN_COMPONENTS = 16  # the least that a matrix product takes


class Tuning(NamedTuple):
    """How the kernel cuts its work: measured, see benchmarks/LOG.md."""

    block_m: int
    block_d: int
    num_warps: int
    num_stages: int
    per_processor: int
    kept: int  # channels that a tile may have to stay in registers


TUNING = {"tf32": Tuning(128, 32, 8, 1, 2, 256), "tf32x3": Tuning(64, 32, 4, 1, 2, 0)}
NARROW = 64  # channels; such tiles keep only half as many warps busy


def padded(slots: int, components: int) -> tuple[int, int]:
    """TP and KP."""
    k = power_of_two(components)
    return max(power_of_two(slots), MIN_COMPONENTS // k), k


def inference(
    points: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    slot_weights: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    activation: str | None,
    affine_mode: str,
) -> Tensor:
    """The transform under given mixtures: λ (B, T, K), μ and σ² (B, T, K, D), τ (B, T), γ and β (D,)."""
    y = torch.empty_like(points)
    tables_plan, plan = _plans(
        tiles.describe(points), y.stride(), tuple(weights.shape[1:]), weight is not None, bias is not None, eps, activation,
        affine_mode,
    )  # fmt: skip
    new: dict[str, Any] = {"dtype": torch.float32, "device": points.device}
    rows, numbers = torch.empty(tables_plan.info["rows"], **new), torch.empty(tables_plan.info["per_component"], **new)
    mixtures = (weights.contiguous(), slot_weights.contiguous(), means.contiguous(), variances.contiguous())
    launch(tables_plan, (*mixtures, weight, bias), (rows, numbers))
    launch(plan, (points, bias), (rows, numbers, y))
    return y


@functools.lru_cache(maxsize=PLANS)
def _plans(
    points: tiles.Described, y_strides: tuple[int, ...], history: tuple[int, int], has_weight: bool, has_bias: bool,
    eps: float, activation: str | None, affine_mode: str,
) -> tuple[Plan, Plan]:  # fmt: skip
    batch, outer, inner, dim = points.shape
    slots, components = history
    slots_pad, components_pad = padded(slots, components)
    total = slots_pad * components_pad
    options = {
        "HAS_WEIGHT": has_weight,
        "HAS_BIAS": has_bias,
        "ACTIVATION": ACTIVATIONS[activation],
        "IN_STATISTICS": affine_mode == "statistics",
        "T": slots,
        "K": components,
        "TP": slots_pad,
        "KP": components_pad,
    }
    tables_plan = Plan(
        _tables, (total, batch), (dim, eps, max(eps, reference.MIN_VARIANCE)),
        {**options, "BLOCK_D": 64, "ALL": power_of_two(slots * components)},
        rows=(batch, 4 * total + 1, dim), per_component=(batch, 2, total),
    )  # fmt: skip
    precision = "tf32" if points.dtype == torch.bfloat16 else "tf32x3"
    tuning = TUNING[precision]
    block_m = tuning.block_m if total <= 64 else 32
    block_d = min(tuning.block_d, max(16, power_of_two(dim)))
    num_warps = 4 if dim <= NARROW else tuning.num_warps
    shape = tiles.Tile(block_m, 1, 1, block_d, points.by_rows, 1, num_warps)
    x, y = tiles.walk(points, shape), tiles.walk(points._replace(strides=y_strides), shape)
    programs = min(cdiv(outer * inner, block_m), cdiv(tuning.per_processor * tiles.processors(points.device), batch))
    constants = {
        **options, "PRECISION": precision, "PATH": x.path, "ALIGN": x.align, "Y_PATH": y.path, "Y_ALIGN": y.align,
        "BLOCK_M": block_m, "BLOCK_D": block_d, "CHUNKS": cdiv(dim, block_d) if dim <= tuning.kept else 0,
        "num_warps": num_warps, "num_stages": tuning.num_stages,
    }  # fmt: skip
    numbers = (outer * inner, inner, dim // x.align, *x[:4], *y[:4])
    return tables_plan, Plan(_inference, (programs, batch), numbers, constants)


@triton.jit
def _tables(
    weights_ptr,  # λ (B, T, K)
    slot_weights_ptr,  # τ (B, T)
    means_ptr,  # (B, T, K, D)
    variances_ptr,  # (B, T, K, D)
    gamma_ptr,  # (D,)
    beta_ptr,  # (D,)
    # (B, 4·N + 1, D) with N = TP·KP, written: -w/2, w·(μ - anchor), slope, offset (with an activation, centre); the anchor
    rows_ptr,
    numbers_ptr,  # (B, 2, N), written: the constant of the log-density, the factor behind the posterior
    dim,
    eps,
    floor,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IN_STATISTICS: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    TP: tl.constexpr,
    KP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALL: tl.constexpr,
):
    N: tl.constexpr = TP * KP
    n, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, k = n // KP, n % KP
    exists = (slot < T) & (k < K)
    source = (b * T + slot) * K + k
    weight = tl.load(weights_ptr + source, mask=exists, other=0.0)
    tau = tl.load(slot_weights_ptr + b * T + slot, mask=exists, other=0.0)
    i = tl.arange(0, KP)
    filled = tl.sum(tl.load(weights_ptr + (b * T + slot) * K + i, mask=(slot < T) & (i < K), other=0.0), axis=0) > 0
    # As reference.inference_factors. An empty slot, and one that is only padding, has no posterior; a uniform one, times
    # τ = 0, keeps it out without a NaN. No component where there is none in a mixture.
    constant = tl.log(tl.where(filled, weight, 1.0))
    constant = tl.where((slot < T) & (k >= K), float("-inf"), constant)
    factor = tau * inverse_sqrt(weight)

    # The anchor is the mean of all mixtures, which every program needs and the first one keeps.
    every = tl.arange(0, ALL)
    share = tl.load(weights_ptr + b * T * K + every, mask=every < T * K, other=0.0)
    share *= tl.load(slot_weights_ptr + b * T + every // K, mask=every < T * K, other=0.0)
    rows_ptr += b * (4 * N + 1) * dim
    for start in range(0, dim, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        pointers = means_ptr + (b * T * K + every)[:, None] * dim + d[None, :]
        all_means = tl.load(pointers, mask=(every < T * K)[:, None] & (d < dim)[None, :], other=0.0)
        anchor = tl.sum(share[:, None] * all_means, axis=0)
        if n == 0:
            tl.store(rows_ptr + 4 * N * dim + d, anchor, mask=d < dim)
        mean = tl.load(means_ptr + source * dim + d, mask=exists & (d < dim), other=0.0)
        variance = tl.load(variances_ptr + source * dim + d, mask=exists & (d < dim), other=1.0)
        gamma = load_parameter(gamma_ptr, d, dim, 1.0, HAS_WEIGHT)
        beta = load_parameter(beta_ptr, d, dim, 0.0, HAS_BIAS)
        shift = tl.where(exists & (d < dim), mean - anchor, 0.0)
        inverse = tl.where(exists, 1.0 / tl.maximum(variance, floor), 0.0)
        logs = tl.where(exists & (d < dim), tl.log(tl.maximum(variance, floor)), 0.0)
        constant -= 0.5 * tl.sum(shift * shift * inverse + logs, axis=0)
        slope, centre = line(mean, variance, gamma, beta, eps, IN_STATISTICS)
        if ACTIVATION == 0:
            slope *= factor
            centre = slope * (anchor - centre)
        row = rows_ptr + n * dim + d
        tl.store(row, -0.5 * inverse, mask=d < dim)
        tl.store(row + N * dim, shift * inverse, mask=d < dim)
        tl.store(row + 2 * N * dim, tl.where(exists, slope, 0.0), mask=d < dim)
        tl.store(row + 3 * N * dim, tl.where(exists, centre, 0.0), mask=d < dim)
    tl.store(numbers_ptr + b * 2 * N + n, constant)
    tl.store(numbers_ptr + (b * 2 + 1) * N + n, factor)


@triton.jit
def _inference(
    x_ptr,  # (B, outer, inner, D)
    beta_ptr,  # (D,)
    rows_ptr,  # (B, 4·N + 1, D)
    numbers_ptr,  # (B, 2, N)
    y_ptr,  # (B, outer, inner, D), written
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
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IN_STATISTICS: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    TP: tl.constexpr,
    KP: tl.constexpr,
    PRECISION: tl.constexpr,
    PATH: tl.constexpr,
    ALIGN: tl.constexpr,
    Y_PATH: tl.constexpr,
    Y_ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    N: tl.constexpr = TP * KP
    b = tl.program_id(1).to(tl.int64)
    dim = dim_units * ALIGN
    n = tl.arange(0, N)
    x_ptr += b * x_b
    y_ptr += b * y_b
    rows_ptr += b * (4 * N + 1) * dim
    numbers_ptr += b * 2 * N
    anchor_ptr = rows_ptr + 4 * N * dim
    for tile in range(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.num_programs(0)):
        points = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        exists = points < m
        x_rows = _offsets(tile, points, inner, x_o, x_i, PATH, ALIGN, BLOCK_M)
        y_rows = _offsets(tile, points, inner, y_o, y_i, Y_PATH, Y_ALIGN, BLOCK_M)
        logs = tl.zeros((BLOCK_M, N), tl.float32)
        kept = ()
        if CHUNKS > 0:  # the tile stays in registers for its second use, and all of it is on its way at once
            for c in tl.static_range(CHUNKS):
                kept = kept + (_load(x_ptr, x_rows, exists, c * BLOCK_D + tl.arange(0, BLOCK_D), dim, x_d),)
            for c in tl.static_range(CHUNKS):
                d = c * BLOCK_D + tl.arange(0, BLOCK_D)
                logs = _add_logs(logs, kept[c], anchor_ptr, rows_ptr, n, d, dim, N, PRECISION)
        else:
            for start in range(0, dim, BLOCK_D):
                d = start + tl.arange(0, BLOCK_D)
                x = _load(x_ptr, x_rows, exists, d, dim, x_d)
                logs = _add_logs(logs, x, anchor_ptr, rows_ptr, n, d, dim, N, PRECISION)
        mixing = _posterior(logs + tl.load(numbers_ptr + n)[None, :], BLOCK_M, TP, KP)
        if CHUNKS > 0:
            for c in tl.static_range(CHUNKS):
                d = c * BLOCK_D + tl.arange(0, BLOCK_D)
                y = _sum(
                    mixing, kept[c], anchor_ptr, rows_ptr, numbers_ptr, beta_ptr, n, d, dim,
                    HAS_BIAS, ACTIVATION, IN_STATISTICS, T, K, KP, N, PRECISION, BLOCK_M, BLOCK_D,
                )  # fmt: skip
                _store(y_ptr, y, y_rows, exists, d, dim, y_d)
        else:
            for start in range(0, dim, BLOCK_D):
                d = start + tl.arange(0, BLOCK_D)
                x = _load(x_ptr, x_rows, exists, d, dim, x_d)
                y = _sum(
                    mixing, x, anchor_ptr, rows_ptr, numbers_ptr, beta_ptr, n, d, dim,
                    HAS_BIAS, ACTIVATION, IN_STATISTICS, T, K, KP, N, PRECISION, BLOCK_M, BLOCK_D,
                )  # fmt: skip
                _store(y_ptr, y, y_rows, exists, d, dim, y_d)


@triton.jit
def _add_logs(logs, x, anchor_ptr, rows_ptr, n, d, dim, N: tl.constexpr, PRECISION: tl.constexpr):
    """Adds what the channels ``d`` of x (BLOCK_M, BLOCK_D) contribute to the log-densities (BLOCK_M, N)."""
    centred = x.to(tl.float32) - tl.load(anchor_ptr + d, mask=d < dim, other=0.0)[None, :]
    row = rows_ptr + n[None, :] * dim + d[:, None]
    quadratic = tl.load(row, mask=(d < dim)[:, None], other=0.0)
    linear = tl.load(row + N * dim, mask=(d < dim)[:, None], other=0.0)
    logs = tl.dot(centred * centred, quadratic, logs, input_precision=PRECISION)
    return tl.dot(centred, linear, logs, input_precision=PRECISION)


@triton.jit
def _sum(
    mixing, x, anchor_ptr, rows_ptr, numbers_ptr, beta_ptr, n, d, dim, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    IN_STATISTICS: tl.constexpr, T: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The result for the channels ``d``, (BLOCK_M, BLOCK_D): the sum over all components, weighted by the posterior."""
    beta = load_parameter(beta_ptr, d, dim, 0.0, HAS_BIAS)
    if ACTIVATION == 0:
        row = rows_ptr + (2 * N + n)[:, None] * dim + d[None, :]
        slopes = tl.load(row, mask=(d < dim)[None, :], other=0.0)
        offsets = tl.load(row + N * dim, mask=(d < dim)[None, :], other=0.0)
        y = tl.dot(mixing, slopes, input_precision=PRECISION)
        y *= x.to(tl.float32) - tl.load(anchor_ptr + d, mask=d < dim, other=0.0)[None, :]
        y = tl.dot(mixing, offsets, y, input_precision=PRECISION)
        if not IN_STATISTICS:
            y += beta[None, :]
    else:
        y = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for slot in range(T):
            for k in range(K):
                place = slot * KP + k
                line_ptr = rows_ptr + (2 * N + place) * dim + d
                z = x.to(tl.float32) - tl.load(line_ptr + N * dim, mask=d < dim, other=0.0)[None, :]
                z *= tl.load(line_ptr, mask=d < dim, other=0.0)[None, :]
                if not IN_STATISTICS:
                    z += beta[None, :]
                share = tl.sum(tl.where((n == place)[None, :], mixing, 0.0), axis=1)
                share *= tl.load(numbers_ptr + N + place)
                y += share[:, None] * activate(z, ACTIVATION)
    return y


@triton.jit
def _offsets(tile, points, inner, stride_o, stride_i, PATH: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr):
    offsets = tiles.row_offsets(tile, points[:, None], inner, stride_o, stride_i, PATH, ALIGN, BLOCK_M, 1)
    return tl.reshape(offsets, (BLOCK_M,))


@triton.jit
def _load(ptr, rows, exists, d, dim, stride_d):
    """(BLOCK_M, BLOCK_D) as it lies in memory; 0 where there is nothing."""
    mask = exists[:, None] & (d < dim)[None, :]
    return tl.load(ptr + rows[:, None] + (d * stride_d)[None, :], mask=mask, other=0.0)


@triton.jit
def _store(ptr, value, rows, exists, d, dim, stride_d):
    mask = exists[:, None] & (d < dim)[None, :]
    tl.store(ptr + rows[:, None] + (d * stride_d)[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _posterior(logs, M: tl.constexpr, TP: tl.constexpr, KP: tl.constexpr):
    """The softmax of (M, TP·KP) over each mixture's components."""
    logs = tl.reshape(logs, (M, TP, KP))
    terms = tl.exp(logs - tl.max(logs, axis=2, keep_dims=True))
    return tl.reshape(terms / tl.sum(terms, axis=2, keep_dims=True), (M, TP * KP))
