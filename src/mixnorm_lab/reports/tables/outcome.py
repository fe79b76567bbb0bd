"""What came out of runs: the one object that a terminal, JSON and a page are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mixnorm_lab.reports.model import comparison, sentences
from mixnorm_lab.reports.model.comparison import Comparison
from mixnorm_lab.reports.model.groups import Family, families
from mixnorm_lab.reports.model.measure import PLAIN, RECALIBRATED
from mixnorm_lab.reports.tables import distances
from mixnorm_lab.reports.tables.results import by_quarters, ends, steps
from mixnorm_lab.storage.records import Record
from mixnorm_lab.tables import Table


@dataclass(frozen=True)
class Evaluated:
    """Families of classifiers by one way to evaluate them: with running statistics, or with refilled ones."""

    families: Sequence[Family]
    key: str

    @cached_property
    def comparisons(self) -> list[tuple[Family, Comparison]]:
        """Every norm beside batch norm."""
        return [(family, made) for family in self.families for made in comparison.comparisons(family, self.key)]

    @cached_property
    def answers(self) -> list[str]:
        return sentences.answers(self.comparisons)

    @cached_property
    def tables(self) -> list[tuple[Table, ...]]:
        """For each family how good its norms are in the end, the steps to fixed targets, and the best after each quarter."""
        return [(ends(one, self.key), steps(one, self.key), by_quarters(one, self.key)) for one in self.families]

    @property
    def shown(self) -> list[tuple[Table, ...]]:
        """What a terminal has room for: of norms side by side the first table alone."""
        shown = []
        for family, (first, second, _) in zip(self.families, self.tables, strict=True):
            left_out = ("average", "unsteady", *(["best"] if family.side_by_side else []))
            tables = (first.without(*left_out), *([] if family.side_by_side else [second]))
            shown.append(tuple(table for table in tables if table.rows))
        return shown


@dataclass(frozen=True)
class Outcome:
    """The families of runs, with the tables and sentences about them, each of which is made once."""

    records: Sequence[Record]

    @cached_property
    def classifiers(self) -> list[Family]:
        return families(record for record in self.records if record.config.gan is None)

    @cached_property
    def generators(self) -> list[Family]:
        return families(record for record in self.records if record.config.gan is not None)

    @cached_property
    def plain(self) -> Evaluated:
        return Evaluated(self.classifiers, PLAIN)

    @cached_property
    def refilled(self) -> Evaluated:
        return Evaluated(self.classifiers, RECALIBRATED)

    @cached_property
    def distances(self) -> list[Table]:
        """The lowest distances of each family of generators."""
        return [distances.distances(family) for family in self.generators]

    @cached_property
    def distance_answers(self) -> list[str]:
        return distances.answers(self.generators)

    @property
    def tables(self) -> list[Table]:
        """The tables that a terminal shows."""
        ways = [self.plain] + [self.refilled] * any(record.config.recalibrate for record in self.records)
        by_family = zip(*(way.shown for way in ways), strict=True)
        return [*(table for pairs in by_family for pair in pairs for table in pair), *self.distances]

    @property
    def answers(self) -> list[str]:
        """The sentences that say what came out."""
        return [*self.plain.answers, *self.distance_answers]
