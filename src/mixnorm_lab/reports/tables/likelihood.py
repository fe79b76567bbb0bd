"""How many components a norm's input wants, as a table."""

from __future__ import annotations

from mixnorm_lab.inspect.likelihood import LayerLikelihoods
from mixnorm_lab.tables import Column, Table, Value


def table(view: LayerLikelihoods) -> Table:
    """A row for each K; likelihoods and BIC beside those of one Gaussian, in nats a point."""
    one = view.rows[0]
    columns = (
        Column("components", "K", digits=0),
        Column("fitted", "log-likelihood, fitted", digits=2),
        Column("held_out", "of other samples", digits=2),
        Column("bic", "BIC", digits=2),
        Column("modes", "modes", digits=0),
    )
    rows: list[dict[str, Value]] = [
        {
            "components": row.components,
            "fitted": row.fitted - one.fitted,
            "held_out": row.held_out - one.held_out,
            "bic": row.bic - one.bic,
            "modes": row.modes,
        }
        for row in view.rows
    ]
    notes = (
        f"Mixtures of {view.layer}'s input, fitted to {view.points:,} points of {view.channels} channels, and tried on as "
        "many of other samples. In nats a point, beyond K = 1; of the BIC less is better. Modes are the maxima of the "
        "fitted density: where there is one, the components overlap and differ in their widths.",
    )
    return Table(f"How many components {view.layer} wants", columns, rows, notes)
