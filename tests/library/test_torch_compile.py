"""torch.compile with fullgraph=True: one graph for training, one for evaluation, and the numbers of the uncompiled layer."""

import copy
import importlib.util

import pytest
import torch
from torch import nn
from torch.library import opcheck

import mixnorm
from mixnorm import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d
from mixnorm.ops import choose, library
from mixnorm.ops import fit as reference_fit
from mixnorm.ops.kernels import Form
from mixnorm_lab.models import CifarCNN

SHAPE = (4, 4, 6, 5)
CONFIGURATIONS = [
    {},
    {"affine_mode": "statistics", "activation": "gelu"},
    {"population": "channel"},
    {"population": "group", "num_groups": 2},
    {"inference": "mixture"},
    {"momentum": None, "history": 2},
    {"sample_fraction": 0.5, "max_samples": 30, "num_components": 2},
    {"within": "learned", "between": "learned"},
    {"deviation": "learned"},
]
MORE_CONFIGURATIONS = [
    {"activation": "relu"},
    {"affine_mode": "statistics"},
    {"population": "instance"},
    {"population": "layer"},
    {"inference": "paper"},
    {"affine": False},
    {"track_running_stats": False},
    {"num_components": 1},
    {"backend": "reference"},
    {"component_affine": True, "seeding": "warm", "scale": "unit"},
]


def with_slow(cases, slow):
    """The cases of a test, and those that only ``make test-slow`` runs."""
    return [*cases, *(pytest.param(case, marks=pytest.mark.slow) for case in slow)]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def images(seed, dtype=torch.float32):
    x = rand(*SHAPE, seed=seed)
    return (x + 4 * torch.arange(SHAPE[-1]).remainder(3)).to(dtype)


def compiled(module, backend="aot_eager"):
    return torch.compile(module, fullgraph=True, backend=backend)


def step(forward, layer, seed, *, training=True, dtype=torch.float32):
    """Output and gradients of one pass; the seed tells the input and the random numbers."""
    layer.train(training)
    x = images(seed, dtype).requires_grad_()
    torch.manual_seed(seed)
    if forward is not layer and layer.seeding == "warm" and training:
        torch.randint(2**62, ())  # by which a warm start knows a recomputation, which a compiler does by itself
    y = forward(x)
    found = torch.autograd.grad(y, [x, *layer.parameters()], rand(*y.shape, seed=100 + seed, dtype=dtype))
    return [y.detach(), *found]


def pair(**options):
    """A layer with parameters that are not those of a new one, and its copy."""
    torch.manual_seed(0)
    layer = MixtureNorm2d(SHAPE[1], **options)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return layer, copy.deepcopy(layer)


def assert_close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def check(plain, other, forward, *, steps=3, dtype=torch.float32, tolerance=1e-5):
    """The same numbers in training, in evaluation and in the state; nothing is compiled after the first step of each.

    A warm start has a second step in training that is not like the first, which has no batch to go on from.
    """
    for training, seeds in ((True, range(steps)), (False, range(steps, steps + 2))):
        for seed in seeds:
            new = 2 if training and plain.seeding == "warm" else 1
            stance = "default" if seed < seeds[0] + new else "fail_on_recompile"
            with torch.compiler.set_stance(stance):
                found = step(forward, other, seed, training=training, dtype=dtype)
            assert_close(found, step(plain, plain, seed, training=training, dtype=dtype), tolerance)
    assert_close(dict(other.named_buffers()), dict(plain.named_buffers()), tolerance)
    if plain.keeps_history:
        assert other.num_batches_tracked == steps


@pytest.mark.parametrize("options", with_slow(CONFIGURATIONS, MORE_CONFIGURATIONS), ids=str)
def test_as_without_a_compiler(options):
    plain, other = pair(**options)
    check(plain, other, compiled(other))


def test_nothing_is_compiled_twice_where_no_step_came_before(monkeypatch):
    """In a new process the first step loads the loops, which is no reason to compile the second one anew."""
    monkeypatch.setattr(choose, "_loops", None)
    layer, _ = pair()
    forward = compiled(layer)
    torch._dynamo.utils.counters.clear()
    for seed in range(2):
        step(forward, layer, seed)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes(dtype):
    plain, other = pair()
    tolerance = 1e-5 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps
    check(plain, other, compiled(other), dtype=dtype, tolerance=tolerance)


def test_channels_last():
    plain, other = pair()
    forward = compiled(other)
    x = images(0).contiguous(memory_format=torch.channels_last)
    results = []
    for function in (forward, plain):
        leaf = x.detach().requires_grad_()
        torch.manual_seed(0)
        y = function(leaf)
        assert y.is_contiguous(memory_format=torch.channels_last)
        results.append([y.detach(), *torch.autograd.grad(y, leaf, rand(*SHAPE, seed=1))])
    assert_close(*results)


