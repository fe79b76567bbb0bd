"""PyTorch's own tests of batch norm, for mixture norm: the inputs of ``common_modules``, the checks of ``test_modules``."""

import ast
import copy
import functools
import io
import itertools
import pickle
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from layer_helpers import all_finite, assert_same
from torch import nn
from torch.testing import make_tensor

from mixnorm import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d

LAYERS = {nn.BatchNorm1d: MixtureNorm1d, nn.BatchNorm2d: MixtureNorm2d, nn.BatchNorm3d: MixtureNorm3d}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
COMPONENTS = (1, 3)


def definitions():
    """What ``torch.testing._internal.common_modules`` defines for batch norms. Importing it would change torch's flags."""
    names = {"FunctionInput", "ModuleInput", "ModuleErrorEnum", "ErrorModuleInput"}
    path = Path(torch.__file__).parent / "testing/_internal/common_modules.py"
    tree = ast.parse(path.read_text())
    tree.body = [n for n in tree.body if getattr(n, "name", None) in names or "nn_BatchNorm" in getattr(n, "name", "")]
    found = {"Enum": Enum, "partial": functools.partial, "make_tensor": make_tensor, "torch": torch}
    exec(compile(tree, path, "exec"), found)
    return SimpleNamespace(**found)


TORCH = definitions()


def module_inputs(norm, training=True, dtype=torch.float32, requires_grad=False):
    torch.manual_seed(0)
    make = getattr(TORCH, f"module_inputs_torch_nn_{norm.__name__}")
    return make(SimpleNamespace(module_cls=norm), "cpu", dtype, requires_grad, training)


CASES = [
    (norm, index, components) for norm in LAYERS for index in range(len(module_inputs(norm))) for components in COMPONENTS
]
# One input is in make test, all of them are in make test-slow; but for the equality with batch norm, which is in both.
FEW = {(nn.BatchNorm2d, 2)}


def every_case():
    """All cases; those that are not in FEW are slow."""
    return [
        pytest.param(
            norm,
            index,
            components,
            marks=() if (norm, index) in FEW else pytest.mark.slow,
            id=f"{norm.__name__}-{module_inputs(norm)[index].desc or 'plain'}-K{components}",
        )
        for norm, index, components in CASES
    ]


def case(norm, index, components, *, training=True, dtype=torch.float32, population="batch", backend="auto", seen=True):
    """A mixture norm and its input, and the batch norm and its; both have seen a batch."""
    given = module_inputs(norm, training, dtype)[index]
    arguments, options = given.constructor_input.args, given.constructor_input.kwargs
    x = given.forward_input.args[0]
    if components > 1 and x.numel():  # modes that are far apart, so that the posterior, where gradients stop, is constant
        mode = torch.arange(x[:, 0].numel()).view_as(x[:, 0]).unsqueeze(1) % components
        x = x + 100 * mode
    own = {"num_components": components, "population": population, "backend": backend}
    layer = LAYERS[norm](*arguments, **options, **own, dtype=dtype)
    batch_norm = norm(*arguments, **options, dtype=dtype)
    for name, parameter in batch_norm.named_parameters():
        with torch.no_grad():
            parameter.copy_(make_tensor(parameter.shape, dtype=dtype, device="cpu", low=0.5, high=1.5))
            getattr(layer, name).copy_(parameter)
    if seen:
        with torch.no_grad():
            layer(x.clone()), batch_norm(x.clone())
    return layer.train(training), x, batch_norm.train(training)


def run(layer, x, upstream=None, seed=1):
    """The output of a copy of the layer, and the gradients of input and parameters."""
    layer, x = copy.deepcopy(layer), x.detach().requires_grad_()  # a view of the caller's memory, whatever its strides
    torch.manual_seed(seed)
    y = layer(x)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y) if upstream is None else upstream
    return y, torch.autograd.grad(y, [x, *layer.parameters()], upstream)


