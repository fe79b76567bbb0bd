"""What a layer remembers: state dicts, copies, random numbers, checkpointing, moves, and the slots of the history."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixnorm
from mixnorm import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d
from mixnorm.functional import mixture_inference

INFERENCE = ("ensemble", "mixture", "paper", "pooled")
SEEDING = ("kmeans++", "warm")
CHANNELS = 4

# Every population, in every mode of inference where it has a history.
CONFIGURATIONS = [
    *({"population": population, "inference": mode} for population in ("batch", "channel") for mode in INFERENCE),
    {"population": "instance"},
    {"population": "layer"},
    {"population": "group", "num_groups": 2},
    {"population": "batch", "track_running_stats": False},
]
WITH_HISTORY = [c for c in CONFIGURATIONS if "inference" in c]
WITHOUT_HISTORY = [c for c in CONFIGURATIONS if "inference" not in c]

RANKS = {
    "1d": (nn.BatchNorm1d, MixtureNorm1d, (24, CHANNELS)),
    "1d with positions": (nn.BatchNorm1d, MixtureNorm1d, (6, CHANNELS, 7)),
    "2d": (nn.BatchNorm2d, MixtureNorm2d, (4, CHANNELS, 5, 3)),
    "3d": (nn.BatchNorm3d, MixtureNorm3d, (3, CHANNELS, 2, 3, 4)),
}


def points(*shape, seed=0):
    """Random points with two broad modes, which overlap enough for the fit to depend on its seeding."""
    generator = torch.Generator().manual_seed(seed)
    shape = shape or (4, CHANNELS, 6, 5)
    mode = torch.randint(0, 2, (shape[0], 1, *shape[2:]), generator=generator)
    return torch.randn(shape, generator=generator) * 1.5 + 3 * mode


def trained(layer, batches=3, *shape, seed=0):
    """The layer after some training batches, with γ and β that are not those of a new layer."""
    torch.manual_seed(seed)
    if layer.affine:
        nn.init.uniform_(layer.weight, 0.5, 1.5)
        nn.init.uniform_(layer.bias, -1, 1)
    layer.train()
    with torch.no_grad():
        for i in range(batches):
            layer(points(*shape, seed=100 * seed + i))
    return layer


def evaluate(layer, x):
    with torch.no_grad():
        return layer.eval()(x)


def same(a, b):
    torch.testing.assert_close(a, b, atol=0, rtol=0, equal_nan=True)


# --- state dicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target_is_trained", [False, True], ids=["into new", "into trained"])
@pytest.mark.parametrize("batches", [0, 3])
@pytest.mark.parametrize("seeding", SEEDING)
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_state_dict_round_trip(options, seeding, batches, target_is_trained):
    """The state dict says all there is to evaluation: what the other layer saw before does not matter."""
    layer = trained(MixtureNorm2d(CHANNELS, seeding=seeding, **options), batches)
    other = MixtureNorm2d(CHANNELS, seeding=seeding, **options)
    if target_is_trained:
        evaluate(trained(other, 2, seed=5), points(seed=8))
    other.load_state_dict(layer.state_dict())
    same(other.state_dict(), layer.state_dict())
    same(evaluate(other, points(seed=9)), evaluate(layer, points(seed=9)))


@pytest.mark.parametrize("options", WITH_HISTORY, ids=str)
def test_training_goes_on_after_loading(options):
    """A resumed layer has the same history as one that never stopped, warm seeding included."""
    layer = trained(MixtureNorm2d(CHANNELS, seeding="warm", **options))
    other = MixtureNorm2d(CHANNELS, seeding="warm", **options)
    other.load_state_dict(layer.state_dict())
    for each in (layer, other):
        torch.manual_seed(1)
        each.train()(points(seed=9))
    same(other.state_dict(), layer.state_dict())


@pytest.mark.parametrize("inference", INFERENCE)
@pytest.mark.parametrize("population", ["batch", "channel"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "no affine"])
@pytest.mark.parametrize("num_components", [1, 3])
@pytest.mark.parametrize("rank", RANKS)
def test_batch_norm_checkpoint_gives_batch_norms_output(rank, num_components, affine, population, inference):
    batch_norm, mixture_norm, shape = RANKS[rank]
    norm = trained(batch_norm(CHANNELS, affine=affine), 3, *shape)
    layer = mixture_norm(CHANNELS, affine=affine, num_components=num_components, population=population, inference=inference)
    layer.load_state_dict(norm.state_dict(), strict=True)
    x = points(*shape, seed=9)
    torch.testing.assert_close(evaluate(layer, x), evaluate(norm, x), atol=1e-5, rtol=1e-5)
    assert layer.num_batches_tracked == 3


@pytest.mark.parametrize("inference", INFERENCE)
def test_batch_norm_checkpoint_replaces_what_was_learned(inference):
    norm = trained(nn.BatchNorm2d(CHANNELS))
    layer = trained(MixtureNorm2d(CHANNELS, inference=inference), 5, seed=7)
    layer.load_state_dict(norm.state_dict(), strict=True)
    torch.testing.assert_close(evaluate(layer, points(seed=9)), evaluate(norm, points(seed=9)), atol=1e-5, rtol=1e-5)


def test_batch_norm_checkpoint_without_a_counter_loads():
    """Checkpoints from before ``num_batches_tracked`` load into batch norm with strict=True; many are still around."""
    norm = trained(nn.BatchNorm2d(CHANNELS))
    old = {name: value for name, value in norm.state_dict().items() if name != "num_batches_tracked"}
    nn.BatchNorm2d(CHANNELS).load_state_dict(old, strict=True)
    layer = MixtureNorm2d(CHANNELS)
    layer.load_state_dict(old, strict=True)
    torch.testing.assert_close(evaluate(layer, points(seed=9)), evaluate(norm, points(seed=9)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tracked", [True, False], ids=["tracked", "not tracked"])
@pytest.mark.parametrize("options", WITHOUT_HISTORY, ids=str)
def test_batch_norm_checkpoint_loads_where_no_history_is_kept(options, tracked):
    norm = trained(nn.BatchNorm2d(CHANNELS, track_running_stats=tracked))
    layer = MixtureNorm2d(CHANNELS, **options)
    layer.load_state_dict(norm.state_dict(), strict=True)
    same(dict(layer.named_parameters()), dict(norm.named_parameters()))


def test_loading_does_not_change_the_callers_state_dict():
    state = trained(nn.BatchNorm2d(CHANNELS)).state_dict()
    before = {name: value.clone() for name, value in state.items()}
    MixtureNorm2d(CHANNELS).load_state_dict(state)
    same(dict(state), before)


def test_a_models_batch_norm_checkpoint_loads_into_the_converted_model():
    def model():
        return nn.Sequential(nn.Conv2d(CHANNELS, 6, 3), nn.Sequential(nn.BatchNorm2d(6), nn.ReLU()), nn.BatchNorm2d(6))

    original, converted = model(), mixnorm.convert(model(), num_components=2)
    for seed in range(3):
        original(points(seed=seed))
        converted(points(seed=50 + seed))
    converted.load_state_dict(original.state_dict(), strict=True)
    torch.testing.assert_close(evaluate(converted, points(seed=9)), evaluate(original, points(seed=9)), atol=1e-5, rtol=1e-5)


def test_keys_that_are_not_a_batch_norms_are_still_errors():
    state = trained(nn.BatchNorm2d(CHANNELS)).state_dict()
    with pytest.raises(RuntimeError, match="surprise"):
        MixtureNorm2d(CHANNELS).load_state_dict({**state, "surprise": torch.ones(1)})
    del state["running_mean"], state["running_var"]
    with pytest.raises(RuntimeError, match="history_means"):
        MixtureNorm2d(CHANNELS).load_state_dict(state)


@pytest.mark.parametrize("channels", [1, CHANNELS + 1])
@pytest.mark.parametrize("population", ["batch", "channel"])
def test_batch_norm_checkpoint_of_another_size_is_an_error_that_names_the_buffer(population, channels):
    """One channel in particular must not be spread over all."""
    state = nn.BatchNorm2d(channels, affine=False).state_dict()
    with pytest.raises(RuntimeError, match=r"(running|history)_mean"):
        MixtureNorm2d(CHANNELS, affine=False, population=population).load_state_dict(state)


# --- copies and random numbers ------------------------------------------------------------------------------------------


def saved_and_loaded(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("seeding", SEEDING)
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_copies_behave_the_same_and_share_nothing(options, seeding, copied):
    layer = trained(MixtureNorm2d(CHANNELS, seeding=seeding, activation="relu", **options))
    other = COPIES[copied](layer)
    state = copy.deepcopy(layer.state_dict())
    same(evaluate(other, points(seed=9)), evaluate(layer, points(seed=9)))
    torch.manual_seed(1)
    expected = copy.deepcopy(layer).train()(points(seed=8))
    torch.manual_seed(1)
    same(other.train()(points(seed=8)), expected)
    same(layer.state_dict(), state)


@pytest.mark.parametrize("population", ["batch", "channel", "instance", "layer"])
def test_the_seed_decides_the_training_output(population):
    def run(seed):
        layer = MixtureNorm2d(CHANNELS, population=population)
        torch.manual_seed(seed)
        return layer(points(8, CHANNELS, 12, 12))

    same(run(0), run(0))
    assert not torch.equal(run(0), run(1))


@pytest.mark.parametrize("seeding", SEEDING)
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_evaluation_has_no_randomness(options, seeding):
    layer = trained(MixtureNorm2d(CHANNELS, seeding=seeding, **options))
    buffers = copy.deepcopy(layer.state_dict())
    torch.manual_seed(1)
    random_state = torch.get_rng_state()
    first = evaluate(layer, points(8, CHANNELS, 12, 12, seed=9))
    same(torch.get_rng_state(), random_state)
    torch.manual_seed(2)
    same(evaluate(layer, points(8, CHANNELS, 12, 12, seed=9)), first)
    same(layer.state_dict(), buffers)


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
    same(checkpointed.state_dict(), plain.state_dict())


# --- moves --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_moves_between_dtypes_are_batch_norms(options, dtype):
    layer = trained(MixtureNorm2d(CHANNELS, **options)).to(dtype)
    assert {t.dtype for t in layer.state_dict().values() if t.is_floating_point()} == {dtype}
    if layer.num_batches_tracked is not None:
        assert layer.num_batches_tracked.dtype == torch.int64
    x = points(seed=9).to(dtype)
    for mode in (True, False):
        y = layer.train(mode)(x)
        assert y.dtype == dtype
        assert y.isfinite().all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float16, 1e-2), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize("inference", INFERENCE)
def test_a_moved_layer_gives_what_a_moved_batch_norm_gives(inference, dtype, tolerance):
    norm = trained(nn.BatchNorm2d(CHANNELS))
    layer = MixtureNorm2d(CHANNELS, inference=inference)
    layer.load_state_dict(norm.state_dict())
    x = points(seed=9).to(dtype)
    torch.testing.assert_close(evaluate(layer.to(dtype), x), evaluate(norm.to(dtype), x), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_construction_on_the_meta_device(options):
    layer = MixtureNorm2d(CHANNELS, device="meta", **options)
    assert all(t.is_meta for t in layer.state_dict().values())
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    new = MixtureNorm2d(CHANNELS, **options)
    same(layer.state_dict(), new.state_dict())
    same(evaluate(layer, points()), evaluate(new, points()))

    source = trained(MixtureNorm2d(CHANNELS, **options))
    for assign in (False, True):
        layer = MixtureNorm2d(CHANNELS, device="meta", **options)
        layer = layer if assign else layer.to_empty(device="cpu")
        layer.load_state_dict(source.state_dict(), assign=assign)
        same(evaluate(layer, points(seed=9)), evaluate(source, points(seed=9)))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_shapes_can_be_found_on_the_meta_device(training):
    """As batch norm's can: tools that size up a model run it without memory."""
    x = torch.empty(4, CHANNELS, 6, 5, device="meta")
    assert MixtureNorm2d(CHANNELS, device="meta").train(training)(x).shape == x.shape


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_inference_mode_leaves_a_layer_that_can_train(options):
    """Statistics may be taken under ``torch.inference_mode()``, as batch norm's may, and training goes on from there."""
    layer = MixtureNorm2d(CHANNELS, seeding="warm", **options)
    with torch.inference_mode():
        trained(layer)
        evaluate(layer, points(seed=9))
    for mode in (True, False):
        x = points(seed=9).requires_grad_()
        layer.train(mode)(x).backward(points(seed=10))
        assert x.grad.abs().sum() > 0
    if layer.num_batches_tracked is not None:
        assert layer.num_batches_tracked == 4


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
    same(torch.as_tensor(count), (mixture.weights > 0).sum(-1))

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
    layer = trained(MixtureNorm2d(CHANNELS, affine=False, seeding=seeding, **options))
    evaluate(layer, points())
    layer.reset_running_stats()
    new = MixtureNorm2d(CHANNELS, affine=False, seeding=seeding, **options)
    assert layer.mixture is None
    same(layer.state_dict(), new.state_dict())
    same(evaluate(layer, points(seed=9)), evaluate(new, points(seed=9)))
    same(evaluate(trained(layer), points(seed=9)), evaluate(trained(new), points(seed=9)))


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
