"""What a layer remembers: random numbers, activation checkpointing, and the slots of the history."""

import copy
import warnings

import pytest
import torch
from layer_helpers import CHANNELS, CONFIGURATIONS, SEEDING, WITH_HISTORY, assert_same, evaluate, points, seeded, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixnorm
from mixnorm import MixtureNorm2d
from mixnorm.functional import mixture_inference

# --- random numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("population", ["batch", "channel", "instance", "layer"])
def test_the_seed_decides_the_training_output(population):
    def run(seed):
        layer = MixtureNorm2d(CHANNELS, population=population)
        torch.manual_seed(seed)
        return layer(points(8, CHANNELS, 12, 12))

    assert_same(run(0), run(0))
    assert not torch.equal(run(0), run(1))


@pytest.mark.parametrize("seeding", SEEDING)
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_evaluation_has_no_randomness(options, seeding):
    layer = trained(MixtureNorm2d(CHANNELS, **seeded(options, seeding)))
    buffers = copy.deepcopy(layer.state_dict())
    torch.manual_seed(1)
    random_state = torch.get_rng_state()
    first = evaluate(layer, points(8, CHANNELS, 12, 12, seed=9))
    assert_same(torch.get_rng_state(), random_state)
    torch.manual_seed(2)
    assert_same(evaluate(layer, points(8, CHANNELS, 12, 12, seed=9)), first)
    assert_same(layer.state_dict(), buffers)


