"""Mixture norm with the responsibilities of other points: its noise without its modes."""

from __future__ import annotations

import torch
from torch import Tensor

from mixnorm import functional, gmm
from mixnorm_lab.internals import compute_dtype
from mixnorm_lab.norms.any_batch_norm import AnyBatchNorm

SAMPLE_FRACTION, MAX_SAMPLES = 0.25, 4096  # mixture norm's defaults


class ShuffledMixtureNorm(AnyBatchNorm):
    """Mixture norm in which every point has the responsibilities of another, drawn anew in each batch.

    The shares λ_k are mixture norm's, and so is the noise in the transform, Σ_k ν_k/√λ_k · (x − μ_k)/√(σ²_k + ε). But a
    component is a random part of the points, whose μ_k and σ²_k differ from those of all points by chance alone. What
    mixture norm gains beyond this, it gains by its modes. In evaluation a point has the mean over all responsibilities that
    it could have had, Σ_k √λ_k · (x − μ)/√(σ² + ε), with running means of μ, σ² and Σ_k √λ_k.
    """

    running_scale: Tensor

    def __init__(self, channels: int, components: int, *, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__(channels, eps=eps, momentum=momentum)
        self.components = components
        self.register_buffer("running_scale", torch.ones(()))

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        if hasattr(self, "running_scale"):  # batch norm resets before there is one
            self.running_scale.fill_(1)

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        x = input.movedim(1, -1)
        points = x.flatten(0, -2)  # (m, C)
        if self.training:
            y = self._transformed(points)
        else:
            precise = compute_dtype(input.dtype)
            scale = self.weight * self.running_scale * (self.running_var + self.eps).rsqrt()
            y = ((points.to(precise) - self.running_mean) * scale + self.bias).to(input.dtype)
        y = y.view(x.shape).movedim(-1, 1)
        return y.contiguous() if input.is_contiguous() else y

    def _transformed(self, points: Tensor) -> Tensor:
        with torch.no_grad():
            mixture = gmm.fit_mixture(
                points, self.components, sample_fraction=SAMPLE_FRACTION, max_samples=MAX_SAMPLES, min_variance=self.eps
            )
            resp = mixture.responsibilities(points.to(mixture.means.dtype))
            resp = resp[torch.rand(len(resp), device=resp.device).argsort()]
            variance, mean = torch.var_mean(points.to(resp.dtype), 0, correction=0)
            share = self.count_batch()
            self.running_mean.lerp_(mean.to(self.running_mean), share)
            self.running_var.lerp_(variance.to(self.running_var), share)
            self.running_scale.lerp_(resp.mean(0).sqrt().sum().to(self.running_scale), share)
        return functional.mixture_normalize(points, resp, self.eps, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.num_features}, components={self.components}, eps={self.eps}, momentum={self.momentum}"
