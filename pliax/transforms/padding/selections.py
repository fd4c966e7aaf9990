"""Windows that a program selects at run-time positions, on logical axes.

Gathers read them and scatters write them; here both speak gather's language, in which
scatter's words have other names. Where JAX moves a window that ends beyond the operand,
or drops it, `moved` does so by arithmetic with the logical size, and the physical
operation (`positions.py`) finds every start as it should be.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core.dims import Size

from .layouts import Bucket, Factors, Padded, product, same


Starts = Mapping[int, Any]  # for axes of the operand, where each window starts

_INT32 = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """Windows as a program asks for them, on logical axes.

    Attributes:
        bucket: how long everything is.
        operand: what they are windows of.
        numbers: gather's dimension numbers.
        sizes: how long a window is along each axis of the operand.
        batch: the axes of the starts.
        drops: whether windows that end outside are as if nobody asked; else they move.
    """

    bucket: Bucket
    operand: Padded
    numbers: Any
    sizes: tuple[Any, ...]
    batch: tuple[Factors, ...]
    drops: bool

    @property
    def is_shared(self) -> bool:
        """Whether several windows look at the same part of the operand."""
        return len(self.batch) > len(self.numbers.operand_batching_dims)

    def size(self, axis: int) -> Any:
        """The size of an axis of the operand."""
        return self.bucket.size(product(self.operand.axes[axis]))

    @functools.cached_property
    def parts(self) -> list[int]:
        """The axes of which a window need not be the whole."""
        paired = self.numbers.operand_batching_dims
        axes = [axis for axis in range(self.operand.rank) if axis not in paired]
        return [axis for axis in axes if not same(self.sizes[axis], self.size(axis))]

    @property
    def cut(self) -> list[int]:
        """Those parts of which the end is padding, which may lie on what is valid."""
        return [axis for axis in self.parts if isinstance(self.sizes[axis], Size)]

    @property
    def is_plain(self) -> bool:
        """Whether windows start only along axes without padding, as JAX thinks."""
        indexed = self.numbers.start_index_map
        axes = [(*self.operand.axes[axis], self.sizes[axis]) for axis in indexed]
        known = [len(a) == 2 and all(isinstance(n, int) for n in a) for a in axes]
        return all(known) and set(self.parts) <= set(indexed)

    @property
    def asked(self) -> Any:
        """Which windows are not padding; None if all may be written.

        Padding along an axis that operand and windows share goes into padding.
        """
        paired = self.numbers.start_indices_batching_dims
        shape = self.bucket.shape
        axes = [shape(a) if i in paired else a for i, a in enumerate(self.batch)]
        return self.bucket.valid(axes)


# --- dimension numbers ----------------------------------------------------------------


def gather_numbers(numbers: Any) -> Any:
    """Dimension numbers of Python's integers, of which vmap makes NumPy's."""
    fields = (tuple(map(int, axes)) for axes in numbers)
    return lax.GatherDimensionNumbers(*fields)  # scatter's have the same order


def one_window(rank: int) -> Any:
    """The dimension numbers of one window with a start along every axis."""
    axes = tuple(range(rank))
    return lax.GatherDimensionNumbers(axes, (), axes)


def pairs(numbers: Any) -> list[tuple[int, int]]:
    """The axes of operand and batch that run together."""
    batch = numbers.start_indices_batching_dims
    return list(zip(numbers.operand_batching_dims, batch, strict=True))


def axes_of_windows(numbers: Any, rank: int) -> dict[int, int]:
    """For axes of the operand, which axis of all windows goes along them."""
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    within = [axis for axis in range(rank) if axis not in gone]
    return dict(zip(within, numbers.offset_dims, strict=True))


def places(x: Padded, axes: Sequence[int]) -> tuple[int, ...]:
    """The physical axes of some logical ones."""
    return tuple(place for axis in axes for place in x.places(axis))


def agreed(
    bucket: Bucket,
    arrays: Sequence[Padded],
    groups: Sequence[Sequence[tuple[int, int]]],
) -> list[Padded]:
    """Arrays with the same factors at axes (array, axis) that are in one group."""
    axes = [list(x.axes) for x in arrays]
    for group in groups:
        common = bucket.common([arrays[i].axes[axis] for i, axis in group])
        for i, axis in group:
            axes[i][axis] = common
    return [bucket.arranged(x, a) for x, a in zip(arrays, axes, strict=True)]


# --- starts ---------------------------------------------------------------------------


def columns(indices: Padded, numbers: Any, *, wraps: bool = False) -> Starts:
    """The starts along each axis, of vectors along the last axis."""
    return {
        axis: int32(lax.index_in_dim(indices.data, i, -1, keepdims=False), wraps=wraps)
        for i, axis in enumerate(numbers.start_index_map)
    }


def int32(start: Any, *, wraps: bool = False) -> Any:
    """Starts beyond int32 become the nearest there is, or wrap as in JAX's fills."""
    ends, number = np.iinfo(start.dtype), start.dtype.type
    if ends.max > _INT32.max and not wraps:
        low = max(int(ends.min), int(_INT32.min))
        start = lax.clamp(number(low), start, number(_INT32.max))
    return lax.convert_element_type(start, jnp.int32)


