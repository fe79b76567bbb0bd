"""Looking inside: snapshots in the record, densities with their mixtures, and the pictures of both."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from record_helpers import MIXTURE, record
from record_helpers import config as record_config
from run_helpers import build, config, run, same, weights
from torch import nn

import mixnorm
from mixnorm_lab.config.parts.mixture import Mixture
from mixnorm_lab.inspect import norm_inputs
from mixnorm_lab.inspect.densities import weighted_densities
from mixnorm_lab.inspect.norm_inputs import density, find_norm, layer_densities, layer_input
from mixnorm_lab.models import DigitsCNN
from mixnorm_lab.reports.plots import densities as pictures
from mixnorm_lab.storage import records, snapshots
from mixnorm_lab.storage.checkpoint import CheckpointError
from mixnorm_lab.training import mixtures


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return *run(config(epochs=5), folder), folder


def images(count=64):
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


# --- snapshots in the record --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [1, 2, 3, 5, 7, 10, 12, 33, 100, 163])
def test_snapshots_are_evenly_spaced_and_have_the_papers_stages(epochs):
    found = snapshots.snapshot_epochs(epochs)
    assert len(found) == min(epochs, snapshots.SNAPSHOTS)
    assert found[-1] == epochs
    gaps = np.diff([0, *found])
    assert gaps.max() - gaps.min() <= 1
    stages = snapshots.snapshot_epochs(epochs, snapshots.STAGES)
    assert set(stages) <= set(found)
    if epochs >= 5:
        assert np.abs(np.array(stages) / epochs - [0.2, 0.4, 0.6, 0.8, 1.0]).max() <= 0.5 / epochs


@pytest.mark.parametrize(("total", "count"), [(1, 8), (7, 8), (8, 8), (9, 8), (192, 8), (100, 4)])
def test_channels_are_evenly_spaced(total, count):
    found = snapshots.spread(total, count)
    assert len(set(found)) == len(found) == min(total, count)
    assert all(0 <= index < total for index in found)
    assert np.ptp(np.diff(found)) <= 1 if len(found) > 1 else True


def test_channels_that_hardly_vary_give_way_to_others():
    usual = [1, 3]
    assert snapshots.lively([1.0, 2.0, 0.0, 0.1], usual, 2) == usual  # a twentieth is enough
    assert snapshots.lively([1.0, 2.0, 0.0, 0.099], usual, 2) == [0, 1]
    assert snapshots.lively([0.0, 0.0, 5.0, 0.0], usual, 2) == [2]
    assert snapshots.lively([0.0, 0.0, 0.0, 0.0], usual, 2) == usual
    assert snapshots.lively([float("nan")] * 4, usual, 2) == usual


def test_the_record_has_the_mixtures_of_the_layer(trained):
    done, model, _ = trained
    assert all(row["mixtures"].keys() == {"1"} for row in done.epochs)
    last, mixture = done.epochs[-1]["mixtures"]["1"], model[1].mixture
    assert last["channels"] == list(range(8))
    torch.testing.assert_close(torch.tensor(last["weights"]), mixture.weights, rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.tensor(last["means"]), mixture.means, rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.tensor(last["variances"]), mixture.variances, rtol=1e-5, atol=0)
    assert sum(last["weights"]) == pytest.approx(1, abs=1e-5)
    assert last != done.epochs[0]["mixtures"]["1"]


def test_mixtures_are_read_at_some_epochs_only(tmp_path):
    done, _ = run(config(epochs=12), tmp_path)
    taken = [row["epoch"] for row in done.epochs if row["mixtures"]]
    assert taken == snapshots.snapshot_epochs(12)
    assert len(taken) == 10


def test_a_run_with_batch_norm_alone_has_none(tmp_path):
    done, _ = run(config(epochs=1, mixture=None), tmp_path)
    assert done.epochs[0]["mixtures"] is None


def test_channels_with_mixtures_of_their_own(tmp_path):
    options = {"num_components": 2, "backend": "reference", "population": "channel"}
    done, model = run(config(epochs=1, mixture=Mixture(("1",), options)), tmp_path)
    found, mixture = done.epochs[0]["mixtures"]["1"], model[1].mixture
    torch.testing.assert_close(torch.tensor(found["weights"]), mixture.weights.T, rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.tensor(found["means"]), mixture.means[..., 0].T, rtol=1e-5, atol=0)
    _, figure = pictures.evolution(done)
    assert figure.axes[0].get_title() == "λ, channel 1"


def test_mixtures_of_single_images_are_left_out():
    layer = mixnorm.MixtureNorm2d(4, population="instance", backend="reference")
    layer(torch.randn(3, 4, 5, 5))
    assert layer.mixture is not None
    assert mixtures.snapshot(nn.Sequential(layer)) is None


# --- densities ----------------------------------------------------------------------------------------------------------


class Modes(nn.Module):
    """Passes on points with two modes, whatever it gets: (4000, 2), the first channel at −4 and 2, the second at 0."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        generator = torch.Generator().manual_seed(0)
        points = torch.randn(4000, 2, generator=generator)
        points[:1000, 0] = points[:1000, 0] * 0.5 - 4
        points[1000:, 0] += 2
        return self.norm(points)


