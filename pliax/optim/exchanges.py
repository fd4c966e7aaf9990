"""Matrices from hand to hand: whole ones to their owners, and results back.

On each device `exchange` sees that device's part of every leaf. Stacks of matrices of
one shape travel together, however they are divided, and as they lie: their owner turns
those with more rows than columns.
"""

import dataclasses
import math
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


_WIDE = _Way(None, is_turned=False, is_fresh=False)


class _Parcel(NamedTuple):
    """What travels together.

    Attributes:
        array: a row for each owner.
        shapes: of what its columns are, a row of each: one way after the other.
    """

    array: Array
    shapes: dict[_Way, tuple[int, ...]]

    @staticmethod
    def of(way: _Way, x: Array) -> "_Parcel":
        """An array [owners, ...] by itself."""
        return _Parcel(x.reshape(len(x), -1), {way: x.shape[1:]})

    @staticmethod
    def joined(parcels: Sequence["_Parcel"]) -> "_Parcel":
        """One of several; of one it is no copy."""
        arrays = [parcel.array for parcel in parcels]
        shapes = {way: x for parcel in parcels for way, x in parcel.shapes.items()}
        return _Parcel(jnp.concatenate(arrays, axis=1), shapes)

    def opened(self) -> dict[_Way, Array]:
        """Arrays [owners, ...]."""
        stops = np.cumsum([math.prod(shape) for shape in self.shapes.values()])
        columns = jnp.split(self.array, stops[:-1], axis=1)
        return {
            way: x.reshape(len(x), *shape)
            for (way, shape), x in zip(self.shapes.items(), columns, strict=True)
        }


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
    parcels, momenta = _fresh_parcels(held, groups, owners.count)
    is_sent = {way for parcel in parcels for way in parcel.shapes}
    stacks = {}
    for way in [way for way in groups if way not in is_sent]:
        kept, stacks[way] = _joined(way, [held[i].stack for i in groups[way]])
        momenta |= dict(zip(groups[way], kept, strict=True))
    joint = {way: way.turned(stacks.pop(way)) for way in _uneven(stacks, owners.count)}
    if joint:
        stacks[_WIDE] = jnp.concatenate(list(joint.values()))
    own = _given_to_owners(stacks, parcels, owners)
    (done,) = run([jnp.concatenate([way.turned(x) for way, x in own.items()])])
    back = _given_back(_cut_as(own, done), owners)
    if joint:
        back |= _cut_as(joint, back[_WIDE])
    results: dict[int, Stack] = {}
    for way, numbers in groups.items():
        stack = cut(back[way], [len(held[i].stack) for i in numbers])
        results |= dict(zip(numbers, stack, strict=True))
    return [(results[i], momenta.get(i)) for i in range(len(held))]


def _cut_as(stacks: dict[_Way, Stack], done: Stack) -> dict[_Way, Stack]:
    """One stack of wide matrices as these, which lie otherwise."""
    parts = cut(done, list(map(len, stacks.values())))
    return {way: way.turned(x) for way, x in zip(stacks, parts, strict=True)}


