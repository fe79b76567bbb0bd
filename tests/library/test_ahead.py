"""fit="ahead": a batch is shared out by the mixture of the batch before, and normalized by its own statistics."""

import copy
import io
import itertools

import pytest
import torch
from layer_helpers import assert_same, evaluate, points, randn
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixnorm
from mixnorm import MixtureNorm1d, MixtureNorm2d
from mixnorm.functional import mixture_normalize
from mixnorm.gmm import GaussianMixture
from mixnorm.ops.choose import HAS_TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WHOLE = {"sample_fraction": 1.0, "max_samples": None}


def skip_one_number(seed):
    """The generator as fit="ahead" leaves it for the fit: a number names the forward pass, should it be repeated."""
    torch.manual_seed(seed)
    torch.randint(2**62, ())


def kept(layer):
    """The mixture that waits for the next batch."""
    return GaussianMixture(layer.ahead_weights.clone(), layer.ahead_means.clone(), layer.ahead_vars.clone())


@pytest.mark.parametrize("options", [{}, {"activation": "relu"}, {"scale": "unit", "between": 1.0}], ids=str)
def test_a_batch_has_the_posterior_of_the_batch_before_and_statistics_of_its_own(options):
    layer = MixtureNorm1d(5, affine=False, fit="ahead", **options)
    layer(points(300, 5, seed=0))
    for seed in (1, 2):
        x, before = points(300, 5, seed=seed), kept(layer)
        y = layer(x)
        resp = before.responsibilities(x)
        expected = mixture_normalize(x.double(), resp.double(), **options)
        torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.mixture.weights, resp.mean(0), rtol=1e-5, atol=1e-6)


def test_what_waits_for_the_next_batch_is_fitted_to_this_one():
    layer = MixtureNorm1d(5, fit="ahead", **WHOLE)
    for seed in range(3):
        x = points(300, 5, seed=seed)
        torch.manual_seed(seed)
        layer(x)
        skip_one_number(seed)
        expected = mixnorm.gmm.fit_mixture(x, 3, em_iters=2, min_weight=0.01, min_variance=1e-5)
        for name in ("weights", "means", "variances"):
            torch.testing.assert_close(getattr(kept(layer), name), getattr(expected, name), rtol=1e-4, atol=1e-5)


def test_the_first_batch_fits_its_own_mixture():
    x, found = points(), []
    for fit in ("batch", "ahead"):
        torch.manual_seed(0)
        if fit == "batch":
            skip_one_number(0)
        found.append(MixtureNorm2d(4, fit=fit)(x))
    assert_same(*found)