def strides(tensor):
    """Where there is more than one element: the others say nothing."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def memory_formats(x):
    formats = [torch.contiguous_format, *([FORMATS[x.dim()]] if x.dim() in FORMATS else [])]
    return itertools.product(formats, formats)


TRAINING = pytest.param(True, id="train"), pytest.param(False, id="eval")
each_mode = pytest.mark.parametrize("training", TRAINING)
each_backend = pytest.mark.parametrize("backend", ["auto", "reference"])
each_case = pytest.mark.parametrize(("norm", "index", "components"), every_case())
pytestmark = pytest.mark.filterwarnings("ignore:a batch of")


@each_case
@each_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_forward(norm, index, components, training, dtype):
    layer, x, _ = case(norm, index, components, training=training, dtype=dtype)
    before = x.clone()
    y, gradients = run(layer, x)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert all_finite(y, *gradients)
    assert_same(x, before)
    torch.manual_seed(1)
    layer(x)
    torch.manual_seed(1)
    assert_same(layer(x).detach(), run(layer, x)[0].detach())  # twice


@pytest.mark.parametrize(("norm", "index"), [(norm, i) for norm in LAYERS for i in range(len(module_inputs(norm)))])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
@each_backend
def test_with_one_component_it_is_batch_norm(norm, index, dtype, backend):
    """On every input of torch's, forward and backward in training; and the gradient has batch norm's strides."""
    for population in ("batch", "channel"):
        layer, x, batch_norm = case(norm, index, 1, dtype=dtype, population=population, backend=backend)
        inputs = [x, *([x.contiguous(memory_format=FORMATS[x.dim()])] if x.dim() in FORMATS else [])]
        inputs += [x[:1].clone(memory_format=torch.preserve_format) for x in inputs if x.dim() > 2]  # a single image
        for given in inputs:
            (y, gradients), (expected, of_batch_norm) = run(layer, given), run(batch_norm, given)
            torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(gradients, of_batch_norm, atol=2e-5, rtol=1e-4)
            assert strides(y) == strides(expected)
            assert strides(gradients[0]) == strides(of_batch_norm[0])


@each_case
def test_factory_options(norm, index, components):
    given = module_inputs(norm)[index].constructor_input
    make = functools.partial(LAYERS[norm], *given.args, num_components=components, **given.kwargs)
    for device, dtype in itertools.product(("cpu", "meta"), (torch.float64, torch.float16)):
        layers = [make(device=device, dtype=dtype)]
        with torch.device(device):
            layers.append(make(dtype=dtype))
        for layer in layers:
            tensors = [*layer.parameters(), *layer.buffers()]
            assert all(t.device.type == device for t in tensors)
            assert {t.dtype for t in tensors if t.is_floating_point()} <= {dtype}


@each_case
@each_mode
def test_moves(norm, index, components, training):
    """``to`` and ``to_empty``, to other dtypes and back, with parameters that are swapped or not."""
    layer, x, _ = case(norm, index, components, training=training)
    expected = run(layer, x)[0]
    for swap in (False, True):
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            moved = copy.deepcopy(layer).double().to("cpu").to(torch.float32)
            assert_same(run(moved, x)[0], expected)
            half = copy.deepcopy(layer).to(torch.bfloat16)
            assert run(half, x.bfloat16())[0].dtype == torch.bfloat16
            empty = copy.deepcopy(layer).to("meta").to_empty(device="cpu")
            empty.load_state_dict(layer.state_dict())
            assert_same(run(empty, x)[0], expected)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)


@each_case
@each_mode
def test_round_trips(norm, index, components, training):
    """Pickles, copies and state dicts, also assigned."""
    layer, x, _ = case(norm, index, components, training=training)
    expected, gradients = run(layer, x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    others = [pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), torch.load(file, weights_only=False)]
    given = module_inputs(norm)[index].constructor_input
    for device, assign in (("cpu", False), ("cpu", True), ("meta", True)):
        other = LAYERS[norm](*given.args, **given.kwargs, num_components=components, device=device).train(training)
        other.load_state_dict(layer.state_dict(), assign=assign)
        others.append(other)
    for other in others:
        y, of_other = run(other, x)
        assert_same(y, expected)
        assert_same(of_other, gradients)


@each_case
def test_repr(norm, index, components):
    layer, *_ = case(norm, index, components)
    assert eval(repr(layer), {LAYERS[norm].__name__: LAYERS[norm]}).extra_repr() == layer.extra_repr()
    assert str(layer) == repr(layer)


@each_case
@each_mode
@each_backend
@pytest.mark.parametrize("population", ["batch", "layer", "channel"])
def test_memory_formats(norm, index, components, training, backend, population):
    """Input and module in either format: the same numbers, and output and gradient with batch norm's strides."""
    options = {"training": training, "backend": backend, "population": population}
    layer, x, batch_norm = case(norm, index, components, **options)
    upstream = torch.randn_like(x)
    expected, gradients = run(layer, x, upstream)
    for input_format, module_format in memory_formats(x):
        given, moved = x.contiguous(memory_format=input_format), copy.deepcopy(layer).to(memory_format=module_format)
        for upstream_format, _ in memory_formats(x):
            y, found = run(moved, given, upstream.contiguous(memory_format=upstream_format))
            other, of_batch_norm = run(batch_norm, given, upstream.contiguous(memory_format=upstream_format))
            torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(found, gradients, atol=1e-4, rtol=1e-4)
            assert strides(y) == strides(other)
            assert strides(found[0]) == strides(of_batch_norm[0])


