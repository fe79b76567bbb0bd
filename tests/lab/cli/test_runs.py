"""The commands that train and report, on small runs: what they leave, what they say, and what stops them."""

import json
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import torch
from cli_helpers import QUICK, invoke, measured, mistake, start
from data_helpers import write_official

from mixnorm_lab.data import cifar, download
from mixnorm_lab.storage import checkpoint, records
from mixnorm_lab.storage.lock import locked

COMPARE = ["compare", "--seeds", 2, "--epochs", 2, "--batch-size", 256, *QUICK]
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
MODULE = """
import torch
from torch import nn

def build(num_classes=3):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(num_classes))
    model(torch.zeros(2, 1, 4, 4))
    if torch.initial_seed() == 1:  # an unlucky beginning
        nn.init.constant_(model[0].weight, float("nan"))
    return model

def loaders():
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(16, 1, 4, 4, generator=generator), torch.arange(16) % 3) for _ in range(4)]
    return batches, batches

def broken():
    raise RuntimeError("the disk with\\nthe images is not there")
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The folder of a comparison, and what it printed."""
    folder = tmp_path_factory.mktemp("compare") / "out"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    result = invoke(*COMPARE, "--out", folder)
    torch.set_num_threads(threads)
    return folder, result


@pytest.fixture
def no_pictures(monkeypatch):
    """Those of one comparison are enough: they take longer than the training of a small model."""
    monkeypatch.setattr("mixnorm_lab.reports.plots.curves.draw", lambda *_: [])
    monkeypatch.setattr("mixnorm_lab.reports.plots.densities.draw", lambda *_, **__: [])


@pytest.fixture
def copied(compared, tmp_path):
    """A copy of it, to do harm to."""
    return shutil.copytree(compared[0], tmp_path / "copy")


@pytest.fixture
def users(tmp_path, monkeypatch):
    """The name of a user's module in the current folder."""
    name = f"users_cli_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)
    if str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))


@pytest.fixture
def small_cifar(tmp_path, monkeypatch):
    """A folder with official files of CIFAR-10 that have enough images for one batch of the paper's."""
    official = cifar.OFFICIAL["cifar10"]
    counts = {"train": dict.fromkeys(official.train, 52), "test": dict.fromkeys(official.test, 20)}
    monkeypatch.setitem(cifar.OFFICIAL, "cifar10", replace(official, **counts))
    write_official("cifar10", tmp_path / "cifar")
    return tmp_path / "cifar"


NORMS = ("batch-norm", "mixture-norm")


def own(users, *arguments):
    """A comparison of a user's own model on a user's own data."""
    return ["compare", "--model", f"{users}:build", "--data", f"{users}:loaders", *QUICK, *arguments]


# --- compare ------------------------------------------------------------------------------------------------------------


def test_a_comparison_leaves_records_pictures_and_a_report(compared):
    folder, result = compared
    assert result.stderr == ""
    names = [f"{norm}/seed-{seed}" for norm in ("batch-norm", "mixture-norm") for seed in (0, 1)]
    for name in names:
        assert records.read(folder / name / records.NAME).finished
        assert (folder / name / checkpoint.NAME).is_file()
        assert list((folder / name).glob("events.out.tfevents.*"))
    assert list((folder / "figures").glob("*test-error*"))
    assert "<img" in (folder / "report.html").read_text() or "<svg" in (folder / "report.html").read_text()
    assert "| mixture-norm | 2 |" in (folder / "report.md").read_text()


def test_a_comparison_ends_with_tables_and_the_path_of_the_report(compared):
    folder, result = compared
    lines = result.stdout.splitlines()
    assert lines[0].startswith("4 runs: batch-norm seed 0, mixture-norm seed 0, batch-norm seed 1")
    assert lines[-1] == f"The report is {folder / 'report.html'}"
    tables = result.stdout[result.stdout.index("Accuracy in the end") : result.stdout.index("The report is")]
    assert all(len(line.rstrip()) <= 80 for line in tables.splitlines())
    for norm in ("batch-norm", "mixture-norm"):
        assert re.search(rf"^{norm} +\d", tables, re.MULTILINE)
    assert "Steps to fixed targets" in tables
    assert re.search(r"Mixture norm (is (better|worse) than|cannot be told apart from) batch norm", tables)


