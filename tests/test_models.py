"""The models: published parameter counts, the shapes of the paper's tables, names that a conversion can point at."""

import pytest
import torch
from torch import nn

import mixnorm
from mixnorm.models import CifarCNN, DenseNet


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def shapes_after(model, x):
    """The output shape of every named module, without the batch."""
    shapes = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _m, _i, y, name=name: shapes.__setitem__(name, tuple(y.shape[1:])))
    model.eval()(x)
    return shapes


@pytest.mark.parametrize(("depth", "millions"), [(40, 1.0), (100, 7.0)])
def test_densenet_has_the_published_number_of_parameters(depth, millions):
    assert round(parameters(DenseNet(depth, 12)) / 1e6, 1) == millions


@pytest.mark.parametrize(("depth", "channels"), [(19, 196), (40, 448)])
def test_densenet_has_the_papers_channels_at_its_last_norm(depth, channels):
    assert DenseNet(depth, 12, 100).last_norm.num_features == channels


def test_densenet_shapes():
    shapes = shapes_after(DenseNet(10, 4, 7), torch.randn(2, 3, 32, 32))
    assert shapes["stem"] == (16, 32, 32)
    assert shapes["block1"] == shapes["transition1.norm"] == (24, 32, 32)
    assert shapes["transition1"] == (24, 16, 16)
    assert shapes["transition2"] == (32, 8, 8)
    assert shapes["last_norm"] == (40, 8, 8)
    assert shapes[""] == (7,)


@pytest.mark.parametrize("depth", [3, 4, 20, 41])
def test_densenet_depth_must_fit_three_blocks(depth):
    with pytest.raises(ValueError, match=r"use \d+ or \d+") as error:
        DenseNet(depth)
    for word in str(error.value).split()[-3::2]:
        DenseNet(int(word))


def test_densenet_keeps_the_memory_format():
    model = DenseNet(7, 4).to(memory_format=torch.channels_last)
    seen = []
    model.last_norm.register_forward_hook(lambda _m, i, _y: seen.append(i[0]))
    model(torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_cnn_has_the_papers_shapes(classes):
    model = CifarCNN(classes)
    pooled = []
    model.pool.register_forward_hook(lambda _m, _i, y: pooled.append(tuple(y.shape[1:])))
    shapes = shapes_after(model, torch.randn(2, 3, 32, 32))
    assert [shapes[f"conv{i}"] for i in range(1, 5)] == [(64, 32, 32), (128, 16, 16), (128, 8, 8), (256, 4, 4)]
    assert pooled == [(64, 16, 16), (128, 8, 8), (128, 4, 4)]
    assert shapes[""] == (classes,)


def test_cifar_cnn_starts_lecun_normal():
    torch.manual_seed(0)
    model = CifarCNN()
    for conv in (model.conv1, model.conv2, model.conv3, model.conv4):
        fan_in = conv.conv.weight[0].numel()
        assert conv.conv.weight.std().item() * fan_in**0.5 == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(
    ("model", "select", "count"),
    [
        (CifarCNN, "conv3.*", 1),
        (CifarCNN, None, 4),
        (lambda: DenseNet(7, 4), "last_norm", 1),
        (lambda: DenseNet(7, 4), ["transition1.norm", "transition2.norm", "last_norm"], 3),
    ],
)
def test_norms_can_be_converted_by_name(model, select, count):
    model = mixnorm.convert(model(), select, num_components=3)
    assert sum(isinstance(m, mixnorm.MixtureNorm2d) for m in model.modules()) == count
    model(torch.randn(4, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("model", [CifarCNN, DenseNet])
def test_the_norm_is_injected(model):
    kinds = {type(m) for m in model(norm=lambda channels: nn.GroupNorm(1, channels)).modules()}
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds
