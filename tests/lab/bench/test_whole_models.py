"""``mixnorm bench models``: whole models with mixture norm in all places, as far as a CPU can tell."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from cuda_stand_in import pretend_cuda
from torch import nn
from typer.testing import CliRunner

from mixnorm import MixtureNorm2d
from mixnorm_lab.bench import display, goals, measure, run
from mixnorm_lab.bench.cases import all_cases, cpu_cases, gpu_cases, select
from mixnorm_lab.bench.run import BenchOptions
from mixnorm_lab.bench.steps import Variant, make_inputs, make_step
from mixnorm_lab.bench.whole import models
from mixnorm_lab.cli import app
from mixnorm_lab.models.resnet import ResNet
from mixnorm_lab.norms import GhostBatchNorm
from mixnorm_lab.storage.measurements import read


def of_models(cases):
    return [case for case in cases if case.benchmark == "models"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", "models", *map(str, arguments)])


def norms_of(model):
    return {
        place: norm for place, norm in model.named_modules() if "Norm" in type(norm).__name__ and not list(norm.children())
    }


class TinyResNet50(nn.Module):
    """Norms with the names that ResNet-50 has in torchvision and timm."""

    def __init__(self):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(4)
        block = nn.Module()
        block.bn1, block.bn2, block.bn3 = (nn.BatchNorm2d(4) for _ in range(3))
        block.downsample = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.layer1 = nn.Sequential(block)


@pytest.mark.parametrize("form", models.FORMS)
@pytest.mark.parametrize("name", ["cifar-cnn", "resnet-18"])
def test_mixture_norm_is_in_all_places_with_the_options_of_its_form(name, form):
    model = models.build(name, (3, 32, 32))
    places = norms_of(model).keys()
    models.with_mixture_norms(model, name, form, num_components=3)
    found = norms_of(model)
    assert found.keys() == places
    assert all(isinstance(norm, MixtureNorm2d) and norm.num_components == 3 for norm in found.values())
    assert {norm.fit for norm in found.values()} == {"ahead" if form == "ahead" else "batch"}
    assert {norm.within_weight is not None for norm in found.values()} == {form == "gated"}


def test_a_relu_goes_inside_where_one_follows_and_nowhere_else():
    cnn, resnet = (models.build(name, (3, 32, 32)) for name in ("cifar-cnn", "resnet-18"))
    for name, model in (("cifar-cnn", cnn), ("resnet-18", resnet), ("resnet-50", tiny := TinyResNet50())):
        models.with_mixture_norms(model, name, "relu", num_components=3)
    assert {norm.activation for norm in norms_of(cnn).values()} == {"relu"}
    without = {place for place, norm in norms_of(resnet).items() if norm.activation is None}
    assert without == {place for place in norms_of(resnet) if ".conv2." in place or ".shortcut." in place}
    assert len(without) == 8 + 3
    assert ResNet.layers["relu"][0] not in without
    without = {place for place, norm in norms_of(tiny).items() if norm.activation is None}
    assert without == {"layer1.0.bn3", "layer1.0.downsample.1"}


def test_every_variant_of_the_gpu_runs_a_step_that_changes_the_weights():
    for case in of_models(gpu_cases()):
        if case.model != "cifar-cnn" or case.mode == "compiled":
            continue
        case = replace(case, shape=(4, 3, 32, 32))
        inputs = make_inputs(case, "cpu")
        for variant in run.variants_of(case, "reference", BenchOptions("cuda")):
            step = make_step(case, variant, inputs)
            step()
            model = next(cell.cell_contents for cell in step.__closure__ if isinstance(cell.cell_contents, nn.Module))
            assert model.training == (case.series == "training")
            before = [p.detach().clone() for p in model.parameters()]
            step()
            changed = any((p != b).any() for p, b in zip(model.parameters(), before, strict=True))
            assert changed == (case.series == "training")
            assert all(p.isfinite().all() and p.grad is None for p in model.parameters())
            assert {p.dtype for p in model.parameters()} == {torch.float32}  # under autocast, as in the trainer


def test_a_neighbour_and_batch_norm_are_what_they_are_called():
    case = replace(of_models(gpu_cases())[0], shape=(4, 3, 32, 32))
    kinds = {}
    for variant in run.variants_of(case, "triton", BenchOptions("cuda"))[:2]:
        step = make_step(case, variant, make_inputs(case, "cpu"))
        model = next(cell.cell_contents for cell in step.__closure__ if isinstance(cell.cell_contents, nn.Module))
        kinds[variant.label] = {type(norm) for norm in norms_of(model).values()}
    assert kinds == {"batch_norm": {nn.BatchNorm2d}, "ghost-32": {GhostBatchNorm}}


def test_the_history_is_full_in_evaluation():
    model = models.build("digits-cnn", (1, 8, 8))
    models.with_mixture_norms(model, "digits-cnn", "paper", num_components=3, history=4)
    images = torch.randn(32, 1, 8, 8)
    models.evaluation(model, images, history=4)
    norms = list(norms_of(model).values())
    assert not any(norm.training for norm in norms)
    assert all((norm.history_weights.sum(-1) > 0).all() and int(norm.num_batches_tracked) == 4 for norm in norms)


def test_a_compiled_step_is_that_of_the_compiled_model(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    case = replace(of_models(all_cases("cpu", quick=True))[0], mode="compiled")
    make_step(case, Variant("reference", 3, "gated"), make_inputs(case, "cpu"))()
    assert len(compiled) == 1


def test_resnet_50_is_of_the_first_library_that_is_there(monkeypatch):
    asked = []

    def build(name, classes, shape):
        asked.append((name, classes, shape))
        if name.startswith("torchvision"):
            raise ValueError(f"{name} needs torchvision: pip install torchvision")
        return TinyResNet50()

    monkeypatch.setattr(models.models, "build", build)
    assert isinstance(models.build("resnet-50", (3, 224, 224)), TinyResNet50)
    assert asked == [(name, 1000, (3, 224, 224)) for name in models.LIBRARIES]


def test_without_a_library_the_rows_of_resnet_50_say_why(monkeypatch):
    for name in ("torchvision", "timm"):
        monkeypatch.setitem(sys.modules, name, None)
    case = next(case for case in of_models(gpu_cases()) if case.model == "resnet-50")
    case = replace(case, shape=(1, 3, 8, 8), mode="cpu")
    rows = list(run.measure_case(case, "reference", BenchOptions("cpu", quick=True), math.inf, lambda _: None))
    assert len(rows) == 6
    assert all("neither torchvision nor timm is here" in row["failure"] for row in rows)


def test_the_way_of_the_gpu(tmp_path, monkeypatch):
    """A captured step is made by the same function as that of a layer."""
    pretend_cuda(monkeypatch)
    prepared, prepare = [], measure.prepare
    monkeypatch.setattr(measure, "prepare", lambda step, mode: prepared.append(mode) or prepare(step, mode))
    path = tmp_path / "bench.csv"
    result = invoke("--quick", "--device", "cuda", "--backend", "reference", "--out", path)
    assert result.exit_code == 0, result.output
    rows = read(path)
    assert {row["failure"] for row in rows} == {""}
    assert prepared.count("graph") == 6 + 4
    assert prepared.count("eager") == 6
    assert {row["dtype"] for row in rows} == {"bf16"}
    assert all(row["peak_memory_mb"] > 1 and row["ratio"] > 0 for row in rows)
    assert [row["variant"] for row in rows][:6] == [
        "batch_norm", "ghost-32", "reference paper", "reference relu", "reference ahead", "reference gated",
    ]  # fmt: skip


def test_only_takes_models_modes_and_forms():
    found = select(of_models(gpu_cases()), ["resnet-18", "graph", "training", "paper", "ahead"])
    assert [(case.name, case.forms) for case in found] == [("resnet-18-b256", ("paper", "ahead"))]
    assert not any(case.benchmark == "layer" for case in select(gpu_cases(), ["gated"]))
    result = invoke("--quick", "--device", "cpu", "--backend", "reference", "--only", "evaluation,relu")
    assert result.exit_code == 0
    assert "1/1 models evaluation digits-cnn-b64 fp32 cpu: batch_norm" in result.output
    assert "reference relu" in result.output
    assert "reference paper" not in result.output


def test_when_the_time_is_over_what_is_ready_is_measured_and_no_row_is_made_of_the_others():
    case = of_models(all_cases("cpu", quick=True))[0]
    rows = list(run.measure_case(case, "reference", BenchOptions("cpu", quick=True), 0.0, lambda _: None))
    assert [row["variant"] for row in rows] == ["batch_norm"]
    assert rows[0]["time_ms"] > 0


def row_of(name, mode, variant, num_components=3, series="training"):
    case = next(case for case in of_models(gpu_cases()) if (case.name, case.mode) == (name, mode))
    row = run.blank_row(case, Variant("triton", num_components, variant) if num_components else Variant(variant))
    return row | {"series": series, "device": "a GPU"}


def test_goals_of_models():
    assert goals.goal(row_of("cifar-cnn-b256", "graph", "paper"), []) == 1.1
    assert goals.goal(row_of("resnet-18-b256", "graph", "ahead"), []) == 1.1
    assert goals.goal(row_of("resnet-50-b128", "graph", "gated"), []) == 1.02
    assert goals.goal(row_of("resnet-50-b128", "eager", "gated"), []) == 1.1
    assert goals.goal(row_of("resnet-18-b256", "eager", "gated"), []) is None
    assert goals.goal(row_of("resnet-50-b128", "compiled", "gated"), []) is None
    assert goals.goal(row_of("cifar-cnn-b256", "graph", "paper", series="evaluation"), []) is None
    assert goals.goal(row_of("cifar-cnn-b256", "graph", "ghost-32", None), []) is None


def test_a_cpu_has_small_batches_eager_and_compiled():
    cases = of_models(cpu_cases())
    assert {(case.model, case.mode) for case in cases} == {
        (m, n) for m in ("cifar-cnn", "resnet-18") for n in ("cpu", "compiled")
    }
    assert all(case.shape[0] <= 32 for case in cases)


def test_the_picture_has_every_bar_below_which_its_number_stands_and_room_for_its_legend():
    plots = pytest.importorskip("mixnorm_lab.bench.plots")
    where = {"device": "a GPU", "torch": "2.11", "triton": "3.6", "commit": "", "date": "2026-01-01"}
    rows = []
    for case in of_models(gpu_cases()):
        for number, variant in enumerate(run.variants_of(case, "triton", BenchOptions("cuda"))):
            rows.append(run.blank_row(case, variant) | where | {"time_ms": 1.0, "ratio": 1 + number / 10})
    with plots.mpl.rc_context(plots.STYLE):
        figure = plots.whole.models(rows)
        figure.draw_without_rendering()
    assert [axis.get_title("left") for axis in figure.axes] == [
        "a training step, inside a CUDA graph", "a training step, eager", "evaluation, inside a CUDA graph",
        "a training step, with torch.compile",
    ]  # fmt: skip
    for axis, bars in zip(figure.axes, (15, 15, 9, 3), strict=True):
        numbers = [text.get_window_extent() for text in axis.texts if text.get_text()]
        assert len(numbers) == bars
        assert all(box.y1 <= axis.get_window_extent().y0 + 1 for box in numbers)
        assert not any(one.overlaps(other) for i, one in enumerate(numbers) for other in numbers[:i])
    box = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1


def test_the_table_has_models_with_goals_and_says_when_some_are_compiled():
    where = {"device": "a GPU", "time_ms": 1.0, "p20_ms": 1.0, "p80_ms": 1.0, "ratio": 1.2, "bandwidth_share": None}
    rows = [row_of("cifar-cnn-b256", "graph", "batch_norm", None), row_of("cifar-cnn-b256", "graph", "relu")]
    [table] = display.tables([row | where for row in rows])
    assert table.rows[1]["variant"] == "triton relu"
    assert (table.rows[1]["goal"], table.rows[1]["met"]) == ("≤ 1.10", "✗")
    on_cpu = [row | where | {"mode": mode} for row, mode in zip(rows, ("cpu", "compiled"), strict=True)]
    assert any(note == "Measured on a CPU: a GPU's figures are different." for note in display.tables(on_cpu)[0].notes)
