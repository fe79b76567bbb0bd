"""State dicts, copies and moves: a layer that is saved, loaded, copied or moved goes on as before."""

import copy
import io
import pickle

import pytest
import torch
from layer_helpers import (
    CHANNELS,
    CONFIGURATIONS,
    INFERENCE,
    SEEDING,
    WITH_HISTORY,
    WITHOUT_HISTORY,
    assert_same,
    evaluate,
    points,
    seeded,
    trained,
)
from torch import nn

import mixnorm
from mixnorm import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d

RANKS = {
    "1d": (nn.BatchNorm1d, MixtureNorm1d, (24, CHANNELS)),
    "1d with positions": (nn.BatchNorm1d, MixtureNorm1d, (6, CHANNELS, 7)),
    "2d": (nn.BatchNorm2d, MixtureNorm2d, (4, CHANNELS, 5, 3)),
    "3d": (nn.BatchNorm3d, MixtureNorm3d, (3, CHANNELS, 2, 3, 4)),
}


# --- state dicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target_is_trained", [False, True], ids=["into new", "into trained"])
@pytest.mark.parametrize("batches", [0, 3])
@pytest.mark.parametrize("seeding", SEEDING)
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_state_dict_round_trip(options, seeding, batches, target_is_trained):
    """The state dict says all there is to evaluation: what the other layer saw before does not matter."""
    layer = trained(MixtureNorm2d(CHANNELS, **seeded(options, seeding)), batches)
    other = MixtureNorm2d(CHANNELS, **seeded(options, seeding))
    if target_is_trained:
        evaluate(trained(other, 2, seed=5), points(seed=8))
    other.load_state_dict(layer.state_dict())
    assert_same(other.state_dict(), layer.state_dict())
    assert_same(evaluate(other, points(seed=9)), evaluate(layer, points(seed=9)))


@pytest.mark.parametrize("options", WITH_HISTORY, ids=str)
def test_training_goes_on_after_loading(options):
    """A resumed layer has the same history as one that never stopped, warm seeding included."""
    layer = trained(MixtureNorm2d(CHANNELS, **seeded(options, "warm")))
    other = MixtureNorm2d(CHANNELS, **seeded(options, "warm"))
    other.load_state_dict(layer.state_dict())
    for each in (layer, other):
        torch.manual_seed(1)
        each.train()(points(seed=9))
    assert_same(other.state_dict(), layer.state_dict())


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
    assert_same(dict(layer.named_parameters()), dict(norm.named_parameters()))


def test_loading_does_not_change_the_callers_state_dict():
    state = trained(nn.BatchNorm2d(CHANNELS)).state_dict()
    before = {name: value.clone() for name, value in state.items()}
    MixtureNorm2d(CHANNELS).load_state_dict(state)
    assert_same(dict(state), before)


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
    for name in ("running_var", "running_mean"):
        del state[name]
        with pytest.raises(RuntimeError, match="history_means"):
            MixtureNorm2d(CHANNELS).load_state_dict(state)


@pytest.mark.parametrize("channels", [1, CHANNELS + 1])
@pytest.mark.parametrize("population", ["batch", "channel"])
def test_batch_norm_checkpoint_of_another_size_is_an_error_that_names_the_buffer(population, channels):
    """One channel in particular must not be spread over all."""
    state = nn.BatchNorm2d(channels, affine=False).state_dict()
    with pytest.raises(RuntimeError, match=r"(running|history)_mean"):
        MixtureNorm2d(CHANNELS, affine=False, population=population).load_state_dict(state)


@pytest.mark.parametrize("population", ["batch", "channel"])
def test_a_partial_state_dict_leaves_the_kept_samples(population):
    """Without a history in it they stay; with a history, but without samples, they are of another history and go."""
    layer = trained(MixtureNorm2d(CHANNELS, inference="pooled", population=population))
    samples, expected = layer.history_samples.clone(), evaluate(layer, points(seed=9))
    layer.load_state_dict({"weight": layer.weight.detach().clone()}, strict=False)
    assert_same(layer.history_samples, samples)
    assert_same(evaluate(layer, points(seed=9)), expected)
    layer.load_state_dict(trained(MixtureNorm2d(CHANNELS, population=population)).state_dict())
    assert layer.history_samples is None


