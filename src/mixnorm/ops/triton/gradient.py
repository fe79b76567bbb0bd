"""The gradient of the transform in one launch and two passes, as batch norm's: sums over the points, then the points' own.

With h_k = ν_k/√λ_k·act'(z_k)·g, and a_k, c_k the slope and centre of a component, all that the first pass needs are
P_k = Σ_i h_k and Q_k = Σ_i h_k·(x - c_k). They give the gradients of μ_k, σ²_k, γ and β (docs/mathematics.md), and

    ∂L/∂x = Σ_k h_k·a_k + Σ_k ν_k·(∂L/∂μ_k + 2·∂L/∂σ²_k·(x - μ_k))/n_k.

The second pass walks backward, so that it begins with what the cache still holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixnorm.ops.triton import tiles, together
from mixnorm.ops.triton.components import ACTIVATIONS, activation_slope, inverse_sqrt, lines, load_parameter
from mixnorm.ops.triton.em import contribute_pairs, load_components
from mixnorm.ops.triton.tiles import channels, load_tile, no_sums, over_rows, row_offsets, rows_of_tile, store_tile, tall, wide
from mixnorm.ops.triton.together import meet, own_part

Statistics = tuple[Tensor, Tensor, Tensor]


def mix_backward(
    grad: Tensor,
    points: Tensor,
    resp: Tensor,
    statistics: Statistics,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    activation: str | None,
    affine_mode: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the points, γ and β (the last two (B, D)), where μ and σ² are the statistics of the points."""
    batch, outer, inner, dim = points.shape
    components, m = resp.shape[2], outer * inner
    grad_weight, grad_bias = torch.empty(2, batch, dim, dtype=torch.float32, device=points.device).unbind()
    grad_points = torch.empty_like(points)
    shape = tiles.tile(points, components, "gradient")
    x_walk, g_walk, y_walk = (tiles.walk(t, shape) for t in (points, grad, grad_points))
    group = together.group(
        points, triton.cdiv(m, shape.W * shape.R), shape.num_warps, tiles.TUNING["gradient"].per_processor, 2 * components * dim
    )
    with tiles.on_device(points):
        _gradient[(group.count, batch)](
            points, grad, resp, *statistics, weight, bias, group.totals, group.partial, group.barrier,
            grad_points, grad_weight, grad_bias, m, inner, dim // x_walk.align, *x_walk[:4], *g_walk[:4], *y_walk[:4], eps,
            HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, ACTIVATION=ACTIVATIONS[activation],
            IN_STATISTICS=affine_mode == "statistics", K=components,
            PATH=x_walk.path, ALIGN=x_walk.align, G_PATH=g_walk.path, G_ALIGN=g_walk.align,
            Y_PATH=y_walk.path, Y_ALIGN=y_walk.align, **shape._asdict(), **group.constants,
        )  # fmt: skip
    return grad_points, grad_weight, grad_bias


