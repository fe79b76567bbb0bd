import errno
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from record_helpers import ENVIRONMENT, MIXTURE, config, epoch

from mixnorm_lab.storage import environment, records


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "record.jsonl"


def write(path, *epochs, end=None, run=None):
    with records.Writer(path) as writer:
        writer.run(run or config(), ENVIRONMENT)
        for values in epochs:
            writer.epoch(values)
        if end:
            writer.end(end, seconds=3.0)


def test_round_trip(path):
    run = config("x/y", mixture=MIXTURE, seed=3)
    epochs = [epoch(n, 0.5 / n, components={"conv3.norm": 3}) for n in (1, 2, 3)]
    write(path, *epochs, end="finished", run=run)
    record = records.read(path)
    assert record.config == run
    assert record.environment == ENVIRONMENT
    assert record.epochs == epochs
    assert record.finished
    assert record.path == path


def test_a_line_is_readable_as_soon_as_it_is_written(path):
    with records.Writer(path) as writer:
        writer.run(config(), ENVIRONMENT)
        for number in (1, 2):
            writer.epoch(epoch(number))
            record = records.read(path)
            assert len(record.epochs) == number
            assert not record.finished
            assert record.reason is None


def test_what_is_not_finite_is_null(path):
    write(path, epoch(1, train_loss=math.nan, test_loss=math.inf, components={"conv3.norm": 2.5}))
    lines = path.read_text().splitlines()
    json.loads(lines[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    [values] = records.read(path).epochs
    assert values["train_loss"] is None
    assert values["test_loss"] is None
    assert values["components"] == {"conv3.norm": 2.5}


@pytest.mark.parametrize("keep", [1, 30, -2])
def test_cut_off_last_line_is_ignored_and_kept_aside(path, keep):
    write(path, epoch(1), epoch(2))
    lines = path.read_bytes().splitlines(keepends=True)
    tail = lines[-1][:keep]
    path.write_bytes(b"".join(lines[:-1]) + tail)
    assert [e["epoch"] for e in records.read(path).epochs] == [1]
    with records.Writer(path) as writer:
        writer.resume(1, ENVIRONMENT)
        writer.epoch(epoch(2, 0.25))
    assert [e["test_error"] for e in records.read(path).epochs] == [0.5, 0.25]
    assert path.with_name("record.jsonl.cut").read_bytes() == tail + b"\n"


def test_a_last_line_without_only_its_break_counts(path):
    write(path, epoch(1), epoch(2))
    path.write_bytes(path.read_bytes()[:-1])
    assert len(records.read(path).epochs) == 2
    with records.Writer(path) as writer:
        writer.epoch(epoch(3))
    assert len(records.read(path).epochs) == 3
    assert not path.with_name("record.jsonl.cut").exists()


def test_a_file_cut_at_any_byte_can_be_read_and_continued(path):
    write(path, epoch(1), epoch(2), end="finished")
    content = path.read_bytes()
    first = content.index(b"\n")
    for size in range(first, len(content) + 1, 7):
        path.write_bytes(content[:size])
        before = records.read(path)
        with records.Writer(path) as writer:
            writer.resume(0, ENVIRONMENT)
        assert records.read(path).config == before.config


@pytest.mark.parametrize(
    "broken",
    [
        b'{"kind": "epoch", "epo',
        b"[]",
        b"",
        b"\xff\xfe",
        b"\x00" * 20,
        b'{"kind": "epoch", "epoch": 1}',
        b'{"kind": "party"}',
        b'{"kind": "end", "reason": "tired", "message": null, "seconds": 1}',
        json.dumps({"kind": "epoch", **epoch(1), "test_error": "low"}).encode(),
        json.dumps({"kind": "epoch", **epoch(1), "epoch": None}).encode(),
    ],
)
def test_a_broken_line_in_the_middle_is_named_with_a_remedy(path, broken):
    write(path, epoch(1), epoch(2))
    lines = path.read_bytes().split(b"\n")
    lines[1] = broken
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(records.RecordError, match="line 2") as caught:
        records.read(path)
    assert str(path) in str(caught.value)
    assert "remove that line" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_last_line_that_has_its_break_was_not_cut_off(path):
    write(path, epoch(1))
    with path.open("a") as file:
        file.write('{"kind"\n')
    with pytest.raises(records.RecordError, match="line 3"):
        records.read(path)


def test_every_changed_byte_is_noticed_or_costs_the_last_line_alone(path):
    """A digit that has changed is still JSON: the checksum of its line tells."""
    write(path, epoch(1), epoch(2, components={"conv3.norm": 3}), end="finished")
    whole, content = records.read(path), path.read_bytes()
    random = np.random.default_rng(0)
    noticed = []
    for place in random.choice(len(content), 400, replace=False):
        changed = bytearray(content)
        changed[place] ^= 1 << random.integers(8)
        path.write_bytes(changed)
        try:
            found = records.read(path)
        except records.RecordError as error:
            noticed.append(str(error))
            continue
        same = (found.config, found.environment, found.epochs) == (whole.config, whole.environment, whole.epochs)
        assert same  # but the end may be missing, and the run then goes on
    assert len(noticed) > 380
    assert all("remove" in sentence and "\n" not in sentence for sentence in noticed)


def test_lines_without_a_checksum_are_from_before_there_were_any(path):
    write(path, epoch(1), end="finished")
    lines = [{k: v for k, v in json.loads(line).items() if k != "crc"} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert records.read(path).finished


def test_a_record_must_begin_with_its_run(path):
    write(path, epoch(1))
    path.write_text("\n".join(path.read_text().splitlines()[1:]) + "\n")
    with pytest.raises(records.RecordError, match=r'line 1 .*kind "run"'):
        records.read(path)


def test_another_format_is_named(path, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr(records, "VERSION", 2)
        write(path)
    with pytest.raises(records.RecordError, match="another version"):
        records.read(path)


def test_of_equal_epochs_the_last_counts_after_a_resume(path):
    write(path, epoch(1, 0.5), epoch(2, 0.4), epoch(3, 0.3), epoch(4, 0.2), end="interrupted")
    assert records.read(path).reason == "interrupted"
    with records.Writer(path) as writer:
        writer.resume(2, {**ENVIRONMENT, "gpu": "another"})
        assert [e["epoch"] for e in records.read(path).epochs] == [1, 2]
        writer.epoch(epoch(3, 0.35))
    record = records.read(path)
    assert [(e["epoch"], e["test_error"]) for e in record.epochs] == [(1, 0.5), (2, 0.4), (3, 0.35)]
    assert record.reason is None
    assert record.environment["gpu"] == "another"
    with records.Writer(path) as writer:
        writer.epoch(epoch(3, 0.31))  # the same epoch once more, with no line between
        writer.end("finished", seconds=9.0)
    record = records.read(path)
    assert [e["test_error"] for e in record.epochs] == [0.5, 0.4, 0.31]
    assert record.finished
    assert [end["reason"] for end in record.ends] == ["interrupted", "finished"]


def test_a_run_that_begins_anew_in_the_same_file_replaces_the_old(path):
    write(path, epoch(1), epoch(2), end="finished")
    write(path, epoch(1, 0.1), run=config(seed=1))
    record = records.read(path)
    assert record.config.seed == 1
    assert [e["test_error"] for e in record.epochs] == [0.1]
    assert not record.finished


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_one_sentence():
    writer = records.Writer(Path("/dev/full"))
    with pytest.raises(OSError, match=r"cannot be written .*: .* make room") as caught:
        writer.run(config(), ENVIRONMENT)
    assert "\n" not in str(caught.value)


def test_a_disk_that_fills_up_in_the_middle_of_a_line_leaves_whole_lines(path):
    class Full:
        """A file that takes a part of a line, then none."""

        def __init__(self, file):
            self.file, self.room = file, 20

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = self.file.write(data[: self.room])
            self.room -= written
            return written

    write(path, epoch(1))
    before = path.read_bytes()
    writer = records.Writer(path)
    real = writer._file
    writer._file = Full(real)
    with pytest.raises(OSError, match="No space left"):
        writer.epoch(epoch(2))
    assert path.read_bytes() == before
    writer._file = real  # room again
    writer.epoch(epoch(2))
    writer.close()
    assert len(records.read(path).epochs) == 2


def test_find_takes_all_runs_below_and_skips_those_that_never_began(tmp_path):
    for name in ("b/seed0", "a", "b/seed1"):
        write(tmp_path / name / "record.jsonl", epoch(1), run=config(name))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "record.jsonl").write_bytes(b'{"kind": "ru')
    assert [record.config.name for record in records.find(tmp_path)] == ["a", "b/seed0", "b/seed1"]
    with pytest.raises(records.RecordError, match="before it began"):
        records.read(tmp_path / "c" / "record.jsonl")


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(records.RecordError, match="cannot be read"):
        records.read(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="no folder"):
        records.find(tmp_path / "none")


def test_environment_says_where_figures_come_from():
    found = environment.of_run("cpu")
    assert found["torch"] == torch.__version__
    assert found["gpu"] is None
    assert found["processor"]
    assert found["threads"] == torch.get_num_threads()
    assert found["commit"] is None or found["commit"].rstrip("+").isalnum()
    json.dumps(found)