# --- copies -------------------------------------------------------------------------------------------------------------


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
    layer = trained(MixtureNorm2d(CHANNELS, activation="relu", **seeded(options, seeding)))
    other = COPIES[copied](layer)
    state = copy.deepcopy(layer.state_dict())
    assert_same(evaluate(other, points(seed=9)), evaluate(layer, points(seed=9)))
    torch.manual_seed(1)
    expected = copy.deepcopy(layer).train()(points(seed=8))
    torch.manual_seed(1)
    assert_same(other.train()(points(seed=8)), expected)
    assert_same(layer.state_dict(), state)


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
def test_moves_between_memory_formats_leave_the_history_as_it_is(options):
    """They are for images and volumes; batch norm's statistics have one dimension, and are never asked."""
    for memory_format in (torch.channels_last, torch.channels_last_3d, torch.contiguous_format):
        layer = trained(MixtureNorm2d(CHANNELS, **options))
        expected = evaluate(layer, points(seed=9))
        strides = {name: buffer.stride() for name, buffer in layer.named_buffers()}
        nn.Sequential(layer).to(memory_format=memory_format)
        assert {name: buffer.stride() for name, buffer in layer.named_buffers()} == strides
        assert_same(evaluate(layer, points(seed=9)), expected)


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_construction_on_the_meta_device(options):
    layer = MixtureNorm2d(CHANNELS, device="meta", **options)
    assert all(t.is_meta for t in layer.state_dict().values())
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    new = MixtureNorm2d(CHANNELS, **options)
    assert_same(layer.state_dict(), new.state_dict())
    assert_same(evaluate(layer, points()), evaluate(new, points()))

    source = trained(MixtureNorm2d(CHANNELS, **options))
    for assign in (False, True):
        layer = MixtureNorm2d(CHANNELS, device="meta", **options)
        layer = layer if assign else layer.to_empty(device="cpu")
        layer.load_state_dict(source.state_dict(), assign=assign)
        assert not any(t.is_meta for t in (*layer.parameters(), *layer.buffers()))  # no move would take such a layer
        assert_same(evaluate(layer, points(seed=9)), evaluate(source, points(seed=9)))


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_shapes_can_be_found_on_the_meta_device(options):
    """As batch norm's can: tools that size up a model run it without memory."""
    layer, x = MixtureNorm2d(CHANNELS, device="meta", **options), torch.empty(4, CHANNELS, 6, 5, device="meta")
    for mode in (False, True, False):
        assert layer.train(mode)(x).shape == x.shape


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_inference_mode_leaves_a_layer_that_can_train(options):
    """Statistics may be taken under ``torch.inference_mode()``, as batch norm's may, and training goes on from there."""
    layer = MixtureNorm2d(CHANNELS, **seeded(options, "warm"))
    with torch.inference_mode():
        trained(layer)
        evaluate(layer, points(seed=9))
    for mode in (True, False):
        x = points(seed=9).requires_grad_()
        layer.train(mode)(x).backward(points(seed=10))
        assert x.grad.abs().sum() > 0
    if layer.num_batches_tracked is not None:
        assert layer.num_batches_tracked == 4


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_what_inference_mode_found_or_loaded_may_be_trained_with(options):
    """An evaluation there, then gradients through the same mixture; and a state dict that was loaded there."""
    layer, other = trained(MixtureNorm2d(CHANNELS, **options)), MixtureNorm2d(CHANNELS, **options)
    with torch.inference_mode():
        evaluate(layer, points(seed=9))
        other.load_state_dict(layer.state_dict())
    for module in (layer, other):
        for mode in (False, True):
            x = points(seed=9).requires_grad_()
            module.train(mode)(x).backward(points(seed=10))
            assert x.grad.abs().sum() > 0
