"""Windows that slide: pooling and its derivatives.

How a window fits an axis in memory is in `sliding.py`. A window of symbolic shape takes
one of two ways: where it is one window, all of the axis, the padding is seen but holds
the identity; any other is written out, element by element.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core.dims import Size

from .interpreter import run
from .layouts import Bucket, Padded, choose
from .reductions import IDENTITIES, identity_of
from .rules import bind, rule, sizes_of
from .sliding import (
    Window,
    extremes,
    fit_all,
    is_empty,
    is_whole,
    packed_under,
    padded,
    result_axes,
    seen,
    sees_padding,
    windows_of,
)


def _nothing(bucket: Bucket, eqn: Any) -> list[Padded]:
    """The results, where they have no elements."""
    avals = [v.aval for v in eqn.outvars]
    shapes = [bucket.shape(a.shape) for a in avals]
    arrays = [lax.full(s, 0, a.dtype) for s, a in zip(shapes, avals, strict=True)]
    return [bucket.simple(x, a.shape) for x, a in zip(arrays, avals, strict=True)]


# --- reductions -----------------------------------------------------------------------


_REDUCE = {
    "sum": lambda x, axis: lax.reduce(x, x.dtype.type(0), lax.add, (axis,)),
    "max": lambda x, axis: jnp.max(x, axis),
    "min": lambda x, axis: jnp.min(x, axis),
}


@rule(*(f"reduce_window_{kind}" for kind in _REDUCE))
def reduce_window_monoid(bucket: Bucket, eqn: Any, x: Padded) -> Sequence[Padded]:
    """A window of symbolic shape is gathered; all others slide as they are."""
    kind = eqn.primitive.name.removeprefix("reduce_window_")
    fill = identity_of(eqn, kind, x.dtype)
    windows = windows_of(bucket, eqn, x, sizes_of(eqn.outvars[0]))
    if is_empty(bucket, windows):
        return _nothing(bucket, eqn)
    x = packed_under(bucket, x, windows)
    for axis, window in enumerate(windows):
        if window is not None and window.symbolic and not is_whole(x, axis, window):
            x = _gathered(bucket, x, axis, window, kind)
            windows[axis] = None
    if sees_padding(bucket, x, windows):
        x = bucket.filled(x, fill)
    (data,), params = fit_all(bucket, eqn, x, windows, [(x.data, fill)])
    return [Padded(bind(eqn, data, **params), result_axes(x, windows))]


def _gathered(
    bucket: Bucket, x: Padded, axis: int, window: Window, kind: str
) -> Padded:
    """Reduced over windows whose shape is known at run time: each is written out."""
    (place,), (size,) = x.places(axis), x.axes[axis]
    firsts = lax.iota(jnp.int32, bucket.length(window.count))
    length = bucket.length(window.size)
    index, taken = seen(bucket, window, size, firsts, length)
    data = jnp.take(x.data, index, axis=place, mode="clip")
    mask = lax.broadcast_in_dim(taken, data.shape, (place, place + 1))
    identity = lax.full_like(data, IDENTITIES[kind](x.dtype))
    data = _REDUCE[kind](choose(mask, data, identity), place + 1)
    axes = (*x.axes[:axis], (window.count,), *x.axes[axis + 1 :])
    return Padded(data, axes)


@rule("reduce_window")
def reduce_window(bucket: Bucket, eqn: Any, *operands: Padded) -> Sequence[Padded]:
    """By any function: padding is marked and skipped, as XLA skips its own."""
    half = len(operands) // 2
    starts = [x.data for x in operands[half:]]
    windows = windows_of(bucket, eqn, operands[0], sizes_of(eqn.outvars[0]))
    if is_empty(bucket, windows):
        return _nothing(bucket, eqn)
    xs = bucket.aligned([packed_under(bucket, x, windows) for x in operands[:half]])
    pairs = [(x.data, start) for x, start in zip(xs, starts, strict=True)]
    if not sees_padding(bucket, xs[0], windows) and not _moves(windows):
        data, params = fit_all(bucket, eqn, xs[0], windows, pairs)
        results = bind(eqn, *data, *starts, **params)
    else:
        function = functools.partial(_call, bucket, eqn)
        results = _passing_over(bucket, eqn, xs[0], windows, pairs, function)
    axes = result_axes(xs[0], windows)
    return [Padded(r, axes) for r in results]


def _moves(windows: Sequence[Window | None]) -> bool:
    return any(w is not None and isinstance(w.low, Size) for w in windows)


def _call(bucket: Bucket, eqn: Any, a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    """The function that an equation reduces by."""
    jaxpr, consts = eqn.params["jaxpr"], eqn.params["consts"]
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    operands = [bucket.exact(x) for x in (*a, *b)]
    return [x.data for x in run(bucket, jaxpr, consts, operands)]


def _passing_over(
    bucket: Bucket,
    eqn: Any,
    x: Padded,
    windows: Sequence[Window | None],
    pairs: Sequence[tuple[Any, Any]],
    function: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
) -> Sequence[Any]:
    """Windows reduced by a function of valid elements only, in order.

    XLA skips the padding of a window (it does not reduce its starting value once more,
    measured on CPU and GPU), so the padding of the array, seen by a window, carries a
    mark and is skipped likewise.
    """
    mask = bucket.valid(x.axes)
    mask = lax.full(x.data.shape, True) if mask is None else mask
    data, params = fit_all(bucket, eqn, x, windows, [(mask, False), *pairs])

    def skip(a: Sequence[Any], b: Sequence[Any]) -> Sequence[Any]:
        (is_a, *a), (is_b, *b) = a, b
        joined = function(a, b)
        picked = [
            lax.select(is_b, lax.select(is_a, c, y), x)
            for x, y, c in zip(a, b, joined, strict=True)
        ]
        return (is_a | is_b, *picked)

    starts = (jnp.asarray(True), *(jnp.asarray(s, d.dtype) for d, s in pairs))
    return lax.reduce_window(tuple(data), starts, skip, **params)[1:]


# --- derivatives of max and min -------------------------------------------------------


@rule("select_and_gather_add")
def select_and_gather_add(
    bucket: Bucket, eqn: Any, tangents: Padded, x: Padded
) -> Sequence[Padded]:
    """The tangent of each window's first best element."""
    windows = windows_of(bucket, eqn, x, sizes_of(eqn.outvars[0]))
    if is_empty(bucket, windows):
        return _nothing(bucket, eqn)
    pair = [packed_under(bucket, y, windows) for y in (tangents, x)]
    tangents, x = bucket.aligned(pair)
    worst = _worst(eqn, x.dtype)
    pairs = [(x.data, worst), (tangents.data, tangents.dtype.type(0))]

    def choose(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        which = eqn.params["select_prim"].bind(a[0], b[0])
        return [lax.select(which, *c) for c in zip(a, b, strict=True)]

    if sees_padding(bucket, x, windows) or _moves(windows):
        data = _passing_over(bucket, eqn, x, windows, pairs, choose)[1]
    else:
        (values, changes), params = fit_all(bucket, eqn, x, windows, pairs)
        data = bind(eqn, changes, values, **params)
    return [Padded(data, result_axes(x, windows))]


def _worst(eqn: Any, dtype: Any) -> Any:
    """What is chosen last."""
    is_max = eqn.params["select_prim"].name == "ge"
    return identity_of(eqn, "max" if is_max else "min", dtype)


@rule("select_and_scatter_add")
def select_and_scatter_add(
    bucket: Bucket, eqn: Any, source: Padded, x: Padded
) -> Sequence[Padded]:
    """Each valid source goes to its window's first best element, all others are 0."""
    windows = windows_of(bucket, eqn, x, sizes_of(eqn.invars[0]))
    if is_empty(bucket, windows):
        zeros = lax.full_like(x.data, 0)
        return [Padded(zeros, x.axes)]
    source, x = _met(bucket, source, x, windows)
    worst = _worst(eqn, x.dtype)
    x = bucket.filled(x, worst)
    source = bucket.filled(source, source.dtype.type(0).item())
    # JAX cannot do this with a low padding below 0, so there is none.
    (data,), params = fit_all(bucket, eqn, x, windows, [(x.data, worst)], at_least=0)
    data = bind(eqn, source.data, data, **params)
    for axis, window in enumerate(windows):
        if window is not None:
            (place,) = x.places(axis)
            data = _put_back(bucket, data, place, window.low, x.data.shape[place])
    return [Padded(data, x.axes)]


def _met(
    bucket: Bucket, source: Padded, x: Padded, windows: Sequence[Window | None]
) -> tuple[Padded, Padded]:
    """Source and array with the same factors wherever no window moves."""
    source, x = (packed_under(bucket, y, windows) for y in (source, x))
    of_source, of_x = list(source.axes), list(x.axes)
    for axis, window in enumerate(windows):
        if window is None:
            choices = [of_source[axis], of_x[axis]]
            of_source[axis] = of_x[axis] = bucket.common(choices)
    return bucket.arranged(source, of_source), bucket.arranged(x, of_x)


def _put_back(bucket: Bucket, data: Any, place: int, low: Any, length: int) -> Any:
    """An array that `fit` moved and cut, as long as it was; what was cut off got 0."""
    least, most = extremes(bucket, low, 0)
    missing = length + (most - least) - data.shape[place]
    data = padded(data, place, (0, missing, 0), 0)
    if not isinstance(low, Size):
        return data
    start = bucket.scalar(low) - np.int32(least)
    return lax.dynamic_slice_in_dim(data, start, length, place)
