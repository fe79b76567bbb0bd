"""Vectors for the loops: a number for each of WIDTH points, which numba computes with as with one number.

What the compiler makes of a loop over points depends on whether it can prove that arrays do not overlap, and it looks again
before each short loop. Vectors that are said to be vectors stay in registers, and there is nothing to prove. LLVM cuts them
into what the processor has.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, overload, register_model

WIDTH = 32  # measured, see benchmarks/LOG.md: 16 have too few sums under way, 64 too few registers
SQUARE = 16  # rows and columns of what is transposed at once
FLAGS = ("contract", "nsz")  # a product and a sum may be one instruction; nothing else moves

_INDEX = ir.IntType(32)
_NUMBER = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}
_BITS = {types.float32: (ir.IntType(32), 127, 23), types.float64: (ir.IntType(64), 1023, 52)}  # bias, digits


class Lanes(types.Type):
    """A number of one type for each of WIDTH points."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(f"Lanes({dtype})")


@register_model(Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, _vector(lanes.dtype))


def _vector(dtype: Any, length: int = WIDTH) -> ir.VectorType:
    return ir.VectorType(_NUMBER[dtype], length)


def _constant(kind: Any, value: Any) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, WIDTH), [value] * WIDTH)


def _shuffled(builder: Any, first: Any, second: Any, order: list[int]) -> Any:
    """Elements of two vectors by their numbers, those of the second behind those of the first."""
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_INDEX, len(order)), order))


def _spread(context: Any, builder: Any, value: Any, kind: Any, dtype: Any) -> Any:
    """A number, of any type, in all lanes; lanes as they are."""
    if isinstance(kind, Lanes):
        return value
    undefined = ir.Constant(_vector(dtype), ir.Undefined)
    first = builder.insert_element(undefined, context.cast(builder, value, kind, dtype), _INDEX(0))
    return _shuffled(builder, first, undefined, [0] * WIDTH)


def _lanes_of(*given: Any) -> Lanes | None:
    return next((kind for kind in given if isinstance(kind, Lanes)), None)


def _of_lanes(generate: Callable[..., Any]) -> Any:
    """The typing of an intrinsic from lanes, and numbers that are the same in all of them, to lanes."""

    def typed(_: Any, *given: Any) -> Any:
        lanes = _lanes_of(*given)
        if lanes is None:
            return None

        def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            spread = [_spread(context, builder, v, k, lanes.dtype) for v, k in zip(values, signature.args, strict=True)]
            return generate(builder, *spread)

        return lanes(*given), build

    return typed


def _operator(function: Callable[..., Any], instruction: str) -> None:
    """Registers it for lanes, and for lanes and a number. Not as an overload, of which each use would be compiled."""
    typed = _of_lanes(lambda builder, a, b: getattr(builder, instruction)(a, b, flags=FLAGS))

    @infer_global(function)
    class _Typing(AbstractTemplate):
        def generic(self, given: Any, _: Any) -> Any:
            lanes = _lanes_of(*given)
            return None if lanes is None else lanes(*given)

    def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return typed(None, *signature.args)[1](context, builder, signature, values)

    for kinds in ((Lanes, Lanes), (Lanes, types.Number), (types.Number, Lanes)):
        lower_builtin(function, *kinds)(lower)


for _function, _instruction in {"add": "fadd", "sub": "fsub", "mul": "fmul", "truediv": "fdiv"}.items():
    _operator(getattr(operator, _function), _instruction)


