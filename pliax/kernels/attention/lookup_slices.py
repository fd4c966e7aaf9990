"""Lookups of neighbours by neighbours, which are slices.

    bias[h, q, k + 1]  for every h, q, k  ->  bias[:, :T, 1 : S + 1]

XLA scatters the gradient of a lookup, on a GPU in no order; that of a slice it pads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from pliax.core.dataflow import is_literal, leading_to, variables
from pliax.core.evaluation import at_trace_time

from .separation import Separated, outside


type Roles = Callable[[dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class LookupSlice:
    """All elements that a lookup takes.

    Attributes:
        own: The axes that the array has one of, in front of its own.
        axes: For each of the array's own, the axis it is an element for, or None.
        starts: The first element of each of these.
    """

    own: tuple[str, ...]
    axes: tuple[str | None, ...]
    starts: tuple[int, ...]

    def of(self, x: Array, sizes: Mapping[str, int]) -> Array:
        """These elements, with axes of so many in the order of `sizes`."""
        counts = [1 if a is None else sizes[a] for a in self.axes]
        starts = (*[0] * len(self.own), *self.starts)
        ends = [n + m for n, m in zip(self.starts, counts, strict=True)]
        x = lax.slice(x, starts, (*x.shape[: len(self.own)], *ends))
        places = *self.own, *self.axes
        order = [places.index(a) for a in sizes]
        rest = [n for n, a in enumerate(places) if a is None]
        return jnp.transpose(x, (*order, *rest)).reshape(*sizes.values())


def slice_of_lookup(
    separated: Separated, eqn: Any, ranges: Mapping[str, range], roles: Roles
) -> LookupSlice | None:
    """The slice that lookups of single elements take, or None.

    Args:
        separated: The mod.
        eqn: The lookup, a `dynamic_slice`.
        ranges: The values of each axis.
        roles: From one of each to the mod's arguments by role.
    """
    array, *starts = eqn.invars
    own = tuple(a for a in ranges if a in separated.needs[array])
    each = [_axes(separated, start, ranges) for start in starts]
    taken = (*own, *(a for axes in each for a in axes))
    if sorted(taken) != sorted(ranges) or max(map(len, each), default=0) > 1:
        return None
    if any(_is_of_captured(separated, start) for start in starts):
        return None

    def places() -> list[Array]:
        found = zip(starts, each, strict=True)
        return [
            jnp.asarray(x.val)
            if is_literal(x)
            else outside(separated, (), x, {a: _every(ranges[a]) for a in axes}, roles)
            for x, axes in found
        ]

    with at_trace_time():
        found = [np.asarray(x, np.int64).ravel() for x in jax.jit(places)()]
    last = (n - 1 for n in array.aval.shape)
    found = [np.clip(x, 0, n) for x, n in zip(found, last, strict=True)]
    if any((x != x[0] + np.arange(x.size)).any() for x in found):
        return None
    axes = tuple(next(iter(x), None) for x in each)
    return LookupSlice(own, axes, tuple(int(x[0]) for x in found))


def _axes(separated: Separated, start: Any, ranges: Mapping[str, range]) -> list[str]:
    """Those that a place depends on; the letters of their names are roles."""
    asked = frozenset() if is_literal(start) else separated.needs[start]
    return [a for a in ranges if not asked.isdisjoint(a)]


def _every(numbers: range) -> Array:
    return jnp.arange(numbers.start, numbers.stop, dtype=jnp.int32)


def _is_of_captured(separated: Separated, start: Any) -> bool:
    captured = set(separated.jaxpr.invars[: separated.captured])
    equations = leading_to(separated.jaxpr.eqns, [start])
    given = variables([start, *(x for eqn in equations for x in eqn.invars)])
    return not captured.isdisjoint(given)