# --- activation checkpointing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("seeding", SEEDING)
@pytest.mark.parametrize("calls", [1, 2])
def test_checkpointing_counts_a_batch_once_and_changes_no_gradient(calls, seeding, reentrant):
    """With two calls before the backward pass, each recomputation must start where its own forward pass did."""
    plain = trained(MixtureNorm2d(CHANNELS, seeding=seeding))
    checkpointed = copy.deepcopy(plain)
    upstream = torch.randn(points().shape)

    def run(layer, call):
        torch.manual_seed(1)
        inputs = [(points(seed=20 + i) * (1 + i)).requires_grad_() for i in range(calls)]
        outputs = [call(x) for x in inputs]
        assert layer.num_batches_tracked == 3 + calls
        sum(outputs).backward(upstream)
        return [y.detach() for y in outputs], [x.grad for x in inputs], layer.weight.grad, layer.bias.grad

    expected = run(plain, plain)
    found = run(checkpointed, lambda x: checkpoint(checkpointed, x, use_reentrant=reentrant))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert_same(checkpointed.state_dict(), plain.state_dict())


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing_of_a_compiled_layer_counts_a_batch_once(reentrant):
    plain = trained(MixtureNorm2d(CHANNELS))
    checkpointed = copy.deepcopy(plain)
    forward = torch.compile(checkpointed, backend="eager", fullgraph=True)

    def run(call):
        torch.manual_seed(1)
        x = points(seed=20).requires_grad_()
        call(x).backward(points(seed=21))
        return x.grad

    found = run(lambda x: checkpoint(forward, x, use_reentrant=reentrant))
    torch.testing.assert_close(found, run(plain), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(checkpointed.state_dict(), plain.state_dict())
    assert checkpointed.num_batches_tracked == 4
    torch._dynamo.reset()


# --- the history --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, 0.5, 1.0, None])
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("options", WITH_HISTORY, ids=str)
def test_empty_slots_count_for_nothing(options, batches, momentum):
    """After n < T batches a layer is as one with T = n."""
    layer, short = (
        trained(MixtureNorm2d(CHANNELS, momentum=momentum, history=history, **options), batches) for history in (10, batches)
    )
    assert int((layer.history_weights.sum(-1) > 0).sum(-1).unique()) == batches
    torch.testing.assert_close(evaluate(layer, points(seed=9)), evaluate(short, points(seed=9)), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("batches", [2, 4, 7])
def test_history_holds_the_newest_last(batches):
    """At K = 1 a batch's mixture is its mean and its variance. T = 4."""
    layer = trained(MixtureNorm2d(CHANNELS, num_components=1, history=4), batches)
    kept = torch.stack([points(seed=i) for i in range(batches)][-4:])
    n = len(kept)
    torch.testing.assert_close(layer.history_means[-n:, 0], kept.mean((1, 3, 4)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.history_vars[-n:, 0], kept.var((1, 3, 4), correction=0), atol=1e-5, rtol=1e-5)
    assert layer.history_weights.flatten().tolist() == [0.0] * (4 - n) + [1.0] * n
    assert layer.num_batches_tracked == batches


@pytest.mark.parametrize(
    ("momentum", "slot_weights"),
    [(None, [1 / 3, 1 / 3, 1 / 3]), (0.5, [1 / 7, 2 / 7, 4 / 7]), (0.1, [81 / 271, 90 / 271, 100 / 271]), (1.0, [0, 0, 1])],
)
@pytest.mark.parametrize("inference", ["ensemble", "mixture", "paper"])
def test_momentum_weighs_the_history(inference, momentum, slot_weights):
    """τ_t ∝ (1 - momentum)^age, with the sum 1."""
    layer = trained(MixtureNorm2d(CHANNELS, momentum=momentum, history=3, inference=inference, affine=False), 5)
    x = points(seed=9)
    rows = x.movedim(1, -1).flatten(0, -2)
    histories = layer.history_weights, layer.history_means, layer.history_vars
    expected = mixture_inference(rows, *histories, torch.tensor(slot_weights), mode=inference)
    torch.testing.assert_close(evaluate(layer, x).movedim(1, -1).flatten(0, -2), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "lead", "dim"),
    [
        ({"population": "batch"}, (), CHANNELS),
        ({"population": "channel"}, (CHANNELS,), 1),
        ({"population": "instance"}, (4,), CHANNELS),
        ({"population": "layer"}, (4,), 1),
        ({"population": "group", "num_groups": 2}, (8,), 1),
        ({"population": "batch", "track_running_stats": False}, (), CHANNELS),
    ],
    ids=str,
)
def test_mixture_is_that_of_the_last_training_batch(options, lead, dim):
    layer = MixtureNorm2d(CHANNELS, **options)
    assert layer.mixture is None
    assert layer.effective_components() == 0
    trained(layer, 2)
    mixture = layer.mixture
    assert mixture.weights.shape == (*lead, 3)
    assert mixture.means.shape == mixture.variances.shape == (*lead, 3, dim)
    torch.testing.assert_close(mixture.weights.sum(-1), torch.ones(lead))
    count = layer.effective_components()
    assert isinstance(count, torch.Tensor) == bool(lead)
    assert_same(torch.as_tensor(count), (mixture.weights > 0).sum(-1))

    # A mixture's overall mean and variance are those of the points that it was fitted to.
    x = points(seed=1)
    rows = {
        "batch": x.movedim(1, -1).reshape(-1, CHANNELS),
        "channel": x.movedim(1, 0).reshape(CHANNELS, -1, 1),
        "instance": x.flatten(2).transpose(1, 2),
        "layer": x.reshape(4, -1, 1),
        "group": x.reshape(8, -1, 1),
    }[layer.population]
    mean = (mixture.weights.unsqueeze(-1) * mixture.means).sum(-2)
    second = (mixture.weights.unsqueeze(-1) * (mixture.variances + mixture.means.square())).sum(-2)
    torch.testing.assert_close(mean, rows.mean(-2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(second, rows.square().mean(-2), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("population", ["batch", "channel"])
def test_effective_components_counts_the_distinct_points(population):
    """Two distinct points can use two components at most, whatever K is."""
    layer = MixtureNorm2d(CHANNELS, num_components=5, population=population)
    x = torch.zeros(4, CHANNELS, 3, 3)
    x[::2] = 1
    layer(x)
    assert torch.as_tensor(layer.effective_components()).eq(2).all()


@pytest.mark.parametrize("options", [{"population": "batch"}, {"population": "channel"}], ids=str)
def test_warm_seeding_follows_the_modes(options):
    """Component k of a batch goes on from component k of the last one, also as the modes move apart, step by step."""
    layer = MixtureNorm2d(CHANNELS, num_components=2, seeding="warm", history=12, **options)
    generator = torch.Generator().manual_seed(0)
    for i in range(12):
        x = torch.randn(8, CHANNELS, 4, 4, generator=generator)
        x[::2] += 20 + 0.5 * i
        layer(x)
    steps = layer.history_means.diff(dim=-3)
    assert steps.abs().max() < 2  # a swap would be a step of at least 20
    apart = layer.history_means.diff(dim=-2).abs().flatten()
    assert 18 < apart.min() < 23
    assert 23 < apart.max() < 28


@pytest.mark.parametrize("seeding", SEEDING)
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_reset_running_stats_makes_a_new_layer(options, seeding):
    layer = trained(MixtureNorm2d(CHANNELS, affine=False, **seeded(options, seeding)))
    evaluate(layer, points())
    layer.reset_running_stats()
    new = MixtureNorm2d(CHANNELS, affine=False, **seeded(options, seeding))
    assert layer.mixture is None
    assert_same(layer.state_dict(), new.state_dict())
    assert_same(evaluate(layer, points(seed=9)), evaluate(new, points(seed=9)))
    assert_same(evaluate(trained(layer), points(seed=9)), evaluate(trained(new), points(seed=9)))


@pytest.mark.parametrize("options", WITH_HISTORY, ids=str)
def test_a_new_layer_evaluates_as_a_new_batch_norm(options):
    new = MixtureNorm2d(CHANNELS, **options)
    torch.testing.assert_close(evaluate(new, points()), evaluate(nn.BatchNorm2d(CHANNELS), points()), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("options", WITH_HISTORY, ids=str)
def test_train_and_eval_switch_between_batch_and_history(options):
    """In evaluation a batch says nothing about another: the output of a sample does not depend on its neighbours."""
    layer = trained(MixtureNorm2d(CHANNELS, **options))
    x = points(seed=9)
    torch.testing.assert_close(evaluate(layer, x[:1]), evaluate(layer, x)[:1], atol=1e-6, rtol=1e-5)
    layer.train()
    assert layer.training
    counted = int(layer.num_batches_tracked)
    assert not torch.allclose(layer(x)[:1], layer(x[:1]), atol=1e-2)
    assert layer.num_batches_tracked == counted + 2


def test_a_small_first_batch_does_not_bound_the_pool():
    """A slot holds as many points as the largest batch gave. Those of smaller batches are repeated, before it and after."""
    layer = MixtureNorm2d(1, inference="pooled", sample_fraction=1.0, history=3)
    small = torch.randn(2, 1, 2, 2)
    layer(small)
    layer(torch.arange(16.0).view(16, 1, 1, 1).expand(16, 1, 4, 4))  # each image has its number for a value
    assert layer.history_samples.shape == (3, 256, 1)
    assert_same(layer.history_samples[2].flatten(), torch.arange(16.0).repeat_interleave(16))
    assert_same(layer.history_samples[1].flatten(), small.flatten().repeat(32))
    layer(small)
    assert_same(layer.history_samples[2].flatten(), small.flatten().repeat(32))
    assert evaluate(layer, small).isfinite().all()


# --- momentum=0 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [0, 3])
@pytest.mark.parametrize("options", WITH_HISTORY, ids=str)
def test_no_momentum_leaves_the_history_as_it_is(options, batches):
    """As batch norm's running statistics; training goes on by the batch, warm seeding by the last batch."""
    for seeding in SEEDING:
        layer = trained(MixtureNorm2d(CHANNELS, **seeded(options, seeding)), batches)
        layer.momentum = 0
        before, expected = copy.deepcopy(layer.state_dict()), evaluate(layer, points(seed=9))
        y = layer.train()(points(seed=7))
        assert y.std() > 0.5
        after = layer.state_dict()
        of_history = [name for name in before if not name.startswith("ahead")]  # the mixture for the next batch
        assert_same({name: after[name] for name in of_history}, {name: before[name] for name in of_history})
        mean = (layer.mixture.weights.unsqueeze(-1) * layer.mixture.means).sum(-2).flatten()
        torch.testing.assert_close(mean, points(seed=7).mean((0, 2, 3)), atol=1e-4, rtol=1e-4)
        assert_same(evaluate(layer.train(), points(seed=9)), expected)
        layer.momentum = 0.1
        layer.train()(points(seed=8))
        assert layer.num_batches_tracked == batches + 1
        assert_same(layer.mixture.means, layer.history_means[..., -1, :, :])


def test_no_momentum_in_a_new_layer_and_a_converted_one_is_batch_norms():
    norm = nn.BatchNorm2d(CHANNELS, momentum=0.0)
    for start in (norm, trained(nn.BatchNorm2d(CHANNELS))):
        start.momentum = 0.0
        layer = mixnorm.convert(copy.deepcopy(start))
        for module in (layer, start):
            module.train()(points(seed=7))
        torch.testing.assert_close(evaluate(layer, points(seed=9)), evaluate(start, points(seed=9)), atol=1e-5, rtol=1e-5)


def test_recalibrate_refills_without_momentum():
    layer = MixtureNorm2d(CHANNELS, momentum=0)
    mixnorm.recalibrate(layer, [points(seed=i) for i in range(3)])
    assert layer.num_batches_tracked == 3
    assert layer.momentum == 0


# --- batches that the history refuses ------------------------------------------------------------------------------------


def refusals(record):
    return [str(w.message) for w in record if "kept out of the history" in str(w.message)]


@pytest.mark.parametrize("population", ["batch", "channel"])
@pytest.mark.parametrize(
    ("dtype", "factor", "remedy"),
    [
        (torch.float16, 1e3, "not finite in torch.float16: call float() on the norm"),
        (torch.float32, torch.inf, "not finite in torch.float32: lower the learning rate"),
    ],
)
def test_a_refused_batch_is_told_once(dtype, factor, remedy, population):
    layer = MixtureNorm2d(CHANNELS, dtype=dtype, population=population)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(3):
            layer((points(8, CHANNELS, 4, 4) * factor).to(dtype))
        evaluate(layer, points().to(dtype))
    (told,) = refusals(record)
    assert remedy in told
    assert layer.num_batches_tracked == 0


def test_batches_that_nobody_saw_refused_are_told_in_evaluation():
    """As on a GPU, where training does not wait to learn of it: here the operator of a compiled layer decides."""
    layer = MixtureNorm2d(CHANNELS, dtype=torch.float16)
    torch.compile(layer, backend="eager", fullgraph=True)((points(8, CHANNELS, 4, 4) * 1e3).half())
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(2):
            evaluate(layer, points().half())
    (told,) = refusals(record)
    assert told.startswith("all training batches were")
    torch._dynamo.reset()


def test_an_evaluation_looks_once():
    layer = trained(MixtureNorm2d(CHANNELS))
    evaluate(layer, points())
    layer.num_batches_tracked.zero_()
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        evaluate(layer, points())
    assert not refusals(record)


# --- the default device --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeding", SEEDING)
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_a_layer_computes_where_its_input_is(options, seeding):
    """Whatever the default device is; it is for tensors that a user makes."""
    layer, x, upstream = trained(MixtureNorm2d(CHANNELS, **seeded(options, seeding))), points(seed=5), points(seed=6)
    for training in (True, False):
        leaf = x.clone().requires_grad_()
        with torch.device("meta"):
            layer.train(training)(leaf).backward(upstream)
        assert leaf.grad.abs().sum() > 0
