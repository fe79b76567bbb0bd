"""Inputs and options that a layer cannot take: an error that says what it can."""

import numpy as np
import pytest
import torch
from layer_helpers import all_finite, randn

from mixnorm import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (MixtureNorm1d(4), (1, 4)),
        (MixtureNorm1d(4, population="channel"), (1, 4)),
        (MixtureNorm1d(4, num_components=1), (1, 4, 1)),
        (MixtureNorm2d(4), (1, 4, 1, 1)),
        (MixtureNorm3d(4), (1, 4, 1, 1, 1)),
        (MixtureNorm2d(4, population="instance"), (8, 4, 1, 1)),
        (MixtureNorm2d(4, population="group", num_groups=4), (8, 4, 1, 1)),
        (MixtureNorm2d(4, track_running_stats=False), (1, 4, 1, 1)),
    ],
    ids=str,
)
def test_one_value_per_channel_cannot_train(layer, shape):
    x = randn(*shape)
    with pytest.raises(ValueError, match=r"more than 1 value per channel.*larger batch.*eval\(\)"):
        layer(x)
    assert all_finite(layer.eval()(x))  # but it can be evaluated


@pytest.mark.parametrize(
    ("layer", "x", "message"),
    [
        (MixtureNorm1d(4), randn(4), r"\(N, C\) or \(N, C, L\).*1-D of shape \(4,\)"),
        (MixtureNorm1d(4), randn(2, 4, 3, 3), r"\(N, C\) or \(N, C, L\).*4-D"),
        (MixtureNorm2d(4), randn(4, 3, 3), r"\(N, C, H, W\).*3-D of shape \(4, 3, 3\)"),
        (MixtureNorm2d(4), randn(2, 4, 3, 3, 3), r"\(N, C, H, W\).*5-D"),
        (MixtureNorm3d(4), randn(2, 4, 3, 3), r"\(N, C, D, H, W\).*4-D"),
        (MixtureNorm2d(4), randn(2, 5, 3, 3), r"4 channels.*got 5"),
        (MixtureNorm2d(4), randn(2, 3, 3, 4), r"4 channels.*got 3"),
        (MixtureNorm2d(4), torch.ones(2, 4, 3, 3, dtype=torch.long), r"torch.int64.*float"),
        (MixtureNorm2d(4), torch.ones(2, 4, 3, 3, dtype=torch.bool), r"torch.bool.*float"),
    ],
    ids=lambda v: tuple(v.shape) if isinstance(v, torch.Tensor) else type(v).__name__,
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_wrong_input_is_an_error_that_says_what_was_expected(layer, x, message, training):
    with pytest.raises(ValueError, match=message):
        layer.train(training)(x)


@pytest.mark.parametrize(
    "options",
    [
        {"seeding": "random"},
        {"inference": "average"},
        {"affine_mode": "input"},
        {"activation": "tanh"},
        {"population": "sample"},
        {"backend": "cuda"},
        {"num_components": 0},
        {"num_components": 2.5},
        {"history": 0},
        {"em_iters": -1},
        {"sample_fraction": 0},
        {"sample_fraction": 1.5},
        {"max_samples": 2},
        {"min_weight": -0.1},
        {"min_weight": 1},
        {"momentum": -0.1},
        {"momentum": 1.5},
        {"num_groups": 2},
        {"num_groups": None, "population": "group"},
        {"num_groups": 0, "population": "group"},
        {"num_groups": 3, "population": "group"},
        {"num_groups": -2, "population": "group"},
    ],
    ids=str,
)
def test_wrong_options_are_errors_that_name_the_value(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        MixtureNorm2d(4, **options)


def test_numbers_of_numpy_are_numbers():
    """A width that was computed with numpy, say; batch norm takes it."""
    options = {"num_components": np.int64(2), "history": np.int32(2), "em_iters": np.int64(3), "max_samples": np.int64(64)}
    layer = MixtureNorm2d(np.int64(4), np.float32(1e-3), np.float32(0.2), population="batch", **options)
    grouped = MixtureNorm2d(4, population="group", num_groups=np.int64(2))
    x = randn(8, 4, 3, 3)
    for mode in (True, False):
        assert all_finite(layer.train(mode)(x))
        assert all_finite(grouped.train(mode)(x))


def test_what_cannot_run_here_is_an_error(monkeypatch):
    """A backend or a process group that is asked for is never passed over in silence."""
    monkeypatch.setattr("mixnorm.ops.triton.INTERPRETED", False)  # with the interpreter it could
    with pytest.raises((RuntimeError, NotImplementedError), match="triton"):
        MixtureNorm2d(4, backend="triton")(randn(2, 4, 3, 3))
    with pytest.raises(ValueError, match=r"process_group=.* is not a process group"):
        MixtureNorm2d(4, process_group=object())(randn(2, 4, 3, 3))
