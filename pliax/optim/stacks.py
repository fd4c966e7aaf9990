"""Stacks of matrices: taken from leaves, grouped by shape, cut apart."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .matrix_axes import Matrices


# Elements of the matrices X X^T: 1,024 tiles of 128 x 128, of which half are made, are
# four rounds of the 132 multiprocessors of an H200.
_ENOUGH = 2**24

Stack = Float[Array, "_ _ _"]  # each of several has sizes of its own


def apply_to_stacks(
    recipes: Sequence[Matrices],
    leaves: Sequence[Array],
    function: Callable[[list[Stack]], Sequence[Stack]],
) -> tuple[Array, ...]:
    """Leaves like these, made of what a function makes of all their stacks."""
    taken = [recipe.taken_apart(x) for recipe, x in zip(recipes, leaves, strict=True)]
    results = iter(function([stack for stacks in taken for stack in stacks]))
    return tuple(
        recipe.put_together([next(results) for _ in stacks])
        for recipe, stacks in zip(recipes, taken, strict=True)
    )


def by_shape(shapes: Iterable[tuple[int, ...]]) -> list[list[int]]:
    """The numbers of those that agree, whichever side is which."""
    return grouped(tuple(sorted(shape)) for shape in shapes)


def grouped(keys: Iterable[Any]) -> list[list[int]]:
    """The numbers of equal keys."""
    groups: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def portions(
    numbers: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> list[list[int]]:
    """Stacks of one shape in so many portions as are each enough for a device."""
    grams = sum(count * min(sides) ** 2 for count, *sides in shapes)
    count = max(1, min(grams // _ENOUGH, len(numbers)))
    return [part.tolist() for part in np.array_split(np.asarray(numbers), count)]


def wide(X: Stack) -> Stack:
    """The matrices, or their transposes if they have more rows than columns."""
    return X.mT if X.shape[1] > X.shape[2] else X


def cut(X: Array, lengths: Sequence[int]) -> list[Array]:
    """The consecutive parts of a stack."""
    found, start = [], 0
    for length in lengths:
        found.append(lax.slice_in_dim(X, start, start + length))
        start += length
    return found
