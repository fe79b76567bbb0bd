"""A component of the transform as a line, a·(x - c) + b, with γ and β folded in; and the activations.

=============  ===================  ========  =========================
affine_mode    a                    c         b
=============  ===================  ========  =========================
"output"       γ / √(σ² + ε)        μ         β, inside the activation or, without one, once
"statistics"   1 / √(γ·σ² + ε)      μ + β     0
=============  ===================  ========  =========================
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

ACTIVATIONS = {None: 0, "relu": 1, "leaky_relu": 2, "silu": 3, "gelu": 4}
_RELU, _LEAKY_RELU, _SILU, _GELU = (tl.constexpr(code) for code in (1, 2, 3, 4))
_LEAK = tl.constexpr(0.01)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


def transform_options(has_weight: bool, has_bias: bool, activation: str | None, affine_mode: str) -> dict[str, Any]:
    """What the kernels of the transform and of its gradient are compiled for."""
    return {
        "HAS_WEIGHT": has_weight,
        "HAS_BIAS": has_bias,
        "ACTIVATION": ACTIVATIONS[activation],
        "IN_STATISTICS": affine_mode == "statistics",
    }


@triton.jit
def line(mean, variance, gamma, beta, eps, IN_STATISTICS: tl.constexpr):
    """Slope a and centre c of a component, (D,) each."""
    if IN_STATISTICS:
        slope = 1.0 / tl.sqrt(tl.maximum(gamma, 0.0) * variance + eps)
        centre = mean + beta
    else:
        slope = gamma / tl.sqrt(variance + eps)
        centre = mean
    return slope, centre


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
    gamma,
    beta,
    d,
    dim,
    eps,
    K: tl.constexpr,
    IN_STATISTICS: tl.constexpr,
):
    """1/√λ, and slope and centre (S, V), of every component."""
    factor, slope, centre = (), (), ()
    for k in tl.static_range(K):
        mean = tl.load(means_ptr + k * dim + d, mask=d < dim, other=0.0)
        variance = tl.load(variances_ptr + k * dim + d, mask=d < dim, other=1.0)
        a, c = line(mean, variance, gamma, beta, eps, IN_STATISTICS)
        factor = factor + (inverse_sqrt(tl.load(weights_ptr + k)),)
        slope = slope + (a,)
        centre = centre + (c,)
    return factor, slope, centre
