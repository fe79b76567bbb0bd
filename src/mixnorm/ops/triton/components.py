"""A component of the transform as a line, a·(x - c) + b, with γ and β folded in, or a parabola; and the activations.

=============  ==========================================  ========  ==================================================
affine_mode    a                                           c         b
=============  ==========================================  ========  ==================================================
"output"       γ·(g·a_k/√(σ²_k + ε) + (1 - g)/√(σ² + ε))   μ_k       γ·b·(μ_k - μ)/√(σ² + ε), and β if it is inside
"statistics"   1 / √(γ·σ²_k + ε)                           μ_k + β   0
=============  ==========================================  ========  ==================================================

β is inside where there is an activation, or one β for each component; otherwise it is added once. a_k = 1/√λ_k or 1 is
inside where g or b is not the paper's, and is a factor of the whole component in the paper's form, where g = 1 and b = 0.
The Fisher vector's deviation part, d·((x - μ_k)²/(σ²_k + ε) - 1)/√2, bends the line: γ·d/√2/(σ²_k + ε)·(x - c)² is added to
it, and b is less by γ·d/√2.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from mixnorm.ops.kernels import Form, Parameters

ACTIVATIONS = {None: 0, "relu": 1, "leaky_relu": 2, "silu": 3, "gelu": 4}
_RELU, _LEAKY_RELU, _SILU, _GELU = (tl.constexpr(code) for code in (1, 2, 3, 4))
_LEAK = tl.constexpr(0.01)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


@functools.cache
def _options(form: Form, *given: bool) -> tuple[tuple[str, Any], ...]:
    names = ("HAS_WEIGHT", "HAS_BIAS", "HAS_WITHIN", "HAS_BETWEEN", "HAS_DEVIATION")
    return (
        *zip(names, given, strict=True),
        ("ACTIVATION", ACTIVATIONS[form.activation]),
        ("IN_STATISTICS", form.affine_mode == "statistics"),
        ("UNIT", form.scale == "unit"),
        ("PER_COMPONENT", form.component_affine),
        ("INSIDE", form.is_scale_inside(given[2] or given[3])),
    )


def transform_options(parameters: Parameters, form: Form) -> tuple[tuple[str, Any], ...]:
    """What the kernels of the transform and of its gradient are compiled for."""
    weight, bias, within, between, deviation = parameters
    return _options(
        form, weight is not None, bias is not None, within is not None, between is not None, deviation is not None
    )


@triton.jit
def component_scale(weight, UNIT: tl.constexpr):
    """a_k, and 0 for a component that is not in use."""
    if UNIT:
        return tl.where(weight > 0, 1.0, 0.0)
    else:
        return inverse_sqrt(weight)


@triton.jit
def line(
    mean,
    variance,
    scale,  # a_k where it is inside, else 1
    gamma,
    beta,
    within,
    between,
    deviation,
    overall_mean,
    overall_root,  # 1/√(σ² + ε)
    eps,
    HAS_WITHIN: tl.constexpr,
    HAS_BETWEEN: tl.constexpr,
    HAS_DEVIATION: tl.constexpr,
    IN_STATISTICS: tl.constexpr,
):
    """Slope a, centre c, offset b and bend of a component, without a β that is inside: (D,) each."""
    offset, bend = tl.zeros_like(mean), tl.zeros_like(mean)
    if IN_STATISTICS:
        slope = 1.0 / tl.sqrt(tl.maximum(gamma, 0.0) * variance + eps)
        centre = mean + beta
    else:
        slope = scale / tl.sqrt(variance + eps)
        if HAS_DEVIATION:
            bend = gamma * deviation * scale * _SQRT_HALF / (variance + eps)
            offset -= gamma * deviation * scale * _SQRT_HALF
        if HAS_WITHIN:
            slope = within * slope + (1.0 - within) * overall_root
        if HAS_BETWEEN:
            offset += gamma * between * (mean - overall_mean) * overall_root
        slope = gamma * slope
        centre = mean
    return slope, centre, offset, bend


@triton.jit
def taken_together(weights, means, variances, K: tl.constexpr):
    """The mean and the variance of K components as one: ``reference.taken_together``."""
    total = weights[0]
    for k in tl.static_range(1, K):
        total += weights[k]
    mean = tl.zeros_like(means[0])
    for k in tl.static_range(K):
        mean += weights[k] / total * (means[k] - means[0])
    mean += means[0]
    variance = tl.zeros_like(mean)
    for k in tl.static_range(K):
        away = means[k] - mean
        variance += weights[k] / total * (variances[k] + away * away)
    return mean, variance


@triton.jit
def load_parameter(ptr, d, dim, default: tl.constexpr, GIVEN: tl.constexpr):
    """γ or β (D,) in fp32, or its default where the layer has none."""
    if GIVEN:
        return tl.load(ptr + d, mask=d < dim, other=0.0).to(tl.float32)
    else:
        return tl.full(d.shape, default, tl.float32)


@triton.jit
def inverse_sqrt(weight):
    """1/√λ, and 0 for a component that is not in use."""
    return tl.where(weight > 0, 1.0 / tl.sqrt(weight), 0.0)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == _RELU:
        return tl.where(z < 0, 0.0, z)
    elif ACTIVATION == _LEAKY_RELU:
        return tl.where(z < 0, _LEAK * z, z)
    elif ACTIVATION == _SILU:
        return z * tl.sigmoid(z)
    elif ACTIVATION == _GELU:
        return 0.5 * z * (1.0 + tl.erf(z * _SQRT_HALF))
    else:
        return z


@triton.jit
def activation_slope(z, ACTIVATION: tl.constexpr):
    """The derivative of the activation."""
    if ACTIVATION == _RELU:
        return tl.where(z > 0, 1.0, 0.0)
    elif ACTIVATION == _LEAKY_RELU:
        return tl.where(z > 0, 1.0, _LEAK)
    elif ACTIVATION == _SILU:
        gate = tl.sigmoid(z)
        return gate * (1.0 + z * (1.0 - gate))
    elif ACTIVATION == _GELU:
        return 0.5 * (1.0 + tl.erf(z * _SQRT_HALF)) + z * _INV_SQRT_2PI * tl.exp(-0.5 * z * z)
    else:
        return tl.full(z.shape, 1.0, tl.float32)


@triton.jit
def load_lines(
    weights_ptr,
    means_ptr,
    variances_ptr,
    gamma_ptr,
    beta_ptr,
    within_ptr,
    between_ptr,
    deviation_ptr,
    d,
    dim,
    eps,
    K: tl.constexpr,
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
):
    """What each component is multiplied by, its slope, centre, offset and bend (S, V), and the β that is added once."""
    gamma = load_parameter(gamma_ptr, d, dim, 1.0, HAS_WEIGHT)
    beta = load_parameter(beta_ptr, d, dim, 0.0, HAS_BIAS)
    within = load_parameter(within_ptr, d, dim, 1.0, HAS_WITHIN)
    between = load_parameter(between_ptr, d, dim, 0.0, HAS_BETWEEN)
    deviation = load_parameter(deviation_ptr, d, dim, 0.0, HAS_DEVIATION)
    weights, means, variances = (), (), ()
    for k in tl.static_range(K):
        weights = weights + (tl.load(weights_ptr + k),)
        means = means + (tl.load(means_ptr + k * dim + d, mask=d < dim, other=0.0),)
        variances = variances + (tl.load(variances_ptr + k * dim + d, mask=d < dim, other=1.0),)
    overall_mean, overall_root = beta, beta  # nobody looks at them
    if HAS_WITHIN or HAS_BETWEEN:
        overall_mean, overall_variance = taken_together(weights, means, variances, K)
        overall_root = 1.0 / tl.sqrt(overall_variance + eps)
    factor, slope, centre, offset, bend = (), (), (), (), ()
    for k in tl.static_range(K):
        scale = component_scale(weights[k], UNIT)
        if PER_COMPONENT:
            gamma = load_parameter(gamma_ptr + k * dim, d, dim, 1.0, HAS_WEIGHT)
            beta = load_parameter(beta_ptr + k * dim, d, dim, 0.0, HAS_BIAS)
        a, c, o, e = line(
            means[k], variances[k], scale if INSIDE else 1.0, gamma, beta, within, between, deviation, overall_mean,
            overall_root, eps, HAS_WITHIN, HAS_BETWEEN, HAS_DEVIATION, IN_STATISTICS,
        )  # fmt: skip
        if not IN_STATISTICS and (PER_COMPONENT or ACTIVATION != 0):
            o += beta
        factor = factor + (1.0 if INSIDE else scale,)
        slope = slope + (a,)
        centre = centre + (c,)
        offset = offset + (o,)
        bend = bend + (e,)
    return factor, slope, centre, offset, bend, beta
