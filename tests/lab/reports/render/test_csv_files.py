"""CSV of epochs and of tables, and where the command puts it."""

import csv
import io
import json

import pytest
from cli_helpers import invoke, mistake
from record_helpers import MIXTURE, config, record

from mixnorm_lab.config.catalog import get
from mixnorm_lab.reports import Outcome
from mixnorm_lab.reports.render import csv_files
from mixnorm_lab.storage.records import Writer, find
from mixnorm_lab.tables import Column, Measured, Table, text_column

SNAPSHOT = {"channels": [0], "weights": [1.0], "means": [[0.0]], "variances": [[1.0]]}


def read(text):
    return list(csv.DictReader(io.StringIO(text)))


def runs(folder, seeds=2):
    found = []
    for seed in range(seeds):
        batch = record(config("batch-norm", epochs=2, seed=seed), [0.5, 0.4])
        mixture = record(
            config("mixture-norm", epochs=2, seed=seed, mixture=MIXTURE),
            [0.5, 0.3 - seed / 10],
            components=lambda number: {"conv3.norm": 3, "conv4.norm": 2.5},
            recalibrated_error=lambda number: 0.25,
            mixtures=lambda number: {"conv3.norm": SNAPSHOT},
        )
        for one in (batch, mixture):
            one.path = folder / one.config.name / f"seed-{seed}" / "record.jsonl"
            with Writer(one.path) as writer:
                writer.run(one.config, one.environment)
                for row in one.epochs:
                    writer.epoch(row)
                writer.end("finished", 5.0)
        found += [batch, mixture]
    return found


def test_each_epoch_is_a_line_with_all_of_its_numbers(tmp_path):
    rows = read(csv_files.epochs(runs(tmp_path), tmp_path))
    assert len(rows) == 8
    assert list(rows[0]) == [
        *csv_files.FIRST, "train_loss", "train_error", "test_loss", "test_error", "recalibrated_error", "learning_rate",
        "train_seconds", "seconds", "components.conv3.norm", "components.conv4.norm",
    ]  # fmt: skip
    first, last = rows[0], rows[-1]
    assert (first["folder"], first["run"], first["norm"]) == ("batch-norm/seed-0", "batch-norm", "batch")
    assert (first["recalibrated_error"], first["components.conv3.norm"]) == ("", "")
    assert (last["model"], last["data"], last["norm"], last["seed"]) == ("cifar-cnn", "cifar100", "mixture", "1")
    assert (last["epoch"], last["steps"], float(last["test_error"])) == ("2", "390", pytest.approx(0.2))
    assert (last["components.conv3.norm"], last["components.conv4.norm"]) == ("3", "2.5")


def test_generators_have_numbers_of_their_own(tmp_path):
    run = record(get("dcgan/cifar10/bn").config, [0.5])
    run.epochs = [{"epoch": 1, "steps": 1000, "generator_loss": 1.5, "distance": 30.25, "features": "cifar-features"}]
    [row] = read(csv_files.epochs([run], tmp_path))
    assert (row["generator_loss"], row["distance"], row["features"]) == ("1.5", "30.25", "cifar-features")


def test_the_summary_has_each_number_of_a_table_with_its_spread():
    columns = [text_column("run", "run"), Column("best", "best, %"), text_column("rate", "rate"), Column("n", "seeds")]
    rows = [{"run": "a", "best": Measured(90.5, 0.25, 2, 3, paper=91.0), "n": 3}, {"run": "b", "best": None, "rate": "x, y"}]
    found = read(csv_files.summary([Table("Title, with a comma", columns, rows), Table("Empty", [], [])]))
    assert [(row["row"], row["column"], row["value"]) for row in found] == [
        ("a", "best, %", "90.5"), ("a", "seeds", "3"), ("b", "rate", "x, y"),
    ]  # fmt: skip
    assert {name: found[0][name] for name in ("table", "deviation", "n", "of", "paper")} == {
        "table": "Title, with a comma", "deviation": "0.25", "n": "2", "of": "3", "paper": "91.0",
    }  # fmt: skip


def test_the_command_writes_beside_the_report_into_a_file_or_to_stdout(tmp_path):
    folder = tmp_path / "runs"
    runs(folder)
    found = find(folder)
    told = invoke("report", "--csv", folder).stdout.splitlines()[-1]
    assert told == f"The numbers are in {folder / 'epochs.csv'} and {folder / 'summary.csv'}"
    expected = csv_files.epochs(found, folder)
    assert (folder / "epochs.csv").read_text() == expected
    assert (folder / "summary.csv").read_text() == csv_files.summary(Outcome(found).tables)
    assert invoke("report", folder, "--csv", "-").stdout == expected
    files = [str(tmp_path / "out" / name) for name in ("all.csv", "all-summary.csv")]
    assert json.loads(invoke("report", "--json", folder, "--csv", files[0]).stdout)["csv"] == files
    assert (tmp_path / "out" / "all.csv").read_text() == expected
    assert (tmp_path / "out" / "all-summary.csv").read_text() == (folder / "summary.csv").read_text()


def test_without_runs_there_is_nothing_to_write(tmp_path):
    assert mistake("report", tmp_path, "--csv").endswith(
        "has no records of runs, which --csv writes: mixnorm compare makes some"
    )
