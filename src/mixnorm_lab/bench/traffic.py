"""The bytes that a variant has to move through memory, counted by hand: each pass over a tensor once."""

from __future__ import annotations

from dataclasses import replace

from mixnorm_lab.bench.cases import Case
from mixnorm_lab.bench.steps import DTYPES, Variant

# Forward: a read for the statistics, a read and a write to normalize. Backward: the input and the upstream gradient are read
# for the sums over the batch, read again for the input's gradient, which is written.
TRAINING_PASSES = 3 + 5
EVALUATION_PASSES = 2
RELU_PASSES = {"layer": 2 + 3, "inference": 2}  # of a ReLU behind the norm: x and y; its output, the gradient and y's
# The responsibilities: written, read to normalize, read twice in the backward pass.
RESPONSIBILITY_PASSES = 4


def bytes_moved(case: Case, variant: Variant) -> int | None:
    """``None`` where nobody counted. The fit's sample is small beside the tensor, and left out of a layer's count."""
    tensor = case.numel * DTYPES[case.dtype].itemsize
    if case.series == "relu" and not variant.is_mixture:
        alone = bytes_moved(replace(case, series=""), variant)
        return None if alone is None else alone + RELU_PASSES[case.benchmark] * tensor
    if case.benchmark in ("layer", "scaling"):
        k = variant.num_components or 0  # batch norm has no responsibilities
        return TRAINING_PASSES * tensor + RESPONSIBILITY_PASSES * 4 * case.points * k
    if case.benchmark == "inference":
        return EVALUATION_PASSES * tensor
    if case.benchmark == "fit" and variant.num_components is not None:
        # A read of the points for each seed, and one for each iteration.
        return (variant.num_components + case.em_iters) * tensor
    return None
