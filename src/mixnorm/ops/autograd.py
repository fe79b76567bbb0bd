"""The two operations with a gradient of their own: the transform of a batch, and evaluation.

Each serves every faster implementation, and the transform serves statistics over ranks as well. Compilers see the
same kernels as operators (``library``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mixnorm.ops import reference
from mixnorm.ops.choose import REFERENCE, is_followed
from mixnorm.ops.kernels import Form, History, Kernels, Mixture, Parameters, gradients, rows

LEARNED = len(Parameters._fields)


class Transform(torch.autograd.Function):
    """The transform of points under ν and its statistics. Gradients flow to points and parameters, also through μ and σ².

    With ``ranks`` the statistics are of all ranks' points. The gradient of the points is then that of all ranks' losses
    together; those of the parameters are this rank's share, as DistributedDataParallel expects them.
    """

    @staticmethod
    def forward(
        points: Tensor,
        resp: Tensor,
        weights: Tensor,
        means: Tensor,
        variances: Tensor,
        *rest: Any,  # the parameters; then kernels, form and ranks
    ) -> Tensor:
        if points.numel() == 0:
            return torch.empty_like(points)
        parameters, (kernels, form, _) = Parameters(*rest[:LEARNED]), rest[LEARNED:]
        y = kernels.mix(points, resp, Mixture(weights, means, variances), parameters, form)
        # A function's view could not be changed in place.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[: 5 + LEARNED])
        ctx.kernels, ctx.form, ctx.ranks = inputs[5 + LEARNED :]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        points, resp, weights, means, variances, *rest = ctx.saved_tensors
        mixture, parameters, wanted = Mixture(weights, means, variances), Parameters(*rest), ctx.needs_input_grad
        if ctx.ranks is not None:
            found = _over_ranks(ctx, grad, points, resp, mixture, parameters)
        elif torch.is_grad_enabled() or is_followed(grad):  # a gradient of the gradient, or many at once: the reference's
            with torch.enable_grad():
                y = reference.normalize(rows(points, resp.dtype), resp, parameters, ctx.form)
            found = gradients(y, (points, *parameters), (wanted[0], *wanted[5 : 5 + LEARNED]), grad)
        else:
            found = ctx.kernels.mix_backward(grad, points, resp, mixture, parameters, ctx.form)
        return _of_inputs(found, wanted, parameters, others=3)


@once_differentiable
def _over_ranks(ctx: Any, grad: Tensor, points: Tensor, resp: Tensor, mixture: Mixture, parameters: Parameters) -> Any:
    count, ranks = points.shape[1] * points.shape[2], ctx.ranks

    def add_up(lines: Tensor) -> None:
        """∂L/∂μ_k / n_k and 2·∂L/∂σ²_k / n_k, from this rank's loss and points to those of all."""
        lines.mul_(count)
        ranks.add_up(lines)
        lines.div_(ranks.total)

    kernels = ctx.kernels if count else REFERENCE  # a rank without points only takes part in the sum
    over_ranks = add_up if ctx.needs_input_grad[0] else None
    return kernels.mix_backward(grad, points, resp, mixture, parameters, ctx.form, over_ranks)


class Evaluate(torch.autograd.Function):
    """Evaluation under T mixtures, for models that are tuned with frozen statistics. Gradients stop at the posterior."""

    @staticmethod
    def forward(
        points: Tensor,
        weights: Tensor,
        means: Tensor,
        variances: Tensor,
        tau: Tensor,
        *rest: Any,  # the parameters; then mode, bounded, kernels and form
    ) -> Tensor:
        mode, bounded, kernels, form = rest[LEARNED:]
        history = History(weights, means, variances, tau, mode, bounded)
        return kernels.evaluate(points, history, Parameters(*rest[:LEARNED]), form)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[: 5 + LEARNED])
        ctx.mode, ctx.bounded, ctx.kernels, ctx.form = inputs[5 + LEARNED :]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        points, *saved = ctx.saved_tensors
        weights, means, variances, tau = saved[:4]
        history, parameters = History(weights, means, variances, tau, ctx.mode, ctx.bounded), Parameters(*saved[4:])
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled() or is_followed(grad):
            with torch.enable_grad():
                y = Kernels.inference(ctx.kernels, points, history, parameters, ctx.form)
            found = gradients(y, (points, *parameters), (wanted[0], *wanted[5 : 5 + LEARNED]), grad)
        else:
            found = ctx.kernels.inference_backward(grad, points, history, parameters, ctx.form)
        return _of_inputs(found, wanted, parameters, others=4)


class FastKernels(Kernels):
    """What the faster implementations share: their transform and evaluation have gradients of their own."""

    def transform(self, points: Tensor, mixture: Mixture, parameters: Parameters, form: Form) -> tuple[Tensor, Mixture]:
        with torch.no_grad():
            resp, found = self.em_step(points.detach(), mixture)
        return Transform.apply(points, resp, *found, *parameters, self, form, None), found

    def normalize(self, points: Tensor, resp: Tensor, parameters: Parameters, form: Form) -> Tensor:
        with torch.no_grad():
            found = self.moments(points.detach(), resp)
        return Transform.apply(points, resp, *found, *parameters, self, form, None)

    def inference(self, points: Tensor, history: History, parameters: Parameters, form: Form) -> Tensor:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (points, *parameters)):
            return Evaluate.apply(points, *history[:4], *parameters, *history[4:], self, form)
        return self.evaluate(points, history, parameters, form)

    def moments(self, points: Tensor, resp: Tensor) -> Mixture:
        """λ, μ and σ² of the points under ν."""
        raise NotImplementedError

    def evaluate(self, points: Tensor, history: History, parameters: Parameters, form: Form) -> Tensor:
        """:meth:`inference` without a gradient."""
        raise NotImplementedError


class ReferenceTransform(FastKernels):
    """Put before faster kernels, it leaves them the fit and the posterior, and takes the transform from the reference."""

    normalize = Kernels.normalize
    mix = Kernels.mix
    mix_backward = Kernels.mix_backward

    def transform(self, points: Tensor, mixture: Mixture, parameters: Parameters, form: Form) -> tuple[Tensor, Mixture]:
        with torch.no_grad():
            resp, found = self.em_step(points.detach(), mixture)
        return self.normalize(points, resp, parameters, form), found


def _of_inputs(found: Any, wanted: Any, parameters: Parameters, others: int) -> tuple[Any, ...]:
    """The gradients of all inputs: points, four tensors without one, parameters in their own dtype, and so many others."""
    of_points, *of_parameters = found
    cast = [None if p is None or g is None else g.to(p.dtype) for g, p in zip(of_parameters, parameters, strict=True)]
    return (of_points if wanted[0] else None), None, None, None, None, *cast, *[None] * others
