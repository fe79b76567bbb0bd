"""The compiled loops against the reference, in every layout and at every size where their tiles are not full."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from mixnorm import MixtureNorm1d, MixtureNorm2d
from mixnorm.functional import mixture_inference, mixture_normalize
from mixnorm.gmm import GaussianMixture, fit_mixture
from mixnorm.ops.choose import kernels_for
from mixnorm.ops.kernels import Mixture

pytest.importorskip("numba", reason="numba is not installed, so that backend='auto' is the reference")

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "sliced": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[:1].expand_as(x),
}


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def soft(*shape, seed=1):
    return torch.softmax(3 * rand(*shape, seed=seed), -1)


def both(function):
    """The function's result from the compiled loops and from the reference."""
    return function("auto"), function("reference")


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8, equal_nan=True)


def with_gradients(function, *tensors, upstream):
    """The output and the gradient of each tensor that is not ``None``."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in tensors]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], upstream)]


@pytest.mark.parametrize("affine_mode", ["output", "statistics"])
@pytest.mark.parametrize("activation", [None, "relu", "leaky_relu", "silu", "gelu"])
@pytest.mark.parametrize(("m", "dim", "k"), [(2, 1, 1), (5, 3, 2), (67, 5, 4), (130, 70, 17)])
def test_normalize(m, dim, k, activation, affine_mode):
    x, resp, gamma, beta = rand(2, m, dim), soft(2, m, k), rand(dim, seed=2), rand(dim, seed=3)
    resp[..., 0] *= resp[..., 0] > 0.5  # exact zeros
    assert_close(
        *both(
            lambda backend: with_gradients(
                lambda x, w, b: mixture_normalize(x, resp, 1e-5, w, b, activation, affine_mode=affine_mode, backend=backend),
                *(x, gamma, beta),
                upstream=rand(2, m, dim, seed=4),
            )
        )
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_points_and_of_upstream_gradients(layout):
    x, upstream, resp = LAYOUTS[layout](rand(3, 21, 5)), LAYOUTS[layout](rand(3, 21, 5, seed=4)), soft(3, 21, 4)
    assert_close(*both(lambda b: with_gradients(lambda x: mixture_normalize(x, resp, backend=b), x, upstream=upstream)))


@pytest.mark.parametrize("mode", ["ensemble", "mixture", "paper"])
@pytest.mark.parametrize(("t", "k"), [(1, 1), (2, 3), (10, 3)])
def test_inference(t, k, mode):
    x, weights, means, variances = rand(2, 35, 6), soft(2, t, k), rand(2, t, k, 6, seed=2), rand(2, t, k, 6, seed=3).square()
    tau, gamma, beta = soft(t), rand(6, seed=5), rand(6, seed=6)

    def run(backend):
        def transform(x, w, b):
            return mixture_inference(x, weights, means, variances, tau, mode=mode, weight=w, bias=b, backend=backend)

        return [*with_gradients(transform, x, gamma, beta, upstream=rand(2, 35, 6, seed=4)), transform(x, gamma, beta)]

    assert_close(*both(run))


@pytest.mark.parametrize("seeded", [True, False], ids=["k-means++", "init"])
@pytest.mark.parametrize("threads", [1, 2])
def test_fit(threads, seeded):
    x = rand(3, 203, 5) + 4 * torch.arange(203).remainder(3).unsqueeze(-1)
    init = None if seeded else GaussianMixture(soft(3, 4), rand(3, 4, 5, seed=2) + 4, torch.ones(3, 4, 5, dtype=x.dtype))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, expected = both(
            lambda b: fit_mixture(x, 4, em_iters=4, init=init, generator=torch.Generator().manual_seed(0), backend=b)
        )
    finally:
        torch.set_num_threads(before)
    assert_close([found.weights, found.means, found.variances], [expected.weights, expected.means, expected.variances])


def test_a_nan_stays_in_the_outputs_that_the_reference_gives_it_to():
    x = rand(2, 20, 3)
    x[0, 4, 1] = torch.nan
    assert_close(*both(lambda backend: mixture_normalize(x, soft(2, 20, 3), backend=backend)))


def test_second_derivatives():
    x, resp = rand(9, 2).requires_grad_(), soft(9, 2)
    assert torch.autograd.gradgradcheck(lambda x: mixture_normalize(x, resp), x)


def test_two_threads_at_once():
    x, resp = rand(4, 300, 8), soft(4, 300, 3)
    expected, found = mixture_normalize(x, resp), [None, None]

    def work(i):
        found[i] = [mixture_normalize(x, resp) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(y, expected) for ys in found for y in ys)


@pytest.mark.parametrize("population", ["batch", "instance", "layer", "channel"])
def test_layers(population):
    def run(backend):
        torch.manual_seed(0)
        layer = MixtureNorm2d(6, population=population, backend=backend, dtype=torch.float64)
        results = [with_gradients(layer, rand(5, 6, 4, 3), upstream=rand(5, 6, 4, 3, seed=1)) for _ in range(2)]
        return [*results, layer.eval()(rand(5, 6, 4, 3, seed=2)).detach()]

    assert_close(*both(run))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_weight_that_only_broadcasts(shape):
    x, resp, weight = rand(40, 5), soft(40, 3), torch.full(shape, 2.0, dtype=torch.float64)
    for backend in ("auto", "reference"):
        y = mixture_normalize(x, resp, weight=weight, backend=backend)
        assert_close(y, 2 * mixture_normalize(x, resp, backend=backend))


def test_mixtures_that_require_gradients_are_constants():
    x, weights, means = rand(20, 3), soft(4, 3), rand(4, 3, 3, seed=2).requires_grad_()
    y = mixture_inference(x, weights, means, torch.ones_like(means).requires_grad_(), torch.full((4,), 0.25))
    assert not y.requires_grad


def test_the_gradient_of_narrow_components_in_statistics():
    """A point with a component of its own, and others that are narrow beside β: in fp32, as accurate as the reference."""
    x, upstream = 0.01 * rand(72, 2), rand(72, 2, seed=1)
    x[7] = torch.tensor([2.25, -0.7])
    resp = torch.eye(2, dtype=torch.float64)[(torch.arange(72) == 7).long()]

    def gradient(backend, dtype):
        leaf, ones = x.to(dtype, copy=True).requires_grad_(), torch.ones(2, dtype=dtype)
        options = {"weight": ones, "bias": ones, "affine_mode": "statistics", "backend": backend}
        y = mixture_normalize(leaf, resp.to(dtype), **options)
        return torch.autograd.grad(y, leaf, upstream.to(dtype))[0].double()

    exact = gradient("reference", torch.float64)
    found, plain = ((gradient(backend, torch.float32) - exact).abs().max() for backend in ("auto", "reference"))
    assert found <= 4 * plain + 2**-22 * exact.abs().max()


@pytest.mark.parametrize("offset", [1e2, 1e3, 1e4])
def test_evaluation_far_from_the_origin(offset):
    """In fp32 the error is that of the numbers themselves, a few units in the last place of the input."""
    x, weights, means = rand(200, 6), soft(4, 3), rand(4, 3, 6, seed=2) * 0.3
    tau, variances = torch.full((4,), 0.25, dtype=torch.float64), torch.ones(4, 3, 6, dtype=torch.float64)
    x, means = (x + offset).float(), (means + offset).float()
    expected = mixture_inference(x.double(), weights, means.double(), variances, tau, backend="reference")
    y = mixture_inference(x, weights.float(), means, variances.float(), tau.float())
    assert (y - expected).abs().max() < 1e-5


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_em_from_a_start_far_from_the_points(offset):
    x = (rand(500, 4) + offset).float()
    start = GaussianMixture(torch.tensor([0.5, 0.5]), rand(2, 4, seed=5).float(), torch.ones(2, 4))
    options = {"em_iters": 1, "init": start, "min_weight": 0}
    found = fit_mixture(x, 2, **options)
    in_use = found.weights > 1e-3
    expected = fit_mixture(x.double(), 2, **{**options, "init": start}, backend="reference")
    torch.testing.assert_close(found.variances[in_use].double(), expected.variances[in_use], rtol=1e-2, atol=0)


def test_function_transforms_go_through_the_reference():
    x, resp, upstream = rand(20, 3), soft(20, 2), rand(20, 3, seed=6)
    found = torch.func.grad(lambda x: (mixture_normalize(x, resp) * upstream).sum())(x)
    assert_close([found], with_gradients(lambda x: mixture_normalize(x, resp), x, upstream=upstream)[1:])


def test_the_threads_of_the_loops_do_not_become_those_of_torch():
    """Both may use OpenMP, which has one number of threads for all."""
    code = (
        "import numba, torch; torch.set_num_threads(1); assert torch.get_num_threads() == 1;"
        "import mixnorm.ops.numba; numba.get_num_threads(); print(torch.get_num_threads())"
    )
    environment = os.environ | {"NUMBA_NUM_THREADS": "2"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        ("sys.modules['numba.core'] = None", "numba.core"),
        ("import numba.core.caching; numba.core.caching.CacheImpl._locator_classes = []", "no locator available"),
        ("import os; os.environ['NUMBA_DISABLE_JIT'] = '1'", "NUMBA_DISABLE_JIT is set"),
    ],
    ids=["import fails", "no folder for its cache", "nothing is compiled"],
)
def test_numba_that_cannot_be_used_is_named_once_and_the_reference_runs(breaks, says):
    code = (
        f"import sys, warnings; {breaks}\nimport torch; from mixnorm import MixtureNorm1d\n"
        "x, layers = torch.randn(64, 4, requires_grad=True), [MixtureNorm1d(4, backend=b) for b in ('auto', 'reference')]\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for evaluation in (False, True, False):\n"
        "        found = []\n"
        "        for layer in layers:\n"
        "            torch.manual_seed(0); found.append(layer.train(not evaluation)(x)); found[-1].sum().backward()\n"
        "        assert torch.equal(*found)\n"
        "print(len(caught), caught[0].message)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.startswith("1 numba is installed but cannot be used, so plain PyTorch runs instead: ")
    assert says in result.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_runs_the_reference():
    """A data loader's worker, say; OpenMP would end it. It has one thread: with more, PyTorch's own loops hang there."""
    code = (
        "import multiprocessing, torch; from mixnorm import MixtureNorm2d; torch.set_num_threads(1); torch.manual_seed(0)\n"
        "layer, x = MixtureNorm2d(4, num_components=2), torch.randn(8, 4, 5, 5)\n"
        "def work(queue):\n"
        "    torch.manual_seed(1)\n"
        "    queue.put(layer.train()(x).square().sum().item())\n"
        "context = multiprocessing.get_context('fork'); layer(x); queue = context.SimpleQueue()\n"
        "process = context.Process(target=work, args=(queue,)); process.start(); process.join(60)\n"
        "work(queue); print(process.exitcode, queue.get(), queue.get())\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    exit_code, forked, here = result.stdout.split()
    assert exit_code == "0"
    assert float(forked) == pytest.approx(float(here), rel=1e-3)


def test_a_lazily_negated_tensor():
    """``imag`` of a conjugate is negated only when it is read."""
    x, resp = torch.complex(rand(20, 3), rand(20, 3, seed=2)).conj().imag, soft(20, 2)
    assert x.is_neg()
    assert_close(mixture_normalize(x, resp), mixture_normalize(x.clone(), resp, backend="reference"))


@pytest.mark.parametrize("decay", [0.9, 1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slot_weights(dtype, decay):
    """Of whole batches, of few points, of what stands for many batches, of slots that are not filled; an empty history."""
    weights = soft(3, 5, 4).to(dtype)
    weights[0, 1] *= 0.3
    weights[0, 2] *= 7
    weights[1, :3] = 0
    weights[2] = 0
    compiled, reference = (
        kernels_for(weights.unsqueeze(-1), 4, backend).slot_weights(weights, decay) for backend in ("auto", "reference")
    )
    for found, expected in zip(compiled, reference, strict=True):
        torch.testing.assert_close(found, expected)
    assert compiled[1].sum(-1).tolist() == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [None, "weights", "means", "variances", "far"])
def test_a_mixture_is_pushed_whole_or_not_at_all(dtype, bad):
    """Also where no finite statistics come in, a mean is too large for squares, and a queue is of another dtype."""
    newest = Mixture(soft(2, 3), rand(2, 3, 5), rand(2, 3, 5, seed=2).exp())
    newest = Mixture(*(t.float() if dtype == torch.bfloat16 else t.to(dtype) for t in newest))
    if bad == "far":
        newest.means[1, 2, 4] = 3e16
    elif bad is not None:
        getattr(newest, bad)[1, 2] = torch.nan
    found = []
    for backend in ("auto", "reference"):
        queues = Mixture(soft(2, 4, 3).to(dtype), rand(2, 4, 3, 5).to(dtype), rand(2, 4, 3, 5, seed=2).exp().to(dtype))
        tracked = torch.tensor(7)
        taken = kernels_for(rand(2, 8, 1, 5).float(), 3, backend).push(queues, newest, tracked)
        assert bool(taken) == (bad is None)
        assert tracked == 7 + (bad is None)
        found.append(queues)
    for compiled, reference in zip(*found, strict=True):
        assert torch.equal(compiled, reference)


@pytest.mark.parametrize("name", ["means", "vars"])
def test_autograd_notices_that_a_batch_has_changed_a_history(name):
    layer = MixtureNorm1d(4)
    layer(rand(64, 4).float())
    scaled = getattr(layer, f"history_{name}") * torch.ones(4, requires_grad=True)
    layer(rand(64, 4, seed=3).float())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scaled.square().sum().backward()


def test_a_point_that_is_not_finite_has_no_part_in_the_gradient_of_others_in_evaluation():
    layer, found = MixtureNorm1d(4), []
    layer(rand(64, 4).float())
    upstream = torch.ones(64, 4)
    upstream[3] = 0
    for backend in ("auto", "reference"):
        layer.eval().backend = backend
        x = rand(64, 4, seed=3).float()
        x[3, 1] = torch.nan
        x.requires_grad_()
        layer(x).backward(upstream)
        found.append(x.grad)
    assert found[0].isfinite().all(1).sum() == 63
    torch.testing.assert_close(*found, equal_nan=True)


def test_a_history_on_another_device_is_an_error():
    layer = MixtureNorm1d(4).eval()
    layer.history_means = layer.history_means.to("meta")
    with pytest.raises(ValueError, match="a tensor of the layer is on meta: move one of them"):
        layer(rand(8, 4).float())
