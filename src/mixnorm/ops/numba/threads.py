"""How the loops are compiled, and how they run on all cores.

The first training step waits for the compiler, so it has to do little. numba's own parallel loops take seconds each; here
there is one, which calls any function by its address. And numba optimizes a function and makes machine code of it, and then
does the same once more within each function that calls it; here only what Python calls goes through all that, once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import parse_assembly
from numba import njit, prange, types
from numba.core import cgutils, config
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import intrinsic

_WORD = ir.IntType(64)
_TASK = ir.FunctionType(_WORD, [_WORD, _WORD])  # of an item and the place of the other arguments


@functools.cache
def _sources() -> tuple[tuple[float, int], ...]:
    """What numba remembers of a function's file, of all files here: what is inlined comes from several."""
    found = (path.stat() for path in sorted(Path(__file__).parent.glob("*.py")))
    return tuple((stat.st_mtime, stat.st_size) for stat in found)


def _kept(function: Any) -> Any:
    """The same function, compiled anew when any file of this folder has changed. It is a try, for those who change one."""
    with contextlib.suppress(AttributeError, OSError):
        function._cache._cache_file._source_stamp = _sources()
    return function


_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "no_cfunc_wrapper": True}
# Sums may be reordered, which lets them be vectorized; NaN and Inf keep their meaning.
_OPTIONS["fastmath"] = {"reassoc", "contract", "arcp", "nsz"}


class _Whole(JITCodeLibrary):
    """The code of a function that Python calls, with all that it calls: optimized in one go."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        passes = self._codegen._module_pass_manager()
        if not (isinstance(passes, tuple) and config.LLVM_REFPRUNE_PASS):  # type: ignore[attr-defined]
            super()._optimize_final_module()  # of an older numba, or one that was set up otherwise
            return
        manager, builder = passes
        manager.run(self._final_module, builder)


class _Ingredient(JITCodeLibrary):
    """The code of a function that others call, as the compiler gets it: it goes into theirs."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        # numba writes down where a function finds its Python objects, and there has to be such a place.
        places = [str(place) for place in self._final_module.global_variables if place.name.startswith("_ZN08NumbaEnv")]
        module = parse_assembly("\n".join(places))
        module.name = self.name
        self._codegen._add_module(module)
        self._finalized = True


class _WholeCompiler(Compiler):
    def __init__(self, typing: Any, target: Any, _: Any, *rest: Any) -> None:
        library = _Whole(target.codegen(), "whole")
        library.enable_object_caching()
        super().__init__(typing, target, library, *rest)


class _IngredientCompiler(Compiler):
    def __init__(self, typing: Any, target: Any, _: Any, *rest: Any) -> None:
        super().__init__(typing, target, _Ingredient(target.codegen(), "ingredient"), *rest)


_INGREDIENT = _OPTIONS | {"cache": False, "no_cpython_wrapper": True, "pipeline_class": _IngredientCompiler}


def entry(function: Callable[..., Any]) -> Any:
    """A compiled function that Python calls."""
    return _kept(njit(**_OPTIONS, pipeline_class=_WholeCompiler)(function))


def serial(function: Callable[..., Any]) -> Any:
    """A compiled function that others call, and Python must not: there is no machine code of it alone."""
    return njit(**_INGREDIENT)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """The same, where each call is to become a copy of it."""
    return njit(**_INGREDIENT, forceinline=True)(function)


def part(function: Callable[..., Any]) -> Any:
    """A function whose Python becomes a part of the one that calls it: for what is called in one place."""
    return njit(inline="always")(function)


@intrinsic
def _call(_: Any, task: Any, item: Any, arguments: Any) -> Any:
    """Calls the C function at an address: whether it failed."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        return builder.call(builder.inttoptr(values[0], _TASK.as_pointer()), values[1:])

    return types.int64(types.int64, types.int64, types.int64), generate


@_kept
@njit(parallel=True, nogil=True, cache=True)
def _run(task: int, items: int, arguments: int) -> None:
    failures = 0
    for item in prange(items):
        failures += _call(task, np.int64(item), arguments)
    if failures:
        raise MemoryError


@intrinsic
def parallel_for(typing: Any, items: Any, function: Any, arguments: Any) -> Any:
    """function(item, *arguments) for each item, on all cores: the address of a C function that does so goes to ``_run``."""
    given, words = (types.int64, *arguments.types), (types.int64,) * 3
    function.get_call_type(typing, given, {})  # compiles it
    _run.compile(words)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        compiled, run = function.dispatcher.overloads[given], _run.overloads[words]
        context.add_linking_libs([compiled.library, run.library])
        task = ir.Function(builder.module, _TASK, builder.module.get_unique_name("task"))
        task.linkage = "internal"
        inside, (item, place) = ir.IRBuilder(task.append_basic_block()), task.args
        unpacked = cgutils.unpack_tuple(inside, inside.load(inside.inttoptr(place, values[2].type.as_pointer())))
        status, _ = context.call_internal_no_propagate(inside, compiled.fndesc, compiled.signature, [item, *unpacked])
        inside.ret(inside.zext(status.is_error, _WORD))
        packed = cgutils.alloca_once_value(builder, values[2])
        addresses = [builder.ptrtoint(task, _WORD), values[0], builder.ptrtoint(packed, _WORD)]
        context.call_internal(builder, run.fndesc, run.signature, addresses)
        return context.get_dummy_value()

    return types.void(types.int64, function, arguments), generate


@serial
def stretches_of(threads: int, batch: int, count: int) -> int:
    """Into how many stretches the points of each mixture are cut, so that every thread has work."""
    return min(count, (threads + batch - 1) // batch)


@serial
def stretch(item: int, stretches: int, count: int) -> tuple[int, int, int, int]:
    """Which mixture and which of its stretches an item is, with that stretch's first point and the end of its points."""
    b, t = item // stretches, item % stretches
    return b, t, count * t // stretches, count * (t + 1) // stretches
