"""The laboratory: models, data, training runs, reports and benchmarks of mixture norm, and the command ``mixnorm``.

``mixnorm_lab.compare`` is the command ``mixnorm compare`` from Python.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mixnorm_lab.comparison.python import compare

__all__ = ["compare"]


def __getattr__(name: str) -> Any:
    """Loads what trains when it is asked for: a part of the laboratory, such as the reports, does without torch."""
    if name != "compare":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mixnorm_lab.comparison.python import compare

    return compare