def moved(selection: Selection, starts: Starts) -> tuple[Starts, Any]:
    """Starts from which windows end inside; and which did before, if others drop.

    Only where a window is a part of an axis does it need a start.
    """
    bucket, found, inside = selection.bucket, {}, None
    for axis, start in starts.items():
        if axis not in selection.parts and not selection.drops:
            continue
        last = bucket.scalar(selection.size(axis) - selection.sizes[axis])
        # Not lax.clamp, whose bounds under vmap have to have the start's shape.
        start_inside = lax.max(start, lax.full_like(start, 0))
        found[axis] = lax.min(start_inside, lax.broadcast(last, start.shape))
        if selection.drops:
            inside = both(inside, lax.eq(start, found[axis]))
    shape = bucket.shape([f for axis in selection.batch for f in axis])
    for axis in set(selection.parts).difference(starts):
        found[axis] = lax.full(shape, 0, jnp.int32)
    return {axis: found[axis] for axis in selection.parts}, inside


def both(a: Any, b: Any) -> Any:
    """Both conditions, where None always holds."""
    if a is None or b is None:
        return b if a is None else a
    return lax.bitwise_and(a, b)


def by_rows(
    selection: Selection, starts: Starts, inside: Any, updates: Padded
) -> tuple[Selection, Starts, Any, Padded]:
    """Each row of windows that end in padding as a window, so that some are not asked.

    No two rows of one window meet at one place. So with the rows last in the batch,
    what meets at a place still comes in the order of the windows.
    """
    bucket, cut, numbers = selection.bucket, selection.cut, selection.numbers
    axis_of = axes_of_windows(numbers, selection.operand.rank)
    rows = [axis_of[axis] for axis in cut]
    batch = [i for i in range(updates.rank) if i not in axis_of.values()]
    rest = [i for i in axis_of.values() if i not in rows]
    for i in rows:
        updates = bucket.packed(updates, i)
    updates = _transposed(updates, [*batch, *rows, *rest])
    axes = updates.axes[: updates.rank - len(rest)]
    shape = bucket.shape([f for axis in axes for f in axis])

    def spread(x: Any) -> Any:
        return lax.broadcast_in_dim(x, shape, range(x.ndim))

    starts = {axis: spread(start) for axis, start in starts.items()}
    for i, axis in enumerate(cut, len(shape) - len(cut)):
        starts[axis] += lax.broadcasted_iota(jnp.int32, shape, i)
    numbers = numbers._replace(
        offset_dims=tuple(range(len(axes), updates.rank)),
        collapsed_slice_dims=tuple(sorted((*numbers.collapsed_slice_dims, *cut))),
    )
    sizes = tuple(1 if axis in cut else n for axis, n in enumerate(selection.sizes))
    selection = dataclasses.replace(selection, numbers=numbers, sizes=sizes, batch=axes)
    return selection, starts, None if inside is None else spread(inside), updates


def _transposed(x: Padded, order: Sequence[int]) -> Padded:
    axes = tuple(x.axes[axis] for axis in order)
    return Padded(lax.transpose(x.data, places(x, order)), axes)
