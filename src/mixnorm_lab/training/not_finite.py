"""Finds where numbers stop being finite: the first layer, step by step, of an epoch that is run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mixnorm_lab.training.team import ALONE, Team

IMAGES = "the images"


class NotFinite(RuntimeError):  # noqa: N818
    """A loss that is not a finite number."""


def find_origin(
    networks: Mapping[str, tuple[nn.Module, torch.optim.Optimizer]],
    update: Callable[[], None],
    steps: int,
    team: Team = ALONE,
) -> tuple[int, str] | None:
    """Runs ``update`` up to ``steps`` times; the step, from 0, and the place where the first number is not finite.

    ``None`` if all were: on a GPU an epoch that is run again differs in its last digits.

    Args:
        networks: by what the names of their layers begin with: nothing, where there is one.
    """
    found: list[tuple[str, Tensor]] = []
    with ExitStack() as stack:
        for start, (network, optimizer) in networks.items():
            stack.enter_context(_watched(start, network, optimizer, found))
        for step in range(steps):
            found.clear()
            update()
            infinite = team.add(torch.stack([~flag for _, flag in found]).int()).tolist()  # one transfer a step
            for (place, _), ranks in zip(found, infinite, strict=True):
                if ranks:
                    return step, place
    return None


@contextmanager
def _watched(
    start: str, model: nn.Module, optimizer: torch.optim.Optimizer, found: list[tuple[str, Tensor]]
) -> Iterator[None]:
    """Fills a list with (place, whether it is finite) of an update, in the order in which it computes them."""
    ran: list[tuple[str, nn.Module]] = []

    def full(*names: str) -> str:
        return ".".join(part for part in (start, *names) if part)

    def look(place: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            found.append((place, value.detach().isfinite().all()))
        elif isinstance(value, (tuple, list)):
            for part in value:
                look(place, part)

    def before_model(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        ran.clear()
        look(IMAGES, arguments)

    def after_layer(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            ran.append((name, module))
            look(f"the output of {full(name)}" if name else f"the output of {start or 'the model'}", output)

        return hook

    def before_step(*_: Any) -> None:
        # From the last layer to the first, as the backward pass goes.
        for name, module in reversed(ran):
            for parameter_name, parameter in module.named_parameters(recurse=False):
                look(f"the gradient of {full(name, parameter_name)}", parameter.grad)

    def after_step(*_: Any) -> None:
        for name, parameter in model.named_parameters():
            look(f"{full(name)} after the update", parameter)

    handles: list[Any] = [model.register_forward_pre_hook(before_model)]
    handles += [module.register_forward_hook(after_layer(name)) for name, module in model.named_modules()]
    handles += [optimizer.register_step_pre_hook(before_step), optimizer.register_step_post_hook(after_step)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
