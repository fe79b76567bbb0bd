"""The kernels as PyTorch operators, with shapes and gradients that ``torch.compile`` knows.

A compiled model calls these, and they call the kernels that were chosen when it was traced: the same code as without a
compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd

from mixnorm.ops.autograd import FastKernels, ReferenceTransform
from mixnorm.ops.choose import REFERENCE, in_backward
from mixnorm.ops.fit import Options
from mixnorm.ops.kernels import FORM_CHOICES, Form, History, Kernels, Look, Mixture, Parameters, compute_dtype

Four = tuple[Tensor, Tensor, Tensor, Tensor]
# Points are taken as they lie in memory. Inductor's convolutions put channels last, and otherwise each operator would get a
# copy with the strides that were traced.
ANY_STRIDES = torch.Tag.flexible_layout


class Operators(Kernels):
    """The kernel interface for a compiler: what changes a layer's state, or is no plain PyTorch, goes through operators."""

    def __init__(self, kernels: Kernels) -> None:
        self.name = kernels.name
        self.plain = not isinstance(kernels, FastKernels)  # PyTorch's own operations, which the compiler may fuse
        self.plain_transform = self.plain or isinstance(kernels, ReferenceTransform)

    def sample_and_fit(
        self, points: Tensor, size: int, draws: Any, components: int, options: Options
    ) -> tuple[Tensor, Mixture]:
        sample, *found = sample_and_fit(points, size, draws, components, *options, self.name)
        return sample, Mixture(*found)

    def em(self, sample: Tensor, start: Mixture, iterations: int, options: Options) -> Mixture:
        return Mixture(*em(sample, *start, iterations, *options, self.name))

    def em_step(self, points: Tensor, mixture: Mixture) -> tuple[Tensor, Mixture]:
        resp, *found = em_step(points, *mixture, self.name)
        return resp, Mixture(*found)

    def transform_of(
        self, x: Tensor, look: Look, mixture: Mixture, parameters: Parameters, form: Form
    ) -> tuple[Tensor, Mixture]:
        points = look.points(x)
        with torch.no_grad():
            resp, found = self.em_step(points.detach(), mixture)
        if self.plain_transform:
            return look.back(self.normalize(points, resp, parameters, form), like=x), found
        # Of x, not of its points: what is kept for the gradient would be a copy of a view, and x is there anyway.
        return transform(x, resp, *found, *parameters, _numbers(form), self.name), found

    def inference(self, points: Tensor, history: History, parameters: Parameters, form: Form) -> Tensor:
        wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (points, *parameters))
        if self.plain or wanted:  # the compiler differentiates the reference itself
            return super().inference(points, history, parameters, form)
        return inference(points, *history[:4], *parameters, _numbers(form), history.mode, history.bounded, self.name)

    def push(self, queues: Mixture, newest: Mixture, tracked: Tensor) -> None:
        push(*queues, *newest, tracked, self.name)


def _numbers(form: Form) -> list[float]:
    """A form as an operator takes it: a choice is its place in FORM_CHOICES."""
    fields: Any = zip(Form._fields, form, strict=True)
    return [FORM_CHOICES[name].index(value) if name in FORM_CHOICES else value for name, value in fields]


def _form(numbers: Sequence[float]) -> Form:
    fields: Any = zip(Form._fields, numbers, strict=True)
    return Form(*(FORM_CHOICES[name][int(value)] if name in FORM_CHOICES else value for name, value in fields))


def _kernels(name: str) -> Kernels:
    """The kernels of that name, which were there when the model was traced."""
    if name.startswith("numba"):
        from mixnorm.ops.numba import NUMBA, NUMBA_FIT

        found: Kernels = NUMBA_FIT if name == NUMBA_FIT.name else NUMBA
        return REFERENCE if found.obstacle(torch.empty(0), 1) else found  # after a fork
    if name.startswith("triton"):
        from mixnorm.ops.triton import TRITON, TRITON_FIT

        return TRITON_FIT if name == TRITON_FIT.name else TRITON
    return REFERENCE


