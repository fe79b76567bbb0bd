"""What looks at each of PyTorch's operations, or hands in tensors of its own, gets the reference and misses nothing."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd, stack_module_state, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import mixnorm


def trained(*shape, **options):
    torch.manual_seed(0)
    layer = mixnorm.MixtureNorm1d(shape[1], **options)
    for _ in range(3):
        layer(torch.randn(shape))
    return layer.eval()


def test_a_graph_of_make_fx_computes_the_evaluation():
    layer, x = trained(64, 4), torch.randn(64, 4)
    graph = make_fx(lambda x: layer(x))(torch.randn(64, 4))
    torch.testing.assert_close(graph(x), layer(x), atol=1e-5, rtol=1e-5)


def gradient(y, x, upstream, **options):
    return torch.autograd.grad(y, x, upstream, retain_graph=True, **options)[0]


AT_ONCE = {
    "is_grads_batched": lambda y, x, upstream: gradient(y, x, upstream, is_grads_batched=True),
    "vmap": lambda y, x, upstream: vmap(lambda one: gradient(y, x, one))(upstream),
}


@pytest.mark.parametrize("way", AT_ONCE)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_many_gradients_at_once(training, way):
    layer, x = trained(24, 2).train(training), torch.randn(24, 2, requires_grad=True)
    y, upstream = layer(x), torch.randn(3, 24, 2)
    expected = torch.stack([gradient(y, x, one) for one in upstream])
    torch.testing.assert_close(AT_ONCE[way](y, x, upstream), expected, atol=1e-5, rtol=1e-5)


def test_a_jacobian_at_once():
    layer, x = trained(24, 2).double().train(), torch.randn(24, 2, dtype=torch.float64)
    found, expected = [], []
    for vectorize, results in ((True, found), (False, expected)):
        torch.manual_seed(0)
        results.append(torch.autograd.functional.jacobian(layer, x, vectorize=vectorize))
    torch.testing.assert_close(found, expected)


OPTIONS = [
    {},
    {"population": "channel"},
    {"population": "instance"},
    {"population": "layer"},
    {"track_running_stats": False},
]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_ensemble_trains_and_evaluates_as_its_models(options, training):
    """With the same random numbers for each. The statistics are in the buffers that were given, model by model."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Conv2d(2, 4, 3), mixnorm.MixtureNorm2d(4, **options)).double() for _ in range(3)]
    x = torch.randn(8, 2, 8, 8, dtype=torch.float64)
    for model in models:
        model(x)
        model.train(training)
    base = copy.deepcopy(models[0])
    parameters, buffers = stack_module_state(models)

    def loss(parameters, buffers):
        y = functional_call(base, (parameters, buffers), (x,))
        return (y * torch.arange(y.numel()).sin().view(y.shape)).sum(), y

    torch.manual_seed(1)
    gradients, outputs = vmap(grad(loss, has_aux=True), randomness="same")(parameters, buffers)
    for i, model in enumerate(models):
        torch.manual_seed(1)
        value, y = loss(dict(model.named_parameters()), dict(model.named_buffers()))
        torch.testing.assert_close(outputs[i], y)
        value.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name][i], parameter.grad)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffers[name][i], buffer)


@pytest.mark.parametrize("options", [*OPTIONS, {"seeding": "warm"}, {"inference": "pooled"}], ids=str)
def test_a_transform_leaves_nothing_in_the_layer(options):
    layer = mixnorm.MixtureNorm2d(4, **options)
    layers = [copy.deepcopy(layer) for _ in range(3)]
    parameters, buffers = stack_module_state(layers)
    x, one = torch.randn(8, 4, 5, 5), {name: value[0].clone() for name, value in buffers.items()}

    def loss(parameters, buffers):
        return functional_call(layer, (parameters, buffers), (x,)).square().sum()

    gradients = vmap(grad(loss), randomness="different")(parameters, buffers)
    assert all(value.isfinite().all() for value in gradients.values())
    grad(loss)({name: value[0] for name, value in parameters.items()}, one)
    jacfwd(loss, randomness="same")({name: value[0] for name, value in parameters.items()}, one)
    assert layer.mixture is None
    copy.deepcopy(layer)
    pickle.dumps(layer)


def test_an_evaluation_then_a_training_batch_then_one_backward():
    layer, x = trained(64, 4), torch.randn(64, 4, requires_grad=True)
    loss = layer.eval()(x).square().sum()
    (loss + layer.train()(torch.randn(64, 4)).square().sum()).backward()
    assert x.grad.isfinite().all()


def test_storages_stay_resizable():
    layer, x = mixnorm.MixtureNorm1d(4), torch.randn(64, 4)
    layer(x)
    for tensor in (x, layer.weight):
        tensor.untyped_storage().resize_(0)
        assert tensor.untyped_storage().size() == 0
