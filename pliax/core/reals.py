"""Floats computed from sizes, exact as Python's until an array meets them.

    0.999 ** n, (n - 1) / n, n * 0.7 * 10  -> Real

A Python float has 53 bits, and `jax.jit` rounds it where it enters the program. So a
`Real` keeps the formula; what becomes a part of the program is one equation, which
computes it in float64 and rounds once. np.float64 is such a float with a type that
stays. Where Python has no float for an answer (a root of what is negative, a division
by a float that is 0, what is too large) there is NaN or infinity.
"""

import functools
import math
import operator
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from ._jax import Primitive, accept_as_float, as_weak
from .float_formulas import (
    COMPARISONS,
    OF_ARRAYS,
    Formula,
    in_python,
    is_monotone,
    joined,
    quotient,
    where_true,
)


class Real:
    """A float that is known when sizes are.

    Attributes:
        formula: how it is computed of sizes (`float_formulas.py`).
        sizes: those that the formula is about.
        is_weak: whether its type gives way, as a Python float's; NumPy's does not.
    """

    __slots__ = ("formula", "is_weak", "sizes")

    def __init__(
        self, formula: Formula, sizes: tuple[Any, ...], *, is_weak: bool = True
    ):
        self.formula = formula
        self.sizes = sizes
        self.is_weak = is_weak

    def as_typed(self) -> "Real":
        """The same float as one of NumPy's."""
        return Real(self.formula, self.sizes, is_weak=False)

    def __add__(self, other: Any) -> Any:
        return combine("+", self, other)

    def __radd__(self, other: Any) -> Any:
        return combine("+", other, self)

    def __sub__(self, other: Any) -> Any:
        return combine("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return combine("-", other, self)

    def __mul__(self, other: Any) -> Any:
        return combine("*", self, other)

    def __rmul__(self, other: Any) -> Any:
        return combine("*", other, self)

    def __truediv__(self, other: Any) -> Any:
        return combine("/", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return combine("/", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return combine("//", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return combine("//", other, self)

    def __mod__(self, other: Any) -> Any:
        return combine("%", self, other)

    def __rmod__(self, other: Any) -> Any:
        return combine("%", other, self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __pow__(self, other: Any) -> Any:
        return combine("**", self, other)

    def __rpow__(self, other: Any) -> Any:
        return combine("**", other, self)

    def __neg__(self) -> Any:
        return _joined("negative", [self])

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return _joined("abs", [self])

    def __floor__(self) -> Any:
        integers = self.quotient
        return operator.floordiv(*integers) if integers else math.floor(float(self))

    def __ceil__(self) -> Any:
        integers = self.quotient
        return -(-integers[0] // integers[1]) if integers else math.ceil(float(self))

    @property
    def quotient(self) -> tuple[Any, Any] | None:
        """The two integers or sizes, below 2^31, whose quotient is rounded here."""
        parts = quotient(self.formula)
        if parts is None or any(isinstance(x, int) and abs(x) >= 2**31 for x in parts):
            return None
        a, b = (self.sizes[x[0]] if isinstance(x, tuple) else x for x in parts)
        return a, b

    def __round__(self, digits: int | None = None) -> Any:
        rounded = round(self.__jax_array__(), digits)
        return as_weak(rounded, rounded.dtype) if digits is None else rounded

    def __eq__(self, other: Any) -> Any:
        return combine("==", self, other)

    def __ne__(self, other: Any) -> Any:
        return combine("!=", self, other)

    def __lt__(self, other: Any) -> Any:
        return combine("<", self, other)

    def __le__(self, other: Any) -> Any:
        return combine("<=", self, other)

    def __gt__(self, other: Any) -> Any:
        return combine(">", self, other)

    def __ge__(self, other: Any) -> Any:
        return combine(">=", self, other)

    def __hash__(self) -> int:
        return hash(float(self))

    def __bool__(self) -> bool:
        return bool(self != 0.0)

    def __float__(self) -> float:
        """Python's float, for which each size becomes a constant."""
        return float(in_python(self.formula, [float(n) for n in self.sizes]))

    def __int__(self) -> int:
        return int(float(self))

    __trunc__ = __int__

    def __getattr__(self, name: str) -> Any:
        if name not in ("aval", "weak_type") and not hasattr(jax.Array, name):
            raise AttributeError(name)
        return getattr(self.__jax_array__(), name)

    def round(self, decimals: int = 0) -> Any:
        """As np.round has it of a float: a float."""
        if decimals == 0:
            return _joined("rint", [self]).as_typed()
        return self.as_typed().__jax_array__().round(decimals)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.__jax_array__(), dtype)  # which JAX refuses

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any
    ) -> Any:
        if method != "__call__" or options:
            return NotImplemented
        return by_numpy(ufunc, as_scalars(inputs))

    def dimension_as_value(self) -> jax.Array:
        """The float as a scalar that arrays can compute with (JAX's name for it)."""
        dtype = jax.dtypes.canonicalize_dtype(float)
        return _bound(self, dtype, is_weak=self.is_weak)

    __jax_array__ = dimension_as_value

    def __repr__(self) -> str:
        return f"a float of {', '.join(map(str, self.sizes))}"


accept_as_float(Real)


def combine(operation: str, a: Any, b: Any) -> Any:
    """Two operands joined: a Real where both are numbers, else an array.

    A comparison is one of sizes where that says the same, else an array: what it says
    is known on the device.
    """
    dtype = _dtype_of(a, b)
    if dtype is not None and dtype.kind == "c":
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        return OF_ARRAYS[operation](*(jnp.asarray(_as_array(x), dtype) for x in (a, b)))
    if dtype == np.float64 or (_is_number(a) and _is_number(b)):
        if operation in ("/", "//", "%"):
            _refuse_zero(b)
        if operation in COMPARISONS:
            return _compared(operation, a, b)
        return _joined(operation, (a, b))
    has_floats = isinstance(a, np.floating) or isinstance(b, np.floating)
    value = functools.partial(_as_float, dtype=dtype) if has_floats else _as_array
    join = OF_ARRAYS.get(operation) or COMPARISONS[operation]
    a, b = widened((a, b)) if operation in COMPARISONS else (a, b)
    found = join(value(a), value(b))
    stays = operation in COMPARISONS or any(
        isinstance(x, np.generic | np.ndarray) for x in (a, b)
    )
    return found.astype(found.dtype) if stays else found


def _dtype_of(*operands: Any) -> np.dtype | None:
    """The type in which NumPy joins an integer that it computed of sizes and a float.

    A float16 or float32 beside a short integer stays short. A complex number is one of
    Python's, too. None of all others.
    """
    floats: list[Any] = [x.dtype for x in operands if isinstance(x, np.inexact)]
    floats += [x for x in operands if type(x) is complex]
    integers = [x._dtype for x in operands if is_typed(x)]
    return np.result_type(*floats, *integers) if floats and integers else None


def _refuse_zero(divisor: Any) -> None:
    """Raises where a number or a size is 0; of a size that leaves a guard."""
    if is_size(divisor):
        divisor.assumptions.refuse_zero(divisor, sys._getframe())
    elif not isinstance(divisor, Real | np.generic) and divisor == 0:
        raise ZeroDivisionError("float division by zero")


def as_scalars(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands of a function of NumPy's, which makes arrays of its scalars."""
    return tuple(
        x[()] if isinstance(x, np.ndarray) and x.ndim == 0 else x for x in inputs
    )


def widened(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Short integers of NumPy's as int32, in which they are compared with sizes.

    NumPy compares them with any integer of Python's; JAX casts that one to their type.
    """
    if not any(map(is_size, operands)):
        return operands
    return tuple(x.astype(np.int32) if _is_short(x) else x for x in operands)


def refuse_short(operands: tuple[Any, ...], frame: FrameType) -> None:
    """Raises where an array of NumPy's meets a size that its integers do not hold."""
    for x in filter(_is_short, operands):
        for n in filter(is_size, operands):
            n.assumptions.values.fits_in(n, x.dtype, frame)


def _is_short(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind in "iu" and x.dtype.itemsize < 4


_QUESTIONS = {"equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<="}
_QUESTIONS |= {"greater": ">", "greater_equal": ">="}


def by_numpy(ufunc: np.ufunc, inputs: tuple[Any, ...]) -> Any:
    """What a function of NumPy's gives for a size or a Real: a type that stays."""
    name = ufunc.__name__
    if getattr(np, name, None) is not ufunc or not hasattr(jnp, name):
        return NotImplemented
    if name in _QUESTIONS and all(map(_is_number, inputs)):
        return _compared(_QUESTIONS[name], *inputs)
    kind = _kind(ufunc, inputs)
    if kind == "f":
        return _in_dtype(_joined(name, inputs), _float_of(ufunc, inputs))
    if kind == "b":
        return _truth(_joined(name, inputs))
    if name in _QUESTIONS:
        inputs = widened(inputs)
    refuse_short(inputs, sys._getframe())
    found = getattr(jnp, name)(*map(_as_array, inputs))
    if kind == "i" and not jnp.issubdtype(found.dtype, jnp.integer):
        return NotImplemented
    return jax.tree.map(lambda x: x.astype(x.dtype), found)


def _kind(ufunc: np.ufunc, inputs: tuple[Any, ...]) -> str:
    """What NumPy would give for numbers: "f", "b", "i"; else "other"."""
    if ufunc.nout > 1 or not all(map(_is_number, inputs)):
        return "other"
    floats = [isinstance(x, float | Real) for x in inputs]
    return ufunc(*(np.float64(1) if x else np.int64(1) for x in floats)).dtype.kind


def _float_of(ufunc: np.ufunc, inputs: tuple[Any, ...]) -> np.dtype:
    """The type of a float that NumPy computes: np.sqrt of an int8 is a float16."""
    kinds = [x._dtype if is_typed(x) else _kind_of_number(x) for x in inputs]
    return ufunc.resolve_dtypes((*kinds, None))[-1]


def _kind_of_number(x: Any) -> Any:
    if isinstance(x, np.generic):
        return x.dtype
    is_float = isinstance(x, float | Real)
    return float if is_float else int


def _in_dtype(real: "Real", dtype: np.dtype) -> Any:
    """A float of NumPy's in a type of its own; a float64 goes on as a Real."""
    if dtype == np.float64:
        return real.as_typed()
    return _bound(real, dtype, is_weak=False)


def _truth(real: "Real") -> jax.Array:
    return _bound(real, np.dtype(bool), is_weak=False)


def _joined(operation: str, operands: Sequence[Any]) -> "Real":
    reals = [_real_of(x) for x in operands]
    counts = [len(x.sizes) for x in reals]
    formula = joined(operation, [x.formula for x in reals], counts)
    sizes = tuple(n for x in reals for n in x.sizes)
    return Real(formula, sizes, is_weak=all(x.is_weak for x in reals))


_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "=="}


def _compared(operation: str, a: Any, b: Any) -> Any:
    """A comparison as one of a size with integers, if it can be, else as an array."""
    if operation == "!=":
        equal = _compared("==", a, b)
        return not equal if isinstance(equal, bool) else ~equal
    real, other, relation = _real_of(a), _real_of(b), operation
    if not real.sizes:
        real, other, relation = other, real, _TURNED[operation]
    if not other.sizes and is_monotone(real.formula):
        (size,), (bound,) = real.sizes, other.formula
        ends = size.assumptions.known.range_of(size)
        found = where_true(real.formula, relation, bound, *ends)
        if found is not None:
            return _lies_between(size, *found, operation == "==")
    return _truth(_joined(operation, (a, b)))


def _lies_between(size: Any, first: int, last: int, is_equality: bool) -> Any:
    """Whether a size is one of some in a row: True, False or a condition.

    An equality that leaves one size is one: of a declared size it is an error.
    """
    if first > last:
        return False
    if is_equality and first == last:
        return size == first
    return (size >= first) & (size <= last)


def is_real(x: Any) -> bool:
    """Whether something is a float, of Python's or NumPy's, known or not."""
    return isinstance(x, float | np.floating | Real)


def is_complex(x: Any) -> bool:
    """Whether something is a complex number, of Python's or NumPy's."""
    return isinstance(x, complex | np.complexfloating)


def is_size(x: Any) -> bool:
    """Whether something is a symbolic size."""
    return hasattr(type(x), "expression")


def is_typed(x: Any) -> bool:
    """Whether something is a size that NumPy computed."""
    return is_size(x) and hasattr(type(x), "dtype")


def _is_number(x: Any) -> bool:
    """Whether a float64 holds something as it is; a bool is an integer, as ever."""
    return isinstance(x, int | float | np.integer | Real) or is_size(x)


def _real_of(x: Any) -> Real:
    if isinstance(x, Real):
        return x
    if is_size(x):
        size = x.item() if is_typed(x) else x
        return Real(((0,),), (size,), is_weak=not hasattr(x, "dtype"))
    is_numpys = isinstance(x, np.generic)
    return Real((x.item() if is_numpys else x,), (), is_weak=not is_numpys)


def _as_float(x: Any, dtype: np.dtype | None) -> Any:
    """A size as a float scalar, which holds also what no int32 does."""
    if is_size(x) and dtype is not None:
        return _in_dtype(_real_of(x), dtype)
    return _as_array(_real_of(x) if is_size(x) else x)


def _as_array(x: Any) -> Any:
    """A size, a condition or a Real as a scalar; all else as it is."""
    value = getattr(type(x), "dimension_as_value", None)
    return x if value is None else value(x)


# A formula as a part of a program: an equation without operands.
real_p = Primitive("real_of_sizes")


def _type_of(*, dtype: Any, is_weak: bool, **_: Any) -> ShapedArray:
    return ShapedArray((), dtype, weak_type=is_weak)


def _bound(real: "Real", dtype: Any, *, is_weak: bool) -> jax.Array:
    sizes, formula = tuple(map(_in_its_trace, real.sizes)), real.formula
    return real_p.bind(sizes=sizes, formula=formula, dtype=dtype, is_weak=is_weak)


def _in_its_trace(size: Any) -> Any:
    """A size that becomes a part of a program, which only its own trace can hold."""
    values = size.assumptions.values
    return values.value_afterwards(size, "as a float", sys._getframe(1))


real_p.def_abstract_eval(_type_of)
