"""Fisher vectors of a Gaussian and of a mixture: where batch norm and mixture norm come from.

The Fisher vector of a point is the gradient of its log-density with respect to the parameters, scaled by the inverse square
root of the Fisher information. Its mean part under one Gaussian is (x - μ)/σ, which is batch norm; under a mixture it is
ν_k/√λ_k · (x - μ_k)/σ_k, and the sum over k is mixture norm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mixnorm.gmm import GaussianMixture
from mixnorm.ops.reference import inverse_sqrt


def gaussian_fisher_vector(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Eq. (fisher_vector_gaussian): x (..., D), mean and std (D,) to (..., 2, D), the mean part and then the deviation part.

    Example:
        >>> x = torch.randn(100, 4)
        >>> gaussian_fisher_vector(x, x.mean(0), x.std(0, correction=0))[:, 0]  # batch norm
    """
    z = (x - mean) / std
    return torch.stack((z, (z.square() - 1) / math.sqrt(2)), dim=-2)


def gaussian_fisher_information(std: Tensor) -> Tensor:
    """Eq. (fisher_information_matrix_gaussian), the diagonal: std (..., D) to (..., 2, D)."""
    precision = std.square().reciprocal()
    return torch.stack((precision, 2 * precision), dim=-2)


def mixture_fisher_vector(x: Tensor, mixture: GaussianMixture) -> Tensor:
    """Eq. (fisher_vector_gmm): x (..., m, D) to (..., m, K, 2, D). A dropped component has zeros."""
    resp = mixture.responsibilities(x)
    factor = resp * inverse_sqrt(mixture.weights).unsqueeze(-2)
    # A dropped component may have a variance of 0.
    std = torch.where((mixture.weights > 0).unsqueeze(-1), mixture.variances, 1.0).sqrt()
    vectors = gaussian_fisher_vector(x.unsqueeze(-2), mixture.means.unsqueeze(-3), std.unsqueeze(-3))
    return factor[..., None, None] * vectors


def mixture_fisher_information(mixture: GaussianMixture) -> Tensor:
    """Eq. (fisher_information_matrix_gmm), the diagonal: (..., K, 2, D).

    The closed form assumes that each point belongs to one component, so it is exact for components that do not overlap.
    A dropped component has zeros.
    """
    weights = mixture.weights.unsqueeze(-1)
    std = torch.where(weights > 0, mixture.variances, 1.0).sqrt()
    return weights.unsqueeze(-1) * gaussian_fisher_information(std)
