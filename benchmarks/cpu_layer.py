"""Mixture norm against batch norm on the CPU: time and memory of one layer, and the fit against scikit-learn.

    python benchmarks/cpu_layer.py [--csv FILE]

Ratios are medians of runs that alternate in one process, so that the machine's state is the same for both. Each norm runs a
few times in a row: that is how a layer meets a warm allocator in training.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.mixture import GaussianMixture
from torch import nn

import mixnorm

SHAPES = [(64, 128, 8, 8), (64, 448, 8, 8), (64, 64, 32, 32)]
Row = dict[str, object]


def alternate(functions: dict[str, Callable[[], object]], *, rounds: int = 12, repeats: int = 15) -> dict[str, list[float]]:
    """Seconds of each call: in every round each function runs ``repeats`` times, after three that do not count."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            for _ in range(3):
                function()
            for _ in range(repeats):
                start = time.perf_counter()
                function()
                times[name].append(time.perf_counter() - start)
    return times


def images(shape: tuple[int, ...], data: str) -> torch.Tensor:
    """ "normal": one mode, where responsibilities are soft and nothing can be skipped. "modes": three, as after a ReLU."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g)
    if data == "modes":
        mode = torch.randint(3, (shape[0], 1, *shape[2:]), generator=g)
        x = x + torch.randn(3, shape[1], generator=g)[mode[:, 0]].movedim(-1, 1)
    return x.contiguous(memory_format=torch.channels_last)


def training_step(layer: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    upstream = torch.randn_like(x)

    def step() -> None:
        layer(x).backward(upstream)
        x.grad = layer.weight.grad = layer.bias.grad = None

    return step


def evaluation(layer: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    for _ in range(10):  # a full history
        layer(x)
    layer.eval()

    def step() -> None:
        with torch.no_grad():
            layer(x)

    return step


def peak_memory(norm: str, shape: tuple[int, ...]) -> int:
    """Bytes by which a process grows at most during a training step (Linux).

    In a process of its own, whose allocator gives everything back at once, so that what was used before does not count.
    """
    code = f"import cpu_layer; print(cpu_layer.measure_peak({norm!r}, {shape!r}))"
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def measure_peak(norm: str, shape: tuple[int, ...]) -> int:
    step = training_step(layers(shape)[norm], images(shape, "normal"))
    for _ in range(3):
        step()

    def status(key: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024

    peaks = []
    for _ in range(5):
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = status("VmRSS")
        step()
        peaks.append(status("VmHWM") - before)
    return statistics.median(peaks)


def summary(name: str, case: str, seconds: dict[str, list[float]], base: str) -> Row:
    milliseconds = {k: sorted(1e3 * t for t in v) for k, v in seconds.items()}
    row: Row = {"benchmark": name, "case": case}
    for key, values in milliseconds.items():
        row[f"{key}_ms"] = round(statistics.median(values), 3)
        row[f"{key}_p20"], row[f"{key}_p80"] = (round(values[int(len(values) * q)], 3) for q in (0.2, 0.8))
    other = next(k for k in seconds if k != base)
    row["ratio"] = round(statistics.median(milliseconds[other]) / statistics.median(milliseconds[base]), 2)
    return row


def layers(shape: tuple[int, ...]) -> dict[str, nn.Module]:
    return {"batch": nn.BatchNorm2d(shape[1]), "mixture": mixnorm.MixtureNorm2d(shape[1], num_components=3, em_iters=2)}


def run_layers() -> list[Row]:
    rows = []
    for data in ("normal", "modes"):
        for shape in SHAPES:
            x, case = images(shape, data), f"{'x'.join(map(str, shape))} {data}"
            steps = {name: training_step(layer, x) for name, layer in layers(shape).items()}
            rows.append(summary("training step", case, alternate(steps), "batch"))
            if data == "normal":
                peak = {name: peak_memory(name, shape) for name in steps}
                input_bytes = x.numel() * x.element_size()
                rows[-1]["extra_memory"] = round((peak["mixture"] - peak["batch"]) / input_bytes, 2)
            steps = {name: evaluation(layer, x) for name, layer in layers(shape).items()}
            rows.append(summary("evaluation", case, alternate(steps), "batch"))
    return rows


def scikit_learn_fit(x: np.ndarray) -> GaussianMixture:
    """The same steps as em_iters=2: greedy k-means++, one Lloyd iteration, the mixture of its clusters, one EM iteration."""
    labels = KMeans(3, n_init=1, max_iter=1, algorithm="lloyd", random_state=0).fit(x).labels_
    parts = [x[labels == k] for k in range(3)]
    return GaussianMixture(
        3, covariance_type="diag", max_iter=1, tol=0, weights_init=[len(p) / len(x) for p in parts],
        means_init=[p.mean(0) for p in parts], precisions_init=[1 / p.var(0) for p in parts],
    ).fit(x)  # fmt: skip


def run_fit() -> Row:
    x = torch.randn(16384, 128, generator=torch.Generator().manual_seed(0))
    x[::3] += 1
    array = x.numpy()
    functions = {
        "scikit_learn": lambda: scikit_learn_fit(array),
        "mixnorm": lambda: mixnorm.gmm.fit_mixture(x, 3, em_iters=2),
    }
    return summary("fit", "16384x128, K = 3", alternate(functions, rounds=3, repeats=4), "scikit_learn")


def environment() -> Row:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine(), "commit": commit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    rows = [*run_layers(), run_fit()]
    print(f"{'benchmark':<15}{'case':<24}{'base ms':>9}{'ours ms':>9}{'ratio':>7}{'extra memory (inputs)':>24}")
    for row in rows:
        base, ours = (
            row[f"{key}_ms"] for key in (("batch", "mixture") if "batch_ms" in row else ("scikit_learn", "mixnorm"))
        )
        print(f"{row['benchmark']:<15}{row['case']:<24}{base:>9}{ours:>9}{row['ratio']:>7}{row.get('extra_memory', ''):>24}")
    if arguments.csv:
        rows = [{**row, **environment()} for row in rows]
        names = list(dict.fromkeys(name for row in rows for name in row))
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
