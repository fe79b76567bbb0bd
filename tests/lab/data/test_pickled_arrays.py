"""The reader of pickles: arrays and plain containers come back as they were, everything else is a ValueError."""

import builtins
import io
import operator
import os
import pickle
import random
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
from data_helpers import python2_pickle, python3_pickle

from mixnorm_lab.data import pickled_arrays


def loads(contents):
    return pickled_arrays.load(io.BytesIO(contents))


@pytest.mark.parametrize("dtype", ["u1", "i8", "f4", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_may_be_in_a_file(dtype, order):
    array = np.asarray(np.arange(12).reshape(3, 4), dtype=dtype, order=order)
    shared = [1, 300, 70_000, -5, 1 << 40, 0.5, None, True, False, "text", b"bytes", b"", b"\xff"]
    record = {b"array": array, "list": shared, "again": (shared, array), 3: {}, "tuples": [(), (1,), (1, 2), (1, 2, 3, 4)]}
    found = loads(python3_pickle(record))
    assert found["list"] == shared
    assert found["again"][0] is found["list"]
    assert found["again"][1] is found[b"array"]
    assert found[b"array"].dtype == array.dtype
    assert np.array_equal(found[b"array"], array)
    assert found[3] == {}
    assert found["tuples"] == record["tuples"]


def test_strings_of_python_2_are_bytes():
    images = np.arange(6, dtype=np.uint8).reshape(2, 3)
    contents = python2_pickle({b"data": images, b"labels": [1, 2], b"label": b"\xe9"})
    ours, pythons = loads(contents), pickle.loads(contents, encoding="bytes")
    assert ours.keys() == pythons.keys()
    assert np.array_equal(ours.pop(b"data"), pythons.pop(b"data"))
    assert ours == pythons == {b"labels": [1, 2], b"label": b"\xe9"}


class Call:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


CALLS = [
    partial(Call, os.system, "touch {}"),
    partial(Call, builtins.eval, "open({!r}, 'w')"),
    partial(Call, builtins.exec, "open({!r}, 'w')"),
    partial(Call, builtins.open, "{}", "w"),
    partial(Call, builtins.getattr, [], "append"),
    partial(Call, builtins.bytes, 10**12),
    partial(Call, builtins.bytearray, 10**12),
    partial(Call, operator.methodcaller, "touch"),
    partial(Call, np.fromfile, "/etc/passwd"),
    partial(Call, np.load, "{}"),
    partial(Call, np.savetxt, "{}", [1.0]),
    partial(Call, np.zeros, 10**12),
    partial(Call, np.dtype, "O"),
    partial(Call, np.dtype, [("a", "u1")]),
    partial(Call, OrderedDict),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: getattr(call.args[0], "__name__", "call"))
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("wrapped", [False, True])
def test_nothing_is_called(call, protocol, wrapped, tmp_path):
    target = tmp_path / "target"
    arguments = [
        a.replace("{!r}", repr(str(target))).replace("{}", str(target)) if isinstance(a, str) else a for a in call.args
    ]
    thing = Call(*arguments)
    with pytest.raises(ValueError, match="pickle") as raised:
        loads(pickle.dumps({b"data": thing} if wrapped else thing, protocol))
    assert "\n" not in str(raised.value)
    assert not target.exists()


class Plain:
    pass


OTHERS = {
    "an object": pickle.dumps(Plain(), 2),
    "a class": pickle.dumps(Plain, 2),
    "a function": pickle.dumps(os.system, 2),
    "a set": pickle.dumps({1, 2}, 2),
    "objects in an array": pickle.dumps(np.array([None, {}], dtype=object), 2),
    "a structured array": pickle.dumps(np.zeros(3, [("a", "u1")]), 2),
    "dates": pickle.dumps(np.zeros(3, "M8[s]"), 2),
    "text in an array": pickle.dumps(np.array(["a"]), 2),
    "another byte order": pickle.dumps(np.zeros(3, ">i4"), 2),
    "a masked array": pickle.dumps(np.ma.masked_array([1, 2]), 2),
    "protocol 0": b"cos\nsystem\n(S'true'\ntR.",
    "INST": b"(S'true'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nU\x04trueo.",
    "NEWOBJ": b"cnumpy\nndarray\n(K\x02t\x81.",
    "STACK_GLOBAL": b"\x8c\x02os\x8c\x06system\x93.",
    "EXT1": b"\x82\x01.",
    "PERSID": b"P1\n.",
    "the state of a name": b"cnumpy\nndarray\n}U\x01aK\x01sb.",
    "a call of a list": b"])R.",
    "a call of a name that is no call": b"cnumpy\nndarray\n)R.",
    "an array of something": b"cnumpy.core.multiarray\n_reconstruct\nK\x00\x85R.",
    "a codec of the file's choice": b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.",
    "a key that cannot be one": b"}]K\x01s.",
    "an append to a dict": b"}K\x01a.",
    "a value for a list": b"]K\x01K\x02s.",
    "a value for an array": b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R)K\x02s.",
    "values for an array": b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R()K\x02u.",
    "a key without its value": b"}(K\x01u.",
    "a mark that is not there": b"t.",
    "a mark above the stack": b"K\x01K\x01(\x86t.",
    "a memory that is not there": b"h\x07.",
    "a stack that is empty": b".",
    "nothing to remember": b"q\x01.",
    "a string that is cut off": b"T\xff\xff\xff\x7fabc",
    "a length below zero": b"T\xff\xff\xff\xffabc.",
}


@pytest.mark.parametrize("contents", OTHERS.values(), ids=OTHERS)
def test_anything_else_is_refused(contents):
    with pytest.raises(ValueError, match=r"\w") as raised:
        loads(contents)
    assert "\n" not in str(raised.value)


def array_pickle(shape, raw=b""):
    """An array with the given opcodes for its shape."""
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    head = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
    return head + shape + dtype + b"\x89U" + bytes([len(raw)]) + raw + b"tb."


def test_shapes_of_arrays():
    assert loads(array_pickle(b"K\x02K\x01\x86", b"ab")).tolist() == [[97], [98]]
    negative, huge = b"J\xff\xff\xff\xff", b"\x8a\x0a" + b"\xff" * 9 + b"\x00"
    for shape in (
        b"K\x03\x85",
        negative + b"K\x00\x86",
        negative + negative + b"\x86",
        huge + b"K\x00\x86",
        b"N\x85",
        b"\x88\x85",
        b"]",
    ):
        with pytest.raises(ValueError, match=r"\w"):
            loads(array_pickle(shape, b"" if b"\x86" in shape else b"a" if b"\x88" in shape else b"ab"))


def test_far_memory_costs_nothing():
    """Python's unpickler fills a table up to the number."""
    assert loads(b"]r\xff\xff\xff\x7fj\xff\xff\xff\x7f\x86.") == ([], [])


def small_files():
    images = np.arange(24, dtype=np.uint8).reshape(4, 6)
    record = {b"labels": [1, 2, 3, 4], b"data": images, b"filenames": [b"a.png"] * 4}
    return [python2_pickle(record), python3_pickle(record)]


@pytest.mark.parametrize("contents", small_files(), ids=["Python 2", "Python 3"])
def test_cut_off_files_and_changed_bytes(contents):
    for length in range(len(contents)):
        with pytest.raises(ValueError, match=r"\w"):
            loads(contents[:length])
    generator = random.Random(0)
    outcomes = set()
    for _ in range(10_000):
        changed = bytearray(contents)
        for _ in range(generator.choice((1, 1, 2, 8))):
            changed[generator.randrange(len(changed))] = generator.randrange(256)
        try:
            loads(bytes(changed))
            outcomes.add("read")
        except ValueError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}  # a changed pixel cannot be seen
