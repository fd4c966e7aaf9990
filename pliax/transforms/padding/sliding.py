"""Windows that slide along axes, and how they do so over longer ones in memory.

A window of w elements, d apart, moves in steps of s over an axis that has l places of
nothing in front (the low padding), elements b apart, and as much behind as it takes:

    result[o] = reduction over j < w of x[(o s + j d - l) / b]

The axis's own padding becomes such nothing: it holds the identity of the reduction. A
low padding that is known at run time only is made static by moving the elements.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core.dims import Size
from pliax.core.size_expressions import bounds, evaluate, variables

from .layouts import Bucket, Factors, Padded, product, same
from .reductions import same_size
from .rules import refuse


class Window(NamedTuple):
    """How a window moves along one logical axis; the letters are the module's.

    Attributes:
        size: w, how many elements it has.
        stride: s, by how many elements it moves.
        low: l, how many come before the first.
        base: b, how far apart the elements of the axis are.
        dilation: d, how far apart those of the window are.
        count: how many results there are.
    """

    size: Any
    stride: Any
    low: Any
    base: Any
    dilation: Any
    count: Any

    @property
    def symbolic(self) -> list[str]:
        """What of it is not a number, but for low and count."""
        rest = {k: v for k, v in self._asdict().items() if k not in ("low", "count")}
        return [f"{name} {n}" for name, n in rest.items() if isinstance(n, Size)]


def spread(count: int, step: int) -> int:
    """How many places elements `step` apart take up."""
    return (count - 1) * step + 1 if count else 0


class Fit(NamedTuple):
    """An array, and the static window that moves over one axis of it."""

    data: Any
    padding: tuple[int, int]
    base: int


def fit(
    bucket: Bucket,
    data: Any,
    place: int,
    window: Window,
    length: int,
    fill: Any,
    at_least: int | None = None,
) -> Fit:
    """The array and a padding with which a bucket's number of windows fits exactly.

    Args:
        bucket: The bucket.
        data: A physical array whose padding holds the identity.
        place: The axis the window moves along.
        window: The window; stride and dilations are numbers.
        length: How many elements the window has in memory, at least 1.
        fill: The identity.
        at_least: What a symbolic low padding is known to be, beyond its bounds.
    """
    low, base = window.low, window.base
    if isinstance(low, Size):
        least, most = extremes(bucket, low, at_least)
        if least < most:
            data, base = padded(data, place, (0, 0, base - 1), fill), 1
            data = _moved(bucket, data, place, low, (least, most), fill)
        low = least
    reach = (bucket.length(window.count) - 1) * window.stride - low
    reach += spread(length, window.dilation)  # the elements that a window sees
    kept = min(data.shape[place], max((reach - 1) // base + 1, 1))
    data = lax.slice_in_dim(data, 0, kept, 1, place)
    return Fit(data, (low, reach - spread(kept, base)), base)


def extremes(bucket: Bucket, low: Any, at_least: int | None = None) -> tuple[int, int]:
    """The least and the most that a low padding can be.

    "SAME" with strides makes (2 * ceil(t / 2) - t + 1) // 2, which is 0 or 1: all its
    values are tried, since an interval for each t would be as wide as that of t.
    """
    least, most = bounds(low, bucket.ranges)
    names = variables(low)
    if len(names) == 1:
        (name,) = names
        first, last = bucket.ranges[name]
        if last - first < _FEW:
            tried = {name: np.arange(first, last + 1)}
            values = evaluate(low, tried, {"max": np.maximum, "min": np.minimum})
            least, most = np.min(values), np.max(values)
    if at_least is not None:
        least, most = max(least, at_least), max(most, at_least)
    return int(least), int(most)


_FEW = 1 << 16


def _moved(
    bucket: Bucket,
    data: Any,
    place: int,
    low: Size,
    extremes: tuple[int, int],
    fill: Any,
) -> Any:
    """The elements as many places further on as low exceeds the least it can be."""
    least, most = extremes
    room, length = most - least, data.shape[place] + most - least
    data = padded(data, place, (room, room, 0), fill)
    start = np.int32(most) - bucket.scalar(low)
    return lax.dynamic_slice_in_dim(data, start, length, place)


def seen(
    bucket: Bucket, window: Window, size: Any, firsts: Any, length: int
) -> tuple[Any, Any]:
    """Which elements each window sees at each of its places, and whether there is one.

    Args:
        bucket: The bucket.
        window: The window; all of it may be symbolic.
        size: How many elements the axis has.
        firsts: Which windows, o in the formula: a vector.
        length: How many places a window has in memory.
    """
    shape = (*firsts.shape, length)
    width, step, low, base, apart, limit = (
        lax.broadcast(jnp.asarray(bucket.scalar(n)), shape) for n in (*window[:5], size)
    )
    o = lax.broadcast_in_dim(firsts, shape, (0,))
    j = lax.broadcasted_iota(jnp.int32, shape, 1)
    at = o * step + j * apart - low
    index = lax.div(at, base)
    inside = (at >= 0) & (index < limit) & (lax.rem(at, base) == 0)
    return index, inside & (j < width)


def padded(data: Any, place: int, config: tuple[int, int, int], fill: Any) -> Any:
    """`lax.pad` along one axis: before, behind and between its elements."""
    if not any(config):
        return data
    value = lax.convert_element_type(fill, data.dtype)
    configs = [config if i == place else (0, 0, 0) for i in range(data.ndim)]
    return lax.pad(data, value, configs)


# --- windows of an equation -----------------------------------------------------------


_ONES = {"window_strides": 1, "base_dilation": 1, "window_dilation": 1}


def windows_of(
    bucket: Bucket, eqn: Any, x: Padded, counts: Sequence[Any]
) -> list[Window | None]:
    """The window of each axis, simplified; None where it takes single elements."""
    given = {k: eqn.params.get(k, (1,) * x.rank) for k in _ONES}
    parts = zip(
        eqn.params["window_dimensions"],
        given["window_strides"],
        [low for low, _ in eqn.params["padding"]],
        given["base_dilation"],
        given["window_dilation"],
        counts,
        strict=True,
    )
    sizes = [bucket.size(product(axes)) for axes in x.axes]
    windows = [Window(*map(bucket.size, part)) for part in parts]
    return [_simple(w, n) for w, n in zip(windows, sizes, strict=True)]


def _simple(window: Window, size: Any) -> Window | None:
    if same(window.count, 1):
        window = window._replace(stride=1)
    if same(window.size, 1):
        window = window._replace(dilation=1)
    is_still = all(map(same, window[:4], (1, 1, 0, 1))) and same(window.count, size)
    return None if is_still else window


def is_whole(x: Padded, axis: int, window: Window) -> bool:
    """Whether there is one window, and it is all of the axis."""
    (size,) = x.axes[axis]
    return same(window.size, size) and all(map(same, window[1:], (1, 0, 1, 1, 1)))


def _length(bucket: Bucket, eqn: Any, x: Padded, axis: int, window: Window) -> int:
    """How many elements a window has in memory."""
    if window.symbolic and not is_whole(x, axis, window):
        raise refuse(eqn, f"its window has {', '.join(window.symbolic)}")
    return bucket.length(window.size)


def packed_under(bucket: Bucket, x: Padded, windows: Sequence[Window | None]) -> Padded:
    """The array with one physical axis wherever a window moves."""
    for axis, window in enumerate(windows):
        x = x if window is None else bucket.packed(x, axis)
    return x


def sees_padding(bucket: Bucket, x: Padded, windows: Sequence[Window | None]) -> bool:
    """Whether a window can reach padding."""
    pairs = zip(x.axes, windows, strict=True)
    return any(w is not None and not same_size(bucket, axis) for axis, w in pairs)


def fit_all(
    bucket: Bucket,
    eqn: Any,
    x: Padded,
    windows: Sequence[Window | None],
    arrays: Sequence[tuple[Any, Any]],
    at_least: int | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """Arrays (with their fills) that lie like x, and the parameters of the windows."""
    params: dict[str, list[Any]] = {"window_dimensions": [], "padding": []}
    params |= {name: [] for name in _ONES if name in eqn.params}
    data = [array for array, _ in arrays]
    for axis, window in enumerate(windows):
        row = {"window_dimensions": 1, "padding": (0, 0), **_ONES}
        if window is not None:
            length = _length(bucket, eqn, x, axis, window)
            (place,) = x.places(axis)
            fits = [
                fit(bucket, d, place, window, length, fill, at_least)
                for d, (_, fill) in zip(data, arrays, strict=True)
            ]
            data = [f.data for f in fits]
            row = {
                "window_dimensions": length,
                "padding": fits[0].padding,
                "window_strides": window.stride,
                "base_dilation": fits[0].base,
                "window_dilation": window.dilation,
            }
        for name, column in params.items():
            column += [row[name]] * len(x.axes[axis])
    return data, {name: tuple(column) for name, column in params.items()}


def result_axes(x: Padded, windows: Sequence[Window | None]) -> tuple[Factors, ...]:
    """The axes of the result."""
    pairs = zip(x.axes, windows, strict=True)
    return tuple(axis if w is None else (w.count,) for axis, w in pairs)


def is_empty(bucket: Bucket, windows: Sequence[Window | None]) -> bool:
    """Whether there is no window at all, whatever the sizes are."""
    return any(w is not None and bucket.length(w.count) == 0 for w in windows)
