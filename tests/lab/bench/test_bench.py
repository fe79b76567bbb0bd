"""The benchmark tool: a small run of everything on the CPU, what it writes, and what is made of it."""

import csv
import errno
import math
import re
import sys
from contextlib import suppress

import pytest
import torch
from cuda_stand_in import pretend_cuda
from typer.testing import CliRunner

from mixnorm_lab.bench import display, goals, measure, run, steps, traffic
from mixnorm_lab.bench import errors as bench_errors
from mixnorm_lab.bench.cases import BENCHMARKS, TOY, Case, all_cases, cpu_cases, gpu_cases, select
from mixnorm_lab.bench.errors import relative
from mixnorm_lab.bench.steps import Variant
from mixnorm_lab.bench.whole import start
from mixnorm_lab.cli import app
from mixnorm_lab.storage.measurements import COLUMNS, MeasurementFile, read

BASE = Variant("batch_norm")
FAST = ["--quick", "--device", "cpu", "--backend", "reference"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The CSV of a quick run of everything, and what it printed."""
    path = tmp_path_factory.mktemp("bench") / "bench.csv"
    result = invoke("all", *FAST, "--out", path, "--commit", "abc1234")
    assert result.exit_code == 0, result.output
    return path, result.output


def test_a_quick_run_measures_everything(quick):
    with quick[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    cases = all_cases("cpu", quick=True)
    assert {(row["benchmark"], row["case"], row["dtype"]) for row in rows} == {(c.benchmark, c.name, c.dtype) for c in cases}
    assert {row["benchmark"] for row in rows} == set(BENCHMARKS)
    for row in rows:
        assert not row["failure"]
        of_one = {"memory": ["peak_memory_mb"], "start": ["time_ms"]}  # those that have no samples
        assert all(float(row[figure]) > 0 for figure in of_one.get(row["benchmark"], ["time_ms", "p20_ms", "p80_ms"]))
        assert row["mode"] == "cpu"
        assert row["variant"].split()[0] in ("batch_norm", "scikit_learn", "reference", "ghost-32")
        assert (row["torch"], row["commit"]) == (torch.__version__, "abc1234")
        assert row["device"]
        assert row["date"]


def test_ratios_are_to_the_base_of_the_same_run(quick):
    rows = read(quick[0])
    for row in rows:
        if row["benchmark"] not in ("fit", "memory"):
            base = goals.base_of(row, rows)
            assert row["ratio"] == pytest.approx(row["time_ms"] / base["time_ms"], rel=1e-3)
    fits = {
        row["num_components"]: row["ratio"] for row in rows if row["variant"] == "reference" and row["benchmark"] == "fit"
    }
    assert fits[2] is None  # scikit-learn fitted three
    assert fits[3] > 0


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-6), ("bf16", 1e-2)])
def test_errors_are_those_of_the_dtype(dtype, bound):
    case = Case("layer", (8, 16, 4, 4), (3,), dtype, mode="cpu")
    assert all(0 < error < bound for error in bench_errors.errors(case, Variant("reference", 3), "cpu"))


@pytest.mark.parametrize(
    ("benchmark", "series"), [("layer", "relu"), ("inference", "relu"), ("inference", "steady"), ("inference", "distilled")]
)
def test_what_is_special_about_a_layer_is_measured(benchmark, series):
    case = Case(benchmark, (8, 16, 4, 4), (3,), mode="cpu", series=series)
    beside, norm = (steps.make_norm(case, variant, torch.device("cpu")) for variant in (BASE, Variant("reference", 3)))
    (x, *_) = steps.make_inputs(case, "cpu")
    norm, beside = steps.after_training(case, norm, x), steps.after_training(case, beside, x)
    assert not norm.training
    assert norm.history == (1 if series == "distilled" else steps.HISTORY)
    assert norm.inference == ("steady" if series == "steady" else "ensemble")
    if series == "relu":
        assert [type(module) for module in beside] == [torch.nn.BatchNorm2d, torch.nn.ReLU]
        assert norm(x).min() >= 0
    for variant in (BASE, Variant("reference", 3)):
        steps.make_step(case, variant, steps.make_inputs(case, "cpu"))()
        found, of_gradient = bench_errors.errors(case, variant, "cpu")
        assert 0 < found < 1e-6
        assert (of_gradient is None) == (benchmark == "inference")


def test_the_table_is_shown_at_the_end_and_again_from_the_file(quick):
    for output in (quick[1], invoke("table", quick[0]).output):
        for benchmark in BENCHMARKS:
            assert f"\n{benchmark} · " in output
        assert "slope of the time against the points" in output


def test_pictures_are_drawn_from_the_file(quick, tmp_path):
    result = invoke("plot", quick[0], "--out", tmp_path / "plots")
    assert result.exit_code == 0, result.output
    pictures = sorted((tmp_path / "plots").iterdir())
    assert sorted(path.stem.rpartition("-")[2] for path in pictures) == sorted(BENCHMARKS)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_the_backend_in_use_is_named(tmp_path):
    pytest.importorskip("numba")
    path = tmp_path / "bench.csv"
    result = invoke("layer", "--quick", "--device", "cpu", "--only", "fp32,K=3", "--layout", "both", "--out", path)
    assert result.exit_code == 0, result.output
    rows = read(path)
    assert [row["variant"] for row in rows] == ["batch_norm", "compiled"] * 2
    assert {row["layout"] for row in rows} == {"channels_last", "contiguous"}


def test_two_runs_make_one_table_and_the_last_counts(tmp_path):
    path = tmp_path / "bench.csv"
    only = ["layer", *FAST, "--only", "fp32", "--only", "K=1", "--out", path]
    assert invoke(*only).exit_code == 0
    with path.open("a") as file:
        file.write("layer,,64x64x16x16,mo")  # a run that was killed
    assert invoke(*only).exit_code == 0
    assert len(path.read_text().splitlines()) == 1 + 2 + 1 + 2
    assert [row["variant"] for row in read(path)] == ["batch_norm", "reference"]


def test_no_time_means_no_case_but_a_table(tmp_path):
    path = tmp_path / "bench.csv"
    result = invoke("layer", *FAST, "--seconds", 0, "--out", path)
    assert result.exit_code == 0
    assert "1 of 1 cases are left out" in result.output
    assert path.read_text().startswith("benchmark,")


def test_a_case_that_fails_is_recorded_and_the_run_goes_on(tmp_path, monkeypatch):
    make_step = steps.make_step

    def fails_for_one(case, variant, inputs):
        if variant.num_components == 1:
            raise torch.OutOfMemoryError("too\nlittle memory")
        return make_step(case, variant, inputs)

    monkeypatch.setattr(run, "make_step", fails_for_one)
    path = tmp_path / "bench.csv"
    result = invoke("layer", *FAST, "--only", "fp32", "--out", path)
    assert result.exit_code == 0
    one, three = (next(row for row in read(path) if row["num_components"] == k) for k in (1, 3))
    assert one["failure"] == "OutOfMemoryError: too little memory"
    assert one["time_ms"] is None
    assert three["time_ms"] > 0
    assert "failed: 64x64x16x16 fp32 reference K=1: OutOfMemoryError" in result.output
    assert invoke("plot", path, "--out", tmp_path).exit_code == 0


def test_inputs_that_cannot_be_made_are_recorded_for_every_variant(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "make_inputs", lambda case, device: 1 / 0)
    path = tmp_path / "bench.csv"
    assert invoke("layer", *FAST, "--out", path).exit_code == 0
    assert {row["failure"] for row in read(path)} == {"ZeroDivisionError: division by zero"}
    assert invoke("plot", path, "--out", tmp_path / "plots").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["layers"], "mixnorm bench layers is unknown: choose from all, layer, cost"),
        (["layer", "--only", "1x2x3x4"], "'1x2x3x4' matches no case here: choose from layer; 64x64x16x16; fp32; cpu"),
        (["layer", "--only", "K=7"], "K=1, K=3"),
        (["layer", "--backend", "cuda"], "choose from auto, reference, triton"),
        (["layer", "--backend", "triton", "--device", "cpu"], "--backend triton cannot run on a CPU: use auto"),
        (["layer", "--layout", "nhwc"], "choose from channels_last, contiguous, both"),
        (["layer", "--device", "tpu"], "choose from auto, cuda, cpu"),
        (["layer", "--out", "no/such/folder/x.csv"], "there is no folder no/such/folder, so make it or name"),
        (["table", "nothing.csv"], "there is no file nothing.csv"),
        (["plot", __file__], "is not a table"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, sentence, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = CliRunner().invoke(
        app, ["bench", *arguments, *(["--quick"] if arguments[0] == "layer" else [])], prog_name="mixnorm"
    )
    assert result.exit_code == 2
    assert sentence in result.output
    assert len(result.output.splitlines()) == 1


def test_a_file_with_other_columns_is_left_alone(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    assert invoke("layer", *FAST, "--out", path).exit_code == 2
    assert path.read_text() == "a,b\n1,2\n"


def test_without_rich_the_lines_are_plain(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    result = invoke("layer", *FAST, "--only", "fp32,K=1")
    assert result.exit_code == 0
    assert "1/1 layer 64x64x16x16 fp32 cpu: batch_norm" in result.output


def test_bytes_are_what_a_hand_count_gives():
    layer = Case("layer", (2, 3, 4, 5), dtype="bf16")
    tensor, points = 2 * 3 * 4 * 5 * 2, 2 * 4 * 5
    # Forward reads x twice and writes y; backward reads x and the gradient twice each and writes one.
    assert traffic.bytes_moved(layer, Variant("batch_norm")) == 8 * tensor
    # The responsibilities, in fp32: written, read to normalize, read twice in the backward pass.
    assert traffic.bytes_moved(layer, Variant("triton", 3)) == 8 * tensor + 4 * points * 3 * 4
    assert traffic.bytes_moved(Case("inference", (2, 3, 4, 5)), Variant("triton", 3)) == 2 * 120 * 4
    # A ReLU behind batch norm reads and writes once more; in its backward pass it reads two and writes one.
    behind = Case("layer", (2, 3, 4, 5), dtype="bf16", series="relu")
    assert traffic.bytes_moved(behind, Variant("batch_norm")) == (8 + 5) * tensor
    assert traffic.bytes_moved(behind, Variant("triton", 3)) == 8 * tensor + 4 * points * 3 * 4
    # Three seeds, one Lloyd and one EM iteration.
    assert traffic.bytes_moved(Case("fit", (10, 6)), Variant("triton", 3)) == 5 * 60 * 4
    assert traffic.bytes_moved(Case("cost", (64, 196, 8, 8), depth=19), Variant("batch_norm")) is None


@pytest.mark.parametrize("power", [0.5, 1.0, 1.3])
def test_the_slope_of_a_power_law_is_its_power(power):
    sizes = [10, 100, 1000, 5000]
    assert goals.slope(sizes, [3 * size**power for size in sizes]) == pytest.approx(power)


def test_the_slope_against_the_points_is_that_of_the_large_sizes():
    case = Case("scaling", (1, 64, 1, 1), series="m")
    rows = []
    for m in (1_000, 10_000, 1_000_000, 4_000_000):
        row = run.blank_row(case, Variant("triton", 3))
        rows.append({**row, "m": m, "time_ms": max(1.0, m / 1e6), "device": "a GPU"})
    assert goals.slopes(rows)["m", "triton", "a GPU"] == (pytest.approx(1), True)
    assert goals.slopes(rows[:2])["m", "triton", "a GPU"] == (pytest.approx(0), False)
    (check,) = goals.checks(rows)
    assert check.goal == 1
    assert check.measured == pytest.approx(1)


def row_of(benchmark, name, **values):
    case = next(case for case in gpu_cases() if case.benchmark == benchmark and case.name == name)
    row = run.blank_row(case, Variant(values.pop("variant", "triton"), values.pop("num_components", 3)))
    return {**row, "device": "a GPU", **values}


def test_goals_of_single_rows():
    assert goals.goal(row_of("layer", "256x256x56x56", dtype="bf16"), []) == 1.0
    assert goals.goal(row_of("layer", "256x128x8x8"), []) == 2.0
    assert goals.goal(row_of("layer", "256x128x8x8", mode="eager"), []) == 3.0
    assert goals.goal(row_of("inference", "256x256x56x56"), []) == 2.0
    assert goals.goal(row_of("inference", "256x128x8x8", series="steady"), []) == 2.5
    assert goals.goal(row_of("inference", "256x128x8x8", series="distilled"), []) == 1.2
    assert goals.goal(row_of("layer", "256x128x8x8", series="relu"), []) is None
    assert 1 / goals.goal(row_of("cost", "densenet40-b64", num_components=5), []) == pytest.approx(0.98)
    assert goals.goal(row_of("layer", "256x128x8x8", num_components=5), []) is None
    assert goals.goal(row_of("layer", "256x128x8x8", layout="contiguous"), []) is None
    assert goals.goal(row_of("layer", "256x128x8x8", variant="reference"), []) is None
    base = row_of("memory", "256x128x8x8", variant="batch_norm", peak_memory_mb=100.0)
    allowed = 1.05 * (100 + 256 * 64 * 3 * 4 / 1e6)
    assert goals.goal(row_of("memory", "256x128x8x8"), [base]) == pytest.approx(allowed / 100)


def test_growth_with_the_components():
    rows = [row_of("layer", "256x256x56x56", num_components=k, time_ms=t) for k, t in ((2, 2.0), (3, 2.1), (5, 2.5))]
    (check,) = goals.checks(rows)
    assert check.measured == pytest.approx(0.25)
    assert check.goal == 0.15
    assert check.met is False


def test_the_papers_cost_table_is_complete():
    cases = [case for case in gpu_cases() if case.benchmark == "cost" and case.mode == "graph"]
    rows = [row_of("cost", case.name, num_components=k) for case in cases for k in case.components]
    ratios = [goals.paper_ratio(row) for row in rows]
    assert len(ratios) == 12
    assert min(ratios) == pytest.approx(13.69 / 16.40)
    assert max(ratios) == pytest.approx(8.83 / 9.26)


@pytest.mark.parametrize("cases", [gpu_cases(), cpu_cases(), all_cases("cuda", quick=True)])
def test_cases_are_distinct_and_cover_every_benchmark(cases):
    keys = [(c.benchmark, c.series, c.name, c.dtype, c.layout, c.mode, c.data) for c in cases]
    assert len(set(keys)) == len(keys)
    assert {case.benchmark for case in cases} == set(BENCHMARKS)


def test_terms_of_one_kind_are_alternatives_and_of_several_kinds_all_must_fit():
    found = select(gpu_cases(), ["layer", "cost", "fp32", "K=2", "K=5"])
    assert {case.benchmark for case in found} == {"layer", "cost"}
    assert {case.dtype for case in found} == {"fp32"}
    assert {case.components for case in found} == {(2, 5)}
    with pytest.raises(ValueError, match="no case fits all"):
        select(gpu_cases(), ["cost", "bf16"])


def test_percentiles():
    assert measure.percentiles([float(n) for n in range(101)]) == (50, 20, 80)


def test_samples_are_taken_in_turns():
    order = []
    steps = {name: lambda name=name: order.append(name) for name in "ab"}
    times = measure.alternate(steps, "cpu", quick=True, deadline=math.inf)
    assert "".join(order[2:]) == ("aaaa" + "bbbb") * 4  # three of four count
    assert [len(samples) for samples in times.values()] == [12, 12]


def test_the_error_is_relative():
    exact = torch.randn(100, dtype=torch.float64)
    assert relative(exact.float() * 1.01, exact) == pytest.approx(0.01, rel=1e-3)
    assert math.isnan(relative(exact.float() * torch.nan, exact))


@pytest.mark.slow
def test_the_way_of_the_gpu_with_a_stand_in_for_cuda(tmp_path, monkeypatch):
    """Without a GPU this is what can be known of that way: every case goes through it and ends in a row."""
    pretend_cuda(monkeypatch)
    monkeypatch.setattr(start, "measure", lambda case, *_: (dict.fromkeys(start.figures(case), 1.0), ""))
    path = tmp_path / "bench.csv"
    result = invoke("all", "--quick", "--device", "cuda", "--backend", "reference", "--out", path)
    assert result.exit_code == 0, result.output
    rows = read(path)
    assert {row["failure"] for row in rows} == {""}
    assert {(row["benchmark"], row["mode"]) for row in rows} >= {
        (b, "graph") for b in BENCHMARKS if b not in ("memory", "start")
    }
    assert all(row["peak_memory_mb"] > 1 for row in rows if row["benchmark"] != "start")
    assert all(row["bandwidth_share"] > 0 for row in rows if row["bytes"])
    assert not [row for row in rows if row["variant"] == "scikit_learn"]
    assert invoke("plot", path, "--out", tmp_path).exit_code == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_quick_run_on_a_gpu(tmp_path):
    path = tmp_path / "bench.csv"
    result = invoke("all", "--quick", "--device", "cuda", "--reference", "--out", path)
    assert result.exit_code == 0, result.output
    assert {row["failure"] for row in read(path)} == {""}


def test_a_table_without_a_file_keeps_its_rows():
    table = MeasurementFile()
    table.add({"benchmark": "layer"})
    assert table.rows == [{"benchmark": "layer"}]


def test_a_full_disk_ends_the_run_with_a_sentence_and_the_table(tmp_path, monkeypatch):
    def no_space(_table, _text):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "bench.csv"
    monkeypatch.setattr(MeasurementFile, "_append", no_space)
    result = invoke("layer", *FAST, "--only", "fp32,K=1", "--out", path)
    assert result.exit_code == 2
    assert "could not be written: No space left on device" in result.output
    assert "layer · " in result.output


# --- what people see ----------------------------------------------------------------------------------------------------


def cpu_rows(*names, spread=0.1):
    """Rows as of a CPU: batch norm takes a millisecond, K components K + 1."""
    found = []
    for case in (case for case in cpu_cases() if case.benchmark == "layer" and case.name in names):
        for variant in (Variant("batch_norm"), *(Variant("compiled", k) for k in case.components)):
            ms = 1.0 + (variant.num_components or 0)
            row = run.blank_row(case, variant) | {"time_ms": ms, "p20_ms": ms * (1 - spread), "p80_ms": ms * (1 + spread)}
            numbers = {"ratio": ms, "bandwidth_share": 0.5, "error": 1e-7, "error_grad": 1e-7}
            where = {"device": "a CPU, 2 threads", "torch": "2.13", "triton": "", "commit": "abc1234", "date": "2026-01-01"}
            found.append(row | numbers | where)
    return found


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 80 columns on stdout, as text."""
    pytest.importorskip("rich")
    for name, value in {"COLUMNS": "80", "LINES": "24", "FORCE_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)


def test_figures_of_a_cpu_say_so_and_have_their_shape():
    [table] = display.tables(cpu_rows("64x128x8x8"))
    assert table.title == "layer · eager, on a CPU · a CPU, 2 threads"
    assert any("Measured on a CPU, in eager mode" in note for note in table.notes)
    named = [row["case"] for row in table.rows if row["case"]]
    assert named == ["64x128x8x8 fp32 normal", "64x128x8x8 fp32", "relu: 64x128x8x8 fp32"]
    assert not any("Measure again" in note or "(toy)" in note for note in table.notes)


def test_toys_and_a_busy_machine_are_told():
    [table] = display.tables(cpu_rows("64x128x8x8", spread=0.5))
    assert any("the times of 10 of 10 rows varied from call to call" in note for note in table.notes)
    small = [{**row, "case": "8x16x4x4", "m": 128, "channels": 16} for row in cpu_rows("64x128x8x8")]
    [table] = display.tables(small)
    assert table.rows[0]["case"] == "8x16x4x4 fp32 normal (toy)"
    assert any(note.startswith("(toy): a tensor so small") for note in table.notes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_ratio_of_a_quick_layer_is_of_no_toy(device):
    layers = [case for case in all_cases(device, quick=True) if case.benchmark in ("layer", "inference")]
    assert all(case.numel > 20 * TOY for case in layers)


def test_a_table_fits_a_terminal_and_says_what_it_left_out(terminal, capsys):
    display.show(cpu_rows("64x128x8x8", "64x448x8x8"))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert all(len(line) <= 80 for line in lines)
    [heading] = [line for line in lines if line.startswith("case ")]
    assert {"variant", "K", "time", "base"} <= set(heading.split())
    assert any(line.startswith("Left out for want of room: grad, error") for line in lines)
    assert sum("compiled" in line and "ms" in line for line in lines) == 14  # a line for each, none broken


def test_what_was_measured_before_an_interruption_is_told(capsys):
    with suppress(KeyboardInterrupt), display.BenchDisplay() as shown:
        shown.begin(cpu_cases()[0], 0, 3)
        shown.finish(cpu_rows("64x128x8x8")[:2])
        shown.begin(cpu_cases()[1], 1, 3)
        raise KeyboardInterrupt
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1/3 layer 64x128x8x8 fp32 cpu normal: batch_norm 1 ms, K=3 4.00× (0:00 elapsed)"
    assert lines[1] == "Interrupted: 1 of 3 cases are measured."


def drawn(figure):
    """Every text of a figure that is somewhere, with its place in pixels."""
    figure.draw_without_rendering()
    texts = [text for axis in figure.axes for text in axis.texts]
    return [(text, text.get_window_extent()) for text in texts if text.get_text()]


@pytest.mark.parametrize("names", [("64x128x8x8",), ("64x128x8x8", "64x448x8x8", "64x64x32x32")])
def test_no_number_of_a_bar_is_struck_through(names):
    plots = pytest.importorskip("mixnorm_lab.bench.plots")
    rows = cpu_rows(*names)
    with plots.mpl.rc_context(plots.STYLE):
        figure = plots.layer(rows)
        found = drawn(figure)
    [axis] = figure.axes
    assert len(found) == sum(row["variant"] == "compiled" for row in rows)
    foot = axis.get_window_extent().y0
    for text, box in found:
        assert box.y1 <= foot + 1  # below the axis, where neither batch norm's line nor a goal can be
        assert all(other is text or not box.overlaps(place) for other, place in found)
    ticks = [label.get_window_extent() for label in axis.get_xticklabels()]
    assert not any(box.overlaps(tick) for _, box in found for tick in ticks)
    assert all(not one.overlaps(other) for i, one in enumerate(ticks) for other in ticks[:i])


def test_logarithmic_axes_of_a_benchmark_say_so():
    plots = pytest.importorskip("mixnorm_lab.bench.plots")
    rows = []
    for case in (case for case in cpu_cases() if case.benchmark in ("scaling", "fit")):
        base = Variant("scikit_learn" if case.benchmark == "fit" else "batch_norm", 3 if case.benchmark == "fit" else None)
        for variant in (base, *(Variant("compiled", k) for k in case.components)):
            ms = case.points * (variant.num_components or 1) / 1e4
            where = {"device": "a CPU", "torch": "2.13", "triton": "", "commit": "", "date": "2026-01-01"}
            rows.append(run.blank_row(case, variant) | {"time_ms": ms} | where)
    with plots.mpl.rc_context(plots.STYLE):
        for benchmark, picture in (("scaling", plots.scaling), ("fit", plots.fit)):
            figure = picture([row for row in rows if row["benchmark"] == benchmark])
            figure.draw_without_rendering()
            scales = set()
            for axis in figure.axes:
                for which, label in (("x", axis.get_xlabel()), ("y", axis.get_ylabel())):
                    scale = getattr(axis, f"get_{which}scale")()
                    scales.add(scale)
                    assert ("log scale" in label) == (scale == "log")
                assert not axis.get_legend().get_window_extent().overlaps(axis.get_window_extent())
            assert "log" in scales


def test_one_size_alone_is_no_curve(tmp_path):
    plots = pytest.importorskip("mixnorm_lab.bench.plots")
    one = [{**row, "benchmark": "scaling", "series": "m"} for row in cpu_rows("64x128x8x8")[:2]]
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.draw(one, tmp_path)
