"""A seeding that is random in the first batches and warm after them."""

import pytest
import torch
from layer_helpers import points, randn
from torch.utils.checkpoint import checkpoint

import mixnorm
from mixnorm import MixtureNorm1d, MixtureNorm2d


def test_seeding_that_is_random_at_first_and_warm_after():
    """In the first batches the mixture depends on the random numbers, and then only on the mixture before."""
    found, after = [], 3
    for seed in range(2):
        layer = MixtureNorm1d(4, num_components=3, seeding=after, sample_fraction=1.0, em_iters=2)
        for step in range(5):
            before = layer.mixture
            torch.manual_seed(100 * seed + step)
            layer(points(400, 4, seed=step))
            if step >= after:
                expected = mixnorm.gmm.fit_mixture(points(400, 4, seed=step), 3, em_iters=2, init=before, min_variance=1e-5)
                resp = expected.responsibilities(points(400, 4, seed=step))
                torch.testing.assert_close(layer.mixture.weights, resp.mean(0), rtol=1e-4, atol=1e-5)
            found.append(layer.mixture.means)
    assert not any(torch.allclose(a, b, atol=1e-3) for a, b in zip(found[1:3], found[6:8], strict=True))


def test_seeding_that_counts_needs_a_history():
    with pytest.raises(ValueError, match="seeding=10 counts batches, which needs a history: use 'kmeans\\+\\+' or 'warm'"):
        MixtureNorm2d(4, seeding=10, track_running_stats=False)
    with pytest.raises(ValueError, match=r"seeding=-1 is unknown: .* or a number of batches"):
        MixtureNorm2d(4, seeding=-1)


def test_seeding_by_a_number_is_recomputed_as_it_was():
    """Activation checkpointing: the batch at the boundary, whose count has grown when it is computed again."""
    found = []
    for checkpointed in (False, True):
        layer = MixtureNorm1d(4, seeding=2)
        for step in range(4):
            x = points(200, 4, seed=step).requires_grad_()
            torch.manual_seed(step)
            y = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            y.backward(randn(200, 4, seed=step))
            found.append(x.grad)
    torch.testing.assert_close(found[:4], found[4:], rtol=0, atol=0)