@intrinsic
def wide(_: Any, number: Any) -> Any:
    """A number in all lanes."""

    def build(context: Any, builder: Any, __: Any, values: Any) -> Any:
        return _spread(context, builder, values[0], number, number)

    return Lanes(number)(number), build


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger of two; a where either is NaN."""
    found = _of_lanes(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", b, a), b, a))
    return found(typing, a, b)


@intrinsic
def smaller(typing: Any, a: Any, b: Any) -> Any:
    """The smaller of two; a where either is NaN."""
    found = _of_lanes(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", b, a), b, a))
    return found(typing, a, b)


@intrinsic
def where(typing: Any, test: Any, a: Any, b: Any) -> Any:
    """a where the test is above 0, b elsewhere."""
    zero = _constant(_NUMBER[test.dtype], 0.0)
    found = _of_lanes(lambda builder, test, a, b: builder.select(builder.fcmp_ordered(">", test, zero), a, b))
    return found(typing, test, a, b)


@intrinsic
def total(_: Any, lanes: Any) -> Any:
    """The sum over the lanes."""

    def build(_: Any, builder: Any, __: Any, values: Any) -> Any:
        value, length = values[0], WIDTH
        while length > 1:
            length //= 2
            halves = [_shuffled(builder, value, value, list(range(first, first + length))) for first in (0, length)]
            value = builder.fadd(*halves, flags=FLAGS)
        return builder.extract_element(value, _INDEX(0))

    return lanes.dtype(lanes), build


@intrinsic
def has_any(_: Any, lanes: Any) -> Any:
    """Whether a lane is not 0."""

    def build(_: Any, builder: Any, __: Any, values: Any) -> Any:
        found = builder.fcmp_unordered("!=", values[0], _constant(_NUMBER[lanes.dtype], 0.0))
        bits = ir.IntType(WIDTH)
        return builder.icmp_unsigned("!=", builder.bitcast(found, bits), bits(0))

    return types.boolean(lanes), build


def _is_flat(array: Any) -> bool:
    return isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C"


def _place(context: Any, builder: Any, kind: Any, array: Any, index: Any, length: int = WIDTH) -> Any:
    """Where ``length`` numbers of a flat array begin."""
    place = builder.gep(context.make_array(kind)(context, builder, array).data, [index])
    return builder.bitcast(place, _vector(kind.dtype, length).as_pointer())


def _bytes(dtype: Any) -> int:
    return int(dtype.bitwidth) // 8


@intrinsic
def load(_: Any, array: Any, index: Any) -> Any:
    """WIDTH numbers of a flat array, from an index on, which is not checked."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(_place(context, builder, signature.args[0], *values), align=_bytes(array.dtype))

    return (Lanes(array.dtype)(array, types.int64), build) if _is_flat(array) else None


@intrinsic
def store(_: Any, array: Any, index: Any, lanes: Any) -> Any:
    """Lanes into a flat array, from an index on, which is not checked."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = _place(context, builder, signature.args[0], *values[:2])
        builder.store(values[2], place, align=_bytes(array.dtype))
        return context.get_dummy_value()

    return (types.void(array, types.int64, lanes), build) if _is_flat(array) and array.dtype == lanes.dtype else None


@intrinsic
def load_square(_: Any, memory: Any, places: Any, first: Any, offset: Any, tile: Any, index: Any) -> Any:
    """tile[index + WIDTH · c + first + p] = memory[places[first + p] + offset + c] for SQUARE p and as many c."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = signature.args
        starts = _starts(context, builder, kinds[1], values[1], values[2], values[3])
        rows = [_place(context, builder, kinds[0], values[0], start, SQUARE) for start in starts]
        columns = _transposed(builder, [builder.load(row, align=_bytes(memory.dtype)) for row in rows])
        for number, column in enumerate(columns):
            at = builder.add(builder.add(values[5], values[2]), ir.IntType(64)(WIDTH * number))
            builder.store(column, _place(context, builder, kinds[4], values[4], at, SQUARE), align=_bytes(tile.dtype))
        return context.get_dummy_value()

    word = types.int64
    return types.void(memory, places, word, word, tile, word), build


