"""The gradient of the transform in two passes over the tensor: sums over the points, then ∂L/∂x of each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixnorm.ops.kernels import Form, Mixture, Parameters
from mixnorm.ops.triton import tiles
from mixnorm.ops.triton.components import (
    activation_slope,
    component_scale,
    load_lines,
    load_parameter,
    taken_together,
    transform_options,
)
from mixnorm.ops.triton.launch import PLANS, Plan, cdiv, launch, power_of_two
from mixnorm.ops.triton.tiles import (
    channels,
    load_tile,
    no_sums,
    over_rows,
    over_width,
    row_offsets,
    rows_of_tile,
    store_tile,
    tall,
    wide,
)

LINES_COLUMNS = 4
_SQRT_HALF = tl.constexpr(0.7071067811865476)
LINES_ELEMENTS = 96 * 128  # that a program holds at once


def mix_backward(
    grad: Tensor,
    points: Tensor,
    resp: Tensor,
    statistics: Mixture,
    parameters: Parameters,
    form: Form,
    over_ranks: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of the points and the parameters, where μ and σ² are the statistics of the points.

    ``over_ranks`` changes ∂L/∂μ_k / n_k and 2·∂L/∂σ²_k / n_k (B, 2, K, D) in place, where those are of more points yet.
    """
    components = resp.shape[2]
    grad_points = torch.empty_like(points)
    options = transform_options(parameters, form)
    sums_plan, lines_plan, plan = _gradient_plans(
        tiles.describe(points), grad.stride(), grad_points.stride(), components, form.eps, options
    )
    new: Any = {"dtype": torch.float32, "device": points.device}
    batch, dim = points.shape[0], points.shape[3]
    sums, lines = torch.empty(sums_plan.info["sums"], **new), torch.empty(batch, 2, components, dim, **new)
    rows = components if form.component_affine else 1
    of_affine = torch.empty(2, batch, rows, dim, **new)
    given = (*statistics, *parameters)
    has_gates = not (parameters.within is None and parameters.between is None and parameters.deviation is None)
    of_gates = torch.empty(3, batch, dim, **new) if has_gates else None
    launch(sums_plan, (points, grad, resp, *given), (sums,))
    launch(lines_plan, given, (sums, lines, of_affine, of_gates))
    if over_ranks is not None:
        over_ranks(lines)
    launch(plan, (points, grad, resp, *given), (lines, grad_points))
    shape = (rows, dim) if form.component_affine else (dim,)
    return grad_points, *_over_mixtures(of_affine, shape), *_over_mixtures(of_gates, (dim,))


