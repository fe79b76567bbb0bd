"""Commands on data of the user's own: a folder of images and a table, from the command line to the report."""

import json
import re

import numpy as np
import pytest
from cli_helpers import QUICK, invoke, mistake
from PIL import Image

from mixnorm_lab.config import presets
from mixnorm_lab.storage import records


@pytest.fixture
def images(tmp_path, monkeypatch):
    """Twelve dark and twelve light images of 8 × 8, and four of each to test on."""
    random = np.random.RandomState(0)
    for split, count in (("train", 12), ("test", 4)):
        for name, least in (("dark", 0), ("light", 128)):
            (tmp_path / "pets" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = (least + random.randint(0, 128, (8, 8))).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "pets" / split / name / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "pets"


@pytest.fixture
def table(tmp_path, monkeypatch):
    random = np.random.RandomState(0)
    values = random.randn(400, 3)
    lines = [f"{a:.4f},{b:.4f},{c:.4f},{'yes' if a + b > 0 else 'no'},{number}" for number, (a, b, c) in enumerate(values)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,c,answer,note", *(f"{line} words" for line in lines)]) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "t.csv"


def found(folder):
    return {record.config.name: record for record in records.find(folder)}


def test_a_comparison_on_a_folder_of_images(images):
    out = invoke("compare", "--data", "pets", "--seeds", 1, "--epochs", 1, *QUICK).stdout
    assert "digits-cnn on images:pets" in out
    [folder] = (images.parent / "runs").iterdir()
    assert re.fullmatch(r"images\.pets-digits-cnn-[0-9a-f]{8}", folder.name)
    runs = found(folder)
    assert {run.config.data for run in runs.values()} == {"images:pets"}
    assert all(run.finished for run in runs.values())
    config = runs["mixture-norm"].config
    assert (config.batch_size, len(config.contents), config.image_size) == (16, 12, None)


def test_with_other_images_it_is_another_run(images):
    command = ["train", "--data", images, "--epochs", 1, "--device", "cpu"]
    for _ in range(2):
        invoke(*command)
    (images / "train" / "dark" / "0.png").unlink()
    assert re.search(r"holds a run of another configuration \(contents: \w+, not \w+\)", mistake(*command))


def test_a_comparison_on_a_table(table):
    result = invoke("compare", "--data", "t.csv", "--target", "answer", "--seeds", 1, "--epochs", 3, *QUICK)
    assert "mlp on table:t.csv" in result.stdout
    assert "Columns with too many different texts are left out: note" in result.stderr
    runs = found(table.parent / "runs")
    assert (runs["batch-norm"].config.target, runs["batch-norm"].config.batch_size) == ("answer", 32)
    assert runs["batch-norm"].epochs[-1]["test_error"] < 0.2
    assert runs["mixture-norm"].epochs[-1]["components"]["hidden1.norm"] >= 1


def test_a_run_of_a_table_with_every_way_to_evaluate(table):
    more = ["--validation", 0.2, "--recalibrate", 2, "--average", 0.5, "--train-eval", "--batch-size", 64]
    result = invoke("train", "--data", "t.csv", "--target", "answer", "--layers", "hidden*", "--epochs", 2, *more, *QUICK)
    [run] = records.find(table.parent / "runs")
    assert run.epochs[-1]["steps"] == 2 * (round(0.8 * round(0.8 * 400)) // 64)
    assert run.epochs[-1]["recalibrated_error"] is not None
    assert run.epochs[-1]["train_eval_error"] < 0.5
    assert "2 epochs, on held-out training rows" in result.stdout
    assert "image" not in result.stdout + result.stderr


def test_numbers_are_predicted_by_their_squared_error(table):
    invoke("train", "--data", "t.csv", "--target", "a", "--layers", "hidden1", "--epochs", 4, *QUICK)
    [run] = records.find(table.parent / "runs")
    assert (run.config.loss, run.config.metric) == ("mean squared error", "mean squared error")
    assert run.epochs[-1]["test_metric"] < 0.9  # 1 is what the mean of the training rows has


def test_a_model_of_the_users_gets_the_shape_and_the_classes(table):
    (table.parent / "own_rows.py").write_text(
        "from torch import nn\n"
        "def build(input_shape, num_classes):\n"
        "    return nn.Sequential(nn.Linear(*input_shape, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes))\n"
    )
    invoke("train", "--data", "t.csv", "--target", "answer", "--model", "own_rows:build", "--epochs", 1, *QUICK[:2])
    [run] = records.find(table.parent / "runs")
    assert run.config.model == "own_rows:build"


def test_a_run_of_a_model_of_another_package(images):
    from transformers import ResNetConfig

    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
    ResNetConfig(**sizes, architectures=["ResNetForImageClassification"]).save_pretrained("config")
    more = ["--model", "transformers:config", "--layers", "*stages.1*", "--image-size", 16, "--epochs", 1]
    invoke("train", "--data", "pets", *more, *QUICK)
    [run] = records.find(images.parent / "runs")
    config = run.config
    assert config.model == f"transformers:{(images.parent / 'config').as_posix()}"
    assert (config.image_size, config.optimizer) == (16, presets.OWN.optimizer)


def test_data_says_what_is_there(images, table):
    assert re.search(r"training images +24\n.*test images +8\n", invoke("data", "pets").stdout)
    assert re.search(r"target +2 classes\nleft out +note\n", invoke("data", "t.csv", "--target", "answer").stdout)
    assert json.loads(invoke("data", "pets", "--image-size", 4, "--json").stdout)["image"] == [1, 4, 4]
    rows = json.loads(invoke("data", "t.csv", "--target", "answer", "--json").stdout)
    assert (rows["train_rows"], rows["test_rows"], rows["row"]) == (320, 80, [3])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["compare", "--data", "t.csv"],
            "which column of .*t.csv is to be predicted. Say --target with one of a, b, c, answer",
        ),
        (["train", "--data", "t.csv", "--target", "anser"], "has no column 'anser': choose --target from answer$"),
        (
            ["train", "--data", "t.csv", "--target", "answer", "--model", "resnet-18"],
            "is for images of 3 × 32 × 32, but table:",
        ),
        (
            ["train", "--data", "t.csv", "--target", "a", "--loss", "ce"],
            "^the a of table:t.csv is a number, not a class: leave --loss and --metric out",
        ),
        (["train", "--data", "t.csv", "--target", "a", "--metric", "accuracy"], "is a number, not a class: leave --loss"),
        (["compare", "--data", "nope.csv"], "there is no file nope.csv"),
        (
            ["train", "--data", "pets", "--image-size", 12],
            "has images of 1 × 12 × 12: choose a model .* --model timm:resnet18",
        ),
        (["train", "--data", "digits", "--target", "x"], "--target is for data on disk, a folder or a table: leave it out"),
        (["reproduce", "cifar-cnn/cifar10/bn-2", "--image-size", 32], "--image-size is for data on disk"),
        (["data", "empty"], "put images into train/CLASS/ and test/CLASS/"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, sentence, images, table):
    (table.parent / "empty").mkdir()
    *notes, told = invoke(*arguments, code=2).stderr.splitlines()
    assert re.search(sentence, told)
    assert all("left out" in note for note in notes)
    assert not (table.parent / "runs").exists()


def test_inspection_needs_the_data_again(images):
    invoke("train", "--data", "pets", "--layers", "conv2", "--epochs", 1, *QUICK)
    run = "runs/digits-cnn/images:pets/mixture-norm/seed-0"
    assert mistake("inspect", run, "--device", "cpu") == "images:pets is read from its folder: name it with --data"
    assert "after 1 epoch" in invoke("inspect", run, "--data", "pets", "--device", "cpu").stdout
