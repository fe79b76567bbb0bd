"""Which epochs and channels the snapshots of mixtures in a record are of, and which of those a picture shows."""

from __future__ import annotations

from collections.abc import Sequence

SNAPSHOTS = 10  # a training
STAGES = 5  # of those, the ones that the paper draws: after 20%, 40%, …
CHANNELS = 8  # a snapshot
SILENT = 0.05  # of the largest deviation: channels below it hardly vary, as those do that weight decay switched off


def snapshot_epochs(epochs: int, count: int = SNAPSHOTS) -> list[int]:
    """Up to ``count`` evenly spaced epochs of a training, the last one among them. Those of 5 are among those of 10."""
    return sorted({max(1, (2 * epochs * part + count) // (2 * count)) for part in range(1, count + 1)})


def spread(total: int, count: int) -> list[int]:
    """Up to ``count`` evenly spaced indices below ``total``: the middles of as many equal parts."""
    count = min(count, total)
    return [(2 * part + 1) * total // (2 * count) for part in range(count)]


def lively(deviations: Sequence[float], usual: Sequence[int], count: int) -> list[int]:
    """The ``usual`` channels, or up to ``count`` evenly spaced ones of those that vary if one of the usual does not."""
    least = SILENT * max(deviations)
    alive = [channel for channel, deviation in enumerate(deviations) if not deviation < least]
    return list(usual) if set(usual) <= set(alive) else [alive[i] for i in spread(len(alive), count)]
