"""The two operations with a gradient of their own: the transform of a batch, and evaluation.

Each serves every faster implementation, and the transform serves statistics over ranks as well. Compilers see the
same kernels as operators (``library``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mixnorm.ops import reference
from mixnorm.ops.choose import REFERENCE, is_followed
from mixnorm.ops.kernels import AS_THEY_ARE, Form, History, Kernels, Look, Mixture, Parameters, gradients, rows, shaped

LEARNED = len(Parameters._fields)


class Work(NamedTuple):
    """What a transform does beside its tensors: how x is looked at as points, and where their ν and statistics come from.

    Args:
        posterior: ν of points, and λ, μ, σ² under it.
        found: gets those λ, μ, σ² in the forward pass.
        ranks: those whose points the statistics are of, or ``None``.
    """

    kernels: Kernels
    form: Form
    look: Look
    posterior: Callable[[Tensor], tuple[Tensor, Mixture]]
    found: list[Mixture]
    ranks: Any = None


class Transform(torch.autograd.Function):
    """The transform of x under ν and its statistics. Gradients flow to x and the parameters, also through μ and σ².

    With ``ranks`` the statistics are of all ranks' points. The gradient of x is then that of all ranks' losses together;
    those of the parameters are this rank's share, as DistributedDataParallel expects them.

    The context comes first, and there is no ``setup_context``: for that PyTorch would look up the signature in every call.
    Function transforms, which need it, get the reference.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:  # the parameters, then the work
        parameters, work = Parameters(*rest[:LEARNED]), rest[LEARNED]
        points = work.look.points(x)
        resp, found = work.posterior(points)
        work.found.append(found)
        ctx.save_for_backward(x, resp, *found, *parameters)
        ctx.work = work
        if x.numel() == 0:
            return torch.empty_like(x)
        given = points, resp, found, parameters, work.form
        # No view is returned: that of a function could not be changed in place.
        y = torch.empty_like(x)
        written = work.look.points(y)
        if written.data_ptr() == y.data_ptr():
            work.kernels.mix(*given, out=written)
            return y
        y = work.look.back(work.kernels.mix(*given), like=x)  # the points are a copy, as of a transposed image
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, resp, weights, means, variances, *rest = ctx.saved_tensors
        work, mixture, parameters = ctx.work, Mixture(weights, means, variances), Parameters(*rest)
        kernels, look, wanted = work.kernels, work.look, ctx.needs_input_grad
        if work.ranks is not None:
            of_points, *found = _over_ranks(ctx, look.points(grad), look.points(x), resp, mixture, parameters)
        elif torch.is_grad_enabled() or is_followed(grad):  # a gradient of the gradient, or many at once: the reference's
            with torch.enable_grad():
                x, parameters = _own_views(x, parameters)
                points = look.points(x)
                y = reference.normalize(rows(points, resp.dtype), resp, parameters, work.form)
                y = look.back(shaped(y, points), like=x)
            of_x, *found = gradients(y, (x, *parameters), wanted[:-1], grad)
            return of_x, *_of_parameters(found, parameters), None
        else:
            of_points, *found = kernels.mix_backward(look.points(grad), look.points(x), resp, mixture, parameters, work.form)
        of_x = look.back(of_points, like=x) if wanted[0] else None
        return of_x, *_of_parameters(found, parameters), None


@once_differentiable
def _over_ranks(ctx: Any, grad: Tensor, points: Tensor, resp: Tensor, mixture: Mixture, parameters: Parameters) -> Any:
    count, ranks = points.shape[1] * points.shape[2], ctx.work.ranks

    def add_up(lines: Tensor) -> None:
        """∂L/∂μ_k / n_k and 2·∂L/∂σ²_k / n_k, from this rank's loss and points to those of all."""
        lines.mul_(count)
        ranks.add_up(lines)
        lines.div_(ranks.total)

    kernels = ctx.work.kernels if count else REFERENCE  # a rank without points only takes part in the sum
    over_ranks = add_up if ctx.needs_input_grad[0] else None
    return kernels.mix_backward(grad, points, resp, mixture, parameters, ctx.work.form, over_ranks)


class Evaluate(torch.autograd.Function):
    """Evaluation under T mixtures, for models that are tuned with frozen statistics. Gradients stop at the posterior."""

    @staticmethod
    def forward(ctx: Any, points: Tensor, *rest: Any) -> Tensor:  # the parameters; then history, kernels and form
        parameters, (history, kernels, form) = Parameters(*rest[:LEARNED]), rest[LEARNED:]
        ctx.save_for_backward(points, *history[:4], *parameters)
        ctx.mode, ctx.bounded, ctx.kernels, ctx.form = history.mode, history.bounded, kernels, form
        y: Tensor = kernels.evaluate(points, history, parameters, form)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        points, *saved = ctx.saved_tensors
        weights, means, variances, tau = saved[:4]
        history, parameters = History(weights, means, variances, tau, ctx.mode, ctx.bounded), Parameters(*saved[4:])
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled() or is_followed(grad):
            with torch.enable_grad():
                points, parameters = _own_views(points, parameters)
                y = Kernels.inference(ctx.kernels, points, history, parameters, ctx.form)
            of_points, *found = gradients(y, (points, *parameters), wanted[:-3], grad)
        else:
            of_points, *found = ctx.kernels.inference_backward(grad, points, history, parameters, ctx.form)
        return of_points if wanted[0] else None, *_of_parameters(found, parameters), None, None, None


class FastKernels(Kernels):
    """What the faster implementations share: their transform and evaluation have gradients of their own."""

    def transform(self, points: Tensor, mixture: Mixture, parameters: Parameters, form: Form) -> tuple[Tensor, Mixture]:
        return self.transform_of(points, AS_THEY_ARE, mixture, parameters, form)

    def transform_of(
        self, x: Tensor, look: Look, mixture: Mixture, parameters: Parameters, form: Form
    ) -> tuple[Tensor, Mixture]:
        # The looks are taken inside, where autograd need not follow each of their steps.
        work = Work(self, form, look, functools.partial(self.em_step, mixture=mixture), [])
        return Transform.apply(x, *parameters, work), work.found[0]

    def normalize(self, points: Tensor, resp: Tensor, parameters: Parameters, form: Form) -> Tensor:
        given = resp.detach()
        work = Work(self, form, AS_THEY_ARE, lambda points: (given, self.moments(points, given)), [])
        y: Tensor = Transform.apply(points, *parameters, work)
        return y

    def inference(self, points: Tensor, history: History, parameters: Parameters, form: Form) -> Tensor:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (points, *parameters)):
            y: Tensor = Evaluate.apply(points, *parameters, history, self, form)
            return y
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
    transform_of = Kernels.transform_of

    def transform(self, points: Tensor, mixture: Mixture, parameters: Parameters, form: Form) -> tuple[Tensor, Mixture]:
        with torch.no_grad():
            resp, found = self.em_step(points.detach(), mixture)
        return self.normalize(points, resp, parameters, form), found


def _own_views(x: Tensor, parameters: Parameters) -> tuple[Tensor, Parameters]:
    """The same tensors to differentiate by: a hook on one of the user's would change the gradient twice."""
    return x.view_as(x), Parameters(*(None if p is None else p.view_as(p) for p in parameters))


def _of_parameters(found: Any, parameters: Parameters) -> list[Tensor | None]:
    """The gradients of the parameters in their own dtype."""
    return [None if p is None or g is None else g.to(p.dtype) for g, p in zip(found, parameters, strict=True)]
