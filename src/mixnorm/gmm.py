"""Gaussian mixtures with diagonal covariance: the model, its seeding and its fit, batched over any leading dimensions.

Shapes: ``x`` is (..., m, D); ``weights`` (..., K); ``means`` and ``variances`` (..., K, D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixnorm.ops import backend as ops
from mixnorm.ops import reference, reference_fit
from mixnorm.ops.distributed import Ranks

DEFAULT_MIN_VARIANCE = 1e-6


@dataclass(frozen=True)
class GaussianMixture:
    """K Gaussians with diagonal covariance: p(x) = Σ_k λ_k N(x; μ_k, σ²_k).

    A component that was dropped has weight 0, and counts for nothing.

    Args:
        weights: λ, (..., K), each mixture's sum is 1.
        means: μ, (..., K, D).
        variances: σ², (..., K, D).
    """

    weights: Tensor
    means: Tensor
    variances: Tensor

    def __post_init__(self) -> None:
        if self.means.shape != self.variances.shape or self.weights.shape != self.means.shape[:-1]:
            raise ValueError(
                f"weights {tuple(self.weights.shape)}, means {tuple(self.means.shape)} and variances "
                f"{tuple(self.variances.shape)} do not fit together: expected (..., K), (..., K, D) and (..., K, D)"
            )

    @property
    def num_components(self) -> int:
        return self.weights.shape[-1]

    def effective_components(self) -> Tensor:
        """How many components each mixture uses, (...)."""
        return (self.weights > 0).sum(-1)

    def log_prob(self, x: Tensor) -> Tensor:
        """log p(x_i): (..., m, D) to (..., m)."""
        log_density = reference.log_densities(x, self.means, self.variances)
        return torch.logsumexp(log_density + self.weights.log().unsqueeze(-2), dim=-1)

    def responsibilities(self, x: Tensor) -> Tensor:
        """ν_k(x_i), the posterior of each component: (..., m, D) to (..., m, K)."""
        return reference.responsibilities(x, self.weights, self.means, self.variances)

    def sample(self, count: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Points drawn from the mixture, (..., count, D)."""
        uniforms = torch.rand(
            (*self.weights.shape[:-1], count), dtype=self.weights.dtype, device=self.weights.device, generator=generator
        )
        cumulative = self.weights.cumsum(-1)  # it may end below 1, where a dropped component would begin
        label = torch.searchsorted(cumulative, uniforms * cumulative[..., -1:], right=True).clamp_max(
            self.num_components - 1
        )
        index = label.unsqueeze(-1).expand(*label.shape, self.means.shape[-1])
        noise = torch.randn(index.shape, dtype=self.means.dtype, device=self.means.device, generator=generator)
        return self.means.gather(-2, index) + self.variances.gather(-2, index).sqrt() * noise


