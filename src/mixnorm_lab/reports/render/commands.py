"""The commands that make the records of a document again."""

from __future__ import annotations

from collections.abc import Sequence

from mixnorm_lab.config import catalog
from mixnorm_lab.config.run_config import OPTIONS
from mixnorm_lab.reports.model.groups import Family, Group


def commands(family: Family) -> tuple[str, ...]:
    """What makes the records of a family."""
    by_settings: dict[tuple[str, ...], list[str]] = {}
    for group in family.groups:
        if group.runs and group.name in catalog.EXPERIMENTS:
            by_settings.setdefault(_options(group), []).append(group.name)
    made = [" ".join(["mixnorm reproduce", *_patterns(names), *options]) for options, names in by_settings.items()]
    needs_features = any(group.config.gan is not None for group in family.groups)
    return (f"mixnorm reproduce {catalog.FEATURE_CLASSIFIER}", *made) if needs_features else tuple(made)


def _options(group: Group) -> tuple[str, ...]:
    """What the command says beside the names: where the runs are not as the catalog has them."""
    config, known = group.config, catalog.EXPERIMENTS[group.name].config
    told = [f"--seeds {len({run.config.seed for run in group.all_runs})}"]
    for name, option in OPTIONS.items():
        if name == "epochs" or option.shared:  # which are those of mixnorm reproduce
            value = getattr(config, name)
            told += [option.on_command_line(value)] if value != getattr(known, name) else []
    told += [f"--features runs/reproduce/{catalog.FEATURE_CLASSIFIER}/seed-0"] if config.gan is not None else []
    return tuple(told)


def _patterns(names: Sequence[str]) -> list[str]:
    """The names, or a glob for those of a folder that are all there."""
    found: dict[str, None] = {}
    for name in names:
        pattern = f"{name.rpartition('/')[0]}/*"
        whole = {match.name for match in catalog.match(pattern)} <= set(names)
        found[f"'{pattern}'" if whole else name] = None
    return list(found)
