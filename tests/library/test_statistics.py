"""The statistics of a model's norms: held by ``freeze``, refilled by ``recalibrate``."""

import copy
import pickle

import pytest
import torch
from model_helpers import (
    MODELS,
    batch_norms,
    evaluate,
    images,
    mixture_norms,
    resnet,
    sequential,
    statistics,
    step,
    trained_model,
)
from torch import nn
from torch.optim.swa_utils import update_bn

import mixnorm


@pytest.fixture(params=MODELS)
def model(request):
    return trained_model(request.param)


# --- freeze -------------------------------------------------------------------------------------------------------------


def both_norms(**options):
    """A model with a mixture norm (1) and a batch norm (4)."""
    torch.manual_seed(0)
    model = mixnorm.convert(sequential(), "1", **options)
    for seed in range(2):
        model(images(seed=seed))
    return model


COPIES = {
    "itself": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("options", [{}, {"inference": "pooled"}, {"population": "channel"}], ids=str)
def test_freeze_holds_the_statistics_and_lets_gradients_through(options, copied):
    model = both_norms(**options)
    keys, expected = list(model.state_dict()), evaluate(model, images(seed=9))
    model = COPIES[copied](mixnorm.freeze(model))
    before = statistics(model)
    model.train()
    assert model.training
    assert not model[1].training
    assert not model[4].training
    assert list(model.state_dict()) == keys

    x = images(seed=9).requires_grad_()
    torch.testing.assert_close(step(model, x), expected)
    torch.testing.assert_close(statistics(model), before, atol=0, rtol=0, equal_nan=True)
    for tensor in (x, model[1].weight, model[1].bias, model[4].weight, model[4].bias):
        assert tensor.grad.abs().sum() > 0


@pytest.mark.parametrize("training", [True, False])
def test_unfreeze_undoes_freeze(training):
    model = both_norms()
    kinds = [type(m) for m in model.modules()]
    mixnorm.unfreeze(mixnorm.freeze(model).train(training))
    assert [type(m) for m in model.modules()] == kinds
    assert all(m.training == training for m in model.modules())
    model.train()
    before = statistics(model)
    model(images(seed=9))
    after = statistics(model)
    assert after["1.num_batches_tracked"] == before["1.num_batches_tracked"] + 1
    assert not torch.equal(after["1.history_means"], before["1.history_means"])
    assert not torch.equal(after["4.running_mean"], before["4.running_mean"])


def test_frozen_norms_stay_frozen_through_convert_and_revert():
    model = mixnorm.freeze(sequential())
    for surgery in (mixnorm.convert, mixnorm.revert):
        surgery(model).train()
        assert not model[1].training
        assert not model[4].training
    mixnorm.unfreeze(model)
    assert type(model[1]) is nn.BatchNorm2d
    assert model[1].training


def test_freeze_holds_synchronized_batch_norms():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(sequential())
    mixnorm.freeze(model).train()
    assert isinstance(model[1], nn.SyncBatchNorm)
    assert not model[1].training
    assert not pickle.loads(pickle.dumps(model)).train()[1].training
    with pytest.raises(ValueError, match="no batch norm"):
        mixnorm.convert(model)
    assert type(mixnorm.unfreeze(model)[1]) is nn.SyncBatchNorm
    assert model[1].training


# --- recalibrate --------------------------------------------------------------------------------------------------------


def test_recalibrate_gives_batch_norm_the_plain_mean_over_the_batches(model):
    """The same as PyTorch's own function for this, on a copy."""
    batches = [images(seed=seed) for seed in range(5)]
    expected = copy.deepcopy(model)
    update_bn(batches, expected)
    momenta = [m.momentum for m in batch_norms(model)]
    mixnorm.recalibrate(model, batches)
    torch.testing.assert_close(statistics(model), statistics(expected), atol=1e-6, rtol=1e-6)
    assert [m.momentum for m in batch_norms(model)] == momenta


@pytest.mark.parametrize("count", [2, 4, 7])
def test_recalibrate_fills_the_history_with_the_last_batches(count):
    """At K = 1 a batch's mixture is its mean and variance. T = 4."""
    layer = mixnorm.convert(nn.BatchNorm2d(3), num_components=1, history=4)
    for seed in range(20, 26):
        layer(images(seed=seed) + 50)  # the past, which must not show
    batches = [images(seed=seed) * (1 + seed) for seed in range(count)]
    mixnorm.recalibrate(layer, iter(batches))
    kept = torch.stack(batches[-4:])
    filled = len(kept)
    assert layer.num_batches_tracked == count
    torch.testing.assert_close(layer.history_means[-filled:, 0], kept.mean((1, 3, 4)), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(layer.history_vars[-filled:, 0], kept.var((1, 3, 4), correction=0), atol=1e-3, rtol=1e-5)
    assert layer.history_weights.flatten().tolist() == [0.0] * (4 - filled) + [1.0] * filled


class Recorder(nn.Module):
    """Dropout, then a norm; it takes an input and a mask, and notes what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.norm, self.seen = nn.Dropout(0.5), mixnorm.MixtureNorm2d(3, num_components=1), []

    def forward(self, x, mask=None):
        self.seen.append((x, mask))
        return self.norm(self.dropout(x))


@pytest.mark.parametrize(
    ("wrap", "with_mask"),
    [
        (lambda x, mask: x, False),
        (lambda x, mask: (x, "label"), False),
        (lambda x, mask: [x, "label"], False),
        (lambda x, mask: {"x": x, "mask": mask}, True),
    ],
    ids=["tensor", "tuple", "list", "dict"],
)
def test_recalibrate_takes_any_batch_and_turns_dropout_off(wrap, with_mask):
    model, mask = Recorder(), torch.ones(1)
    batches = [images(seed=seed) for seed in range(2)]
    mixnorm.recalibrate(model, [wrap(x, mask) for x in batches])
    assert [seen is x for (seen, _), x in zip(model.seen, batches, strict=True)] == [True, True]
    assert all((m is mask) == with_mask for _, m in model.seen)
    torch.testing.assert_close(model.norm.history_means[-1, 0], batches[-1].mean((0, 2, 3)))  # nothing was dropped


def test_recalibrate_of_a_transformers_model_takes_its_keyword_arguments():
    model = mixnorm.convert(resnet())
    mixnorm.recalibrate(model, [{"pixel_values": images(seed=seed)} for seed in range(3)])
    assert {int(m.num_batches_tracked) for m in mixture_norms(model)} == {3}


def test_recalibrate_restores_training_flags():
    model = both_norms()
    for i, module in enumerate(model.modules()):
        module.training = i % 2 == 0
    flags = [m.training for m in model.modules()]
    mixnorm.recalibrate(model, [images()])
    assert [m.training for m in model.modules()] == flags


def stops_in_the_middle():
    yield images()
    yield images(seed=1)
    raise KeyboardInterrupt


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "new"])
@pytest.mark.parametrize("inference", ["ensemble", "pooled"])
@pytest.mark.parametrize(
    ("batches", "error"), [(list, ValueError), (stops_in_the_middle, KeyboardInterrupt)], ids=["empty", "interrupted"]
)
def test_recalibrate_that_fails_leaves_everything_as_it_was(batches, error, inference, trained):
    model = both_norms(inference=inference) if trained else mixnorm.convert(sequential(), "1", inference=inference)
    model[0].eval()
    before, y = statistics(model), evaluate(model, images(seed=9))
    flags, momentum = [m.training for m in model.modules()], model[4].momentum
    with pytest.raises(error):
        mixnorm.recalibrate(model, batches())
    torch.testing.assert_close(statistics(model), before, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(evaluate(model, images(seed=9)), y, atol=0, rtol=0)
    assert [m.training for m in model.modules()] == flags
    assert model[4].momentum == momentum


def test_recalibrate_leaves_frozen_norms_alone():
    model = nn.Sequential(mixnorm.freeze(both_norms()), nn.BatchNorm2d(5))
    before = statistics(model[0])
    mixnorm.recalibrate(model, [images(seed=9)])
    torch.testing.assert_close(statistics(model[0]), before, atol=0, rtol=0)
    assert model[1].num_batches_tracked == 1
    with pytest.raises(ValueError, match="no norm"):
        mixnorm.recalibrate(model[0], [images()])
