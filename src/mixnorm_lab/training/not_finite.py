"""Finds where numbers stop being finite: the first layer, step by step, of an epoch that is run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mixnorm_lab.data import batches
from mixnorm_lab.data.sources import Source
from mixnorm_lab.training.step import Step
from mixnorm_lab.training.team import ALONE, Team

DATA, FORWARD, LOSS, BACKWARD, UPDATE = "data", "forward", "loss", "backward", "update"  # parts of a step, in their order


class NotFinite(RuntimeError):  # noqa: N818
    """A loss that is not a finite number."""


@dataclass(frozen=True)
class Origin:
    """Where the first number is not finite: the step, from 0, the part of it, and the place in words."""

    step: int
    part: str
    place: str


class _Seen(NamedTuple):
    part: str
    place: str
    finite: Tensor


def find_origin(
    networks: Mapping[str, tuple[nn.Module, torch.optim.Optimizer]], step: Step, steps: int, team: Team = ALONE
) -> Origin | None:
    """Runs up to ``steps`` updates, and finds where the first number is not finite.

    ``None`` if all were: on a GPU an epoch that is run again differs in its last digits.

    Args:
        networks: by what the names of their layers begin with: nothing, where there is one.
    """
    found: list[_Seen] = []
    with ExitStack() as stack:
        stack.enter_context(_watched_data(step, found))
        for start, (network, optimizer) in networks.items():
            stack.enter_context(_watched(start, network, optimizer, found))
        for number in range(steps):
            found.clear()
            step.update()
            infinite = team.add(torch.stack([~seen.finite for seen in found]).int()).tolist()  # one transfer a step
            first = next((seen for seen, ranks in zip(found, infinite, strict=True) if ranks), None)
            # Behind the outputs comes the loss. Where it is not finite its gradient may be, as that of a logarithm.
            if (first is None or first.part in (BACKWARD, UPDATE)) and not step.curve[number].isfinite().all():
                return Origin(number, LOSS, "the loss")
            if first is not None:
                return Origin(number, first.part, first.place)
    return None


@contextmanager
def _watched_data(step: Step, found: list[_Seen]) -> Iterator[None]:
    """Fills a list with what the batches of a step are."""
    source = step.source
    step.source = _WatchedSource(source, found)  # type: ignore[assignment]
    try:
        yield
    finally:
        step.source = source


class _WatchedSource:
    """The batches of a source, which are looked at before a step gets them."""

    def __init__(self, source: Source, found: list[_Seen]) -> None:
        self.source, self.found = source, found

    def batch(self, step: Tensor) -> Any:
        batch = self.source.batch(step)
        parts = zip(("the inputs", "the labels"), batch, strict=True) if type(batch) is tuple and len(batch) == 2 else ()
        for place, part in parts or [("the batch", batch)]:
            _look(self.found, DATA, place, part)
        return batch


def _look(found: list[_Seen], part: str, place: str, value: Any) -> None:
    """Notes of all tensors of a value, however it is made, whether they are finite."""

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            found.append(_Seen(part, place, tensor.detach().isfinite().all()))
        return tensor

    batches.mapped(value, note)


@contextmanager
def _watched(start: str, model: nn.Module, optimizer: torch.optim.Optimizer, found: list[_Seen]) -> Iterator[None]:
    """Fills a list with what an update computes, in its order."""
    ran: list[tuple[str, nn.Module]] = []

    def full(*names: str) -> str:
        return ".".join(part for part in (start, *names) if part)

    def before_model(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        ran.clear()
        _look(found, FORWARD, f"the input of {start or 'the model'}", arguments)

    def after_layer(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            ran.append((name, module))
            _look(found, FORWARD, f"the output of {full(name) or 'the model'}", output)

        return hook

    def before_step(*_: Any) -> None:
        # From the last layer to the first, as the backward pass goes.
        for name, module in reversed(ran):
            for parameter_name, parameter in module.named_parameters(recurse=False):
                _look(found, BACKWARD, f"the gradient of {full(name, parameter_name)}", parameter.grad)

    def after_step(*_: Any) -> None:
        for name, parameter in model.named_parameters():
            _look(found, UPDATE, f"{full(name)} after the update", parameter)

    handles: list[Any] = [model.register_forward_pre_hook(before_model)]
    handles += [module.register_forward_hook(after_layer(name)) for name, module in model.named_modules()]
    handles += [optimizer.register_step_pre_hook(before_step), optimizer.register_step_post_hook(after_step)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
