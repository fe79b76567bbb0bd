"""A model on the inputs of a batch, whatever both look like, and what of its output is compared with labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from mixnorm_lab.data.batches import LABELS

OUTPUTS = ("logits", "out", "prediction", "predictions", "output")  # where an output that is no tensor has its own


def call(model: nn.Module, inputs: Any, labels: Any = None, through: Callable[..., Any] | None = None) -> Any:
    """The output of a model. A dictionary is passed by the names that its ``forward`` has, with the labels where it takes
    them; a tuple in order.

    Args:
        through: what is called in place of the model, such as its compiled form.
    """
    function = model if through is None else through
    if isinstance(inputs, (tuple, list)):
        return function(*inputs)
    if not isinstance(inputs, Mapping):
        return function(inputs)
    parameters = inspect.signature(model.forward).parameters
    named = {key: value for key, value in inputs.items() if key in parameters}
    if named:
        taken = next((key for key in LABELS if key in parameters), None) if labels is not None else None
        return function(**named, **({} if taken is None else {taken: labels}))
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    if len(tensors) == 1:
        return function(tensors[0])
    if any(one.kind == inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return function(**inputs)
    wanted = ", ".join(name for name in parameters if name not in LABELS) or "nothing"
    raise ValueError(
        f"a batch of the data has the inputs {', '.join(map(str, inputs))}, but the model's forward takes {wanted}: give "
        "both the same names, or say with --step how to train on a batch"
    )


def logits_of(output: Any) -> Tensor:
    """What of an output is compared with the labels: a tensor, or what an object or a dictionary has as ``logits``."""
    found = output
    if not isinstance(output, Tensor):
        found = next((value for name in OUTPUTS if (value := part(output, name)) is not None), None)
    if not isinstance(found, Tensor):
        what = type(output).__name__
        if isinstance(output, (tuple, list)):
            what += f" of {len(output)}"
        raise ValueError(
            f"the model returns a {what}: return a tensor, or an object with .logits, or say with --step how to train on a "
            "batch"
        )
    return found.float() if found.is_floating_point() else found


def own_loss(output: Any) -> Tensor | None:
    """The loss that a model was told to compute itself, as those of Hugging Face do."""
    found = None if isinstance(output, Tensor) else part(output, "loss")
    return found if isinstance(found, Tensor) and found.numel() == 1 else None


def part(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


class Fed(nn.Module):
    """A model that takes the inputs of any batch as its one argument."""

    def __init__(self, model: nn.Module, feed: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.feed = feed

    def forward(self, inputs: Any) -> Any:
        return self.feed(self.model, inputs)


def each_alone(batches: Iterator[Any]) -> Iterator[tuple[Any]]:
    """Batches as the one argument of :class:`Fed`, which ``recalibrate`` would else take apart."""
    return ((batch,) for batch in batches)
