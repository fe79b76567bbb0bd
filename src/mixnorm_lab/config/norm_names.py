"""The names of norms to compare mixture norm with, such as "ghost-32": what each means, without the layers themselves."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of norm.

    Args:
        text: how a report tells it; ``{}`` stands for its number, and ``{samples}`` for what the data consists of.
        more: behind that, where there may be a number and is one.
        example: a name of this kind.
        whole: whether its number counts something; else it is a share between 0 and 1.
        number: whether its name has a number: "always", "never" or "may".
    """

    text: str
    example: str
    whole: bool = True
    number: str = "always"
    more: str = ""


KINDS = {
    "ghost": Kind("ghost batch norm, groups of {} {samples}", "ghost-32"),
    "parabola": Kind("ghost batch norm with a parabola, groups of {} {samples}", "parabola-32"),
    "group": Kind("group norm, {} groups of channels", "group-32"),
    "layer": Kind("layer norm", "layer", number="never"),
    "instance": Kind("instance norm", "instance", number="never"),
    "enhanced": Kind("instance-enhanced batch norm", "enhanced", number="may", more=", groups of {} {samples}"),
    "renorm": Kind("batch renorm", "renorm", number="may", more=", as batch norm for {} steps"),
    "mode": Kind("mode norm, {} modes", "mode-2"),
    "shuffled": Kind("mixture norm with shuffled responsibilities, K = {}", "shuffled-3"),
    "dropout": Kind("batch norm with dropout of {}", "dropout-0.1", whole=False),
}
BATCH, MIXTURE = "batch", "mixture"  # beside these, what a comparison calls the norms that have no kind here
EXAMPLES = tuple(kind.example for kind in KINDS.values())


@dataclass(frozen=True)
class NormName:
    """A name in its parts: "ghost-32" is the kind "ghost" and the number 32; None where there is no number."""

    kind: str
    number: float | None

    def text(self, samples: str = "images") -> str:
        """How a report tells it. ``samples`` is what the data consists of, such as "rows"."""
        kind = KINDS[self.kind]
        if self.number is None:
            return kind.text
        return (kind.text + kind.more).format(f"{self.number:g}", samples=samples)


def parse(name: str) -> NormName:
    """The parts of a name; an error says what there is."""
    found = re.fullmatch(r"([a-z]+)(?:-(\d+(?:\.\d+)?))?", name)
    if found is None or found[1] not in KINDS:
        known = (BATCH, MIXTURE, *EXAMPLES)
        near = difflib.get_close_matches(name, known, cutoff=0.5) or known
        raise ValueError(f"there is no norm {name!r}: use {' or '.join(near)}")
    kind, digits = KINDS[found[1]], found[2]
    if (digits is None and kind.number == "always") or (digits is not None and kind.number == "never"):
        raise ValueError(f"the norm {name!r} {'lacks its' if digits is None else 'has no'} number: write {kind.example}")
    if digits is None:
        return NormName(found[1], None)
    number = float(digits)
    if not ((number >= 1 and number == int(number)) if kind.whole else 0 < number < 1):
        wanted = "a whole number from 1 on" if kind.whole else "a share between 0 and 1"
        raise ValueError(f"the number of the norm {name!r} must be {wanted}: write it as {kind.example}")
    return NormName(found[1], int(number) if kind.whole else number)
