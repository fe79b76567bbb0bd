"""The way from a layer to its kernels is short: few calls, few frames, one choice of an implementation."""

import sys
from pathlib import Path

import pytest
import torch

import mixnorm
from mixnorm.ops import choose

LIBRARY = str(Path(mixnorm.__file__).parent)
MOST_CALLS = 48  # into the library, compiled loops among them, in a training forward pass
MOST_FRAMES = 5  # from forward to a compiled loop


def walk(layer, x):
    """The functions of the library that a forward pass calls, with the number of its frames that are below each."""
    calls = []

    def follow(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            depth, above = 0, frame
            while above is not None and above.f_code.co_name != "_call_impl":
                depth += above.f_code.co_filename.startswith(LIBRARY)
                above = above.f_back
            calls.append((f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}", depth))

    sys.setprofile(follow)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return calls


@pytest.fixture
def choices(monkeypatch):
    """How often an implementation was chosen."""
    counted = []
    followed = choose.is_followed
    monkeypatch.setattr(choose, "is_followed", lambda points: counted.append(points.shape) or followed(points))
    return counted


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_from_a_layer_to_its_kernels(training, choices):
    layer, x = mixnorm.MixtureNorm2d(8), torch.randn(16, 8, 4, 4, requires_grad=True)
    layer(x)
    choices.clear()
    calls = walk(layer.train(training), x)
    assert len(choices) == 1
    names = [name for name, _ in calls]
    assert len(names) <= MOST_CALLS, names
    kernels = [depth - 1 for name, depth in calls if name == "__init__._arrays"]
    assert kernels, "the compiled loops were not used"
    assert max(kernels) <= MOST_FRAMES, calls
