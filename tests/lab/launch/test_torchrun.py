"""``mixnorm train`` under torchrun: as one process with the same batch, also after the loss of a worker."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from cli_helpers import measured

from mixnorm_lab.storage import records
from mixnorm_lab.storage.lock import NAME as LOCK

pytestmark = pytest.mark.slow
LIMIT = 240  # seconds for a command; a few times what it takes


def environment():
    found = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def train(folder, *options, ranks=0, restarts=0):
    """A process with the command, in a session of its own; by ``ranks`` processes, or without torchrun."""
    with socket.socket() as free:  # several launches may run side by side
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = f"torch.distributed.run --nproc-per-node {ranks} --max-restarts {restarts} --master-port {port} -m".split()
    command = [sys.executable, "-m", *(launcher if ranks else []), "mixnorm", "train", "--device", "cpu", "--out", folder]
    return subprocess.Popen(
        [*command, *options], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def ended(process, code=0):
    """What a command wrote, on both."""
    try:
        out, errors = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, errors
    return out, errors


def only(folder):
    [record] = records.find(folder)
    return record


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        # Sums in another order differ in fp32's last digit, and each step makes more of that.
        ((), 1e-4),
        # A point between two components may go to either: three digits are left after the first epoch.
        (("--layers", "conv2", "-o", "backend=reference"), 1e-3),
    ],
    ids=["batch norm", "mixture norm"],
)
def test_two_processes_are_as_one(options, tolerance, tmp_path):
    # Without RMSprop, which makes steps of the rounding where a gradient is 0.
    shared = "--epochs", "1", "--recalibrate", "5", "--optimizer", "nesterov", "--lr", "0.05", *options
    ended(train(tmp_path / "one", *shared))
    out, _ = ended(train(tmp_path / "two", *shared, ranks=2))
    assert out.count("finished after") == 1
    [alone], [together] = (only(tmp_path / name).epochs for name in ("one", "two"))
    for name in ("train_loss", "test_loss", "recalibrated_loss"):
        assert together[name] == pytest.approx(alone[name], rel=tolerance)
    for name, images in (("train_error", 22 * 64), ("test_error", 359), ("recalibrated_error", 359)):
        assert abs(together[name] - alone[name]) <= 2.5 / images  # that are close to the border of two classes
    alone, together = (only(tmp_path / name).path.parent.iterdir() for name in ("one", "two"))
    assert sorted(path.name.split(".")[0] for path in together) == sorted(path.name.split(".")[0] for path in alone)


MIXTURE = "--epochs", "12", "--layers", "conv2", "-o", "backend=reference"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    ended(train(folder, *MIXTURE, ranks=2))
    return measured(folder)


def running(folder, process, epochs):
    """Waits until a run has some epochs; the process that writes its record."""
    deadline = time.monotonic() + LIMIT
    while True:
        assert process.poll() is None
        assert time.monotonic() < deadline
        found = list(folder.rglob(records.NAME))
        if found and found[0].read_bytes().count(b'"kind": "epoch"') >= epochs:
            return int((found[0].parent / LOCK).read_text())
        time.sleep(0.01)


def workers(process):
    """The processes that torchrun started."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        return list(map(int, file.read().split()))


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds processes in /proc")
@pytest.mark.parametrize("victim", ["first", "other"])
def test_a_killed_worker_changes_nothing(victim, undisturbed, tmp_path):
    process = train(tmp_path, *MIXTURE, ranks=2, restarts=2)
    try:
        first = running(tmp_path, process, epochs=5)
        [other] = [worker for worker in workers(process) if worker != first]
        os.kill(first if victim == "first" else other, signal.SIGKILL)
    finally:
        _, errors = ended(process)
    assert "exitcode: -9" in errors
    assert measured(tmp_path) == undisturbed
    record = only(tmp_path)
    lines = [json.loads(line) for line in record.path.read_text().splitlines()]
    assert [line["kind"] for line in lines].count("resume") == 1
    assert record.finished


def test_ctrl_c_is_written_down_and_the_command_goes_on(undisturbed, tmp_path):
    process = train(tmp_path, *MIXTURE, ranks=2)
    running(tmp_path, process, epochs=2)
    os.kill(process.pid, signal.SIGINT)
    _, errors = ended(process, code=1)
    assert "Interrupted: the same command goes on from here." in errors
    assert only(tmp_path).reason == "interrupted"
    ended(train(tmp_path, *MIXTURE, ranks=2))
    assert measured(tmp_path) == undisturbed


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--batch-size", "63"), "a batch of 63 cannot be shared evenly by 2 processes"),
        (("no such experiment",), "there is no experiment"),
        (("dcgan/cifar10/mn",), "trains a generator: mixnorm reproduce dcgan/cifar10/mn --features RUN does that"),
    ],
)
def test_a_mistake_is_told_once(options, sentence, tmp_path):
    _, errors = ended(train(tmp_path, *options, ranks=2), code=1)
    assert errors.count(sentence) == 1
    assert not list(tmp_path.rglob(records.NAME))