@intrinsic
def store_square(_: Any, memory: Any, places: Any, first: Any, offset: Any, tile: Any, index: Any) -> Any:
    """The inverse of :func:`load_square`."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds, columns = signature.args, []
        for number in range(SQUARE):
            at = builder.add(builder.add(values[5], values[2]), ir.IntType(64)(WIDTH * number))
            place = _place(context, builder, kinds[4], values[4], at, SQUARE)
            columns.append(builder.load(place, align=_bytes(tile.dtype)))
        starts = _starts(context, builder, kinds[1], values[1], values[2], values[3])
        for start, row in zip(starts, _transposed(builder, columns), strict=True):
            builder.store(row, _place(context, builder, kinds[0], values[0], start, SQUARE), align=_bytes(memory.dtype))
        return context.get_dummy_value()

    word = types.int64
    return types.void(memory, places, word, word, tile, word), build


def _starts(context: Any, builder: Any, kind: Any, places: Any, first: Any, offset: Any) -> list[Any]:
    """places[first + p] + offset of SQUARE points."""
    data, word = context.make_array(kind)(context, builder, places).data, ir.IntType(64)
    return [builder.add(builder.load(builder.gep(data, [builder.add(first, word(p))])), offset) for p in range(SQUARE)]


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """SQUARE vectors of as many elements, with rows for columns: blocks are swapped across the diagonal, from 1×1 on."""
    size = 1
    while size < SQUARE:
        for i in range(SQUARE):
            if not i & size:
                above, below = rows[i], rows[i + size]
                order = range(SQUARE)
                rows[i] = _shuffled(builder, above, below, [SQUARE + j - size if j & size else j for j in order])
                rows[i + size] = _shuffled(builder, above, below, [SQUARE + j if j & size else j + size for j in order])
        size *= 2
    return rows


@intrinsic
def _nearest_whole(typing: Any, z: Any) -> Any:
    def generate(builder: Any, z: Any) -> Any:
        kind = "f32" if z.type.element == ir.FloatType() else "f64"
        name, function = f"llvm.rint.v{WIDTH}{kind}", ir.FunctionType(z.type, [z.type])
        return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [z])

    return _of_lanes(generate)(typing, z)


@intrinsic
def _power_of_two(typing: Any, whole: Any) -> Any:
    """2^n for whole n, by way of the bits."""

    def generate(builder: Any, n: Any) -> Any:
        kind, bias, digits = _BITS[whole.dtype]
        zero = _constant(_NUMBER[whole.dtype], 0.0)
        n = builder.select(builder.fcmp_ordered("ord", n, n), n, zero)  # NaN is no whole number
        exponent = builder.add(builder.fptosi(n, ir.VectorType(kind, WIDTH)), _constant(kind, bias))
        return builder.bitcast(builder.shl(exponent, _constant(kind, digits)), n.type)

    return _of_lanes(generate)(typing, whole)


def exp(z: Any) -> Any:
    """e^z for lanes z that are not above 0, and exactly 0 where it is nearly."""
    raise NotImplementedError  # for numba alone


@overload(exp, jit_options={"error_model": "numpy"})
def _exp(z: Any) -> Any:
    return _exp_of_float64 if z.dtype is types.float64 else _exp_of_float32


# e^z = 2^n · e^r with |r| ≤ ½ ln 2, whose e^r is a polynomial or a quotient of two: those of Cephes (Moshier, 1989).
def _exp_of_float32(z: Any) -> Any:
    above = larger(z, -87.0)
    n = _nearest_whole(above * 1.4426950408889634)
    r = (above - n * 0.693359375) + n * 2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    return where(-87.0 - z, 0.0, (p * r * r + r + 1.0) * _power_of_two(n))


def _exp_of_float64(z: Any) -> Any:
    above = larger(z, -700.0)
    n = _nearest_whole(above * 1.4426950408889634)
    r = (above - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6
    s = r * r
    p = r * ((s * 1.26177193074810590878e-4 + 3.02994407707441961300e-2) * s + 9.99999999999999999910e-1)
    q = s * 3.00198505138664455042e-6 + 2.52448340349684104192e-3
    q = (q * s + 2.27265548208155028766e-1) * s + 2.00000000000000000009
    return where(-700.0 - z, 0.0, (p / (q - p) * 2.0 + 1.0) * _power_of_two(n))
