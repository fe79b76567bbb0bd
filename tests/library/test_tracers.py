"""What looks at each of PyTorch's operations, or hands in tensors of its own, gets the reference and misses nothing."""

import pytest
import torch
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


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_many_gradients_at_once(training):
    layer = trained(24, 2).train(training)
    x = torch.randn(24, 2, requires_grad=True)
    y = layer(x)
    upstream = torch.randn(3, 24, 2)
    (found,) = torch.autograd.grad(y, x, upstream, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in upstream]
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-5)


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
