"""The layers on a GPU: no synchronization with the host, the same numbers as on the CPU, and CUDA graphs."""

import copy

import pytest
import torch
from torch import nn

import mixnorm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
POPULATIONS = ["batch", "instance", "layer", "group", "channel"]


@pytest.fixture
def no_synchronization():
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("population", POPULATIONS)
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("affine_mode", ["output", "statistics"])
@pytest.mark.parametrize("seeding", ["kmeans++", "warm"])
def test_a_training_step_reads_nothing_back(population, activation, affine_mode, seeding, no_synchronization):
    groups = 4 if population == "group" else None
    options = {"activation": activation, "affine_mode": affine_mode, "seeding": seeding, "num_groups": groups}
    layer = mixnorm.MixtureNorm2d(16, population=population, device="cuda", **options)
    x = torch.randn(8, 16, 6, 5, device="cuda", requires_grad=True)
    upstream = torch.randn_like(x)
    layer(x).backward(upstream)  # what is set up once may synchronize
    no_synchronization()
    for _ in range(3):
        y = layer(x)
        y.backward(upstream)
    torch.cuda.set_sync_debug_mode("default")
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_same_numbers_as_on_the_cpu():
    x = torch.randn(500, 7, dtype=torch.float64) * 2
    resp = torch.softmax(torch.randn(500, 3, dtype=torch.float64) * 3, -1)
    y = mixnorm.functional.mixture_normalize(x.cuda(), resp.cuda()).cpu()
    torch.testing.assert_close(y, mixnorm.functional.mixture_normalize(x, resp))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_one_component_is_batch_norm(memory_format):
    x = torch.randn(16, 33, 9, 7, device="cuda").contiguous(memory_format=memory_format).requires_grad_()
    upstream = torch.randn_like(x)
    y = mixnorm.MixtureNorm2d(33, num_components=1, device="cuda")(x)
    expected = nn.BatchNorm2d(33, device="cuda")(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert y.stride() == expected.stride()
    found = [torch.autograd.grad(t, x, upstream) for t in (y, expected)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_batch_that_is_not_finite_stays_out_of_the_history():
    layer = mixnorm.MixtureNorm2d(16, device="cuda")
    x = torch.randn(8, 16, 6, 5, device="cuda")
    layer(x)
    before = copy.deepcopy(layer.state_dict())
    layer(x * torch.nan)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


def test_autocast_and_moves():
    model = mixnorm.convert(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = model(torch.randn(4, 3, 16, 16, device="cuda"))
    assert y.dtype == torch.bfloat16
    assert model[1].history_means.dtype == torch.float32
    assert model.cpu()(torch.randn(4, 3, 16, 16)).isfinite().all()


def test_every_replay_of_a_graph_draws_new_seeds():
    layer = mixnorm.MixtureNorm2d(16, device="cuda")
    x = torch.randn(64, 16, 8, 8, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    outputs = []
    for _ in range(3):
        graph.replay()
        outputs.append(y.clone())
    assert not torch.equal(outputs[0], outputs[1])
    assert layer.num_batches_tracked == 6