@custom_op("mixnorm::sample_and_fit", mutates_args=(), tags=ANY_STRIDES)
def sample_and_fit(
    points: Tensor,
    size: int,
    draws: Tensor,
    num_components: int,
    lloyd_iters: int,
    em_iters: int,
    min_variance: float,
    min_weight: float,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = Options(lloyd_iters, em_iters, min_variance, min_weight)
    sample, mixture = _kernels(kernels).sample_and_fit(points, size, draws, num_components, options)
    return sample.clone() if size == points.shape[1] * points.shape[2] else sample, *mixture


@sample_and_fit.register_fake
def _(points: Tensor, size: int, draws: Tensor, num_components: int, *_: Any, **__: Any) -> Four:
    batch, dim = points.shape[0], points.shape[3]
    new = points.new_empty
    dtype = compute_dtype(points.dtype)
    return (
        new(batch, size, dim, dtype=dtype),
        new(batch, num_components, dtype=dtype),
        new(batch, num_components, dim, dtype=dtype),
        new(batch, num_components, dim, dtype=dtype),
    )


@custom_op("mixnorm::em", mutates_args=())
def em(
    sample: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    iterations: int,
    lloyd_iters: int,
    em_iters: int,
    min_variance: float,
    min_weight: float,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    options = Options(lloyd_iters, em_iters, min_variance, min_weight)
    found = _kernels(kernels).em(sample, Mixture(weights, means, variances), iterations, options)
    return found.weights, found.means, found.variances


@em.register_fake
def _(sample: Tensor, weights: Tensor, means: Tensor, variances: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(weights), torch.empty_like(means), torch.empty_like(variances)


@custom_op("mixnorm::em_step", mutates_args=(), tags=ANY_STRIDES)
def em_step(
    points: Tensor, weights: Tensor, means: Tensor, variances: Tensor, kernels: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    resp, found = _kernels(kernels).em_step(points, Mixture(weights, means, variances))
    return resp.mT.contiguous().mT if _planar(points) else resp.contiguous(), *found


@em_step.register_fake
def _(points: Tensor, weights: Tensor, means: Tensor, variances: Tensor, kernels: str) -> Four:
    batch, outer, inner, _ = points.shape
    count, components = outer * inner, weights.shape[1]
    shape = (batch, components, count) if _planar(points) else (batch, count, components)
    resp = weights.new_empty(shape)
    return (
        resp.mT if _planar(points) else resp,
        torch.empty_like(weights),
        torch.empty_like(means),
        torch.empty_like(variances),
    )


def _planar(points: Tensor) -> bool:
    """Whether ν (B, m, K) lies in memory as (B, K, m), as the GPU's kernels want it."""
    return points.device.type == "cuda"


@custom_op("mixnorm::transform", mutates_args=(), tags=ANY_STRIDES)
def transform(
    x: Tensor,
    resp: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    within: Tensor | None,
    between: Tensor | None,
    deviation: Tensor | None,
    form: Sequence[float],
    kernels: str,
) -> Tensor:
    mixture, parameters = Mixture(weights, means, variances), Parameters(weight, bias, within, between, deviation)
    y = _kernels(kernels).mix(_points(x, resp), resp, mixture, parameters, _form(form))
    return _as(x, _back(y, x))


@transform.register_fake
def _(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


@custom_op("mixnorm::transform_backward", mutates_args=(), tags=ANY_STRIDES)
def transform_backward(
    grad: Tensor,
    x: Tensor,
    resp: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    within: Tensor | None,
    between: Tensor | None,
    deviation: Tensor | None,
    form: Sequence[float],
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    mixture, parameters = Mixture(weights, means, variances), Parameters(weight, bias, within, between, deviation)
    given = _points(grad, resp), _points(x, resp), resp, mixture, parameters, _form(form)
    of_points, *found = _kernels(kernels).mix_backward(*given)
    assert of_points is not None
    of_weight, of_bias, of_within, of_between, of_deviation = _gradients(x, found, parameters)
    return _as(x, _back(of_points, x)), of_weight, of_bias, of_within, of_between, of_deviation


@transform_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    resp: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    within: Tensor | None,
    between: Tensor | None,
    deviation: Tensor | None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, ...]:
    parameters = Parameters(weight, bias, within, between, deviation)
    return torch.empty_like(x), *_gradients(x, parameters, parameters)


def _points(x: Tensor, resp: Tensor) -> Tensor:
    """x (N, C, ...) as points (B, N / B, L, C): those of a batch, or of each image, whose γ and β are (C,)."""
    x = x.flatten(2) if x.dim() > 2 else x.unsqueeze(-1)
    return x.mT.unflatten(0, (resp.shape[0], -1))


def _back(points: Tensor, x: Tensor) -> Tensor:
    return points.flatten(0, 1).mT.reshape(x.shape)


@custom_op("mixnorm::inference", mutates_args=(), tags=ANY_STRIDES)
def inference(
    points: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    tau: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    within: Tensor | None,
    between: Tensor | None,
    deviation: Tensor | None,
    form: Sequence[float],
    mode: str,
    bounded: bool,
    kernels: str,
) -> Tensor:
    history = History(weights, means, variances, tau, mode, bounded)
    with torch.no_grad():
        parameters = Parameters(weight, bias, within, between, deviation)
        return _as(points, _kernels(kernels).inference(points, history, parameters, _form(form)))


@inference.register_fake
def _(points: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(points)


@custom_op("mixnorm::push", mutates_args=("weights_queue", "means_queue", "variances_queue", "tracked"))
def push(
    weights_queue: Tensor,
    means_queue: Tensor,
    variances_queue: Tensor,
    weights: Tensor,
    means: Tensor,
    variances: Tensor,
    tracked: Tensor,
    kernels: str,
) -> None:
    if in_backward():  # a checkpointed call of a compiled module is recomputed there, and has been counted
        return
    queues, newest = Mixture(weights_queue, means_queue, variances_queue), Mixture(weights, means, variances)
    _kernels(kernels).push(queues, newest, tracked)


@push.register_fake
def _(*_: Any, **__: Any) -> None:
    return None


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:10])
    ctx.options = inputs[10:]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    of_x, *found = transform_backward(grad, *saved, *ctx.options)
    of_parameters = (None if p is None else g for g, p in zip(found, saved[5:10], strict=True))
    return of_x, None, None, None, None, *of_parameters, None, None


register_autograd("mixnorm::transform", _gradient, setup_context=_save)


def _as(x: Tensor, value: Tensor) -> Tensor:
    """``value`` with the strides that ``torch.empty_like`` gives."""
    expected = torch.empty_like(x, device="meta").stride()
    return value if value.stride() == expected else torch.empty_like(x).copy_(value)


def _gradients(x: Tensor, found: Any, parameters: Parameters) -> tuple[Tensor, ...]:
    """The parameters' gradients in their own dtype; an operator returns tensors, so an empty one for none."""
    # Copies: they may be parts of one tensor, and an operator's results may not.
    return tuple(
        x.new_empty(0) if p is None else torch.empty_like(p) if g is p else g.to(p.dtype, copy=True)
        for g, p in zip(found, parameters, strict=True)
    )