@pytest.mark.parametrize("population", ["batch", "channel"])
def test_warm_seeding(population):
    """From the second batch on: the first has no mixture to start from, and is another graph."""
    plain, other = pair(seeding="warm", population=population, sample_fraction=1.0)
    for layer in (plain, other):
        step(layer, layer, 99)
    forward = compiled(other)
    for seed in range(3):
        with torch.compiler.set_stance("default" if seed == 0 else "fail_on_recompile"):
            found = step(forward, other, seed)
        assert_close(found, step(plain, plain, seed))
    assert_close(dict(other.named_buffers()), dict(plain.named_buffers()))
    assert other.num_batches_tracked == 4


def test_warm_seeding_from_a_new_layer():
    layer, _ = pair(seeding="warm")
    forward = compiled(layer)
    for seed in range(2):
        step(forward, layer, seed)
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in range(2, 5):
            assert all(t.isfinite().all() for t in step(forward, layer, seed))
    assert layer.num_batches_tracked == 5


@pytest.mark.parametrize("population", ["batch", "channel"])
def test_training_for_pooled_inference(population):
    """The first batch makes room for the samples; from then on it is one graph."""
    plain, other = pair(inference="pooled", population=population)
    forward = compiled(other)
    for seed in range(4):
        with torch.compiler.set_stance("default" if seed < 2 else "fail_on_recompile"):
            found = step(forward, other, seed)
        assert_close(found, step(plain, plain, seed))
    torch.testing.assert_close(dict(other.named_buffers()), dict(plain.named_buffers()), equal_nan=True)


@pytest.mark.xfail(strict=True, reason="which slots are filled is data, so that evaluation from a pool is not one graph")
def test_pooled_inference():
    plain, other = pair(inference="pooled")
    for layer in (plain, other):
        step(layer, layer, 0)
    assert_close(step(compiled(other), other, 1, training=False), step(plain, plain, 1, training=False))


@pytest.mark.parametrize(
    ("kind", "shape"), [(MixtureNorm1d, (40, 4)), (MixtureNorm1d, (8, 4, 9)), (MixtureNorm3d, (3, 4, 3, 4, 2))]
)
def test_other_ranks(kind, shape):
    results = []
    for compiler in (compiled, lambda layer: layer):
        layer = kind(4, activation="silu")
        x = rand(*shape).requires_grad_()
        torch.manual_seed(0)
        y = compiler(layer)(x)
        results.append(
            [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], rand(*shape, seed=1)), *layer.buffers()]
        )
    assert_close(*results)


def test_a_batch_that_is_not_finite_stays_out_of_the_history():
    layer, _ = pair()
    forward = compiled(layer)
    forward(images(0))
    before = copy.deepcopy(layer.state_dict())
    forward(images(1) * torch.nan)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


def test_no_gradient_wanted():
    plain, other = pair()
    forward = compiled(other)
    results = []
    for function in (forward, plain):
        torch.manual_seed(0)
        with torch.no_grad():
            results.append(function(images(0)))
    assert_close(*results)
    assert other.num_batches_tracked == 1


def test_another_batch_size_is_compiled_at_most_once_more():
    """The second size makes the graph general, and the third needs none of its own."""
    layer, plain = pair()
    forward = compiled(layer)
    for count in (4, 6):
        forward(rand(count, *SHAPE[1:]))
        plain(rand(count, *SHAPE[1:]))
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.manual_seed(0)
        found = forward(rand(9, *SHAPE[1:]))
    torch.manual_seed(0)
    assert_close(found, plain(rand(9, *SHAPE[1:])))


def test_the_default_compiler():
    plain, other = pair(activation="relu")
    with torch._inductor.config.patch(fallback_random=True):  # the numbers of PyTorch's generator
        check(plain, other, compiled(other, backend="inductor"), steps=2)


def between_convolutions(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), MixtureNorm2d(8, **options), nn.ReLU(), nn.Conv2d(8, 4, 3))


def check_sizes(sizes, *, training=(True, False), backend="inductor", dynamic=None, **options):
    """A model of convolutions gives what it gives without a compiler, at each size in turn."""
    plain = between_convolutions(**options)
    other = copy.deepcopy(plain)
    forward = torch.compile(other, fullgraph=True, backend=backend, dynamic=dynamic)
    for mode in training:
        for seed, size in enumerate(sizes):
            x, results = rand(size[0], 3, *size[1:], seed=seed), []
            for function, model in ((forward, other), (plain, plain)):
                leaf = x.clone().requires_grad_()
                model.train(mode)
                torch.manual_seed(seed)
                y = function(leaf)
                found = torch.autograd.grad(y, [leaf, *model.parameters()], rand(*y.shape, seed=100 + seed) / y.numel())
                results.append([y.detach(), *found])
            assert_close(*results)
    assert_close(dict(other.named_buffers()), dict(plain.named_buffers()))


