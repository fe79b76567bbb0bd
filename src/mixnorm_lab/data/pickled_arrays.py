"""The reader of the pickles in the official CIFAR files: numbers, strings, containers and arrays of numbers, nothing else.

Python's unpickler calls what a file names. This one knows the few opcodes that protocol 2 needs for such contents, and the
names below stand for functions of this module: a file can call nothing else, and no length that it claims is allocated.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any, BinaryIO, ClassVar

import numpy as np

DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8")
OPCODES = (
    pickle.PROTO, pickle.STOP, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT,
    pickle.BINUNICODE, pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
    pickle.EMPTY_TUPLE, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.MARK, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2,
    pickle.TUPLE3, pickle.APPEND, pickle.APPENDS, pickle.BINPUT, pickle.LONG_BINPUT,
    pickle.BINGET, pickle.LONG_BINGET, pickle.GLOBAL, pickle.REDUCE,
)  # fmt: skip
ARRAY = object()  # what numpy.ndarray stands for: the first argument of _empty_array, which cannot be called itself
OTHERWISE = "only arrays and plain containers are read"
_PYTHONS: dict[int, Any] = pickle._Unpickler.dispatch


def load(file: BinaryIO) -> Any:
    """The object in a pickle. Strings of Python 2 come as bytes.

    Raises ``ValueError`` for what is not a whole pickle of arrays and plain containers. No code of the file's choice runs.
    """
    whole = io.BytesIO(file.read())  # which gives no more than there is, whatever length a string claims to have
    try:
        return _Unpickler(whole, encoding="bytes").load()
    except ValueError:
        raise
    except Exception as error:  # the file takes what it has not put, or does with it what cannot be done
        raise ValueError(f"the pickle is damaged: {type(error).__name__} {error}") from None


class _Unpickler(pickle._Unpickler):  # the one in Python: it remembers in a dict, not in a table up to the largest number
    """Python's unpickler with the opcodes and the names of this module alone."""

    stack: list[Any]
    metastack: list[list[Any]]  # the stacks below each mark
    dispatch: ClassVar[dict[int, Any]]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise ValueError(f"the pickle asks for {f'{module}.{name}'[:80]!r}: {OTHERWISE}")
        return NAMES[module, name]

    def refuse(self) -> None:
        raise ValueError(f"the pickle has an opcode that the official files do not have: {OTHERWISE}")

    def load_setitem(self) -> None:
        self._expect_dict(self.stack[-3])
        _PYTHONS[pickle.SETITEM[0]](self)

    def load_setitems(self) -> None:
        self._expect_dict(self.metastack[-1][-1])
        _PYTHONS[pickle.SETITEMS[0]](self)

    def load_build(self) -> None:
        """Fills the array, or confirms the dtype, that lies under its state."""
        state = self.stack.pop()
        match self.stack[-1], state:
            case np.dtype(), (int(), b"|" | b"<" | "|" | "<", None, None, None, *_):
                pass
            case np.ndarray() as array, (int(), tuple() as shape, np.dtype() as dtype, bool(), bytes() as raw):
                sizes = all(type(size) is int and size >= 0 for size in shape)
                if not sizes or len(raw) != math.prod(shape) * dtype.itemsize:
                    raise ValueError("the pickle is damaged: an array's shape and its bytes differ")
                array.__setstate__(state)
            case _:
                raise ValueError("the pickle fills something else than an array of numbers, which is not read")

    def _expect_dict(self, target: object) -> None:
        if not isinstance(target, dict):  # into an array numpy would unfold lists within lists, without an end
            raise ValueError(f"the pickle is damaged: it fills a {type(target).__name__} as if it were a dict")

    dispatch = dict.fromkeys(range(256), refuse) | {opcode[0]: _PYTHONS[opcode[0]] for opcode in OPCODES}
    dispatch |= {pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems, pickle.BUILD[0]: load_build}


def _empty_array(kind: object, *_: object) -> np.ndarray:
    """An array that is not filled yet, whatever shape the file gives it."""
    if kind is not ARRAY:
        raise ValueError(f"the pickle makes something else than an array: {OTHERWISE}")
    return np.empty(0, "u1")


def _dtype(code: str | bytes, *_: object) -> np.dtype:
    text = code.decode("latin1") if isinstance(code, bytes) else code
    if text not in DTYPES:
        raise ValueError(f"the pickle has an array of something else than numbers: {OTHERWISE}")
    return np.dtype(f"<{text}")


def _encode(text: str, codec: str) -> bytes:
    if codec != "latin1":
        raise ValueError(f"the pickle asks for another codec than latin1: {OTHERWISE}")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    return b""


NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    ("numpy", "ndarray"): ARRAY,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,  # how Python 3 writes bytes with protocol 2
    ("__builtin__", "bytes"): _no_bytes,  # and how it writes none
}
