"""Arrays looked up at intervals of indices: their extremes over these.

    table, start in [first, last]    ->    min and max of table[first], ..., table[last]

From windows of 1, 2, 4, ... elements, n log n comparisons for all lookups together.
Exact for every array; ids of packed documents, which ascend, give narrow bounds.

References:
    Bender and Farach-Colton, "The LCA problem revisited", 2000, section 3.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core.manual_axes import vary, varying_axes

from .interval_rules import Interval, Pair, is_signed, known, where_proven


def _dynamic_slice(eqn: Any, table: Interval, *starts: Interval) -> Pair | None:
    return _look_up(table, starts, eqn.params["slice_sizes"], clamped=True)


def _gather(eqn: Any, table: Interval, index: Interval) -> Pair | None:
    """One slice of an array at a vector of indices."""
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    if index.low.ndim != 1 or numbers.operand_batching_dims:
        return None
    zero = np.zeros((), np.int32)
    starts = [known(zero)] * len(table.low.shape)
    for axis, part in zip(numbers.start_index_map, _components(index), strict=True):
        starts[axis] = part
    clamped = mode == lax.GatherScatterMode.CLIP
    pair = _look_up(table, starts, eqn.params["slice_sizes"], clamped=clamped)
    if pair is None:
        return None
    collapsed = numbers.collapsed_slice_dims
    return lax.squeeze(pair[0], collapsed), lax.squeeze(pair[1], collapsed)


def _components(index: Interval) -> list[Interval]:
    """A vector of indices as scalars."""
    parts = index.parts
    if parts is None:
        places = range(index.low.shape[0])
        parts = [
            _map(lambda x, i=i: lax.slice(x, (i,), (i + 1,)), index) for i in places
        ]
    return [_map(lambda x: lax.squeeze(x, (0,)), part) for part in parts]


def _map(function: Callable[[Any], Any], x: Interval) -> Interval:
    low = function(x.low)
    return Interval(low, low if x.known else function(x.high), x.varies)


def _look_up(
    table: Interval, starts: Sequence[Interval], sizes: Sequence[Any], *, clamped: bool
) -> Pair | None:
    """A slice whose start is an interval along some axes.

    Along one such axis: the extremes over it. Along several: known only where each of
    these intervals is a single number.
    """
    lengths = table.low.shape
    if any(not _indexes(x.low.dtype) for x in starts):
        return None
    free = [
        i
        for i, (start, n, size) in enumerate(zip(starts, lengths, sizes, strict=True))
        if not start.known and n != size
    ]
    if any(sizes[i] != 1 for i in free):
        return None
    places = [_places(*x) for x in zip(starts, lengths, sizes, strict=True)]
    fits: Any = True if clamped else _all(inside for *_, inside in places)
    if len(free) == 1:
        low, high = _extremes(table, places, sizes, free[0])
    else:
        fits &= _all(places[i][0] == places[i][1] for i in free)
        low, high = (_slice(x, places, sizes) for x in (table.low, table.high))
    return where_proven(fits, low, high)


def _all(conditions: Iterable[Any]) -> Any:
    return reduce(operator.and_, conditions, jnp.ones((), bool))


def _indexes(dtype: Any) -> bool:
    """Index dtypes whose numbers keep their meaning when clamped."""
    return is_signed(dtype) or (
        jnp.issubdtype(dtype, jnp.unsignedinteger) and dtype.itemsize < 4
    )


def _places(start: Interval, length: Any, size: Any) -> tuple[Any, Any, Any]:
    """First and last start of a slice, clamped into the array, and whether inside."""
    bounds = (start.low, start.high)
    if start.low.dtype.itemsize < 4:
        bounds = tuple(x.astype(jnp.int32) for x in bounds)
    last = length - size
    first, final = (jnp.clip(x, 0, last).astype(jnp.int32) for x in bounds)
    return first, final, (bounds[0] >= 0) & (bounds[1] <= last)


def _slice(x: Any, places: Sequence[Any], sizes: Sequence[Any]) -> Any:
    firsts = [first for first, *_ in places]
    x, firsts = vary((x, firsts), varying_axes(x, firsts))
    return lax.dynamic_slice(x, firsts, sizes)


def _extremes(
    table: Interval, places: Sequence[Any], sizes: Sequence[Any], axis: int
) -> Pair:
    """Minimum and maximum of slices whose start runs along one axis."""
    first, last, _ = places[axis]
    whole = list(sizes)
    whole[axis] = table.low.shape[axis]
    starts = list(places)
    starts[axis] = (jnp.zeros_like(first),)
    lows, highs = (
        jnp.moveaxis(_slice(x, starts, whole), axis, 0) for x in (table.low, table.high)
    )
    low, high = _range_extremes(lows, highs, first, last)
    return jnp.reshape(low, sizes), jnp.reshape(high, sizes)


def _range_extremes(lows: Any, highs: Any, first: Any, last: Any) -> Pair:
    """Minimum of `lows` and maximum of `highs` from `first` to `last`, on axis 0.

    A range is the union of two windows whose width is a power of two. The windows of
    one width are made of those of half the width, and only these are kept.
    """
    length = lows.shape[0]
    level = 31 - lax.clz(last - first + 1)

    def at(x: Any, i: Any) -> Any:
        return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)

    def widen(j: Any, state: Any) -> Any:
        lows, highs, low, high = state
        width = lax.shift_left(jnp.int32(1), j)
        second = last + 1 - jnp.minimum(width, last - first + 1)
        least = jnp.minimum(at(lows, first), at(lows, second))
        most = jnp.maximum(at(highs, first), at(highs, second))
        low, high = (
            jnp.where(level == j, new, old) for new, old in ((least, low), (most, high))
        )
        lows = jnp.minimum(lows, _shifted(lows, width))
        return lows, jnp.maximum(highs, _shifted(highs, width)), low, high

    static = isinstance(length, int)
    size = jnp.asarray(length).astype(jnp.int32)
    levels = jnp.int32(length.bit_length()) if static else 32 - lax.clz(size)
    state = (lows, highs, at(lows, first), at(highs, first))
    state = vary(state, varying_axes(state, first, last))
    return lax.fori_loop(jnp.int32(0), levels, widen, state)[2:]


def _shifted(x: Any, by: Any) -> Any:
    """`x` from place `by` on, continued with its last element."""
    continued = jnp.concatenate([x, jnp.broadcast_to(x[-1:], x.shape)])
    return lax.dynamic_slice_in_dim(continued, by, x.shape[0])


LOOKUPS: dict[str, Callable[..., Any]] = {
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
}
