import numpy as np
import pytest
from record_helpers import MIXTURE, catalog_record, config, curve, pair, record

from mixnorm_lab.config import catalog
from mixnorm_lab.reports.model import groups
from mixnorm_lab.reports.plots import curves, panels, style


def test_batch_norm_is_blue_and_mixture_norm_never_is():
    made = [catalog_record(found.name) for found in catalog.match("cifar-cnn/cifar100/*")]
    for panel in panels.panels(groups.families(made)):
        looks = panels.styles(panel.groups)
        for group, look in zip(panel.groups, looks, strict=True):
            assert (look["color"] == panels.BLUE) == group.is_batch_norm
            assert (look["color"] in panels.ORANGES) != group.is_batch_norm
        assert len({(look["color"], str(look["linestyle"])) for look in looks}) == len(looks)
        assert len(set(panel.labels)) == len(panel.labels)


def test_the_papers_figures_have_their_curves():
    made = [catalog_record(found.name) for found in catalog.match("cifar-cnn/cifar100/*")]
    found = {panel.name: panel.labels for panel in panels.panels(groups.families(made))}
    assert found["cifar-cnn-em-iterations"] == ("BN-2", "MN-2: EM iter. 2", "MN-5: EM iter. 4", "MN-6: EM iter. 8")
    assert found["cifar-cnn-layers"] == ("BN-2", "MN-2: conv3", "MN-7: conv2", "MN-8: conv2 + conv3")
    assert found["cifar-cnn-small-lr-cifar100"] == ("BN-1", "BN-2", "MN-1", "MN-2")


def test_averaged_weights_have_a_figure_and_stand_in_the_papers_only_by_themselves():
    following = "forms/cifar100/all-layers-steady-history-40"
    names = ("cifar-cnn/cifar100/bn-2", "cifar-cnn/cifar100/mn-2", "best/cifar100", following)
    averaged = [catalog_record(name, average=0.9) for name in names]
    both = averaged + [catalog_record(name) for name in names]
    found = {panel.name: panel.labels for panel in panels.panels(groups.families(both))}
    assert found["cifar-cnn-small-lr-cifar100"] == ("BN-2", "MN-2")
    assert sorted(found["best-cifar100"]) == ["batch norm", "recommended form"]
    ways = [f"mixture norm in all layers, {way}" for way in ("ensemble, T = 10", "steady, T = 40")]
    assert found["averaged-cifar100"] == ("batch norm", *ways)
    alone = {panel.name: panel.labels for panel in panels.panels(groups.families(averaged))}
    assert alone["cifar-cnn-small-lr-cifar100"] == ("BN-2, weights averaged", "MN-2, weights averaged")


def test_settings_in_which_runs_of_one_name_differ_stand_in_the_legend():
    made = [catalog_record("cifar-cnn/cifar100/bn-2", precision=precision) for precision in ("fp32", "bf16")]
    found = {panel.name: panel.labels for panel in panels.panels(groups.families(made))}
    assert found["cifar-cnn-small-lr-cifar100"] == ("BN-2, precision: fp32", "BN-2, precision: bf16")


def bands(axis):
    """The lower and upper edge of every shaded area."""
    for area in axis.collections:
        points = area.get_paths()[0].vertices
        xs = np.unique(points[:, 0])
        yield np.array([(points[points[:, 0] == x, 1].min(), points[points[:, 0] == x, 1].max()) for x in xs]).T


def test_curves_over_seeds_have_their_mean_and_deviation():
    made = [record(config("bn", epochs=6, seed=seed), curve(6, 0.6, 0.2, 3, 0.05, seed)) for seed in range(3)]
    [panel] = panels.panels(groups.families(made))
    picture, figure = curves.errors(panel, groups.PLAIN)
    measured = np.array([[100 * e["test_error"] for e in run.epochs] for run in made])
    [line] = figure.axes[0].lines
    np.testing.assert_allclose(line.get_ydata(), measured.mean(axis=0))
    [(low, high)] = bands(figure.axes[0])
    np.testing.assert_allclose((high - low) / 2, measured.std(axis=0, ddof=1), rtol=1e-6)
    assert "over the seeds" in picture.caption


