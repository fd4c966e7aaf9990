"""Matrices from hand to hand: whole ones to their owners, and results back.

On each device `exchange` sees that device's part of every leaf. Stacks of matrices of
one shape travel together, however they are divided. Shapes have their turns, so that
one travels while another is multiplied:

    sent         second  largest  third
    multiplied           second   largest  third
    sent back                     second   largest  third
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .matrix_axes import Matrices
from .one_pass import Fresh, stacked
from .parcels import Owners, Parcel, Way, given_to_owners, packed
from .stacks import Sizes, Stack, cut, grouped


Run = Callable[[list[Stack]], Sequence[Stack]]


@dataclasses.dataclass(frozen=True)
class _Held:
    """What one device has of a stack of matrices.

    Attributes:
        stack: [L, M, N], of which one axis may be divided.
        divided: that axis, or None.
    """

    stack: Stack | Fresh
    divided: int | None

    def shape(self, count: int) -> Any:
        """[L, M, N] of the matrices of which it may have a part."""
        sizes = enumerate(self.stack.shape)
        return tuple(n * count if i == self.divided else n for i, n in sizes)

    @property
    def way(self) -> Way:
        """How it travels."""
        return Way(self.divided, isinstance(self.stack, Fresh))


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
    rest, results, momenta = iter(_in_turns(held, owners, run)), [], []
    for recipe, several in zip(recipes, taken, strict=True):
        parts, moved = zip(*(next(rest) for _ in several), strict=True)
        results.append(recipe.put_together(parts))
        momenta.append(moved[0])
    return results, momenta


def _axis(recipe: Matrices, kind: str) -> int | None:
    if kind in ("whole", "batch"):
        return None if kind == "whole" else 0
    return 1 + (recipe.row_side if kind == "rows" else 1 - recipe.row_side)


def _in_turns(
    held: Sequence[_Held], owners: Owners, run: Run
) -> list[tuple[Stack, Any]]:
    """Results, and momenta of those that were fresh."""
    turns = _turns([x.shape(owners.count) for x in held])
    shapes, loads, multiplied = [], [], None
    for numbers in turns:
        shape = _Shape.of([held[i] for i in numbers], owners)
        done, multiplied = shape.orthogonalised(run, after=multiplied)
        load = packed(done, owners)
        travelling = [i for i, x in enumerate(loads) if x.parcels]
        if travelling:
            last = travelling[-1]
            loads[last], load = load.after(loads[last])
        shapes.append(shape)
        loads.append(load.sent(owners))
    results: list[Any] = [None] * len(held)
    for numbers, shape, load in zip(turns, shapes, loads, strict=True):
        for i, x in zip(numbers, shape.results(load.unpacked()), strict=True):
            results[i] = x
    return results


def _turns(shapes: Sequence[Sizes]) -> list[list[int]]:
    """The numbers of stacks of one shape, those of the most elements in the middle.

    The way there of the first has nothing beside it, nor has the way back of the last.
    """
    groups = grouped(shape[1:] for shape in shapes)
    groups.sort(key=lambda numbers: -sum(math.prod(shapes[i]) for i in numbers))
    return [*groups[1::2][::-1], *groups[::2]]


class _Shape(NamedTuple):
    """Matrices of one shape, with their owners.

    Attributes:
        groups: of each way the numbers of those that go it.
        lengths: how many matrices there are of each number.
        own: the matrices of this device.
        momenta: by number, of those that were fresh.
    """

    groups: dict[Way, list[int]]
    lengths: list[int]
    own: dict[Way, Stack]
    momenta: dict[int, Any]

    @staticmethod
    def of(held: Sequence[_Held], owners: Owners) -> "_Shape":
        """These, each sent to its owner."""
        ways = [x.way for x in held]
        groups = {ways[numbers[0]]: numbers for numbers in grouped(ways)}
        parcels, momenta = _fresh_parcels(held, groups, owners.count)
        is_sent = {way for parcel in parcels for way in parcel.shapes}
        stacks = {}
        for way in [way for way in groups if way not in is_sent]:
            kept, stacks[way] = _joined(way, [held[i].stack for i in groups[way]])
            momenta |= dict(zip(groups[way], kept, strict=True))
        own = given_to_owners(stacks, parcels, owners)
        return _Shape(groups, [len(x.stack) for x in held], own, momenta)

    def orthogonalised(self, run: Run, after: Any) -> tuple[dict[Way, Stack], Stack]:
        """Those of this device, not before something else; and all as one stack.

        XLA keeps this order, in every profile of two H200s, though what comes before
        does not pass the barrier: it is sent back meanwhile.
        """
        own, _ = lax.optimization_barrier((list(self.own.values()), after))
        (done,) = run([jnp.concatenate(own)])
        parts = cut(done, list(map(len, own)))
        return dict(zip(self.own, parts, strict=True)), done

    def results(self, back: dict[Way, Stack]) -> list[tuple[Stack, Any]]:
        """Of each its part of what came back, and its momentum if it was fresh."""
        found: dict[int, Stack] = {}
        for way, numbers in self.groups.items():
            stack = cut(back[way], [self.lengths[i] for i in numbers])
            found |= dict(zip(numbers, stack, strict=True))
        return [(found[i], self.momenta.get(i)) for i in range(len(found))]


def _fresh_parcels(
    held: Sequence[_Held], groups: dict[Way, list[int]], count: int
) -> tuple[list[Parcel], dict[int, Any]]:
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
    parcel = Parcel(X.reshape(count, -1), shapes)
    return [parcel], dict(zip(order, kept, strict=True))


def _joined(way: Way, stacks: Sequence[Any]) -> tuple[Sequence[Any], Stack]:
    """The momenta of what is not yet made, and one stack."""
    if way.is_fresh:
        return stacked(stacks)[:2]
    # Each made in its place (`stacks.joined`) costs more here, unlike on one device: on
    # two H200s a step took 9.2 instead of 8.8 ms, of whole leaves 13.8 instead of 10.7.
    return [None] * len(stacks), jnp.concatenate(stacks)
