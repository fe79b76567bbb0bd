"""The layers on a GPU: no synchronization with the host, the same numbers as on the CPU, and CUDA graphs."""

import copy
import itertools

import kernel_helpers as ops
import pytest
import torch
from torch import nn

import mixnorm
from mixnorm_lab.models import CifarCNN

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


# --- the kernels --------------------------------------------------------------------------------------------------------

FORMATS = [torch.contiguous_format, torch.channels_last]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def kernels(channels, **options):
    pytest.importorskip("triton", reason="triton is not installed, so that there are no kernels to test")
    return mixnorm.MixtureNorm2d(channels, backend="triton", device="cuda", **options)


def images(*shape, seed=0, dtype=torch.float32, memory_format=torch.contiguous_format):
    """Two modes, the same on every machine."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[::2] += 3
    return x.to("cuda", dtype).contiguous(memory_format=memory_format)


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_of_the_kernels_reads_nothing_back(dtype, memory_format, no_synchronization):
    layer = kernels(32, activation="relu")
    x = images(16, 32, 14, 14, dtype=dtype, memory_format=memory_format).requires_grad_()
    upstream = images(16, 32, 14, 14, seed=1, dtype=dtype, memory_format=memory_format)
    results = []
    for mode in (True, False):
        layer.train(mode)(x).backward(upstream)  # compiles
        no_synchronization()
        for _ in range(3):
            y = layer(x)
            y.backward(upstream)
        torch.cuda.set_sync_debug_mode("default")
        results += [y, x.grad]
    assert all(t.isfinite().all() for t in results)
    assert layer.num_batches_tracked == 4


def captured(layer, x, upstream):
    """A graph of a training step, after some steps to warm up, and its output and gradient."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(layer(x), x, upstream)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
        (gradient,) = torch.autograd.grad(y, x, upstream)
    return graph, y, gradient


@pytest.mark.parametrize("options", [{}, {"population": "channel"}, {"seeding": "warm"}, {"fit": "ahead"}], ids=str)
def test_every_replay_is_a_training_step(options):
    """New seeds each time, one mixture more in the history, and the numbers of a step without a graph."""
    layer = kernels(16, **options)
    x, upstream = images(64, 16, 8, 8).requires_grad_(), images(64, 16, 8, 8, seed=1)
    graph, y, gradient = captured(layer, x, upstream)
    count = int(layer.num_batches_tracked)  # capture alone is no step
    outputs, newest = [], [layer.history_means[..., -1, :, :].clone()]
    for replay in range(1, 5):
        graph.replay()
        assert layer.num_batches_tracked == count + replay
        outputs.append(y.clone())
        newest.append(layer.history_means[..., -1, :, :].clone())
        assert torch.equal(layer.history_means[..., -2, :, :], newest[-2])
        assert gradient.isfinite().all()
    if "seeding" not in options:
        assert not any(torch.equal(a, b) for a, b in itertools.pairwise(outputs))
    # A replay fits what the input holds now: the mean of its mixture is that of the batch.
    with torch.no_grad():
        x.copy_(images(64, 16, 8, 8, seed=2))
    graph.replay()
    moved = layer.history_means[..., -1, :, :]
    assert not torch.equal(moved, newest[-1])
    mean = (layer.history_weights[..., -1, :, None] * moved).sum(-2).flatten()
    torch.testing.assert_close(mean, x.detach().mean((0, 2, 3)), atol=1e-4, rtol=1e-4)


def kept(layer):
    """The mixture that fit="ahead" keeps for the next batch."""
    return mixnorm.gmm.GaussianMixture(layer.ahead_weights.clone(), layer.ahead_means.clone(), layer.ahead_vars.clone())


def test_a_fit_ahead_runs_beside_the_backward_pass_of_a_graph():
    """A replay has the posterior of the mixture before it, and leaves one that is fitted to what the input holds now."""
    layer = kernels(16, fit="ahead", affine=False, sample_fraction=1.0, max_samples=None)
    x, upstream = images(64, 16, 8, 8).requires_grad_(), images(64, 16, 8, 8, seed=1)
    graph, y, _ = captured(layer, x, upstream)
    for seed in range(2, 5):
        before = kept(layer)
        with torch.no_grad():
            x.copy_(images(64, 16, 8, 8, seed=seed))
        graph.replay()
        flat = x.detach().movedim(1, -1).reshape(-1, 16)
        expected = mixnorm.functional.mixture_normalize(flat.double(), before.responsibilities(flat).double())
        found = y.detach().movedim(1, -1).reshape(-1, 16)
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
        after = kept(layer)
        torch.testing.assert_close((after.weights[:, None] * after.means).sum(0), flat.mean(0), rtol=1e-4, atol=1e-4)


