"""Progress: a live table in a terminal, a line now and then elsewhere, and next to no time."""

import io
import re
import sys
import time

import pytest

from mixnorm_lab.launch.display import RunDisplay
from mixnorm_lab.launch.pace import Pace, duration
from mixnorm_lab.launch.shown_runs import STATES
from mixnorm_lab.training.progress import Silent

LONG = "cifar-cnn/cifar100/mn-2 seed 0"
LONGEST = "forms/cifar100/all-layers-steady-history-40-with-more-words seed 12"


def plain(text):
    """What was written, without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def text(self):
        return plain(self.getvalue())


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def second(self):
        self.now += 1


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def terminal(monkeypatch):
    pytest.importorskip("rich", reason="rich is not installed, and then there are no bars")
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def now_shown(display):
    """The lines of the table as it is now."""
    from rich.console import Console

    live = display.bars.console
    console = Console(file=io.StringIO(), width=live.width, height=live.height, force_terminal=True, color_system="standard")
    console.print(display.bars.table())
    lines = plain(console.file.getvalue()).splitlines()
    assert all(len(line) <= live.width for line in lines)
    return lines


def line_of(display, name):
    return next(line for line in now_shown(display) if line.startswith(name))


def one_run(run, *, epochs=3, steps=4, done=0, each=lambda: None, end="finished"):
    run.start("run", epochs, steps, done)
    for epoch in range(done, epochs):
        for step in range(steps):
            each()
            run.step(step + 1)
        run.epoch({"epoch": epoch + 1, "test_error": 0.5 - 0.1 * epoch})
    run.end(end)


@pytest.mark.parametrize("width", [80, 120])
def test_every_number_stands_under_its_name(terminal, monkeypatch, clock, width):
    monkeypatch.setenv("COLUMNS", str(width))
    with RunDisplay(["batch-norm seed 0", "mixture-norm seed 0"], terminal) as display:
        run = display.run("batch-norm seed 0")
        run.start("", 10, 100, 0)
        for step in range(50):
            clock.second()
            run.step(step + 1)
        run.epoch({"epoch": 1, "test_error": 0.25})
        heading, everything, first, second, counts = now_shown(display)
    for name, value in {"epoch": "1/10", "accuracy": "75.0%", "elapsed": "0:50"}.items():
        assert first[: heading.index(name) + len(name)].endswith(value)
    assert heading.split() == ["run", "epoch", "accuracy", "steps/s", "elapsed", "left"]
    assert re.fullmatch(r"all 2 runs +━+[╸╺]━+ +0:50 *", everything)
    assert re.fullmatch(r"mixture-norm seed 0 +waiting *", second)
    assert counts.strip() == "1 running, 1 waiting"
    assert first.count("━") > (18 if width == 80 else 50)  # the bar uses the width
    assert len(first.rstrip()) == width


def test_long_names_leave_room_for_the_bar_and_keep_their_end(terminal):
    with RunDisplay([LONG], terminal) as display:
        display.run(LONG).start("", 100, 10, 0)
        display.run(LONG).step(1)
        assert re.match(rf"{LONG} ━{{12}}", line_of(display, LONG))
    with RunDisplay([LONGEST], terminal) as display:
        display.run(LONGEST).start("", 100, 10, 0)
        display.run(LONGEST).step(1)
        shown = line_of(display, "…")
        assert re.match(r"…[\w-]+ seed 12 ━{12}", shown)


def test_states_are_counted_apart(terminal, clock):
    names = [f"run {number}" for number in range(6)]
    ends = ["finished", "interrupted", "failed", "not finite"]
    with RunDisplay(names, terminal) as display:
        for name, end in zip(names, ends, strict=False):
            one_run(display.run(name), end=end)
        display.run("run 4").start("", 1, 1, 0)
        shown = now_shown(display)
        for name, end in zip(names, [*ends, "first step", "waiting"], strict=True):
            assert re.match(rf"{name} +{end}\b", next(line for line in shown if line.startswith(name)))
        counts = "1 finished, 1 interrupted, 1 failed, 1 not finite, 1 running, 1 waiting"
        assert shown[-1].strip() == counts
    last = terminal.text().splitlines()[-7:]
    assert re.match(r"run 4 +interrupted", last[4])  # it never said so, as a process that is gone
    assert re.match(r"run 5 +not started", last[5])
    assert last[-1].strip() == "1 finished, 2 interrupted, 1 failed, 1 not finite, 1 not started"


def test_a_run_that_was_finished_earlier_takes_no_time(terminal, clock):
    with RunDisplay(["a seed 0", "a seed 1"], terminal) as display:
        one_run(display.run("a seed 0"), epochs=3, done=3)
        assert re.fullmatch(r"a seed 0 +finished earlier +3/3 *", line_of(display, "a seed 0"))


def test_more_runs_than_the_terminal_has_lines(terminal, monkeypatch):
    monkeypatch.setenv("LINES", "12")
    names = [f"run {number:02}" for number in range(30)]
    with RunDisplay(names, terminal) as display:
        for number, name in enumerate(names):
            run = display.run(name)
            run.start(name, 1, 1, 0)
            shown = now_shown(display)
            assert len(shown) <= 11  # the cursor has a line of its own
            named = {line[:6] for line in shown}
            assert {"all 30", name, *names[number + 1 : number + 2], *names[max(0, number - 3) : number]} <= named
            run.epoch({"epoch": 1, "test_error": 0.5})
            run.end("finished")


def test_nothing_is_said_of_the_time_left_before_it_is_known(terminal, clock):
    """The first step, which compiles for a minute, counts for nothing, and the first steps after it for little."""
    with RunDisplay(["mine"], terminal) as display:
        run = display.run("mine")
        run.start("", 10, 100, 0)
        clock.now += 60
        assert re.match(r"mine +first step +0/10 +1:00", line_of(display, "mine"))
        run.step(1)
        for step in range(5):  # slow
            clock.now += 0.9
            run.step(step + 2)
            assert re.search(r"1:0\d$", line_of(display, "mine").rstrip())  # what has elapsed is all
        for step in range(5, 95):
            clock.now += 0.1
            run.step(step + 2)
        speed, elapsed, left = line_of(display, "mine").split()[-3:]
    assert (speed, elapsed) == ("8.52", "1:13")
    assert left == "1:46"  # 1:30 if the slow steps were forgotten, 2:08 if they were not, and 12:00 with the first step


def test_the_time_of_all_runs_waits_for_one_of_each_kind(terminal, clock):
    names = [f"{kind} seed {seed}" for seed in (0, 1) for kind in ("fast", "slow")]
    with RunDisplay(names, terminal) as display:
        for name in names[:2]:
            run = display.run(name)
            run.start("", 1, 100, 0)
            for step in range(100):
                clock.now += 1 if "fast" in name else 3
                run.step(step + 1)
                left = re.search(r"all 4 runs .*?((~?)[\d:]+)?$", line_of(display, "all").rstrip())
                if "fast" in name:
                    assert left[1].count(":") == 1  # the time that has elapsed
            run.epoch({"epoch": 1})
            run.end("finished")
        run = display.run(names[2])
        run.start("", 1, 100, 0)
        for step in range(50):
            clock.second()
            run.step(step + 1)
        assert line_of(display, "all").split()[-2:] == ["7:30", "5:50"]  # 50 s of one, 300 of the other
    assert not line_of(display, "all").rstrip().endswith("5:50")  # it was interrupted


def test_many_kinds_of_runs_have_a_rough_estimate(terminal, clock):
    names = [f"kind {number} seed 0" for number in range(10)]
    with RunDisplay(names, terminal) as display:
        for name in names[:3]:
            one_run(display.run(name), epochs=1, steps=20, each=clock.second)
        assert line_of(display, "all").split()[-1] == "~2:20"


def test_runs_at_once_share_the_time(terminal, clock):
    with RunDisplay([f"run seed {seed}" for seed in range(4)], terminal) as display:
        both = [display.run(f"run seed {seed}") for seed in (0, 1)]
        for run in both:
            run.start("", 1, 100, 0)
        for step in range(50):
            clock.second()
            for run in both:
                run.step(step + 1)
        assert line_of(display, "all").split()[-1] in ("2:28", "2:29", "2:30")  # 50 and 50, then 100 and 100, two at once


def test_in_the_end_the_time_of_all_runs_is_shown(terminal, clock):
    with RunDisplay(["a", "b"], terminal) as display:
        for name in ("a", "b"):
            clock.now += 40
            one_run(display.run(name))
    heading, everything, first, _, counts = terminal.text().splitlines()[-5:]
    assert heading.split()[0] == "run"
    assert re.search(r"all 2 runs +━+ +1:20$", everything.rstrip())
    assert re.match(r"a +finished +3/3 +70.0% +0:00 *$", first)
    assert counts.strip() == "2 finished"


def test_another_metric_and_a_distance_have_their_own_heading(terminal):
    for row, heading, value in (
        ({"test_metric": 0.123412, "metric": "mean squared error"}, "mean squared error", "0.1234"),
        ({"test_metric": 0.4567, "metric": "mean IoU"}, "mean IoU", "45.7%"),
        ({"test_metric": 1.5, "metric": "a name that is longer than the column:lower"}, "a name that is lo…", "1.5"),
        ({"distance": 12.34}, "distance", "12.3"),
    ):
        with RunDisplay(["mine"], terminal) as display:
            run = display.run("mine")
            run.start("", 2, 1, 0)
            run.epoch({"epoch": 1, **row})
            assert heading in now_shown(display)[0]
            assert value in line_of(display, "mine")


def test_lines_where_there_is_no_terminal(clock):
    file = io.StringIO()
    with RunDisplay([LONG], file) as display:
        assert file.getvalue() == f"1 run: {LONG}\n"
        one_run(display.run(LONG), epochs=4, steps=5, each=clock.second)
    lines = file.getvalue().splitlines()
    assert lines == [
        f"1 run: {LONG}",
        f"{LONG}: 4 epochs of 5 steps",
        f"{LONG}: epoch 0/4, 1 steps/s, 0:05 elapsed",  # a line every five seconds
        f"{LONG}: epoch 1/4, accuracy 50.0%, 1 steps/s, 0:10 elapsed",  # nothing is known yet of what is left
        f"{LONG}: epoch 2/4, accuracy 60.0%, 1 steps/s, 0:15 elapsed, 0:05 left",
        f"{LONG}: epoch 3/4, accuracy 70.0%, 1 steps/s, 0:20 elapsed, 0:00 left",
        f"{LONG}: finished after 0:20, accuracy 80.0%",
    ]


def test_lines_say_what_came_of_several_runs(clock):
    file = io.StringIO()
    with RunDisplay(["a", "b", "c"], file) as display:
        one_run(display.run("a"))
        one_run(display.run("b"), end="interrupted")
    assert file.getvalue().splitlines()[-1] == "3 runs: 1 finished, 1 interrupted, 1 not started"


def test_a_resumed_run_starts_where_it_was(clock):
    file = io.StringIO()
    one_run(RunDisplay(file=file).run("run"), epochs=40, done=20, each=clock.second)
    assert "run: 40 epochs of 4 steps, 20 of them done\n" in file.getvalue()
    assert re.search(r"run: epoch 24/40, .* 1 steps/s, 0:20 elapsed, 1:00 left\n", file.getvalue())


def test_lines_in_a_terminal_without_rich(terminal, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "mixnorm_lab.launch.run_bars", raising=False)
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
        assert reason in (terminal.text() if file is terminal else file.getvalue())
        assert reason in STATES


def test_hours():
    assert [duration(seconds) for seconds in (0.4, 59.6, 3599, 36000)] == ["0:00", "1:00", "59:59", "10:00:00"]


def test_a_pace_of_many_hours_has_few_marks():
    pace = Pace()
    for number in range(100_000):
        pace.mark(number * 0.2, number)
    assert len(pace._marks) < 600
    assert pace.seconds_a_step(20_000.0, 100_000) == pytest.approx(0.2, rel=1e-3)


def test_a_step_costs_next_to_nothing(terminal):
    with RunDisplay(["run"], terminal) as display:
        for run in (display.run("run"), Silent()):
            run.start("run", 1, 20_000, 0)
            start = time.process_time()
            for step in range(20_000):
                run.step(step)
            assert time.process_time() - start < 0.4  # 20 µs each; it is about 1
