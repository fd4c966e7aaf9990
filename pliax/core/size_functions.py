"""JAX's functions that ask for the value of a size, for sizes that have none yet.

JAX searches with as many steps as a size has bits, and shuffles in one round or more,
both fixed while it traces. Here the steps are counted at run time, and the rounds are a
question about the size, which leaves a guard. The results are JAX's, bit for bit.
"""

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._jax import (
    arange_by_size,
    axis_size_by_size,
    compare_types_by_size,
    concrete_by_size,
    count_in_int32,
    equiv_by_size,
    index_by_size,
    indices_by_size,
    iterate_by_size,
    look_into_arrays,
    loop_by_size,
    power_by_size,
    roll_by_size,
    scan_by_size,
    search_by_size,
    shuffle_by_size,
    sort_orders,
    split_by_size,
    squeeze_by_size,
    unique_by_size,
    weakly_typed_as,
    wrap_by_size,
)
from .associative_scans import scanned
from .callers import is_asked_by_jax, is_inside
from .conditions import is_one, is_unknown, state, statically_known_true
from .dims import LARGEST, Size, larger
from .other_traces import is_for_the_user
from .provenance import user_place
from .reals import Real
from .size_expressions import variables


@functools.partial(jax.jit, static_argnames=("side", "dtype"))
def searched(values: jax.Array, query: jax.Array, side: str, dtype: Any) -> jax.Array:
    """Where queries belong among sorted values: JAX's bisection, step by step.

    An interval of n values is halved ceil(log2(n + 1)) times, the bits of n.

    Args:
        values: sorted, of one axis with a symbolic size.
        query: of any shape.
        side: "left" or "right" of equal values.
        dtype: of the result, a signed integer.
    """
    (n,) = values.shape
    if statically_known_true(n == 0):  # which JAX asks, too
        return lax.full(query.shape, 0, dtype)
    is_before = sort_orders()["le" if side == "left" else "lt"]
    count = jnp.asarray(n, jnp.uint32)

    def halve(_: Any, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) // np.uint32(2)
        found = values.at[middle].get(mode="clip")
        left = is_before(query, found)
        return lax.select(left, low, middle), lax.select(left, middle, high)

    first = lax.full(query.shape, 0, jnp.uint32)
    ends = (first, lax.broadcast(count, query.shape))
    steps = np.int32(32) - lax.convert_element_type(lax.clz(count), jnp.int32)
    return lax.fori_loop(0, steps, halve, ends)[1].astype(dtype)


