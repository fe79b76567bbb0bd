"""Tools that rewrite a model, looking for batch norms: they leave a mixture norm what it is, or say that they cannot."""

import copy
import functools
import pickle

import pytest
import torch
from layer_helpers import assert_same, points
from torch import nn
from torch.fx.experimental.optimization import fuse
from torch.nn.utils.fusion import fuse_conv_bn_eval

import mixnorm
from mixnorm import MixtureNorm2d


def trained_pair():
    """conv, batch norm, conv, mixture norm, in evaluation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3), MixtureNorm2d(6, num_components=2))
    with torch.no_grad():
        for seed in range(3):
            model(points(8, 3, 7, 6, seed=seed))
    return model.eval()


X = points(5, 3, 7, 6, seed=9)


def test_convert_sync_batchnorm_changes_batch_norms_alone():
    model = trained_pair()
    norm, state = model[3], copy.deepcopy(model[3].state_dict())
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert isinstance(converted[1], nn.SyncBatchNorm)
    assert converted[3] is norm
    assert_same(norm.state_dict(), state)
    assert nn.SyncBatchNorm.convert_sync_batchnorm(norm) is norm


@torch.no_grad()
def test_fx_fusion_folds_the_batch_norm_and_not_the_mixture_norm():
    model = trained_pair()
    fused = fuse(model)
    assert [type(module) for module in fused.children()] == [nn.Conv2d, nn.Conv2d, MixtureNorm2d]
    torch.testing.assert_close(fused(X), model(X), atol=1e-5, rtol=1e-5)


COPIES = {"itself": lambda m: m, "a copy": copy.deepcopy, "a pickle": lambda m: pickle.loads(pickle.dumps(m))}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("copied", COPIES)
def test_symbolic_tracing_takes_it_for_a_leaf(copied, training):
    model = trained_pair().train(training)
    traced = COPIES[copied](torch.fx.symbolic_trace(copy.deepcopy(model)))
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1", "2", "3"]
    outputs = []
    for module in (traced, model):
        torch.manual_seed(0)
        outputs.append(module(X))
    assert_same(*outputs)
    assert_same(dict(traced.named_buffers()), dict(model.named_buffers()))
    assert model[3].num_batches_tracked == (4 if training else 3)


def test_symbolic_tracing_of_a_frozen_model():
    model = mixnorm.freeze(trained_pair()).train()
    traced = pickle.loads(pickle.dumps(torch.fx.symbolic_trace(model)))
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1", "2", "3"]
    assert not traced.train().get_submodule("1").training
    assert_same(traced(X), model(X))


def test_a_layer_alone_cannot_be_traced_symbolically():
    with pytest.raises(ValueError, match=r"MixtureNorm2d by itself cannot be traced symbolically: .* use torch.export"):
        torch.fx.symbolic_trace(MixtureNorm2d(4))


def test_the_other_fusions_refuse_it():
    model = trained_pair()
    with pytest.raises(AssertionError, match=r"did not find fuser method for.*MixtureNorm2d"):
        torch.ao.quantization.fuse_modules(model, [["2", "3"]])
    with pytest.raises(AttributeError, match="running_mean"):
        fuse_conv_bn_eval(model[2], model[3])
    assert isinstance(model[3], MixtureNorm2d)


@pytest.mark.slow
@torch.no_grad()
def test_inductor_does_not_fold_it_into_frozen_weights():
    """With frozen weights inductor folds a batch norm, and all that is linear, into the convolution before it."""
    model = trained_pair()
    expected = model(X)
    with torch._inductor.config.patch(freezing=True, efficient_conv_bn_eval_fx_passes=True):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(X), expected, atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()


# --- models that take a norm layer as an argument ------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block as timm and torchvision write it: ``norm_layer(channels)``, and γ of the last norm set to 0."""

    def __init__(self, channels, norm_layer=nn.BatchNorm2d):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = norm_layer(channels)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = norm_layer(channels)
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x):
        return x + self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))


@pytest.mark.parametrize("norm_layer", [MixtureNorm2d, functools.partial(MixtureNorm2d, num_components=2, eps=1e-3)])
def test_as_a_norm_layer_argument(norm_layer):
    block = Block(4, norm_layer)
    x = points(8, 4, 6, 5)
    assert_same(block(x), x)  # the last γ is 0
    block(x).square().sum().backward()
    assert block.bn2.weight.grad.any()
    assert block.bn1.num_batches_tracked == 2
    Block(4, norm_layer).load_state_dict(Block(4).state_dict())
