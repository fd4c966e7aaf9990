"""Reading and writing at run-time positions: gathers, scatters, dynamic slices.

What is read is clamped or filled as JAX does at the logical size; padding among the
starts, whatever it says, becomes padding of the result. What is written leaves no trace
of padding: windows that only padding asked for are dropped, and of a window that ends
in padding the valid part is written. All others keep their order, so the last write to
a place is the last one that JAX makes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core.dims import Size

from .interpreter import run
from .layouts import Bucket, Padded, product
from .positions import Windows, located, overwritten, packed, reachable, read
from .rules import bind, refuse, rule
from .selections import (
    Selection,
    Starts,
    agreed,
    axes_of_windows,
    both,
    by_rows,
    columns,
    gather_numbers,
    int32,
    moved,
    one_window,
    pairs,
)


_CLIP = lax.GatherScatterMode.CLIP
_DROP = lax.GatherScatterMode.FILL_OR_DROP
_INSIDE = lax.GatherScatterMode.PROMISE_IN_BOUNDS


# --- reading --------------------------------------------------------------------------


@rule("gather")
def gather(bucket: Bucket, eqn: Any, x: Padded, indices: Padded) -> Padded:
    """Windows from starts that are clamped, or found outside, at the logical size."""
    numbers, mode = gather_numbers(eqn.params["dimension_numbers"]), eqn.params["mode"]
    if mode not in (_CLIP, _DROP, _INSIDE):
        raise refuse(eqn, f"JAX itself lowers no gather of mode {mode.name}")
    groups = [((0, axis), (1, i)) for axis, i in pairs(numbers)]
    indices = bucket.packed(indices, indices.rank - 1)
    x, indices = agreed(bucket, (x, indices), groups)
    sizes = tuple(bucket.size(n) for n in eqn.params["slice_sizes"])
    selection = Selection(bucket, x, numbers, sizes, indices.axes[:-1], mode is _DROP)
    if selection.is_plain:
        return _gathered(eqn, selection, indices)
    starts, inside = moved(selection, columns(indices, numbers, wraps=selection.drops))
    windows = located(reachable(selection), starts)
    data = _if_any(selection, read(windows))
    if inside is not None:
        value = eqn.params["fill_value"]
        value = bucket.scalar(value) if isinstance(value, Size) else value
        outside = lax.full_like(data, value)
        data = lax.select(windows.everywhere(inside), data, outside)
    return Padded(data, windows.axes)


def _gathered(eqn: Any, selection: Selection, indices: Padded) -> Padded:
    """The same gather, where no window starts along an axis with padding."""
    windows = located(selection, dict.fromkeys(selection.numbers.start_index_map))
    if 0 in windows.shape:
        return Padded(lax.full(windows.shape, 0, windows.data.dtype), windows.axes)
    data = bind(
        eqn,
        windows.data,
        indices.data,
        dimension_numbers=windows.numbers,
        slice_sizes=windows.lengths,
        indices_are_sorted=eqn.params["indices_are_sorted"] and indices.is_exact,
    )
    return Padded(data, windows.axes)


@rule("dynamic_slice")
def dynamic_slice(bucket: Bucket, eqn: Any, x: Padded, *starts: Padded) -> Padded:
    """One window, clamped at the logical size."""
    sizes = tuple(bucket.size(n) for n in eqn.params["slice_sizes"])
    selection = Selection(bucket, x, one_window(x.rank), sizes, (), False)
    found, _ = moved(selection, _scalars(starts))
    windows = located(reachable(selection), found)
    return Padded(_if_any(selection, read(windows)), windows.axes)


def _fits(selection: Selection) -> Any:
    """Whether an array that may be empty is as long as a window; None where it is."""
    bucket, fits = selection.bucket, None
    for axis in selection.parts:
        size, needed = selection.size(axis), selection.sizes[axis]
        if bucket.may_be_empty(size):
            fits = both(fits, lax.ge(bucket.scalar(size), bucket.scalar(needed)))
    return fits


def _if_any(selection: Selection, data: Any) -> Any:
    """Windows of an array that may be empty: where it is, what JAX fills with."""
    fits = _fits(selection)
    if fits is None or jnp.issubdtype(data.dtype, jax.dtypes.extended):
        return data
    nothing = lax.full_like(data, _nothing(data.dtype))
    return lax.select(lax.broadcast(fits, data.shape), data, nothing)


def _nothing(dtype: Any) -> Any:
    """What JAX reads outside of an array in the mode "fill"."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return jnp.iinfo(dtype).min
    return True if dtype == jnp.bool_ else jnp.iinfo(dtype).max


