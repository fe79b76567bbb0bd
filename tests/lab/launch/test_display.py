"""Progress: bars in a terminal, a line now and then elsewhere, and next to no time."""

import io
import re
import sys
import time

import pytest

from mixnorm_lab.launch import display
from mixnorm_lab.launch.display import RunDisplay
from mixnorm_lab.training.progress import Silent

LONG = "cifar-cnn/cifar100/mn-2, seed 0"


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def text(self):
        """What was written, without colours and movements of the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.getvalue())


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(display.time, "monotonic", lambda: self.now)


@pytest.fixture
def terminal(monkeypatch):
    pytest.importorskip("rich", reason="rich is not installed, and then there are no bars")
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def one_run(run, *, epochs=3, steps=4, done=0, each=lambda: None):
    run.start("run", epochs, steps, done)
    for epoch in range(done, epochs):
        for step in range(steps):
            each()
            run.step(step + 1)
        run.epoch({"epoch": epoch + 1, "test_error": 0.5 - 0.1 * epoch})
    run.end("finished")


def test_bars_show_names_accuracy_speed_and_time(terminal, monkeypatch):
    monkeypatch.setattr("mixnorm_lab.launch.display.UPDATE_SECONDS", 0.0)
    with RunDisplay([LONG, "other"], terminal) as display:
        assert LONG in terminal.text()  # before anything runs
        assert "waiting" in terminal.text()
        one_run(display.run(LONG), each=lambda: time.sleep(0.01))
    last = terminal.text().splitlines()[-3:]
    assert re.match(r"all runs +[━╺╸]+ 1/2 .* 0:00", last[0])
    assert re.match(rf"{LONG} ━+ 3/3 +70.0% +finished +0:00", last[1])
    assert re.match(r"other +━+ waiting", last[2])
    assert all(len(line.rstrip()) <= 80 for line in last)


def test_more_runs_than_the_terminal_has_lines(terminal, monkeypatch):
    monkeypatch.setenv("LINES", "12")
    names = [f"run {number}" for number in range(30)]
    with RunDisplay(names, terminal) as display:
        for number, name in enumerate(names):
            run = display.run(name)
            run.start(name, 1, 1, 0)
            shown = [task.description for task in display.bars.tasks if task.visible]
            assert len(shown) <= 11  # the cursor has a line of its own
            assert {"all runs", name, *names[number + 1 : number + 2], *names[max(0, number - 3) : number]} <= set(shown)
            run.epoch({"epoch": 1, "test_error": 0.5})
            run.end("finished")


def test_in_the_end_the_time_of_all_runs_is_shown(terminal, monkeypatch):
    clock = Clock(monkeypatch)
    with RunDisplay(["a", "b"], terminal) as display:
        for name in ("a", "b"):
            clock.now += 40
            one_run(display.run(name))
    assert re.search(r"all runs +━+ 2/2 +1:20", terminal.text().splitlines()[-3])


def test_lines_where_there_is_no_terminal(monkeypatch):
    clock, file = Clock(monkeypatch), io.StringIO()

    def second():
        clock.now += 1

    with RunDisplay([LONG], file) as display:
        assert file.getvalue() == f"1 run: {LONG}\n"
        one_run(display.run(LONG), epochs=4, each=second)
    lines = file.getvalue().splitlines()
    assert lines == [
        f"1 run: {LONG}",
        f"{LONG}: 4 epochs of 4 steps",
        f"{LONG}: epoch 1/4, accuracy 50.0%, 1 steps/s, 0:11 left",  # a line every five seconds
        f"{LONG}: epoch 2/4, accuracy 60.0%, 1 steps/s, 0:06 left",
        f"{LONG}: epoch 3/4, accuracy 70.0%, 1 steps/s, 0:01 left",
        f"{LONG}: finished after 0:16, accuracy 80.0%",
    ]


def test_what_was_compiled_in_the_first_step_does_not_count_for_the_time_that_is_left(monkeypatch):
    clock, file = Clock(monkeypatch), io.StringIO()
    run = RunDisplay(file=file).run("run")
    run.start("run", 2, 10, 0)
    clock.now += 60
    for step in range(10):
        run.step(step + 1)
        clock.now += 1
    assert "run: epoch 0/2, preparing\n" in file.getvalue()
    assert "run: epoch 0/2, 1 steps/s, 0:14 left\n" in file.getvalue()


def test_a_resumed_run_starts_where_it_was(monkeypatch):
    clock, file = Clock(monkeypatch), io.StringIO()

    def second():
        clock.now += 1

    one_run(RunDisplay(file=file).run("run"), epochs=4, done=2, each=second)
    assert "run: 4 epochs of 4 steps, 2 of them done\n" in file.getvalue()
    assert "run: epoch 3/4, accuracy 70.0%, 1 steps/s, 0:03 left\n" in file.getvalue()


def test_lines_in_a_terminal_without_rich(terminal, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with RunDisplay(["run"], terminal) as display:
        one_run(display.run("run"))
    assert terminal.getvalue() == terminal.text()
    assert "run: finished after 0:00, accuracy 70.0%" in terminal.text()


@pytest.mark.parametrize("reason", ["interrupted", "not finite", "failed"])
def test_every_end_is_shown(reason, terminal):
    for file in (terminal, io.StringIO()):
        with RunDisplay(["run"], file) as display:
            run = display.run("run")
            run.start("run", 2, 2, 0)
            run.end(reason)
        assert reason in file.getvalue()


def test_hours():
    assert [display._duration(seconds) for seconds in (0.4, 59.6, 3599, 36000)] == ["0:00", "1:00", "59:59", "10:00:00"]


def test_a_step_costs_next_to_nothing(terminal):
    with RunDisplay(["run"], terminal) as display:
        for run in (display.run("run"), Silent()):
            run.start("run", 1, 20_000, 0)
            start = time.process_time()
            for step in range(20_000):
                run.step(step)
            assert time.process_time() - start < 0.4  # 20 µs each; it is about 1
