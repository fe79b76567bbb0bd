"""The E-step on a tile, and what both kernels that need it keep: the sums of the M-step.

A component is two rows of numbers (S, V), 1/σ and (μ - anchor)/σ, and log λ - ½ Σ_d log σ². With t = (x - anchor)/σ -
(μ - anchor)/σ, the E-step is a softmax over -½ Σ_d t², and the sums of ν, ν·t and ν·t² give the M-step relative to the old
component: μ + σ·E[t] and σ²·Var[t], without cancellation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mixnorm.ops.triton.tiles import as_row, no_sums, over_channels, over_rows, over_width, tall, wide
from mixnorm.ops.triton.together import contribute


@triton.jit
def load_components(weights_ptr, means_ptr, variances_ptr, d, dim, K: tl.constexpr):
    """λ, and μ and σ² (S, V), of K components; ``d`` (S, V) are the channels."""
    weights, means, variances = (), (), ()
    for k in tl.static_range(K):
        weights = weights + (tl.load(weights_ptr + k),)
        means = means + (tl.load(means_ptr + k * dim + d, mask=d < dim, other=0.0),)
        variances = variances + (tl.load(variances_ptr + k * dim + d, mask=d < dim, other=1.0),)
    return weights, means, variances


@triton.jit
def tables(weights, means, variances, d, dim, floor, K: tl.constexpr):
    """The anchor (S, V), and for each component 1/σ, (μ - anchor)/σ and log λ - ½ Σ log σ²."""
    anchor = weights[0] * means[0]
    for k in tl.static_range(1, K):
        anchor += weights[k] * means[k]
    inverse, shift, constant = (), (), ()
    for k in tl.static_range(K):
        variance = tl.maximum(variances[k], floor)
        one_over = tl.where(d < dim, 1.0 / tl.sqrt(variance), 0.0)
        log_volume = tl.sum(tl.sum(tl.log(variance), axis=0), axis=0)
        inverse = inverse + (one_over,)
        shift = shift + ((means[k] - anchor) * one_over,)
        constant = constant + (tl.log(weights[k]) - 0.5 * log_volume,)
    return anchor, inverse, shift, constant


@triton.jit
def scaled_distances(centred, inverse, shift, K: tl.constexpr):
    """t of every component, (W, R, S, V) each, and Σ_d t², (W, R) each."""
    scaled = ()
    squares = ()
    for k in tl.static_range(K):
        t = centred * wide(inverse[k]) - wide(shift[k])
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


@triton.jit
def nothing_yet(K: tl.constexpr, W: tl.constexpr, S: tl.constexpr, V: tl.constexpr, BY_ROWS: tl.constexpr):
    """Sums of no points: of ν (W,), ν·t and ν·t² for each component."""
    count, first, second = (), (), ()
    for _ in tl.static_range(K):
        count = count + (tl.zeros((W,), tl.float32),)
        first = first + (no_sums(W, S, V, BY_ROWS),)
        second = second + (no_sums(W, S, V, BY_ROWS),)
    return count, first, second


@triton.jit
def contribute_pairs(
    own_ptr, first, second, d, dim, K: tl.constexpr, BY_ROWS: tl.constexpr, ALONE: tl.constexpr, IN_ORDER: tl.constexpr
):
    """Two sums for each component, as (2, K, D)."""
    pair = d[:, :, None] + tl.arange(0, 2)[None, None, :] * (K * dim)
    for k in tl.static_range(K):
        both = over_width(first[k], second[k], BY_ROWS)
        contribute(own_ptr + k * dim + pair, both, (d < dim)[:, :, None], ALONE, IN_ORDER)


@triton.jit
def contribute_sums(
    own_ptr,
    count,
    first,
    second,
    d,
    dim,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    BY_ROWS: tl.constexpr,
    ALONE: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    """A program's sums as K·(1 + 2·D) numbers: Σν (K,), Σν·t (K, D), Σν·t² (K, D)."""
    i = tl.arange(0, K_PAD)
    contribute(own_ptr + i, as_row(count, K, K_PAD), i < K, ALONE, IN_ORDER)
    contribute_pairs(own_ptr + K, first, second, d, dim, K, BY_ROWS, ALONE, IN_ORDER)


@triton.jit
def m_step(totals_ptr, means, variances, size, d, dim, floor, K: tl.constexpr):
    """λ, μ and σ² from the totals of all points; a component without points keeps its mean, with variance 0."""
    new_weights, new_means, new_variances = (), (), ()
    for k in tl.static_range(K):
        total = tl.load(totals_ptr + k)
        place = K + k * dim + d
        mean_t = tl.load(totals_ptr + place, mask=d < dim, other=0.0) / total
        var_t = tl.load(totals_ptr + place + K * dim, mask=d < dim, other=0.0) / total - mean_t * mean_t
        scale = tl.maximum(variances[k], floor)
        # A total that is not a number must show.
        variance = scale * tl.maximum(var_t, 0.0, tl.PropagateNan.ALL)
        new_weights = new_weights + (total / size,)
        new_means = new_means + (tl.where(total == 0, means[k], means[k] + tl.sqrt(scale) * mean_t),)
        new_variances = new_variances + (tl.where(total == 0, 0.0, variance),)
    return new_weights, new_means, new_variances
