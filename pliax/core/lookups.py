"""Chained lookups as one: `bias[b][q_idx]` reads no more than `bias[b, q_idx]` does.

    dynamic_slice, squeeze  :  array  ->  Lookup,     read when something else needs it

Mapped over the places of a tile, `bias[b]` alone would copy a matrix for every place
where b differs. A Lookup puts it off until all indices are known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .manual_axes import vary, varying_axes


@dataclass(frozen=True)
class Lookup:
    """Some elements of an array, not yet read.

    Attributes:
        array: What is looked into.
        starts: For each axis the index that was chosen, or None for the whole axis.
        axes: The axes of `array` that have not been squeezed.
    """

    array: Any
    starts: tuple[Any, ...]
    axes: tuple[int, ...]

    def read(self) -> Any:
        """The elements, as an array of one dimension for each of `axes`."""
        chosen = [x for x in self.starts if x is not None]
        if not chosen:
            return jnp.reshape(self.array, self._shape())
        zero = jnp.zeros((), chosen[0].dtype)
        starts = [zero if x is None else x for x in self.starts]
        varying = varying_axes(self.array, starts)
        array, starts = vary((jnp.asarray(self.array), starts), varying)
        pairs = zip(self.array.shape, self.starts, strict=True)
        sizes = [n if x is None else 1 for n, x in pairs]
        clamped = {"allow_negative_indices": False}  # as the primitive does
        found = jax.lax.dynamic_slice(array, starts, sizes, **clamped)
        return jnp.reshape(found, self._shape())

    def _shape(self) -> tuple[int, ...]:
        lengths = self.array.shape
        return tuple(lengths[a] if self.starts[a] is None else 1 for a in self.axes)


def read(x: Any) -> Any:
    """A value itself: what a Lookup stands for."""
    return x.read() if isinstance(x, Lookup) else x


def put_off(eqn: Any, values: Sequence[Any]) -> Lookup | None:
    """The result of an equation as a Lookup, if it is an index or follows one."""
    match eqn.primitive.name:
        case "dynamic_slice":
            return _choose(eqn, *values)
        case "squeeze" if isinstance(values[0], Lookup):
            (lookup,) = values
            left = set(range(len(lookup.axes))) - set(eqn.params["dimensions"])
            axes = tuple(lookup.axes[i] for i in sorted(left))
            return Lookup(lookup.array, lookup.starts, axes)
    return None


def _is_whole(size: Any, n: Any) -> bool:
    """Whether a slice is the whole axis; nothing is asked of a symbolic length."""
    return size is n or (isinstance(n, int) and size == n)


def _choose(eqn: Any, array: Any, *indices: Any) -> Lookup | None:
    """Axes of length 1 keep what they have; the others take all or one element."""
    if not isinstance(array, Lookup):
        array = Lookup(array, (None,) * array.ndim, tuple(range(array.ndim)))
    starts = list(array.starts)
    lengths, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    for axis, index, size, n in zip(array.axes, indices, sizes, lengths, strict=True):
        if not _is_whole(size, n):
            starts[axis] = read(index)
            if size != 1:
                return None
    chosen = [x for x in starts if x is not None]
    if len({x.dtype for x in chosen}) > 1:
        return None  # dynamic_slice wants indices of one dtype
    return Lookup(array.array, tuple(starts), array.axes)
