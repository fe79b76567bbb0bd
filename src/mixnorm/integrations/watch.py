"""What the mixture norms of a model do while it trains, as numbers for any logger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mixnorm.mixture_norm import MIN_POINTS, _MixtureNorm
from mixnorm.options import GATES

PREFIX = "mixture_norm"
Log = Callable[[Mapping[str, float], int], Any]


@torch.no_grad()
def numbers(model: nn.Module, *, weights: bool = True) -> dict[str, float]:
    """What a logger can draw of each mixture norm, by names such as "mixture_norm/conv1.norm/components".

    ``components``: how many the last training batch used. ``weight_1`` and so on: their shares of that batch, the largest
    first. ``within``, ``between`` and ``deviation``: the mean over the channels, where they are learned. Where a layer has
    several mixtures, each number is the mean over them. A GPU is waited for once.

    Args:
        weights: False leaves ``weight_1`` and so on out.
    """
    found: dict[str, Tensor] = {}
    for name, layer in mixture_norms(model).items():
        start = f"{PREFIX}/{name}"
        mixture = layer.mixture
        if mixture is not None:
            shares = mixture.weights.double().reshape(-1, mixture.weights.shape[-1])
            found[f"{start}/components"] = (shares > 0).sum(1).double().mean()
            if weights:
                sizes = shares.sort(1, descending=True).values.mean(0)
                found |= {f"{start}/weight_{number}": size for number, size in enumerate(sizes, 1)}
        for gate in GATES:
            learned = getattr(layer, f"{gate}_weight")
            if learned is not None:
                found[f"{start}/{gate}"] = learned.double().mean()
    device = next((value.device for value in found.values()), None)
    values = torch.stack([value.to(device) for value in found.values()]).tolist() if found else []
    return dict(zip(found, values, strict=True))


def mixture_norms(model: nn.Module) -> dict[str, Any]:
    """The mixture norms of a model by their names, without what ``torch.compile`` adds to these."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, _MixtureNorm)}
    return {name.removeprefix("_orig_mod."): layer for name, layer in layers.items()}


class Watch:
    """What :func:`watch` returns: hooks that count forward passes of training, and log at every so many of them."""

    def __init__(self, model: nn.Module, log: Log, every: int) -> None:
        self.model, self._log, self.every = model, log, every
        self.step = 0
        self._batches: dict[str, int] = {}
        self._few: dict[str, int] = {}
        self._hooks: list[Any] = []
        for name, layer in mixture_norms(model).items():
            self._hooks.append(layer.register_forward_pre_hook(self._counter(name)))
        self._hooks.append(model.register_forward_hook(self._passed))

    def log(self, step: int | None = None) -> dict[str, float]:
        """Logs the numbers of now, and returns them; ``step`` is that of the next line if it is not given."""
        values = numbers(self.model)
        for name, count in self._batches.items():
            values[f"{PREFIX}/{name}/few_points"] = self._few.get(name, 0) / count
        self._batches, self._few = {}, {}
        self._log(values, self.step if step is None else step)
        return values

    def remove(self) -> None:
        """Takes the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _counter(self, name: str) -> Callable[[Any, Any], None]:
        def count(layer: Any, arguments: tuple[Any, ...]) -> None:
            if torch.compiler.is_compiling() or not layer.training or not arguments:
                return
            self._batches[name] = self._batches.get(name, 0) + 1
            if _points(layer, arguments[0]) < MIN_POINTS * layer.num_components:
                self._few[name] = self._few.get(name, 0) + 1

        return count

    def _passed(self, model: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() or not model.training:
            return
        self.step += 1
        if self.step % self.every == 0:
            self.log()


def watch(model: nn.Module, log: Log, every: int = 100) -> Watch:
    """Logs what the mixture norms of a model do, while any loop trains it.

    Each log has what :func:`numbers` tells of every layer, and ``few_points``, the share of its batches since the last log
    that had too few points for its components. A model that goes through ``torch.compile`` is watched as the compiled one,
    and has no ``few_points``. A step is a forward pass of the model in training mode.

    Args:
        log: is called with a dictionary of numbers and the step: ``wandb.log``, ``accelerator.log``, ``fabric.log_dict``, or
            a function of yours.
        every: how many steps are between two logs.

    Returns:
        A :class:`Watch`, whose ``remove()`` ends it, and whose ``log(step)`` logs at once.

    Example:
        >>> watch(mixnorm.convert(model), wandb.log, every=100)
    """
    if not mixture_norms(model):
        raise ValueError("the model has no mixture norm to watch: call mixnorm.convert(model) first")
    if every < 1:
        raise ValueError(f"every={every} must be at least 1, the number of steps between two logs")
    return Watch(model, log, every)


def _points(layer: Any, x: Tensor) -> int:
    """The points that one mixture of the layer is fitted to."""
    if x.shape[0] == 0:
        return 0
    image = x.numel() // x.shape[0]
    counts = {"instance": image // x.shape[1], "layer": image, "group": image // (layer.num_groups or 1)}
    if layer.population in counts:
        return counts[layer.population]
    group = layer._group.with_others() if layer.process_group is not None else None
    ranks = 1 if group is None else torch.distributed.get_world_size(group)
    return x.numel() // x.shape[1] * ranks
