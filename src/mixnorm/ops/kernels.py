"""The kernel interface: what a mixture norm computes, as methods of one object that a forward pass chooses once.

:class:`Kernels` is all of it in plain PyTorch. The faster implementations, ``numba`` and ``triton``, override what
they do faster.

Shapes: ``points`` is (B, outer, inner, D). The m = outer · inner points of each of the B mixtures are spread over two axes,
so that every memory layout can be looked at without a copy. ``resp`` is (B, m, K).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mixnorm.ops import fit, reference
from mixnorm.ops.fit import Options
from mixnorm.ops.reference import FORM_CHOICES, Form, History, Mixture, Parameters

__all__ = ["FORM_CHOICES", "Form", "History", "Kernels", "Mixture", "Options", "Parameters"]

INFERENCE_MODES = ("ensemble", "mixture", "paper")
compute_dtype = functools.partial(torch.promote_types, torch.float32)  # statistics are in fp32 at least
# Not torch.compiler.is_exporting, which PyTorch 2.11 answers with True in every compiled model.
is_exporting = functools.partial(getattr, torch.compiler, "_is_exporting_flag")


class Look:
    """How a tensor is looked at as points, and points as such a tensor. This one takes points as they are."""

    def points(self, x: Tensor) -> Tensor:
        return x

    def back(self, points: Tensor, like: Tensor) -> Tensor:
        """The inverse of :meth:`points`, in the shape of ``like``."""
        return points


AS_THEY_ARE = Look()


class Kernels:
    """The reference implementation of every operation. Gradients are autograd's own, so anything may look on."""

    name = "reference"
    modes: tuple[str, ...] = INFERENCE_MODES  # of inference
    counts = False  # whether a fit makes its random numbers from a seed and a counter on the device

    def for_fit(self) -> Kernels:
        """These kernels where γ and β differ from point to point: the transform is then the reference's."""
        return self

    def obstacle(self, points: Tensor, components: int) -> str | None:
        """Why these points cannot be taken, or ``None``."""
        return None

    def sample_and_fit(
        self, points: Tensor, size: int, draws: Any, components: int, options: Options
    ) -> tuple[Tensor, Mixture]:
        """``size`` of the points (B, size, D), and their mixture from k-means++, Lloyd and EM.

        ``draws`` are size + 1 uniform numbers for the sample, and ``fit.num_uniforms`` for each mixture; or, where the
        implementation ``counts``, a seed and a counter.
        """
        sample = self.sample(points, size, draws)
        return sample, self.fit(sample, components, draws[size + 1 :].view(points.shape[0], -1), options)

    def sample(self, points: Tensor, size: int, draws: Tensor) -> Tensor:
        """``size`` of the points, (B, size, D), in at least fp32."""
        batch, outer, inner, dim = points.shape
        if not is_exporting() and size == outer * inner:  # an exported graph may get more points
            return points.reshape(batch, size, dim).to(compute_dtype(points.dtype))
        return self.gather(points, fit.sample_indices(outer * inner, size, draws))

    def gather(self, points: Tensor, index: Tensor) -> Tensor:
        """The points with the given numbers, (B, count, D), in at least fp32."""
        return fit.gather(points, index).to(compute_dtype(points.dtype))

    def fit(self, sample: Tensor, components: int, uniforms: Tensor, options: Options) -> Mixture:
        """The mixture of a sample (B, s, D)."""
        return Mixture(*fit.fit(sample, components, uniforms, options))

    def em(self, sample: Tensor, start: Mixture, iterations: int, options: Options) -> Mixture:
        """EM steps from a given mixture, less the small components."""
        return Mixture(*fit.em(sample, *start, iterations, options))

    def em_step(self, points: Tensor, mixture: Mixture) -> tuple[Tensor, Mixture]:
        """ν of every point under the mixture, and λ, μ, σ² of all points under that ν."""
        resp, *found = reference.em_step(flat(points.to(mixture.means.dtype)), *mixture)
        return resp, Mixture(*found)

    def transform(self, points: Tensor, mixture: Mixture, parameters: Parameters, form: Form) -> tuple[Tensor, Mixture]:
        """The transform of the points under the posterior of a mixture, and λ, μ, σ² under that posterior."""
        x = rows(points, mixture.means.dtype)
        resp = reference.responsibilities(x.detach(), *mixture).detach()
        return self._normalize(points, x, resp, parameters, form)

    def transform_of(
        self, x: Tensor, look: Look, mixture: Mixture, parameters: Parameters, form: Form
    ) -> tuple[Tensor, Mixture]:
        """:meth:`transform` of the points that x is looked at as, in the shape of x."""
        y, found = self.transform(look.points(x), mixture, parameters, form)
        return look.back(y, like=x), found

    def normalize(self, points: Tensor, resp: Tensor, parameters: Parameters, form: Form) -> Tensor:
        """The transform of the points under given ν, which has no gradient."""
        return self._normalize(points, rows(points, resp.dtype), resp.detach(), parameters, form)[0]

    def _normalize(
        self, points: Tensor, x: Tensor, resp: Tensor, parameters: Parameters, form: Form
    ) -> tuple[Tensor, Mixture]:
        found = Mixture(*reference.moments(x, resp))
        y = reference.mix(x, resp, found.weights.detach(), *found[1:], flat_like(parameters, points), form)
        return shaped(y, points), Mixture(*(t.detach() for t in found))

    def mix(
        self, points: Tensor, resp: Tensor, mixture: Mixture, parameters: Parameters, form: Form, out: Tensor | None = None
    ) -> Tensor:
        """The transform under given ν and statistics, written to ``out`` if it is given."""
        x = flat(points.to(resp.dtype))
        y = shaped(reference.mix(x, resp, *mixture, flat_like(parameters, points), form), points)
        return y if out is None else out.copy_(y)

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
        """The gradients of the points and the parameters, where μ and σ² are the statistics of the points under ν.

        ``over_ranks`` changes ∂L/∂μ_k / n_k and 2·∂L/∂σ²_k / n_k (B, 2, K, D) in place, where those are of more points yet.
        """
        x, (weights, means, variances) = flat(points.to(resp.dtype)), mixture
        leaves: list[Any] = [None if t is None else t.detach().requires_grad_() for t in (x, means, variances, *parameters)]
        with torch.enable_grad():
            given = flat_like(Parameters(*leaves[3:]), points)
            y = reference.mix(leaves[0], resp, weights, leaves[1], leaves[2], given, form)
        found: list[Any] = gradients(y, leaves, [True] * len(leaves), grad, create_graph=False)
        grad_x, grad_means, grad_variances, *of_parameters = found
        numbers = weights.unsqueeze(-1) * max(x.shape[1], 1)
        lines = torch.stack((grad_means, 2 * grad_variances), 1) * torch.where(numbers > 0, 1 / numbers, 0).unsqueeze(1)
        if over_ranks is not None:
            over_ranks(lines)
        for k, (offset, tilt) in enumerate(zip(*(line.unbind(1) for line in lines.unbind(1)), strict=True)):
            through = offset.unsqueeze(1) + tilt.unsqueeze(1) * (x - means[:, k, None])
            grad_x = torch.addcmul(grad_x, resp[..., k, None], through)
        return shaped(grad_x, points), *of_parameters

    def inference(self, points: Tensor, history: History, parameters: Parameters, form: Form) -> Tensor:
        """The transform under T given mixtures."""
        x = rows(points, history.means.dtype)
        return shaped(reference.inference(x, history, flat_like(parameters, points), form), points)

    def inference_backward(
        self, grad: Tensor, points: Tensor, history: History, parameters: Parameters, form: Form
    ) -> list[Tensor | None]:
        """The gradients of the points and the parameters of :meth:`inference`."""
        leaves: list[Any] = [None if t is None else t.detach().requires_grad_() for t in (points, *parameters)]
        with torch.enable_grad():
            y = Kernels.inference(self, leaves[0], history, Parameters(*leaves[1:]), form)
        return gradients(y, leaves, [True] * len(leaves), grad, create_graph=False)

    @torch.no_grad()
    def push(self, queues: Mixture, newest: Mixture, tracked: Tensor) -> Tensor | None:
        """Shifts the queues (B, T, K) and twice (B, T, K, D) by one and appends ``newest``, if that can be kept.

        The queues change in place. No value is read back to decide: a GPU would be waited for, and a tracer cannot follow.
        The answer is whether it was kept, if that is known.
        """
        taken = reference.can_be_kept(*newest, queues.means.dtype)
        for queue, value in zip(queues, newest, strict=True):
            shifted = torch.cat((queue[:, 1:], value.unsqueeze(1).to(queue.dtype)), 1)
            queue.copy_(torch.where(taken, shifted, queue))
        tracked.add_(taken)
        return taken

    def slot_weights(self, weights: Tensor, decay: float) -> tuple[Tensor, Tensor]:
        """The λ (B, T, K) that a history is evaluated with, and τ (B, T)."""
        return reference.slot_weights(weights, decay)


