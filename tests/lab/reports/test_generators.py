"""Reports of generators: distances keep the name of their features, and the comparison is that of the records."""

import dataclasses

import pytest
import torch
from gan_helpers import GAN, MIXTURE, images
from gan_helpers import config as gan_config
from record_helpers import ENVIRONMENT, pair

from mixnorm_lab import reports
from mixnorm_lab.config import catalog
from mixnorm_lab.config.plane import DATA, NORMS
from mixnorm_lab.generators import plane, samples
from mixnorm_lab.reports.model.generators import FRESH_DISTANCE, keep_samples
from mixnorm_lab.reports.model.groups import families
from mixnorm_lab.reports.plots import curves, densities, distance_curves, plane_points
from mixnorm_lab.reports.render.report import assemble
from mixnorm_lab.reports.tables import distances, plane_scores
from mixnorm_lab.storage import records
from mixnorm_lab.storage.folders import SAMPLES
from mixnorm_lab.storage.plane_results import Result
from mixnorm_lab.storage.records import Record

BN, MN = [60.0, 40.0, 38.0, 39.0], [50.0, 38.0, 33.0, 34.0]


def row(epoch, distance, label="cifar-features 01234567", updates=3):
    return {
        "epoch": epoch,
        "steps": updates * epoch,
        "generator_loss": 1.0,
        "discriminator_loss": 0.9,
        "distance": distance,
        "recalibrated_distance": None,
        "features": label if distance is not None else None,
        "samples": 20 if distance is not None else None,
        "learning_rate": 0.0002,
        "train_seconds": 0.006 * epoch,
        "seconds": 0.1 * epoch,
        "components": {},
        "mixtures": None,
    }


def record(config, measured, **options):
    rows = [row(2 * i + 1, None, **options) for i in range(len(measured))]
    rows += [row(2 * i + 2, distance, **options) for i, distance in enumerate(measured)]
    ends = [{"kind": "end", "reason": "finished", "message": None, "seconds": 1.0}]
    rows.sort(key=lambda epoch: epoch["epoch"])
    return Record(config, dict(ENVIRONMENT), rows, ends, running=False)


def couple(seeds=2, **options):
    found = []
    for seed in range(seeds):
        for name, mixture, measured in (("bn", None, BN), ("mn", MIXTURE, MN)):
            run = gan_config(name=name, epochs=8, seed=seed, mixture=mixture)
            found.append(record(run, [value + seed for value in measured], **options))
    return found


def cells(table):
    return {row["run"]: {key: getattr(value, "mean", value) for key, value in row.items()} for row in table.rows}


def test_the_table():
    [family] = families(couple())
    table = distances.distances(family)
    assert table.title == "CIFAR-feature Fréchet distance: dcgan on cifar10, 24 updates"
    found = cells(table)
    assert found["bn"]["best"] == pytest.approx(38.5)
    assert found["mn"]["best"] == pytest.approx(33.5)
    assert (found["bn"]["steps"], found["mn"]["steps"]) == (18, 12)  # an epoch has three updates
    assert found["mn"]["fewer"] == pytest.approx(100 / 3)
    assert found["mn"]["ms"] == pytest.approx(2.0)
    assert found["mn"]["features"] == "cifar-features 01234567"
    assert "FID" not in table.markdown()


def test_never_reached():
    runs = couple(1)
    runs[1] = record(runs[1].config, [50.0, 49.0, 48.0, 47.0])
    [family] = families(runs)
    assert "never" in distances.distances(family).markdown()
    assert "in 0 of 1 runs; its own lowest is 47.00 (1 seed)" in distances.answers([family])[0]


def test_other_features_are_not_compared():
    runs = couple(1)
    runs[1] = record(runs[1].config, MN, label="cifar-features ffffffff")
    [family] = families(runs)
    assert "steps" not in cells(distances.distances(family))["mn"]
    assert "cannot be compared" in distances.answers([family])[0]


def test_the_answer():
    [sentence] = distances.answers(families(couple()))
    assert sentence == (
        "Mixture norm's generator reached batch norm's lowest CIFAR-feature Fréchet distance (38.50 ± 0.71) in 12 updates "
        "instead of 18; its own lowest is 33.50 ± 0.71 (2 seeds). The difference, −5.00 [−8.04, −1.96], is certain."
    )


@pytest.mark.parametrize("features", ["cifar-features", "inception-2015"])
def test_the_papers_figures_stand_beside_ours(features):
    runs = []
    for kind, measured in (("bn", BN), ("mn", MN)):
        config = catalog.get(f"dcgan/cifar10/{kind}").config
        config = dataclasses.replace(config, gan=dataclasses.replace(config.gan, features=features))
        runs.append(record(config, measured, label=f"{features} 0", updates=10_000))
    [family] = families(runs)
    text = distances.distances(family).markdown()
    assert "paper 25,000" in text
    assert "paper 58%" in text
    assert ("paper 33.35" in text) == (features == "inception-2015")
    assert ("This is not FID" in text) == (features == "cifar-features")
    assert "paper" not in distances.distances(family, paper=False).markdown()


