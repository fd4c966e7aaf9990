"""Matrices from hand to hand: whole ones to their owners, and results back.

On each device `exchange` sees that device's part of every leaf. Stacks of matrices of
one shape, however they are divided, travel together.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .matrix_axes import Matrices
from .stacks import Stack, apply_to_stacks, by_shape, cut


@dataclasses.dataclass(frozen=True)
class Owners:
    """The mesh axes whose devices own matrices, and how many devices those are."""

    names: tuple[str, ...]
    count: int


@dataclasses.dataclass(frozen=True)
class _Held:
    """What one device has of a stack of wide matrices.

    Attributes:
        stack: [L, M, N], of which one axis may be divided among the owners.
        divided: that axis: the matrices, their rows or columns; None if it is whole.
        is_turned: whether these are the transposes of the matrices.
    """

    stack: Stack
    divided: int | None
    is_turned: bool

    def restored(self, stack: Stack) -> Stack:
        """A result as the matrices lie."""
        return stack.mT if self.is_turned else stack


def exchange(
    recipes: Sequence[Matrices],
    leaves: Sequence[Array],
    kinds: Sequence[str],
    owners: Owners,
    run: Callable[[list[Stack]], Sequence[Stack]],
) -> tuple[Array, ...]:
    """What one device does: its own matrices, of what all devices have.

    Args:
        recipes: how its part of each leaf is taken apart.
        leaves: those parts.
        kinds: "whole", if every device has everything; "batch", if it has some of the
            matrices; "rows" or "columns", if it has a range of those of each matrix.
        owners: the devices.
        run: what one device does with stacks.
    """
    divided = [
        _divided(recipe, kind)
        for recipe, kind in zip(recipes, kinds, strict=True)
        for _ in recipe.parts
    ]

    def orthogonalized(stacks: list[Stack]) -> list[Stack]:
        pairs = list(zip(stacks, divided, strict=True))
        shapes = [_whole_shape(x, axis, owners.count) for x, axis in pairs]
        results: list[Any] = [None] * len(stacks)
        for numbers in by_shape(shapes):
            held = [_hold(*pairs[i], shapes[i]) for i in numbers]
            for i, x in zip(numbers, _one_shape(held, owners, run), strict=True):
                results[i] = x
        return results

    return apply_to_stacks(recipes, leaves, orthogonalized)


def _divided(recipe: Matrices, kind: str) -> int | None:
    if kind in ("whole", "batch"):
        return None if kind == "whole" else 0
    return 1 + (recipe.row_side if kind == "rows" else 1 - recipe.row_side)


def _whole_shape(x: Stack, divided: int | None, count: int) -> tuple[int, ...]:
    """The rows and columns of the matrices of which a device may have a part."""
    return tuple(n * count if i == divided else n for i, n in enumerate(x.shape))[1:]


def _hold(x: Stack, divided: int | None, shape: tuple[int, ...]) -> _Held:
    if shape[0] <= shape[1]:
        return _Held(x, divided, is_turned=False)
    turned = 3 - divided if divided in (1, 2) else divided
    return _Held(x.mT, turned, is_turned=True)


def _one_shape(
    held: Sequence[_Held],
    owners: Owners,
    run: Callable[[list[Stack]], Sequence[Stack]],
) -> list[Stack]:
    """Results for stacks of matrices of one shape, as the stacks are held."""
    groups = {
        axis: [i for i, x in enumerate(held) if x.divided == axis]
        for axis in (0, None, 1, 2)
    }
    groups = {axis: numbers for axis, numbers in groups.items() if numbers}
    # Each made in its place (`stacks.joined`) costs more here, unlike on one device: on
    # two H200s a step took 9.2 instead of 8.8 ms, of whole leaves 13.8 instead of 10.7.
    stacks = {
        axis: jnp.concatenate([held[i].stack for i in numbers])
        for axis, numbers in groups.items()
    }
    own = _given_to_owners(stacks, owners)
    (done,) = run([jnp.concatenate(list(own.values()))])
    parts = cut(done, [len(x) for x in own.values()])
    back = _given_back(dict(zip(own, parts, strict=True)), owners)
    results: list[Any] = [None] * len(held)
    for axis, numbers in groups.items():
        lengths = [len(held[i].stack) for i in numbers]
        for i, x in zip(numbers, cut(back[axis], lengths), strict=True):
            results[i] = held[i].restored(x)
    return results


def _given_to_owners(stacks: dict[Any, Stack], owners: Owners) -> dict[Any, Stack]:
    """The matrices that this device owns, by how they were divided."""
    own = dict(stacks)
    if None in own:
        shares = _in_shares(own[None], owners.count)
        own[None] = shares[lax.axis_index(owners.names)]
    parts = {
        axis: _in_shares(own[axis], owners.count) for axis in (1, 2) if axis in own
    }
    for axis, x in _all_to_all(parts, owners).items():
        x = jnp.moveaxis(x, 0, axis)
        shape = list(x.shape)
        shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
        own[axis] = x.reshape(shape)
    return own


def _given_back(own: dict[Any, Stack], owners: Owners) -> dict[Any, Stack]:
    """What `_given_to_owners` was given, and perhaps more matrices behind it."""
    back = dict(own)
    if None in back:
        back[None] = lax.all_gather(back[None], owners.names, tiled=True)
    parts = {}
    for axis in (1, 2):
        if axis in back:
            shape = list(back[axis].shape)
            shape[axis : axis + 1] = [owners.count, shape[axis] // owners.count]
            parts[axis] = jnp.moveaxis(back[axis].reshape(shape), axis, 0)
    for axis, x in _all_to_all(parts, owners).items():
        back[axis] = x.reshape(-1, *x.shape[2:])
    return back


def _in_shares(x: Stack, count: int) -> Array:
    """The matrices of each owner: [owners, L, M, N], zeros at the end."""
    more = -len(x) % count
    x = jnp.pad(x, ((0, more), (0, 0), (0, 0)))
    return x.reshape(count, -1, *x.shape[1:])


def _all_to_all(parts: dict[Any, Array], owners: Owners) -> dict[Any, Array]:
    """Arrays [owners, ...], of which each owner gets its own from all, in one go."""
    if not parts:
        return {}
    flat = [x.reshape(owners.count, -1) for x in parts.values()]
    sent = jnp.concatenate(flat, axis=1)
    got = lax.all_to_all(sent, owners.names, 0, 0, tiled=True)
    widths = np.cumsum([x.shape[1] for x in flat])[:-1]
    cuts = jnp.split(got, widths, axis=1)
    pairs = zip(parts.items(), cuts, strict=True)
    return {axis: x.reshape(part.shape) for (axis, part), x in pairs}