def _scalars(starts: tuple[Padded, ...]) -> Starts:
    return {axis: int32(start.data) for axis, start in enumerate(starts)}


# --- writing --------------------------------------------------------------------------


@rule("scatter", *(f"scatter-{kind}" for kind in ("add", "sub", "mul", "min", "max")))
def scatter(
    bucket: Bucket, eqn: Any, x: Padded, indices: Padded, updates: Padded
) -> Padded:
    """The valid part of those windows that somebody valid asked for."""
    numbers = gather_numbers(eqn.params["dimension_numbers"])
    arrays = (x, bucket.packed(indices, indices.rank - 1), updates)
    x, indices, updates = agreed(bucket, arrays, _meetings(numbers, updates.rank))
    drops = eqn.params["mode"] is not _CLIP
    selection = _writing(bucket, x, numbers, indices.axes[:-1], updates, drops)
    if 0 in updates.data.shape or _is_always_too_long(selection):
        return Padded(x.data, x.axes)
    if selection.is_plain and selection.asked is None:
        return _scattered(eqn, selection, indices, updates)
    starts = columns(indices, numbers)
    if selection.cut and not selection.is_shared:
        written = _rewritten(selection, starts, updates, _combination(eqn))
    else:
        written = _scattered_around(eqn, selection, starts, updates)
    return _if_it_fits(selection, written)


def _if_it_fits(selection: Selection, written: Padded) -> Padded:
    """What was written; the operand as it was, if it is shorter than a window.

    Then nothing was read either, and the derivative of that is 0.
    """
    if (fits := _fits(selection)) is None:
        return written
    old = selection.bucket.arranged(selection.operand, written.axes).data
    data = lax.select(lax.broadcast(fits, old.shape), written.data, old)
    return Padded(data, written.axes)


@rule("dynamic_update_slice")
def dynamic_update_slice(
    bucket: Bucket, eqn: Any, x: Padded, update: Padded, *starts: Padded
) -> Padded:
    """One window, clamped at the logical size; its valid part is written."""
    selection = _writing(bucket, x, one_window(x.rank), (), update, drops=False)
    if 0 in update.data.shape or _is_always_too_long(selection):
        return Padded(x.data, x.axes)
    written = _updated(selection, update, _scalars(starts))
    return _if_it_fits(selection, written)


def _updated(selection: Selection, update: Padded, starts: Starts) -> Padded:
    """The operand with one window overwritten."""
    if selection.cut:
        return _rewritten(selection, starts, update, _second)
    found, _ = moved(selection, starts)
    selection = packed(selection)
    windows = located(selection, found)
    update = selection.bucket.arranged(update, windows.axes)
    return Padded(overwritten(windows, update.data), selection.operand.axes)


def _is_always_too_long(selection: Selection) -> bool:
    """Whether no array of the bucket has the length of a window."""
    size, sizes, length = selection.size, selection.sizes, selection.bucket.length
    return any(
        isinstance(sizes[axis], int) and length(size(axis)) < sizes[axis]
        for axis in selection.parts
    )


def _meetings(numbers: Any, rank: int) -> list[list[tuple[int, int]]]:
    """The axes of operand (0), indices (1) and updates (2) that run together."""
    batch = [i for i in range(rank) if i not in numbers.offset_dims]
    groups = [[(1, i), (2, axis)] for i, axis in enumerate(batch)]
    for axis, i in pairs(numbers):
        groups[i].append((0, axis))
    return groups


def _writing(
    bucket: Bucket, x: Padded, numbers: Any, batch: Any, updates: Padded, drops: bool
) -> Selection:
    """Windows as long as the updates."""
    sizes: list[Any] = [1] * x.rank
    for axis, i in axes_of_windows(numbers, x.rank).items():
        sizes[axis] = bucket.size(product(updates.axes[i]))
    return Selection(bucket, x, numbers, tuple(sizes), batch, drops)


