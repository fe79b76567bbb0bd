"""torch.export, ONNX and torch.jit.trace: the evaluation of a model as a graph that runs without this library."""

import copy
import io

import pytest
import torch
from layer_helpers import points
from torch import nn

import mixnorm
from mixnorm import MixtureNorm2d

OPTIONS = [
    {},
    {"inference": "mixture"},
    {"inference": "paper"},
    {"activation": "relu"},
    {"affine_mode": "statistics"},
    {"population": "channel"},
    {"within": "learned", "between": "learned"},
    {"deviation": 0.5},
    pytest.param({"population": "layer"}, marks=pytest.mark.slow),
]


def trained_model(**options):
    """A model with a norm that saw three batches, in evaluation. Two by two components keep the graph small."""
    torch.manual_seed(0)
    norm = MixtureNorm2d(6, **{"num_components": 2, "history": 2, **options})
    model = nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.Flatten(2), nn.Linear(20, 4))
    with torch.no_grad():
        for seed in range(3):
            model(points(8, 3, 7, 6, seed=seed))
    return model.eval()


def exported(model, **options):
    return torch.export.export(model, (points(4, 3, 7, 6),), dynamic_shapes=({0: torch.export.Dim("n")},), **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_export_is_of_pytorchs_own_operations_for_any_batch_size(options):
    model = trained_model(**options)
    program = exported(model)
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    called = {str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"}
    assert any(name.startswith("aten.") for name in called)
    assert not any("mixnorm" in name for name in called)
    for count in (2, 5):
        x = points(count, 3, 7, 6, seed=9)
        torch.testing.assert_close(program.module()(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"population": "instance"}, {"track_running_stats": False}], ids=str)
@torch.no_grad()
def test_export_for_any_batch_size_and_image_size(options, strict):
    norm = MixtureNorm2d(6, **{"num_components": 2, "history": 2, **options})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    for seed in range(3):
        model(points(8, 3, 7, 6, seed=seed))
    sizes = {0: torch.export.Dim("n"), 2: torch.export.Dim("h"), 3: torch.export.Dim("w")}
    program = torch.export.export(model.eval(), (points(4, 3, 6, 6),), dynamic_shapes=(sizes,), strict=strict).module()
    for count, height, width in ((2, 9, 8), (5, 6, 12), (1, 16, 16), (2, 130, 130)):  # max_samples of the last
        x = points(count, 3, height, width, seed=9)
        torch.testing.assert_close(program(x), model(x), atol=1e-5, rtol=1e-5)


def test_export_with_a_gradient_and_in_strict_mode():
    """A model exported outside ``no_grad`` can be fine-tuned."""
    model = trained_model()
    program = exported(model, strict=True).module()
    x = points(5, 3, 7, 6, seed=9)
    upstream = torch.randn(5, 6, 4)
    found, expected = ([y := m(x), *torch.autograd.grad(y, list(m.parameters()), upstream)] for m in (program, model))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_export_of_a_model_in_training(strict):
    """The program has the history as buffers, as it has those of a batch norm, and its batches enter it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), MixtureNorm2d(6, num_components=1))
    x = points(4, 3, 7, 6)
    program = torch.export.export(copy.deepcopy(model), (x,), strict=strict).module()
    for count in range(1, 3):
        torch.testing.assert_close(program(x), model(x), atol=1e-5, rtol=1e-5)
        assert model[1].num_batches_tracked == count
        torch.testing.assert_close(dict(program.named_buffers()), dict(model.named_buffers()), atol=1e-5, rtol=1e-5)
    program(x * torch.nan)
    torch.testing.assert_close(dict(program.named_buffers()), dict(model.named_buffers()), atol=1e-5, rtol=1e-5)


def test_export_of_pooled_says_what_to_do_and_that_works():
    model = trained_model(inference="pooled")
    with pytest.raises(ValueError, match=r"'pooled' .* cannot be exported: call mixnorm.distill\(model\) first"):
        exported(model)
    x = points(5, 3, 7, 6, seed=9)
    expected = model(x)
    torch.testing.assert_close(exported(mixnorm.distill(model)).module()(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "distilled"),
    [
        pytest.param({"history": 10, "num_components": 3, "activation": "relu"}, True, id="distilled"),
        pytest.param({}, False, id="history", marks=pytest.mark.slow),
        pytest.param({"inference": "mixture"}, False, id="mixture", marks=pytest.mark.slow),
        pytest.param({"inference": "paper"}, False, id="paper", marks=pytest.mark.slow),
        pytest.param({"population": "channel"}, False, id="channel", marks=pytest.mark.slow),
        pytest.param({"population": "instance"}, False, id="instance", marks=pytest.mark.slow),
        pytest.param({"track_running_stats": False}, False, id="no history", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_onnxruntime_gives_the_same_for_any_batch_size(options, distilled):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = trained_model(**options)
    if distilled:
        mixnorm.distill(model)
    file = io.BytesIO()
    shapes = ({0: torch.export.Dim("n")},)
    torch.onnx.export(model, (points(4, 3, 7, 6),), dynamo=True, dynamic_shapes=shapes, verbose=False).save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    for count in (2, 5):
        x = points(count, 3, 7, 6, seed=9)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(x).detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("options", OPTIONS[:-1], ids=str)
@torch.no_grad()
def test_a_jit_trace_is_of_the_input_and_not_of_the_example(options):
    """For any batch size: what a tracer does not see becomes a constant of the example, without an error."""
    model = trained_model(**options)
    traced = torch.jit.trace(model, points(4, 3, 7, 6))
    for count in (2, 5):
        x = points(count, 3, 7, 6, seed=9)
        torch.testing.assert_close(traced(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "options", [{"population": "instance"}, {"population": "layer"}, {"track_running_stats": False}], ids=str
)
def test_a_fit_cannot_be_traced(options):
    with pytest.raises(ValueError, match=r"fits a mixture here.*torch.export"):
        torch.jit.trace(trained_model(**options), points(4, 3, 7, 6))
    with pytest.raises(ValueError, match=r"fits a mixture here.*call eval\(\)"):
        torch.jit.trace(trained_model().train(), points(4, 3, 7, 6))
    with pytest.raises(ValueError, match=r"mixnorm.distill\(model\) first"):
        torch.jit.trace(trained_model(inference="pooled"), points(4, 3, 7, 6))
