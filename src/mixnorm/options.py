"""The options of a mixture norm: their types, and what is wrong with them, in a sentence that names the remedy."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Literal, NamedTuple, get_args

from mixnorm import gmm
from mixnorm.functional import AffineMode, Scale, check_choice, check_form, is_number
from mixnorm.ops.choose import check_backend
from mixnorm.ops.reference import ACTIVATIONS
from mixnorm.populations import Population

Seeding = Literal["kmeans++", "warm"]
Fit = Literal["batch", "ahead"]
Learned = Literal["learned"]
Inference = Literal["ensemble", "mixture", "paper", "pooled", "steady"]
DEFAULT_MAX_SAMPLES = 4096


class Gate(NamedTuple):
    """The values of an option that may be learned, one number for each channel."""

    paper: float
    batch_norm: float  # from where it is learned


GATES = {"within": Gate(1.0, 0.0), "between": Gate(0.0, 1.0), "deviation": Gate(0.0, 0.0)}


def check_options(norm: Any) -> None:
    """Raises a ValueError with the remedy where an option of a mixture norm is wrong, or contradicts another."""
    check_choice("inference", norm.inference, get_args(Inference))
    check_choice("affine_mode", norm.affine_mode, get_args(AffineMode))
    check_choice("scale", norm.scale, get_args(Scale))
    for name in GATES:
        value = getattr(norm, name)
        if value != "learned" and not is_number(value):
            raise ValueError(f"{name}={value!r} must be a number, or 'learned' for one that is learned for each channel")
    others = [getattr(norm, name) != gate.paper for name, gate in GATES.items()]
    check_form(norm.activation, norm.affine_mode, norm.scale, *others, inference=norm.inference)
    check_choice("activation", norm.activation, (None, *ACTIVATIONS))
    check_choice("population", norm.population, get_args(Population))
    check_seeding(norm)
    check_fit(norm)
    check_backend(norm.backend)
    for name, least in (("num_features", 1), ("num_components", 1), ("history", 1), ("em_iters", 0)):
        value = getattr(norm, name)
        if not _is_whole(value) or value < least:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    if not 0 <= norm.min_weight < 1:
        raise ValueError(f"min_weight={norm.min_weight!r} must be in [0, 1): 0 drops no component")
    if norm.momentum is not None and not (is_number(norm.momentum) and 0 <= norm.momentum <= 1):
        raise ValueError(f"momentum={norm.momentum!r} must be in [0, 1], or None to weigh the history evenly")
    if not norm.eps >= 0:
        raise ValueError(f"eps={norm.eps!r} must not be negative")
    if norm.max_samples is not None and not _is_whole(norm.max_samples):
        raise ValueError(f"max_samples={norm.max_samples!r} must be a whole number, or None for no bound")
    gmm.sample_size(1, norm.num_components, norm.sample_fraction, norm.max_samples)
    if norm.population == "group":
        groups = norm.num_groups
        if not _is_whole(groups) or groups < 1 or norm.num_features % groups:
            raise ValueError(
                f"num_groups={norm.num_groups!r} must divide num_features={norm.num_features} for population='group'"
            )
    elif norm.num_groups is not None:
        raise ValueError(f"num_groups={norm.num_groups!r} is for population='group', not {norm.population!r}: leave it out")


def check_seeding(norm: Any) -> None:
    """What seeding and component_affine need of the other options."""
    if not isinstance(norm.component_affine, bool):
        raise ValueError(f"component_affine={norm.component_affine!r} must be True or False")
    counts = _is_whole(norm.seeding) and not isinstance(norm.seeding, bool) and norm.seeding >= 0
    if not counts and norm.seeding not in get_args(Seeding):
        choices = ", ".join(map(repr, get_args(Seeding)))
        raise ValueError(f"seeding={norm.seeding!r} is unknown: choose one of {choices}, or a number of batches")
    if counts and not norm.keeps_history:
        raise ValueError(f"seeding={norm.seeding} counts batches, which needs a history: use 'kmeans++' or 'warm'")
    if not norm.component_affine:
        return
    if not norm.affine:
        raise ValueError("component_affine=True needs affine=True: there are no γ and β otherwise")
    if norm.seeding != "warm":
        raise ValueError("component_affine=True needs components that keep their place: use seeding='warm'")
    if norm.population != "batch":
        raise ValueError(f"component_affine=True needs population='batch', not {norm.population!r}")
    if not norm.track_running_stats or norm.momentum == 0:
        raise ValueError(
            "component_affine=True needs a history that training fills: use track_running_stats=True and a momentum above 0"
        )
    if norm.affine_mode == "statistics":
        raise ValueError("component_affine=True does not go with affine_mode='statistics': use affine_mode='output'")
    if norm.inference in ("paper", "pooled"):
        raise ValueError(f"component_affine=True does not go with inference={norm.inference!r}: use 'ensemble'")


def check_fit(norm: Any) -> None:
    """What ``fit="ahead"`` needs of the other options."""
    check_choice("fit", norm.fit, get_args(Fit))
    if norm.fit == "batch":
        return
    if not norm.keeps_history:
        raise ValueError(
            "fit='ahead' keeps a mixture from batch to batch: use track_running_stats=True, and population='batch' or "
            "'channel'"
        )
    if norm.seeding != "kmeans++":
        raise ValueError(
            f"fit='ahead' does not go with seeding={norm.seeding!r}, because it seeds the mixture of every batch: use "
            "seeding='kmeans++', or fit='batch'"
        )
    if norm.inference == "pooled":
        raise ValueError("fit='ahead' does not go with inference='pooled': use 'ensemble'")


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral)
