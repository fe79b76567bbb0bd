"""Gaussian mixtures with diagonal covariance: the model, its seeding and its fit, batched over any leading dimensions.

Shapes: ``x`` is (..., m, D); ``weights`` (..., K); ``means`` and ``variances`` (..., K, D).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixnorm.ops import fit, reference
from mixnorm.ops.choose import kernels_for
from mixnorm.ops.distributed import Ranks
from mixnorm.ops.kernels import Kernels, Mixture, compute_dtype, is_exporting

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
    uniforms = uniform(points.shape[0] * fit.num_uniforms(num_components), points, generator)
    seeds = fit.seed(points, num_components, uniforms.view(points.shape[0], -1))
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
    kernels = kernels_for(points, num_components, backend)
    options = fit.Options(em_iters // 2, em_iters - em_iters // 2, min_variance, min_weight)
    start = None if init is None else _flat_mixture(init, lead, num_components, points)
    draws = draw(size, points, num_components, start, generator)
    _, (weights, means, variances) = fit_points(points, size, draws, num_components, options, start, kernels)
    shape = (*lead, num_components)
    return GaussianMixture(weights.view(shape), means.view(*shape, -1), variances.view(*shape, -1))


def fit_points(
    points: Tensor, size: int, draws: Any, components: int, options: fit.Options, start: Mixture | None, kernels: Kernels
) -> tuple[Tensor, Mixture]:
    """``size`` of the points (B, outer, inner, D) as a sample (B, size, D), and its mixture: seeded, or EM from a start."""
    if start is None:
        return kernels.sample_and_fit(points, size, draws, components, options)
    sample = kernels.sample(points, size, draws)
    start = Mixture(*fit.revive(sample, *start, draws[size + 1 :].view(-1, components)))
    return sample, kernels.em(sample, start, options.lloyd_iters + options.em_iters, options)  # there is nothing to seed


def fit_over_ranks(
    points: Tensor,
    size: int,
    draws: Tensor,
    components: int,
    options: fit.Options,
    start: Mixture | None,
    kernels: Kernels,
    ranks: Ranks,
    sample_everywhere: bool,
) -> tuple[Tensor, Mixture]:
    """The fit to a sample of all ranks' points, which the first rank does with its own random numbers.

    The others get its mixture, and the sample only if ``sample_everywhere``. Their ``draws`` are for nothing, but that
    generators which were equal stay so.
    """
    draws = uniform(len(draws), points, ranks.generator(points.device))
    sample = ranks.sample_of(points, size, draws, everywhere=sample_everywhere)
    mixture = None
    if ranks.is_first:
        mixture = fit_points(sample.unsqueeze(2), size, draws, components, options, start, kernels)[1]
    return sample, ranks.from_first(mixture, sample, components)


def draw(
    size: int,
    points: Tensor,
    components: int,
    start: Mixture | None,
    generator: torch.Generator | None = None,
    *,
    fixed: bool = False,
) -> Tensor:
    """All the random numbers of a fit at once, because on a GPU each call is a launch.

    ``fixed``: the same numbers every time in place of random ones.
    """
    seeds = fit.num_uniforms(components) if start is None else components
    count = size + 1 + points.shape[0] * seeds
    if fixed:  # multiples of the golden ratio: as even as numbers in [0, 1) can be
        steps = torch.arange(1, count + 1, dtype=torch.float64, device=points.device)
        return steps.mul(0.5 * 5**0.5 - 0.5).frac().to(compute_dtype(points.dtype))
    return uniform(count, points, generator)


def uniform(count: int, points: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Random numbers in [0, 1) where the points are."""
    dtype = compute_dtype(points.dtype)
    if generator is None:  # with one, even None, torch.compile takes no count that may change
        return torch.rand(count, dtype=dtype, device=points.device)
    return torch.rand(count, dtype=dtype, device=points.device, generator=generator)


def sample_size(count: int, num_components: int, fraction: float, max_samples: int | None) -> int:
    """How many of ``count`` points to fit to. At least 16 a component, where there are as many: fewer say nothing."""
    if not 0 < fraction <= 1:
        raise ValueError(f"sample_fraction={fraction} is not in (0, 1]: 1.0 takes every point")
    if max_samples is not None and max_samples < num_components:
        raise ValueError(f"max_samples={max_samples} is less than num_components={num_components}: raise it, or use None")
    least, most = 16 * num_components, count if max_samples is None else max_samples
    if is_exporting():  # max and min would hold the graph to the count of its example
        return torch.sym_min(torch.sym_min(count, most), torch.sym_max(_round(fraction * count), least))
    return min(count, most, max(round(fraction * count), least))


def _round(value: float) -> int:
    """``round``, in operations that ONNX has: down and up differ halfway between two numbers, where the even one counts."""
    down, up = math.ceil(value - 0.5), math.floor(value + 0.5)
    return down + (up - down) * (down % 2)


def _check_points(x: Tensor, num_components: int) -> None:
    if x.dim() < 2 or x.numel() == 0:
        raise ValueError(f"x of shape {tuple(x.shape)} holds no points: expected (..., m, D) with none of them 0")
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}: convert it to a floating point type first")
    if num_components < 1:
        raise ValueError(f"num_components={num_components} must be at least 1")


def _batched(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, *x.shape[-2:]).to(compute_dtype(x.dtype))


def _flat_mixture(init: GaussianMixture, lead: torch.Size, num_components: int, points: Tensor) -> Mixture:
    shape = (*lead, num_components, points.shape[-1])
    if init.means.shape != shape:
        raise ValueError(f"init has means of shape {tuple(init.means.shape)}, but these points need {tuple(shape)}")
    return Mixture(
        init.weights.to(points).reshape(-1, num_components),
        init.means.to(points).reshape(-1, *shape[-2:]),
        init.variances.to(points).reshape(-1, *shape[-2:]),
    )