def test_the_same_command_again_trains_nothing_and_says_the_same(compared, copied, no_pictures):
    folder, result = copied, compared[1]
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*/*")}
    began = time.monotonic()
    again = invoke(*COMPARE, "--out", folder, "--json")
    assert time.monotonic() - began < 10
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/*/*")} == before
    found = json.loads(again.stdout)  # nothing else is there
    assert (found["folder"], found["report"]) == (str(folder), str(folder / "report.html"))
    assert " ".join(found["answers"]) in " ".join(result.stdout.split())
    assert "mixture-norm seed 1: finished" in again.stderr
    [ended, steps] = found["tables"]
    errors = [record.epochs[-1]["test_error"] for record in records.find(folder / "batch-norm")]
    assert ended["rows"][0]["end"]["mean"] == pytest.approx(100 * (1 - sum(errors) / 2))  # the last epoch
    assert [row["run"] for row in ended["rows"]] == ["batch-norm", "mixture-norm"]
    assert {row["run"] for row in steps["rows"]} == {"mixture-norm", "batch norm, other seed"}


def test_a_folder_is_of_its_settings_and_more_seeds_add_to_it(users, tmp_path, no_pictures):
    def folder(*arguments, code=0):
        return json.loads(invoke(*own(users, "--epochs", 1, "--json", *arguments), code=code).stdout)["folder"]

    first = folder("--seeds", 1)
    assert re.fullmatch(rf"runs/{users}.loaders-{users}.build-[0-9a-f]{{8}}", first)
    before = measured(tmp_path / first)
    assert folder("--seeds", 2, code=2) == first  # the second seed diverges
    after = measured(tmp_path / first)
    assert len(after) == 4
    assert before.items() <= after.items()
    assert folder("--seeds", 1, "-k", 2) != first


