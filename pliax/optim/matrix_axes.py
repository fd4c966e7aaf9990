"""Which axes of a parameter are the rows and columns of its matrices.

A two-dimensional kernel is one matrix. The kernels of scanned layers, of experts or of
attention heads are many in one array, a fused projection is several side by side, and
a projection to (heads, channels) has two axes of outputs. `MatrixAxes` says which is
which; `Matrices` takes the array apart and puts it together again.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """The axes of one parameter, as a matrix (outputs, inputs) is written.

    Every axis of the array belongs to exactly one of the three; negative numbers count
    from the last. ``layout="in_out"`` means ``MatrixAxes(rows=1, columns=0)`` for a
    two-dimensional leaf, ``"out_in"`` means ``MatrixAxes(rows=0, columns=1)``.

    Attributes:
        rows: the outputs: an axis, or several that are flattened in this order.
        columns: the inputs, likewise.
        batch: each index along these axes is a matrix of its own: scanned layers,
            experts, heads.
        split: the rows of several matrices that lie side by side, in order: the sizes
            of a fused query, key and value, each of which is orthogonalised and scaled
            by itself. Empty if the rows are those of one matrix.

    Raises:
        ValueError: where an axis is named twice, one is not an integer, or split holds
            a size below 1.

    Examples:
        >>> stacked = MatrixAxes(rows=2, columns=1, batch=0)  # [layers, in, out]
        >>> heads = MatrixAxes(rows=(1, 2), columns=0)  # [in, heads, channels]
        >>> fused = MatrixAxes(rows=1, columns=0, split=(512, 128, 128))  # q, k, v
    """

    rows: Any
    columns: Any
    batch: Any = ()
    split: Any = ()

    def __post_init__(self):
        for name in ("rows", "columns", "batch", "split"):
            object.__setattr__(self, name, _integers(name, getattr(self, name)))
        batch, rows, columns = self._sides
        named = (*rows, *columns, *batch)
        twice = [axis for i, axis in enumerate(named) if axis in named[:i]]
        if twice:
            raise ValueError(f"MatrixAxes: axis {twice[0]} is named twice in {self}.")
        if any(size < 1 for size in self.split):
            raise ValueError(f"MatrixAxes: split holds a size below 1: {self.split}.")

    @property
    def _sides(self) -> tuple[tuple[int, ...], ...]:
        return self.batch, self.rows, self.columns

    def places(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The axes of batch, rows and columns in an array of that shape.

        Raises:
            ValueError: unless each axis of the array is named once.
        """
        rank = len(shape)
        beyond = [a for side in self._sides for a in side if not -rank <= a < rank]
        if beyond:
            raise ValueError(
                f"{self} names axis {beyond[0]}, but the parameter has {rank} axes."
            )
        found = tuple(tuple(axis % rank for axis in side) for side in self._sides)
        if sorted(sum(found, ())) != list(range(rank)):
            raise ValueError(
                f"{self} does not name each axis of a parameter of size {shape} once."
            )
        return found


def _integers(name: str, value: Any) -> tuple[int, ...]:
    """An integer, or several, as a tuple."""
    items = tuple(value) if np.ndim(value) == 1 else (value,)
    try:
        if any(isinstance(item, bool) for item in items):
            raise TypeError
        return tuple(operator.index(item) for item in items)
    except TypeError:
        raise ValueError(
            f"MatrixAxes: {name} should be an integer or a tuple of integers but is: "
            f"{value!r}"
        ) from None


LAYOUTS = {
    "in_out": MatrixAxes(rows=1, columns=0),
    "out_in": MatrixAxes(rows=0, columns=1),
}


@dataclasses.dataclass(frozen=True)
class Part:
    """Matrices of one shape within a leaf.

    Attributes:
        start: their first row.
        rows: how many rows each has.
        columns: how many columns.
    """

    start: int
    rows: int
    columns: int


