"""A user's functions by name, and the files that they consist of: an edit of any of them is another note."""

import sys
from functools import partial

import pytest
import torch

from mixnorm_lab.own import functions, sources

MINE = """import os
import sources_nets.small
from sources_parts import part

def build():
    return part
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a module, the modules beside it that it imports, and others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {
        "sources_mine.py": MINE,
        "sources_nets/__init__.py": "",
        "sources_nets/small.py": "from . import deep\nfrom .deep import depth\n",
        "sources_nets/deep.py": "depth = 3  # layers\n",
        "sources_parts.py": "part = 1\n",
        "sources_other.py": "part = 2\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("sources_")]:
        del sys.modules[name]


def told():
    return sources.told(["sources_mine:build"])


def test_files_are_those_that_a_module_imports_from_its_own_folder(project):
    found = sources.files_of("sources_mine:build")
    names = [
        "sources_mine.py",
        "sources_nets/__init__.py",
        "sources_nets/deep.py",
        "sources_nets/small.py",
        "sources_parts.py",
    ]
    assert sorted(found) == names
    assert found["sources_parts.py"] == project / "sources_parts.py"


@pytest.mark.parametrize(
    ("file", "old", "new", "changes"),
    [
        ("sources_mine.py", "return part", "return part + 1", True),
        ("sources_nets/deep.py", "3", "4", True),
        ("sources_mine.py", "    return", "\treturn", True),
        ("sources_nets/deep.py", "  # layers", "", False),
        ("sources_mine.py", "\n\ndef", "\n\n\n# how it is built\ndef", False),
        ("sources_mine.py", "\n", "  \r\n", False),
        ("sources_other.py", "2", "3", False),
    ],
)
def test_an_edit_changes_the_note_unless_it_is_a_comment(file, old, new, changes, project):
    before = told()
    path = project / file
    path.write_bytes(path.read_text().replace(old, new).encode())
    assert (told() != before) == changes
    if changes:
        assert sources.changed(before, told()) == f"{file} has"


def test_a_hash_sign_in_a_text_is_no_comment(project):
    path = project / "sources_parts.py"
    path.write_text("part = '#1'\n")
    before = told()
    path.write_text("part = '#2'\n")
    assert told() != before


def test_several_changes_are_told_together():
    assert sources.changed("a.py 1, b.py 2, c.py 3", "a.py 1, b.py 3, d.py 4") == "b.py, c.py, d.py have"


def test_an_installed_module_is_its_own_file_alone():
    [name] = sources.files_of("torch.hub:load")
    assert name == "torch/hub.py"


def test_functions_that_no_import_finds_are_known_here_and_count_with_their_text():
    def make(number):
        def build():
            return number

        return build

    name = functions.name_of(make(1), "build")
    assert name == "test_sources:build"
    assert functions.only_here(name)
    assert functions.find(name)() == 1
    assert name in sources.told([name])
    assert functions.name_of(lambda: 1, "loss") == "test_sources:loss"
    assert functions.name_of(make(2), "loaders") == "test_sources:loaders.build"
    assert functions.name_of(make(3), "build") == name  # a function that is defined anew takes the place of the old one
    assert functions.find(name)() == 3
    assert functions.name_of(sources.told) == "mixnorm_lab.own.sources:told"
    assert not functions.only_here("mixnorm_lab.own.sources:told")
    noted = {
        sources.told([functions.name_of(one, "loss")])
        for one in (partial(pow, 2), partial(pow, 3), torch.nn.HuberLoss(), torch.nn.HuberLoss(delta=2.0))
    }
    assert len(noted) == 4
    with pytest.raises(ValueError, match="a function of another Python session: put it in a module"):
        functions.find("__main__:build")
    with pytest.raises(ValueError, match="an object of the type int is no function: pass one, or its name"):
        functions.name_of(3)
