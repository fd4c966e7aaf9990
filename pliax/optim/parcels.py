"""What travels between owners: parts of matrices there, and back.

    stacks  ->  parcels  ->  matrices of one owner       `given_to_owners`
    results ->  a `Load`, which is sent and taken apart  `packed`, `sent`, `unpacked`

What travels together is one array, a row for each owner.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .stacks import Stack


@dataclass(frozen=True)
class Owners:
    """The mesh axes whose devices own matrices, and how many devices those are."""

    names: tuple[str, ...]
    count: int


class Way(NamedTuple):
    """What stacks have in common that travel as one.

    Attributes:
        divided: the axis of [L, M, N] that is divided among the owners: the matrices,
            their rows or columns; None if each has all.
        is_fresh: whether a pass over gradients and momenta makes the stack.
    """

    divided: int | None
    is_fresh: bool


class Parcel(NamedTuple):
    """What travels together.

    Attributes:
        array: a row for each owner.
        shapes: of what its columns are, a row of each: one way after the other.
    """

    array: Array
    shapes: dict[Way, tuple[int, ...]]

    @staticmethod
    def of(way: Way, x: Array) -> "Parcel":
        """An array [owners, ...] by itself."""
        return Parcel(x.reshape(len(x), -1), {way: x.shape[1:]})

    @staticmethod
    def joined(parcels: Sequence["Parcel"]) -> "Parcel":
        """One of several; of one it is no copy."""
        arrays = [parcel.array for parcel in parcels]
        shapes = {way: x for parcel in parcels for way, x in parcel.shapes.items()}
        return Parcel(jnp.concatenate(arrays, axis=1), shapes)

    def opened(self) -> Iterator[tuple[Way, Array]]:
        """Arrays [owners, ...]."""
        stops = np.cumsum([math.prod(shape) for shape in self.shapes.values()])
        columns = jnp.split(self.array, stops[:-1], axis=1)
        for (way, shape), x in zip(self.shapes.items(), columns, strict=True):
            yield way, x.reshape(len(x), *shape)


def given_to_owners(
    stacks: dict[Way, Stack], parcels: Sequence[Parcel], owners: Owners
) -> dict[Way, Stack]:
    """The matrices that this device owns, of stacks and of what is ready to be sent."""
    own, parcels = {}, list(parcels)
    for way, x in stacks.items():
        if way.divided:
            parcels.append(Parcel.of(way, _in_shares(x, owners.count)))
        elif way.divided == 0:
            own[way] = x
        else:
            own[way] = _in_shares(x, owners.count)[lax.axis_index(owners.names)]
    if parcels:
        there = _exchanged(Parcel.joined(parcels), owners)
        own |= {way: _merged_along(x, way.divided) for way, x in there.opened()}
    return own


class Load(NamedTuple):
    """Results of the matrices of an owner, and who gets them.

    Attributes:
        kept: stay where they are.
        parcels: of which every device gets its part ("divided"), or all ("whole").
    """

    kept: dict[Way, Stack]
    parcels: dict[str, Parcel]

    def sent(self, owners: Owners) -> "Load":
        """Where it belongs."""
        there = {name: _SENT[name](x, owners) for name, x in self.parcels.items()}
        return Load(self.kept, there)

    def unpacked(self) -> dict[Way, Stack]:
        """What `given_to_owners` was given, and perhaps more matrices behind it."""
        there = [x for parcel in self.parcels.values() for x in parcel.opened()]
        return self.kept | {way: _merged_along(x, 0) for way, x in there}

    def after(self, before: "Load") -> tuple["Load", "Load"]:
        """The one before and this, which is not sent until that has arrived.

        Both pass: where the first did not, XLA left it out of the barrier, and on two
        H200s all ways back waited for the last product.
        """
        first, second = lax.optimization_barrier((before._arrays, self._arrays))
        return before._of(first), self._of(second)

    @property
    def _arrays(self) -> dict[str, Array]:
        """What travels."""
        return {name: parcel.array for name, parcel in self.parcels.items()}

    def _of(self, arrays: dict[str, Array]) -> "Load":
        """The same of these."""
        parcels = {
            name: Parcel(arrays[name], x.shapes) for name, x in self.parcels.items()
        }
        return Load(self.kept, parcels)


def packed(own: dict[Way, Stack], owners: Owners) -> Load:
    """What is to be sent back."""
    kept: dict[Way, Stack] = {}
    parcels: dict[str, list[Parcel]] = {}
    for way, x in own.items():
        if way.divided:
            parts = _parts_along(x, way.divided, owners.count)
            parcels.setdefault("divided", []).append(Parcel.of(way, parts))
        elif way.divided is None:
            parcels.setdefault("whole", []).append(Parcel.of(way, x[None]))
        else:
            kept[way] = x
    return Load(kept, {name: Parcel.joined(x) for name, x in parcels.items()})


def _exchanged(sent: Parcel, owners: Owners) -> Parcel:
    """Each owner gets its row from all."""
    got = lax.all_to_all(sent.array, owners.names, 0, 0, tiled=True)
    return Parcel(got, sent.shapes)


def _gathered(sent: Parcel, owners: Owners) -> Parcel:
    """All get the one row of each."""
    return Parcel(lax.all_gather(sent.array, owners.names, tiled=True), sent.shapes)


_SENT = {"divided": _exchanged, "whole": _gathered}


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
