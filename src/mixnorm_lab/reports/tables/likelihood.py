"""How many components norms' inputs want, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from mixnorm_lab.inspect.likelihood import LayerLikelihoods
from mixnorm_lab.tables import Column, Table, Value, text_column

NOTES = (
    "The log-likelihood of a point of samples that the mixture of K components was not fitted to, in nats beyond K = 1 "
    "without covariances. Input: components without covariances, as in mixture norm. Normal: the same of points drawn from "
    "one normal distribution with the input's covariances, which has one mode; what it gains needs no modes. Covariances: "
    "the input again, components with covariances.",
    "BIC: the K that it chooses, of these. Modes: the maxima of the density, for each K. Of the largest K: One mode, the "
    "channels that have one, each by itself. Between, the share of a channel's variance that lies between the components' "
    "centres; 0 where they share one. Widths, how many times as wide as the narrowest component the widest is.",
)
KINDS = ("input", "normal", "covariances")


def table(views: Sequence[LayerLikelihoods]) -> Table:
    """Three rows for each layer: its input, and the two that it is to be held against."""
    one = len(views) == 1
    columns = (
        *(() if one else (text_column("layer", "norm"), Column("epochs", "epochs", digits=0))),
        text_column("kind", "mixtures"),
        *(Column(str(row.components), f"K = {row.components}", digits=1) for row in views[0].rows),
        Column("bic", "BIC", digits=0),
        text_column("modes", "modes"),
        Column("one_mode", "one mode", digits=0, unit="%"),
        Column("between", "between", digits=0, unit="%"),
        Column("widths", "widths", digits=1),
    )
    rows = [row for view in views for row in _rows(view)]
    what = f"{views[0].layer} wants" if one else "the norms want"
    return Table(f"How many components {what}", columns, rows, NOTES)


def _rows(view: LayerLikelihoods) -> list[dict[str, Value]]:
    rows: list[dict[str, Value]] = []
    for kind, found in zip(KINDS, (view.rows, view.normal, view.covariances), strict=True):
        base = (view.normal if kind == "normal" else view.rows)[0].held_out
        last = found[-1]
        rows.append({"layer": view.layer, "epochs": view.epochs, "kind": kind})
        rows[-1] |= {str(row.components): row.held_out - base for row in found}
        rows[-1] |= {
            "bic": min(found, key=lambda row: row.bic).components,
            "modes": ", ".join(str(row.modes) for row in found),
            "one_mode": 100 * last.one_mode / view.channels,
            "between": 100 * last.between,
            "widths": last.widths,
        }
    return rows
