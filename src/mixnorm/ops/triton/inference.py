"""Evaluation under T mixtures of K components in one read and one write: ``reference.inference``.

T·K is some tens of components, too many to go through one by one: the squared distances, and without an activation the sum
over the components too, are matrix products. Relative to an anchor (the mean of all mixtures) and with w = 1/σ²,

    log λ + log p(x) = Σ_d [-½·w·(x - anchor)² + w·(μ - anchor)·(x - anchor)] + constant,
    y = (x - anchor)·Σ ν·slope + Σ ν·offset.

The products are of numbers split into parts, so that nothing is lost to the matrix units' short formats. Components are laid
out as (TP, KP), T and K rounded up to powers of two, so that the softmax over one mixture's components is over an axis.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixnorm.ops import reference
from mixnorm.ops.triton import tiles
from mixnorm.ops.triton.components import ACTIVATIONS, activate, line, load_parameter

MAX_COMPONENTS = 256
MIN_COMPONENTS = 16  # the least that a matrix product takes


def padded(slots: int, components: int) -> tuple[int, int]:
    """TP and KP."""
    k = triton.next_power_of_2(components)
    return max(triton.next_power_of_2(slots), MIN_COMPONENTS // k), k


def inference(
    points: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    slot_weights: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    mode: str,
    eps: float,
    activation: str | None,
    affine_mode: str,
) -> Tensor:
    """The transform under given mixtures: λ (B, T, K), μ and σ² (B, T, K, D), τ (B, T), γ and β (D,)."""
    batch, outer, inner, dim = points.shape
    slots, components = weights.shape[1:]
    slots_pad, components_pad = padded(slots, components)
    total = slots_pad * components_pad
    log_weights, factor = reference.inference_factors(weights, slot_weights, mode=mode)
    new: dict[str, Any] = {"dtype": torch.float32, "device": points.device}
    rows = torch.empty(batch, 4, total, dim, **new)
    numbers = torch.empty(batch, 2, total, **new)
    anchor = (weights * slot_weights.unsqueeze(-1)).flatten(1).unsqueeze(1) @ means.flatten(1, 2)  # (B, 1, D)
    y = torch.empty_like(points)
    by_rows = dim == 1 or points.stride(-1) == 1
    block_m = 64 if total <= 64 else 32
    block_d = min(64, max(16, triton.next_power_of_2(dim)))
    shape = tiles.Tile(block_m, 1, 1, block_d, by_rows, 4)
    x_walk, y_walk = tiles.walk(points, shape), tiles.walk(y, shape)
    options = {
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "ACTIVATION": ACTIVATIONS[activation],
        "IN_STATISTICS": affine_mode == "statistics",
        "T": slots,
        "K": components,
        "TP": slots_pad,
        "KP": components_pad,
        "PER_SLOT": mode == "ensemble",
    }
    with tiles.on_device(points):
        _tables[(total, batch)](
            log_weights.contiguous(), factor.contiguous(), means.contiguous(), variances.contiguous(), anchor,
            weight, bias, rows, numbers, dim, eps, max(eps, reference.MIN_VARIANCE),
            **options, BLOCK_D=min(1024, triton.next_power_of_2(dim)), num_warps=4,
        )  # fmt: skip
        programs = min(triton.cdiv(outer * inner, block_m), triton.cdiv(4 * tiles.processors(points.device), batch))
        _inference[(programs, batch)](
            points, anchor, rows, numbers, bias, y, outer * inner, inner, dim // x_walk.align, *x_walk[:4], *y_walk[:4],
            **options, PRECISION="tf32x3" if points.dtype == torch.float32 else "bf16x3",
            PATH=x_walk.path, ALIGN=x_walk.align, Y_PATH=y_walk.path, Y_ALIGN=y_walk.align,
            BLOCK_M=block_m, BLOCK_D=block_d, num_warps=4, num_stages=1,
        )  # fmt: skip
    return y


@triton.jit
def _tables(
    log_weights_ptr,  # (B, T, K)
    factor_ptr,  # (B, T, K)
    means_ptr,  # (B, T, K, D)
    variances_ptr,  # (B, T, K, D)
    anchor_ptr,  # (B, D)
    gamma_ptr,  # (D,)
    beta_ptr,  # (D,)
    rows_ptr,  # (B, 4, TP·KP, D), written: -w/2, w·(μ - anchor), slope, offset (with an activation: slope, centre)
    numbers_ptr,  # (B, 2, TP·KP), written: the constant of the log-density, the factor behind the posterior
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
    PER_SLOT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    n, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, k = n // KP, n % KP
    exists = (slot < T) & (k < K)
    source = (b * T + slot) * K + k
    factor = tl.load(factor_ptr + source, mask=exists, other=0.0)
    constant = tl.load(log_weights_ptr + source, mask=exists, other=float("-inf"))
    if PER_SLOT:  # a mixture that is only padding gets any posterior, without a NaN, and the factor 0
        constant = tl.where(slot < T, constant, 0.0)
    for start in range(0, dim, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        anchor = tl.load(anchor_ptr + b * dim + d, mask=d < dim, other=0.0)
        mean = tl.load(means_ptr + source * dim + d, mask=exists & (d < dim), other=0.0)
        variance = tl.load(variances_ptr + source * dim + d, mask=exists & (d < dim), other=1.0)
        gamma = load_parameter(gamma_ptr, d, dim, 1.0, HAS_WEIGHT)
        beta = load_parameter(beta_ptr, d, dim, 0.0, HAS_BIAS)
        shift = tl.where(exists, mean - anchor, 0.0)
        inverse = tl.where(exists, 1.0 / tl.maximum(variance, floor), 0.0)
        logs = tl.where(exists & (d < dim), tl.log(tl.maximum(variance, floor)), 0.0)
        constant -= 0.5 * tl.sum(tl.where(d < dim, shift * shift * inverse, 0.0) + logs, axis=0)
        slope, centre = line(mean, variance, gamma, beta, eps, IN_STATISTICS)
        if ACTIVATION == 0:
            slope *= factor
            centre = slope * (anchor - centre)
        row = rows_ptr + (b * 4 * TP * KP + n) * dim + d
        tl.store(row, -0.5 * inverse, mask=d < dim)
        tl.store(row + TP * KP * dim, shift * inverse, mask=d < dim)
        tl.store(row + 2 * TP * KP * dim, tl.where(exists, slope, 0.0), mask=d < dim)
        tl.store(row + 3 * TP * KP * dim, tl.where(exists, centre, 0.0), mask=d < dim)
    tl.store(numbers_ptr + b * 2 * TP * KP + n, constant)
    tl.store(numbers_ptr + (b * 2 + 1) * TP * KP + n, factor)


@triton.jit
def _inference(
    x_ptr,  # (B, outer, inner, D)
    anchor_ptr,  # (B, D)
    rows_ptr,  # (B, 4, TP·KP, D)
    numbers_ptr,  # (B, 2, TP·KP)
    beta_ptr,  # (D,)
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
    PER_SLOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PATH: tl.constexpr,
    ALIGN: tl.constexpr,
    Y_PATH: tl.constexpr,
    Y_ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    N: tl.constexpr = TP * KP
    b = tl.program_id(1).to(tl.int64)
    dim = dim_units * ALIGN
    n = tl.arange(0, N)
    x_ptr += b * x_b
    y_ptr += b * y_b
    anchor_ptr += b * dim
    rows_ptr += b * 4 * N * dim
    constant = tl.load(numbers_ptr + b * 2 * N + n)
    factor = tl.load(numbers_ptr + (b * 2 + 1) * N + n)
    for tile in range(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.num_programs(0)):
        points = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        exists = points < m
        x_rows = _offsets(tile, points, inner, x_o, x_i, PATH, ALIGN, BLOCK_M)
        y_rows = _offsets(tile, points, inner, y_o, y_i, Y_PATH, Y_ALIGN, BLOCK_M)
        logs = tl.zeros((BLOCK_M, N), tl.float32)
        for start in range(0, dim, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            centred = _load_centred(x_ptr, anchor_ptr, x_rows, exists, d, dim, x_d)
            quadratic = tl.load(rows_ptr + n[None, :] * dim + d[:, None], mask=(d < dim)[:, None], other=0.0)
            linear = tl.load(rows_ptr + (N + n)[None, :] * dim + d[:, None], mask=(d < dim)[:, None], other=0.0)
            logs = tl.dot(centred * centred, quadratic, logs, input_precision=PRECISION)
            logs = tl.dot(centred, linear, logs, input_precision=PRECISION)
        mixing = _posterior(logs + constant[None, :], BLOCK_M, TP, KP, PER_SLOT)
        if ACTIVATION != 0:
            mixing *= factor[None, :]
        for start in range(0, dim, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            beta = load_parameter(beta_ptr, d, dim, 0.0, HAS_BIAS)
            if ACTIVATION == 0:
                centred = _load_centred(x_ptr, anchor_ptr, x_rows, exists, d, dim, x_d)
                slope = tl.load(rows_ptr + (2 * N + n)[:, None] * dim + d[None, :], mask=(d < dim)[None, :], other=0.0)
                offset = tl.load(rows_ptr + (3 * N + n)[:, None] * dim + d[None, :], mask=(d < dim)[None, :], other=0.0)
                y = centred * tl.dot(mixing, slope, input_precision=PRECISION)
                y += tl.dot(mixing, offset, input_precision=PRECISION)
                if not IN_STATISTICS:
                    y += beta[None, :]
            else:
                pointers = x_ptr + x_rows[:, None] + (d * x_d)[None, :]
                x = tl.load(pointers, mask=exists[:, None] & (d < dim)[None, :], other=0.0).to(tl.float32)
                y = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
                for slot in range(T):
                    for k in range(K):
                        row = rows_ptr + (2 * N + slot * KP + k) * dim + d
                        slope = tl.load(row, mask=d < dim, other=0.0)
                        centre = tl.load(row + N * dim, mask=d < dim, other=0.0)
                        z = slope[None, :] * (x - centre[None, :])
                        if not IN_STATISTICS:
                            z += beta[None, :]
                        share = tl.sum(tl.where((n == slot * KP + k)[None, :], mixing, 0.0), axis=1)
                        y += share[:, None] * activate(z, ACTIVATION)
            pointers = y_ptr + y_rows[:, None] + (d * y_d)[None, :]
            tl.store(pointers, y.to(y_ptr.dtype.element_ty), mask=exists[:, None] & (d < dim)[None, :])


@triton.jit
def _offsets(tile, points, inner, stride_o, stride_i, PATH: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr):
    offsets = tiles.row_offsets(tile, points[:, None], inner, stride_o, stride_i, PATH, ALIGN, BLOCK_M, 1)
    return tl.reshape(offsets, (BLOCK_M,))


@triton.jit
def _load_centred(x_ptr, anchor_ptr, rows, exists, d, dim, stride_d):
    """x - anchor, (BLOCK_M, BLOCK_D); 0 where there is nothing."""
    anchor = tl.load(anchor_ptr + d, mask=d < dim, other=0.0)
    mask = exists[:, None] & (d < dim)[None, :]
    x = tl.load(x_ptr + rows[:, None] + (d * stride_d)[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, x - anchor[None, :], 0.0)


@triton.jit
def _posterior(logs, M: tl.constexpr, TP: tl.constexpr, KP: tl.constexpr, PER_SLOT: tl.constexpr):
    """The softmax of (M, TP·KP) over each mixture's components, or over all."""
    if PER_SLOT:
        logs = tl.reshape(logs, (M, TP, KP))
        terms = tl.exp(logs - tl.max(logs, axis=2, keep_dims=True))
        posterior = tl.reshape(terms / tl.sum(terms, axis=2, keep_dims=True), (M, TP * KP))
    else:
        terms = tl.exp(logs - tl.max(logs, axis=1, keep_dims=True))
        posterior = terms / tl.sum(terms, axis=1, keep_dims=True)
    return posterior