def test_one_seed_has_the_papers_window_of_ten_epochs():
    errors = curve(100, 0.6, 0.3, 3, 0.05, 1)
    [panel] = panels.panels(groups.families([record(config("bn", epochs=100), errors)]))
    picture, figure = curves.errors(panel, groups.PLAIN)
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), 100 * errors)
    [(low, high)] = bands(figure.axes[0])
    inside = 100 * errors[45:55]  # ten epochs around the 51st
    assert (high[50] - low[50]) / 2 == pytest.approx(inside.std())
    assert (high[50] + low[50]) / 2 == pytest.approx(inside.mean())
    assert "within 10 epochs" in picture.caption


@pytest.mark.parametrize(("against", "x"), [("steps", 585), ("train_seconds", 6.0)])
def test_the_dot_is_where_batch_norms_best_is_reached(against, x):
    [panel] = panels.panels(groups.families(pair()))
    _, figure = curves.soonest(panel, against)
    dots = [line for line in figure.axes[0].lines if line.get_markeredgecolor() == "white"]
    assert [(d.get_xdata()[0], d.get_ydata()[0]) for d in dots] == [(x, pytest.approx(20))]


def test_components_in_use():
    def used(number):
        return {"conv2.norm": 3, "conv3.norm": 2 if number > 10 else 3}

    [family] = groups.families([record(config("mn", epochs=20, mixture=MIXTURE), [0.5] * 20, components=used)])
    _, figure = curves.components(family.groups[0])
    first, second = (line.get_ydata() for line in figure.axes[0].lines)
    assert first == pytest.approx(3, abs=0.1)
    assert second[[0, -1]] == pytest.approx([3, 2], abs=0.1)
    assert curves.components(groups.families(pair())[0].groups[1]) is None


def test_components_in_use_of_many_layers():
    """A row of a map for each, in their order, the mean over the runs."""
    names = [f"block.layer{i}.norm" for i in range(curves.MOST_LINES + 1)]
    made = [
        record(config("mn", epochs=3, mixture=MIXTURE, seed=seed), [0.5] * 3,
               components=lambda number, seed=seed: {name: 1 + (i == number) + seed for i, name in enumerate(names)})
        for seed in (0, 1)
    ]  # fmt: skip
    [family] = groups.families(made)
    picture, figure = curves.components(family.groups[0])
    [image] = figure.axes[0].images
    expected = np.full((len(names), 3), 1.5)
    expected[[1, 2, 3], [0, 1, 2]] = 2.5
    assert np.array_equal(image.get_array(), expected)
    assert image.get_extent() == [0.5, 3.5, len(names) + 0.5, 0.5]
    assert "from block.layer0.norm above to block.layer14.norm below" in picture.caption


def one_epoch(seeds):
    """The panel of both norms after an epoch."""
    made = pair(bn=[0.3], mn=[0.4], seeds=seeds)
    for run in made:
        run.epochs[0]["test_error"] += 0.02 * run.config.seed
    return panels.panels(groups.families(made))[0]


@pytest.mark.parametrize("seeds", [1, 3])
def test_an_epoch_alone_is_drawn_as_points_beside_each_other(seeds):
    for _, figure in (
        curves.errors(one_epoch(seeds), groups.PLAIN),
        curves.soonest(one_epoch(seeds), "train_seconds"),
    ):
        [axis] = figure.axes
        points = [line for line in axis.lines if line.get_label() in ("batch norm", "mixture norm")]
        assert [line.get_marker() for line in points] == ["o", "o"]
        assert all(line.get_markersize() >= 5 for line in points)
        low, high = axis.get_ylim()
        assert all(low < line.get_ydata()[0] < high for line in points)
        bars = [bar for container in axis.containers for bar in container.get_children() if hasattr(bar, "get_segments")]
        assert len(bars) == (2 if seeds > 1 else 0)
        ends = [y for bar in bars for segment in bar.get_segments() for y in segment[:, 1]]
        assert all(low <= y <= high for y in ends)
    picture, figure = curves.errors(one_epoch(seeds), groups.PLAIN)
    drawn = {line.get_label(): line.get_xdata()[0] for line in figure.axes[0].lines}
    assert drawn["batch norm"] < 1 < drawn["mixture norm"]
    assert picture.caption == ("One epoch, one seed." if seeds == 1 else "Bars: one standard deviation over the seeds.")


