"""Formulas of floats over sizes: their values, and the sizes for which they exceed one.

    (n - 1) / 2 > 3  ->  ((0,), 2, "/") of the size n - 1  ->  n - 1 > 6

A formula is a tuple in postfix notation: numbers, places of sizes as tuples of one, and
names of operations, each after its operands. Sums, and products with and quotients by
constants, are monotone also as they are rounded. So the sizes for which such a formula
of one size exceeds a number begin, or end, at one of them.
"""

import bisect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._jax import as_weak


type Formula = tuple[Any, ...]
_UNARY: dict[str, Callable[[Any], Any]] = {"negative": operator.neg, "abs": abs}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_EXACT: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_IN_PYTHON = _EXACT | {
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
OF_ARRAYS = _EXACT | {
    "//": jnp.floor_divide,
    "%": jnp.remainder,
    "**": jnp.power,
}


def _product(a: Any, b: Any) -> jax.Array:
    """A product that is rounded: XLA would add to it what it has not rounded yet."""
    return lax.optimization_barrier(a * b)


_ON_THE_DEVICE = OF_ARRAYS | {"*": _product}


def joined(
    operation: str, formulas: Sequence[Formula], counts: Sequence[int]
) -> Formula:
    """An operation on what formulas give, each with sizes of its own.

    Args:
        operation: its name.
        formulas: of its operands.
        counts: how many sizes each is about.
    """
    found: Formula = ()
    before = 0
    for formula, count in zip(formulas, counts, strict=True):
        found += tuple((x[0] + before,) if isinstance(x, tuple) else x for x in formula)
        before += count
    return (*found, operation)


def in_python(formula: Formula, sizes: Sequence[float | int]) -> Any:
    """What Python, or NumPy, makes of a formula, with its errors."""
    return _evaluated(formula, sizes, lambda x: x, _IN_PYTHON, np)


def on_the_device(
    formula: Formula, sizes: Sequence[Any], dtype: Any, is_weak: bool
) -> jax.Array:
    """The value of a formula, computed in float64 and rounded once.

    Args:
        formula: of a float, or a comparison.
        sizes: int64 scalars.
        dtype: of the result.
        is_weak: whether its type gives way, as that of a Python float.
    """

    def constant(x: Any) -> jax.Array:
        # XLA divides by a constant as it multiplies, rounded twice.
        return lax.optimization_barrier(jnp.float64(x))

    with jax.enable_x64(True):
        values = [x.astype(np.float64) for x in sizes]
        found = _evaluated(formula, values, constant, _ON_THE_DEVICE, jnp)
        if not is_weak or dtype == np.dtype(bool):
            return found.astype(dtype)
        return as_weak(found, dtype)


def _evaluated(
    formula: Formula,
    sizes: Sequence[Any],
    constant: Callable[[Any], Any],
    operators: dict[str, Callable[[Any, Any], Any]],
    library: Any,
) -> Any:
    stack: list[Any] = []
    for x in formula:
        if isinstance(x, tuple):
            stack.append(sizes[x[0]])
        elif not isinstance(x, str):
            stack.append(constant(x))
        elif x in _UNARY:
            stack.append(_UNARY[x](stack.pop()))
        else:
            function = operators.get(x) or COMPARISONS.get(x) or getattr(library, x)
            count = 2 if x in operators or x in COMPARISONS else getattr(np, x).nin
            stack[-count:] = [function(*stack[-count:])]
    (found,) = stack
    return found


def quotient(formula: Formula) -> tuple[Any, Any] | None:
    """The dividend and the divisor of a formula that is one division of integers."""
    if len(formula) != 3 or formula[2] != "/":
        return None
    a, b = (
        int(x) if isinstance(x, float) and x.is_integer() else x for x in formula[:2]
    )
    return (a, b) if isinstance(a, int | tuple) and isinstance(b, int | tuple) else None


def is_monotone(formula: Formula) -> bool:
    """Whether a formula of one size, where it stands once, never turns back."""
    stack: list[bool] = []  # whether the size is in each operand
    for x in formula:
        if not isinstance(x, str):
            stack.append(isinstance(x, tuple))
        elif x == "negative":
            continue
        elif x in _EXACT and not (x == "/" and stack[-1]):
            stack[-2:] = [any(stack[-2:])]
        else:
            return False
    return sum(isinstance(x, tuple) for x in formula) == 1


def where_true(
    formula: Formula, relation: str, bound: float | int, low: int, high: int
) -> tuple[int, int] | None:
    """The sizes for which a monotone formula is less, …, than a number: first and last.

    Args:
        formula: of one size.
        relation: "==", "<", "<=", ">" or ">=".
        bound: the number.
        low: the smallest size.
        high: the largest.

    Returns:
        An empty range, with its last size in front of the first, where there are none.
        None where a formula has no finite number at one of the ends.
    """
    ends = [in_python(formula, [n]) for n in (low, high)]
    if not all(abs(x) < math.inf for x in ends):  # nor NaN
        return None
    if bound != bound:  # NaN, which nothing is less, equal or more than
        return low, low - 1

    def first(reaches: Callable[[Any, Any], bool]) -> int:
        """The first size of those, up to the last, whose value reaches the bound."""
        sizes = range(low, high + 1)
        at = bisect.bisect_left(
            sizes, True, key=lambda n: reaches(in_python(formula, [n]), bound)
        )
        return low + at

    if ends[0] <= ends[1]:
        reached, passed = first(operator.ge), first(operator.gt)
        below, above = "<", ">"
    else:
        reached, passed = first(operator.le), first(operator.lt)
        below, above = ">", "<"  # which the formula is for the smaller, larger sizes
    return {
        below: (low, reached - 1),
        f"{below}=": (low, passed - 1),
        "==": (reached, passed - 1),
        f"{above}=": (reached, high),
        above: (passed, high),
    }[relation]
