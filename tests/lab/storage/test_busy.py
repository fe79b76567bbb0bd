"""Whether a machine is busy beside a run, on this one and on machines that say less."""

import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from mixnorm_lab.storage import busy
from mixnorm_lab.storage.busy import Sample, Watch

CPU = torch.device("cpu")


def work(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(1000))


@pytest.mark.skipif(busy.sample().waited is None, reason="this system does not tell how long threads wait")
def test_threads_that_share_a_core_wait_for_it(monkeypatch):
    """Four processes on one core: whatever else this machine does, each gets a quarter of it. They are taken for strangers,
    and the core for all that there is."""
    monkeypatch.setattr(busy, "_of_worker", lambda _: 0.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    cores = os.sched_getaffinity(0)
    core = {min(cores)}
    readers = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            os.sched_setaffinity(0, core)
            work(5)
            os._exit(0)
        readers.append(child)
    os.sched_setaffinity(0, core)
    try:
        watch = Watch(CPU)
        work(0.3)
        assert watch.busy()
    finally:
        os.sched_setaffinity(0, cores)
        for child in readers:
            os.kill(child, 9)
            os.waitpid(child, 0)


def counted(monkeypatch, *samples):
    told = iter(samples)
    monkeypatch.setattr(busy, "sample", lambda: next(told))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


@pytest.mark.parametrize(
    ("ran", "waited", "others", "expected"),
    [(95, 5, 100, False), (80, 20, 100, True), (80, 20, 10, False), (0, 0, 100, False)],
)
def test_a_machine_is_busy_where_threads_wait_and_others_run(ran, waited, others, expected, monkeypatch):
    """For a tenth of their time at least, while others have a twentieth of 400 seconds of all cores."""
    counted(monkeypatch, Sample(0, 10, 5, 20, 500), Sample(100, 10 + ran, 5 + waited, 20 + ran, 500 + ran + others))
    assert Watch(CPU).busy() == expected


def test_only_what_was_since_the_last_call_counts(monkeypatch):
    later = Sample(200, 110, 91, 110, 500)
    counted(monkeypatch, Sample(0, 0, 0, 0, 0), Sample(100, 10, 90, 10, 400), Sample(100, 10, 90, 10, 400), later)
    watch = Watch(CPU)
    assert watch.busy()
    watch.start()
    assert not watch.busy()


def test_workers_of_a_loader_are_no_others(monkeypatch):
    """They are counted while they run, as they are when they have ended."""
    before = busy.sample().own
    child = os.fork()
    if child == 0:
        work(0.3)
        time.sleep(30)
        os._exit(0)
    time.sleep(0.1)
    until = time.monotonic() + 20
    while busy.sample().own - before < 0.2:
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert busy.sample().own - before >= 0.2


@pytest.mark.parametrize(("load", "expected"), [(4.0, False), (6.0, True), (None, False)])
def test_the_load_counts_where_the_system_says_no_more(load, expected, monkeypatch):
    def average():
        if load is None:
            raise OSError
        return load, 0, 0

    counted(monkeypatch, Sample(0), Sample(1))
    monkeypatch.setattr(os, "getloadavg", average)
    assert Watch(CPU).busy() == expected


def test_other_runs_beside_it_are_known(monkeypatch):
    counted(monkeypatch, Sample(0, 0, 0), Sample(1, 1, 0))
    assert Watch(CPU, shared=True).busy()


@pytest.mark.parametrize(
    ("samples", "expected"), [([(7, 90)], False), ([(7, 90), (8, 3)], False), ([(7, 90), (8, 40)], True), (None, False)]
)
def test_another_process_on_the_gpu(samples, expected, monkeypatch):
    """Whose number is ours is not asked: in a container the driver has other numbers."""

    class NVMLError(Exception): ...

    def utilization(handle, since):
        assert handle == "handle of GPU-1234"
        assert since == pytest.approx(time.time() * 1e6, abs=60e6)
        if samples is None:
            raise NVMLError
        return [SimpleNamespace(pid=pid, smUtil=share) for pid, share in samples]

    nvml = SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetProcessUtilization=utilization,
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234"))
    counted(monkeypatch, Sample(time.time(), 0, 0), Sample(time.time(), 1, 0))
    assert Watch(torch.device("cuda", 0)).busy() == expected


def test_threads_that_end_meanwhile_do_not_disturb():
    watch = Watch(CPU)
    thread = threading.Thread(target=work, args=(0.01,))
    thread.start()
    thread.join()
    assert isinstance(watch.busy(), bool)
