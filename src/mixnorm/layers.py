"""MixtureNorm1d, 2d and 3d: drop-in replacements for batch norm."""

from __future__ import annotations

from mixnorm.mixture_norm import _MixtureNorm


class MixtureNorm1d(_MixtureNorm):
    r"""Mixture normalization over an input of shape (N, C) or (N, C, L): a drop-in replacement for ``nn.BatchNorm1d``.

    Fits a mixture of K Gaussians to each batch and normalizes every point by the component that it belongs to:

    .. math::
        \hat x_i = \sum_k \frac{\nu_k(x_i)}{\sqrt{\lambda_k}} \cdot \frac{x_i - \mu_k}{\sqrt{\sigma_k^2 + \epsilon}},
        \qquad y = \gamma \hat x + \beta.

    This is the paper's equation; ``scale``, ``between``, ``within``, ``deviation`` and ``component_affine`` change it.
    With K = 1 it is batch norm. In evaluation the mixtures of the last T training batches take the place of the batch's own;
    ``history_vars`` holds the variances that the training transform divides by, without batch norm's n / (n - 1).

    Args:
        num_features: C, the channels of the input.
        eps: added to every variance that is divided by. Default: 1e-5
        momentum: 1 - ζ, the weight of the newest batch in the history; ``None`` weighs all T evenly. With 0 training leaves
            the history as it is, new or loaded, as it leaves batch norm's statistics; it is weighed evenly. Default: 0.1
        affine: whether γ and β are learned. Default: ``True``
        track_running_stats: whether a history is kept; without one, evaluation fits a mixture as training does.
            Default: ``True``
        device: where parameters and buffers are made. Default: ``None``, PyTorch's
        dtype: of parameters and buffers. Default: ``None``, PyTorch's
        bias: whether there is a β. Default: ``True``
        num_components: K. A batch needs eight points a component; with fewer it gets fewer components. Default: 3
        em_iters: the paper's "EM iter.": ``em_iters // 2`` Lloyd iterations, the rest EM. Default: 2
        seeding: "kmeans++"; "warm": EM goes on from the last batch's mixture; or a number n: k-means++, whose randomness
            regularizes, while ``num_batches_tracked`` is below n, and warm afterwards. Default: "kmeans++"
        fit: "batch": each batch is normalized by the mixture that is fitted to it; "ahead": its points belong to the
            components of the batch before, whose λ, μ and σ² are then those of this batch, and its own mixture is fitted
            for the next one. In a CUDA graph that fit runs beside the backward pass, so that a step is shorter.
            Default: "batch", the paper's
        sample_fraction: the share of the points that the mixture is fitted to; 1.0 is all of them. Default: 0.25
        max_samples: a bound on that sample, so that the cost of the fit stops growing; ``None`` for no bound. Default: 4096
        min_weight: components under this weight are dropped, their points merged into the others. Default: 0.01
        history: T. Default: 10
        inference: "ensemble", the weighted mean of the T transforms; "mixture", one posterior over all T·K components;
            "paper", the equation as printed; "pooled", one mixture fitted to the kept samples of the last T batches;
            "steady", the ensemble with variances raised in slots that the others contradict, for evaluation in the middle of
            a training, while the weights move fast. In "ensemble" and "steady" a mixture counts for less at a point that it
            does not describe, so that no batch can spoil them. Default: "ensemble"
        affine_mode: "output" for γ·x̂ + β, "statistics" for the paper's μ_k + β and γ·σ²_k (a γ below 0 counts as 0).
            Default: "output"
        scale: a_k, what the scale of each component is multiplied by. "fisher": the paper's 1/√λ_k, which makes the variance
            of the output about K; "unit": 1. Default: "fisher"
        between: b, the weight of each component's offset from the overall mean, b·(μ_k - μ)/√(σ² + ε), where μ and σ² are
            those of all points. A number, or "learned": one for each channel, starting at 1. Default: 0.0, every component
            is centred at 0
        within: g, from the overall scale (0) to the component's own (1): x - μ_k is multiplied by
            g·a_k/√(σ²_k + ε) + (1 - g)/√(σ² + ε). A number, or "learned": one for each channel, starting at 0. With g = 0
            and b = 1 the layer is batch norm for any K. Default: 1.0
        deviation: d, the weight of the Fisher vector's second part, d·a_k·((x - μ_k)²/(σ²_k + ε) - 1)/√2, which a footnote
            of the paper suggests. A number, or "learned": one for each channel, starting at 0. Default: 0.0
        component_affine: whether each component has its own γ_k and β_k. Needs ``population="batch"``, and
            ``seeding="warm"`` so that components keep their place from batch to batch. A batch too small for K components
            does not enter the history. Default: ``False``
        activation: ``None``, "relu", "leaky_relu", "silu" or "gelu", applied to each component inside the sum.
            Default: ``None``
        population: which points share statistics. "batch": one mixture of N·L points in R^C; "instance": one for each
            sample; "layer": one for each sample, of C·L scalars; "group": one for each sample and group; "channel": one for
            each channel, of N·L scalars. Only "batch" and "channel" keep a history; the others fit in evaluation as in
            training, with fixed random numbers. Default: "batch"
        num_groups: for ``population="group"``. Default: ``None``
        process_group: a process group of ``torch.distributed``, or "world" for the default one: in training, statistics are
            over the batches of all its ranks, which must all take part in each forward and backward pass; a batch may be
            empty. For "batch" and "channel". A copy of the layer shares the group, a pickle keeps "world" alone.
            Default: ``None``, this process alone
        backend: "auto" (Triton on a GPU, compiled loops on a CPU, else plain PyTorch), "reference" or "triton". On a GPU the
            fit adds up in any order, so that two runs differ in their last digits; under
            ``torch.use_deterministic_algorithms(True)`` they agree to the bit. Default: "auto"

    Shape:
        - Input: (N, C) or (N, C, L), N samples of C features, at L positions or without any
        - Output: the shape, memory format and dtype of the input. Statistics are in fp32 at least.

    Examples:
        >>> layer = mixnorm.MixtureNorm1d(64, num_components=3)
        >>> y = layer(torch.randn(128, 64))
        >>> layer.effective_components()
        3
    """

    ranks, shape_text = (2, 3), "(N, C) or (N, C, L)"