BATCHES = [(4, 10, 10), (6, 10, 10), (9, 10, 10)]
IMAGES = [(4, 10, 10), (4, 12, 11), (5, 9, 14)]


@torch._inductor.config.patch(fallback_random=True)
def test_convolutions_with_the_default_compiler_for_any_batch_size():
    check_sizes(BATCHES, training=(True,), dynamic=True)


@pytest.mark.skipif(not choose.HAS_NUMBA, reason="without faster kernels the compiler sees no transform")
def test_the_operators_of_a_layer_share_what_a_convolution_gives(monkeypatch):
    """The default compiler's convolutions put channels last, whatever was traced: no operator gets a copy of its own."""
    original, seen = library._kernels, {}

    class Spy:
        def __init__(self, name):
            self.kernels = original(name)

        def __getattr__(self, name):
            def call(first, *others):
                if isinstance(first, torch.Tensor):
                    seen[name] = first.data_ptr()
                return getattr(self.kernels, name)(first, *others)

            return call

    monkeypatch.setattr(library, "_kernels", Spy)
    forward = torch.compile(between_convolutions(), fullgraph=True)
    assert forward(rand(4, 3, 10, 10)).requires_grad  # so that the transform keeps its input
    assert seen.keys() == {"sample_and_fit", "em_step", "mix"}
    assert len(set(seen.values())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("sizes", [BATCHES, IMAGES], ids=["batches", "images"])
@torch._inductor.config.patch(fallback_random=True)
def test_convolutions_with_the_default_compiler_for_any_size(sizes, dynamic):
    check_sizes(sizes, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", with_slow([None], [True]))
@pytest.mark.filterwarnings("ignore:a batch of:UserWarning")
def test_a_batch_of_few_points_is_another_graph(dynamic):
    """It gets fewer components; a batch of one image has fewer dimensions that may change."""
    check_sizes([(4, 10, 10), (2, 5, 5), (3, 5, 5), (1, 10, 10)], training=(True,), backend="aot_eager", dynamic=dynamic)


def test_a_model_with_one_norm_converted():
    torch.manual_seed(0)
    plain = mixnorm.convert(CifarCNN(), "conv3.*", num_components=3)
    other = copy.deepcopy(plain)
    forward = compiled(other)
    x, labels = rand(8, 3, 32, 32), torch.arange(8)
    for training in (True, True, False):
        results = []
        for function, model in ((forward, other), (plain, plain)):
            model.train(training).zero_grad()
            torch.manual_seed(0)
            loss = nn.functional.cross_entropy(function(x), labels)
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in model.parameters())])
        assert_close(*results, 1e-4)
    assert_close(dict(other.named_buffers()), dict(plain.named_buffers()), 1e-4)
    assert other.conv3.norm.num_batches_tracked == 2


