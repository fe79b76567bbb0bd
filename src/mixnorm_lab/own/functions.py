"""A user's functions by their names, "my_module:build": found, called, and told about when they fail."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WORKER = "Original Traceback (most recent call last)"  # as PyTorch begins it
# Functions that no import finds, such as those of a notebook, by their names, with what they are for.
_given: dict[str, tuple[str, Callable[..., Any]]] = {}


def name_of(function: str | Callable[..., Any], role: str = "function") -> str:
    """The name by which :func:`find` gives a function back: "my_module:build".

    A function that cannot be imported by its name, such as one of a notebook, is found in this process alone.

    Args:
        role: what it is for, which a function without a name of its own is called by.
    """
    if isinstance(function, str):
        return function
    if not callable(function):
        raise ValueError(f"{kind(function)} is no function: pass one, or its name, such as 'my_module:build'")
    inner = innermost(function)
    module = getattr(inner, "__module__", None) or "__main__"
    called = getattr(inner, "__qualname__", type(inner).__name__)
    if _importable(module, called, function):
        return f"{module}:{called}"
    last = called.rpartition(".")[2].replace("<lambda>", role)
    name = f"{module}:{last}"
    if name in _given and _given[name][0] != role:
        name = f"{module}:{role}.{last}"
    _given[name] = role, function
    return name


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a ``functools.partial`` calls; any other function itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def only_here(name: str) -> bool:
    """Whether a function is known to this process alone."""
    return name in _given


def find(name: str) -> Callable[..., Any]:
    """The function that "my_module:function" names; modules of the current folder count, as with ``python -m``."""
    if name in _given:
        return _given[name][1]
    module_name, _, function_name = name.partition(":")
    if module_name == "__main__":
        raise ValueError(f"{name} is a function of another Python session: put it in a module, such as my_module.py")
    module = imported(module_name, name)
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
        has = f"it has {', '.join(known)}" if known else "it has no function at all"
        raise ValueError(f"{module_name} has no function {function_name!r}: {has}")
    return function


def imported(module_name: str, name: str) -> Any:
    """The module of a function with this name."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if module_name.endswith(".py") or not all(part.isidentifier() for part in module_name.split(".")):
        raise ValueError(f"{module_name!r} is no module: write {name} as Python imports it, such as my_module:build")
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"{module_name} needs the module {error.name}: install it") from error
        raise ValueError(
            f"there is no module {error.name!r}: run the command in the folder of {error.name.split('.')[0]}.py"
        ) from error
    except Exception as error:
        raise ValueError(f"{module_name} cannot be imported ({told(error)}): mend it, --debug shows where") from error


def call(name: str, **wanted: Any) -> Any:
    """The result of a user's function, which gets those of the arguments that it asks for, and that there are."""
    function = find(name)
    try:
        known = inspect.signature(function).parameters
        return function(**{key: value for key, value in wanted.items() if key in known and value is not None})
    except Exception as error:
        raise ValueError(f"{name} raised {told(error)}: mend it, --debug shows where") from error


def told(error: Exception) -> str:
    """What a user's code raised, on one line. A worker of a loader sends its whole traceback; its last line says it."""
    text = str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}" if _WORKER not in text else text.strip().splitlines()[-1]


def kind(value: Any) -> str:
    """What a user's code returned, in words."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "nothing" if value is None else f"an object of the type {type(value).__name__}"


def _importable(module_name: str, called: str, function: Callable[..., Any]) -> bool:
    if module_name == "__main__" or module_name not in sys.modules:
        return False
    return getattr(sys.modules[module_name], called, None) is function
