"""What is measured: every case as data. A case is one group of variants that are timed side by side, in turns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

BENCHMARKS = {
    "layer": "Forward and backward of one layer.",
    "cost": "The paper's cost table: whole training steps of DenseNet with its last norm replaced.",
    "inference": "Evaluation of one layer, with a full history of ten batches.",
    "fit": "The fit of a mixture alone; on a CPU beside scikit-learn.",
    "scaling": "Forward and backward of one layer against the points, the channels and the components.",
    "memory": "Peak memory of a training step of one layer.",
    "models": "Training steps and evaluations of whole models, with mixture norm in all places.",
    "start": "What a new process with empty caches takes until a model trains, as it is and with torch.compile.",
}
LAYOUTS = ("channels_last", "contiguous")
MODES = {"graph": "inside a CUDA graph", "eager": "eager", "compiled": "with torch.compile", "cpu": "eager, on a CPU"}
COMPONENTS = (1, 2, 3, 5, 8)


@dataclass(frozen=True)
class Case:
    """One group of variants that are timed side by side.

    Args:
        benchmark: one of ``BENCHMARKS``.
        shape: of the norm's input, (N, C, H, W); for the fit, (m, D); for models, of the images.
        components: the K of the mixture norms beside the one batch norm.
        dtype: "fp32" or "bf16".
        layout: "channels_last" or "contiguous".
        mode: "graph" or "eager" on a GPU, "cpu" elsewhere; "compiled" is with torch.compile, for models, and for
            "start" torch.compile as well.
        data: "modes", three modes as after a ReLU; "normal", one, where all responsibilities are soft.
        series: for "scaling", what grows: "m", "C" or "K"; for models, "training" or "evaluation"; for a layer, what is
            special about it: "relu", with the ReLU inside, beside batch norm and a ReLU behind it; in evaluation also
            "steady", that inference, and "distilled", the one mixture of ``mixnorm.distill``.
        depth: for "cost", the layers of the DenseNet.
        model: for "models" and "start", its name.
        forms: for both, what is timed beside batch norm: of ``whole.models.FORMS``, or a norm such as "ghost-32".
    """

    benchmark: str
    shape: tuple[int, ...]
    components: tuple[int, ...] = (3,)
    dtype: str = "fp32"
    layout: str = "channels_last"
    mode: str = "graph"
    data: str = "modes"
    series: str = ""
    depth: int = 0
    em_iters: int = 2
    model: str = ""
    forms: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        if self.model:
            return f"{self.model}-b{self.shape[0]}"
        return f"densenet{self.depth}-b{self.shape[0]}" if self.depth else "x".join(map(str, self.shape))

    @property
    def channels(self) -> int:
        return self.shape[1]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def points(self) -> int:
        """m, the points that the norm sees."""
        return self.numel // self.channels

    def __str__(self) -> str:
        parts = [self.benchmark, self.series, self.name, self.dtype, self.mode]
        parts += [self.layout] if self.layout != "channels_last" else []
        parts += [self.data] if self.data != "modes" else []
        return " ".join(part for part in parts if part)


# Shape, dtype, and whether the eager mode is measured too: where a launch costs more than the work.
GPU_LAYERS = [
    ((256, 128, 8, 8), "fp32", True),
    ((256, 128, 8, 8), "bf16", True),
    ((64, 448, 8, 8), "fp32", True),
    ((256, 128, 16, 16), "fp32", False),
    ((256, 64, 32, 32), "bf16", False),
    ((256, 256, 56, 56), "fp32", False),
    ((256, 256, 56, 56), "bf16", False),
]
INFERENCE_SERIES = ("", "relu", "steady", "distilled")
CPU_LAYERS = [(64, 128, 8, 8), (64, 448, 8, 8), (64, 64, 32, 32)]
REALISTIC = (64, 64, 16, 16)  # as in a residual network on CIFAR
TOY = 50_000  # numbers in a tensor: below, a step is a few calls, and its time theirs
FITS = [(4096, 128), (1024, 448), (4096, 256)]
SCIKIT_LEARN_FIT = (16384, 128)
# Depth, batch and channels of the paper's table; its "20 layers" are 19 here: 5 a block.
COST = [(19, 64, 196), (40, 64, 448), (40, 128, 448)]


# For bench models. A neighbour that is cheap, the forms of mixture norm, and those whose evaluation is not another's.
FORMS = ("ghost-32", "paper", "relu", "ahead", "gated")
EVALUATED = ("paper", "relu", "gated")
COMPILED = ("gated",)  # a compilation takes long, and this is the form that who compiles has
GPU_MODELS = {"cifar-cnn": (256, 3, 32, 32), "resnet-18": (256, 3, 32, 32), "resnet-50": (128, 3, 224, 224)}
CPU_MODELS = {"cifar-cnn": (32, 3, 32, 32), "resnet-18": (16, 3, 32, 32)}
# For bench start: images, and whether torch.compile is measured, too.
GPU_STARTS = (
    ("cifar-cnn", (256, 3, 32, 32), False),
    ("resnet-18", (256, 3, 32, 32), True),
    ("inception-v3", (64, 3, 32, 32), True),
)
CPU_STARTS = (
    ("cifar-cnn", (32, 3, 32, 32), False),
    ("resnet-18", (16, 3, 32, 32), True),
    ("inception-v3", (8, 3, 32, 32), True),
)


def model_cases(
    models: Mapping[str, tuple[int, ...]], dtype: str, series: str, mode: str, forms: tuple[str, ...]
) -> list[Case]:
    return [
        Case("models", shape, dtype=dtype, mode=mode, series=series, model=model, forms=forms)
        for model, shape in models.items()
    ]


def start_cases(models: Sequence[tuple[str, tuple[int, ...], bool]], dtype: str, mode: str) -> list[Case]:
    return [
        Case("start", shape, dtype=dtype, mode="compiled" if torch_compile else mode, model=model, forms=COMPILED)
        for model, shape, torch_compile in models
    ]


def gpu_cases() -> list[Case]:
    cases = []
    for shape, dtype, small in GPU_LAYERS:
        modes = ("graph", "eager") if small else ("graph",)
        cases += [Case("layer", shape, COMPONENTS, dtype, mode=mode) for mode in modes]
        cases += [Case("layer", shape, (3,), dtype, series="relu")]
    for mode in ("graph", "eager"):
        cases += [Case("cost", (batch, c, 8, 8), (2, 3, 4, 5), mode=mode, depth=depth) for depth, batch, c in COST]
    for series in INFERENCE_SERIES:
        cases += [Case("inference", shape, (3,), dtype, series=series) for shape, dtype, _ in GPU_LAYERS]
    cases += [Case("fit", shape, (2, 3, 5, 8), mode=mode) for shape in FITS for mode in ("graph", "eager")]
    cases += [Case("scaling", (n, 64, 32, 32), (3,), series="m") for n in (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192)]
    cases += [Case("scaling", (256, c, 16, 16), (3,), series="C") for c in (16, 32, 64, 128, 256, 512, 1024, 2048)]
    cases += [Case("scaling", (256, 64, 32, 32), (1, 2, 3, 5, 8, 12, 16), series="K")]
    cases += [Case("memory", shape, (3, 8), dtype, mode="eager") for shape, dtype, _ in GPU_LAYERS]
    for mode in ("graph", "eager"):
        cases += model_cases(GPU_MODELS, "bf16", "training", mode, FORMS)
    cases += model_cases(GPU_MODELS, "bf16", "evaluation", "graph", EVALUATED)
    cases += model_cases(GPU_MODELS, "bf16", "training", "compiled", COMPILED)  # last, because they take long
    return cases + start_cases(GPU_STARTS, "bf16", "eager")


def cpu_cases() -> list[Case]:
    cases = [Case("layer", shape, (3,), data="normal") for shape in CPU_LAYERS]
    cases += [Case("layer", shape, COMPONENTS) for shape in CPU_LAYERS]
    cases += [Case("layer", shape, (3,), series="relu") for shape in CPU_LAYERS]
    cases += [Case("cost", (64, 196, 8, 8), (3,), depth=19)]
    cases += [Case("inference", shape, (3,), data="normal") for shape in CPU_LAYERS]
    for series in INFERENCE_SERIES:
        cases += [Case("inference", shape, (3,), series=series) for shape in CPU_LAYERS]
    cases += [Case("fit", SCIKIT_LEARN_FIT, (3,)), *(Case("fit", shape, (2, 3, 5, 8)) for shape in FITS)]
    cases += [Case("scaling", (n, 64, 32, 32), (3,), series="m") for n in (1, 4, 16, 64, 256)]
    cases += [Case("scaling", (64, c, 8, 8), (3,), series="C") for c in (16, 64, 256, 1024)]
    cases += [Case("scaling", (64, 64, 32, 32), COMPONENTS, series="K")]
    cases += [Case("memory", shape, (3,), data="normal") for shape in CPU_LAYERS]
    cases = [replace(case, mode="cpu") for case in cases]
    cases += model_cases(CPU_MODELS, "fp32", "training", "cpu", ("ghost-32", *EVALUATED))
    cases += model_cases(CPU_MODELS, "fp32", "training", "compiled", COMPILED)
    return cases + start_cases(CPU_STARTS, "fp32", "cpu")


def quick_cases(device: str) -> list[Case]:
    """A few seconds of each: of a layer at a size that trainings have, so that its ratio means something, and of the others
    at the smallest that runs."""
    modes = ("cpu",) if device == "cpu" else ("graph", "eager")
    small = (8, 16, 4, 4)
    cases = []
    for mode in modes:
        dtypes = ("fp32",) if device == "cpu" else ("fp32", "bf16")
        cases += [Case("layer", REALISTIC, (1, 3), dtype, mode=mode) for dtype in dtypes]
        cases += [Case("cost", (4, 52, 8, 8), (2,), mode=mode, depth=7)]
        cases += [Case("inference", REALISTIC, (3,), mode=mode)]
        cases += [Case("fit", (256, 16), (2, 3), mode=mode)]
    cases += [Case("scaling", (n, 8, 4, 4), (3,), mode=modes[0], series="m") for n in (2, 8, 32)]
    cases += [Case("scaling", (8, c, 4, 4), (3,), mode=modes[0], series="C") for c in (4, 16, 64)]
    cases += [Case("scaling", small, (1, 2, 4), mode=modes[0], series="K")]
    cases += [Case("memory", (8, 16, 32, 32), (3,), mode=modes[-1])]
    tiny: dict[str, tuple[int, ...]] = {"digits-cnn": (64, 1, 8, 8)}
    for mode in modes:
        cases += model_cases(tiny, dtypes[-1], "training", mode, FORMS)
    cases += model_cases(tiny, dtypes[-1], "evaluation", modes[0], EVALUATED)
    return cases + start_cases([(*item, False) for item in tiny.items()], dtypes[-1], modes[-1])


def all_cases(device: str, *, quick: bool = False, layouts: Sequence[str] = ("channels_last",)) -> list[Case]:
    """Every case of a device ("cuda" or "cpu"). Layouts are those of "layer", "inference" and "memory"."""
    cases = quick_cases(device) if quick else gpu_cases() if device == "cuda" else cpu_cases()
    fixed = [case for case in cases if case.benchmark in ("fit", "cost", "scaling", "models", "start")]
    free = [case for case in cases if case not in fixed]
    wanted = [replace(case, layout=layout) for layout in layouts for case in free] + fixed
    return sorted(wanted, key=lambda case: list(BENCHMARKS).index(case.benchmark))


def select(cases: Sequence[Case], terms: Iterable[str]) -> list[Case]:
    """The cases that fit all terms: a benchmark, a case's name, a dtype, mode, layout, kind of data, series, form, or "K=3".

    Terms of one kind are alternatives. A term that fits nothing is a ValueError with the choices.
    """
    kinds = ("benchmark", "name", "model", "dtype", "mode", "layout", "data", "series")
    choices = {kind: list(dict.fromkeys(getattr(c, kind) for c in cases if getattr(c, kind))) for kind in kinds}
    choices["form"] = list(dict.fromkeys(form for case in cases for form in case.forms))
    choices["K"] = [f"K={k}" for k in sorted({k for case in cases for k in case.components})]
    wanted: dict[str, list[str]] = {}
    for term in terms:
        kind = next((kind for kind, names in choices.items() if term in names), None)
        if kind is None:
            known = "; ".join(", ".join(names) for names in choices.values() if names)
            raise ValueError(f"{term!r} matches no case here: choose from {known}")
        wanted.setdefault(kind, []).append(term)
    components = [int(term.removeprefix("K=")) for term in wanted.pop("K", choices["K"])]
    forms = wanted.pop("form", None)
    found = [
        replace(
            case,
            components=tuple(k for k in case.components if k in components),
            forms=tuple(form for form in case.forms if forms is None or form in forms),
        )
        for case in cases
        if all(getattr(case, kind) in names for kind, names in wanted.items())
    ]
    found = [case for case in found if case.components and (case.forms or forms is None)]
    if not found:
        raise ValueError("no case fits all of these at once: leave one of them out")
    return found
