"""Case × variant → rows. What fails becomes a row that says why, and the run goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mixnorm_lab.bench import measure
from mixnorm_lab.bench.cases import SCIKIT_LEARN_FIT, Case
from mixnorm_lab.bench.cpu_memory import cpu_peak_memory
from mixnorm_lab.bench.errors import errors
from mixnorm_lab.bench.steps import Step, Variant, backend_in_use, make_inputs, make_step
from mixnorm_lab.bench.traffic import bytes_moved
from mixnorm_lab.bench.whole import start
from mixnorm_lab.bench.whole.models import FORMS
from mixnorm_lab.storage import environment
from mixnorm_lab.storage.measurements import COLUMNS, MeasurementFile, Row

MAX_FAILURE = 300  # characters


class Watcher(Protocol):
    """Who is told how far the run is; see :mod:`mixnorm_lab.bench.display`."""

    def begin(self, case: Case, number: int, total: int) -> None: ...
    def stage(self, text: str) -> None: ...
    def finish(self, rows: Sequence[Row]) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class BenchOptions:
    """How a benchmark is measured.

    Args:
        device: "cuda" or "cpu".
        backend: of mixture norm: "auto", "triton" or "reference".
        reference: measure the plain reference beside it.
        quick: few samples.
        seconds: when to stop; the rows so far are kept.
        commit: in place of what git says, where the code was copied without its history.
    """

    device: str
    backend: str = "auto"
    reference: bool = False
    quick: bool = False
    seconds: float | None = None
    commit: str | None = None


def run(cases: Sequence[Case], options: BenchOptions, table: MeasurementFile, watcher: Watcher) -> None:
    """Measures the cases in turn and adds their rows to the table as they come."""
    deadline = math.inf if options.seconds is None else time.monotonic() + options.seconds
    backend = backend_in_use(options.device, options.backend)
    where = environment.of_measurement(options.device, options.commit)
    watcher.stage("measuring the bandwidth of a copy")
    bandwidth = measure.copy_bandwidth(options.device, quick=options.quick)
    watcher.note(f"{where['device']}, torch {where['torch']}: a copy moves {bandwidth / 1e9:,.0f} GB/s, read and written")
    for number, case in enumerate(cases):
        if time.monotonic() > deadline:
            left = f"{len(cases) - number} of {len(cases)} cases"
            watcher.note(f"The {options.seconds:g} seconds are over: {left} are left out.")
            return
        watcher.begin(case, number, len(cases))
        rows = []
        for row in measure_case(case, backend, options, deadline, watcher.stage):
            row.update(where)
            if row["time_ms"]:
                row["copy_gb_s"] = bandwidth / 1e9
                row["bandwidth_share"] = row["bytes"] and row["bytes"] / (row["time_ms"] / 1e3) / bandwidth
            table.add(row)
            rows.append(row)
        measure.free_memory(options.device)
        watcher.finish(rows)


def variants_of(case: Case, backend: str, options: BenchOptions) -> list[Variant]:
    """The base first, then every K; of a model every form, of which plain PyTorch is not measured beside."""
    variants = [Variant("batch_norm")]
    if case.model:
        mixtures = [Variant(backend, k, form) for form in case.forms if form in FORMS for k in case.components]
        return [*variants, *(Variant(form) for form in case.forms if form not in FORMS), *mixtures]
    if case.benchmark == "fit":
        beside = case.mode == "cpu" and (options.quick or case.shape == SCIKIT_LEARN_FIT)
        variants = [Variant("scikit_learn", case.components[-1])] if beside else []
    names = dict.fromkeys((backend, "reference") if options.reference else (backend,))
    return variants + [Variant(name, k) for name in names for k in case.components]


def measure_case(
    case: Case, backend: str, options: BenchOptions, deadline: float, stage: Callable[[str], None]
) -> Iterator[Row]:
    """A row for each variant, the base first; for "start" one for each figure of each variant."""
    if case.benchmark == "start":
        yield from measure_starts(case, backend, options, deadline, stage)
        return
    rows = {variant: blank_row(case, variant) for variant in variants_of(case, backend, options)}
    try:
        if case.benchmark == "memory":
            measure_memory(case, rows, options, stage)
        else:
            measure_times(case, rows, options, deadline, stage)
    except Exception as error:  # such as too little memory for the inputs
        for row in rows.values():
            row["failure"] = row["failure"] or one_line(error)
    number = "peak_memory_mb" if case.benchmark == "memory" else "time_ms"
    base = next((row for variant, row in rows.items() if not variant.is_mixture), None)
    for row in rows.values():
        if base and base[number] and row[number] and base["num_components"] in (None, row["num_components"]):
            row["ratio"] = row[number] / base[number]
        yield row


def measure_times(
    case: Case, rows: dict[Variant, Row], options: BenchOptions, deadline: float, stage: Callable[[str], None]
) -> None:
    inputs = make_inputs(case, options.device)
    held = sum(t.nbytes for t in inputs)
    steps: dict[Variant, Step] = {}
    left_out: list[Variant] = []
    with fastest_convolutions():
        for variant, row in rows.items():
            if steps and time.monotonic() > deadline:  # of a model that takes long; what is ready is still measured
                left_out.append(variant)
                continue
            stage(f"preparing {variant}")
            with failures_in(row):
                step = make_step(case, variant, inputs)
                if options.device == "cuda":
                    row["peak_memory_mb"] = (measure.gpu_peak_memory(step) + held) / 1e6
                steps[variant] = measure.prepare(step, case.mode)
        stage("measuring")
        times = measure.alternate(steps, options.device, quick=options.quick, deadline=deadline)
    steps.clear()
    if case.mode == "compiled":
        torch.compiler.reset()  # or models would be compiled for the same code until there are too many
    for variant in left_out:
        del rows[variant]
    for variant, samples in times.items():
        row = rows[variant]
        row["time_ms"], row["p20_ms"], row["p80_ms"] = measure.percentiles(samples)
        stage(f"comparing {variant} with fp64")
        with failures_in(row):
            row["error"], row["error_grad"] = errors(case, variant, options.device)


def measure_memory(case: Case, rows: dict[Variant, Row], options: BenchOptions, stage: Callable[[str], None]) -> None:
    """On a GPU what a step holds at its peak, with its input and upstream gradient; on a CPU what it adds to them."""
    for variant, row in rows.items():
        stage(f"measuring {variant}")
        with failures_in(row):
            if options.device == "cuda":
                inputs: tuple[Tensor, ...] = make_inputs(case, "cuda")
                peak = measure.gpu_peak_memory(make_step(case, variant, inputs)) + sum(t.nbytes for t in inputs)
            else:
                peak = cpu_peak_memory(case, variant)
            row["peak_memory_mb"] = peak / 1e6


def measure_starts(
    case: Case, backend: str, options: BenchOptions, deadline: float, stage: Callable[[str], None]
) -> Iterator[Row]:
    """Rows figure by figure, each of the seconds in a new process beside batch norm's."""
    found = {}
    variants = variants_of(case, backend, options)
    for number, variant in enumerate(variants):
        stage(f"a new process with {variant}")
        share = (deadline - time.monotonic()) / (len(variants) - number)  # of the time that is left
        limit = min(start.LIMIT, max(share, 1.0))
        found[variant] = start.measure(case, variant, options.device, limit)
    for figure in start.figures(case):
        base = found[Variant("batch_norm")][0].get(figure)
        for variant, (seconds, failure) in found.items():
            row = blank_row(case, variant) | {"series": figure, "mode": start.mode(case, figure, options.device)}
            if figure in seconds:
                row["time_ms"] = 1e3 * seconds[figure]
                row["ratio"] = seconds[figure] / base if base else None
            else:
                row["failure"] = failure[:MAX_FAILURE]
            yield row


def blank_row(case: Case, variant: Variant) -> Row:
    return {
        **dict.fromkeys(COLUMNS),
        "benchmark": case.benchmark,
        "series": case.series,
        "case": case.name,
        "data": case.data,
        "dtype": case.dtype,
        "layout": case.layout,
        "mode": case.mode,
        "variant": variant.label,
        "num_components": variant.num_components,
        "em_iters": case.em_iters if variant.is_mixture else None,
        "m": None if case.model else case.points,
        "channels": None if case.model else case.channels,
        "bytes": bytes_moved(case, variant),
        "failure": "",
    }


@contextmanager
def failures_in(row: Row) -> Iterator[None]:
    """What goes wrong inside is written into the row."""
    try:
        yield
    except Exception as error:
        row["failure"] = one_line(error)
    if row["failure"]:  # the next variant should find the memory that this one ran out of
        measure.free_memory("cuda" if torch.cuda.is_available() else "cpu")


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_FAILURE]


@contextmanager
def fastest_convolutions() -> Iterator[None]:
    """As anyone would train who cares about speed, and so that a slow convolution does not hide what a norm costs."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