def test_recalibrate_compiles_nothing():
    """Neither for a batch norm's momentum, which is another one in each batch, nor for the hooks that set it."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), MixtureNorm2d(4)).eval()
    other = copy.deepcopy(plain)
    forward = compiled(other)
    forward(rand(4, 3, 8, 8))
    batches = [rand(4, 3, 8, 8, seed=seed) for seed in range(12)]
    with torch.compiler.set_stance("fail_on_recompile"):
        for model in (forward, plain):
            torch.manual_seed(0)
            mixnorm.recalibrate(model, batches)
        assert_close(dict(other.named_buffers()), dict(plain.named_buffers()))
        assert_close(forward(batches[0]), plain(batches[0]))


def test_a_frozen_batch_norm():
    model = mixnorm.freeze(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    x = rand(4, 3, 8, 8)
    assert_close(compiled(model)(x), model(x))


needs_the_interpreter = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="the kernels run on the CPU only under Triton's interpreter; on a GPU see test_gpu_layers.py",
)


@needs_the_interpreter
@pytest.mark.parametrize("population", with_slow(["batch"], ["instance"]))
def test_the_kernels_in_a_compiled_layer(population):
    plain, other = pair(backend="triton", population=population)
    forward = compiled(other)
    for seed in range(2):
        assert_close(step(forward, other, seed), step(plain, plain, seed))
    assert_close(dict(other.named_buffers()), dict(plain.named_buffers()))


@needs_the_interpreter
def test_the_kernels_in_a_compiled_layer_in_evaluation():
    plain, other = pair(backend="triton")
    for layer in (plain, other):
        step(layer, layer, 0)
    assert_close(step(compiled(other), other, 1, training=False), step(plain, plain, 1, training=False))


# --- the operators themselves -------------------------------------------------------------------------------------------

POINTS = (2, 3, 7, 5)  # B, outer, inner, D
K, T = 3, 4


def mixture():
    return torch.softmax(rand(2, K), -1), rand(2, K, 5, seed=1), rand(2, K, 5, seed=2).square() + 0.5


def history():
    tau = torch.softmax(rand(2, T, seed=6), -1)
    return torch.softmax(rand(2, T, K, seed=3), -1), rand(2, T, K, 5, seed=4), rand(2, T, K, 5, seed=5).square() + 0.5, tau


def parameter(seed):
    return (rand(5, seed=seed) / 4 + 1).requires_grad_()


def normalize_inputs(*, points=None, weight=True, bias=True):
    resp = torch.softmax(rand(2, 21, K, seed=7), -1)
    x = (rand(*POINTS) if points is None else points).flatten(0, 1).mT.requires_grad_()
    return x, resp, *mixture(), parameter(8) if weight else None, parameter(9) if bias else None, *[None] * 3


FORM = library._numbers(Form(1e-5, "silu", "output"))
OPTIONS = (FORM, "numba")
FIT = (1, 2, 1e-5, 0.01, "numba")  # Lloyd and EM iterations, floors, backend
DRAWS = torch.rand(100, generator=torch.Generator().manual_seed(0))
CALLS = {
    "sample_and_fit": lambda: (
        library.sample_and_fit,
        (rand(*POINTS), 16, DRAWS[: 17 + 2 * reference_fit.num_uniforms(K)], K, *FIT),
    ),
    "sample_and_fit of all points": lambda: (
        library.sample_and_fit,
        (rand(*POINTS), 21, DRAWS[: 22 + 2 * reference_fit.num_uniforms(K)], K, *FIT),
    ),
    "sample_and_fit of bf16": lambda: (
        library.sample_and_fit,
        (rand(*POINTS, dtype=torch.bfloat16), 16, DRAWS[: 17 + 2 * reference_fit.num_uniforms(K)], K, *FIT),
    ),
    "em": lambda: (library.em, (rand(2, 21, 5), *mixture(), 2, 1, 1, 1e-5, 0.01, "numba")),
    "em_step": lambda: (library.em_step, (rand(*POINTS), *mixture(), "numba")),
    "em_step of the reference": lambda: (library.em_step, (rand(*POINTS), *mixture(), "reference")),
    "normalize": lambda: (library.transform, (*normalize_inputs(), *OPTIONS)),
    "normalize without parameters": lambda: (library.transform, (*normalize_inputs(weight=False, bias=False), *OPTIONS)),
    "normalize without a shift": lambda: (library.transform, (*normalize_inputs(bias=False), *OPTIONS)),
    "normalize of channels first": lambda: (
        library.transform,
        (*normalize_inputs(points=rand(2, 3, 5, 7).mT), *OPTIONS),
    ),
    "normalize of a slice": lambda: (
        library.transform,
        (*normalize_inputs(points=rand(2, 3, 7, 10)[..., ::2]), *OPTIONS),
    ),
    "normalize_backward": lambda: (
        library.transform_backward,
        (rand(6, 7, 5, seed=10).mT, *(t if t is None else t.detach() for t in normalize_inputs()), *OPTIONS),
    ),
    "normalize with gates": lambda: (
        library.transform,
        (*normalize_inputs()[:-3], *(parameter(s) for s in (10, 11, 12)), library._numbers(Form(scale="unit")), "numba"),
    ),
    "inference with gates": lambda: (
        library.inference,
        (rand(*POINTS), *history(), *(parameter(s).detach() for s in range(5)), FORM, "ensemble", True, "numba"),
    ),
    "inference": lambda: (
        library.inference,
        (
            rand(*POINTS),
            *history(),
            parameter(8).detach(),
            parameter(9).detach(),
            None,
            None,
            None,
            FORM,
            "ensemble",
            True,
            "numba",
        ),
    ),
    "inference without parameters": lambda: (
        library.inference,
        (rand(*POINTS), *history(), None, None, None, None, None, FORM, "mixture", False, "numba"),
    ),
    "push": lambda: (library.push, (*history()[:3], *mixture(), torch.tensor(3), "numba")),
}


@pytest.mark.parametrize("call", CALLS)
def test_operators_are_registered_right(call):
    """Schema, shapes and strides without data, gradients, and dynamic shapes: what torch.library checks."""
    operator, arguments = CALLS[call]()
    assert set(opcheck(operator, arguments).values()) == {"SUCCESS"}
