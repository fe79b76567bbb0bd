"""Counting modes: the scores of sets whose scores are known, and a small comparison."""

import json
import math

import pytest
import torch
from cli_helpers import invoke

from mixnorm import MixtureNorm1d
from mixnorm_lab.cli import generators
from mixnorm_lab.config.plane import DATA, NORMS, PlaneData, PlaneSettings
from mixnorm_lab.generators import plane
from mixnorm_lab.generators.plane import compare, draw, make_networks, score
from mixnorm_lab.storage import plane_results

TINY = PlaneSettings(steps=30, batch_size=32, width=16, latent=4)


@pytest.mark.parametrize(("name", "count", "apart"), [("grid", 25, 2.0), ("ring", 8, 4 * math.sin(math.pi / 8))])
def test_the_modes(name, count, apart):
    centres = torch.tensor(DATA[name].centres)
    between = torch.cdist(centres, centres) + 100 * torch.eye(count)
    assert between.min().item() == pytest.approx(apart, abs=1e-5)
    assert centres.mean(0).abs().max() < 1e-6


def test_the_modes_are_those_of_the_kept_results_to_the_bit():
    side, angles = torch.arange(-4.0, 5.0, 2.0), torch.arange(8) * (2 * math.pi / 8)
    assert torch.equal(torch.tensor(DATA["grid"].centres), torch.cartesian_prod(side, side))
    assert torch.equal(torch.tensor(DATA["ring"].centres), 2 * torch.stack((angles.cos(), angles.sin()), dim=1))


@pytest.mark.parametrize("name", DATA)
def test_real_points_are_a_perfect_sample(name):
    torch.manual_seed(0)
    found = score(draw(DATA[name], 50_000), DATA[name])
    assert found.reached == len(DATA[name].centres)
    assert found.good == pytest.approx(1 - math.exp(-4.5), abs=0.002)  # of two dimensions, within three deviations
    assert 0 <= found.divergence < 0.002


@pytest.mark.parametrize("name", DATA)
def test_a_collapsed_generator(name):
    centres = torch.tensor(DATA[name].centres)
    one = score(centres[3].expand(100, 2), DATA[name])
    assert (one.reached, one.good) == (1, 1.0)
    assert one.divergence == pytest.approx(math.log(len(centres)))
    two = score(torch.cat((centres[:1].expand(50, 2), centres[1:2].expand(50, 2))), DATA[name])
    assert (two.reached, two.divergence) == (2, pytest.approx(math.log(len(centres) / 2)))


def test_points_between_the_modes_are_not_good():
    middle = score(torch.tensor([[1.0, 1.0], [1.0, -3.0]]), DATA["grid"])
    assert (middle.reached, middle.good) == (0, 0.0)
    edge = torch.tensor([[0.149, 0.0], [0.151, 0.0]])
    assert score(edge, DATA["grid"]).good == 0.5


def test_both_norms_start_from_the_same_weights():
    (batch, a), (mixture, b) = (make_networks(norm, TINY, seed=3) for norm in NORMS)
    assert [type(module) for module in mixture.modules()].count(MixtureNorm1d) == 2
    for ours, theirs in zip((*batch.parameters(), *a.parameters()), (*mixture.parameters(), *b.parameters()), strict=True):
        assert torch.equal(ours, theirs)


def test_a_generator_comes_closer(monkeypatch):
    """Of one mode far from where it begins."""
    one = PlaneData("one", ((3.0, -3.0),), 0.1)
    for norm in NORMS:
        monkeypatch.setattr(plane, "SHOWN", 200)
        settings = PlaneSettings(steps=100, batch_size=64, width=32, latent=4)
        start = plane.samples(make_networks(norm, settings, 0)[0], settings, 200)
        end = torch.tensor(plane.run(one, norm, 0, settings).points)
        centre = torch.tensor(one.centres)
        assert torch.cdist(end, centre).mean() < 0.5 * torch.cdist(start, centre).mean()


def test_a_comparison_is_kept_and_goes_on(tmp_path, monkeypatch):
    told = []
    first = compare("ring", tmp_path, seeds=1, settings=TINY, done=told.append)
    assert [(result.norm, result.seed) for result in first] == [("batch norm", 0), ("mixture norm", 0)]
    assert told == first
    assert plane_results.read(tmp_path / "modes-ring.json") == first
    assert json.loads((tmp_path / "modes-ring.json").read_text())["environment"]["torch"] == torch.__version__
    monkeypatch.setattr(plane, "run", None)  # nothing is left to do
    assert compare("ring", tmp_path, seeds=1, settings=TINY) == first


def test_the_same_seed_gives_the_same_generator(tmp_path):
    a, b = (plane.run(DATA["grid"], "batch norm", 5, TINY) for _ in range(2))
    assert a == b
    assert a.points != plane.run(DATA["grid"], "batch norm", 6, TINY).points


def test_mistakes(tmp_path):
    with pytest.raises(ValueError, match="choose one of grid, ring"):
        compare("spiral", tmp_path)
    (tmp_path / "modes-ring.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        compare("ring", tmp_path, seeds=1, settings=TINY)
    plane_results.write(tmp_path / "modes-ring.json", TINY, {}, [])
    with pytest.raises(ValueError, match="other settings"):
        compare("ring", tmp_path, seeds=1)


def test_the_command_compares_and_leaves_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(generators, "UPDATES", 30)
    arguments = ["compare", "--task", "gan", "--data", "ring", "--seeds", "2", "--epochs", "1", "--out", tmp_path]
    told = json.loads(invoke(*arguments, "--json").stdout)
    [table] = told["tables"]
    kept = plane_results.read(tmp_path / "modes-ring.json")
    for row in table["rows"]:
        scores = [result.score for result in kept if result.norm == row["norm"]]
        assert row["reached"]["mean"] == pytest.approx(sum(one.reached for one in scores) / 2)
        assert row["good"]["mean"] == pytest.approx(50 * sum(one.good for one in scores))
        number = "{mean:.1f} ± {deviation:.1f}".format
        assert f"{row['norm']} reached {number(**row['reached'])} modes with {number(**row['good'])}%" in told["answers"][0]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert told["answers"][0] in page
    assert page.count("<img ") == 1
    shown = invoke(*arguments)  # nothing is trained again
    assert "batch norm seed 1: " in shown.stdout
    assert "report.html" in shown.stdout
    (tmp_path / "report.html").unlink()
    again = json.loads(invoke("report", tmp_path, "--json").stdout)
    assert (again["answers"], again["tables"]) == (told["answers"], told["tables"])
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page


def test_ctrl_c_keeps_what_is_there_and_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(generators, "UPDATES", 30)
    run = plane.run

    def cut(data, norm, seed, settings):
        if (norm, seed) == ("mixture norm", 0):
            raise KeyboardInterrupt
        return run(data, norm, seed, settings)

    monkeypatch.setattr(plane, "run", cut)
    arguments = ["compare", "--task", "gan", "--data", "ring", "--seeds", "1", "--epochs", "1", "--out", tmp_path]
    result = invoke(*arguments, code=130)
    assert result.stderr.splitlines()[-1] == "Interrupted: the same command goes on from here."
    assert [one.norm for one in plane_results.read(tmp_path / "modes-ring.json")] == ["batch norm"]
