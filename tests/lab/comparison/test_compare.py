"""``mixnorm_lab.compare``, and the command that is a skin of it, on projects of all kinds."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli_helpers import QUICK, invoke, mistake
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mixnorm_lab
from mixnorm_lab.storage import records

BACKEND = {"mixture": {"backend": "reference"}, "device": "cpu", "show": False}
MODULE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def build():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

def loaders():
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    y = 3 * x[:, 0] + x[:, 1]
    return DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True), DataLoader(TensorDataset(x, y), batch_size=32)

def huber(output, target):
    return nn.functional.huber_loss(output[:, 0], target)

def worst(output, target):
    return (output[:, 0] - target).abs().max()

def step(model, batch):
    inputs, targets = batch
    return (model(inputs)[:, 0] - targets).abs().mean()

def dictionaries():
    return tuple(DataLoader([dict(a=x, b=y) for x, y in part.dataset], batch_size=32) for part in loaders())

def step_of_dictionary(model, batch):
    return step(model, (batch["a"], batch["b"]))
"""


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch, tmp_path):
    monkeypatch.setattr("mixnorm_lab.reports.plots.curves.draw", lambda *_: [])
    monkeypatch.setattr("mixnorm_lab.reports.plots.densities.draw", lambda *_, **__: [])
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def mine(tmp_path):
    """The name of a user's module in the current folder."""
    name = f"users_compare_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    yield name
    forget(name)
    if str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))


def forget(name):
    """As a new command does."""
    sys.modules.pop(name, None)


def command(mine, *arguments):
    return [
        "compare",
        "--model",
        f"{mine}:build",
        "--data",
        f"{mine}:loaders",
        "--seeds",
        1,
        "--epochs",
        2,
        *QUICK,
        *arguments,
    ]


def images(labels):
    """Loaders of small images with these labels."""
    x = torch.randn(64, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    made = labels(x) if callable(labels) else labels
    return [
        DataLoader(TensorDataset(x, made), batch_size=32, shuffle=True),
        DataLoader(TensorDataset(x, made), batch_size=32),
    ]


def convolution(*end):
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), *end)


SQUARED = "mean squared error"
HEAD = nn.Flatten, lambda: nn.Linear(144, 3)


# --- the task, by the labels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "labels", "metric", "loss"),
    [
        (lambda: convolution(*[part() for part in HEAD]), torch.arange(64) % 3, "accuracy", "cross-entropy"),
        (lambda: convolution(*[part() for part in HEAD]), torch.eye(3)[torch.arange(64) % 3], "accuracy", "cross-entropy"),
        (lambda: convolution(nn.Conv2d(4, 2, 1)), lambda x: (x[:, 0] > 0).long(), "mean IoU", "cross-entropy"),
        (
            lambda: convolution(nn.Flatten(), nn.Linear(144, 1)),
            lambda x: x.mean((1, 2, 3)),
            "mean squared error",
            "mean squared error",
        ),
        (lambda: convolution(nn.Flatten(), nn.Linear(144, 1)), torch.arange(64) % 2, "accuracy", "binary cross-entropy"),
    ],
)
def test_labels_decide_on_loss_and_metric(build, labels, metric, loss):
    found = mixnorm_lab.compare(build, lambda: images(labels), seeds=1, epochs=2, out="out", **BACKEND)
    assert len(found.records) == 2
    for record in found.records:
        assert (record.config.metric, record.config.loss) == (metric, loss)
        assert record.finished
        row = record.epochs[-1]
        assert row["test_loss"] > 0
        assert isinstance(row["busy"], bool)
        if metric == "accuracy":
            assert 0 <= row["test_error"] <= 1
            assert "test_metric" not in row
        else:
            assert (row["train_error"], row["test_error"], row["recalibrated_metric"]) == (None, None, None)
            assert row["test_metric"] >= 0
        if metric == SQUARED:
            assert row["test_metric"] == pytest.approx(row["test_loss"], rel=1e-5)
            assert record.config.optimizer.name == "adamw"
    assert found.report == found.folder / "report.html"
    assert "−2" not in str(found).partition("points")[0]


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = convolution(*[part() for part in HEAD])

    def forward(self, pixel_values, labels=None):
        logits = self.body(pixel_values)
        return SimpleNamespace(loss=None if labels is None else nn.functional.cross_entropy(logits, labels), logits=logits)


