"""The picture of two modes: what each norm makes of two modes, and that it can be drawn."""

import sys

import pytest

from mixnorm_lab import demo


@pytest.fixture(scope="module")
def found():
    x, mode = demo.two_modes()
    outputs, _ = demo.normalize(x)
    everything = zip(("input", *demo.NORMS), (x, *outputs), strict=True)
    return {name: (demo.deviations(y, mode), demo.separation(y, mode)) for name, y in everything}


def test_batch_norm_keeps_the_shape(found):
    (narrow, wide), apart = found["input"]
    (first, second), after = found["batch norm"]
    assert second / first == pytest.approx(wide / narrow, rel=1e-3)
    assert after == pytest.approx(apart, rel=1e-3)
    assert apart > 3


def test_the_papers_form_makes_one_cloud_of_both_modes(found):
    assert found[demo.NORMS[1]][1] < 0.1


def test_the_other_form_gives_both_modes_one_width_and_keeps_them_apart(found):
    (first, second), apart = found[demo.NORMS[2]]
    assert first == pytest.approx(1, abs=0.05)
    assert second == pytest.approx(1, abs=0.05)
    assert 1.5 < apart < 2.5


def test_what_is_lost_is_which_mode_a_point_was_in():
    x, mode = demo.two_modes()
    batch_norm, paper, beside = (demo.told(y, mode) for y in demo.normalize(x)[0])
    assert batch_norm == pytest.approx(demo.told(x, mode), abs=1e-4)
    assert batch_norm > 0.99
    assert 0.65 < paper < 0.72  # a guess is right for 65%; what is left is that 1/√λ makes the rarer mode a little wider
    assert 0.9 < beside < batch_norm


def test_the_picture_and_what_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo", str(tmp_path / "picture.png")])
    demo.main()
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert all(name in said for name in ("input", *demo.NORMS))
    assert f"Picture: {tmp_path / 'picture.png'}" in said
