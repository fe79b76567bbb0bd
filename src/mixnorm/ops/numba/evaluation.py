"""Evaluation under T mixtures in one pass over the points, and the posteriors alone, as compiled loops."""

from __future__ import annotations

from typing import Any

import numpy as np

from mixnorm.ops.numba.em import densities, posterior
from mixnorm.ops.numba.points import load, store
from mixnorm.ops.numba.threads import entry, inlined, parallel_for, serial, stretch, stretches_of
from mixnorm.ops.numba.transform import add_three


@inlined
def _slot_posterior(
    tile: Any, count: int, b: int, first: int, group: int, log_norm: Any, means: Any, scale: Any, resp: Any, far: Any
) -> None:
    """The posterior of ``group`` components from ``first`` on, for the points of a tile: resp (4, group).

    far (4, 1 + group): in its first column their mean squared distance, E_ν[Σ_d z²]. The squares are of x - μ_k itself:
    about a common anchor, a component that is narrow beside its distance from the others would lose its digits.
    """
    half = tile.dtype.type(0.5)
    for j in range(group):
        k = first + j
        q0 = q1 = q2 = q3 = tile.dtype.type(0)
        for d in range(tile.shape[1]):
            z0 = (tile[0, d] - means[b, k, d]) * scale[b, k, d]
            z1 = (tile[1, d] - means[b, k, d]) * scale[b, k, d]
            z2 = (tile[2, d] - means[b, k, d]) * scale[b, k, d]
            z3 = (tile[3, d] - means[b, k, d]) * scale[b, k, d]
            q0 += z0 * z0
            q1 += z1 * z1
            q2 += z2 * z2
            q3 += z3 * z3
        far[0, 1 + j], far[1, 1 + j], far[2, 1 + j], far[3, 1 + j] = q0, q1, q2, q3
        for p in range(4):
            resp[p, j] = log_norm[b, k] - half * far[p, 1 + j]
    for p in range(count):
        posterior(resp, p)
        far[p, 0] = 0
        for j in range(group):
            if resp[p, j] != 0:
                far[p, 0] += resp[p, j] * far[p, 1 + j]


@serial
def _trust(far: Any, farthest: float, tau: Any, total: Any, missing: Any, p: int) -> Any:
    """``reference.slot_trust`` of a point, and its part in what all slots are trusted, or not."""
    trust = total.dtype.type(1) if far <= farthest else total.dtype.type(farthest) / far
    total[p] += tau * trust
    missing[p] += tau * (1 - trust)
    return trust


@serial
def _posteriors_stretch(
    item: int, stretches: int, x: Any, group: int, slots: Any, farthest: float, log_norm: Any, means: Any, scale: Any,
    out: Any,
) -> None:  # fmt: skip
    b, _, start, stop = stretch(item, stretches, out.shape[1])
    tile, resp = np.zeros((4, x.dim), means.dtype), np.zeros((4, group), means.dtype)
    far = np.zeros((4, 1 + group), means.dtype)
    total, missing = np.zeros(4, means.dtype), np.zeros(4, means.dtype)
    for i in range(start, stop, 4):
        count = load(x, b, i, stop, tile)
        total[:], missing[:] = 0, 0
        for first in range(0, means.shape[1], group):
            _slot_posterior(tile, count, b, first, group, log_norm, means, scale, resp, far)
            for p in range(count):
                trust = _trust(far[p, 0], farthest, slots[b, first // group], total, missing, p)
                for j in range(group):
                    out[b, i + p, first + j] = resp[p, j] * trust
        for p in range(count):
            if missing[p] > 0:
                for k in range(means.shape[1]):
                    out[b, i + p, k] /= total[p]


@entry
def posteriors(
    threads: int, x: Any, out: Any, slots: Any, log_weights: Any, means: Any, variances: Any, floor: float, group: int,
    farthest: float,
) -> None:  # fmt: skip
    """The posterior of each component among its ``group`` (K for the ensemble, else all T·K), into out (B, m, T·K).

    A slot that is farther than ``farthest`` from a point counts for less; ``slots`` (B, T·K / group) are their weights.
    """
    scale, log_norm = densities(log_weights, variances, floor)
    stretches = stretches_of(threads, out.shape[0], out.shape[1])
    given = stretches, x, group, slots, farthest, log_norm, means, scale, out
    parallel_for(x.batch * stretches, _posteriors_stretch, given)


@serial
def _evaluate_stretch(
    item: int, stretches: int, x: Any, group: int, slots: Any, farthest: float, log_norm: Any, means: Any, inverse: Any,
    factor: Any, centre: Any, scale: Any, offset: Any, bend: Any, activation: Any, shift: Any, y: Any,
) -> None:  # fmt: skip
    b, _, start, stop = stretch(item, stretches, x.outer * x.inner)
    dim = x.dim
    tile, out = np.zeros((4, dim), means.dtype), np.zeros((4, dim), means.dtype)
    resp, w = np.zeros((4, group), means.dtype), np.zeros((3, 4), means.dtype)
    far, trust = np.zeros((4, 1 + group), means.dtype), np.zeros(4, means.dtype)
    total, missing = np.zeros(4, means.dtype), np.zeros(4, means.dtype)
    for i in range(start, stop, 4):
        count = load(x, b, i, stop, tile)
        out[:], total[:], missing[:] = 0, 0, 0
        for first in range(0, means.shape[1], group):
            in_use = False
            for j in range(group):
                in_use = in_use or factor[b, first + j] != 0
            if not in_use:
                continue
            _slot_posterior(tile, count, b, first, group, log_norm, means, inverse, resp, far)
            for p in range(count):
                trust[p] = _trust(far[p, 0], farthest, slots[b, first // group], total, missing, p)
            for j in range(0, group, 3):
                w[:] = 0
                for n in range(min(3, group - j)):
                    for p in range(count):
                        w[n, p] = resp[p, j + n] * factor[b, first + j + n] * trust[p]
                add_three(tile, count, w, b, first + j, centre, scale, offset, bend, activation, out)
        for p in range(count):
            scaling = 1 / total[p] if missing[p] > 0 else out.dtype.type(1)
            for d in range(dim):
                out[p, d] = out[p, d] * scaling + shift[d]
        store(out, count, y, b, i)


@entry
def evaluate(
    threads: int, x: Any, slots: Any, log_weights: Any, means: Any, variances: Any, floor: float, group: int,
    farthest: float, outer: Any, centre: Any, scale: Any, offset: Any, bend: Any, activation: Any, shift: Any, y: Any,
) -> None:  # fmt: skip
    """``posteriors`` and ``mix`` in one pass: y = Σ_k ν_k · outer_k · act(x̂_k) with γ and β, for T·K components."""
    inverse, log_norm = densities(log_weights, variances, floor)
    stretches = stretches_of(threads, x.batch, x.outer * x.inner)
    given = (
        stretches, x, group, slots, farthest, log_norm, means, inverse, outer, centre, scale, offset, bend, activation,
        shift, y,
    )  # fmt: skip
    parallel_for(x.batch * stretches, _evaluate_stretch, given)
