"""Windows on physical axes: where they lie, how they are read and written."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from .layouts import Bucket, Factors, Padded, same
from .selections import Selection, Starts, axes_of_windows, places


_DROP = lax.GatherScatterMode.FILL_OR_DROP
_INSIDE = lax.GatherScatterMode.PROMISE_IN_BOUNDS


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """Windows on physical axes.

    Attributes:
        data: what they are windows of.
        numbers: of the physical gather that reads them.
        lengths: how long a window is along each physical axis.
        axes: the logical axes of all windows, in gather's order.
        shape: the physical shape of all windows.
        starts: a physical start for each of `numbers.start_index_map`.
    """

    data: Any
    numbers: Any
    lengths: tuple[int, ...]
    axes: tuple[Factors, ...]
    shape: tuple[int, ...]
    starts: tuple[Any, ...]

    @property
    def batch(self) -> tuple[int, ...]:
        """The physical axes of all windows that no single window has."""
        one = self.numbers.offset_dims
        return tuple(i for i in range(len(self.shape)) if i not in one)

    @property
    def vectors(self) -> Any:
        """The starts along a last axis."""
        columns = [lax.expand_dims(s, [s.ndim]) for s in self.starts]
        if not columns:
            return np.zeros((*(self.shape[i] for i in self.batch), 0), np.int32)
        return lax.concatenate(columns, columns[0].ndim - 1)

    def everywhere(self, condition: Any) -> Any:
        """A condition on windows, for all their elements."""
        return lax.broadcast_in_dim(condition, self.shape, self.batch)


# --- from logical axes ----------------------------------------------------------------


def packed(selection: Selection) -> Selection:
    """One factor for each axis of which windows have several rows, but not all."""
    x = selection.operand
    for axis in selection.parts:
        if not same(selection.sizes[axis], 1):
            x = selection.bucket.packed(x, axis)
    return dataclasses.replace(selection, operand=x)


def reachable(selection: Selection) -> Selection:
    """An operand so long that even the padding of windows inside ends inside.

    A window longer than any array of the bucket needs one of its own length.
    """
    selection = packed(selection)
    data = selection.operand.data
    for axis in selection.parts:
        if same(selection.sizes[axis], 1):
            continue
        (place,) = selection.operand.places(axis)
        needed = _needed(selection, axis, data.shape[place])
        copies = -(-needed // data.shape[place])
        if copies > 1:  # of anything: lax.pad knows no arrays of keys
            data = lax.concatenate([data] * copies, place)
            data = lax.slice_in_dim(data, 0, needed, axis=place)
    operand = dataclasses.replace(selection.operand, data=data)
    return dataclasses.replace(selection, operand=operand)


def _needed(selection: Selection, axis: int, length: int) -> int:
    """Where windows end, at the latest."""
    bucket, size = selection.bucket, selection.sizes[axis]
    if isinstance(size, int):
        return size
    return min(bucket.length(selection.size(axis) - size), length) + bucket.length(size)


def located(selection: Selection, starts: Starts) -> Windows:
    """Windows on physical axes: each factor of an axis is treated like the axis."""
    bucket, x, numbers = selection.bucket, selection.operand, selection.numbers
    along = [_along(selection, axis) for axis in range(x.rank)]
    axes = _in_order(selection, along)
    windows, batch = Padded(None, axes), Padded(None, selection.batch)
    physical = lax.GatherDimensionNumbers(
        places(windows, numbers.offset_dims),
        places(x, numbers.collapsed_slice_dims),
        places(x, tuple(starts)),
        places(x, numbers.operand_batching_dims),
        places(batch, numbers.start_indices_batching_dims),
    )
    lengths = bucket.shape([f for axis in along for f in axis])
    shape = bucket.shape(windows.factors)
    given = [(axis, start) for axis, start in starts.items() if start is not None]
    found = [
        s for axis, start in given for s in _unraveled(bucket, start, x.axes[axis])
    ]
    return Windows(x.data, physical, lengths, axes, shape, tuple(found))


def _along(selection: Selection, axis: int) -> Factors:
    """The factors of a window along an axis of its operand."""
    size, factors = selection.sizes[axis], selection.operand.axes[axis]
    if same(size, selection.size(axis)):
        return factors
    return (1,) * len(factors) if same(size, 1) else (size,)


def _in_order(selection: Selection, along: Sequence[Factors]) -> tuple[Factors, ...]:
    """The axes of all windows: those of one window among those of the batch."""
    axis_of = axes_of_windows(selection.numbers, len(along))
    one = {i: along[axis] for axis, i in axis_of.items()}
    batch = iter(selection.batch)
    rank = len(selection.batch) + len(one)
    return tuple(one[i] if i in one else next(batch) for i in range(rank))


def _unraveled(bucket: Bucket, start: Any, factors: Factors) -> list[Any]:
    """A place along an axis as a place along each factor."""
    found = []
    for f in reversed(factors[1:]):
        n = lax.full_like(start, bucket.scalar(f))
        found.append(lax.rem(start, n))
        start = lax.div(start, n)
    return [start, *reversed(found)]


# --- reading and writing --------------------------------------------------------------


def read(windows: Windows) -> Any:
    """All windows, none of which ends outside."""
    numbers = windows.numbers
    if 0 in windows.shape:
        return lax.full(windows.shape, 0, windows.data.dtype)
    if windows.batch:
        args = (windows.data, windows.vectors, numbers, windows.lengths)
        return lax.gather(*args, mode=_INSIDE)
    data = lax.dynamic_slice(windows.data, _corner(windows), windows.lengths)
    return lax.squeeze(data, numbers.collapsed_slice_dims)


def overwritten(windows: Windows, updates: Any) -> Any:
    """The operand with other windows, none of which ends outside or meets another."""
    numbers = windows.numbers
    if windows.batch:
        args = (windows.data, windows.vectors, updates)
        numbers = lax.ScatterDimensionNumbers(*numbers)
        return lax.scatter(*args, numbers, unique_indices=True, mode=_DROP)
    updates = lax.expand_dims(updates, numbers.collapsed_slice_dims)
    return lax.dynamic_update_slice(windows.data, updates, _corner(windows))


def _corner(windows: Windows) -> list[Any]:
    """The start of the only window, along every axis."""
    starts = dict(zip(windows.numbers.start_index_map, windows.starts, strict=True))
    return [starts.get(place, np.int32(0)) for place in range(windows.data.ndim)]
