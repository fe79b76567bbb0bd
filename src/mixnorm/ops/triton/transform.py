"""The transform of a batch in one read and one write: ``reference.normalize``."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixnorm.ops.kernels import Form, Mixture, Parameters
from mixnorm.ops.triton import tiles
from mixnorm.ops.triton.components import activate, load_lines, transform_options
from mixnorm.ops.triton.launch import PLANS, Plan, launch
from mixnorm.ops.triton.tiles import channels, load_tile, row_offsets, rows_of_tile, store_tile, tall, wide


def mix(
    points: Tensor, resp: Tensor, statistics: Mixture, parameters: Parameters, form: Form, out: Tensor | None = None
) -> Tensor:
    """Σ_k ν_k · a_k · act(x̂_k) with γ and β; ``resp`` (B, m, K) lies in memory as (B, K, m)."""
    y = torch.empty_like(points) if out is None else out
    options = transform_options(parameters, form)
    plan = _mix_plan(tiles.describe(points), y.stride(), resp.shape[2], form.eps, options)
    launch(plan, (points, resp, *statistics, *parameters), (y,))
    return y


@functools.lru_cache(maxsize=PLANS)
def _mix_plan(
    points: tiles.Described, y_strides: tuple[int, ...], components: int, eps: float, options: tuple[Any, ...]
) -> Plan:
    batch, outer, inner, dim = points.shape
    shape = tiles.tile(points, components, "transform")
    x, y = tiles.walk(points, shape), tiles.walk(points._replace(strides=y_strides), shape)
    constants = {
        **dict(options), **shape._asdict(), "K": components, "PATH": x.path, "ALIGN": x.align, "Y_PATH": y.path,
        "Y_ALIGN": y.align,
    }  # fmt: skip
    numbers = (outer * inner, inner, dim // x.align, *x[:4], *y[:4], eps)
    return Plan(_mix, (tiles.programs(points, shape, "transform"), batch), numbers, constants)


@triton.jit
def _mix(
    x_ptr,  # (B, outer, inner, D)
    resp_ptr,  # (B, K, m)
    weights_ptr,  # λ (B, K)
    means_ptr,  # (B, K, D)
    variances_ptr,  # (B, K, D)
    gamma_ptr,  # (D,), or (K, D) if PER_COMPONENT
    beta_ptr,  # as γ
    within_ptr,  # g (D,)
    between_ptr,  # b (D,)
    deviation_ptr,  # d (D,)
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
    eps,
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
    W: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    V: tl.constexpr,
    BY_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PATH: tl.constexpr,
    ALIGN: tl.constexpr,
    Y_PATH: tl.constexpr,
    Y_ALIGN: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    dim = dim_units * ALIGN
    d = channels(S, V)
    factor, slope, centre, offset, bend, beta = load_lines(
        weights_ptr + b * K, means_ptr + b * K * dim, variances_ptr + b * K * dim, gamma_ptr, beta_ptr, within_ptr,
        between_ptr, deviation_ptr, d, dim, eps, K, HAS_WEIGHT, HAS_BIAS, HAS_WITHIN, HAS_BETWEEN, HAS_DEVIATION,
        ACTIVATION, IN_STATISTICS, UNIT, PER_COMPONENT, INSIDE,
    )  # fmt: skip
    for tile in tl.range(tl.program_id(0), tl.cdiv(m, W * R), tl.num_programs(0), num_stages=STAGES):
        points, exists = rows_of_tile(tile, m, W, R)
        x_rows = row_offsets(tile, points, inner, x_o, x_i, PATH, ALIGN, W, R)
        x = load_tile(x_ptr + b * x_b, x_rows, exists, d, dim, x_d)
        y = tl.zeros((W, R, S, V), tl.float32)
        for k in tl.static_range(K):
            mixing = tl.load(resp_ptr + (b * K + k) * m + points, mask=exists, other=0.0) * factor[k]
            z = x - wide(centre[k])
            if ACTIVATION == 0 and not HAS_BETWEEN and not HAS_DEVIATION and not PER_COMPONENT:
                y += tall(mixing) * wide(slope[k]) * z
            else:
                z *= wide(slope[k]) + wide(bend[k]) * z if HAS_DEVIATION else wide(slope[k])
                if not IN_STATISTICS:
                    z += wide(offset[k])
                y += tall(mixing) * activate(z, ACTIVATION)
        if ACTIVATION == 0 and not IN_STATISTICS and not PER_COMPONENT:
            y += wide(beta)
        y_rows = row_offsets(tile, points, inner, y_o, y_i, Y_PATH, Y_ALIGN, W, R)
        store_tile(y_ptr + b * y_b, y, y_rows, exists, d, dim, y_d)
