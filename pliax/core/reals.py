"""Floats computed from sizes, exact as Python's until an array meets them.

    0.999 ** n, (n - 1) / n, n * 0.7 * 10  -> Real

A Python float has 53 bits, and `jax.jit` rounds it where it enters the program. So a
`Real` keeps the formula; what becomes a part of the program is one equation, which
computes it in float64 and rounds once.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from ._jax import Primitive, accept_as_float, as_weak


_UNARY: dict[str, Callable[[Any], Any]] = {"negative": operator.neg, "abs": abs}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": jnp.floor_divide,
    "%": jnp.remainder,
    "**": jnp.power,
}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
type Formula = tuple[Any, ...]  # in postfix notation: numbers, places of sizes, names


class Real:
    """A float that is known when sizes are.

    Attributes:
        formula: numbers, the places of sizes as tuples of one, and operations, each
            after its operands.
        sizes: those that the formula is about.
    """

    __slots__ = ("formula", "sizes")

    def __init__(self, formula: Formula, sizes: tuple[Any, ...]):
        self.formula = formula
        self.sizes = sizes

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
        return Real((*self.formula, "negative"), self.sizes)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return Real((*self.formula, "abs"), self.sizes)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.__jax_array__(), digits)

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
        return bool(self.__jax_array__())

    def __float__(self) -> float:
        return float(self.__jax_array__())

    def __int__(self) -> int:
        return int(self.__jax_array__())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__jax_array__(), name)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any
    ) -> Any:
        if method != "__call__" or options:
            return NotImplemented
        return by_numpy(ufunc, inputs)

    def dimension_as_value(self) -> jax.Array:
        """The float as a scalar that arrays can compute with (JAX's name for it)."""
        return _bound(self, jax.dtypes.canonicalize_dtype(float), is_weak=True)

    __jax_array__ = dimension_as_value

    def __repr__(self) -> str:
        return f"a float of {', '.join(map(str, self.sizes))}"


accept_as_float(Real)


def combine(operation: str, a: Any, b: Any) -> Any:
    """Two operands joined: a Real where both are numbers of Python's, else an array.

    A comparison is an array as well: what it says is known on the device.
    """
    join = _BINARY.get(operation) or COMPARISONS[operation]
    if not (_is_number(a) and _is_number(b)):
        has_float = isinstance(a, np.floating) or isinstance(b, np.floating)
        value = _as_float if has_float else _as_array
        return join(value(a), value(b))
    found = _joined(operation, (a, b))
    is_comparison = operation in COMPARISONS
    return typed(found, is_truth=True) if is_comparison else found


def by_numpy(ufunc: np.ufunc, inputs: tuple[Any, ...]) -> Any:
    """What a function of NumPy's gives for a size or a Real: a type that stays."""
    if not hasattr(jnp, ufunc.__name__):
        return NotImplemented
    kind = _kind(ufunc, inputs)
    if kind not in "fb":
        found = getattr(jnp, ufunc.__name__)(*map(_as_array, inputs))
        return jax.tree.map(lambda x: x.astype(x.dtype), found)
    return typed(_joined(ufunc.__name__, inputs), is_truth=kind == "b")


def _kind(ufunc: np.ufunc, inputs: tuple[Any, ...]) -> str:
    """What NumPy would give for numbers: "f", "b" or another kind of one result."""
    if ufunc.nout > 1 or not all(map(_is_number, inputs)):
        return "other"
    is_real = [isinstance(x, float | Real) for x in inputs]
    return ufunc(*(np.float64(1) if x else np.int64(1) for x in is_real)).dtype.kind


def typed(real: "Real", *, is_truth: bool = False) -> jax.Array:
    """A float, or a truth value, with a type that stays, as those of NumPy."""
    kind = bool if is_truth else float
    return _bound(real, jax.dtypes.canonicalize_dtype(kind), is_weak=False)


def _joined(operation: str, operands: Sequence[Any]) -> "Real":
    formula: Formula = ()
    sizes: tuple[Any, ...] = ()
    for real in map(_real_of, operands):
        formula += _moved(real.formula, len(sizes))
        sizes += real.sizes
    return Real((*formula, operation), sizes)


def is_real(x: Any) -> bool:
    """Whether something is a float, of Python's or NumPy's, known or not."""
    return isinstance(x, float | np.floating | Real)


def _is_number(x: Any) -> bool:
    is_number = isinstance(x, int | float | Real) or hasattr(x, "expression")
    return is_number and not isinstance(x, np.generic)


def _real_of(x: Any) -> Real:
    if isinstance(x, Real):
        return x
    return Real((x,), ()) if isinstance(x, int | float) else Real(((0,),), (x,))


def _moved(formula: Formula, by: int) -> Formula:
    """The same formula where its sizes stand further behind."""
    return tuple((x[0] + by,) if isinstance(x, tuple) else x for x in formula)


def _as_float(x: Any) -> Any:
    """A size as a float scalar, which holds also what no int32 does."""
    return _real_of(x).dimension_as_value() if hasattr(x, "expression") else x


def _as_array(x: Any) -> Any:
    return x.__jax_array__() if hasattr(x, "__jax_array__") else x


# A formula as a part of a program: an equation without operands.
real_p = Primitive("real_of_sizes")


def _type_of(*, dtype: Any, is_weak: bool, **_: Any) -> ShapedArray:
    return ShapedArray((), dtype, weak_type=is_weak)


def _bound(real: "Real", dtype: Any, *, is_weak: bool) -> jax.Array:
    sizes, formula = real.sizes, real.formula
    return real_p.bind(sizes=sizes, formula=formula, dtype=dtype, is_weak=is_weak)


real_p.def_abstract_eval(_type_of)


def computed(
    formula: Formula, sizes: Sequence[Any], dtype: Any, is_weak: bool
) -> jax.Array:
    """The value of a formula, rounded once.

    Args:
        formula: of a Real, or a comparison.
        sizes: int64 scalars.
        dtype: of the result.
        is_weak: whether its type gives way, as that of a Python float.
    """
    with jax.enable_x64(True):
        values = [x.astype(np.float64) for x in sizes]
        stack: list[Any] = []
        for x in formula:
            if isinstance(x, str):
                function, count = _function(x)
                stack[-count:] = [function(*stack[-count:])]
            elif isinstance(x, tuple):
                stack.append(values[x[0]])
            else:  # XLA divides by a constant as it multiplies, rounded twice
                stack.append(lax.optimization_barrier(jnp.float64(x)))
        (found,) = stack
        if not is_weak or dtype == np.dtype(bool):
            return found.astype(dtype)
        return as_weak(found, dtype)


def _function(name: str) -> tuple[Callable[..., Any], int]:
    """An operation of a formula, and how many operands it has."""
    if name in _UNARY:
        return _UNARY[name], 1
    if name in _BINARY or name in COMPARISONS:
        return _BINARY.get(name) or COMPARISONS[name], 2
    return getattr(jnp, name), getattr(np, name).nin
