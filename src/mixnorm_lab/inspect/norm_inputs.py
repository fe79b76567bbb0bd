"""What a norm of a model gets in a forward pass, and densities of it: before batch norm and mixture norm, and after."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mixnorm import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d
from mixnorm.functional import mixture_normalize
from mixnorm.gmm import fit_mixture
from mixnorm_lab.inspect.densities import COLUMNS, Density, LayerDensities, Normalization
from mixnorm_lab.internals import DEFAULT_MIN_VARIANCE
from mixnorm_lab.storage import checkpoint
from mixnorm_lab.storage.checkpoint import CheckpointError
from mixnorm_lab.storage.snapshots import CHANNELS, lively, spread

MIXTURE_NORMS = (MixtureNorm1d, MixtureNorm2d, MixtureNorm3d)
BINS = 61  # an odd number: values that are all the same are in the middle of one
TAIL = 0.001  # the share of the values on each side that a histogram leaves out, so that its bins are where the values are
MAX_POINTS = 16_384
COMPONENTS = (1, 2, 3)  # of each norm; 1 is batch norm


def load_weights(model: nn.Module, folder: Path) -> int:
    """Puts the weights of a run's newest checkpoint into its model; returns after how many epochs it was written."""
    state = checkpoint.read(folder)
    if state is None:
        raise CheckpointError(f"there is no checkpoint in {folder}: name the folder of a run, which holds {checkpoint.NAME}")
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the checkpoint in {folder} does not fit the model: pass the run's own ({reason})") from error
    return state["epoch"]


def find_norm(model: nn.Module, name: str | None = None) -> str:
    """The module name of a norm.

    Args:
        name: of the norm, or of a module around it that has no other. ``None`` is the first mixture norm or, where there is
            none, the batch norm in the middle.
    """
    norms = {n: m for n, m in model.named_modules() if isinstance(m, (*MIXTURE_NORMS, _BatchNorm))}
    if not norms:
        raise ValueError("the model has no norm to look at: use one with batch norms or mixture norms")
    if name is None:
        mixture_norms = [n for n, m in norms.items() if isinstance(m, MIXTURE_NORMS)]
        return mixture_norms[0] if mixture_norms else list(norms)[len(norms) // 2]
    if name in norms:
        return name
    inside = [n for n in norms if n.startswith(f"{name.replace('/', '.')}.")]  # the paper's inc2/0 is the module inc2.0
    if len(inside) == 1:
        return inside[0]
    near = inside or difflib.get_close_matches(name, norms) or list(norms)
    what = f"{name} has {len(inside)} norms" if inside else f"there is no norm {name!r}"
    raise ValueError(f"{what}: choose from {', '.join(near)}")


def layer_densities(
    model: nn.Module,
    images: Any,
    layer: str | None = None,
    *,
    components: Sequence[int] = COMPONENTS,
    channels: Sequence[int] | None = None,
    em_iters: int = 2,
    seed: int = 0,
    feed: Callable[[nn.Module, Any], Any] = nn.Module.__call__,
) -> LayerDensities:
    """A layer's input on a batch of training images, normalized as batch norm and as mixture norm do, without γ and β.

    The components after a norm are those before it, seen through it: the mean and the deviation of the normalized values
    under the same responsibilities. The model is not changed.

    Args:
        images: on the model's device; or other inputs, which ``feed`` passes to the model.
        layer: as in :func:`find_norm`.
        components: the K of each norm; 1 is batch norm.
        channels: those to look at; ``None`` is four that a record's snapshots have, too, or four others if one of these
            hardly varies.
        em_iters: of the fits, as in the layers.
    """
    layer = find_norm(model, layer)
    norm: Any = model.get_submodule(layer)
    outside = [channel for channel in channels or () if not 0 <= channel < norm.num_features]
    if outside:
        raise ValueError(f"{layer} has no channel {outside[0]}: choose from 0 to {norm.num_features - 1}")
    points = layer_input(model, images, layer, seed=seed, feed=feed)
    usual = default_channels(norm.num_features)
    shown = lively(points.std(dim=0).tolist(), usual, COLUMNS) if channels is None else list(channels)
    generator = torch.Generator().manual_seed(seed)
    if len(points) > MAX_POINTS:
        points = points[torch.randperm(len(points), generator=generator)[:MAX_POINTS]]
    norms = []
    for count in components:
        mixture = fit_mixture(
            points,
            count,
            em_iters=em_iters,
            min_variance=max(norm.eps, DEFAULT_MIN_VARIANCE),
            generator=generator,
            backend="reference",
        )
        resp = mixture.responsibilities(points)
        normalized = mixture_normalize(points, resp, norm.eps, backend="reference")
        before, after = (
            tuple(density(values[:, channel].numpy(), resp.numpy()) for channel in shown) for values in (points, normalized)
        )
        norms.append(Normalization("BN" if count == 1 else f"MN:{count}", before, after))
    return LayerDensities(layer, tuple(shown), len(points), tuple(norms), left_out=channels is None and shown != usual)


def default_channels(total: int) -> list[int]:
    """Of the channels that snapshots are taken of, those to look at."""
    recorded = spread(total, CHANNELS)
    return [recorded[i] for i in spread(len(recorded), COLUMNS)]


@torch.no_grad()
def layer_input(
    model: nn.Module,
    images: Any,
    layer: str,
    *,
    seed: int = 0,
    feed: Callable[[nn.Module, Any], Any] = nn.Module.__call__,
) -> Tensor:
    """What a layer gets in a training forward pass, as points (N · positions, C) on the CPU, in fp32."""
    model = copy.deepcopy(model).train()  # the statistics of the model itself stay as they are
    found: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        found.append(arguments[0].float().cpu())

    handle = model.get_submodule(layer).register_forward_pre_hook(keep)
    devices = {parameter.device for parameter in model.parameters()}
    cuda = [device.index for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(cuda):  # dropout and the seeds of other mixture norms
        torch.manual_seed(seed)
        feed(model, images)
    handle.remove()
    if not found:
        raise ValueError(f"{layer} took no part in the forward pass: choose another layer")
    return found[0].transpose(0, 1).flatten(1).T.contiguous()


def density(values: np.ndarray, resp: np.ndarray) -> Density:
    """The density of values (m,) with components under the responsibilities (m, K)."""
    values, resp = values.astype(np.float64), resp.astype(np.float64)
    low, high = np.quantile(values, (TAIL, 1 - TAIL))
    margin = max(0.02 * (high - low), 1e-6 * max(1.0, abs(high)))  # values may all be the same
    heights, edges = np.histogram(values, BINS, (low - margin, high + margin), density=True)
    least = (edges[1] - edges[0]) / 100  # of a deviation: a component of equal values is drawn as a spike
    total = resp.sum(0)
    order = [k for k in np.argsort(-total, kind="stable") if total[k] > 0]
    means = values @ resp[:, order] / total[order]
    variances = ((values[:, None] - means) ** 2 * resp[:, order]).sum(0) / total[order]
    deviation = max(float(values.std()), least)
    return Density(
        edges=edges,
        heights=heights,
        weights=total[order] / len(values),
        means=means,
        deviations=np.maximum(np.sqrt(variances), least),
        mean=float(values.mean()),
        deviation=deviation,
        skewness=float((((values - values.mean()) / deviation) ** 3).mean()),
    )