def test_a_fit_ahead_in_graphed_callables():
    """The forward and the backward pass are graphs of their own, and each ends by itself."""
    model = nn.Sequential(kernels(16, fit="ahead"), nn.ReLU(), kernels(16, fit="ahead"))
    x, upstream = images(64, 16, 8, 8).requires_grad_(), images(64, 16, 8, 8, seed=1)
    model(x).backward(upstream)  # the first batch fits its own mixture
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    means = [kept(model[i]).means for i in (0, 2)]
    graphed(x).backward(upstream)
    for i, mean in zip((0, 2), means, strict=True):
        assert kept(model[i]).means.isfinite().all()
        assert not torch.equal(kept(model[i]).means, mean)


def test_a_batch_that_is_not_finite_stays_out_of_the_history_in_a_graph():
    layer = kernels(16)
    x, upstream = images(64, 16, 8, 8).requires_grad_(), images(64, 16, 8, 8, seed=1)
    graph, *_ = captured(layer, x, upstream)
    graph.replay()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with torch.no_grad():
        x[3, 2, 1, 0] = torch.nan
    graph.replay()
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("options", [{}, {"population": "instance"}, {"seeding": "warm"}, {"num_components": 8}], ids=str)
@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
def test_two_runs_agree_to_the_bit(memory_format, options, deterministic):
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = kernels(48, activation="relu", **options)
        found = []
        for step in range(3):
            x = images(32, 48, 28, 28, seed=step, memory_format=memory_format).requires_grad_()
            y = layer.train(step < 2)(x)
            found += [y, *torch.autograd.grad(y, [x, *layer.parameters()], images(32, 48, 28, 28, seed=9))]
        results.append([*found, *layer.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"activation": "relu"}, {"population": "channel"}, {"population": "instance"}], ids=str
)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_in_one_graph(compiler, options, deterministic):
    torch._dynamo.reset()
    plain = kernels(16, **options)
    other = copy.deepcopy(plain)
    forward = torch.compile(other, fullgraph=True, backend=compiler)
    with torch._inductor.config.patch(fallback_random=True):
        for step in range(5):
            training = step < 3
            results = []
            with torch.compiler.set_stance("default" if step in (0, 3) else "fail_on_recompile"):
                for function, layer in ((forward, other), (plain, plain)):
                    layer.train(training)
                    x = images(16, 16, 14, 14, seed=step, memory_format=torch.channels_last).requires_grad_()
                    torch.manual_seed(step)
                    y = function(x)
                    found = torch.autograd.grad(y, [x, *layer.parameters()], images(16, 16, 14, 14, seed=9))
                    results.append([y.detach(), *found])
            # The two may add in another order, so that what counts is the size of a tensor, not of an element: those of γ's
            # gradient are sums of 3,136 terms that nearly cancel.
            for compiled, eager in zip(*results, strict=True):
                assert (compiled - eager).abs().max() < 1e-4 * eager.abs().max()
    torch.testing.assert_close(dict(other.named_buffers()), dict(plain.named_buffers()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_compiled_convolutions_for_any_size(memory_format, deterministic):
    """A batch size that changes twice, then the image size: as without a compiler."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    # No bias before the norm: its gradient is 0, but for rounding.
    first, last = nn.Conv2d(3, 16, 3, bias=False), nn.Conv2d(16, 8, 3)
    plain = nn.Sequential(first, kernels(16), nn.ReLU(inplace=True), last).cuda()
    plain = plain.to(memory_format=memory_format)
    other = copy.deepcopy(plain)
    forward = torch.compile(other)
    with torch._inductor.config.patch(fallback_random=True):
        for step, size in enumerate([(16, 14, 14), (12, 14, 14), (9, 14, 14), (9, 20, 17)]):
            for training in (True, False):
                results = []
                for function, model in ((forward, other), (plain, plain)):
                    model.train(training)
                    x = images(size[0], 3, *size[1:], seed=step, memory_format=memory_format).requires_grad_()
                    torch.manual_seed(step)
                    y = function(x)
                    upstream = images(*y.shape, seed=9, memory_format=memory_format)
                    results.append([y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], upstream)])
                for compiled, eager in zip(*results, strict=True):
                    assert (compiled - eager).abs().max() < 1e-3 * eager.abs().max()
    torch.testing.assert_close(dict(other.named_buffers()), dict(plain.named_buffers()), atol=1e-3, rtol=1e-3)


def test_a_compiled_model_in_half_precision():
    torch._dynamo.reset()
    model = mixnorm.convert(CifarCNN(), "conv3.*", num_components=3, backend="triton").cuda()
    forward = torch.compile(model, fullgraph=True)
    for training in (True, True, False):
        model.train(training)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(forward(images(32, 3, 32, 32)), torch.arange(32, device="cuda") % 10)
        loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert model.conv3.norm.num_batches_tracked == 2


LARGE = [(64, 256, 56, 56), (256, 64, 32, 32), (256, 128, 8, 8), (64, 448, 8, 8), (8, 2048, 7, 7), (37, 130, 29, 31)]


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_batches_against_fp64(shape, dtype, memory_format):
    """Output, statistics and gradients: at most twice the error of plain PyTorch, and a little of the largest number."""
    torch.cuda.empty_cache()
    if torch.cuda.get_device_properties(0).total_memory < 40e9 and torch.Size(shape).numel() > 10e6:
        pytest.skip("fp64 in plain PyTorch needs more memory than this GPU has")
    x = images(*shape, dtype=dtype, memory_format=memory_format).flatten(2).transpose(1, 2).unsqueeze(0)
    upstream = images(*shape, seed=1, dtype=dtype, memory_format=memory_format).flatten(2).transpose(1, 2).unsqueeze(0)
    channels = shape[1]
    gamma, beta = torch.linspace(0.5, 1.5, channels, device="cuda"), torch.linspace(-1, 1, channels, device="cuda")
    weights = torch.tensor([[0.45, 0.4, 0.15]], device="cuda")
    # Two modes, of which the first is cut in two along a few channels.
    means = torch.tensor([0.0, 3.0, 0.0], device="cuda").view(1, 3, 1).repeat(1, 1, channels)
    means[0, 2, :3] = 0.5

    def run(backend, x, upstream, gamma, beta, *mixture):
        leaves = [t.detach().requires_grad_() for t in (x, gamma, beta)]
        options = {"history": None, "eps": 1e-5, "activation": None, "affine_mode": "output", "backend": backend}
        y, statistics = ops.transform_batch(leaves[0], mixture, *leaves[1:], **options)
        return [y.detach(), *statistics, *torch.autograd.grad(y, leaves, upstream)]

    given = (x, upstream, gamma, beta, weights, means, torch.ones_like(means))
    exact = run("reference", *(t.double() for t in given))
    usual = [(a.double() - b).abs().max().item() for a, b in zip(run("reference", *given), exact, strict=True)]
    found = [(a.double() - b).abs().max().item() for a, b in zip(run("triton", *given), exact, strict=True)]
    names = ("y", "weights", "means", "variances", "x", "weight", "bias")
    for name, error, plain, expected in zip(names, found, usual, exact, strict=True):
        scale = expected.abs().max().item()
        assert error <= 2 * plain + 2**-22 * scale, (
            f"{name}: error {error:.3g}, plain PyTorch's {plain:.3g}, scale {scale:.3g}"
        )


def test_tensors_that_are_not_aligned():
    """The same shapes and strides, 4 bytes further on: a kernel that was compiled for aligned addresses must not be used."""
    layer = kernels(16)
    storage = torch.zeros(8 * 16 * 8 * 8 + 1, device="cuda")
    results = []
    for offset in (0, 1, 0):
        x = storage[offset : offset + 8 * 16 * 8 * 8].view(8, 16, 8, 8)
        x.copy_(images(8, 16, 8, 8))
        torch.manual_seed(0)
        y = layer.train()(x)
        results.append([y, copy.deepcopy(layer).eval()(x)])
        layer.reset_running_stats()
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(results[0], results[2], atol=1e-4, rtol=1e-4)


def test_responsibilities_that_are_not_aligned():
    x = images(64, 16)
    storage = torch.zeros(3 * 64 + 1, device="cuda")
    expected = None
    for offset in (0, 1):
        resp = storage[offset : offset + 3 * 64].view(3, 64).T  # as the kernels want it, so that they make no copy
        resp.copy_(images(64, 3, seed=1).softmax(-1))
        found = mixnorm.functional.mixture_normalize(x, resp, backend="triton")
        expected = mixnorm.functional.mixture_normalize(x, resp, backend="reference") if expected is None else expected
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("population", ["instance", "layer"])
def test_more_mixtures_than_a_grid_is_high(population):
    """65,535 programs are the most in any direction but the first: the reference takes over, or says why it would."""
    layer = mixnorm.MixtureNorm2d(2, num_components=2, population=population, affine=False, device="cuda")
    x = images(70_000, 2, 3, 3).requires_grad_()
    with pytest.raises(RuntimeError, match="70000 mixtures are more than 65535"):
        kernels(2, num_components=2, population=population, affine=False)(x)
    y = layer(x)
    (gradient,) = torch.autograd.grad(y, x, images(70_000, 2, 3, 3, seed=1))
    assert y.isfinite().all()
    assert gradient.isfinite().all()
    # Of a mixture that is not among the first, the moments are those of its points.
    weights, means = layer.mixture.weights[-1], layer.mixture.means[-1]
    points = x[-1].detach().flatten(1).T if population == "instance" else x[-1].detach().reshape(-1, 1)
    torch.testing.assert_close(weights @ means, points.mean(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("channels_first", [True, False])
def test_more_elements_than_fit_32_bits(channels_first):
    """2^31 and more, at the far end of which the points are as they are on their own."""
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 30 GB of GPU memory")
    torch.cuda.empty_cache()
    count, dim, few = 2**25 + 77, 64, 1000
    x = torch.empty(1, 1, dim, count, dtype=torch.bfloat16, device="cuda").normal_().mT
    x = x if channels_first else x.contiguous()
    mixture = (
        torch.tensor([[0.7, 0.3]]),
        torch.stack([torch.zeros(dim), torch.full((dim,), 0.2)])[None],
        torch.ones(1, 2, dim),
    )
    mixture = tuple(t.cuda() for t in mixture)
    options = {"eps": 1e-5, "activation": None, "affine_mode": "output", "backend": "triton"}
    resp, statistics = ops.em_step(x, mixture, backend="triton")
    end, _ = ops.em_step(x[:, :, -few:], mixture, backend="reference")
    torch.testing.assert_close(resp[:, -few:], end, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(statistics[0].sum(), torch.ones((), device="cuda"), atol=1e-4, rtol=0)
    # Within the components and between them: the variance of the points, which is 1.
    weights, means, variances = (t[0] for t in statistics)
    total = weights @ (variances + means**2) - (weights @ means) ** 2
    torch.testing.assert_close(total.mean(), torch.ones((), device="cuda"), atol=1e-3, rtol=0)
    y = ops.normalize(x, resp, None, None, statistics=statistics, **options)[0, 0, -few:].float()
    parts = (x[0, 0, -few:].float().unsqueeze(1) - means) / (variances + 1e-5).sqrt()
    expected = ((resp[0, -few:] / weights.sqrt()).unsqueeze(-1) * parts).sum(1)
    torch.testing.assert_close(y, expected, atol=1e-2, rtol=1e-2)


def losses(seed, backend, steps=300, device="cuda"):
    """The loss of a CIFAR CNN, one norm converted, at each step of training on patterns with noise: one for each class."""
    torch.manual_seed(seed)
    model = mixnorm.convert(CifarCNN(), "conv3.*", num_components=3, form="paper", backend=backend).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)
    generator = torch.Generator().manual_seed(seed)
    curve = []
    for _ in range(steps):
        labels = torch.randint(10, (64,), generator=generator).to(device)
        x = 0.3 * patterns[labels] + torch.randn(64, 3, 32, 32, generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.detach())
    return torch.stack(curve).cpu()


def smooth(curve, window=30):
    return curve.unfold(0, window, 1).mean(-1)


def test_training_is_the_same_as_with_the_reference():
    """The smoothed curves of both lie closer together than those of two seeds of the reference."""
    found, expected, other = (smooth(losses(s, b)) for s, b in ((0, "triton"), (0, "reference"), (1, "reference")))
    assert expected[-1] < expected[0] / 2  # it learns
    spread = (other - expected).abs()
    assert (found - expected).abs().max() <= spread.max()
    assert (found - expected).abs().mean() <= spread.mean()
