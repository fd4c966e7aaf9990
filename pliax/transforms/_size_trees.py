"""Cells of sizes, joined where a function does the same with them.

A trace that tells apart all sizes JAX tells apart finds more cells than matter: JAX
looks for sizes of 1 nearly everywhere. The cells are the leaves of a tree of questions.
From the leaves upwards, one side of a question is dropped if the other side, taken for
all sizes, has the same outcome there: results of equal shapes or the same error, after
the same answers to what the user's own code asked.
"""

import dataclasses
from collections.abc import Sequence

import jax

from ._proofs import Prover, Undecided, every
from ._size_cells import ArrayType, Branch, Cell


def merge(cells: Sequence[Cell], prover: Prover, depth: int = 0) -> list[Cell]:
    """Cells that agree on their first `depth` branches, the fewest that matter.

    Args:
        cells: they do not overlap.
        prover: knows what was declared of the sizes.
        depth: how many branches the cells share.
    """
    if len(cells) == 1 or any(len(cell.path) <= depth for cell in cells):
        return list(cells)
    sides: dict = {}
    for cell in cells:
        sides.setdefault(cell.path[depth], []).append(cell)
    merged = [merge(side, prover, depth + 1) for side in sides.values()]
    if len(sides) == 2 and len({branch.question for branch in sides}) == 1:
        for kept, dropped in (merged, merged[::-1]):
            joined = [_without(cell, depth) for cell in kept]
            if _is_the_same(joined, dropped, depth, prover):
                return joined
    return [cell for side in merged for cell in side]


def _without(cell: Cell, depth: int) -> Cell:
    path = (*cell.path[:depth], *cell.path[depth + 1 :])
    return dataclasses.replace(cell, path=path)


def _is_the_same(
    joined: list[Cell], dropped: list[Cell], depth: int, prover: Prover
) -> bool:
    """Whether the joined cells tell what happens in the region of the dropped ones."""
    region = dropped[0].conditions[: depth + 1]
    try:
        return (
            _cover(joined, region, prover)
            and _cover(dropped, region, prover)
            and all(_agree(a, b, prover) for a in joined for b in dropped)
        )
    except Undecided:
        return False


def _cover(cells: list[Cell], region: Sequence[str], prover: Prover) -> bool:
    found = prover.find(*region, outside=[every(cell.conditions) for cell in cells])
    return found is None


def _agree(a: Cell, b: Cell, prover: Prover) -> bool:
    """Whether two cells have the same outcome wherever they overlap."""
    both = (*a.conditions, *b.conditions)
    one, other = a.outcome, b.outcome
    failed = (one.kind, one.place), (other.kind, other.place)
    trees = [jax.tree.structure(x.results) for x in (one, other)]
    if one.asked == other.asked and failed[0] == failed[1] and trees[0] == trees[1]:
        pairs = zip(*(jax.tree.leaves(x.results) for x in (one, other)), strict=True)
        if all(_are_equal(x, y, both, prover) for x, y in pairs):
            return True
    return prover.find(*both) is None


def _are_equal(
    x: ArrayType, y: ArrayType, region: Sequence[str], prover: Prover
) -> bool:
    if x.dtype != y.dtype or len(x.shape) != len(y.shape):
        return False
    pairs = zip(x.shape, y.shape, strict=True)
    return all(m == n or prover.find(*region, f"{m} != {n}") is None for m, n in pairs)


def shorten(path: Sequence[Branch], prover: Prover) -> tuple[str, ...]:
    """The conditions of a path without those that follow from the others."""
    # What JAX asked goes first, then what rules a case out: "a != 1" before "b == 1".
    order = sorted(path, key=lambda b: (not b.is_from_jax, " == " in b.condition))
    kept = [branch.condition for branch in path]
    for text in (branch.condition for branch in order):
        others = [other for other in kept if other != text]
        try:
            if prover.find(*others, outside=[text]) is None:
                kept = others
        except Undecided:  # it may follow or not: one condition more is no mistake
            pass
    return tuple(kept)