def test_one_component_is_batch_norm():
    ours, batch_norm = MixtureNorm2d(4, num_components=1, fit="ahead"), nn.BatchNorm2d(4)
    for seed in range(4):
        x = points(seed=seed)
        x = x[:1, :, :1] if seed == 2 else x  # of fewer points than a component needs
        torch.testing.assert_close(ours(x), batch_norm(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", [True, False], ids=["the first batch", "a later batch"])
def test_a_batch_that_is_not_finite_spoils_no_other(first):
    layer = MixtureNorm1d(4, fit="ahead")
    if not first:
        layer(points(200, 4, seed=0))
    before = kept(layer)
    with pytest.warns(UserWarning, match="not finite"):
        layer(torch.full((200, 4), torch.nan))
    assert_same(kept(layer).means, before.means)
    assert layer(points(200, 4, seed=1)).isfinite().all()
    assert (kept(layer).means != before.means).any()


def test_a_batch_of_few_points_fits_its_own_mixture_and_leaves_none():
    layer = MixtureNorm1d(4, fit="ahead")
    layer(points(200, 4))
    before = kept(layer)
    with pytest.warns(UserWarning, match="too small for 3 components"):
        y = layer(points(10, 4, seed=1))
    torch.testing.assert_close(y.mean(0), torch.zeros(4), rtol=0, atol=1e-5)
    assert_same(kept(layer).means, before.means)


def test_recalibration_begins_anew():
    batches = [points(seed=seed) for seed in range(3)]
    found = []
    for start in range(2):
        model = nn.Sequential(MixtureNorm2d(4, fit="ahead"))
        model(points(seed=10 + start))
        torch.manual_seed(0)
        mixnorm.recalibrate(model, batches)
        found.append(evaluate(model, batches[0]))
    assert_same(*found)


def test_a_resumed_training_goes_on_to_the_bit():
    torch.manual_seed(0)
    layer = MixtureNorm2d(4, fit="ahead")
    for seed in range(2):
        layer(points(seed=seed))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    resumed = MixtureNorm2d(4, fit="ahead")
    resumed.load_state_dict(torch.load(file))
    found = []
    for one in (layer, resumed, copy.deepcopy(resumed)):
        torch.manual_seed(1)
        found.append(one(points(seed=2)))
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


def test_state_dicts_go_from_either_fit_to_the_other():
    ahead, batch = MixtureNorm2d(4, fit="ahead"), MixtureNorm2d(4)
    for layer in (ahead, batch):
        layer(points())
    for layer, other in ((MixtureNorm2d(4, fit="ahead"), batch), (MixtureNorm2d(4), ahead)):
        layer.load_state_dict(other.state_dict())
        assert_same(evaluate(layer, points(seed=1)), evaluate(other, points(seed=1)))
    ahead.train().load_state_dict(nn.BatchNorm2d(4).state_dict())
    found = []
    for layer in (ahead, MixtureNorm2d(4)):  # no mixture of the batch before
        torch.manual_seed(0)
        if layer.fit == "batch":
            skip_one_number(0)
        found.append(layer(points(seed=1)))
    assert_same(*found)


def test_a_mixture_that_was_copied_is_taken():
    """As from the first rank, which alone loaded a state dict."""
    layer, copied = MixtureNorm2d(4, fit="ahead"), MixtureNorm2d(4, fit="ahead")
    layer(points())
    for ours, theirs in zip(copied.buffers(), layer.buffers(), strict=True):
        ours.copy_(theirs)
    found = []
    for one in (layer, copied):
        torch.manual_seed(0)
        found.append(one(points(seed=1)))
    assert_same(*found)


def test_a_state_dict_of_other_layers_leaves_the_mixture_that_waits():
    model = nn.Sequential(MixtureNorm2d(4, fit="ahead"), nn.Conv2d(4, 2, 1))
    model(points())
    before = kept(model[0])
    model.load_state_dict({"1.bias": torch.zeros(2)}, strict=False)
    assert_same(kept(model[0]).means, before.means)
    model(points(seed=1))
    resp = before.responsibilities(points(seed=1).movedim(1, -1).reshape(-1, 4))
    torch.testing.assert_close(model[0].mixture.weights, resp.mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not HAS_TRITON, reason="only Triton's fits are captured with a counter")
def test_in_a_graph_no_backward_pass_is_waited_for_that_will_not_come(monkeypatch):
    """As where x has a gradient, and grad mode is off."""
    monkeypatch.setattr("mixnorm.mixture_norm._in_graph", lambda x: True)
    layer = MixtureNorm1d(4, fit="ahead", backend="triton").to(DEVICE)
    layer(points(100, 4).to(DEVICE))
    before = kept(layer)
    with torch.no_grad():
        layer(points(100, 4, seed=1).to(DEVICE).requires_grad_())
    assert (kept(layer).means != before.means).any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_repeats_the_forward_pass_as_it_was(reentrant):
    """Also of the first batch; and dropout behind the layer draws the same numbers when it is repeated."""
    found = []
    for checkpointed in (False, True):
        layer = nn.Sequential(MixtureNorm1d(4, fit="ahead"), nn.Dropout(0.5))
        for step in range(3):
            x = points(200, 4, seed=step).requires_grad_()
            torch.manual_seed(step)
            y = checkpoint(layer, x, use_reentrant=reentrant) if checkpointed else layer(x)
            y.backward(randn(200, 4, seed=step))
            found += [x.grad, kept(layer[0]).means]
    for plain, repeated in zip(found[:6], found[6:], strict=True):
        assert_same(plain, repeated)


def test_a_compiled_layer_does_the_same():
    found = []
    for compiled in (False, True):
        layer = MixtureNorm2d(4, fit="ahead", **WHOLE, em_iters=0, num_components=2, min_weight=0.0)
        run = torch.compile(layer, fullgraph=True) if compiled else layer
        for seed in range(3):
            x = torch.randn(8, 4, 4, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            if seed == 0:  # the mixture of the first batch depends on random numbers, which a compiler draws otherwise
                with torch.no_grad():
                    run(x)
                layer.ahead_means.copy_(torch.tensor([[-1.0], [1.0]]).expand(2, 4))
                layer.ahead_vars.fill_(1)
                layer.ahead_weights.fill_(0.5)
                before = kept(layer)
                y = run(x)
                y.backward(x.detach())
                flat = x.detach().movedim(1, -1).reshape(-1, 4)
                expected = mixture_normalize(flat, before.responsibilities(flat)).view(8, 4, 4, 4).movedim(-1, 1)
                torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
                found.append(x.grad)
            else:
                was = kept(layer)
                run(x)
                assert (kept(layer).means != was.means).any()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"seeding": "warm"}, r"fit='ahead' does not go with seeding='warm', .*: use seeding='kmeans\+\+', or fit='batch'"),
        ({"inference": "pooled"}, r"fit='ahead' does not go with inference='pooled': use 'ensemble'"),
        ({"track_running_stats": False}, r"fit='ahead' keeps a mixture from batch to batch: use track_running_stats=True"),
        ({"population": "instance"}, r"and population='batch' or 'channel'"),
    ],
)
def test_what_it_does_not_go_with(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        MixtureNorm2d(4, fit="ahead", **options)
    with pytest.raises(ValueError, match=sentence):
        mixnorm.LazyMixtureNorm2d(fit="ahead", **options)


def test_an_unknown_fit():
    with pytest.raises(ValueError, match="fit='later'"):
        MixtureNorm2d(4, fit="later")


def test_a_model_converts_and_reverts():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    mixnorm.convert(model, form="paper", fit="ahead", select="*")
    for _ in range(2):
        model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    assert model[1].fit == "ahead"
    assert all(p.grad is not None for p in itertools.islice(model.parameters(), 4))
    assert isinstance(mixnorm.revert(model)[1], nn.BatchNorm2d)