class MixtureNorm2d(_MixtureNorm):
    r"""Mixture normalization over an input of shape (N, C, H, W): a drop-in replacement for ``nn.BatchNorm2d``.

    Fits a mixture of K Gaussians to each batch and normalizes every point by the component that it belongs to:

    .. math::
        \hat x_i = \sum_k \frac{\nu_k(x_i)}{\sqrt{\lambda_k}} \cdot \frac{x_i - \mu_k}{\sqrt{\sigma_k^2 + \epsilon}},
        \qquad y = \gamma \hat x + \beta.

    This is the paper's equation; ``scale``, ``between``, ``within``, ``deviation`` and ``component_affine`` change it.
    With K = 1 it is batch norm. In evaluation the mixtures of the last T training batches take the place of the batch's own;
    ``history_vars`` holds the variances that the training transform divides by, without batch norm's n / (n - 1).

    Args:
        num_features: C, the channels of the input.
        eps: added to every variance that is divided by. Default: 1e-5
        momentum: 1 - ζ, the weight of the newest batch in the history; ``None`` weighs all T evenly. With 0 training leaves
            the history as it is, new or loaded, as it leaves batch norm's statistics; it is weighed evenly. Default: 0.1
        affine: whether γ and β are learned. Default: ``True``
        track_running_stats: whether a history is kept; without one, evaluation fits a mixture as training does.
            Default: ``True``
        device: where parameters and buffers are made. Default: ``None``, PyTorch's
        dtype: of parameters and buffers. Default: ``None``, PyTorch's
        bias: whether there is a β. Default: ``True``
        num_components: K. A batch needs eight points a component; with fewer it gets fewer components. Default: 3
        em_iters: the paper's "EM iter.": ``em_iters // 2`` Lloyd iterations, the rest EM. Default: 2
        seeding: "kmeans++"; "warm": EM goes on from the last batch's mixture; or a number n: k-means++, whose randomness
            regularizes, while ``num_batches_tracked`` is below n, and warm afterwards. Default: "kmeans++"
        fit: "batch": each batch is normalized by the mixture that is fitted to it; "ahead": its points belong to the
            components of the batch before, whose λ, μ and σ² are then those of this batch, and its own mixture is fitted
            for the next one. In a CUDA graph that fit runs beside the backward pass, so that a step is shorter.
            Default: "batch", the paper's
        sample_fraction: the share of the points that the mixture is fitted to; 1.0 is all of them. Default: 0.25
        max_samples: a bound on that sample, so that the cost of the fit stops growing; ``None`` for no bound. Default: 4096
        min_weight: components under this weight are dropped, their points merged into the others. Default: 0.01
        history: T. Default: 10
        inference: "ensemble", the weighted mean of the T transforms; "mixture", one posterior over all T·K components;
            "paper", the equation as printed; "pooled", one mixture fitted to the kept samples of the last T batches;
            "steady", the ensemble with variances raised in slots that the others contradict, for evaluation in the middle of
            a training, while the weights move fast. In "ensemble" and "steady" a mixture counts for less at a point that it
            does not describe, so that no batch can spoil them. Default: "ensemble"
        affine_mode: "output" for γ·x̂ + β, "statistics" for the paper's μ_k + β and γ·σ²_k (a γ below 0 counts as 0).
            Default: "output"
        scale: a_k, what the scale of each component is multiplied by. "fisher": the paper's 1/√λ_k, which makes the variance
            of the output about K; "unit": 1. Default: "fisher"
        between: b, the weight of each component's offset from the overall mean, b·(μ_k - μ)/√(σ² + ε), where μ and σ² are
            those of all points. A number, or "learned": one for each channel, starting at 1. Default: 0.0, every component
            is centred at 0
        within: g, from the overall scale (0) to the component's own (1): x - μ_k is multiplied by
            g·a_k/√(σ²_k + ε) + (1 - g)/√(σ² + ε). A number, or "learned": one for each channel, starting at 0. With g = 0
            and b = 1 the layer is batch norm for any K. Default: 1.0
        deviation: d, the weight of the Fisher vector's second part, d·a_k·((x - μ_k)²/(σ²_k + ε) - 1)/√2, which a footnote
            of the paper suggests. A number, or "learned": one for each channel, starting at 0. Default: 0.0
        component_affine: whether each component has its own γ_k and β_k. Needs ``population="batch"``, and
            ``seeding="warm"`` so that components keep their place from batch to batch. A batch too small for K components
            does not enter the history. Default: ``False``
        activation: ``None``, "relu", "leaky_relu", "silu" or "gelu", applied to each component inside the sum.
            Default: ``None``
        population: which points share statistics. "batch": one mixture of N·L points in R^C; "instance": one for each
            sample; "layer": one for each sample, of C·L scalars; "group": one for each sample and group; "channel": one for
            each channel, of N·L scalars. Only "batch" and "channel" keep a history; the others fit in evaluation as in
            training, with fixed random numbers. Default: "batch"
        num_groups: for ``population="group"``. Default: ``None``
        process_group: a process group of ``torch.distributed``, or "world" for the default one: in training, statistics are
            over the batches of all its ranks, which must all take part in each forward and backward pass; a batch may be
            empty. For "batch" and "channel". A copy of the layer shares the group, a pickle keeps "world" alone.
            Default: ``None``, this process alone
        backend: "auto" (Triton on a GPU, compiled loops on a CPU, else plain PyTorch), "reference" or "triton". On a GPU the
            fit adds up in any order, so that two runs differ in their last digits; under
            ``torch.use_deterministic_algorithms(True)`` they agree to the bit. Default: "auto"

    Shape:
        - Input: (N, C, H, W), where L = H·W
        - Output: the shape, memory format and dtype of the input. Statistics are in fp32 at least.

    Examples:
        >>> layer = mixnorm.MixtureNorm2d(64, num_components=3)
        >>> y = layer(torch.randn(16, 64, 8, 8))
        >>> layer.effective_components()
        3
    """

    ranks, shape_text = (4,), "(N, C, H, W)"