def test_components_of_an_epoch_alone_are_points():
    [family] = groups.families([record(config("mn", epochs=1, mixture=MIXTURE), [0.5], components=lambda _: {"conv3": 3})])
    picture, figure = curves.components(family.groups[0])
    assert figure.axes[0].lines[0].get_marker() == "o"
    assert list(figure.axes[0].get_xticks()) == [1]
    assert "averaged" not in picture.caption


def test_an_epoch_alone_has_no_picture_against_steps(tmp_path):
    made = curves.draw(groups.families(pair(bn=[0.3], mn=[0.4])), tmp_path, formats=("svg",))
    assert {picture.name.partition("cifar100-")[2] for picture in made} == {"test-error", "best-by-time", "train-error"}


def test_epochs_that_were_not_measured_leave_no_gaps():
    """Statistics are refilled in some epochs only."""
    made = pair()
    for run in made:
        for row in run.epochs[1::2]:
            row["recalibrated_error"] = row["test_error"]
    [panel] = panels.panels(groups.families(made))
    _, figure = curves.errors(panel, groups.RECALIBRATED)
    for line, run in zip(figure.axes[0].lines, made, strict=True):
        np.testing.assert_array_equal(line.get_xdata(), [2, 4])
        np.testing.assert_allclose(line.get_ydata(), [100 * row["test_error"] for row in run.epochs[1::2]])


@pytest.mark.parametrize(("last", "scale"), [(0.02, "log"), (0.3, "linear")])
def test_a_logarithmic_axis_says_so(last, scale):
    [panel] = panels.panels(groups.families(pair(bn=[0.5, 0.4, last], mn=[0.5, 0.4, last])))
    for _, figure in (curves.errors(panel, groups.PLAIN), curves.soonest(panel, "steps")):
        [axis] = figure.axes
        assert axis.get_yscale() == scale
        assert ("log" in axis.get_ylabel()) == (scale == "log")


@pytest.mark.parametrize("count", [2, 7])
def test_legends_lie_outside_of_what_is_drawn(count):
    made = [record(config("bn", epochs=4), [0.5, 0.4, 0.3, 0.2])]
    made += [
        record(
            config("mn " + "with a long name " * (number % 3) + str(number), epochs=4, mixture=MIXTURE), [0.5, 0.5, 0.5, 0.5]
        )
        for number in range(1, count)
    ]
    [panel] = panels.panels(groups.families(made))
    _, figure = curves.errors(panel, groups.PLAIN)
    figure.draw_without_rendering()
    [legend] = figure.legends
    [axis] = figure.axes
    box, whole = legend.get_window_extent(), figure.bbox
    assert len(legend.get_texts()) == count
    assert not box.overlaps(axis.get_tightbbox())
    assert whole.x0 <= box.x0 <= box.x1 <= whole.x1
    assert box.y0 >= whole.y0
    assert axis.get_window_extent().height > 0.5 * 72 * 3.5  # the axis keeps its room


@pytest.mark.parametrize("is_busy", [False, True])
def test_time_is_not_drawn_where_the_machine_was_busy(tmp_path, is_busy):
    made = pair(seeds=2)
    made[0].epochs[1]["busy"] = is_busy
    names = {picture.name for picture in curves.draw(groups.families(made), tmp_path)}
    assert any("by-steps" in name for name in names)
    assert any("by-time" in name for name in names) is not is_busy


@pytest.mark.parametrize("letters", [4, 10, 14, 26, 60])
def test_a_legend_is_no_wider_than_its_picture(letters):
    figure, axis = style.new_figure("", "x", "y")
    for number in range(5):
        axis.plot([0, 1], label=f"{number}: the norm of conv4 in all layers, weights averaged, evaluated"[:letters])
    style.legend_below(figure)
    figure.draw_without_rendering()
    place = figure.legends[0].get_window_extent()
    assert 0 <= place.x0 < place.x1 <= figure.bbox.width
