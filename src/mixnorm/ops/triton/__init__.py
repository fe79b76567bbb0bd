"""The kernels for a GPU, in Triton: what ``backend="auto"`` uses there.

With ``TRITON_INTERPRET=1`` in the environment they run on a CPU, slowly, for tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mixnorm.ops.autograd import FastKernels, ReferenceTransform
from mixnorm.ops.fit import Options
from mixnorm.ops.kernels import Form, History, Kernels, Mixture, Parameters
from mixnorm.ops.triton import evaluation, fit, gradient, queue, statistics, tiles, transform

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_COMPONENTS = 16
MAX_MIXTURES = 65535

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton, too, looks when a kernel is defined


class TritonKernels(FastKernels):
    """Triton kernels for points in any memory layout, computing in fp32."""

    name = "triton"
    modes = ("ensemble",)
    counts = True

    def for_fit(self) -> Kernels:
        return TRITON_FIT

    def obstacle(self, points: Tensor, components: int) -> str | None:
        batch, outer, inner, dim = points.shape
        if points.device.type != "cuda" and not INTERPRETED:
            return f"the input is on {points.device.type!r}, not on a GPU"
        if points.dtype not in DTYPES:
            return f"the input has dtype {points.dtype}, not float32, float16 or bfloat16"
        if not torch.compiler.is_compiling() and points.is_neg():
            return "the input is lazily negated, as the imaginary part of a conjugate is"
        if dim > tiles.MAX_DIM:
            return f"the points have {dim} dimensions, more than {tiles.MAX_DIM}"
        if components > MAX_COMPONENTS:
            return f"{components} components are more than {MAX_COMPONENTS}"
        if batch > MAX_MIXTURES:
            return f"{batch} mixtures are more than {MAX_MIXTURES}, which a grid holds"
        if outer * inner * components >= 2**31:
            return f"{outer * inner} points with {components} components are more than 32 bits count"
        return None

    def sample_and_fit(
        self, points: Tensor, size: int, draws: Any, components: int, options: Options
    ) -> tuple[Tensor, Mixture]:
        sample, found = fit.sample_and_fit(points, size, draws, components, *options)
        return sample, Mixture(*found)

    def em(self, sample: Tensor, start: Mixture, iterations: int, options: Options) -> Mixture:
        return Mixture(*fit.em(sample, start, iterations, options.min_variance, options.min_weight))

    def em_step(self, points: Tensor, mixture: Mixture) -> tuple[Tensor, Mixture]:
        resp, found = statistics.em_step(points, mixture)
        return resp, Mixture(*found)

    def moments(self, points: Tensor, resp: Tensor) -> Mixture:
        return Mixture(*statistics.moments(points, _planar(resp)))

    def mix(
        self, points: Tensor, resp: Tensor, mixture: Mixture, parameters: Parameters, form: Form, out: Tensor | None = None
    ) -> Tensor:
        return transform.mix(points, _planar(resp), _contiguous(mixture), _dense(parameters), form, out)

    def mix_backward(
        self,
        grad: Tensor,
        points: Tensor,
        resp: Tensor,
        mixture: Mixture,
        parameters: Parameters,
        form: Form,
        over_ranks: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor | None, ...]:
        grad = grad.resolve_neg()  # of an output that goes into a complex number and its conjugate
        given = (grad, points, _planar(resp), _contiguous(mixture), _dense(parameters), form)
        return gradient.mix_backward(*given, over_ranks)

    def evaluate(self, points: Tensor, history: History, parameters: Parameters, form: Form) -> Tensor:
        return evaluation.inference(points, history, _dense(parameters), form)

    def push(self, queues: Mixture, newest: Mixture, tracked: Tensor) -> None:
        # load_state_dict(assign=True) takes queues as they lie in memory.
        if all(t.is_contiguous() for t in queues):
            queue.push(queues, newest, tracked)
            torch.autograd.graph.increment_version(queues)
        else:
            super().push(queues, newest, tracked)

    def slot_weights(self, weights: Tensor, decay: float) -> tuple[Tensor, Tensor]:
        return queue.slot_weights(weights, decay)


class _FitOnly(ReferenceTransform, TritonKernels):
    name = "triton-fit"


TRITON, TRITON_FIT = TritonKernels(), _FitOnly()


def _planar(resp: Tensor) -> Tensor:
    """ν (B, m, K) in memory as (B, K, m) in fp32."""
    if resp.dtype == torch.float32 and resp.mT.is_contiguous():  # as the kernels made it
        return resp
    return resp.float().mT.contiguous().mT


def _dense(parameters: Parameters) -> Parameters:
    """Parameters as the kernels read them: one number after the other."""
    if all(p is None or p.is_contiguous() for p in parameters):
        return parameters
    return Parameters(*(None if p is None else p.contiguous() for p in parameters))


def _contiguous(mixture: Mixture) -> Mixture:
    weights, means, variances = mixture
    return Mixture(weights.contiguous(), means.contiguous(), variances.contiguous())