def are_per_feature(parameters: Parameters, points: Tensor) -> bool:
    """Whether all are (D,) or absent: the only shapes that the faster transforms take, unless a form says otherwise."""
    return all(t is None or t.shape == points.shape[-1:] for t in parameters)


def flat(points: Tensor) -> Tensor:
    """(B, outer, inner, D) to (B, m, D)."""
    return points.flatten(1, 2)


def rows(points: Tensor, dtype: torch.dtype) -> Tensor:
    """The points as (B, m, D), with a gradient that lies in memory as they do."""
    return flat(with_gradient_alike(points).to(dtype))


def with_gradient_alike(x: Tensor) -> Tensor:
    """The same numbers, with a gradient that lies in memory as they do: batch norm's has its input's format."""
    if x.requires_grad and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        x = x.view_as(x)  # a hook of its own, as x may be a user's leaf
        order = sorted(range(x.dim()), key=x.stride().__getitem__, reverse=True)
        x.register_hook(functools.partial(_laid_out, order=order))
    return x


def _laid_out(grad: Tensor | None, order: list[int]) -> Tensor | None:
    """The same gradient with dimensions in the given order in memory; in operations that vmap and autograd know."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return None if grad is None else grad.permute(order).contiguous().permute(back)


def shaped(y: Tensor, points: Tensor) -> Tensor:
    """(B, m, D) in the dtype and shape of the points."""
    return y.to(points.dtype).unflatten(1, points.shape[1:3])


def flat_like(parameters: Parameters, points: Tensor) -> Parameters:
    """Parameters that broadcast against ``points``, as they broadcast against the flattened points."""
    return Parameters(*(_flat_like(t, points) for t in parameters))


def _flat_like(parameter: Tensor | None, points: Tensor) -> Tensor | None:
    if parameter is None or parameter.dim() < 3:
        return parameter
    if parameter.shape[-3:-1] == (1, 1):
        return parameter.squeeze(-2)
    return parameter.expand(*parameter.shape[:-3], *points.shape[-3:]).flatten(-3, -2)


def gradients(y: Tensor, inputs: Any, wanted: Any, grad: Tensor, *, create_graph: bool = True) -> list[Tensor | None]:
    """∂(y·grad)/∂input for those inputs that are wanted; ``grad`` has as many elements as y."""
    places = [i for i, t in enumerate(inputs) if t is not None and wanted[i]]
    found = torch.autograd.grad(y, [inputs[i] for i in places], grad.reshape(y.shape).to(y.dtype), create_graph=create_graph)
    result: list[Tensor | None] = [None] * len(inputs)
    for place, gradient in zip(places, found, strict=True):
        result[place] = gradient
    return result
