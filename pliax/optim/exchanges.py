"""Matrices from hand to hand: whole ones to their owners, and results back.

On each device `exchange` sees that device's part of every leaf. Stacks of matrices of
one shape travel together, however they are divided, and as they lie: their owner turns
those with more rows than columns.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .matrix_axes import Matrices
from .one_pass import Fresh, stacked
from .stacks import Stack, by_shape, cut, grouped


Run = Callable[[list[Stack]], Sequence[Stack]]


@dataclasses.dataclass(frozen=True)
class Owners:
    """The mesh axes whose devices own matrices, and how many devices those are."""

    names: tuple[str, ...]
    count: int


class _Way(NamedTuple):
    """What stacks have in common that travel as one.

    Attributes:
        divided: the axis of [L, M, N] that is divided among the owners: the matrices,
            their rows or columns; None if each has all.
        is_turned: whether matrices have more rows than columns.
        is_fresh: whether a pass over gradients and momenta makes the stack.
    """

    divided: int | None
    is_turned: bool
    is_fresh: bool

    def turned(self, x: Stack) -> Stack:
        """Between matrices as they lie and wide ones."""
        return x.mT if self.is_turned else x


@dataclasses.dataclass(frozen=True)
class _Held:
    """What one device has of a stack of matrices.

    Attributes:
        stack: [L, M, N], of which one axis may be divided.
        divided: that axis, or None.
    """

    stack: Stack | Fresh
    divided: int | None

    def sides(self, count: int) -> tuple[int, ...]:
        """The rows and columns of the matrices of which it may have a part."""
        sizes = enumerate(self.stack.shape)
        return tuple(n * count if i == self.divided else n for i, n in sizes)[1:]

    def way(self, count: int) -> _Way:
        """How it travels."""
        rows, columns = self.sides(count)
        return _Way(self.divided, rows > columns, isinstance(self.stack, Fresh))


def exchange(
    recipes: Sequence[Matrices],
    leaves: Sequence[Array | Fresh],
    kinds: Sequence[str],
    owners: Owners,
    run: Run,
) -> tuple[list[Array], list[Any]]:
    """What one device does: its own matrices, of what all devices have.

    Args:
        recipes: how its part of each leaf is taken apart.
        leaves: those parts, or of what they are made.
        kinds: "whole", if every device has everything; "batch", if it has some of the
            matrices; "rows" or "columns", if it has a range of those of each matrix.
        owners: the devices.
        run: what one device does with stacks.

    Returns:
        Each leaf orthogonalised, and the next momentum of those that are fresh.
    """
    taken = [
        [leaf.reshaped(recipe.stack_shape)]
        if isinstance(leaf, Fresh)
        else recipe.taken_apart(leaf)
        for recipe, leaf in zip(recipes, leaves, strict=True)
    ]
    held = [
        _Held(stack, _axis(recipe, kind))
        for recipe, kind, several in zip(recipes, kinds, taken, strict=True)
        for stack in several
    ]
    done: list[Any] = [None] * len(held)
    for numbers in by_shape(x.sides(owners.count) for x in held):
        found = _one_shape([held[i] for i in numbers], owners, run)
        for i, x in zip(numbers, found, strict=True):
            done[i] = x
    rest, results, momenta = iter(done), [], []
    for recipe, several in zip(recipes, taken, strict=True):
        parts, moved = zip(*(next(rest) for _ in several), strict=True)
        results.append(recipe.put_together(parts))
        momenta.append(moved[0])
    return results, momenta


def _axis(recipe: Matrices, kind: str) -> int | None:
    if kind in ("whole", "batch"):
        return None if kind == "whole" else 0
    return 1 + (recipe.row_side if kind == "rows" else 1 - recipe.row_side)


def _one_shape(
    held: Sequence[_Held], owners: Owners, run: Run
) -> Iterable[tuple[Stack, Any]]:
    """Results for stacks of matrices of one shape, and momenta of those still fresh."""
    ways = [x.way(owners.count) for x in held]
    groups = {ways[numbers[0]]: numbers for numbers in grouped(ways)}
    parts, momenta = _fresh_parts(held, groups, owners.count)
    stacks = {}
    for way in [way for way in groups if way not in parts]:
        kept, stacks[way] = _joined(way, [held[i].stack for i in groups[way]])
        momenta |= dict(zip(groups[way], kept, strict=True))
    own = _given_to_owners(stacks, parts, owners)
    (done,) = run([jnp.concatenate([way.turned(x) for way, x in own.items()])])
    shares = zip(own, cut(done, list(map(len, own.values()))), strict=True)
    back = _given_back({way: way.turned(x) for way, x in shares}, owners)
    results: dict[int, Stack] = {}
    for way, numbers in groups.items():
        stack = cut(back[way], [len(held[i].stack) for i in numbers])
        results |= dict(zip(numbers, stack, strict=True))
    return [(results[i], momenta.get(i)) for i in range(len(held))]


def _fresh_parts(
    held: Sequence[_Held], groups: dict[_Way, list[int]], count: int
) -> tuple[dict[_Way, Array], dict[int, Any]]:
    """Parts of fresh matrices, made in the order in which they are sent; the momenta.

    Of those alone of which each owner gets as many, and that are leaves of their own.
    """
    found = {
        way: numbers
        for way, numbers in groups.items()
        if way.is_fresh and way.divided and len(numbers) % count == 0
        if all(len(held[i].stack) == 1 for i in numbers)
    }
    if not found:
        return {}, {}
    shares = [np.reshape(numbers, (count, -1)) for numbers in found.values()]
    order = np.concatenate(shares, axis=1)  # each owner's, of one way after the other
    numbers = order.ravel().tolist()
    kept, X, _ = stacked([held[i].stack.reshaped((1, 1, -1)) for i in numbers])
    X = X.reshape(*order.shape, -1)
    parts, start = {}, 0
    for way, share in zip(found, shares, strict=True):
        stop, sides = start + share.shape[1], held[share[0, 0]].stack.shape[1:]
        parts[way] = X[:, start:stop].reshape(*share.shape, *sides)
        start = stop
    return parts, dict(zip(numbers, kept, strict=True))


def _joined(way: _Way, stacks: Sequence[Any]) -> tuple[Sequence[Any], Stack]:
    """The momenta of what is not yet made, and one stack."""
    if way.is_fresh:
        return stacked(stacks)[:2]
    # Each made in its place (`stacks.joined`) costs more here, unlike on one device: on
    # two H200s a step took 9.2 instead of 8.8 ms, of whole leaves 13.8 instead of 10.7.
    return [None] * len(stacks), jnp.concatenate(stacks)


def _given_to_owners(
    stacks: dict[_Way, Stack], parts: dict[_Way, Array], owners: Owners
) -> dict[_Way, Stack]:
    """The matrices that this device owns, of stacks, and of the parts of some."""
    own, parts = {}, dict(parts)
    for way, x in stacks.items():
        if way.divided:
            parts[way] = _in_shares(x, owners.count)
        elif way.divided == 0:
            own[way] = x
        else:
            own[way] = _in_shares(x, owners.count)[lax.axis_index(owners.names)]
    for way, x in _all_to_all(parts, owners).items():
        own[way] = _merged(x, way.divided)
    return own


def _given_back(own: dict[_Way, Stack], owners: Owners) -> dict[_Way, Stack]:
    """What `_given_to_owners` was given, and perhaps more matrices behind it."""
    back, parts = dict(own), {}
    whole = {way: x for way, x in own.items() if way.divided is None}
    for way, x in own.items():
        if way.divided:
            parts[way] = _divided(x, way.divided, owners.count)
    back |= _all_gather(whole, owners)
    for way, x in _all_to_all(parts, owners).items():
        back[way] = x.reshape(-1, *x.shape[2:])
    return back


def _merged(x: Array, axis: Any) -> Stack:
    """Matrices of which [owners, L, M, N] are the parts along an axis of the stack."""
    shape = list(x.shape[1:])
    shape[axis] *= len(x)
    return jnp.moveaxis(x, 0, axis).reshape(shape)


def _divided(x: Stack, axis: int, count: int) -> Array:
    """The parts of matrices along an axis of their stack: [owners, L, M, N]."""
    shape = list(x.shape)
    shape[axis : axis + 1] = count, shape[axis] // count
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _in_shares(x: Stack, count: int) -> Array:
    """The matrices of each owner: [owners, L, M, N], zeros at the end."""
    more = -len(x) % count
    x = jnp.pad(x, ((0, more), (0, 0), (0, 0)))
    return x.reshape(count, -1, *x.shape[1:])


def _all_to_all(parts: dict[_Way, Array], owners: Owners) -> dict[_Way, Array]:
    """Arrays [owners, ...], of which each owner gets its own from all, in one go."""
    if not parts:
        return {}
    flat = [x.reshape(owners.count, -1) for x in parts.values()]
    sent = jnp.concatenate(flat, axis=1)
    got = lax.all_to_all(sent, owners.names, 0, 0, tiled=True)
    return {
        way: x.reshape(part.shape)
        for (way, part), x in zip(parts.items(), _columns(got, flat), strict=True)
    }


def _all_gather(own: dict[_Way, Stack], owners: Owners) -> dict[_Way, Stack]:
    """The stacks of all owners, one after the other, in one go."""
    if not own:
        return {}
    flat = [x.reshape(1, -1) for x in own.values()]
    sent = jnp.concatenate(flat, axis=1)
    got = lax.all_gather(sent, owners.names, tiled=True)
    return {
        way: x.reshape(-1, *part.shape[1:])
        for (way, part), x in zip(own.items(), _columns(got, flat), strict=True)
    }


def _columns(x: Array, widths: Sequence[Array]) -> list[Array]:
    """Columns, as many as each of these has."""
    return jnp.split(x, np.cumsum([part.shape[1] for part in widths])[:-1], axis=1)