def test_a_page_of_generators(tmp_path):
    pytest.importorskip("matplotlib")
    made = couple(1)
    for run in made:
        run.path = tmp_path / run.config.name / records.NAME
        samples.write_png(run.path.parent / SAMPLES / "00000018.png", samples.grid(images(4), 2))
    page = reports.write(tmp_path, reports.Outcome(made)).read_text()
    assert "Mixture norm&#x27;s generator reached" in page
    assert "no comparison yet" not in page
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"dcgan-cifar10-distance.svg", "dcgan-cifar10-samples.png", "narrow-dcgan-cifar10-samples.svg"} <= names
    assert page.count("<source ") == 1  # for a narrow page


def test_generators_and_classifiers_in_one_report(tmp_path, monkeypatch):
    for module in (curves, distance_curves, densities):
        monkeypatch.setattr(module, "draw", lambda *_, **__: [])
    report = assemble(reports.Outcome([*couple(1), *pair()]), pictures_folder=tmp_path)
    assert len(report.answers) == 2
    assert {"Results", "Generators"} <= {section.title for section in report.sections}


def test_without_files_of_samples_there_is_no_picture_of_them(tmp_path):
    pytest.importorskip("matplotlib")
    assert [picture.name for picture in distance_curves.draw(families(couple(1)), tmp_path)] == ["dcgan-cifar10-distance"]


def test_an_unfinished_generator_is_told(tmp_path):
    pytest.importorskip("matplotlib")
    run = Record(gan_config(gan=GAN), dict(ENVIRONMENT), [row(1, None)])
    report = assemble(reports.Outcome([run]), pictures_folder=tmp_path)
    assert "Runs that are not finished" in {section.title for section in report.sections}


def test_every_distance_has_its_cell_and_what_is_not_finished_says_so(tmp_path):
    pytest.importorskip("matplotlib")
    runs = couple(2)
    cut = dataclasses.replace(runs[3], epochs=runs[3].epochs[:5], ends=[], running=True)
    [family] = families([*runs[:3], cut])
    found = distances.evaluations(family)
    assert [(row["run"], row["seed"], row.get("24"), row["state"]) for row in found.rows] == [
        ("bn", 0, 39.0, ""), ("bn", 1, 40.0, ""), ("mn", 0, 34.0, ""), ("mn", 1, None, "not finished: 15 updates"),
    ]  # fmt: skip
    assert found.rows[3]["12"] == 39.0
    assert not distances.evaluations(family, FRESH_DISTANCE).rows
    [curve] = distance_curves.draw([family], tmp_path, ("svg",))
    assert "Dotted: runs that did not finish." in curve.caption
    assert [path.name for path in tmp_path.iterdir()] == ["dcgan-cifar10-distance.svg"]


def test_a_run_that_was_done_again_is_listed_but_does_not_count():
    runs = couple(1)
    other = dataclasses.replace(record(runs[1].config, [value - 20 for value in MN]), ends=[], running=True)
    [family] = families([*runs, other])
    told = [(row["run"], row["24"], row["state"]) for row in distances.evaluations(family).rows]
    assert told[:2] == [("bn", 39.0, ""), ("mn", 34.0, "")]
    assert told[2] == ("mn", 14.0, "counts for nothing: another run of this seed; not finished: 24 updates")
    assert cells(distances.distances(family))["mn"]["best"] == min(MN)


def test_the_best_samples_are_kept_beside_the_record(tmp_path):
    made = couple(1)
    for run in made:
        run.path = tmp_path / "runs" / run.config.name / records.NAME
        for steps in (6, 12, 18, 24):
            samples.write_png(run.path.parent / SAMPLES / f"{steps:08}.png", samples.grid(images(4), 2))
    keep_samples(made, tmp_path / "kept")
    kept = sorted(path.relative_to(tmp_path / "kept").as_posix() for path in (tmp_path / "kept").rglob("*.png"))
    assert kept == ["bn/seed-0/samples/00000018.png", "mn/seed-0/samples/00000018.png"]
    made[0].epochs[-1]["distance"] = 1.0  # a better one replaces it
    keep_samples(made[:1], tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept" / "bn").rglob("*.png")] == ["00000024.png"]


def test_modes_as_a_table_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    torch.manual_seed(0)
    real = plane.draw(DATA["ring"], 200)
    half = real[real[:, 0] > 0]
    results = [
        Result(norm, seed, plane.score(points, DATA["ring"]), points.tolist())
        for norm, points in zip(NORMS, (half, real), strict=True)
        for seed in range(3)
    ]
    found = {row["norm"]: row for row in plane_scores.table("ring", results).rows}
    assert found["mixture norm"]["reached"].mean == 8
    assert found["mixture norm"]["all"] == 3
    assert found["batch norm"]["reached"].mean < 8
    assert found["batch norm"]["divergence"].mean > 0.3
    picture = plane_points.draw("ring", results, tmp_path, narrow=True)
    assert (tmp_path / picture.narrow_file).stat().st_size > 1000
    assert (tmp_path / f"{picture.name}.svg").stat().st_size > 1000