def x_is_empty(norm, index):
    return module_inputs(norm)[index].forward_input.args[0].numel() == 0


@each_case
@each_mode
@each_backend
def test_tensors_that_are_not_contiguous(norm, index, components, training, backend):
    """Input, upstream gradient and both: every other element of a larger tensor, and transposed."""
    layer, x, _ = case(norm, index, components, training=training, backend=backend)
    upstream = torch.randn_like(x)
    expected, gradients = run(layer, x, upstream)

    def spread(tensor):
        return tensor.repeat_interleave(2, -1)[..., ::2]

    def transposed(tensor):
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)

    for change in (spread, transposed):
        for of_x, of_upstream in ((change, torch.clone), (torch.clone, change), (change, change)):
            y, found = run(layer, of_x(x), of_upstream(upstream))
            torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(found, gradients, atol=1e-4, rtol=1e-4)


@each_case
@each_mode
@each_backend
@pytest.mark.parametrize("order", [1, 2])
def test_gradcheck(norm, index, components, training, backend, order):
    if x_is_empty(norm, index):
        pytest.skip("there is nothing to differentiate")
    layer, x, _ = case(norm, index, components, training=training, dtype=torch.float64, backend=backend)
    names, parameters = zip(*layer.named_parameters(), strict=True) if layer.affine else ((), ())
    buffers = dict(layer.named_buffers())

    def transform(x, *parameters):
        torch.manual_seed(1)
        state = {**dict(zip(names, parameters, strict=True)), **{name: b.clone() for name, b in buffers.items()}}
        return torch.func.functional_call(layer, state, (x,))

    inputs = [t.detach().clone().requires_grad_() for t in (x, *parameters)]
    fast = order == 2 or x.numel() > 40
    check = torch.autograd.gradcheck if order == 1 else torch.autograd.gradgradcheck
    assert check(transform, inputs, check_batched_grad=order == 1, fast_mode=fast)


@each_case
@each_mode
def test_in_place_after_it(norm, index, components, training):
    """The output may be changed in place, as batch norm's may: the gradient does not need it."""
    layer, x, _ = case(norm, index, components, training=training)
    found = []
    for relu in (torch.relu, torch.relu_):
        module, leaf = copy.deepcopy(layer), x.clone().requires_grad_()
        torch.manual_seed(1)
        relu(module(leaf)).sum().backward()
        found.append(leaf.grad)
    assert_same(*found)


@each_case
def test_training_and_evaluation_differ(norm, index, components):
    layer, x, batch_norm = case(norm, index, components, seen=False)
    for module in (layer, batch_norm):
        training, evaluation = run(module.train(), x)[0], run(module.eval(), x)[0]
        same = torch.allclose(training, evaluation, atol=1e-4)
        assert same == (x.numel() == 0 or not module.track_running_stats)


@pytest.mark.parametrize("norm", LAYERS)
@each_mode
def test_errors(norm, training):
    """A negative eps, where torch says so on the first batch, here when the layer is made."""
    make = TORCH.module_error_inputs_torch_nn_BatchNorm1d_2d_3d
    for given in make(SimpleNamespace(module_cls=norm), "cpu", torch.float32, False, training):
        options = given.module_error_input.constructor_input
        if options.kwargs["eps"] < 0:
            with pytest.raises(given.error_type, match="eps"):
                LAYERS[norm](*options.args, **options.kwargs)


def test_all_of_torchs_inputs_are_there():
    counts = [len(module_inputs(norm)) for norm in LAYERS]
    assert counts == [8, 7, 7] or (counts == [7, 6, 6] and torch.__version__ < "2.13")  # one of each was added there
    assert len(CASES) == 2 * sum(counts)