def shuffled(key: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """The elements of an array in random order: sorted by random numbers, in rounds.

    n elements take ceil(3 log(n) / log(2^32 - 1)) rounds in JAX (see there). Up to
    1,625 that is one (of one element JAX makes none, which is as good). Where only the
    device knows how many elements there are, it takes the others or not.

    Args:
        key: a random key.
        x: an array of symbolic size.
        axis: along which it is shuffled.
    """

    def one(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        key, subkey = jax.random.split(state[0])
        order = jax.random.bits(subkey, state[1].shape, jnp.uint32)
        return key, lax.sort_key_val(order, state[1], axis)[1]

    found = one((key, x))
    for most in _MOST:
        is_wanted = x.size > most
        if is_unknown(is_wanted):
            found = lax.cond(is_wanted, one, lambda state: state, found)
        elif is_wanted:
            found = one(found)
    return found[1]


# As many elements as one round shuffles, and two: powers of 2^32 - 1 by thirds.
_MOST = (1625, 2642245)


def ranged(start: Any, stop: Any, step: Any, dtype: Any) -> jax.Array | None:
    """jnp.arange with floats among its arguments, or in a short float.

    JAX counts the elements by ceil((stop - start) / step) of floats. Where these are
    small multiples of powers of 2 nothing is rounded, and the count is a size.

    Returns:
        The array; None where JAX knows what to do, or nobody does.
    """
    numbers = [x for x in (start, stop, step) if x is not None]
    dtype = jax.dtypes.canonicalize_dtype(dtype or jnp.result_type(*numbers))
    is_short = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    has_floats = any(isinstance(x, float | Real) for x in numbers)
    ends: Any = [_ratio(x) for x in (start, stop, 1 if step is None else step)]
    if not (has_floats or is_short) or None in ends or isinstance(start, Real):
        return None
    (a, b), (c, d), (e, f) = ends
    if isinstance(e, Size) or e == 0:
        return None
    sign = 1 if e > 0 else -1
    distance, gap = sign * (c * b - a * d) * f, sign * b * d * e
    size = larger(0, distance + gap - 1) // gap
    if step is not None:
        working = jnp.dtype("float32") if is_short else dtype
        rest = jnp.asarray(step, working) * lax.iota(working, size)
        return (jnp.asarray(start, working) + rest).astype(dtype)
    rest = lax.iota(dtype, size)
    is_zero = not isinstance(start, Size) and start == 0
    return rest if is_zero else jnp.asarray(start, dtype) + rest


_DENOMINATORS = 2**20  # of floats that are computed with exactly


def _ratio(x: Any) -> tuple[Any, int] | None:
    """A number as a quotient with a power of 2 below, if it is one of small numbers."""
    if isinstance(x, Size):
        return x, 1
    if isinstance(x, Real):
        parts: Any = x.quotient
        is_exact = parts and isinstance(parts[1], int) and parts[1].bit_count() == 1
        return parts if is_exact and parts[1] <= _DENOMINATORS else None
    if type(x) not in (int, float, np.float64) or not math.isfinite(x):
        return None
    a, b = x.as_integer_ratio()
    return (a, b) if abs(a) < 2**31 and b <= _DENOMINATORS else None


def looped(
    lower: Any, upper: Any, body: Callable[[Any, Any], Any], init: Any, unroll: int
) -> tuple[Any] | None:
    """`lax.fori_loop` up to a size as a scan, which has derivatives, as JAX makes one.

    Returns:
        The result; None where the ends are a Python integer's at run time: they are no
        integers to `jax.jit` either, and nothing then depends on a bucket.
    """
    lower, upper = (x.item() if hasattr(type(x), "item") else x for x in (lower, upper))
    length: Any = larger(upper - lower, 0)
    known = (lower if isinstance(lower, Size) else upper).assumptions.known
    if any(known.symbols[name].offset for name in variables(length)):
        return None

    def step(state: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
        i, x = state
        return (i + 1, body(i, x)), None

    ((_, result), _) = lax.scan(step, (lower, init), None, length, unroll=unroll)
    return (result,)


def is_born(n: Size) -> bool:
    """Whether only the device knows how long an axis is."""
    return not variables(n) <= n.assumptions.known.hints.keys()


def may_be_empty(n: Size) -> bool:
    """Whether only the device knows if an axis has elements."""
    return is_unknown(n == 0)


def require_some(n: Size, text: str) -> None:
    """Asserts at run time that an axis has elements, where only the device knows."""
    asked: Any = n >= 1
    if is_unknown(asked):
        place = user_place(sys._getframe())
        state(asked, f"{text}\n  at {place}", place)


def is_empty(n: Any) -> bool:
    """Whether an axis can be seen to have no elements, for all sizes."""
    return statically_known_true(n <= 0)


def constant(indices: Any, n: Size) -> jax.Array:
    """The size of an axis in the type of its indices, which holds it under a guard."""
    dtype = jax.dtypes.result_type(indices)
    n.assumptions.values.fits_in(n, dtype, sys._getframe())
    return lax.convert_element_type(n.dimension_as_value(), dtype)


def powered(x: Any, n: Size) -> jax.Array:
    """Integers to the power of a size, by squares; they wrap where they overflow.

    JAX reads 6 bits of an exponent that is an array: 64 is 0 to it. Of an integer, as
    which a size is here, it multiplies as often as there are bits.
    """
    if not n >= 0:
        return jnp.power(x, n.__index__())  # JAX's error
    base = jnp.asarray(x)
    base = base.astype(jnp.int32) if base.dtype == bool else base
    exponent, power, square = n.dimension_as_value(), jnp.ones_like(base), base
    for bit in range(LARGEST.bit_length()):
        power = jnp.where((exponent >> bit) & 1 == 1, power * square, power)
        square = square * square
    return weakly_typed_as(power, base.aval)


def rows(n: Size) -> int:
    """How many rows an array has that somebody iterates over."""
    return n.assumptions.values.as_integer(n, "by iteration", sys._getframe())


def need_values(array: np.ndarray) -> None:
    """Asks for the values of sizes in an array of NumPy's that JAX computes with."""
    frame = sys._getframe(1)
    while is_inside(frame) and frame.f_back:
        frame = frame.f_back
    for x in array.flat:
        if isinstance(x, Size) and is_for_the_user(frame):
            x.assumptions.values.as_integer(x, "in an array of NumPy's", frame)


look_into_arrays(need_values)
search_by_size(Size, searched)
index_by_size(Size, constant)
count_in_int32(Size)
shuffle_by_size(Size, shuffled)
concrete_by_size(Size)
equiv_by_size(Size)
compare_types_by_size(Size, is_asked_by_jax)
squeeze_by_size(Size, is_one)
roll_by_size(Size, may_be_empty)
scan_by_size(Size, scanned)
loop_by_size(Size, looped)
arange_by_size(Size, ranged, Real)
axis_size_by_size(Size)
split_by_size(Size, is_born)
indices_by_size(Size)
wrap_by_size(Size)
power_by_size(Size, powered)
unique_by_size(Size, require_some, is_empty)
iterate_by_size(Size, rows)
