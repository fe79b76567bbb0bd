"""Lazy layers: as PyTorch's lazy batch norms, until the first batch says how many channels there are."""

import pickle

import pytest
import torch
from layer_helpers import CHANNELS, CONFIGURATIONS, assert_same, evaluate, points, trained
from torch import nn
from torch.nn.parameter import is_lazy

import mixnorm
from mixnorm import LazyMixtureNorm1d, LazyMixtureNorm2d, LazyMixtureNorm3d, MixtureNorm1d, MixtureNorm2d, MixtureNorm3d

KINDS = {
    "1d": (LazyMixtureNorm1d, MixtureNorm1d, nn.LazyBatchNorm1d, (32, 6)),
    "1d with positions": (LazyMixtureNorm1d, MixtureNorm1d, nn.LazyBatchNorm1d, (8, 6, 5)),
    "2d": (LazyMixtureNorm2d, MixtureNorm2d, nn.LazyBatchNorm2d, (4, 6, 5, 3)),
    "3d": (LazyMixtureNorm3d, MixtureNorm3d, nn.LazyBatchNorm3d, (3, 6, 2, 3, 4)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_batch_makes_the_layer(kind):
    lazy, made, batch_norm, shape = KINDS[kind]
    layer, norm = lazy(1e-3, 0.2, num_components=2), batch_norm(1e-3, 0.2)
    assert layer.has_uninitialized_params()
    assert layer.num_features == norm.num_features == 0
    assert layer.state_dict().keys() - norm.state_dict().keys() == {"history_weights", "history_means", "history_vars"}
    lazies = {name for name, tensor in layer.state_dict().items() if is_lazy(tensor)}
    assert lazies == layer.state_dict().keys() - {"num_batches_tracked"}
    torch.manual_seed(0)
    y = layer(points(*shape))
    torch.manual_seed(0)
    expected = made(6, 1e-3, 0.2, num_components=2)
    assert_same(y, expected(points(*shape)))
    assert type(layer) is made
    assert_same(layer.state_dict(), expected.state_dict())
    assert not layer._forward_pre_hooks
    assert not layer._load_state_dict_pre_hooks
    with pytest.raises(ValueError, match="6 channels"):
        layer(points(*(s + 1 for s in shape)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_with_every_option(options, training):
    layer, expected = LazyMixtureNorm2d(**options).train(training), MixtureNorm2d(CHANNELS, **options).train(training)
    assert "LazyMixtureNorm2d(0, " in repr(layer)
    for module in (layer, expected):
        module.reset_parameters()
        module.reset_running_stats()
    torch.manual_seed(0)
    y = layer(points())
    torch.manual_seed(0)
    assert_same(y, expected(points()))
    assert repr(layer) == repr(expected)
    assert_same(layer.state_dict(), expected.state_dict())


def test_moves_before_the_first_batch():
    layer = pickle.loads(pickle.dumps(nn.Sequential(LazyMixtureNorm2d(population="channel"))))
    layer.double()(points().double())
    assert {t.dtype for t in layer.state_dict().values() if t.is_floating_point()} == {torch.float64}


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_state_dicts(options):
    """Of a layer that has its size, of a lazy one, and of a batch norm, also in parts."""
    source = trained(MixtureNorm2d(CHANNELS, **options))
    layer = LazyMixtureNorm2d(**options)
    layer.load_state_dict(LazyMixtureNorm2d(**options).state_dict())
    assert type(layer) is LazyMixtureNorm2d
    layer.load_state_dict(source.state_dict())
    assert type(layer) is MixtureNorm2d
    assert_same(layer.state_dict(), source.state_dict())
    assert_same(evaluate(layer, points(seed=9)), evaluate(source, points(seed=9)))

    norm = trained(nn.BatchNorm2d(CHANNELS, track_running_stats=source.track_running_stats))
    layer, expected = LazyMixtureNorm2d(**{**options, "bias": True}), MixtureNorm2d(CHANNELS, **{**options, "bias": True})
    for module in (layer, expected):
        module.load_state_dict(norm.state_dict())
    assert_same(layer.state_dict(), expected.state_dict())

    layer, expected = LazyMixtureNorm2d(**options), MixtureNorm2d(CHANNELS, **options)
    for module in (layer, expected):
        module.load_state_dict({"weight": source.weight.detach()}, strict=False)
    assert_same(layer.state_dict(), expected.state_dict())


def test_a_state_dict_of_a_lazy_layer_does_not_fit_one_with_a_size():
    with pytest.raises(RuntimeError, match="uninitialized parameter"):
        MixtureNorm2d(CHANNELS).load_state_dict(LazyMixtureNorm2d().state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_convert_and_revert_keep_them_lazy(kind):
    lazy, made, batch_norm, shape = KINDS[kind]
    model = nn.Sequential(batch_norm(1e-3, None), nn.ReLU())
    seen = []
    handle = model[0].register_forward_pre_hook(lambda module, _: seen.append(module.num_features))
    parameters = list(model.parameters())
    mixnorm.convert(model, num_components=2)
    assert type(model[0]) is lazy
    assert all(any(a is b for b in model.parameters()) for a in parameters)
    mixnorm.revert(model)
    assert type(model[0]) is batch_norm
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    mixnorm.convert(model, num_components=2)
    model(points(*shape))
    assert type(model[0]) is made
    assert (model[0].num_features, model[0].num_components, model[0].eps, model[0].momentum) == (6, 2, 1e-3, None)
    assert seen == [6]  # a user's hooks see the layer as it will be
    handle.remove()
    assert not model[0]._forward_pre_hooks
    assert model[0].num_batches_tracked == 1


def test_wrong_input_leaves_them_lazy():
    layer = LazyMixtureNorm2d(population="group", num_groups=3)
    with pytest.raises(ValueError, match=r"expected \(N, C, H, W\) input to LazyMixtureNorm2d, got 1-D"):
        layer(torch.ones(3))
    with pytest.raises(ValueError, match="num_groups=3 must divide num_features=4"):
        layer(points(4, 4, 5, 5))
    assert layer.num_features == 0
    assert layer(points(4, 6, 5, 5)).isfinite().all()
    with pytest.raises(ValueError, match="num_components=0"):
        LazyMixtureNorm2d(num_components=0)