def _uneven(stacks: dict[_Way, Stack], count: int) -> list[_Way]:
    """The ways of whole matrices, if owners have fewer where these are one stack."""
    whole = [way for way in stacks if way.divided is None]
    lengths = [len(stacks[way]) for way in whole]
    is_fewer = -(-sum(lengths) // count) < sum(-(-n // count) for n in lengths)
    return whole if is_fewer else []


def _fresh_parcels(
    held: Sequence[_Held], groups: dict[_Way, list[int]], count: int
) -> tuple[list[_Parcel], dict[int, Any]]:
    """Fresh matrices, made in the order in which they are sent; and their momenta.

    Only where matrices divide evenly among the owners, and each is a leaf of its own.
    """
    found = {
        way: numbers
        for way, numbers in groups.items()
        if way.is_fresh and way.divided and len(numbers) % count == 0
        if all(len(held[i].stack) == 1 for i in numbers)
    }
    if not found:
        return [], {}
    shares = [np.reshape(numbers, (count, -1)) for numbers in found.values()]
    # Each owner's, of one way after the other: all are parts of the same size.
    order = np.concatenate(shares, axis=1).ravel().tolist()
    kept, X, _ = stacked([held[i].stack.reshaped((1, 1, -1)) for i in order])
    shapes = {
        way: (len(numbers) // count, *held[numbers[0]].stack.shape[1:])
        for way, numbers in found.items()
    }
    parcel = _Parcel(X.reshape(count, -1), shapes)
    return [parcel], dict(zip(order, kept, strict=True))


def _joined(way: _Way, stacks: Sequence[Any]) -> tuple[Sequence[Any], Stack]:
    """The momenta of what is not yet made, and one stack."""
    if way.is_fresh:
        return stacked(stacks)[:2]
    # Each made in its place (`stacks.joined`) costs more here, unlike on one device: on
    # two H200s a step took 9.2 instead of 8.8 ms, of whole leaves 13.8 instead of 10.7.
    return [None] * len(stacks), jnp.concatenate(stacks)


def _given_to_owners(
    stacks: dict[_Way, Stack], parcels: Sequence[_Parcel], owners: Owners
) -> dict[_Way, Stack]:
    """The matrices that this device owns, of stacks and of what is ready to be sent."""
    own, parcels = {}, list(parcels)
    for way, x in stacks.items():
        if way.divided:
            parcels.append(_Parcel.of(way, _in_shares(x, owners.count)))
        elif way.divided == 0:
            own[way] = x
        else:
            own[way] = _in_shares(x, owners.count)[lax.axis_index(owners.names)]
    for way, x in _all_to_all(parcels, owners).items():
        own[way] = _merged_along(x, way.divided)
    return own


def _given_back(own: dict[_Way, Stack], owners: Owners) -> dict[_Way, Stack]:
    """What `_given_to_owners` was given, and perhaps more matrices behind it."""
    back, parcels, whole = dict(own), [], []
    for way, x in own.items():
        if way.divided:
            parts = _parts_along(x, way.divided, owners.count)
            parcels.append(_Parcel.of(way, parts))
        elif way.divided is None:
            whole.append(_Parcel.of(way, x[None]))
    arrived = _all_to_all(parcels, owners) | _all_gather(whole, owners)
    return back | {way: _merged_along(x, 0) for way, x in arrived.items()}


def _merged_along(x: Array, axis: Any) -> Stack:
    """Matrices of which [owners, L, M, N] are the parts along an axis of the stack."""
    shape = list(x.shape[1:])
    shape[axis] *= len(x)
    return jnp.moveaxis(x, 0, axis).reshape(shape)


def _parts_along(x: Stack, axis: int, count: int) -> Array:
    """The parts of matrices along an axis of their stack: [owners, L, M, N]."""
    shape = list(x.shape)
    shape[axis : axis + 1] = count, shape[axis] // count
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _in_shares(x: Stack, count: int) -> Array:
    """The matrices of each owner: [owners, L, M, N], zeros at the end."""
    more = -len(x) % count
    x = jnp.pad(x, ((0, more), (0, 0), (0, 0)))
    return x.reshape(count, len(x) // count, *x.shape[1:])


def _all_to_all(parcels: Sequence[_Parcel], owners: Owners) -> dict[_Way, Array]:
    """Arrays [owners, ...], of which each owner gets its own from all, in one go."""
    if not parcels:
        return {}
    sent = _Parcel.joined(parcels)
    got = lax.all_to_all(sent.array, owners.names, 0, 0, tiled=True)
    return _Parcel(got, sent.shapes).opened()


def _all_gather(parcels: Sequence[_Parcel], owners: Owners) -> dict[_Way, Array]:
    """Arrays [owners, ...] of arrays [1, ...] of each owner, in one go."""
    if not parcels:
        return {}
    sent = _Parcel.joined(parcels)
    got = lax.all_gather(sent.array, owners.names, tiled=True)
    return _Parcel(got, sent.shapes).opened()
