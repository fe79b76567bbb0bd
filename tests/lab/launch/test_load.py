"""Fifty runs, and ten of their processes killed on the way: all runs end, none twice, none is lost."""

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from cli_helpers import QUICK, ended, measured, start

from mixnorm_lab.launch.run_queue import RETRIES
from mixnorm_lab.storage import records
from mixnorm_lab.storage.lock import NAME as LOCK

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds processes in /proc")]
RUNS, EPOCHS, KILLS = 50, 3, 10
LIMIT = 500  # seconds for a command; a few times what it takes


def runs(folder, *options):
    return start("compare", "--epochs", EPOCHS, "--seeds", RUNS // 2, *QUICK, "--out", folder, *options, cwd=folder.parent)


def lines(record):
    """The whole lines of a record, which may have been cut off."""
    return [json.loads(line) for line in record.read_bytes().split(b"\n")[:-1]]


def under_way(folder):
    """The runs that a living worker has, and its process."""
    for lock in folder.rglob(LOCK):
        record, content = lock.parent / records.NAME, lock.read_text()
        try:
            command = Path(f"/proc/{int(content)}/cmdline").read_bytes()
        except (ValueError, OSError):  # the lock is just being written, or the process is no more
            continue
        is_worker = b"spawn_main" in command or b"ray::" in command
        if is_worker and record.exists() and not any(line["kind"] == "end" for line in lines(record)):
            yield str(lock.parent.relative_to(folder)), int(content)


def kill_some(folder, process):
    """Kills random workers at random times; how often each run lost its process. None loses more than are retried."""
    chance, killed, deadline = random.Random(0), Counter(), time.monotonic() + LIMIT
    while killed.total() < KILLS:
        time.sleep(chance.uniform(0, 1))
        assert time.monotonic() < deadline
        assert process.poll() is None, f"it ended after {killed.total()} kills"
        victims = [(run, worker) for run, worker in under_way(folder) if killed[run] < RETRIES]
        if victims:
            run, worker = chance.choice(sorted(victims))
            os.kill(worker, signal.SIGKILL)
            killed[run] += 1
    return killed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "runs"
    ended(runs(folder, "--jobs", 2), LIMIT)
    return measured(folder)


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_fifty_runs_survive_ten_kills(engine, undisturbed, tmp_path):
    if engine == "ray":
        pytest.importorskip("ray")
    folder = tmp_path / "runs"
    process = runs(folder, "--engine", engine, *(["--jobs", 2] if engine == "local" else []))
    try:
        killed = kill_some(folder, process)
    finally:
        out, _ = ended(process, LIMIT)
    assert killed.total() == KILLS
    assert out.count("finished after") == RUNS
    assert measured(folder) == undisturbed
    assert len(undisturbed) == RUNS
    resumes = 0
    for path in undisturbed:
        found = lines(folder / path)
        kinds = Counter(line["kind"] for line in found)
        assert (kinds["run"], kinds["end"], found[-1]["reason"]) == (1, 1, "finished")
        resumes += kinds["resume"]
        assert EPOCHS <= kinds["epoch"] <= EPOCHS * (1 + kinds["resume"])  # what a kill cost, and no more
        # From one beginning to the next, epochs follow one another: none is done twice.
        done = 0
        for line in found:
            if line["kind"] == "epoch":
                assert line["epoch"] == done + 1
            done = line.get("epoch", done)
        assert done == EPOCHS
    assert resumes <= KILLS
