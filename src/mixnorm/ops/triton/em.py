"""The E-step on a tile, and what both kernels that need it keep: the sums of the M-step.

A component is two rows of numbers, μ and 1/σ, and log λ - ½ Σ_d log σ². With t = (x - μ)/σ, the E-step is a softmax over
-½ Σ_d t², and the sums of ν, ν·t and ν·t² give the M-step relative to the old component: μ + σ·E[t] and σ²·Var[t], without
cancellation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mixnorm.ops.triton.tiles import over_channels, over_row, over_rows, tall, wide


@triton.jit
def load_components(weights_ptr, means_ptr, variances_ptr, d, dim, K: tl.constexpr):
    """λ, and μ and σ² in the shape of ``d``, the channels, of K components."""
    weights, means, variances = (), (), ()
    for k in tl.static_range(K):
        weights = weights + (tl.load(weights_ptr + k),)
        means = means + (tl.load(means_ptr + k * dim + d, mask=d < dim, other=0.0),)
        variances = variances + (tl.load(variances_ptr + k * dim + d, mask=d < dim, other=1.0),)
    return weights, means, variances


@triton.jit
def tables(weights, variances, d, dim, floor, K: tl.constexpr):
    """1/σ and log λ - ½ Σ log σ² of each component."""
    inverse, constant = (), ()
    for k in tl.static_range(K):
        variance = tl.maximum(variances[k], floor)
        inverse = inverse + (tl.where(d < dim, 1.0 / tl.sqrt(variance), 0.0),)
        constant = constant + (tl.log(weights[k]) - 0.5 * over_row(tl.log(variance)),)
    return inverse, constant


@triton.jit
def scaled_distances(x, means, inverse, K: tl.constexpr):
    """t of every component, (W, R, S, V) each, and Σ_d t², (W, R) each.

    The differences are taken first: a component may be narrow beside its distance from 0 and from the others.
    """
    scaled = ()
    squares = ()
    for k in tl.static_range(K):
        t = (x - wide(means[k])) * wide(inverse[k])
        scaled = scaled + (t,)
        squares = squares + (over_channels(t * t),)
    return scaled, squares


@triton.jit
def posteriors(squares, constant, exists, K: tl.constexpr):
    """ν of every component, (W, R) each; 0 for points that do not exist."""
    largest = constant[0] - 0.5 * squares[0]
    for k in tl.static_range(1, K):
        largest = tl.maximum(largest, constant[k] - 0.5 * squares[k])
    terms = ()
    total = tl.zeros_like(largest)
    for k in tl.static_range(K):
        term = tl.exp(constant[k] - 0.5 * squares[k] - largest)
        terms = terms + (term,)
        total += term
    scale = tl.where(exists, 1.0 / total, 0.0)
    resp = ()
    for k in tl.static_range(K):
        resp = resp + (terms[k] * scale,)
    return resp


@triton.jit
def nearest(squares, exists, K: tl.constexpr):
    """1 for the first component at the least distance, 0 for the others: (W, R) each."""
    least = squares[0]
    label = tl.zeros_like(least).to(tl.int32)
    for k in tl.static_range(1, K):
        label = tl.where(squares[k] < least, k, label)
        least = tl.minimum(squares[k], least)
    resp = ()
    for k in tl.static_range(K):
        resp = resp + (tl.where(exists & (label == k), 1.0, 0.0),)
    return resp


@triton.jit
def add_sums(count, first, second, resp, scaled, K: tl.constexpr, BY_ROWS: tl.constexpr):
    """Adds Σν, Σν·t and Σν·t² of a tile to the sums so far."""
    new_count = ()
    new_first = ()
    new_second = ()
    for k in tl.static_range(K):
        weighted = tall(resp[k]) * scaled[k]
        new_count = new_count + (count[k] + tl.sum(resp[k], axis=1),)
        new_first = new_first + (first[k] + over_rows(weighted, BY_ROWS),)
        new_second = new_second + (second[k] + over_rows(weighted * scaled[k], BY_ROWS),)
    return new_count, new_first, new_second
