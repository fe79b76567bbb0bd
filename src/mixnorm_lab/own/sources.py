"""The source files of a user's functions: a digest of each, which changes when it does."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import io
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mixnorm_lab.own import functions

INSTALLED = ("site-packages", "dist-packages")


def told(names: Iterable[str]) -> str:
    """The files of functions with a digest of each: those of their modules, and those beside these that they import.

    Comments, blank lines and the ends of lines do not count. A function that is in no file counts with its own text.
    """
    texts: dict[str, str] = {}
    for name in names:
        for place, path in files_of(name).items():
            texts[place] = _essence(path.read_bytes())
        if functions.only_here(name):
            texts[name] = _own_text(name)
    digests = {place: hashlib.sha256(text.encode()).hexdigest()[:8] for place, text in texts.items()}
    return ", ".join(f"{place} {digest}" for place, digest in sorted(digests.items()))


def changed(before: str, after: str) -> str:
    """The files that differ between two notes of sources, with the verb: "my_module.py has"."""
    ours, theirs = set(before.split(", ")), set(after.split(", "))
    files = sorted({entry.rpartition(" ")[0] for entry in ours ^ theirs} - {""}) or ["the source"]
    return f"{', '.join(files)} {'has' if len(files) == 1 else 'have'}"


def files_of(name: str) -> dict[str, Path]:
    """The files that a function's module consists of, by their paths from the folder that modules are imported from."""
    module_name = name.partition(":")[0]
    functions.find(name)
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if module is None or file is None or not Path(file).is_file() or not file.endswith(".py"):
        return {}
    path = Path(file).resolve()
    if module_name == "__main__":  # a script
        return _with_imports(path, path.parent)
    package = path.name == "__init__.py"
    root = path.parents[len(module_name.split(".")) - (0 if package else 1)]
    if any(part in INSTALLED for part in path.parts):  # of an installed package, whose imports lead to all others
        return {path.relative_to(root).as_posix(): path}
    return _with_imports(path, root)


def _with_imports(path: Path, root: Path) -> dict[str, Path]:
    """A file and all below the same folder that it imports, directly or through others."""
    found: dict[str, Path] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        place = file.relative_to(root).as_posix()
        if place not in found:
            found[place] = file
            waiting += _imported(file, root)
    return found


def _imported(file: Path, root: Path) -> list[Path]:
    """The files below ``root`` that a file imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []
    package = file.parent.relative_to(root).parts
    names: set[tuple[str, ...]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - (node.level - 1)] if node.level else ()
            module = (*start, *(node.module.split(".") if node.module else ()))
            names |= {module} | {(*module, alias.name) for alias in node.names}
    found = []
    for name in names:
        for length in range(1, len(name) + 1):  # the packages around a module run, too
            place = root.joinpath(*name[:length])
            found += [path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()]
    return [path for path in found if not any(part in INSTALLED for part in path.relative_to(root).parts)]


def _essence(content: bytes) -> str:
    """A source without its comments, blank lines and the spaces at the ends of lines."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
        lines = text.split("\n")
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
    except (SyntaxError, ValueError, LookupError, IndexError, tokenize.TokenError):
        return content.decode("latin-1")
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _own_text(name: str) -> str:
    """The text of a function that no import finds, or its code, with the plain values that it was given."""
    function = functions.find(name)
    inner = functions.innermost(function)
    values = []
    while isinstance(function, functools.partial):
        values += [*map(_plain, function.args), *(f"{key}={_plain(value)}" for key, value in function.keywords.items())]
        function = function.func
    if not inspect.isroutine(inner) and not isinstance(inner, type):  # an object, such as a loss of torch.nn
        values += [f"{key}={_plain(value)}" for key, value in sorted(vars(inner).items())]
        inner = type(inner)
    try:
        text = _essence(inspect.getsource(inner).encode())
    except (OSError, TypeError):
        code = getattr(inner, "__code__", None)
        text = "" if code is None else f"{code.co_code.hex()} {code.co_names}"
    return " ".join([text, *values])


def _plain(value: Any) -> str:
    """A value in words, that are the same tomorrow."""
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