def rows():
    data = images(torch.arange(64) % 3)[0].dataset
    samples = [{"pixel_values": x, "labels": y} for x, y in data]
    return DataLoader(samples, batch_size=32, shuffle=True), DataLoader(samples, batch_size=32)


def test_dictionaries_and_a_model_with_a_loss_of_its_own():
    found = mixnorm_lab.compare(Named, rows, seeds=1, epochs=2, out="out", recalibrate=2, **BACKEND)
    for record in found.records:
        assert (record.config.loss, record.config.metric) == ("the model's own", "accuracy")
        assert 0 <= record.epochs[-1]["test_error"] <= 1
        assert 0 <= record.epochs[-1]["recalibrated_error"] <= 1
    assert "accuracy" in str(found)


class Coarse(nn.Module):
    """As some of Hugging Face's are: its output is half as large as the masks, which its loss knows."""

    def __init__(self):
        super().__init__()
        self.body = convolution(nn.MaxPool2d(2), nn.Conv2d(4, 2, 1))

    def forward(self, pixel_values, labels=None):
        logits = self.body(pixel_values)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels[:, ::2, ::2])
        return {"logits": logits, "loss": loss}


def test_an_output_smaller_than_the_masks():
    def loaders():
        samples = [{"pixel_values": x, "labels": (x[0] > 0).long()} for x, _ in images(torch.zeros(64))[0].dataset]
        return DataLoader(samples, batch_size=32), DataLoader(samples, batch_size=32)

    found = mixnorm_lab.compare(Coarse, loaders, seeds=1, epochs=1, out="out", **BACKEND)
    for record in found.records:
        assert (record.config.loss, record.config.metric) == ("the model's own", "mean IoU")
        assert 0 < record.epochs[-1]["test_metric"] < 1


# --- the user's own loss, metric and step -------------------------------------------------------------------------------


def test_a_loss_a_metric_and_a_step_of_the_users(mine):
    invoke(*command(mine, "--loss", f"{mine}:huber", "--metric", f"{mine}:worst:lower", "--out", "out"))
    for record in records.find(Path("out")):
        config = record.config
        assert (config.loss, config.metric, config.metric_function) == (f"{mine}:huber", "worst:lower", f"{mine}:worst")
        assert config.sources.startswith(f"{mine}.py ")
        assert record.epochs[-1]["test_metric"] > record.epochs[-1]["test_loss"] ** 0.5
    invoke(*command(mine, "--step", f"{mine}:step", "--out", "step", "--recalibrate", 2))
    for record in records.find(Path("step")):
        last = record.epochs[-1]
        assert (record.config.metric, last["test_metric"]) == ("loss", pytest.approx(last["test_loss"]))
        assert last["recalibrated_metric"] == pytest.approx(last["recalibrated_loss"])


def test_losses_may_be_objects_and_classes(mine):
    invoke(*command(mine, "--loss", "torch.nn:SmoothL1Loss", "--out", "out"))
    assert all(record.epochs[-1]["test_metric"] > 0 for record in records.find(Path("out")))
    made = mixnorm_lab.compare(
        lambda: convolution(*[part() for part in HEAD]), lambda: images(torch.arange(64) % 3), seeds=1, epochs=1,
        loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3])), metric=(Answers(), "higher"), out="weighted", **BACKEND,
    )  # fmt: skip
    for record in made.records:
        assert record.config.metric == "Answers:higher"
        assert 0 <= record.epochs[-1]["test_metric"] <= 64


class Answers:
    """As torchmetrics has them: how many answers are right."""

    def __call__(self): ...

    def reset(self):
        self.right = 0

    def update(self, logits, labels):
        self.right += (logits.argmax(1) == labels).sum().item()

    def compute(self):
        return self.right