@pytest.fixture(scope="module")
def modes():
    return layer_densities(Modes(), torch.zeros(1), em_iters=8, channels=[0, 1])


def test_a_silent_channel_is_left_out_unless_it_is_asked_for():
    model = nn.Sequential(nn.Conv2d(1, 6, 1, bias=False), nn.BatchNorm2d(6))
    with torch.no_grad():
        model[0].weight[3] *= 1e-4
    view = layer_densities(model, torch.randn(8, 1, 4, 4))
    assert view.channels == (0, 1, 4, 5)
    assert view.left_out
    assert "are left out" in pictures.before_and_after(view)[0].caption
    asked = layer_densities(model, torch.randn(8, 1, 4, 4), channels=[3])
    assert asked.channels == (3,)
    assert not asked.left_out


def densities(view):
    return [one for norm in view.norms for one in (*norm.before, *norm.after)]


def test_histograms_and_mixtures_integrate_to_one(modes):
    for one in densities(modes):
        assert (one.heights * np.diff(one.edges)).sum() == pytest.approx(1)
        x = np.linspace(one.edges[0] - 20, one.edges[-1] + 20, 100_000)
        parts = weighted_densities(x, one.weights, one.means, one.deviations)
        np.testing.assert_allclose(parts.sum(axis=1) * (x[1] - x[0]), one.weights, rtol=1e-6)
        assert one.weights.sum() == pytest.approx(1)
        assert (np.diff(one.weights) <= 0).all()


def test_known_modes_are_found(modes):
    two = modes.norms[1].before[0]
    np.testing.assert_allclose(two.weights, [0.75, 0.25], atol=0.01)
    np.testing.assert_allclose(two.means, [2, -4], atol=0.1)
    np.testing.assert_allclose(two.deviations, [1, 0.5], atol=0.05)


def test_the_mixture_is_closer_to_the_histogram_than_one_gaussian(modes):
    one, two, _ = (norm.before[0] for norm in modes.norms)
    centers = (two.edges[1:] + two.edges[:-1]) / 2
    modelled = weighted_densities(centers, two.weights, two.means, two.deviations).sum(axis=0)
    assert np.abs(modelled - two.heights).max() < 0.15 * two.heights.max()
    assert one.under_mixture() < 0.75
    assert two.under_mixture() > 0.93
    assert one.under_mixture() == pytest.approx(one.under_normal(), abs=1e-3)


