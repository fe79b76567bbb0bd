"""What is timed: the inputs of a case, and for each variant a function without arguments that does the work once.

A step reads nothing back from the GPU and leaves nothing behind, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mixnorm import MixtureNorm2d, convert, distill
from mixnorm.gmm import fit_mixture
from mixnorm_lab.bench.cases import Case
from mixnorm_lab.bench.whole import models as whole_models
from mixnorm_lab.internals import check_backend
from mixnorm_lab.models.densenet import DenseNet

Step = Callable[[], None]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HISTORY = 10
NUM_CLASSES = 100


@dataclass(frozen=True)
class Variant:
    """``name`` is "batch_norm", "scikit_learn", a norm such as "ghost-32", or the backend of mixture norm: "triton",
    "compiled" or "reference". ``form`` is one of ``whole.models.FORMS``, for models."""

    name: str
    num_components: int | None = None
    form: str = ""

    @property
    def is_mixture(self) -> bool:
        return self.num_components is not None and self.name != "scikit_learn"

    @property
    def label(self) -> str:
        """What the column ``variant`` says."""
        return f"{self.name} {self.form}".rstrip()

    @property
    def backend(self) -> str:
        """What a layer is asked for. "auto" finds the compiled loops; the others are named, so that the label is true."""
        return "auto" if self.name == "compiled" else self.name

    def __str__(self) -> str:
        return self.label if self.num_components is None else f"{self.label} K={self.num_components}"


def backend_in_use(device: str, backend: str) -> str:
    """The implementation that "auto" stands for on this device; others as they are, after a check that they can run."""
    check_backend(backend)
    if backend == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("--backend triton cannot run on a CPU: use auto")
    if backend != "auto":
        return backend
    if device == "cpu":
        return "compiled" if importlib.util.find_spec("numba") else "reference"
    try:
        check_backend("triton")
    except RuntimeError:
        return "reference"
    return "triton"


def make_inputs(case: Case, device: str) -> tuple[Tensor, ...]:
    """What all variants of a case share.

    "cost" and "models": images (N, C, H, W) and labels (N,); "fit": points (m, D); others: x and the upstream gradient,
    (N, C, H, W).
    """
    generator = torch.Generator(device).manual_seed(0)
    if case.benchmark in ("cost", "models"):
        shape = case.shape if case.model else (case.shape[0], 3, 32, 32)
        classes = whole_models.num_classes(case.model) if case.model else NUM_CLASSES
        images = torch.randn(*shape, device=device, generator=generator)
        labels = torch.randint(classes, shape[:1], device=device, generator=generator)
        return images.contiguous(memory_format=torch.channels_last), labels
    if case.benchmark == "fit":
        return (points(*case.shape, data=case.data, device=device, generator=generator),)
    n, c, h, w = case.shape
    x = points(n * h * w, c, data=case.data, device=device, generator=generator)
    x = x.view(n, h, w, c).permute(0, 3, 1, 2).to(DTYPES[case.dtype])
    if case.layout == "contiguous":
        x = x.contiguous()
    return x.requires_grad_(), torch.randn_like(x)


def points(count: int, channels: int, *, data: str, device: str, generator: torch.Generator) -> Tensor:
    """(count, channels), never zeros: "normal" has one mode, "modes" three, as an activation after a ReLU."""
    x = torch.randn(count, channels, device=device, generator=generator)
    if data == "modes":
        centers = torch.randn(3, channels, device=device, generator=generator)
        x += centers[torch.randint(3, (count,), device=device, generator=generator)]
    return x


def make_step(case: Case, variant: Variant, inputs: tuple[Tensor, ...]) -> Step:
    if case.benchmark == "cost":
        return model_step(case, variant, *inputs)
    if case.benchmark == "models":
        return whole_model_step(case, variant, *inputs)
    if case.benchmark == "fit":
        return fit_step(case, variant, *inputs)
    if case.benchmark == "inference":
        return evaluation(after_training(case, make_norm(case, variant, inputs[0].device), inputs[0]), inputs[0])
    return training_step(make_norm(case, variant, inputs[0].device), *inputs)


def make_norm(case: Case, variant: Variant, device: torch.device) -> nn.Module:
    with_relu = case.series == "relu"
    if not variant.is_mixture:
        norm = nn.BatchNorm2d(case.channels, device=device)
        return nn.Sequential(norm, nn.ReLU()) if with_relu else norm
    assert variant.num_components is not None
    return MixtureNorm2d(
        case.channels,
        device=device,
        num_components=variant.num_components,
        em_iters=case.em_iters,
        history=HISTORY,
        activation="relu" if with_relu else None,
        inference="steady" if case.series == "steady" else "ensemble",
        backend=cast(Any, variant.backend),  # checked when the option was read
    )


def training_step(norm: nn.Module, x: Tensor, upstream: Tensor) -> Step:
    """Forward, and backward to the input, γ and β. The gradients are returned, not accumulated: no step sees the last."""
    wanted = (x, *norm.parameters())

    def step() -> None:
        torch.autograd.grad(norm(x), wanted, upstream)

    return step


def evaluation(norm: nn.Module, x: Tensor) -> Step:
    def step() -> None:
        with torch.no_grad():
            norm(x)

    return step


def after_training(case: Case, norm: nn.Module, x: Tensor) -> nn.Module:
    """The norm in evaluation mode, after as many training steps as the history holds."""
    norm.train()
    with torch.no_grad():
        for _ in range(HISTORY):
            norm(x)
    if case.series == "distilled" and isinstance(norm, MixtureNorm2d):
        distill(norm)
    return norm.eval()


def model_step(case: Case, variant: Variant, images: Tensor, labels: Tensor) -> Step:
    """A training step of DenseNet as in the paper, but with a lower rate, because one batch is repeated."""
    torch.manual_seed(0)
    model = DenseNet(case.depth, 12, NUM_CLASSES)
    if variant.is_mixture:
        options: Any = {"num_components": variant.num_components, "em_iters": case.em_iters, "backend": variant.backend}
        convert(model, "last_norm", form="paper", **options)
    assert model.last_norm.num_features == case.channels
    return whole_models.training(model, images, labels, rate=0.01)


def whole_model_step(case: Case, variant: Variant, images: Tensor, labels: Tensor) -> Step:
    """A training step or an evaluation of a model with the variant in place of all its batch norms."""
    model = whole_models.build(case.model, case.shape[1:])
    if variant.is_mixture:
        options: Any = {"num_components": variant.num_components, "em_iters": case.em_iters, "backend": variant.backend}
        whole_models.with_mixture_norms(model, case.model, variant.form, history=HISTORY, **options)
    elif variant.name != "batch_norm":
        whole_models.with_norm(model, variant.name)
    bf16 = case.dtype == "bf16"
    if case.series == "evaluation":
        return whole_models.evaluation(model, images, history=HISTORY, bf16=bf16)
    return whole_models.training(model, images, labels, bf16=bf16, torch_compile=case.mode == "compiled")


def fit_step(case: Case, variant: Variant, sample: Tensor) -> Step:
    k = variant.num_components
    assert k is not None
    if variant.name == "scikit_learn":
        from mixnorm_lab.bench.scikit_learn import fit

        array = sample.numpy()
        return lambda: fit(array, k)

    def step() -> None:
        fit_mixture(sample, k, em_iters=case.em_iters, backend=variant.backend)

    return step