def test_a_step_takes_batches_that_nothing_else_understands(mine):
    arguments = [part.replace(":loaders", ":dictionaries") if isinstance(part, str) else part for part in command(mine)]
    assert "a dictionary of a, b: call its labels 'labels', or give --step" in mistake(*arguments)
    forget(mine)
    invoke(*arguments, "--step", f"{mine}:step_of_dictionary", "--out", "out")
    assert all(record.finished for record in records.find(Path("out")))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--loss", "hinge"], "there is no loss 'hinge': use cross-entropy"),
        (["--loss", "{mine}:huge"], "has no function 'huge': it has build, loaders, huber, worst, step"),
        (["--metric", "{mine}:worst"], "is more of .*:worst better, or less"),
        (["--step", "{mine}:step", "--loss", "mse"], "--step returns the loss itself: leave --loss out"),
        (["--step", "{mine}:step", "--compile"], ":step calls the model itself: compile it there, and leave --compile out"),
        (["--step", "step"], "--step step names no function of yours: write it as my_module:function"),
        (
            ["--loss", "{mine}:build"],
            r"failed with TypeError: build\(\) takes 0 positional arguments but 2 were given: mend it",
        ),
        (["--label-smoothing", 0.1], "the mean squared error spreads no labels: leave --label-smoothing out"),
        (["-k", 50], "50 components are too many for '1', which gets 32 points from a batch .*: use -k 4 or less"),
    ],
)
def test_mistakes(arguments, sentence, mine):
    told = mistake(*command(mine, *[str(one).format(mine=mine) for one in arguments]))
    assert re.search(sentence, told)


def test_a_recipe_smooths_labels_that_are_classes_alone(mine):
    invoke(*command(mine, "--recipe", "one-cycle", "--out", "out"))
    [config, _] = [record.config for record in records.find(Path("out"))]
    assert (config.label_smoothing, config.optimizer.name, config.schedule.name) == (0.0, "nesterov", "one-cycle")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("{mine}", "--model {mine} is a module: name the function in it as well, such as {mine}:build"),
        ("{mine}.py", "--model {mine}.py is a module: name the function in it as well, such as {mine}:build"),
    ],
)
def test_a_module_without_a_function(name, sentence, mine):
    assert mistake("compare", "--model", name.format(mine=mine), *QUICK) == sentence.format(mine=mine)


def test_a_model_without_batch_norms_is_told_what_it_has():
    def build():
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.LayerNorm(8), nn.Linear(8, 3))

    with pytest.raises(
        ValueError, match=r"build has no batch norm to replace \(it has LayerNorm\): choose a model with Batch"
    ):
        mixnorm_lab.compare(build, lambda: images(torch.arange(64) % 3), **BACKEND)


# --- sources ------------------------------------------------------------------------------------------------------------


def folder_of(result):
    return json.loads(result.stdout)["folder"]


def test_an_edit_trains_new_runs_and_keeps_the_old(mine, tmp_path):
    path = tmp_path / f"{mine}.py"
    first = folder_of(invoke(*command(mine, "--json")))
    forget(mine)
    path.write_text(MODULE + "# a comment\n")
    again = invoke(*command(mine, "--json"))
    assert (folder_of(again), "4 of them done" in again.stderr) == (first, False)
    assert again.stderr.count("2 of them done") == 2
    forget(mine)
    path.write_text(MODULE.replace("3 * x", "4 * x"))
    edited = invoke(*command(mine, "--json"))
    second = folder_of(edited)
    assert second != first
    told = f"{mine}.py has changed since the runs in {first}: they are kept there, and new ones are trained in {second}."
    assert edited.stderr.splitlines()[0] == told
    assert all(record.finished for folder in (first, second) for record in records.find(tmp_path / folder))
    forget(mine)
    path.write_text(MODULE)
    back = invoke(*command(mine, "--json"))
    assert folder_of(back) == first
    assert "changed" not in back.stderr
    other = invoke(*command(mine, "--json"), "--em-iters", "3")  # batch norm's runs are the same, and so are the sources
    assert folder_of(other) not in (first, second)
    assert "changed" not in other.stderr


def test_an_edit_with_a_folder_of_its_own_is_refused(mine, tmp_path):
    invoke(*command(mine, "--out", "out"))
    forget(mine)
    (tmp_path / f"{mine}.py").write_text(MODULE.replace("3 * x", "4 * x"))
    sentence = f"{mine}.py has changed since the runs in out, which are kept: choose another --out for new ones"
    assert mistake(*command(mine, "--out", "out")) == sentence