@triton.jit
def _gradient(
    x_ptr,  # (B, outer, inner, D)
    grad_ptr,  # (B, outer, inner, D)
    resp_ptr,  # (B, K, m)
    weights_ptr,  # λ (B, K)
    means_ptr,  # (B, K, D)
    variances_ptr,  # (B, K, D)
    gamma_ptr,  # (D,)
    beta_ptr,  # (D,)
    totals_ptr,  # (B, 2, K, D), zeros at first: P and Q without 1/√λ
    partial_ptr,  # (B, G, 2, K, D) if IN_ORDER
    barrier_ptr,  # (B,) zeros
    out_ptr,  # (B, outer, inner, D), written
    grad_gamma_ptr,  # (B, D), written
    grad_beta_ptr,  # (B, D), written
    m,
    inner,
    dim_units,
    x_b,
    x_o,
    x_i,
    x_d,
    g_b,
    g_o,
    g_i,
    g_d,
    y_b,
    y_o,
    y_i,
    y_d,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IN_STATISTICS: tl.constexpr,
    K: tl.constexpr,
    PATH: tl.constexpr,
    ALIGN: tl.constexpr,
    G_PATH: tl.constexpr,
    G_ALIGN: tl.constexpr,
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
    grad_ptr += b * g_b
    resp_ptr += b * K * m
    gamma = load_parameter(gamma_ptr, d, dim, 1.0, HAS_WEIGHT)
    beta = load_parameter(beta_ptr, d, dim, 0.0, HAS_BIAS)
    weights, means, variances = load_components(weights_ptr + b * K, means_ptr + row, variances_ptr + row, d, dim, K)
    factor, slope, centre = lines(weights, means, variances, gamma, beta, eps, K, IN_STATISTICS)
    tiles_in_all = tl.cdiv(m, W * R)

    first, second = (), ()
    for _ in tl.static_range(K):
        first = first + (no_sums(W, S, V, BY_ROWS),)
        second = second + (no_sums(W, S, V, BY_ROWS),)
    for tile in tl.range(program, tiles_in_all, programs, num_stages=STAGES):
        points, exists = rows_of_tile(tile, m, W, R)
        x_rows = row_offsets(tile, points, inner, x_o, x_i, PATH, ALIGN, W, R)
        g_rows = row_offsets(tile, points, inner, g_o, g_i, G_PATH, G_ALIGN, W, R)
        x = load_tile(x_ptr, x_rows, exists, d, dim, x_d)
        grad = load_tile(grad_ptr, g_rows, exists, d, dim, g_d)
        new_first, new_second = (), ()
        for k in tl.static_range(K):
            resp = tl.load(resp_ptr + k * m + points, mask=exists, other=0.0)
            centred = x - wide(centre[k])
            weighted = tall(resp) * grad
            if ACTIVATION != 0:
                z = wide(slope[k]) * centred
                if not IN_STATISTICS:
                    z += wide(beta)
                weighted *= activation_slope(z, ACTIVATION)
            new_first = new_first + (first[k] + over_rows(weighted, BY_ROWS),)
            new_second = new_second + (second[k] + over_rows(weighted * centred, BY_ROWS),)
        first, second = new_first, new_second
    numbers = 2 * K * dim
    totals_ptr += b * numbers
    own_ptr = own_part(totals_ptr, partial_ptr, numbers, b, program, programs, IN_ORDER)
    contribute_pairs(own_ptr, first, second, d, dim, K, BY_ROWS, ALONE, IN_ORDER)
    barrier_ptr += b
    meet(totals_ptr, partial_ptr, numbers, barrier_ptr, programs, b, program, programs, PROGRAMS_PAD, ALONE, IN_ORDER)

    # From P and Q to the gradients of μ, σ², γ and β.
    grad_gamma = tl.zeros((S, V), tl.float32)
    grad_beta = tl.zeros((S, V), tl.float32)
    offset, tilt = (), ()
    for k in tl.static_range(K):
        p = tl.load(totals_ptr + k * dim + d, mask=d < dim, other=0.0)
        q = tl.load(totals_ptr + (K + k) * dim + d, mask=d < dim, other=0.0) * factor[k]
        grad_mean = -slope[k] * p * factor[k]
        if IN_STATISTICS:
            grad_scale = -0.5 * slope[k] * slope[k] * slope[k] * q  # with respect to γ·σ² + ε
            grad_variance = grad_scale * tl.maximum(gamma, 0.0)
            grad_gamma += tl.where(gamma >= 0, grad_scale * variances[k], 0.0)
            grad_beta += grad_mean
        else:
            inverse = 1.0 / tl.sqrt(variances[k] + eps)
            grad_variance = -0.5 * gamma * inverse * inverse * inverse * q
            grad_gamma += inverse * q
            # Without an activation β is added once, and Σ_k ν_k = 1.
            grad_beta += p if ACTIVATION == 0 else p * factor[k]
        in_use = tl.where(weights[k] > 0, 1.0 / (weights[k] * m), 0.0)
        offset = offset + (grad_mean * in_use,)
        tilt = tilt + (2.0 * grad_variance * in_use,)
    if program == 0:
        tl.store(grad_gamma_ptr + b * dim + d, grad_gamma, mask=d < dim)
        tl.store(grad_beta_ptr + b * dim + d, grad_beta, mask=d < dim)

    own_tiles = tl.cdiv(tiles_in_all - program, programs)
    for back in tl.range(0, own_tiles, 1, num_stages=STAGES):
        tile = program + (own_tiles - 1 - back) * programs
        points, exists = rows_of_tile(tile, m, W, R)
        x_rows = row_offsets(tile, points, inner, x_o, x_i, PATH, ALIGN, W, R)
        g_rows = row_offsets(tile, points, inner, g_o, g_i, G_PATH, G_ALIGN, W, R)
        x = load_tile(x_ptr, x_rows, exists, d, dim, x_d)
        grad = load_tile(grad_ptr, g_rows, exists, d, dim, g_d)
        out = tl.zeros((W, R, S, V), tl.float32)
        for k in tl.static_range(K):
            resp = tl.load(resp_ptr + k * m + points, mask=exists, other=0.0)
            direct = wide(factor[k] * slope[k]) * grad
            if ACTIVATION != 0:
                z = wide(slope[k]) * (x - wide(centre[k]))
                if not IN_STATISTICS:
                    z += wide(beta)
                direct *= activation_slope(z, ACTIVATION)
            through = wide(offset[k]) + wide(tilt[k]) * (x - wide(means[k]))
            out += tall(resp) * (direct + through)
        y_rows = row_offsets(tile, points, inner, y_o, y_i, Y_PATH, Y_ALIGN, W, R)
        store_tile(out_ptr + b * y_b, out, y_rows, exists, d, dim, y_d)
