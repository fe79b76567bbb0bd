"""What a run minimizes, by name: losses that the laboratory knows, or a function of the user's own."""

from __future__ import annotations

from mixnorm_lab.config.metrics import METRICS, metric_of

CROSS_ENTROPY = "cross-entropy"
SQUARED, ABSOLUTE, BINARY = "mean squared error", "mean absolute error", "binary cross-entropy"
OF_MODEL = "the model's own"  # what its output holds as ``loss``
LOSSES = (CROSS_ENTROPY, SQUARED, ABSOLUTE, BINARY, OF_MODEL)
SHORT = {"mse": SQUARED, "mae": ABSOLUTE, "l1": ABSOLUTE, "bce": BINARY, "ce": CROSS_ENTROPY, "miou": "mean IoU"}


def loss_name(text: str) -> str:
    """The name of a loss as the command line gives it: "mean-squared-error", "mse" or "my_module:loss"."""
    if ":" in text:
        return text
    found = _known(text, LOSSES)
    if found is None:
        raise ValueError(f"there is no loss {text!r}: use {', '.join(LOSSES[:-1])} or my_module:function")
    return found


def metric_names(text: str) -> tuple[str, str]:
    """A metric as the command line gives it, as ``RunConfig.metric`` and ``RunConfig.metric_function`` have it.

    "my_module:dice:higher" is the function dice of my_module, of which more is better.
    """
    if found := _known(text, tuple(METRICS)):
        return found, ""
    function, _, better = text.rpartition(":")
    if text.count(":") == 1 and better not in ("higher", "lower"):
        raise ValueError(f"is more of {text} better, or less? Say {text}:higher or {text}:lower")
    if function.count(":") != 1:
        raise ValueError(
            f"there is no metric {text!r}: use {', '.join(METRICS)}, or my_module:function with :higher or :lower behind it"
        )
    name = function.rpartition(":")[2].rpartition(".")[2].replace("_", " ").strip() or "metric"
    if name in METRICS:
        name = f"own {name}"
    metric_of(f"{name}:{better}")
    return f"{name}:{better}", function


def _known(text: str, names: tuple[str, ...]) -> str | None:
    def plain(name: str) -> str:
        return name.lower().replace("-", " ")

    short = SHORT.get(text.lower(), text)
    return next((name for name in names if plain(name) == plain(short)), None)
