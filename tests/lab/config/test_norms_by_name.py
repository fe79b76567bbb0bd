"""The runs of a comparison of norms by their names."""

from dataclasses import replace

import pytest

from mixnorm_lab.config.presets import DIGITS, digest, of_norm, pair, side_by_side
from mixnorm_lab.config.run_config import RunConfig


def test_norms_take_turns_and_batch_norm_is_always_there():
    runs = side_by_side(DIGITS, ["ghost-32", "mixture"], 2)
    assert [(run.name, run.seed) for run in runs] == [
        ("batch-norm", 0), ("ghost-32", 0), ("mixture-norm", 0), ("batch-norm", 1), ("ghost-32", 1), ("mixture-norm", 1),
    ]  # fmt: skip
    assert [run.norm for run in runs[:3]] == [None, "ghost-32", None]
    assert [run.mixture for run in runs[:3]] == [None, None, DIGITS.mixture]
    assert [run for run in runs if run.norm is None] == pair(DIGITS, 2)


def test_options_behind_mixture_change_the_presets():
    run = of_norm(DIGITS, "mixture:em_iters=0:inference=steady:momentum=none:layers=conv1+conv3")
    assert run.mixture.options == DIGITS.mixture.options | {"em_iters": 0, "inference": "steady", "momentum": None}
    assert run.mixture.layers == ("conv1", "conv3")
    assert run.name == "mixture-norm,em_iters=0,inference=steady,momentum=none,layers=conv1+conv3"
    assert of_norm(DIGITS, "mixture:layers=inc2/*").name == "mixture-norm,layers=inc2--"


def test_a_norm_replaces_all_batch_norms_or_those_asked_for():
    assert of_norm(DIGITS, "layer").norm_layers == ("*",)
    assert of_norm(DIGITS, "layer", ("conv2",)).norm_layers == ("conv2",)
    assert of_norm(DIGITS, "layer:layers=conv1", ("conv2",)).norm_layers == ("conv1",)


def test_a_norm_is_a_part_of_a_run_and_older_runs_keep_their_identity():
    plain, run = of_norm(DIGITS, "batch"), of_norm(DIGITS, "ghost-32")
    assert not {"norm", "norm_layers"} & plain.to_json().keys()
    assert (
        len({of_norm(DIGITS, name).identity() for name in ("batch", "ghost-32", "ghost-16", "ghost-32:layers=conv1")}) == 4
    )
    assert RunConfig.from_json(run.to_json()) == run
    again = of_norm(DIGITS, "ghost-32:layers=conv1")
    assert RunConfig.from_json(again.to_json()) == again


def test_comparisons_of_one_preset_share_a_folder():
    assert digest(DIGITS, ("*",)) == digest(DIGITS, ("*",))
    others = [digest(replace(DIGITS, epochs=2), ("*",)), digest(DIGITS, ("conv2",))]
    assert digest(DIGITS, ("*",)) not in others


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        ("gost-32", "use ghost-32"),
        ("mixture:em_iters", "the norm 'mixture:em_iters': em_iters says no value: write it as name=value"),
        ("ghost-32:eps=1", "ghost-32 has no eps to set: options are of mixture"),
        ("batch:layers=conv1", "batch has no layers to set"),
    ],
)
def test_mistakes_are_named(norm, message):
    with pytest.raises(ValueError, match=message):
        of_norm(DIGITS, norm)


def test_a_norm_is_named_once():
    with pytest.raises(ValueError, match="ghost-32 is there 2 times: name each norm once"):
        side_by_side(DIGITS, ["ghost-32", "batch", "ghost-32"], 1)