def _over_mixtures(found: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of parameters of a shape, from those that each of the B mixtures has."""
    if found is None:
        return (None, None, None)
    count, batch = found.shape[:2]
    return (found if batch == 1 else found.sum(1)).view(count, *shape).unbind()


@functools.lru_cache(maxsize=PLANS)
def _gradient_plans(
    points: tiles.Described, grad_strides: tuple[int, ...], out_strides: tuple[int, ...], components: int, eps: float,
    options: tuple[Any, ...],
) -> tuple[Plan, Plan, Plan]:  # fmt: skip
    batch, outer, inner, dim = points.shape
    m = outer * inner
    common = {**dict(options), "K": components}
    moments = 3 if common["HAS_DEVIATION"] else 2
    grad, out = points._replace(strides=grad_strides), points._replace(strides=out_strides)

    shape = tiles.tile(points, components, "gradient_sums")
    count = tiles.programs(points, shape, "gradient_sums")
    x, g = tiles.walk(points, shape), tiles.walk(grad, shape)
    constants = {**common, **shape._asdict(), "PATH": x.path, "ALIGN": x.align, "G_PATH": g.path, "G_ALIGN": g.align}
    sums_plan = Plan(
        _gradient_sums, (count, batch), (m, inner, dim // x.align, *x[:4], *g[:4], eps), constants,
        sums=(batch, count, moments, components, dim),
    )  # fmt: skip

    most = tiles.power_of_two_below(LINES_ELEMENTS // (moments * components * LINES_COLUMNS))
    constants = {**common, "COLUMNS": LINES_COLUMNS, "PROGRAMS": min(most, power_of_two(count))}
    lines_plan = Plan(_gradient_lines, (cdiv(dim, LINES_COLUMNS), batch), (m, dim, count, eps), constants)

    shape = tiles.tile(points, components, "gradient")
    x, g, y = tiles.walk(points, shape), tiles.walk(grad, shape), tiles.walk(out, shape)
    constants = {
        **common, **shape._asdict(), "PATH": x.path, "ALIGN": x.align, "G_PATH": g.path, "G_ALIGN": g.align,
        "Y_PATH": y.path, "Y_ALIGN": y.align,
    }  # fmt: skip
    numbers = (m, inner, dim // x.align, *x[:4], *g[:4], *y[:4], eps)
    return sums_plan, lines_plan, Plan(_gradient, (tiles.programs(points, shape, "gradient"), batch), numbers, constants)


@triton.jit
def _gradient_sums(
    x_ptr,  # (B, outer, inner, D)
    grad_ptr,  # (B, outer, inner, D)
    resp_ptr,  # (B, K, m)
    weights_ptr,  # λ (B, K)
    means_ptr,  # (B, K, D)
    variances_ptr,  # (B, K, D)
    gamma_ptr,  # (D,), or (K, D) if PER_COMPONENT
    beta_ptr,  # as γ
    within_ptr,  # g (D,)
    between_ptr,  # b (D,)
    deviation_ptr,  # d (D,)
    sums_ptr,  # (B, G, 2, K, D), written: P_k = Σ ν_k·act'·g, Q_k = Σ ν_k·act'·g·(x - c_k), and Σ ν_k·act'·g·(x - c_k)² if 3
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
    G_PATH: tl.constexpr,
    G_ALIGN: tl.constexpr,
):
    program, programs, b = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    dim = dim_units * ALIGN
    d = channels(S, V)
    _, slope, centre, offset, bend, _ = load_lines(
        weights_ptr + b * K, means_ptr + b * K * dim, variances_ptr + b * K * dim, gamma_ptr, beta_ptr, within_ptr,
        between_ptr, deviation_ptr, d, dim, eps, K, HAS_WEIGHT, HAS_BIAS, HAS_WITHIN, HAS_BETWEEN, HAS_DEVIATION,
        ACTIVATION, IN_STATISTICS, UNIT, PER_COMPONENT, INSIDE,
    )  # fmt: skip
    first, second, third = (), (), ()
    for _ in tl.static_range(K):
        first = first + (no_sums(W, S, V, BY_ROWS),)
        second = second + (no_sums(W, S, V, BY_ROWS),)
        if HAS_DEVIATION:
            third = third + (no_sums(W, S, V, BY_ROWS),)
    for tile in tl.range(program, tl.cdiv(m, W * R), programs, num_stages=STAGES):
        points, exists = rows_of_tile(tile, m, W, R)
        x_rows = row_offsets(tile, points, inner, x_o, x_i, PATH, ALIGN, W, R)
        g_rows = row_offsets(tile, points, inner, g_o, g_i, G_PATH, G_ALIGN, W, R)
        x = load_tile(x_ptr + b * x_b, x_rows, exists, d, dim, x_d)
        grad = load_tile(grad_ptr + b * g_b, g_rows, exists, d, dim, g_d)
        new_first, new_second, new_third = (), (), ()
        for k in tl.static_range(K):
            resp = tl.load(resp_ptr + (b * K + k) * m + points, mask=exists, other=0.0)
            centred = x - wide(centre[k])
            weighted = tall(resp) * grad
            if ACTIVATION != 0:
                z = centred * (wide(slope[k]) + wide(bend[k]) * centred if HAS_DEVIATION else wide(slope[k]))
                if not IN_STATISTICS:
                    z += wide(offset[k])
                weighted *= activation_slope(z, ACTIVATION)
            new_first = new_first + (first[k] + over_rows(weighted, BY_ROWS),)
            weighted *= centred
            new_second = new_second + (second[k] + over_rows(weighted, BY_ROWS),)
            if HAS_DEVIATION:
                new_third = new_third + (third[k] + over_rows(weighted * centred, BY_ROWS),)
        first, second, third = new_first, new_second, new_third
    moments: tl.constexpr = 3 if HAS_DEVIATION else 2
    sums_ptr += (b * programs + program) * moments * K * dim
    for k in tl.static_range(K):
        tl.store(sums_ptr + k * dim + d, over_width(first[k], BY_ROWS), mask=d < dim)
        tl.store(sums_ptr + (K + k) * dim + d, over_width(second[k], BY_ROWS), mask=d < dim)
        if HAS_DEVIATION:
            tl.store(sums_ptr + (2 * K + k) * dim + d, over_width(third[k], BY_ROWS), mask=d < dim)


@triton.jit
def _gradient_lines(
    weights_ptr,  # λ (B, K)
    means_ptr,  # (B, K, D)
    variances_ptr,  # (B, K, D)
    gamma_ptr,  # (D,), or (K, D) if PER_COMPONENT
    beta_ptr,  # as γ
    within_ptr,  # g (D,)
    between_ptr,  # b (D,)
    deviation_ptr,  # d (D,)
    sums_ptr,  # (B, G, 2 or 3, K, D)
    lines_ptr,  # (B, 2, K, D), written: ∂L/∂μ_k / n_k and 2·∂L/∂σ²_k / n_k
    affine_ptr,  # (2, B, 1 or K, D), written: the gradients of γ and β
    gates_ptr,  # (3, B, D), written: the gradients of those of g, b and d that there are
    m,
    dim,
    programs,
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
    COLUMNS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """From these sums to the gradients of μ, σ², γ, β, g, b and d; docs/mathematics.md derives them."""
    b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    moments: tl.constexpr = 3 if HAS_DEVIATION else 2
    sums_ptr += b * programs * moments * K * dim
    first, second, third = (), (), ()
    for _ in tl.static_range(K):
        first = first + (tl.zeros((PROGRAMS, COLUMNS), tl.float32),)
        second = second + (tl.zeros((PROGRAMS, COLUMNS), tl.float32),)
        if HAS_DEVIATION:
            third = third + (tl.zeros((PROGRAMS, COLUMNS), tl.float32),)
    for start in range(0, programs, PROGRAMS):
        g = start + tl.arange(0, PROGRAMS)
        mask = (g < programs)[:, None] & (d < dim)[None, :]
        pointers = sums_ptr + g[:, None] * (moments * K) * dim + d[None, :]
        new_first, new_second, new_third = (), (), ()
        for k in tl.static_range(K):
            new_first = new_first + (first[k] + tl.load(pointers + k * dim, mask=mask, other=0.0),)
            new_second = new_second + (second[k] + tl.load(pointers + (K + k) * dim, mask=mask, other=0.0),)
            if HAS_DEVIATION:
                new_third = new_third + (third[k] + tl.load(pointers + (2 * K + k) * dim, mask=mask, other=0.0),)
        first, second, third = new_first, new_second, new_third

    gamma = load_parameter(gamma_ptr, d, dim, 1.0, HAS_WEIGHT)
    within = load_parameter(within_ptr, d, dim, 1.0, HAS_WITHIN)
    between = load_parameter(between_ptr, d, dim, 0.0, HAS_BETWEEN)
    deviation = load_parameter(deviation_ptr, d, dim, 0.0, HAS_DEVIATION)
    weights, means, variances = (), (), ()
    for k in tl.static_range(K):
        row = (b * K + k) * dim + d
        weights = weights + (tl.load(weights_ptr + b * K + k),)
        means = means + (tl.load(means_ptr + row, mask=d < dim, other=0.0),)
        variances = variances + (tl.load(variances_ptr + row, mask=d < dim, other=1.0),)
    mean0, root0 = within, within  # nobody looks at them
    if HAS_WITHIN or HAS_BETWEEN:
        mean0, variance0 = taken_together(weights, means, variances, K)
        root0 = 1.0 / tl.sqrt(variance0 + eps)
    nothing = tl.zeros((COLUMNS,), tl.float32)
    grad_gamma, grad_beta, grad_within, grad_between, grad_deviation = nothing, nothing, nothing, nothing, nothing
    grad_root0, grad_mean0 = nothing, nothing
    of_means, of_variances = (), ()
    batches = tl.num_programs(1).to(tl.int64)
    for k in tl.static_range(K):
        scale = component_scale(weights[k], UNIT)
        variance = variances[k]  # type: ignore[var-annotated]
        factor = 1.0 if INSIDE else scale
        if PER_COMPONENT:
            gamma = load_parameter(gamma_ptr + k * dim, d, dim, 1.0, HAS_WEIGHT)
        p = tl.sum(first[k], axis=0)
        q = tl.sum(second[k], axis=0) * factor
        if IN_STATISTICS:
            # In fp64, because the slope's roundings count three times in its cube, which is large where γ is small.
            positive = tl.maximum(gamma, 0.0).to(tl.float64)
            spread = variance.to(tl.float64)  # type: ignore[var-annotated]
            root = 1.0 / tl.sqrt(positive * spread + eps)
            grad_scale = -0.5 * root * root * root * q  # with respect to γ·σ² + ε
            grad_mean = (-root * p * factor).to(tl.float32)
            grad_variance = (grad_scale * positive).to(tl.float32)
            of_gamma = tl.where(gamma >= 0, grad_scale * spread, 0.0).to(tl.float32)
            of_beta = grad_mean
        else:
            inverse = 1.0 / tl.sqrt(variance + eps)
            own = inverse * scale if INSIDE else inverse
            slope, of_beta = own, p * factor
            if HAS_WITHIN:
                slope = within * own + (1.0 - within) * root0
                grad_within += gamma * (own - root0) * q
                grad_root0 += gamma * (1.0 - within) * q
            of_gamma = slope * q
            grad_mean = -gamma * slope * p * factor
            grad_variance = -0.5 * gamma * within * own * inverse * inverse * q
            if HAS_BETWEEN:
                away = means[k] - mean0
                of_gamma += between * away * root0 * p
                grad_between += gamma * away * root0 * p
                grad_root0 += gamma * between * away * p
                grad_mean += gamma * between * root0 * p
                grad_mean0 -= gamma * between * root0 * p
            if HAS_DEVIATION:
                square = inverse * inverse
                part = scale if INSIDE else 1.0
                part *= _SQRT_HALF
                r = tl.sum(third[k], axis=0) * factor
                beyond = part * (square * r - p * factor)
                of_gamma += deviation * beyond
                grad_deviation += gamma * beyond
                grad_mean -= 2.0 * gamma * deviation * part * square * q
                grad_variance -= gamma * deviation * part * square * square * r
            if ACTIVATION == 0 and not PER_COMPONENT:
                of_beta = p  # β is added once, and Σ_k ν_k = 1
        of_means = of_means + (grad_mean,)
        of_variances = of_variances + (grad_variance,)
        grad_gamma += of_gamma
        grad_beta += of_beta
        if PER_COMPONENT:
            tl.store(affine_ptr + (b * K + k) * dim + d, of_gamma, mask=d < dim)
            tl.store(affine_ptr + ((batches + b) * K + k) * dim + d, of_beta, mask=d < dim)
    if not PER_COMPONENT:
        tl.store(affine_ptr + b * dim + d, grad_gamma, mask=d < dim)
        tl.store(affine_ptr + (batches + b) * dim + d, grad_beta, mask=d < dim)
    if HAS_WITHIN:
        tl.store(gates_ptr + b * dim + d, grad_within, mask=d < dim)
    if HAS_BETWEEN:
        tl.store(gates_ptr + (batches + b) * dim + d, grad_between, mask=d < dim)
    if HAS_DEVIATION:
        tl.store(gates_ptr + (2 * batches + b) * dim + d, grad_deviation, mask=d < dim)
    lines_ptr += b * 2 * K * dim
    grad_variance0 = -0.5 * root0 * root0 * root0 * grad_root0
    for k in tl.static_range(K):
        grad_mean, grad_variance = of_means[k], of_variances[k]
        if HAS_WITHIN or HAS_BETWEEN:  # μ = Σ λ_j μ_j, σ² = Σ λ_j (σ²_j + (μ_j - μ)²)
            grad_mean += weights[k] * (2.0 * (means[k] - mean0) * grad_variance0 + grad_mean0)
            grad_variance += weights[k] * grad_variance0
        in_use = tl.where(weights[k] > 0, 1.0 / (weights[k] * m), 0.0)
        tl.store(lines_ptr + k * dim + d, grad_mean * in_use, mask=d < dim)
        tl.store(lines_ptr + (K + k) * dim + d, 2.0 * grad_variance * in_use, mask=d < dim)


@triton.jit
def _gradient(
    x_ptr,  # (B, outer, inner, D)
    grad_ptr,  # (B, outer, inner, D)
    resp_ptr,  # (B, K, m)
    weights_ptr,  # λ (B, K)
    means_ptr,  # (B, K, D)
    variances_ptr,  # (B, K, D)
    gamma_ptr,  # (D,), or (K, D) if PER_COMPONENT
    beta_ptr,  # as γ
    within_ptr,  # g (D,)
    between_ptr,  # b (D,)
    deviation_ptr,  # d (D,)
    lines_ptr,  # (B, 2, K, D)
    out_ptr,  # (B, outer, inner, D), written
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
    G_PATH: tl.constexpr,
    G_ALIGN: tl.constexpr,
    Y_PATH: tl.constexpr,
    Y_ALIGN: tl.constexpr,
):
    """∂L/∂x = g·Σ_k ν_k·factor_k·slope_k·act' + Σ_k ν_k·(∂L/∂μ_k + 2·∂L/∂σ²_k·(x - μ_k))/n_k."""
    b = tl.program_id(1).to(tl.int64)
    dim = dim_units * ALIGN
    d = channels(S, V)
    factor, slope, centre, offset, bend, _ = load_lines(
        weights_ptr + b * K, means_ptr + b * K * dim, variances_ptr + b * K * dim, gamma_ptr, beta_ptr, within_ptr,
        between_ptr, deviation_ptr, d, dim, eps, K, HAS_WEIGHT, HAS_BIAS, HAS_WITHIN, HAS_BETWEEN, HAS_DEVIATION,
        ACTIVATION, IN_STATISTICS, UNIT, PER_COMPONENT, INSIDE,
    )  # fmt: skip
    mean, level, tilt = (), (), ()
    for k in tl.static_range(K):
        mean = mean + (tl.load(means_ptr + (b * K + k) * dim + d, mask=d < dim, other=0.0),)
        level = level + (tl.load(lines_ptr + (b * 2 * K + k) * dim + d, mask=d < dim, other=0.0),)
        tilt = tilt + (tl.load(lines_ptr + (b * 2 * K + K + k) * dim + d, mask=d < dim, other=0.0),)
    for tile in tl.range(tl.program_id(0), tl.cdiv(m, W * R), tl.num_programs(0), num_stages=STAGES):
        points, exists = rows_of_tile(tile, m, W, R)
        x_rows = row_offsets(tile, points, inner, x_o, x_i, PATH, ALIGN, W, R)
        g_rows = row_offsets(tile, points, inner, g_o, g_i, G_PATH, G_ALIGN, W, R)
        x = load_tile(x_ptr + b * x_b, x_rows, exists, d, dim, x_d)
        grad = load_tile(grad_ptr + b * g_b, g_rows, exists, d, dim, g_d)
        out = tl.zeros((W, R, S, V), tl.float32)
        for k in tl.static_range(K):
            resp = tl.load(resp_ptr + (b * K + k) * m + points, mask=exists, other=0.0)
            direct = wide(factor[k] * slope[k]) * grad
            if HAS_DEVIATION:
                direct += wide(2.0 * factor[k] * bend[k]) * (x - wide(centre[k])) * grad
            if ACTIVATION != 0:
                z = x - wide(centre[k])
                z *= wide(slope[k]) + wide(bend[k]) * z if HAS_DEVIATION else wide(slope[k])
                if not IN_STATISTICS:
                    z += wide(offset[k])
                direct *= activation_slope(z, ACTIVATION)
            through = wide(level[k]) + wide(tilt[k]) * (x - wide(mean[k]))
            out += tall(resp) * (direct + through)
        y_rows = row_offsets(tile, points, inner, y_o, y_i, Y_PATH, Y_ALIGN, W, R)
        store_tile(out_ptr + b * y_b, out, y_rows, exists, d, dim, y_d)