@pytest.fixture
def ctrl_c():
    """Ctrl-C works, here and in processes that begin here, also where the tests run in the background and it is ignored."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread alone")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_leaves_a_folder_that_the_same_command_finishes(users, tmp_path, monkeypatch, no_pictures, ctrl_c):
    arguments = own(users, "--epochs", 4, "--seeds", 1)

    def interrupt(_, row):
        if row["epoch"] == 3 and row["components"]:  # of mixture norm, which comes second
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("mixnorm_lab.training.run.Events.epoch", interrupt)
        result = invoke(*arguments, "--out", "out", code=130)
    assert result.stderr == "\nInterrupted: the same command goes on from here.\n"
    assert result.stdout.splitlines()[-1] == "The report is out/report.html"
    assert "1 of 2 runs is not finished" in (tmp_path / "out" / "report.md").read_text()
    invoke(*arguments, "--out", "out")
    invoke(*arguments, "--out", "whole")
    assert all(record.finished for record in records.find(tmp_path / "out"))
    assert measured(tmp_path / "out") == measured(tmp_path / "whole")


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_reaches_all_processes(users, tmp_path, no_pictures, ctrl_c):
    """Only the first says something, and all of them leave what they have."""
    arguments = own(users, "--epochs", 3000, "--seeds", 1, "--out", "out")
    process = start(*arguments, "--jobs", 2, cwd=tmp_path, start_new_session=True)
    try:
        paths, deadline = [tmp_path / "out" / norm / "seed-0" / records.NAME for norm in NORMS], time.monotonic() + 120
        while not all(path.exists() and b'"kind": "epoch"' in path.read_bytes() for path in paths):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, err.strip()) == (130, "Interrupted: the same command goes on from here.")
    assert "The report is" in out
    for path in paths:
        record = records.read(path)
        assert record.reason == "interrupted"
        assert checkpoint.read(path.parent)["epoch"] >= len(record.epochs) - 1


# --- a user's own problem -----------------------------------------------------------------------------------------------


def test_a_users_model_and_data(users, tmp_path, no_pictures):
    found = json.loads(invoke(*own(users, "--epochs", 1, "--seeds", 1, "--json")).stdout)
    assert found["folder"].startswith(f"runs/{users}.loaders-{users}.build-")
    mixture = records.read(tmp_path / found["folder"] / "mixture-norm" / "seed-0" / records.NAME)
    assert mixture.epochs[0]["components"].keys() == {"1"}  # every batch norm, unless told otherwise


def test_loaders_decide_on_batches_themselves(users, no_pictures):
    """A report would else tell of a batch size that there never was."""
    assert re.search(":loaders comes with its own --batch-size: leave that out", mistake(*own(users, "--batch-size", 8)))
    invoke(*own(users, "--epochs", 1, "--seeds", 1, "--out", "out"))
    assert "| batch size | that of the loaders |" in Path("out/report.md").read_text()


def test_a_loss_that_is_not_finite_in_some_of_the_runs(users, tmp_path, no_pictures):
    arguments = own(users, "--epochs", 2, "--seeds", 3, "--out", "out")
    result = invoke(*arguments, code=2)
    [sentence] = result.stderr.splitlines()
    assert re.fullmatch(
        r"batch-norm seed 1, mixture-norm seed 1: the loss of the first batch, before any update, is not finite, "
        r"which began with the output of 0: look at the weights that the model starts with",
        sentence,
    )
    assert "2 of 3" in result.stdout
    assert "2 runs diverged" in (tmp_path / "out" / "report.md").read_text()
    assert sum(record.finished for record in records.find(tmp_path / "out")) == 4
    trace = invoke(*arguments, "--debug", code=2).stderr
    assert trace.startswith("Traceback")
    assert trace.splitlines()[-1] == sentence


@pytest.mark.parametrize(
    ("model", "data", "sentence"),
    [
        ("no_such_module:build", "digits", "there is no module 'no_such_module': run the command in the folder of"),
        ("{users}:make", "digits", "has no function 'make': it has build, loaders, broken"),
        ("{users}:loaders", "{users}:loaders", "must return a torch.nn.Module, but returned a tuple of 2"),
        ("{users}:build", "{users}:broken", "broken raised RuntimeError: the disk with the images is not there: mend it"),
        ("{users}:build", "{users}:build", "must return two loaders"),
        (
            "{users}:build",
            "digits",
            "training .*:build failed with RuntimeError: mat1 and mat2 shapes.*: the inputs must have the size",
        ),
    ],
)
def test_a_users_mistake(model, data, sentence, users):
    arguments = ["--model", model.format(users=users), "--data", data.format(users=users), "--seeds", 1, *QUICK]
    assert re.search(sentence, mistake("compare", *arguments))


def test_norms_side_by_side(tmp_path, no_pictures):
    out = ["--out", tmp_path / "out", "--seeds", 1, "--epochs", 1, "--batch-size", 256, *QUICK]
    result = invoke("compare", "--norms", "ghost-32, group-32,mixture:em_iters=0:layers=conv1+conv3", "--train-eval", *out)
    names = ["batch-norm", "ghost-32", "group-32", "mixture-norm,em_iters=0,layers=conv1+conv3"]
    assert [record.config.name for record in records.find(tmp_path / "out")] == names
    for name in names[:3]:
        assert re.search(rf"^{name} +1 ", result.stdout, re.MULTILINE)
    assert result.stdout.count("Accuracy in the end: digits-cnn") == 1
    assert "Steps to fixed targets" not in result.stdout  # that is in the report
    for begun in ("Ghost batch norm (ghost-32) ", "Group norm (group-32) ", "Mixture norm (mixture-norm,em_iters=0"):
        assert f"\n{begun}" in result.stdout
    last = records.find(tmp_path / "out")[3]
    assert last.config.mixture.layers == ("conv1", "conv3")
    assert last.config.mixture.options["em_iters"] == 0
    assert last.epochs[-1]["train_eval_loss"] > 0
    again = invoke("compare", "--norms", "batch,layer", "--train-eval", *out, "--json")
    assert "--norms batch,layer makes no use of --option." in again.stderr
    more = json.loads(again.stdout)
    assert [row["run"] for row in more["tables"][0]["rows"]] == ["batch-norm", "layer"]
    assert len(records.find(tmp_path / "out")) == 5  # batch norm was there


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["compare", "--norms", "batch,gost-32"], "there is no norm 'gost-32': use ghost-32"),
        (["compare", "--norms", "mixture:speed=1"], "option 'speed' is unknown to mixture norm: choose from"),
        (["compare", "--norms", "batch,group-5"], "the 16 channels of 'conv1.norm' cannot be divided into 5 groups, nor"),
        (["compare", "--norms", "layer", "--task", "gan"], "--task gan comes with its own --norms: leave that out"),
        (["compare", "--norms", "layer", "--layers", "conv9"], "'conv9' matches no batch norm: the model has conv1.norm"),
        (
            ["train", "--norm", "layer", "-k", 3, "--em-iters", 2],
            "--norm layer has no use for --components, --em-iters: leave that out",
        ),
        (["train", "cifar-cnn/cifar10/bn-2", "--norm", "layer"], "comes with its own --norm: leave that out"),
        (["train", "--recipe", "onecycle"], "there is no recipe 'onecycle': use one-cycle"),
    ],
)
def test_a_mistake_about_norms_or_recipes(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sentence in mistake(*arguments, "--device", "cpu")


# --- train, reproduce, report, data ---------------------------------------------------------------------------------------


def test_one_run_of_either_norm(tmp_path):
    out = ["--out", tmp_path / "runs", "--epochs", 1, "--batch-size", 256]
    batch_norm = json.loads(invoke("train", "--device", "cpu", *out, "--json").stdout)
    assert batch_norm["report"] is None
    mixture_norm = invoke("train", *QUICK, *out, "--layers", "conv2,conv3.norm", "--seed", 3, "-k", 2, "--lr", 0.01).stdout
    assert f"The records are in {tmp_path / 'runs'}" in mixture_norm
    found = records.find(tmp_path / "runs")
    assert [record.path.parent.relative_to(tmp_path / "runs").as_posix() for record in found] == [
        "digits-cnn/digits/batch-norm/seed-0",
        "digits-cnn/digits/mixture-norm/seed-3",
    ]
    config = found[1].config
    assert (config.seed, config.batch_size, config.optimizer.lr, config.epochs) == (3, 256, 0.01, 1)
    assert found[1].epochs[0]["components"].keys() == {"conv2.norm", "conv3.norm"}
    assert (config.mixture.options["num_components"], config.mixture.options["backend"]) == (2, "reference")


def test_one_run_of_another_norm_by_a_recipe(tmp_path):
    arguments = ["--recipe", "one-cycle", "--epochs", 1, "--lr", 0.05, "--device", "cpu", "--out", tmp_path]
    invoke("train", "--norm", "ghost-64", "--layers", "conv1,conv2", *arguments)
    [record] = records.find(tmp_path)
    config = record.config
    assert config.name == "digits-cnn/digits/ghost-64"
    assert (config.norm, config.norm_layers, config.mixture) == ("ghost-64", ("conv1", "conv2"), None)
    assert (config.schedule.name, config.label_smoothing, config.optimizer.lr) == ("one-cycle", 0.1, 0.05)


def test_an_absurd_learning_rate(tmp_path):
    arguments = ["train", "--lr", 1e30, "--epochs", 1, "--device", "cpu", "--out", tmp_path]
    assert re.search(
        r"batch-norm seed 0: the loss of step \d+ of epoch 1 is not finite.*: use a learning", mistake(*arguments)
    )


def test_an_experiment_of_the_paper_by_its_name(small_cifar, tmp_path, no_pictures):
    name, out = "cifar-cnn/cifar10/bn-2", tmp_path / "out"
    rest = ["--epochs", 1, "--data", small_cifar, "--device", "cpu", "--out", out]
    result = invoke("reproduce", name, *rest)
    assert re.search(r"^bn-2 +1 ", result.stdout, re.MULTILINE)
    assert f"The report is {out / 'report.html'}" in result.stdout
    [record] = records.find(out)
    assert record.path == out / name / "seed-0" / records.NAME
    assert record.finished
    assert (record.config.optimizer.lr, record.config.optimizer.weight_decay) == (0.01, 2e-5)
    content = record.path.read_bytes()
    again = json.loads(invoke("train", name, *rest, "--json").stdout)  # the same run, and it is done
    assert again["tables"][0]["rows"][0]["seeds"] == 1
    assert record.path.read_bytes() == content


def test_a_report_of_what_is_there(copied, monkeypatch):
    for path in [*(copied / "figures").iterdir(), copied / "report.html", copied / "report.md"]:
        path.unlink()
    found = json.loads(invoke("report", copied, "--json", "--bench", BENCHMARKS / "h200.csv").stdout)
    assert found["report"] == str(copied / "report.html")
    assert len(found["tables"]) == 2
    assert "Titan X" in (copied / "report.md").read_text()
    assert list((copied / "figures").iterdir())
    monkeypatch.setattr("mixnorm_lab.reports.plots.curves.draw", lambda *_: [])
    text = invoke("report", copied, "--title", "What came out").stdout
    *sentences, _ = text.splitlines()
    assert all(len(line) <= 80 for line in sentences)
    assert " ".join(found["answers"]) in " ".join(text.split())
    assert "<title>What came out" in (copied / "report.html").read_text()


def test_the_official_files_of_a_folder(small_cifar):
    text = invoke("data", "cifar10", "--data", small_cifar).stdout
    assert re.search(r"training images +260\ntest images +20\nimage +3 × 32 × 32\nclasses +10\n", text)
    found = json.loads(invoke("data", "cifar10", "--data", small_cifar, "--json").stdout)
    assert (found["train_images"], found["image"]) == (260, [3, 32, 32])


# --- what stops a run ---------------------------------------------------------------------------------------------------


def test_a_truncated_file_of_the_data(small_cifar):
    path = small_cifar / "data_batch_3"
    path.write_bytes(path.read_bytes()[:-1000])
    for arguments in (["reproduce", "cifar-cnn/cifar10/bn-2", "--data", small_cifar], ["compare", "--data", small_cifar]):
        assert re.search("data_batch_3 is no official file of CIFAR-10 or is damaged.*: `mixnorm data", mistake(*arguments))


def test_an_archive_with_another_checksum(tmp_path):
    (tmp_path / download.ARCHIVES["cifar10"].file).write_bytes(b"half of it")
    for arguments in (["data", "cifar10", "--data", tmp_path], ["compare", "--data", tmp_path, "--out", tmp_path / "out"]):
        assert re.search("cifar-10-python.tar.gz is damaged or cut off: `mixnorm data cifar10` downl", mistake(*arguments))


def test_data_that_cannot_be_downloaded(tmp_path, monkeypatch):
    def offline(*_, **__):
        raise requests.ConnectionError("no network")

    monkeypatch.setenv("MIXNORM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(requests, "get", offline)
    for arguments in (["compare", "--data", "cifar10"], ["reproduce", "cifar-cnn/cifar10/bn-2"], ["data", "cifar10"]):
        sentence = mistake(*arguments, *([] if arguments[0] == "data" else ["--out", tmp_path / "out"]))
        assert re.search(r"cannot be reached \(no network\): without a network, get cifar-10-python.tar.gz", sentence)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_configuration(compared):
    before = {path: path.read_bytes() for path in compared[0].rglob("*") if path.is_file()}
    sentence = mistake(*COMPARE, "--lr", 0.5, "--out", compared[0])
    assert re.search(r"another configuration \(optimizer.lr: 0.003, not 0.5\): choose another --out", sentence)
    assert {path: path.read_bytes() for path in compared[0].rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("command", ["compare", "report"])
def test_a_broken_line_in_a_record(command, copied):
    path = copied / "batch-norm" / "seed-0" / records.NAME
    lines = path.read_text().splitlines()
    broken = "\n".join([lines[0], lines[1][:40], *lines[2:]]) + "\n"
    path.write_text(broken)
    arguments = [*COMPARE, "--out", copied] if command == "compare" else ["report", copied]
    assert re.search(r"seed-0/record.jsonl, line 2 is broken .*: remove that line", mistake(*arguments))
    assert path.read_text() == broken


def test_a_damaged_checkpoint(copied, no_pictures):
    folder = copied / "mixture-norm" / "seed-1"
    path = folder / records.NAME
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")  # as if it had not ended
    damaged = (folder / checkpoint.NAME).read_bytes()[:-50]
    (folder / checkpoint.NAME).write_bytes(damaged)
    sentence = mistake(*COMPARE, "--out", copied)
    assert re.search("mixture-norm seed 1: .*checkpoint.pt is damaged .*: delete it to start this run again", sentence)
    assert (folder / checkpoint.NAME).read_bytes() == damaged


def test_two_runs_in_one_folder(copied):
    folder = copied / "batch-norm" / "seed-1"
    (folder / records.NAME).unlink()
    with locked(folder):
        sentence = mistake(*COMPARE, "--out", copied)
    assert re.search(f"seed-1 is in use by process {os.getpid()}: wait until it is done", sentence)


@pytest.mark.parametrize(
    "command",
    [
        ["compare"],
        ["train"],
        ["reproduce", "cifar-cnn/cifar10/bn-2"],
        ["compare", "--task", "gan", "--data", "ring", "--epochs", 1, "--seeds", 1],
    ],
)
def test_a_folder_that_cannot_be_made_is_told_before_any_work(command, tmp_path, monkeypatch):
    def work(*_, **__):
        raise AssertionError("the folder comes first")

    monkeypatch.setattr("mixnorm_lab.training.build.check", work)
    monkeypatch.setattr("mixnorm_lab.generators.plane.run", work)
    (tmp_path / "file").write_text("kept")
    result = invoke(*command, "--out", tmp_path / "file" / "below", code=2)
    assert re.fullmatch(
        ".*below cannot be written .Not a directory.: choose another folder with --out", result.stderr.strip()
    )
    assert (tmp_path / "file").read_text() == "kept"


def test_a_mistake_leaves_no_folder_behind(tmp_path):
    mistake("compare", "--layers", "conv9", "--out", tmp_path / "new" / "runs")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a place where nobody may make a folder")
def test_a_report_is_written_where_there_can_be_folders(copied):
    invoke("report", copied, "--csv", copied / "new" / "x.csv")
    assert sorted(path.name for path in (copied / "new").iterdir()) == ["x-summary.csv", "x.csv"]
    sentence = mistake("report", copied, "--csv", "/proc/nowhere/x.csv")
    assert sentence == "/proc/nowhere: No such file or directory: name another place, and run the same command again"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    try:
        assert re.search("Permission denied.*: choose another folder", mistake(*COMPARE, "--out", tmp_path / "out"))
    finally:
        tmp_path.chmod(0o700)


def test_a_disk_that_is_full(compared, copied, no_pictures, monkeypatch):
    """Files may not grow beyond a size. The runs are done but for one, which has no room for its checkpoint."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # of a module cut off in the middle, for all later processes
    folder = copied / "mixture-norm" / "seed-1"
    (folder / records.NAME).unlink()
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file() and path.name != "lock"}
    arguments = [*COMPARE, "--out", copied]

    def no_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    process = start(*arguments, cwd=copied, preexec_fn=no_room)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    [sentence] = err.splitlines()
    assert re.search(r"checkpoint.pt cannot be written \(File too large\): the last checkpoint is kept, so make", sentence)
    assert {path: path.read_bytes() for path in before} == before
    invoke(*arguments)
    assert measured(copied) == measured(compared[0])


def test_no_room_for_the_report(compared, copied, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mixnorm_lab.reports.plots.curves.draw", full)
    assert mistake("report", copied) == (
        "No space left on device: make room or choose another folder, and run the same command again"
    )
