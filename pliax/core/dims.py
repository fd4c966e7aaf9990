"""Sizes that are not known yet: integers in every way but their value.

A `Size` stands in shapes where JAX expects an integer. Arithmetic with integers and
sizes gives sizes, in the normal form of `jax.export`'s symbolic dimensions. What a size
cannot say about itself (is it 1? is it less than another?) it asks its `Assumptions`
(`guards.py`), which decide and keep a record. JAX's own symbolic dimensions answer
`==` with False where they do not know; a `Size` never does that to code outside JAX.

    +, -, *, //, %, **, max, min      -> Size or int
    ==, !=, <, <=, >, >=, bool, hash  -> asked of the assumptions
    int, float, range, len, x[size:]  -> static, with the reason on record
    as an operand of arrays           -> a run-time scalar
    with NumPy's integers             -> a `NumpySize`, whose type stays, as theirs do
    /, and with Python floats         -> a `Real`: Python's float, rounded once
"""

import operator
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._jax import (
    accept_as_integer,
    accept_as_numpy_integer,
    dim_as_value_p,
    weakly_typed_as,
)
from .callers import asker
from .constraints import in_python
from .numpy_functions import apply
from .reals import combine, is_complex, is_real, refuse_short
from .size_bits import common_bits


class Size:
    """A symbolic size: an expression over named sizes, and who decides about it.

    Attributes:
        expression: `jax.export`'s symbolic dimension, in normal form.
        assumptions: What is known and recorded about the named sizes.
    """

    __slots__ = ("_hash", "assumptions", "expression")

    def __init__(self, expression: Any, assumptions: Any):
        self.expression = expression
        self.assumptions = assumptions
        self._hash = hash(expression)

    # --- arithmetic -------------------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        return _arithmetic(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return _arithmetic(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return _arithmetic(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _arithmetic(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, _SEQUENCES):  # repeated
            return other * operator.index(self)
        return _arithmetic(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        if isinstance(other, _SEQUENCES):
            return self * other
        return _arithmetic(operator.mul, other, self)

    def __floordiv__(self, other: Any) -> Any:
        if _divides_negatively(other, self):
            return -(self // -other)
        return _arithmetic(operator.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _arithmetic(operator.floordiv, other, self)

    def __mod__(self, other: Any) -> Any:
        if _divides_negatively(other, self):
            return 0
        return _arithmetic(operator.mod, self, other)

    def __rmod__(self, other: Any) -> Any:
        return _arithmetic(operator.mod, other, self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __pow__(self, other: Any) -> Any:
        if type(other) is int and other < 0:
            return 1.0 / (self**-other)
        if isinstance(other, float) and not other.is_integer() and not self >= 0:
            return operator.index(self) ** other  # complex
        return _arithmetic(operator.pow, self, other)

    def __rpow__(self, other: Any) -> Any:
        if not isinstance(other, int | np.integer):
            return _arithmetic(operator.pow, other, self)
        if not self >= 0:
            return _inverse_power(other, self)
        exponent = self.__jax_array__()
        self.assumptions.values.fits_as_exponent(self, other, asker())
        power = operator.pow(np.int32(other), exponent.astype(np.int32))
        dtype = _dtype_of(other, self)
        if dtype is not None:
            return power.astype(jax.dtypes.canonicalize_dtype(dtype))
        return weakly_typed_as(power, exponent.aval)

    def __truediv__(self, other: Any) -> Any:
        return combine("/", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return combine("/", other, self)

    def __lshift__(self, other: Any) -> Any:
        if not _is_shift(other):
            return NotImplemented
        return _typed(_untyped(self) * 2**other, self)

    def __rshift__(self, other: Any) -> Any:
        if not _is_shift(other):
            return NotImplemented
        return _typed(_untyped(self) // 2**other, self)

    def __and__(self, other: Any) -> Any:
        return _typed(common_bits(_untyped(self), other), self, other)

    __rand__ = __and__

    def __or__(self, other: Any) -> Any:
        size = _untyped(self)
        if (both := common_bits(size, other)) is NotImplemented:
            return both
        return _typed(size + int(other) - both, self, other)

    __ror__ = __or__

    def __xor__(self, other: Any) -> Any:
        size = _untyped(self)
        if (both := common_bits(size, other)) is NotImplemented:
            return both
        return _typed(size + int(other) - 2 * both, self, other)

    __rxor__ = __xor__

    def __invert__(self) -> Any:
        return -self - 1

    def __neg__(self) -> Any:
        return _typed(self.assumptions.known.size(-self.expression), self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return _typed(_extreme("max", self, -self), self)

    # The names under which JAX asks a dimension for its extremes.

    def max(self, other: Any) -> Any:
        """The larger of two sizes, as a size."""
        return _extreme("max", self, other)

    rmax = max  # noqa: A003

    def min(self, other: Any) -> Any:
        """The smaller of two sizes, as a size."""
        return _extreme("min", self, other)

    rmin = min  # noqa: A003

    def clip(self, low: Any = None, high: Any = None, out: Any = None) -> Any:
        """As np.clip has it of an integer, which it makes one of NumPy's."""
        ends = [x for x in (low, high) if x is not None]
        if out is None and any(map(is_real, ends)):
            clipped: Any = self
            clipped = clipped if low is None else np.maximum(clipped, low)
            return clipped if high is None else np.minimum(clipped, high)
        if out is not None or not all(map(_is_size, ends)):
            raise TypeError("a size is clipped between numbers")  # NumPy goes on
        typed = _typed(self, self, is_numpys=True)
        found = typed if low is None else larger(typed, low)
        found = found if high is None else smaller(found, high)
        return _typed(found, typed, *ends)

    # --- questions --------------------------------------------------------------------

    def __eq__(self, other: Any) -> Any:
        if self is other:
            return True
        other = _whole(other)
        if not _is_size(other):
            return False if isinstance(other, np.floating) else NotImplemented
        return self.assumptions.compare(self, "==", other, asker())

    def __ne__(self, other: Any) -> Any:
        if self is other:
            return False
        other = _whole(other)
        if not _is_size(other):
            return True if isinstance(other, np.floating) else NotImplemented
        return self.assumptions.compare(self, "!=", other, asker())

    def __ge__(self, other: Any) -> Any:
        if not _is_size(other):
            return combine(">=", self, other)
        return self.assumptions.compare(self, ">=", other, asker())

    def __le__(self, other: Any) -> Any:
        if not _is_size(other):
            return combine("<=", self, other)
        return self.assumptions.compare(self, "<=", other, asker())

    def __gt__(self, other: Any) -> Any:
        if not _is_size(other):
            return combine(">", self, other)
        return self.assumptions.compare(self, ">", other, asker())

    def __lt__(self, other: Any) -> Any:
        if not _is_size(other):
            return combine("<", self, other)
        return self.assumptions.compare(self, "<", other, asker())

    def __bool__(self) -> bool:
        return bool(self.assumptions.compare(self, "!=", 0, asker()))

    def __hash__(self) -> int:
        value = self.assumptions.values.hashed(self, asker())
        return self._hash if value is None else hash(value)

    # --- values -----------------------------------------------------------------------

    def __index__(self) -> int:
        return self.assumptions.values.as_integer(self, "as an integer", asker())

    def __int__(self) -> int:
        return self.assumptions.values.as_integer(self, "as int(…)", asker())

    def __float__(self) -> float:
        return float(self.assumptions.values.as_integer(self, "as float", asker()))

    def __format__(self, spec: str) -> str:
        """Its name, as `str` has it; its value where a width or a base is given."""
        return format(self._value(f"as text, {spec!r}"), spec) if spec else str(self)

    # What Python's integers have beside operators: as sizes where that is one.

    def __round__(self, digits: int | None = None) -> Any:
        is_whole = digits is None or digits >= 0
        return self if is_whole else round(self._value("by round(…)"), digits)

    __trunc__ = __floor__ = __ceil__ = __pos__

    real = numerator = property(__pos__)
    imag = property(lambda self: 0)
    denominator = property(lambda self: 1)

    def conjugate(self) -> "Size":
        """The size itself, as of an integer."""
        return self

    def is_integer(self) -> bool:
        """True, as of an integer."""
        return True

    def as_integer_ratio(self) -> tuple["Size", int]:
        """The size and 1."""
        return self, 1

    def bit_length(self) -> int:
        """As of an integer, for which the size becomes a constant."""
        return self._value("as bit_length()").bit_length()

    def bit_count(self) -> int:
        """As of an integer, for which the size becomes a constant."""
        return self._value("as bit_count()").bit_count()

    def to_bytes(self, *args: Any, **options: Any) -> bytes:
        """As of an integer, for which the size becomes a constant."""
        return self._value("as to_bytes()").to_bytes(*args, **options)

    def _value(self, use: str) -> int:
        return self.assumptions.values.as_integer(self, use, asker())

    def dimension_as_value(self) -> jax.Array:
        """The size as a scalar that arrays can compute with (JAX's name for it)."""
        value = self.assumptions.values.value_afterwards(self, "as a value", asker())
        return dim_as_value_p.bind(dim=self) if value is self else jnp.asarray(value)

    __jax_array__ = dimension_as_value

    def astype(self, dtype: Any) -> jax.Array:
        """The size as a scalar of a dtype; JAX asks it of the largest of a shape."""
        return self.__jax_array__().astype(dtype)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any
    ) -> Any:
        found = apply(Size, ufunc, method, inputs, options)
        if isinstance(found, tuple):
            return tuple(_typed(x, *inputs, is_numpys=True) for x in found)
        return _typed(found, *inputs, is_numpys=True)

    def __str__(self) -> str:
        return in_python(str(self.expression))

    __repr__ = __str__

    def __copy__(self) -> "Size":
        return self

    def __deepcopy__(self, memo: dict) -> "Size":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as an integer: what is read again belongs to no trace."""
        return int, (self.assumptions.values.as_integer(self, "by pickling", asker()),)


class NumpySize(Size):
    """A size that NumPy computed: np.prod(x.shape), np.int32(2) * n, np.minimum(n, 8).

    It differs from others beside arrays, whose types do not change its own.
    """

    __slots__ = ("_dtype",)

    def __init__(self, size: Size, dtype: np.dtype):
        super().__init__(size.expression, size.assumptions)
        self._dtype = dtype

    @property
    def dtype(self) -> np.dtype:
        """Its type: np.int64 unless it met others."""
        if _is_numpys(asker()):  # np.mean casts a quotient of sizes to it
            raise AttributeError("dtype")
        return self._dtype

    def item(self) -> Size:
        """The same size as an integer of Python's."""
        return _untyped(self)

    __trunc__ = __floor__ = __ceil__ = item

    def __round__(self, digits: int | None = None) -> Any:
        if digits is None or digits >= 0:
            return self.item() if digits is None else self
        return round(self._dtype.type(self._value("by round(…)")), digits)

    @property
    def imag(self) -> np.integer:
        """0 in its type."""
        return self._dtype.type(0)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._dtype.type, super().__reduce__()[1]

    def dimension_as_value(self) -> jax.Array:
        """The size as a scalar that arrays can compute with (JAX's name for it)."""
        dtype = jax.dtypes.canonicalize_dtype(self.dtype)
        return self.item().dimension_as_value().astype(dtype)

    __jax_array__ = dimension_as_value


accept_as_integer(Size)
accept_as_numpy_integer(NumpySize)


def _typed(found: Any, *operands: Any, is_numpys: bool = False) -> Any:
    """What was computed of operands, with the type that NumPy's give to it.

    Sizes do not wrap, as NumPy's integers do: they have to fit, under a guard. Those
    for which they do not are traced as integers, and NumPy wraps them.

    Args:
        found: a size or an integer; all else stays as it is.
        operands: what it was computed of.
        is_numpys: whether NumPy computed it, also of Python's integers alone.
    """
    dtype = _dtype_of(*operands)
    if (dtype is None and not is_numpys) or isinstance(found, bool):
        return found
    dtype = np.dtype(np.int64) if dtype is None else dtype
    if isinstance(found, int | np.integer):
        return dtype.type(found)
    if not isinstance(found, Size):
        return found
    if dtype.kind == "f":  # of np.uint64 and np.int64
        return combine("*", found, dtype.type(1))
    for n in (found, *operands):
        if isinstance(n, Size):
            remedy = f", in which NumPy wraps it; jnp.{dtype} wraps it for all sizes"
            n.assumptions.values.fits_in(n, dtype, asker(), remedy)
        elif isinstance(n, int):
            dtype.type(n)  # which raises as NumPy does
    return NumpySize(found, dtype)


def _dtype_of(*operands: Any) -> np.dtype | None:
    """The type that NumPy gives to what is computed of operands; None for Python's."""
    given = [x.dtype for x in operands if isinstance(x, np.integer)]
    given += [x._dtype for x in operands if isinstance(x, NumpySize)]
    return np.result_type(*given) if given else None


def _total(frame: FrameType, *operands: Any) -> tuple[np.integer, ...]:
    """What is added without a change of value where NumPy sums, in 64 bits."""
    if frame.f_code.co_name not in _TOTALS or not _is_numpys(frame):
        return ()
    dtype = _dtype_of(*operands)
    is_unsigned = dtype is not None and dtype.kind == "u"
    held = frame.f_locals.get("obj")  # an integer of Python's makes all of them int64
    held = held if isinstance(held, list | tuple) else ()
    if any(_is_size(x) and _dtype_of(x) is None for x in held):
        is_unsigned = False
    return (np.uint64(0) if is_unsigned else np.int64(0),)


_TOTALS = {"_wrapreduction", "_sum", "_prod", "_mean"}  # functions of NumPy's


def _untyped(size: Size) -> Size:
    """The same size as an integer of Python's."""
    return size.assumptions.known.size(size.expression)


def _is_numpys(frame: FrameType) -> bool:
    """Whether a frame is NumPy's: np.prod multiplies what its tuple holds.

    It has to be the nearest: what our own modules compute on its way has no type.
    """
    return frame.f_globals.get("__name__", "").startswith("numpy.")


def _plain(size: Any) -> Any:
    return size.expression if isinstance(size, Size) else operator.index(size)


def _is_size(x: Any) -> bool:
    return isinstance(x, int | np.integer | Size)


def _whole(x: Any) -> Any:
    """A float that is an integer as that integer, which a size may equal."""
    is_whole = isinstance(x, float | np.floating) and float(x).is_integer()
    return int(x) if is_whole else x


def _divides_negatively(divisor: Any, size: Size) -> bool:
    """Whether a negative integer divides a size; JAX asks this of -1 in a reshape.

    `jax.export` knows of b % 8 == 0, but not that b % -8 == 0 as well.
    """
    if not isinstance(divisor, int) or divisor >= 0:
        return False
    return size.assumptions.is_divided(size, -divisor, asker())


def _is_shift(x: Any) -> bool:
    return type(x) is int and x >= 0


def _inverse_power(base: Any, exponent: Size) -> Any:
    """A Python integer to a negative power, which is a float."""
    if base == 0:
        raise ZeroDivisionError("0.0 cannot be raised to a negative power")
    return combine("**", base, exponent)


_SEQUENCES = (list, tuple, str, bytes)
_DIVISIONS = (operator.floordiv, operator.mod)


def _arithmetic(operation: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """On expressions where both are sizes, else on run-time scalars."""
    if _is_size(a) and _is_size(b):
        assumptions = (a if isinstance(a, Size) else b).assumptions
        if getattr(b, "assumptions", assumptions) is not assumptions:
            return operation(*assumptions.values.operands(a, b, asker()))
        if operation in _DIVISIONS and isinstance(b, Size):
            assumptions.refuse_zero(b, asker())
        found = assumptions.known.size(operation(_plain(a), _plain(b)))
        frame = asker((__name__,))
        total = _total(frame, a, b)
        return _typed(found, a, b, *total, is_numpys=_is_numpys(frame))
    if any(is_real(x) or is_complex(x) for x in (a, b)):
        return combine(_NAMES[operation], a, b)
    refuse_short((a, b), asker())
    if operation is operator.pow:
        return jnp.power(_array_of(a), b)
    return operation(_array_of(a), _array_of(b))


def _extreme(kind: str, size: Size, other: Any) -> Any:
    """The "max" or "min" of a size and another, or an integer."""
    assumptions = size.assumptions
    if getattr(other, "assumptions", assumptions) is not assumptions:
        a, b = assumptions.values.operands(size, other, asker())
        return (larger if kind == "max" else smaller)(a, b)
    return assumptions.known.extreme(kind, size, other)


_NAMES = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
}


def _array_of(x: Any) -> Any:
    return x.__jax_array__() if isinstance(x, Size) else x


LARGEST = 2**31 - 1  # what an int32 holds, in which JAX computes with sizes


def larger(a: Any, b: Any) -> Any:
    """The larger of two sizes or integers."""
    if not isinstance(a, Size) and not isinstance(b, Size):
        return max(a, b)
    return a.max(b) if isinstance(a, Size) else b.max(a)


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two sizes or integers."""
    if not isinstance(a, Size) and not isinstance(b, Size):
        return min(a, b)
    return a.min(b) if isinstance(a, Size) else b.min(a)