@torch.no_grad()
def kmeans_plus_plus(x: Tensor, num_components: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Greedy k-means++ seeds: (..., m, D) to (..., K, D), rows of x.

    Distinct points as long as x has K distinct ones.

    Example:
        >>> seeds = kmeans_plus_plus(torch.randn(1000, 8), 3)
    """
    _check_points(x, num_components)
    points = _batched(x)
    uniforms = _draws(points.shape[0] * reference_fit.num_uniforms(num_components), points, generator, fixed=False)
    seeds = reference_fit.seed(points, num_components, uniforms.view(points.shape[0], -1))
    return seeds.view(*x.shape[:-2], num_components, x.shape[-1])


@torch.no_grad()
def fit_mixture(
    x: Tensor,
    num_components: int,
    *,
    em_iters: int = 2,
    sample_fraction: float = 1.0,
    max_samples: int | None = None,
    min_weight: float = 0.01,
    min_variance: float = DEFAULT_MIN_VARIANCE,
    init: GaussianMixture | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> GaussianMixture:
    """Fits a mixture to the points: greedy k-means++, ``em_iters // 2`` Lloyd iterations, EM for the rest.

    Args:
        x: the points, (..., m, D); every leading index has a mixture of its own. fp16 and bf16 are fitted in fp32.
        num_components: K.
        em_iters: the paper's "EM iter.". With ``init`` there is nothing to seed, and all of them are EM.
        sample_fraction: the share of the points to fit to, drawn at random, spread evenly over the points.
        max_samples: a bound on their number; ``None`` for no bound.
        min_weight: components under this weight are dropped.
        min_variance: a floor under every variance, which keeps the likelihood bounded.
        init: a mixture to start from. Components in it with weight 0 are placed anew.
        generator: where the random numbers come from; the default generator of x's device if ``None``.

    Example:
        >>> mixture = fit_mixture(torch.randn(1000, 8), 3)
        >>> mixture.responsibilities(torch.randn(5, 8)).shape
        torch.Size([5, 3])
    """
    _check_points(x, num_components)
    if em_iters < 0:
        raise ValueError(f"em_iters={em_iters} must not be negative")
    points = _batched(x).unsqueeze(2)
    size = sample_size(points.shape[1], num_components, sample_fraction, max_samples)
    lead = x.shape[:-2]
    _, (weights, means, variances) = fit_points(
        points,
        size,
        num_components,
        em_iters=em_iters,
        min_weight=min_weight,
        min_variance=min_variance,
        init=None if init is None else _flat_mixture(init, lead, num_components, points),
        generator=generator,
        backend=backend,
    )
    shape = (*lead, num_components)
    return GaussianMixture(weights.view(shape), means.view(*shape, -1), variances.view(*shape, -1))


def fit_points(
    points: Tensor,
    size: int,
    num_components: int,
    *,
    em_iters: int,
    min_weight: float,
    min_variance: float,
    init: ops.Statistics | None,
    generator: torch.Generator | None,
    fixed: bool = False,
    counter: Tensor | None = None,
    ranks: Ranks | None = None,
    sample_everywhere: bool = False,
    backend: str,
) -> tuple[Tensor, ops.Statistics]:
    """The fit itself: ``size`` of the points (B, outer, inner, D) as a sample (B, size, D), and its mixture.

    ``fixed``: the same numbers every time in place of random ones. ``counter``: numbers of a stream that begins anew each
    time it changes, for CUDA graphs, where a draw from PyTorch's generator costs two more launches a replay.
    ``ranks``: a sample of all ranks' points, which the first rank fits to with its own random numbers. The others get its
    mixture, and the sample only if ``sample_everywhere``.
    """
    options: dict[str, Any] = {"min_variance": min_variance, "min_weight": min_weight, "backend": backend}
    seeds = reference_fit.num_uniforms(num_components) if init is None else num_components
    # All the random numbers of a fit at once: on a GPU each call is a launch.
    draws: Any
    if counter is not None and init is None and ops.makes_numbers(points, num_components, backend):
        draws = (int(torch.randint(2**62, ())), counter)
    else:
        draws = _draws(size + 1 + points.shape[0] * seeds, points, generator, fixed)
    if ranks is not None:  # drawn for nothing, but on the first rank: generators that were equal stay so
        draws = _draws(len(draws), points, ranks.generator(points.device), fixed=False)
        sample = ranks.sample_of(points, size, draws, everywhere=sample_everywhere)
        mixture = None
        if ranks.is_first:
            mixture = _sample_and_fit(sample.unsqueeze(2), size, draws, num_components, em_iters, init, options)[1]
        return sample, ranks.from_first(mixture, sample, num_components)
    return _sample_and_fit(points, size, draws, num_components, em_iters, init, options)


def _sample_and_fit(
    points: Tensor,
    size: int,
    draws: Any,
    num_components: int,
    em_iters: int,
    init: ops.Statistics | None,
    options: dict[str, Any],
) -> tuple[Tensor, ops.Statistics]:
    if init is None:
        lloyd_iters = em_iters // 2
        return ops.sample_and_fit(
            points, size, draws, num_components, lloyd_iters=lloyd_iters, em_iters=em_iters - lloyd_iters, **options
        )
    sample = ops.sample_of(points, size, draws, backend=options["backend"])
    start = reference_fit.revive(sample, *init, draws[size + 1 :].view(-1, num_components))
    return sample, ops.em(sample, start, iterations=em_iters, **options)


def _draws(count: int, points: Tensor, generator: torch.Generator | None, fixed: bool) -> Tensor:
    dtype = ops.compute_dtype(points.dtype)
    if fixed:  # multiples of the golden ratio: as even as numbers in [0, 1) can be
        return torch.arange(1, count + 1, dtype=torch.float64, device=points.device).mul(0.5 * 5**0.5 - 0.5).frac().to(dtype)
    if generator is None:  # with one, even None, torch.compile takes no count that may change
        return torch.rand(count, dtype=dtype, device=points.device)
    return torch.rand(count, dtype=dtype, device=points.device, generator=generator)


def sample_size(count: int, num_components: int, fraction: float, max_samples: int | None) -> int:
    """How many of ``count`` points to fit to. At least 16 a component, where there are as many: fewer say nothing."""
    if not 0 < fraction <= 1:
        raise ValueError(f"sample_fraction={fraction} is not in (0, 1]: 1.0 takes every point")
    if max_samples is not None and max_samples < num_components:
        raise ValueError(f"max_samples={max_samples} is less than num_components={num_components}: raise it, or use None")
    wanted = max(round(fraction * count), 16 * num_components)
    return min(count, wanted, count if max_samples is None else max_samples)


def _check_points(x: Tensor, num_components: int) -> None:
    if x.dim() < 2 or x.numel() == 0:
        raise ValueError(f"x of shape {tuple(x.shape)} holds no points: expected (..., m, D) with none of them 0")
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}: convert it to a floating point type first")
    if num_components < 1:
        raise ValueError(f"num_components={num_components} must be at least 1")


def _batched(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, *x.shape[-2:]).to(ops.compute_dtype(x.dtype))


def _flat_mixture(init: GaussianMixture, lead: torch.Size, num_components: int, points: Tensor) -> ops.Statistics:
    shape = (*lead, num_components, points.shape[-1])
    if init.means.shape != shape:
        raise ValueError(f"init has means of shape {tuple(init.means.shape)}, but these points need {tuple(shape)}")
    return (
        init.weights.to(points).reshape(-1, num_components),
        init.means.to(points).reshape(-1, *shape[-2:]),
        init.variances.to(points).reshape(-1, *shape[-2:]),
    )
