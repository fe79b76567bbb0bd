"""Runs over a Ray cluster: the same folder as a local run leaves, also when a process or a machine is lost on the way."""

import json
import os
import signal
import socket
import sys
import time

import pytest
from cli_helpers import QUICK, ended, measured, mistake, start

from mixnorm_lab.storage import records
from mixnorm_lab.storage.lock import NAME as LOCK

LIMIT = 240  # seconds for a command; a few times what it takes
EPOCHS = 15


def compare(folder, *options, **others):
    """Four runs, two of each norm."""
    command = "compare", "--epochs", EPOCHS, "--seeds", 2, *QUICK, "--out", folder, *options
    return start(*command, cwd=folder.parent, **others)


def contents(folder):
    """The files below a folder, whatever time and process are in their names."""
    return sorted({str(path.relative_to(folder)).split(".tfevents.")[0] for path in folder.rglob("*") if path.is_file()})


def owner(folder, run, process, epochs):
    """Waits until a run has some epochs; the process that does it."""
    record, deadline = folder / run / records.NAME, time.monotonic() + LIMIT
    while not record.exists() or record.read_bytes().count(b'"kind": "epoch"') < epochs:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int((folder / run / LOCK).read_text())


def resumed(folder, run):
    lines = [json.loads(line) for line in (folder / run / records.NAME).read_text().splitlines()]
    return [line["epoch"] for line in lines if line["kind"] == "resume"]


def test_ray_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    said = mistake("reproduce", "cifar-cnn/cifar10/*", "--engine", "ray")
    assert said.endswith("needs Ray: install the extra, pip install '.[ray]' from a checkout of mixnorm")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--engine", "slurm"), "--engine slurm is unknown: choose from local, ray"),
        (("--address", "auto"), "--address is that of a Ray cluster: add --engine ray"),
        (("--engine", "ray", "--jobs", "2"), "--jobs is not for Ray, which begins a run wherever a GPU or a core is free"),
    ],
)
def test_mistakes(options, sentence):
    assert mistake("reproduce", "cifar-cnn/cifar10/*", *options).startswith(sentence)


def test_a_cluster_that_is_not_there():
    pytest.importorskip("ray")
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody_listens.getsockname()[1]}"
        sentence = mistake("reproduce", "cifar-cnn/cifar10/*", "--engine", "ray", "--address", address)
    assert sentence.startswith(f"Ray does not answer at {address} (")
    assert sentence.endswith("leave --address out to use this machine alone")


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """What the runs measure on this machine, and the files that they leave."""
    folder = tmp_path_factory.mktemp("local") / "runs"
    ended(compare(folder, "--jobs", 2), LIMIT)
    return measured(folder), contents(folder)


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(local, tmp_path):
    pytest.importorskip("ray")
    folder = tmp_path / "runs"
    process = compare(folder, "--engine", "ray")
    os.kill(owner(folder, "mixture-norm/seed-0", process, epochs=4), signal.SIGKILL)
    out, _ = ended(process, LIMIT)
    assert out.count("finished after") == 4  # one display shows all runs
    assert len(resumed(folder, "mixture-norm/seed-0")) == 1
    assert (measured(folder), contents(folder)) == local


@pytest.mark.slow
def test_a_lost_machine_changes_nothing(local, tmp_path):
    """Two machines of a core each, and one that only this command runs on."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 100_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **memory})
    try:
        machines = [cluster.add_node(num_cpus=1, **memory) for _ in range(2)]
        folder = tmp_path / "runs"
        process = compare(folder, "--engine", "ray", "--address", cluster.address)
        owner(folder, "mixture-norm/seed-0", process, epochs=4)
        cluster.remove_node(machines[0], allow_graceful=False)
        out, _ = ended(process, LIMIT)
    finally:
        cluster.shutdown()
    assert out.count("finished after") == 4
    assert (measured(folder), contents(folder)) == local
    assert sum(len(resumed(folder, f"{norm}-norm/seed-{seed}")) for norm in ("batch", "mixture") for seed in (0, 1)) == 1


@pytest.mark.slow
def test_ctrl_c_is_written_down_and_the_command_goes_on(local, tmp_path):
    pytest.importorskip("ray")
    folder = tmp_path / "runs"
    process = compare(folder, "--engine", "ray", start_new_session=True)
    owner(folder, "mixture-norm/seed-0", process, epochs=2)
    process.send_signal(signal.SIGINT)
    _, errors = ended(process, LIMIT, code=130)
    assert "Interrupted: the same command goes on from here." in errors
    assert records.read(folder / "mixture-norm" / "seed-0" / records.NAME).reason == "interrupted"
    ended(compare(folder, "--engine", "ray"), LIMIT)
    assert measured(folder) == local[0]