def _scattered(
    eqn: Any, selection: Selection, indices: Padded, updates: Padded
) -> Padded:
    """The same scatter, where no window starts in, or along an axis with, padding."""
    windows = located(selection, dict.fromkeys(selection.numbers.start_index_map))
    data = bind(
        eqn,
        windows.data,
        indices.data,
        selection.bucket.arranged(updates, windows.axes).data,
        dimension_numbers=lax.ScatterDimensionNumbers(*windows.numbers),
        indices_are_sorted=eqn.params["indices_are_sorted"] and indices.is_exact,
    )
    return Padded(data, selection.operand.axes)


def _scattered_around(
    eqn: Any, selection: Selection, starts: Starts, updates: Padded
) -> Padded:
    """A scatter that drops what starts at -1."""
    starts, inside = moved(selection, starts)
    if selection.cut:
        selection, starts, inside, updates = by_rows(selection, starts, inside, updates)
    selection = packed(selection)
    windows = located(selection, starts)
    kept = both(selection.asked, inside)
    windows = windows if kept is None else _with_dropped(windows, kept)
    data = bind(
        eqn,
        windows.data,
        windows.vectors,
        selection.bucket.arranged(updates, windows.axes).data,
        dimension_numbers=lax.ScatterDimensionNumbers(*windows.numbers),
        indices_are_sorted=False,
        mode=_DROP,
    )
    x = selection.operand
    return Padded(lax.reshape(data, x.data.shape), x.axes)


def _with_dropped(windows: Windows, kept: Any) -> Windows:
    """Windows that are not kept start at -1, if need be along an axis of size 1."""
    if not windows.starts:
        data, place = windows.data, windows.data.ndim
        numbers = windows.numbers._replace(
            collapsed_slice_dims=(*windows.numbers.collapsed_slice_dims, place),
            start_index_map=(place,),
        )
        zero = lax.full(kept.shape, 0, np.int32)
        data = lax.expand_dims(data, [place])
        changes = {"data": data, "numbers": numbers, "starts": (zero,)}
        windows = dataclasses.replace(windows, **changes)
    first, *rest = windows.starts
    first = lax.select(kept, first, lax.full_like(first, -1))
    return dataclasses.replace(windows, starts=(first, *rest))


def _rewritten(
    selection: Selection,
    starts: Starts,
    updates: Padded,
    combine: Callable[[Any, Any], Any],
) -> Padded:
    """Windows that do not meet are read, changed where they are valid, and put back."""
    bucket, (starts, inside) = selection.bucket, moved(selection, starts)
    selection = packed(selection)
    windows = located(reachable(selection), starts)
    old = read(windows)
    new = combine(old, bucket.arranged(updates, windows.axes).data)
    kept = None if inside is None else windows.everywhere(inside)
    kept = both(kept, bucket.valid(windows.axes))
    data = overwritten(windows, lax.select(kept, new, old))
    shape = selection.operand.data.shape
    data = lax.slice(data, (0,) * len(shape), shape)
    return Padded(data, selection.operand.axes)


def _combination(eqn: Any) -> Callable[[Any, Any], Any]:
    """What a scatter makes of old elements and new ones."""
    kind = eqn.primitive.name.removeprefix("scatter").removeprefix("-")
    if kind:
        return getattr(lax, kind)
    return _second if eqn.params["update_jaxpr"] is None else _applied(eqn)


def _second(old: Any, new: Any) -> Any:
    return new


def _applied(eqn: Any) -> Callable[[Any, Any], Any]:
    """The program of two scalars in a scatter, on arrays."""
    program, consts = eqn.params["update_jaxpr"], eqn.params["update_consts"]
    bucket = Bucket({}, {})

    def one(old: Any, new: Any) -> Any:
        scalars = [bucket.exact(old), bucket.exact(new)]
        return run(bucket, program, consts, scalars)[0].data

    def apply(old: Any, new: Any) -> Any:
        return lax.reshape(jax.vmap(one)(old.ravel(), new.ravel()), old.shape)

    return apply
