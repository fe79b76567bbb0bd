"""Forms of mixture norm beside the paper's: what the recommended setting was chosen from, on validation images, and some
that came later.

Each changes the paper's MN-2 of the CIFAR CNN, which has K = 3, EM iter. 2 and ReLU inside the sum at conv3.
"""

from __future__ import annotations

from typing import Any

ALL = ("conv1", "conv2", "conv3", "conv4")

# name: layers, options that differ
FORMS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "paper": (("conv3",), {}),
    "relu-outside": (("conv3",), {"activation": None}),
    "statistics": (("conv3",), {"affine_mode": "statistics"}),
    "k-5": (("conv3",), {"num_components": 5}),
    "em-4": (("conv3",), {"em_iters": 4}),
    "all-points": (("conv3",), {"sample_fraction": 1.0, "max_samples": None}),
    "warm": (("conv3",), {"seeding": "warm"}),
    "mixture": (("conv3",), {"inference": "mixture"}),
    "pooled": (("conv3",), {"inference": "pooled"}),
    "conv2": (("conv2",), {}),
    "conv2-3": (("conv2", "conv3"), {}),
    "conv3-4": (("conv3", "conv4"), {}),
    "conv2-3-4": (("conv2", "conv3", "conv4"), {}),
    "all-layers": (ALL, {}),
    "all-layers-relu-outside": (ALL, {"activation": None}),
    "all-layers-steady": (ALL, {"inference": "steady"}),
    "all-layers-even": (ALL, {"momentum": None}),
    "all-layers-history-20": (ALL, {"history": 20}),
    "all-layers-history-40": (ALL, {"history": 40}),
    "all-layers-steady-history-40": (ALL, {"inference": "steady", "history": 40}),
    "conv2-3-k-5": (("conv2", "conv3"), {"num_components": 5}),
    "warm-conv2-3": (("conv2", "conv3"), {"seeding": "warm"}),
    "warm-conv2-3-4": (("conv2", "conv3", "conv4"), {"seeding": "warm"}),
    "warm-all-layers": (ALL, {"seeding": "warm"}),
}

RECOMMENDED = "all-layers"  # the largest mean accuracy on held-out training images
# The recommended form with the inference that needs no refilled statistics, for weights averaged as they are.
FOLLOWING = "all-layers-steady-history-40"
