"""Checkpoints: whole or not there, checked when they are read, and one before the newest to fall back to."""

import resource

import pytest
import torch

from mixnorm_lab.storage import checkpoint
from mixnorm_lab.storage.checkpoint import NAME, PREVIOUS, CheckpointError


def state(epoch):
    return {
        "epoch": epoch,
        "model": {"weight": torch.full((500,), float(epoch))},
        "optimizer": {0: {"step": torch.ones(())}},
    }


@pytest.fixture
def folder(tmp_path):
    for epoch in (1, 2):
        checkpoint.write(tmp_path, state(epoch))
    return tmp_path


def test_what_is_written_is_read(folder):
    found = checkpoint.read(folder)
    assert found["epoch"] == 2
    assert torch.equal(found["model"]["weight"], torch.full((500,), 2.0))
    assert found["optimizer"][0]["step"] == 1
    assert sorted(path.name for path in folder.iterdir()) == sorted((NAME, PREVIOUS))


def test_it_is_a_file_of_torch(folder):
    assert torch.load(folder / NAME, weights_only=True)["epoch"] == 2


def test_an_empty_folder_has_none(tmp_path):
    assert checkpoint.read(tmp_path) is None


def test_every_flipped_byte_and_every_cut_is_noticed(folder):
    whole = (folder / NAME).read_bytes()
    for position in [*range(0, len(whole), 101), len(whole) - 1]:
        broken = bytearray(whole)
        broken[position] ^= 1
        (folder / NAME).write_bytes(broken)
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.read(folder)
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        (folder / NAME).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.read(folder)


def test_a_damaged_one_names_the_file_and_the_remedy_which_works(folder):
    (folder / NAME).write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=f"{NAME} is damaged.*delete it to go on from {PREVIOUS}$"):
        checkpoint.read(folder)
    (folder / NAME).unlink()
    assert checkpoint.read(folder)["epoch"] == 1
    (folder / PREVIOUS).write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=f"{PREVIOUS} is damaged.*from the beginning$"):
        checkpoint.read(folder)
    (folder / PREVIOUS).unlink()
    assert checkpoint.read(folder) is None


def test_a_kill_between_the_two_renames_loses_nothing(folder, monkeypatch):
    replace = checkpoint.os.replace

    def only_the_first(source, target):
        if target.name == NAME:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(checkpoint.os, "replace", only_the_first)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write(folder, state(3))
    assert not (folder / NAME).exists()
    assert checkpoint.read(folder)["epoch"] == 2


def test_a_full_disk_is_one_sentence_and_keeps_the_last_checkpoint(folder):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # files may not grow past this
    try:
        with pytest.raises(OSError, match=r"checkpoint.pt cannot be written \(File too large\): .* is kept"):
            checkpoint.write(folder, state(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoint.read(folder)["epoch"] == 2
    assert sorted(path.name for path in folder.iterdir()) == sorted((NAME, PREVIOUS))


def test_a_pickle_is_not_executed(folder):
    class Attack:
        def __reduce__(self):
            return (print, ("executed",))

    checkpoint.write(folder, {"epoch": Attack()})
    with pytest.raises(CheckpointError, match="holds more than"):
        checkpoint.read(folder)