class MixtureNorm3d(_MixtureNorm):
    r"""Mixture normalization over an input of shape (N, C, D, H, W): a drop-in replacement for ``nn.BatchNorm3d``.

    Fits a mixture of K Gaussians to each batch and normalizes every point by the component that it belongs to:

    .. math::
        \hat x_i = \sum_k \frac{\nu_k(x_i)}{\sqrt{\lambda_k}} \cdot \frac{x_i - \mu_k}{\sqrt{\sigma_k^2 + \epsilon}},
        \qquad y = \gamma \hat x + \beta.

    This is the paper's equation; ``scale``, ``between``, ``within``, ``deviation`` and ``component_affine`` change it.
    With K = 1 it is batch norm. In evaluation the mixtures of the last T training batches take the place of the batch's own;
    ``history_vars`` holds the variances that the training transform divides by, without batch norm's n / (n - 1).

    Args:
        num_features: C, the channels of the input.
        eps: added to every variance that is divided by. Default: 1e-5
        momentum: 1 - ζ, the weight of the newest batch in the history; ``None`` weighs all T evenly. With 0 training leaves
            the history as it is, new or loaded, as it leaves batch norm's statistics; it is weighed evenly. Default: 0.1
        affine: whether γ and β are learned. Default: ``True``
        track_running_stats: whether a history is kept; without one, evaluation fits a mixture as training does.
            Default: ``True``
        device: where parameters and buffers are made. Default: ``None``, PyTorch's
        dtype: of parameters and buffers. Default: ``None``, PyTorch's
        bias: whether there is a β. Default: ``True``
        num_components: K. A batch needs eight points a component; with fewer it gets fewer components. Default: 3
        em_iters: the paper's "EM iter.": ``em_iters // 2`` Lloyd iterations, the rest EM. Default: 2
        seeding: "kmeans++"; "warm": EM goes on from the last batch's mixture; or a number n: k-means++, whose randomness
            regularizes, while ``num_batches_tracked`` is below n, and warm afterwards. Default: "kmeans++"
        fit: "batch": each batch is normalized by the mixture that is fitted to it; "ahead": its points belong to the
            components of the batch before, whose λ, μ and σ² are then those of this batch, and its own mixture is fitted
            for the next one. In a CUDA graph that fit runs beside the backward pass, so that a step is shorter.
            Default: "batch", the paper's
        sample_fraction: the share of the points that the mixture is fitted to; 1.0 is all of them. Default: 0.25
        max_samples: a bound on that sample, so that the cost of the fit stops growing; ``None`` for no bound. Default: 4096
        min_weight: components under this weight are dropped, their points merged into the others. Default: 0.01
        history: T. Default: 10
        inference: "ensemble", the weighted mean of the T transforms; "mixture", one posterior over all T·K components;
            "paper", the equation as printed; "pooled", one mixture fitted to the kept samples of the last T batches;
            "steady", the ensemble with variances raised in slots that the others contradict, for evaluation in the middle of
            a training, while the weights move fast. In "ensemble" and "steady" a mixture counts for less at a point that it
            does not describe, so that no batch can spoil them. Default: "ensemble"
        affine_mode: "output" for γ·x̂ + β, "statistics" for the paper's μ_k + β and γ·σ²_k (a γ below 0 counts as 0).
            Default: "output"
        scale: a_k, what the scale of each component is multiplied by. "fisher": the paper's 1/√λ_k, which makes the variance
            of the output about K; "unit": 1. Default: "fisher"
        between: b, the weight of each component's offset from the overall mean, b·(μ_k - μ)/√(σ² + ε), where μ and σ² are
            those of all points. A number, or "learned": one for each channel, starting at 1. Default: 0.0, every component
            is centred at 0
        within: g, from the overall scale (0) to the component's own (1): x - μ_k is multiplied by
            g·a_k/√(σ²_k + ε) + (1 - g)/√(σ² + ε). A number, or "learned": one for each channel, starting at 0. With g = 0
            and b = 1 the layer is batch norm for any K. Default: 1.0
        deviation: d, the weight of the Fisher vector's second part, d·a_k·((x - μ_k)²/(σ²_k + ε) - 1)/√2, which a footnote
            of the paper suggests. A number, or "learned": one for each channel, starting at 0. Default: 0.0
        component_affine: whether each component has its own γ_k and β_k. Needs ``population="batch"``, and
            ``seeding="warm"`` so that components keep their place from batch to batch. A batch too small for K components
            does not enter the history. Default: ``False``
        activation: ``None``, "relu", "leaky_relu", "silu" or "gelu", applied to each component inside the sum.
            Default: ``None``
        population: which points share statistics. "batch": one mixture of N·L points in R^C; "instance": one for each
            sample; "layer": one for each sample, of C·L scalars; "group": one for each sample and group; "channel": one for
            each channel, of N·L scalars. Only "batch" and "channel" keep a history; the others fit in evaluation as in
            training, with fixed random numbers. Default: "batch"
        num_groups: for ``population="group"``. Default: ``None``
        process_group: a process group of ``torch.distributed``, or "world" for the default one: in training, statistics are
            over the batches of all its ranks, which must all take part in each forward and backward pass; a batch may be
            empty. For "batch" and "channel". A copy of the layer shares the group, a pickle keeps "world" alone.
            Default: ``None``, this process alone
        backend: "auto" (Triton on a GPU, compiled loops on a CPU, else plain PyTorch), "reference" or "triton". On a GPU the
            fit adds up in any order, so that two runs differ in their last digits; under
            ``torch.use_deterministic_algorithms(True)`` they agree to the bit. Default: "auto"

    Shape:
        - Input: (N, C, D, H, W), where L = D·H·W
        - Output: the shape, memory format and dtype of the input. Statistics are in fp32 at least.

    Examples:
        >>> layer = mixnorm.MixtureNorm3d(64, num_components=3)
        >>> y = layer(torch.randn(4, 64, 4, 8, 8))
        >>> layer.effective_components()
        3
    """

    ranks, shape_text = (5,), "(N, C, D, H, W)"
