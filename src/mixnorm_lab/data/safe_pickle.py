"""Reads the pickles of the official CIFAR files, and nothing else: numbers, strings, containers and arrays of numbers.

Python's own unpickler calls what a file names. Here a file names nothing that is looked up: its opcodes go through a small
machine that knows those of protocol 2, and the five names below stand for things that this file does itself.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from enum import Enum
from typing import Any, BinaryIO, Literal

import numpy as np


class _Name(Enum):
    RECONSTRUCT, ARRAY, DTYPE, ENCODE, BYTES = range(5)


NAMES = {
    "numpy.core.multiarray _reconstruct": _Name.RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": _Name.RECONSTRUCT,
    "numpy ndarray": _Name.ARRAY,
    "numpy dtype": _Name.DTYPE,
    "_codecs encode": _Name.ENCODE,  # how Python 3 writes bytes with protocol 2
    "__builtin__ bytes": _Name.BYTES,  # and how it writes none
}
DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8")
PROTOCOL = 2


def load(file: BinaryIO) -> Any:
    """The object in a pickle. Strings of Python 2 come as bytes.

    Raises ``ValueError`` for what is not a whole pickle of arrays and plain containers. No code of the file's choice runs.
    """
    try:
        return _Machine().run(file)
    except (IndexError, KeyError, TypeError, OverflowError) as error:  # the file takes what it has not put
        raise ValueError(f"the pickle is damaged: {type(error).__name__} {error}") from None


class _Unfilled:
    """An array between the opcode that makes it and the one that fills it, with the keys it is remembered by."""

    def __init__(self) -> None:
        self.keys: list[int] = []


class _Machine:
    """A stack, the places of its marks, and a memory of what the file wants again."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, file: BinaryIO) -> Any:
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name == "STOP":
                return self.stack.pop()
            step = _STEPS.get(opcode.name)
            if step is None:
                raise ValueError(f"the pickle has the opcode {opcode.name}: only arrays and plain containers are read")
            step(self, argument)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def protocol(self, number: int) -> None:
        if number > PROTOCOL:
            raise ValueError(f"the pickle has protocol {number}: the official files have {PROTOCOL}")

    def mark(self, _: None) -> None:
        self.marks.append(len(self.stack))

    def take(self, count: int) -> list[Any]:
        if not 0 <= count <= len(self.stack):
            raise ValueError("the pickle is damaged: it takes more than it has put")
        start = len(self.stack) - count
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def take_to_mark(self) -> list[Any]:
        return self.take(len(self.stack) - self.marks.pop())

    def top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(
                f"the pickle is damaged: it fills a {type(self.stack[-1]).__name__} as if it were a {kind.__name__}"
            )
        return self.stack[-1]

    def append(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        self.top(dict).update(zip(values[::2], values[1::2], strict=True))

    def put(self, key: int) -> None:
        self.memo[key] = self.stack[-1]
        if isinstance(self.stack[-1], _Unfilled):
            self.stack[-1].keys.append(key)

    def name(self, wanted: str) -> None:
        if wanted not in NAMES:
            name = wanted.replace(" ", ".")[:80]
            raise ValueError(f"the pickle asks for {name!r}: only arrays and plain containers are read")
        self.push(NAMES[wanted])

    def reduce(self, _: None) -> None:
        """What a call of one of the names would give."""
        called, arguments = self.take(2)
        match called, arguments:
            case _Name.RECONSTRUCT, (_Name.ARRAY, *_):
                self.push(_Unfilled())
            case _Name.DTYPE, (str() | bytes() as code, *_) if _text(code) in DTYPES:
                self.push(np.dtype("<" + _text(code)))
            case _Name.ENCODE, (str() as text, "latin1"):
                self.push(text.encode("latin1"))
            case _Name.BYTES, ():
                self.push(b"")
            case _:
                raise ValueError("the pickle makes something else than an array of numbers, which is not read")

    def build(self, _: None) -> None:
        """Fills the array, or confirms the dtype, that lies under its state."""
        target, state = self.take(2)
        match target, state:
            case np.dtype(), (int(), b"|" | b"<" | "|" | "<", None, None, None, *_):
                self.push(target)
            case _Unfilled(), (int(), tuple() as shape, np.dtype() as dtype, fortran, bytes() as raw):
                array = _array(shape, dtype, raw, "F" if fortran else "C")
                self.memo.update(dict.fromkeys(target.keys, array))
                self.push(array)
            case _:
                raise ValueError("the pickle fills something else than an array of numbers, which is not read")


def _array(shape: tuple[Any, ...], dtype: np.dtype, raw: bytes, order: Literal["C", "F"]) -> np.ndarray:
    sizes = all(type(size) is int and size >= 0 for size in shape)
    if not sizes or len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError("the pickle is damaged: an array's shape and its bytes differ")
    return np.frombuffer(raw, dtype).reshape(shape, order=order)


def _text(code: str | bytes) -> str:
    return code if isinstance(code, str) else code.decode("latin1")


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine.protocol,
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"), _Machine.push),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), lambda m, text: m.push(text.encode("latin1"))),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "MARK": _Machine.mark,
    "TUPLE": lambda m, _: m.push(tuple(m.take_to_mark())),
    "TUPLE1": lambda m, _: m.push(tuple(m.take(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.take(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.take(3))),
    "APPEND": lambda m, _: m.append(m.take(1)),
    "APPENDS": lambda m, _: m.append(m.take_to_mark()),
    "SETITEM": lambda m, _: m.set_items(m.take(2)),
    "SETITEMS": lambda m, _: m.set_items(m.take_to_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda m, key: m.push(m.memo[key])),
    "GLOBAL": _Machine.name,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
}