def test_what_comes_out_has_the_moments_of_the_transform(modes):
    batch, two, _ = modes.norms
    for one in batch.after:
        assert one.mean == pytest.approx(0, abs=1e-3)
        assert one.deviation == pytest.approx(1, abs=1e-3)
    out = two.after[0]
    np.testing.assert_allclose(out.means, 0, atol=0.05)  # every mode goes to the origin
    np.testing.assert_allclose(out.deviations, 1 / np.sqrt(out.weights), rtol=0.05)  # and is scaled by 1/√λ
    assert out.deviation**2 == pytest.approx(2, rel=0.05)  # K
    assert abs(out.skewness) < 0.2 < abs(batch.after[0].skewness)
    assert out.under_normal() > batch.after[0].under_normal() + 0.1


def test_batch_norm_here_is_the_layer():
    model = DigitsCNN().train()
    found = []
    model.conv2.norm.register_forward_hook(lambda module, arguments, output: found.append(output))
    view = layer_densities(model, images(), "conv2", channels=[3], components=[1])
    model(images())
    values = found[-1][:, 3].detach().double()
    [[after]] = [norm.after for norm in view.norms]
    assert view.points == values.numel()
    assert after.skewness == pytest.approx(((values - values.mean()) / values.std()).pow(3).mean().item(), abs=1e-3)


def test_values_that_are_all_the_same():
    for value in (0.0, -1e6):
        one = density(np.full(100, value, dtype=np.float32), np.ones((100, 1)))
        assert (one.heights * np.diff(one.edges)).sum() == pytest.approx(1)
        assert one.under_mixture() == pytest.approx(1)
        assert one.skewness == 0


def test_components_that_are_not_in_use_are_left_out():
    resp = np.zeros((50, 3))
    resp[:10, 2], resp[10:, 0] = 1, 1
    one = density(np.arange(50.0), resp)
    np.testing.assert_allclose(one.weights, [0.8, 0.2])
    np.testing.assert_allclose(one.means, [29.5, 4.5])


def test_many_points_are_sampled(monkeypatch):
    monkeypatch.setattr(norm_inputs, "MAX_POINTS", 100)
    assert layer_densities(DigitsCNN(), images(8)).points == 100


# --- the model ----------------------------------------------------------------------------------------------------------


def test_the_layers_input_is_that_of_training_and_the_model_stays_as_it_is():
    model = build(config()).eval()
    before, random = weights(model), torch.get_rng_state()
    points = layer_input(model, images(), "1")
    torch.testing.assert_close(points, model[0](images()).permute(0, 2, 3, 1).reshape(-1, 8), rtol=1e-4, atol=1e-5)
    assert same(before, weights(model))
    assert not model.training
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(layer_input(model, images(), "5"), layer_input(model, images(), "5"))  # behind a dropout
    batch_statistics = layer_input(copy.deepcopy(model).train(), images(), "5")
    assert torch.equal(layer_input(model, images(), "5"), batch_statistics)


def test_names_of_norms():
    model = DigitsCNN()
    assert find_norm(model) == "conv2.norm"
    assert find_norm(model, "conv3.norm") == find_norm(model, "conv3") == "conv3.norm"
    mixnorm.convert(model, "conv3")
    assert find_norm(model) == "conv3.norm"
    with pytest.raises(ValueError, match=r"no norm 'conv4.norm': choose from .*conv3.norm"):
        find_norm(model, "conv4.norm")
    nested = nn.ModuleDict({"inc2": nn.Sequential(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)))})
    with pytest.raises(ValueError, match=r"inc2/0 has 2 norms: choose from inc2.0.0, inc2.0.1"):
        find_norm(nested, "inc2/0")
    with pytest.raises(ValueError, match="no norm to look at"):
        find_norm(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"conv1.norm has no channel 16: choose from 0 to 15"):
        layer_densities(model, images(), "conv1", channels=[0, 16])


def test_weights_of_a_run(trained, tmp_path):
    _, model, folder = trained
    fresh = build(config(), seed=1)
    assert norm_inputs.load_weights(fresh, folder) == 5
    assert same(weights(fresh), weights(model))
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        norm_inputs.load_weights(fresh, tmp_path)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        norm_inputs.load_weights(DigitsCNN(), folder)


