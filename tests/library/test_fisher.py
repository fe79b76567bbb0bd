"""Fisher vectors against autograd of the log-density, and their information against a Monte Carlo estimate."""

import torch

from mixnorm.fisher import (
    gaussian_fisher_information,
    gaussian_fisher_vector,
    mixture_fisher_information,
    mixture_fisher_vector,
)
from mixnorm.functional import mixture_normalize
from mixnorm.gmm import GaussianMixture


def normal(mean, std):
    return torch.distributions.Independent(torch.distributions.Normal(mean, std), 1)


def test_gaussian_vector_is_the_scaled_score():
    g = torch.Generator().manual_seed(0)
    mean, std = torch.randn(4, generator=g, dtype=torch.float64), torch.rand(4, generator=g, dtype=torch.float64) + 0.5
    information = gaussian_fisher_information(std)
    for x in torch.randn(10, 4, generator=g, dtype=torch.float64):
        leaves = [mean.clone().requires_grad_(), std.clone().requires_grad_()]
        score = torch.stack(torch.autograd.grad(normal(*leaves).log_prob(x), leaves))
        torch.testing.assert_close(gaussian_fisher_vector(x, mean, std), score / information.sqrt())


def test_gaussian_information_is_the_covariance_of_the_score():
    mean, std = torch.tensor([0.5, -1.0], dtype=torch.float64), torch.tensor([0.7, 2.0], dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    x = mean + std * torch.randn(400_000, 2, generator=g, dtype=torch.float64)
    score = gaussian_fisher_vector(x, mean, std) * gaussian_fisher_information(std).sqrt()
    estimate = torch.einsum("iad,ibd->abd", score, score) / len(x)
    expected = torch.diag_embed(gaussian_fisher_information(std).T).permute(1, 2, 0)  # (2, 2, D), diagonal
    torch.testing.assert_close(estimate, expected, atol=0.05, rtol=0.02)


def separated_mixture() -> GaussianMixture:
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    means = torch.tensor([[-20.0, 0.0], [0.0, 5.0], [20.0, -5.0]], dtype=torch.float64)
    return GaussianMixture(weights, means, torch.tensor([[1.0, 0.5], [2.0, 1.0], [0.3, 3.0]], dtype=torch.float64))


def test_mixture_vector_is_the_scaled_score():
    mixture = separated_mixture()
    mixture = GaussianMixture(mixture.weights, mixture.means / 8, mixture.variances)  # with overlap
    x = torch.randn(10, 2, dtype=torch.float64) * 2
    vectors = mixture_fisher_vector(x, mixture)
    assert vectors.shape == (10, 3, 2, 2)
    information = mixture_fisher_information(mixture)
    for xi, vector in zip(x, vectors, strict=True):
        leaves = [mixture.means.clone().requires_grad_(), mixture.variances.sqrt().requires_grad_()]
        density = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(mixture.weights), normal(*leaves))
        score = torch.stack(torch.autograd.grad(density.log_prob(xi), leaves), dim=1)
        torch.testing.assert_close(vector, score / information.sqrt())


def test_mixture_information_is_the_covariance_of_the_score():
    mixture = separated_mixture()
    x = mixture.sample(400_000, generator=torch.Generator().manual_seed(0))
    score = mixture_fisher_vector(x, mixture) * mixture_fisher_information(mixture).sqrt()
    estimate = score.square().mean(0)
    torch.testing.assert_close(estimate, mixture_fisher_information(mixture), rtol=0.03, atol=0.01)
    across = torch.einsum("iad,ibd->abd", score[:, :, 0], score[:, :, 0]) / len(x)
    off_diagonal = across[~torch.eye(3, dtype=torch.bool)]
    assert off_diagonal.abs().max() < 0.01


def test_mean_part_for_one_gaussian_is_batch_norm():
    x = torch.randn(64, 5, dtype=torch.float64) * 3 + 1
    mean, std = x.mean(0), x.std(0, correction=0)
    expected = torch.nn.functional.batch_norm(x, None, None, training=True, eps=1e-14)
    torch.testing.assert_close(gaussian_fisher_vector(x, mean, std)[:, 0], expected)


def test_sum_of_mean_parts_is_mixture_norm():
    mixture = separated_mixture()
    x = mixture.sample(500, generator=torch.Generator().manual_seed(0))
    resp = mixture.responsibilities(x)
    share = resp / resp.sum(0)
    means = share.T @ x
    variances = torch.stack([share[:, k] @ (x - means[k]).square() for k in range(3)])
    of_batch = GaussianMixture(resp.mean(0), means, variances)
    # With the batch's own statistics; the posterior of well separated components is the same under both.
    torch.testing.assert_close(mixture_fisher_vector(x, of_batch)[:, :, 0].sum(1), mixture_normalize(x, resp, eps=0))


def test_a_dropped_component_has_no_vector():
    mixture = separated_mixture()
    dropped = GaussianMixture(
        torch.tensor([0.4, 0.0, 0.6], dtype=torch.float64),
        mixture.means,
        mixture.variances * torch.tensor([[1.0], [0.0], [1.0]]),
    )
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    vectors = mixture_fisher_vector(x, dropped)
    assert (vectors[:, 1] == 0).all()
    assert vectors.isfinite().all()
    information = mixture_fisher_information(dropped)
    assert (information[1] == 0).all()
    assert information.isfinite().all()
    vectors.sum().backward()
    assert x.grad.isfinite().all()
