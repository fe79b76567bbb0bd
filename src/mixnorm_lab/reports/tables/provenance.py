"""Where results come from: settings that are not the paper's, and the version that evaluated them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mixnorm_lab.config import catalog
from mixnorm_lab.reports.model.groups import Family, Group
from mixnorm_lab.storage.records import Record
from mixnorm_lab.tables import Table, Value, text_column

# Since 0.2 a mixture that does not describe a point counts for less in evaluation. Commits of before that do so, too.
BOUNDED = ("eed2f4d+", "130b566")


def evaluation(run: Record) -> str:
    """The version whose evaluation a run had."""
    of_two = not str(run.environment.get("mixnorm")).startswith("0.1") or run.environment.get("commit") in BOUNDED
    return "0.2" if of_two else "0.1"


def with_evaluation(table: Table, family: Family) -> Table:
    """With a column that says which version evaluated each mixture norm; batch norm's evaluation never changed."""
    told = {group.label: _told(group) for group in family.groups if group.is_mixture_norm}
    rows: list[dict[str, Value]] = [{**row, "evaluation": told.get(str(row["run"]), "")} for row in table.rows]
    return replace(table, columns=[*table.columns, text_column("evaluation", "evaluation of")], rows=rows).used()


def _told(group: Group) -> str:
    return ", ".join(sorted({evaluation(run) for run in group.runs}))


def deviations(families: Sequence[Family]) -> Table:
    """The settings in which runs that are named as the paper's are not the paper's."""
    found: dict[str, dict[str, None]] = {}
    for group in (group for family in families if not family.validation for group in family.groups):
        known = catalog.EXPERIMENTS.get(group.name)
        if known is None or not known.paper or group.config.average:
            continue
        for line in group.config.differences(known.config):
            if not line.startswith(("seed:", "recalibrate:")):
                found.setdefault(line, {})[group.name.rpartition("/")[0]] = None
        if known.note:
            found.setdefault(f"not in the paper: {known.note}", {})[group.name.rpartition("/")[0]] = None
    columns = [text_column("what", "setting"), text_column("where", "runs")]
    rows: list[dict[str, Value]] = [{"what": what, "where": ", ".join(where)} for what, where in found.items()]
    return Table("Settings of the runs", columns, rows)
