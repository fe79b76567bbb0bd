"""Generators of points in the plane, one JSON file for each data set: how they were trained, and what each reached."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mixnorm_lab.config.plane import NORMS, PlaneSettings


def path(folder: Path, data: str) -> Path:
    """The file of a data set."""
    return folder / f"modes-{data}.json"


@dataclass(frozen=True)
class Score:
    """What a generator of points in the plane reaches.

    Args:
        reached: how many modes have a good sample.
        good: the share of samples within three deviations of a mode.
        divergence: Kullback-Leibler, in nats, of how the samples fall to their nearest modes from a uniform fall: 0 if all
            modes get the same, log M if one gets everything.
    """

    reached: int
    good: float
    divergence: float


@dataclass(frozen=True)
class Result:
    """One generator: its score, and some of its samples (N, 2) as a list."""

    norm: str
    seed: int
    score: Score
    points: list[list[float]]


def read(path: Path, settings: PlaneSettings | None = None) -> list[Result]:
    """The results in a file; none where there is no file. With ``settings``, the file must be of those."""
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        told = PlaneSettings(**content["settings"])
        found = [Result(r["norm"], r["seed"], Score(**r["score"]), r["points"]) for r in content["results"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it to run the comparison again") from error
    if settings is not None and told != settings:
        raise ValueError(f"{path} was computed with other settings ({told}): choose another folder, or remove it")
    return found


def write(path: Path, settings: PlaneSettings, environment: Mapping[str, Any], results: Sequence[Result]) -> None:
    """Puts a file with these results in place of the one that is there."""
    content = {
        "settings": asdict(settings),
        "environment": dict(environment),
        "results": [asdict(result) for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content) + "\n", encoding="utf-8")
    os.replace(new, path)


def by_norm(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    for norm in NORMS:
        if found := [result for result in results if result.norm == norm]:
            yield norm, found