def test_runs_from_before_sources_were_noted_go_on(mine, tmp_path):
    """They have no sources in their records, and another folder by default."""
    first = folder_of(invoke(*command(mine, "--json")))
    for record in records.find(tmp_path / first):
        text = record.path.read_text().splitlines()
        head = json.loads(text[0])
        del head["config"]["sources"], head["crc"]
        record.path.write_text("\n".join([json.dumps(head), *text[1:]]) + "\n")
    older = records.find(tmp_path / first)[1].config.identity()[:8]
    (tmp_path / first).rename(tmp_path / f"{first[:-8]}{older}")
    forget(mine)
    again = invoke(*command(mine, "--json"))
    assert folder_of(again) == f"{first[:-8]}{older}"
    assert "are older than notes of source files: what was edited since then is not seen" in again.stderr
    assert again.stderr.count("2 of them done") == 2


# --- Python -------------------------------------------------------------------------------------------------------------


def test_the_same_call_goes_on_and_says_what_the_command_says(mine, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"seeds": 1, "epochs": 2, "out": "out", **BACKEND}
    found = mixnorm_lab.compare(f"{mine}:build", f"{mine}:loaders", **options)
    before = {record.path: record.path.stat().st_mtime_ns for record in found.records}
    module = sys.modules[mine]
    again = mixnorm_lab.compare(module.build, module.loaders, **options)
    assert {record.path: record.path.stat().st_mtime_ns for record in again.records} == before
    assert capsys.readouterr().out == ""
    told = json.loads(invoke(*command(mine, "--out", "out", "--json")).stdout)
    assert told["answers"] == again.answers
    assert len(told["tables"]) == len(again.tables)


def test_options_are_those_of_the_command():
    with pytest.raises(
        TypeError, match=r"compare\(\) has no option 'learning_rate': choose from components, em_iters, batch_s"
    ):
        mixnorm_lab.compare("a:b", "a:c", learning_rate=1)
    with pytest.raises(ValueError, match="seeds=0 trains nothing"):
        mixnorm_lab.compare("a:b", "a:c", seeds=0)
    with pytest.raises(ValueError, match="a metric is better 'more': say 'higher' or 'lower'"):
        mixnorm_lab.compare("a:b", "a:c", metric=(max, "more"))


def test_norms_layers_and_rates_from_python():
    found = mixnorm_lab.compare(
        lambda: convolution(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)),
        lambda: images(torch.arange(64) % 3),
        norms=["mixture", "group-2"], layers=["1"], seeds=1, epochs=1, components=2, lr=0.01, optimizer="sgd", momentum=0,
        subset=40, validation=0.25, out="out", **BACKEND,
    )  # fmt: skip
    batch, mixture, group = (record.config for record in found.records)
    assert (batch.norm_text, group.norm, group.norm_layers) == ("batch norm", "group-2", ("1",))
    assert (mixture.mixture.layers, mixture.mixture.options["num_components"]) == (("1",), 2)
    assert (batch.optimizer.name, batch.optimizer.lr, batch.optimizer.momentum) == ("sgd", 0.01, 0.0)
    assert [record.epochs[-1]["steps"] for record in found.records] == [2, 2, 2]  # 48 of 64 are for training, 40 are left


def test_functions_that_other_processes_cannot_import():
    def model():
        return convolution(*[part() for part in HEAD])

    sentence = "model, loaders cannot be imported by the processes of jobs=2: put it in a module, such as my_module.py, or"
    with pytest.raises(ValueError, match=sentence):
        mixnorm_lab.compare(model, lambda: images(torch.arange(64) % 3), jobs=2, **BACKEND)


# --- looking at what was trained ----------------------------------------------------------------------------------------


def test_norms_of_any_project_can_be_looked_at(mine, tmp_path):
    """Also where a step of the user's takes the batches, and of a run that has no mixture norm, which says so."""
    arguments = [part.replace(":loaders", ":dictionaries") if isinstance(part, str) else part for part in command(mine)]
    invoke(*arguments, "--step", f"{mine}:step_of_dictionary", "--out", "out")
    told = invoke("inspect", "out/mixture-norm/seed-0").stdout
    assert told.startswith("The norm 1 after 2 epochs:\n")
    assert "no mixture norm" not in told
    told = invoke("inspect", "out/mixture-norm/seed-0", "--likelihood", "--out", "seen").stdout
    assert "How many components 1 wants" in told
    assert Path("seen/likelihood-1-epoch-2.json").exists()
    told = invoke("inspect", "out/batch-norm/seed-0").stdout.splitlines()
    assert told[0] == "The norm 1 after 2 epochs:"
    assert told[-1] == "This run has no mixture norm, so there are no components to show over its training."
