"""With one component mixture norm is batch, instance, layer or group norm: output and every gradient, to 1e-5 in fp32."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mixnorm

SHAPES = [
    (5, 7),
    (100, 1),
    (63, 3),
    (4, 7, 9),
    (3, 5, 1, 7),
    (2, 16, 7, 5),
    (17, 100, 3, 3),
    (2, 3, 3, 4, 5),
    (9, 4, 2, 1, 3),
]
LAYERS = {2: mixnorm.MixtureNorm1d, 3: mixnorm.MixtureNorm1d, 4: mixnorm.MixtureNorm2d, 5: mixnorm.MixtureNorm3d}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

BATCH_NORMS = {
    mixnorm.MixtureNorm1d: torch.nn.BatchNorm1d,
    mixnorm.MixtureNorm2d: torch.nn.BatchNorm2d,
    mixnorm.MixtureNorm3d: torch.nn.BatchNorm3d,
}


def tensors(shape: tuple[int, ...], channels_last: bool) -> tuple[Tensor, Tensor]:
    if channels_last and len(shape) not in CHANNELS_LAST:
        pytest.skip("channels_last is for images and volumes")
    g = torch.Generator().manual_seed(sum(shape))
    x, upstream = (torch.randn(shape, generator=g) * 2 + 0.5, torch.randn(shape, generator=g))
    if channels_last:
        x, upstream = (t.contiguous(memory_format=CHANNELS_LAST[len(shape)]) for t in (x, upstream))
    return x.requires_grad_(), upstream


def layer_for(shape: tuple[int, ...], **options) -> nn.Module:
    layer = LAYERS[len(shape)](shape[1], num_components=1, **options)
    if layer.affine:
        g = torch.Generator().manual_seed(1)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(shape[1], generator=g))
            layer.bias.copy_(torch.randn(shape[1], generator=g))
    return layer


def assert_same(layer: nn.Module, expected, x: Tensor, upstream: Tensor) -> None:
    """``expected`` is a function of (x, weight, bias). Compares output, layout, and the gradient of all three."""
    inputs = [x, *(p for p in (layer.weight, layer.bias) if p is not None)]
    y, target = layer(x), expected(x, layer.weight, layer.bias)
    torch.testing.assert_close(y, target, **CLOSE)
    assert y.stride() == target.stride()
    found = torch.autograd.grad(y, inputs, upstream, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(target, inputs, upstream), **CLOSE)
    if y.dim() > 2:  # an upstream gradient in another layout than the input
        other = upstream.transpose(0, -1).contiguous().transpose(0, -1)
        torch.testing.assert_close(torch.autograd.grad(y, inputs, other), found, **CLOSE)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("population", ["batch", "channel"])
def test_batch_norm(population, shape, channels_last, track, affine, backend):
    x, upstream = tensors(shape, channels_last)
    options = {"affine": affine, "track_running_stats": track, "population": population, "backend": backend}
    layer = layer_for(shape, **options)
    assert_same(layer, lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), x, upstream)

    # In evaluation batch norm uses its running statistics; without any, those of the batch.
    layer.eval()
    if track:
        batch_norm = BATCH_NORMS[type(layer)](shape[1], affine=affine)
        with torch.no_grad():
            for _ in range(3):
                batch_norm(torch.randn_like(x) * 3 + 1)
        layer.load_state_dict({**layer.state_dict(), **batch_norm.state_dict()}, strict=False)
        mean, var = batch_norm.running_mean, batch_norm.running_var
        assert_same(layer, lambda x, w, b: F.batch_norm(x, mean, var, w, b), x, upstream)
    else:
        assert_same(layer, lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), x, upstream)


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("inference", ["ensemble", "mixture", "pooled"])
def test_evaluation_after_one_batch_is_the_training_transform(inference, track):
    x, _ = tensors((6, 7, 4, 4), False)
    layer = layer_for(x.shape, inference=inference, track_running_stats=track, sample_fraction=1.0)
    y = layer(x)
    torch.testing.assert_close(layer.eval()(x), y, **CLOSE)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [s for s in SHAPES if len(s) > 2])
def test_instance_norm(shape, channels_last, affine, training):
    x, upstream = tensors(shape, channels_last)
    layer = layer_for(shape, affine=affine, population="instance").train(training)
    assert_same(layer, lambda x, w, b: F.instance_norm(x, weight=w, bias=b).contiguous(memory_format=layout(x)), x, upstream)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES[3:])
def test_layer_norm(shape, channels_last, affine, training):
    x, upstream = tensors(shape, channels_last)
    layer = layer_for(shape, affine=affine, population="layer").train(training)

    def expected(x, weight, bias):
        per_channel = (-1, *[1] * (x.dim() - 2))
        scale = [None if p is None else p.view(per_channel).expand(x.shape[1:]) for p in (weight, bias)]
        return F.layer_norm(x.contiguous(), x.shape[1:], *scale).contiguous(memory_format=layout(x))

    assert_same(layer, expected, x, upstream)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("shape", "groups"), [((4, 6, 9), 3), ((2, 16, 7, 5), 4), ((2, 16, 3, 3), 16), ((2, 4, 3, 4, 5), 2)]
)
def test_group_norm(shape, groups, channels_last, affine, training):
    x, upstream = tensors(shape, channels_last)
    layer = layer_for(shape, affine=affine, population="group", num_groups=groups).train(training)
    assert_same(layer, lambda x, w, b: F.group_norm(x, groups, w, b).contiguous(memory_format=layout(x)), x, upstream)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu", "gelu"])
@pytest.mark.parametrize("population", ["batch", "channel"])
def test_activation_follows_batch_norm(population, activation):
    x, upstream = tensors((6, 7, 4, 4), True)
    layer = layer_for(x.shape, activation=activation, population=population)
    function = getattr(F, activation)
    assert_same(layer, lambda x, w, b: function(F.batch_norm(x, None, None, w, b, training=True)), x, upstream)


def layout(x: Tensor) -> torch.memory_format:
    fmt = CHANNELS_LAST.get(x.dim())
    return fmt if fmt and x.is_contiguous(memory_format=fmt) and not x.is_contiguous() else torch.contiguous_format


@pytest.mark.parametrize("mixture_norm", BATCH_NORMS)
def test_the_signature_begins_with_batch_norms(mixture_norm):
    """With the same names, kinds and defaults, so that it can stand in its place anywhere."""
    own = inspect.signature(mixture_norm).parameters
    for name, parameter in inspect.signature(BATCH_NORMS[mixture_norm]).parameters.items():
        assert (own[name].kind, own[name].default) == (parameter.kind, parameter.default)


@pytest.mark.parametrize("population", ["batch", "channel"])
def test_without_a_shift(population):
    """``bias=False``, which batch norm has had since PyTorch 2.13, is a β of 0 that there is not."""
    layer = mixnorm.MixtureNorm2d(6, num_components=1, population=population, bias=False)
    norm = nn.BatchNorm2d(6)
    assert list(dict(layer.named_parameters())) == ["weight"]
    assert "bias=False" in repr(layer)
    for module in (layer, norm):
        nn.init.uniform_(module.weight, 0.5, 1.5, generator=torch.Generator().manual_seed(0))
    x, upstream = torch.randn(8, 6, 4, 4), torch.randn(8, 6, 4, 4)
    found, expected = ([y := m(x), *torch.autograd.grad(y, [m.weight], upstream)] for m in (layer, norm))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    layer.reset_parameters()
    assert (layer.weight == 1).all()
    model = mixnorm.convert(nn.Sequential(mixnorm.revert(layer)))
    assert model[0].bias is None
    assert list(mixnorm.revert(model).state_dict())[:2] == ["0.weight", "0.running_mean"]
