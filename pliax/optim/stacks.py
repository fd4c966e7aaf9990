"""Stacks of matrices: taken from leaves, grouped by shape, cut apart."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float

from pliax.core.manual_axes import vary, varying_axes

from .matrix_axes import Matrices


# Elements of the matrices X X^T: 1,024 tiles of 128 x 128, of which half are made, are
# four rounds of the 132 multiprocessors of an H200.
_ENOUGH = 2**24
# Fused products take pieces of 64; those of (512, 1376) are made of (512, 1408).
_PIECE, _LONG, _LITTLE = 64, 512, 0.05

Stack = Float[Array, "_ _ _"]  # each of several has sizes of its own
type Sizes = tuple[int, int, int]  # of one


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


def grouped(keys: Iterable[Any]) -> list[list[int]]:
    """The numbers of equal keys."""
    groups: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def devices(x: Any) -> frozenset[Any] | None:
    """Where an array lies; None of a tracer, which says nothing."""
    is_somewhere = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    return frozenset(x.devices()) if is_somewhere else None


def portions(
    numbers: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> list[list[int]]:
    """Stacks of one shape in portions that are about enough for a device."""
    grams = sum(count * min(sides) ** 2 for count, *sides in shapes)
    most = len(numbers)
    count = max(1, min(grams // _ENOUGH, most))
    # Of one size, or there would be more kernels to compile.
    even = [n for n in range(count, 2 * count) if most % n == 0]
    parts = np.array_split(np.asarray(numbers), min(even, default=count))
    return [part.tolist() for part in parts]


def whole_pieces(sides: tuple[int, ...]) -> tuple[int, ...]:
    """Sides in whole pieces of a fused product, where it serves and that is little."""
    padded = tuple(n + -n % _PIECE for n in sides)
    is_little = all(p <= n * (1 + _LITTLE) for p, n in zip(padded, sides, strict=True))
    return padded if min(sides) >= _LONG and is_little else sides


def joined(stacks: Sequence[Stack], sides: tuple[int, ...]) -> Stack:
    """One stack of all, of matrices that are filled with zeros up to those sides.

    Each is made in its place. Of more than four XLA's concatenation asks for every
    element whose it is: 24 of (896, 4864) took 0.49 instead of 0.19 ms on an H200.
    """
    first, start = stacks[0], 0
    is_whole = sides == first.shape[1:]
    if len(stacks) == 1 and is_whole:
        return first
    blank = lax.empty if is_whole else jnp.zeros
    whole = blank((sum(map(len, stacks)), *sides), first.dtype)
    whole = vary(whole, varying_axes(first))
    for stack in stacks:
        whole = lax.dynamic_update_slice(whole, stack, (start, 0, 0))
        start += len(stack)
    return whole


def cut(X: Array, lengths: Sequence[int], *sides: int) -> list[Array]:
    """The consecutive parts of a stack, up to those sides; whole if none are named."""
    found, start, sides = [], 0, sides or X.shape[1:]
    for length in lengths:
        first = (start, *(0 for _ in sides))
        found.append(lax.slice(X, first, (start + length, *sides)))
        start += length
    return found