# --- pictures -----------------------------------------------------------------------------------------------------------


def test_three_views_of_a_training(trained, tmp_path):
    done, model, _ = trained
    paths = pictures.write(tmp_path / "new", densities=layer_densities(model, images()), record=done)
    assert [path.name for path in paths] == ["densities-1.png", "evolution-1.png", "components-test.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert "<svg" in path.with_suffix(".svg").read_text()


def test_a_model_with_batch_norm_alone(tmp_path):
    done, model = run(config(epochs=1, mixture=None), tmp_path)
    paths = pictures.write(tmp_path, densities=layer_densities(model, images(), "1"), record=done, layer="1")
    assert [path.name for path in paths] == ["densities-1.png"]


def test_every_channel_has_a_column_and_every_norm_two_rows(modes):
    _, figure = pictures.before_and_after(modes)
    axes = np.array(figure.axes).reshape(6, 2)
    assert [axis.get_title() for axis in axes[0]] == ["channel 0", "channel 1"]
    assert [axis.get_ylabel() for axis in axes[:, 0]] == [
        f"{w} {n}" for n in ("BN", "MN:2", "MN:3") for w in ("before", "after")
    ]
    assert [len(axis.lines) for axis in axes[:, 0]] == [2, 2, 3, 3, 4, 4]
    whole, first, second = (line.get_ydata() for line in axes[2, 0].lines)
    np.testing.assert_allclose(whole, first + second)


def test_a_phone_has_fewer_channels_in_a_picture_of_its_own(tmp_path):
    view = layer_densities(DigitsCNN(), images(), "conv2.norm")
    wide, narrow = (pictures.before_and_after(view, most)[1] for most in (4, 2))
    assert [axis.get_title() for axis in narrow.axes[:2]] == [axis.get_title() for axis in wide.axes[:2]]
    assert len(wide.axes) == 2 * len(narrow.axes) == 4 * 6
    assert narrow.get_figwidth() < 4.5 < 9 < wide.get_figwidth()  # inches: text is twice as large on a page of equal width
    [picture] = pictures.draw(tmp_path, densities=view, narrow=True)
    assert picture.narrow
    assert "A wider page has more channels." not in picture.caption
    assert {path.name for path in tmp_path.iterdir()} == {
        "densities-conv2-norm.png", "densities-conv2-norm.svg", "narrow-densities-conv2-norm.svg",
    }  # fmt: skip
    for figure in (wide, narrow):
        figure.draw_without_rendering()
        assert all(text.get_window_extent().x0 >= 0 and text.get_window_extent().x1 <= figure.bbox.x1
                   for legend in figure.subfigs[0].legends for text in legend.get_texts())  # fmt: skip


def training(epochs, done=None, scale=1.0):
    """A run with components that swap their places: the heavier one first, then the lighter one.

    ``scale`` is of the second channel.
    """

    def snapshot(number):
        share = 0.3 + 0.4 * (number % 2)
        mixture = {
            "weights": [share, 1 - share, 0],
            "means": [[0, scale], [5, 6 * scale], [9, 9]],
            "variances": [[1, 4 * scale**2], [4, scale**2], [1, 1]],
        }
        return {"conv3.norm": {"channels": [3, 7], **mixture}} if number in snapshots.snapshot_epochs(epochs) else None

    run = record_config("mn", epochs=epochs, mixture=MIXTURE)
    return record(run, [0.5] * (done or epochs), end="finished" if done is None else None, mixtures=snapshot)


def test_evolution_has_the_papers_stages_and_components_in_order_of_their_weights():
    _, figure = pictures.evolution(training(50))
    axes = np.array(figure.axes).reshape(5, 3)
    assert [axis.get_ylabel() for axis in axes[:, 0]] == [f"{10 * e // 5}%\nepoch {e}" for e in (10, 20, 30, 40, 50)]
    assert [axis.get_title() for axis in axes[0]] == ["weights λ", "channel 3", "channel 7"]
    for row in axes:
        assert [bar.get_height() for bar in row[0].patches] == pytest.approx([0.7, 0.3])
        assert len(row[1].lines) == 2  # the third is not in use
    heavy, light = axes[0, 1].lines  # an even epoch: the second component is the heavier one
    assert heavy.get_xdata()[heavy.get_ydata().argmax()] == pytest.approx(5, abs=0.05)
    assert light.get_xdata()[light.get_ydata().argmax()] == pytest.approx(0, abs=0.05)
    assert light.get_ydata().max() == pytest.approx(0.3 / np.sqrt(2 * np.pi), rel=1e-3)
    assert heavy.get_ydata().max() == pytest.approx(0.7 / np.sqrt(2 * np.pi * 4), rel=1e-3)


def test_evolution_leaves_out_channels_that_hardly_vary():
    picture, figure = pictures.evolution(training(50, scale=1e-6))
    assert [axis.get_title() for axis in figure.axes[:2]] == ["weights λ", "channel 3"]
    assert len(figure.axes) == 10
    assert picture.caption.endswith("are left out.")


def test_evolution_of_a_training_under_way_ends_with_its_last_snapshot():
    _, figure = pictures.evolution(training(50, done=33))
    assert [axis.get_ylabel() for axis in figure.axes[::3]] == ["20%\nepoch 10", "40%\nepoch 20", "60%\nepoch 30"]
    _, figure = pictures.evolution(training(50, done=6))
    assert [axis.get_ylabel() for axis in figure.axes[::3]] == ["10%\nepoch 5"]


def test_no_mixtures_no_evolution():
    assert pictures.evolution(training(50, done=4)) is None
    assert pictures.evolution(training(50), "conv1.norm") is None


def test_a_spike_leaves_room_for_the_rest_and_the_caption_says_so():
    values = np.concatenate([np.zeros(500), np.random.default_rng(0).normal(3, 1, 1500)])
    resp = np.stack([values == 0, values != 0], axis=1).astype(float)
    one = density(values, resp)
    view = norm_inputs.LayerDensities("x", (0,), 2000, (norm_inputs.Normalization("MN:2", (one,), (one,)),))
    picture, figure = pictures.before_and_after(view)
    assert one.heights.max() > figure.axes[0].get_ylim()[1] > one.heights[31:].max()
    assert picture.caption.endswith("cut off.")


def test_mixtures_have_a_row_each_and_stand_beside_the_rest(modes, tmp_path):
    fits = replace(
        modes, norms=tuple(norm_inputs.Normalization(f"K = {k}", norm.before, ()) for k, norm in enumerate(modes.norms, 1))
    )
    picture, figure = pictures.mixtures(fits)
    assert [axis.get_ylabel() for axis in figure.axes[::2]] == ["K = 1", "K = 2", "K = 3"]
    lines = [len(axis.get_lines()) for axis in figure.axes[::2]]
    assert lines == [2, 3, 4]  # the mixture and its components
    labels = [text.get_text() for legend in figure.subfigs[0].legends for text in legend.get_texts()]
    assert labels == ["activations", "mixture", "component 1", "component 2", "component 3"]
    assert f"{modes.points:,} points" in picture.caption
    made = pictures.draw(tmp_path, densities=modes, fits=fits, formats=("svg",))
    assert [one.name for one in made] == ["densities-norm", "mixtures-norm"]


def test_a_channel_of_equal_values_is_drawn_whole():
    one = density(np.ones(100), np.ones((100, 1)))
    view = norm_inputs.LayerDensities("x", (0,), 100, (norm_inputs.Normalization("BN", (one,), (one,)),))
    picture, figure = pictures.before_and_after(view)
    assert figure.axes[0].get_ylim()[1] > one.heights.max()
    assert "cut off" not in picture.caption


def test_snapshots_survive_the_disk(trained):
    done, _, folder = trained
    assert records.read(folder / records.NAME).epochs == done.epochs
