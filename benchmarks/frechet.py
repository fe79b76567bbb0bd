"""What a Fréchet distance costs, beside the textbook's matrix square root.

    python benchmarks/frechet.py [--features 50000] [--dimensions 2048] [--rank RANK]

Two sets of random features go in batch by batch, as from a feature network, whose own time is not counted. With a rank below
the dimensions the covariances are singular.
"""

from __future__ import annotations

import argparse
import time

import torch

from mixnorm_lab.generators import frechet

BATCH = 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, default=50_000, help="of each set")
    parser.add_argument("--dimensions", type=int, default=2048)
    parser.add_argument("--rank", type=int, help="of the covariances; all dimensions, unless given")
    arguments = parser.parse_args()
    rank = arguments.rank or arguments.dimensions
    made = torch.Generator().manual_seed(0)

    def measure():
        """The statistics of a set, and the seconds that they took."""
        directions = torch.randn(rank, arguments.dimensions, generator=made)
        seen, seconds = frechet.Accumulator(arguments.dimensions), 0.0
        for first in range(0, arguments.features, BATCH):
            count = min(BATCH, arguments.features - first)
            batch = torch.randn(count, rank, generator=made) @ directions
            start = time.perf_counter()
            seen.add(batch)
            seconds += time.perf_counter() - start
        start = time.perf_counter()
        found = seen.statistics()
        return found, seconds + time.perf_counter() - start

    (a, first), (b, second) = measure(), measure()
    start = time.perf_counter()
    found = frechet.distance(a, b)
    ours = time.perf_counter() - start
    print(f"{arguments.features:,} features of {arguments.dimensions:,} dimensions, rank {rank:,}")
    print(f"statistics of each set {first:.1f} s and {second:.1f} s, distance {ours:.1f} s: {first + second + ours:.1f} s")

    import scipy.linalg

    start = time.perf_counter()
    root = scipy.linalg.sqrtm(a.covariance.numpy() @ b.covariance.numpy()).real
    means = (a.mean - b.mean).square().sum().item()
    textbook = means + a.covariance.trace().item() + b.covariance.trace().item() - 2 * root.trace()
    theirs = time.perf_counter() - start
    print(f"by scipy's matrix square root {theirs:.1f} s, {theirs / ours:.1f} times as long; {found:.6g} and {textbook:.6g}")


if __name__ == "__main__":
    main()