@dataclasses.dataclass(frozen=True)
class Matrices:
    """How one leaf is taken apart into stacks of matrices, and made of them again.

    Of rows and columns what comes first in memory comes first here, so that an
    ordinary kernel is not transposed.

    Attributes:
        shape: of the leaf.
        batch: axes, none negative.
        sides: the axes of rows and columns, those that come first before the others.
        row_side: which side is the rows: 0 or 1.
        parts: one, or several where the rows are split.
    """

    shape: tuple[int, ...]
    batch: tuple[int, ...]
    sides: tuple[tuple[int, ...], tuple[int, ...]]
    row_side: int
    parts: tuple[Part, ...]

    @property
    def count(self) -> int:
        """The matrices of each part."""
        return math.prod(self.shape[axis] for axis in self.batch)

    @property
    def _order(self) -> tuple[int, ...]:
        return (*self.batch, *self.sides[0], *self.sides[1])

    def _side(self, number: int) -> int:
        return math.prod(self.shape[axis] for axis in self.sides[number])

    @property
    def is_stack(self) -> bool:
        """Whether the leaf is one stack as it lies."""
        return len(self.parts) == 1 and self._order == tuple(range(len(self.shape)))

    @property
    def stack_shape(self) -> tuple[Any, Any, Any]:
        """Of a leaf that is one stack."""
        return self.count, self._side(0), self._side(1)

    def taken_apart(self, leaf: Array) -> list[Float[Array, "L M N"]]:
        """A stack for each part."""
        ordered = jnp.transpose(leaf, self._order)
        stack = ordered.reshape(self.count, self._side(0), self._side(1))
        axis = 1 + self.row_side
        return [
            jax.lax.slice_in_dim(stack, part.start, part.start + part.rows, axis=axis)
            for part in self.parts
        ]

    def put_together(self, stacks: Sequence[Array]) -> Array:
        """The leaf whose stacks these are."""
        axis = 1 + self.row_side
        stack = jnp.concatenate(stacks, axis) if len(stacks) > 1 else stacks[0]
        ordered = stack.reshape([self.shape[axis] for axis in self._order])
        return jnp.transpose(ordered, np.argsort(self._order).tolist())

    def factors(self, ratio: Callable[[int, int], float]) -> float | np.ndarray:
        """The ratio of each matrix, as it multiplies the leaf."""
        ratios = [ratio(part.rows, part.columns) for part in self.parts]
        if len(set(ratios)) == 1:
            return ratios[0]
        rows = self.sides[self.row_side]
        along = np.repeat(np.asarray(ratios), [part.rows for part in self.parts])
        along = along.reshape([self.shape[axis] for axis in rows])
        along = np.transpose(along, np.argsort(rows))  # the leaf's order
        others = [axis for axis in range(len(self.shape)) if axis not in rows]
        return np.expand_dims(along, tuple(others))


@functools.cache
def matrices(axes: MatrixAxes, shape: tuple[int, ...]) -> Matrices:
    """How a leaf of this shape is taken apart.

    Raises:
        ValueError: if the axes are not those of the shape, or the split is not that of
            the rows.
    """
    batch, rows, columns = axes.places(shape)
    if not rows or not columns:
        raise ValueError(f"{axes} names no axis of rows or none of columns.")
    size, inputs = (math.prod(shape[axis] for axis in part) for part in (rows, columns))
    sizes = tuple(axes.split) or (size,)
    if sum(sizes) != size:
        raise ValueError(
            f"{axes} splits {sum(sizes)} rows, but a parameter of size {shape} has "
            f"{size}."
        )
    starts = np.cumsum((0, *sizes[:-1])).tolist()
    parts = [Part(i, n, inputs) for i, n in zip(starts, sizes, strict=True)]
    first = min(rows) < min(columns)
    sides = (rows, columns) if first else (columns, rows)
    return Matrices(shape, batch, sides, 0 if first else 1, tuple(parts))


# --- what users say of a whole tree ---------------------------------------------------


def layout_axes(layout: str) -> MatrixAxes:
    """The axes of a two-dimensional leaf in a layout."""
    if layout not in LAYOUTS:
        raise ValueError(
            f"layout should be 'in_out' (JAX kernels) or 'out_in' (torch weights) "
            f"but is: {layout!r}"
        )
    return LAYOUTS[layout]


def axes_of(axes: Any, tree: Any) -> list[Any]:
    """What a prefix of a tree, or a function of it, says of each leaf; or None."""
    spec = axes(tree) if callable(axes) else axes
    is_spec = lambda x: x is None or isinstance(x, MatrixAxes)  # noqa: E731
    named = jax.tree.map(lambda a: _DEFAULT if a is None else a, spec, is_leaf=is_spec)
    try:
        full = jax.tree.map(
            lambda a, below: jax.tree.map(lambda _: a, below), named, tree
        )
    except ValueError as error:
        raise ValueError(
            f"muon: axes is not a pytree prefix of the parameters: {error}.\nPass one "
            "MatrixAxes for all leaves, or a tree of the same structure with a "
            "MatrixAxes or None where a subtree or leaf stands."
        ) from None
    found = jax.tree.leaves(full)
    wrong = [a for a in found if a is not _DEFAULT and not isinstance(a, MatrixAxes)]
    if wrong:
        raise ValueError(f"muon: axes holds {wrong[0]!r}, not a MatrixAxes or None.")
    return [None if a is _DEFAULT else a for a in found]


_DEFAULT = object()  # None is no leaf of a tree
