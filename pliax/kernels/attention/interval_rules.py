"""Bounds of values, and the rules by which elementwise primitives move them.

    x in [x.low, x.high], y in [y.low, y.high]    ->    x op y in [low, high]

A rule takes intervals of one shape and gives a pair (low, high), the tightest that is
cheap and never one that is too tight: where an integer might wrap around, or a float be
NaN or infinite, the pair spans everything.

References:
    Moore, "Interval Analysis", 1966, chapter 2.
    Warren, "Hacker's Delight", 2013, sections 2-13 and 4-2.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


type Pair = tuple[Any, Any]


@dataclass(frozen=True)
class Interval:
    """All a value can be on a block: from `low` to `high`, both included.

    Attributes:
        low: The smallest, of the value's own shape and dtype. A NaN in a float's bounds
            says that nothing is known.
        high: The largest; the same object as `low` where the value is known.
        varies: With which of the indices "b", "h", "q", "k".
        parts: The scalars that a vector of indices was put together from.
    """

    low: Any
    high: Any
    varies: frozenset[str] = frozenset()
    parts: tuple["Interval", ...] | None = None

    @property
    def known(self) -> bool:
        """Whether this is one value, and not a range of them."""
        return self.low is self.high


# --- values ---------------------------------------------------------------------------


def known(x: Any) -> Interval:
    """One value."""
    return Interval(x, x)


def literal(x: Any) -> Interval:
    """The value a jaxpr has written out."""
    return known(np.asarray(x.val, x.aval.dtype))


def unknown(aval: Any) -> Interval | None:
    """Anything of a type; None for what has no order, such as a random key."""
    if not ordered(aval.dtype):
        return None
    least, most = (np.asarray(x, aval.dtype) for x in limits(aval.dtype))
    return Interval(jnp.full(aval.shape, least), jnp.full(aval.shape, most))


def interval(low: Any, high: Any, varies: frozenset[str]) -> Interval:
    """Bounds of one value; a NaN in either hides both."""
    if is_float(low.dtype):
        low = jnp.where(jnp.isnan(high), high, low)
        high = jnp.where(jnp.isnan(low), low, high)
    return Interval(low, high, varies)


def limits(dtype: Any) -> tuple[Any, Any]:
    """The least and the greatest value of a dtype; of floats, what says unknown."""
    if dtype == jnp.bool_:
        return False, True
    if is_float(dtype):
        return jnp.nan, jnp.nan
    return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max


def ordered(dtype: Any) -> bool:
    """The dtypes whose arithmetic the rules know: bool, integers, wider floats."""
    if dtype == jnp.bool_:
        return True
    wide = jnp.issubdtype(dtype, jnp.number) and dtype.itemsize >= 2
    return dtype in (jnp.int8, jnp.uint8) or (
        wide and not jnp.issubdtype(dtype, jnp.complexfloating)
    )


def is_float(dtype: Any) -> bool:
    """Whether a dtype is floating."""
    return jnp.issubdtype(dtype, jnp.floating)


def is_signed(dtype: Any) -> bool:
    """Whether a dtype is a signed integer."""
    return jnp.issubdtype(dtype, jnp.signedinteger)


def _bits(dtype: Any) -> int:
    return jnp.iinfo(dtype).bits


def _least(values: Iterable[Any]) -> Any:
    return reduce(jnp.minimum, values)


def _greatest(values: Iterable[Any]) -> Any:
    return reduce(jnp.maximum, values)


def where_proven(fits: Any, low: Any, high: Any) -> Pair:
    """These bounds where they hold, else those of the dtype."""
    least, most = (np.asarray(x, low.dtype) for x in limits(low.dtype))
    return jnp.where(fits, low, least), jnp.where(fits, high, most)


# --- rules of elementwise primitives: intervals -> (low, high), or None ---------------


def elementwise(rule: Callable[..., Any] | None, eqn: Any, *operands: Any) -> Any:
    """Apply a rule to operands of one shape."""
    if rule is None:
        return None
    if eqn.primitive.name == "convert_element_type":
        rule = partial(_convert, dtype=eqn.outvars[0].aval.dtype)
    if eqn.primitive.name == "integer_pow":
        rule = partial(_integer_pow, exponent=eqn.params["y"])
    return rule(*(spread(x, eqn.outvars[0].aval.shape) for x in operands))


def spread(x: Interval, shape: tuple[Any, ...]) -> Interval:
    """The same bounds in the shape of the result."""
    low = jnp.broadcast_to(x.low, shape)
    return replace(x, low=low, high=low if x.known else jnp.broadcast_to(x.high, shape))


def _add(x: Interval, y: Interval) -> Pair:
    low, high = x.low + y.low, x.high + y.high
    if is_float(low.dtype):
        return _widened(low, high)
    fits = _sum_fits(x.low, y.low, low) & _sum_fits(x.high, y.high, high)
    return where_proven(fits, low, high)


def _sum_fits(x: Any, y: Any, total: Any) -> Any:
    """No wrap-around: adding what is not negative makes nothing smaller."""
    return (y >= 0) == (total >= x)


def _sub(x: Interval, y: Interval) -> Pair:
    low, high = x.low - y.high, x.high - y.low
    if is_float(low.dtype):
        return _widened(low, high)
    fits = _difference_fits(x.low, y.high, low) & _difference_fits(x.high, y.low, high)
    return where_proven(fits, low, high)


def _difference_fits(x: Any, y: Any, difference: Any) -> Any:
    return (y >= 0) == (difference <= x)


def _mul(x: Interval, y: Interval) -> Pair:
    """The extremes lie at the corners, whatever the signs."""
    corners = list(product((x.low, x.high), (y.low, y.high)))
    products = [a * b for a, b in corners]
    low, high = _least(products), _greatest(products)
    if is_float(low.dtype):
        return _widened(low, high)
    return where_proven(
        reduce(operator.and_, (_product_fits(a, b) for a, b in corners)), low, high
    )


def _product_fits(x: Any, y: Any) -> Any:
    """No wrap-around, in float32: its rounding is far below the margin of 2^-8."""
    limit = 2.0 ** (_bits(x.dtype) - is_signed(x.dtype)) * (1 - 2.0**-8)
    size = jnp.abs(x.astype(jnp.float32)) * jnp.abs(y.astype(jnp.float32))
    return size < limit


def _widened(low: Any, high: Any) -> Pair:
    """Bounds of a rounded result that also hold for the exact one, or a fused one."""
    info = jnp.finfo(low.dtype)
    eps, tiny = (np.asarray(x, low.dtype) for x in (4 * info.eps, info.tiny))
    fits = jnp.isfinite(low) & jnp.isfinite(high)
    low, high = low - (jnp.abs(low) * eps + tiny), high + (jnp.abs(high) * eps + tiny)
    return where_proven(fits, low, high)


def _neg(x: Interval) -> Pair:
    if is_float(x.low.dtype):
        return -x.high, -x.low
    return _sub(known(jnp.zeros_like(x.low)), x)


def _abs(x: Interval) -> Pair:
    if not (is_signed(x.low.dtype) or is_float(x.low.dtype)):
        return x.low, x.high
    zero = jnp.zeros_like(x.low)
    low = jnp.maximum(jnp.maximum(x.low, -x.high), zero)
    high = jnp.maximum(x.high, -x.low)
    if is_float(low.dtype):
        return low, high
    return where_proven(x.low != jnp.iinfo(low.dtype).min, low, high)


def _square(x: Interval) -> Pair | None:
    return _integer_pow(x, exponent=2)


def _integer_pow(x: Interval, *, exponent: int) -> Pair | None:
    if not 1 <= exponent <= 4:
        return None
    x = x if exponent % 2 else Interval(*_abs(x))
    power = x
    for _ in range(exponent - 1):
        power = Interval(*_mul(power, x))
    return power.low, power.high


def divide(x: Interval, y: Interval, *, floor: bool) -> Pair | None:
    """By a positive integer; the extremes lie at the corners."""
    if is_float(x.low.dtype):
        return None
    positive, (least, most) = _positive(y)
    divide = jnp.floor_divide if floor else lax.div
    corners = [divide(a, d) for a, d in product((x.low, x.high), (least, most))]
    return where_proven(positive, _least(corners), _greatest(corners))


def remainder(x: Interval, y: Interval, *, floor: bool) -> Pair | None:
    """By a positive integer: ascending as long as the quotient stays the same."""
    if is_float(x.low.dtype):
        return None
    positive, (least, most) = _positive(y)
    divide, rest = (jnp.floor_divide, jnp.remainder) if floor else (lax.div, lax.rem)
    same = (least == most) & (divide(x.low, least) == divide(x.high, least))
    inside = (x.low >= 0) & (x.high < least)
    zero = jnp.zeros_like(x.low)
    low = zero if floor else jnp.clip(x.low, 1 - most, zero)
    high = jnp.clip(x.high, zero, most - 1)
    if floor:
        high = jnp.where(x.low >= 0, high, most - 1)
    elif not is_signed(low.dtype):
        low = zero
    low = jnp.where(inside, x.low, jnp.where(same, rest(x.low, least), low))
    high = jnp.where(inside, x.high, jnp.where(same, rest(x.high, least), high))
    return where_proven(positive, low, high)


def _positive(y: Interval) -> tuple[Any, Pair]:
    """Whether a divisor is, and its bounds where it is (1 elsewhere)."""
    positive = y.low > 0
    one = jnp.ones_like(y.low)
    return positive, (jnp.where(positive, y.low, one), jnp.where(positive, y.high, one))


def _shift_right(x: Interval, y: Interval, *, logical: bool) -> Pair:
    shift = lax.shift_right_logical if logical else lax.shift_right_arithmetic
    fits = (y.low >= 0) & (y.high < _bits(x.low.dtype))
    if logical:
        fits &= x.low >= 0
    by = (jnp.where(fits, n, jnp.zeros_like(n)) for n in (y.low, y.high))
    corners = [shift(a, n) for a, n in product((x.low, x.high), by)]
    return where_proven(fits, _least(corners), _greatest(corners))


def _shift_left(x: Interval, y: Interval) -> Pair:
    """A product with a power of two."""
    fits = (y.low >= 0) & (y.high < _bits(x.low.dtype) - 1)
    one = jnp.ones_like(x.low)
    least, most = (
        lax.shift_left(one, jnp.where(fits, n, jnp.zeros_like(n)))
        for n in (y.low, y.high)
    )
    return where_proven(fits, *_mul(x, Interval(least, most)))


def _bitwise(x: Interval, y: Interval, *, operation: Callable[..., Any]) -> Pair:
    """From the leading bits that the two bounds of an operand have in common."""
    if x.low.dtype == jnp.bool_:  # and, or are monotone; this is xor
        return _ne(x, y)
    (x_bits, x_free), (y_bits, y_free) = _leading_bits(x), _leading_bits(y)
    if operation is lax.bitwise_xor:
        free = x_free | y_free
        low, high = (x_bits ^ y_bits) & ~free, (x_bits ^ y_bits) | free
    else:
        low = operation(x_bits & ~x_free, y_bits & ~y_free)
        high = operation(x_bits | x_free, y_bits | y_free)
    # Free bits below a sign that agrees order numbers as they order sets of bits.
    return where_proven((low < 0) == (high < 0), low, high)


def _leading_bits(x: Interval) -> Pair:
    """A number with the leading bits, and the mask of those that may vary."""
    ones = jnp.full_like(x.low, limits(x.low.dtype)[1])
    if is_signed(x.low.dtype):
        ones = jnp.full_like(x.low, -1)
    equal = lax.clz(x.low ^ x.high)
    free = lax.shift_right_logical(ones, jnp.minimum(equal, _bits(x.low.dtype) - 1))
    return x.low, jnp.where(equal == _bits(x.low.dtype), jnp.zeros_like(free), free)


def _not(x: Interval) -> Pair:
    return ~x.high, ~x.low


def _lt(x: Interval, y: Interval) -> Pair:
    return x.high < y.low, ~(x.low >= y.high)


def _le(x: Interval, y: Interval) -> Pair:
    return x.high <= y.low, ~(x.low > y.high)


def _eq(x: Interval, y: Interval) -> Pair:
    apart = (x.high < y.low) | (y.high < x.low)
    return (x.low == y.high) & (x.high == y.low), ~apart


def _ne(x: Interval, y: Interval) -> Pair:
    return _not(Interval(*_eq(x, y)))


def select(which: Interval, *cases: Interval) -> Pair:
    """The hull of the cases that may be chosen."""
    last = len(cases) - 1
    first, final = (
        jnp.clip(jnp.asarray(x).astype(jnp.int32), 0, last)
        for x in (which.low, which.high)
    )
    low, high = cases[0].low, cases[0].high
    for i, case in enumerate(cases[1:], 1):
        seen = first < i  # an earlier case may be chosen too
        least = jnp.where(seen, jnp.minimum(low, case.low), case.low)
        most = jnp.where(seen, jnp.maximum(high, case.high), case.high)
        low, high = (
            jnp.where(final >= i, new, old) for new, old in ((least, low), (most, high))
        )
    return low, high


def _convert(x: Interval, *, dtype: Any) -> Pair:
    if dtype == jnp.bool_:
        zero = known(jnp.zeros_like(x.low))
        return _ne(x, zero)
    low, high = x.low.astype(dtype), x.high.astype(dtype)
    source = x.low.dtype
    if source == jnp.bool_:
        return low, high
    if is_float(source):
        return _convert_float(x, low, high)
    if is_float(dtype):  # rounding keeps the order, but a narrow one may be left out
        return (low, high) if dtype.itemsize > 2 else _widened(low, high)
    fits = [(c.astype(source) == a) & ((c < 0) == (a < 0)) for c, a in
            ((low, x.low), (high, x.high))]  # fmt: skip
    return where_proven(fits[0] & fits[1], low, high)


def _convert_float(x: Interval, low: Any, high: Any) -> Pair:
    if is_float(low.dtype):
        wider = jnp.finfo(low.dtype).nmant >= jnp.finfo(x.low.dtype).nmant
        same_range = jnp.finfo(low.dtype).maxexp >= jnp.finfo(x.low.dtype).maxexp
        return (low, high) if wider and same_range else _widened(low, high)
    limit = 2.0 ** (_bits(low.dtype) - is_signed(low.dtype)) * (1 - 2.0**-6)
    sizes = (jnp.abs(a.astype(jnp.float32)) for a in (x.low, x.high))
    fits = reduce(operator.and_, (size < limit for size in sizes))
    if not is_signed(low.dtype):
        fits &= x.low >= 0
    return where_proven(fits, low, high)


RULES: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "neg": _neg,
    "abs": _abs,
    "square": _square,
    "integer_pow": _integer_pow,
    "div": partial(divide, floor=False),
    "rem": partial(remainder, floor=False),
    "shift_left": _shift_left,
    "shift_right_logical": partial(_shift_right, logical=True),
    "shift_right_arithmetic": partial(_shift_right, logical=False),
    "and": partial(_bitwise, operation=lax.bitwise_and),
    "or": partial(_bitwise, operation=lax.bitwise_or),
    "xor": partial(_bitwise, operation=lax.bitwise_xor),
    "not": _not,
    "lt": _lt,
    "le": _le,
    "gt": lambda x, y: _lt(y, x),
    "ge": lambda x, y: _le(y, x),
    "eq": _eq,
    "ne": _ne,
    "select_n": select,
    "convert_element_type": _convert,
}
