"""Blocks of a mask as lists and as matrices, one the inverse of the other.

    all_lists : partial, full  ->  lists by row and by column
    spread    : lists by row   ->  partial, full

Matrices are bool (B, H, rows, columns): there is one entry a block, never one a score.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from pliax.core.typing import Leaf


class BlockLists(NamedTuple):
    """For every row of blocks the columns to visit: partial ones and full ones.

    Attributes:
        num: How many are partial, int32 (B, H, rows).
        indices: Which, ascending, the first `num` valid; int32 (B, H, rows, columns).
        full_num: How many are full.
        full_indices: Which.
    """

    num: Leaf
    indices: Leaf
    full_num: Leaf
    full_indices: Leaf


class TellingLists(NamedTuple):
    """For every row of blocks the columns to visit, in one list: full ones first.

    Attributes:
        full: How many are full, int32 (B, H, rows).
        total: How many there are.
        entries: Which, and what each meets (`column_and_met`), the first `total` valid,
            full ones and others ascending; int32 (B, H, rows, columns).
    """

    full: Leaf
    total: Leaf
    entries: Leaf

    def apart(self) -> BlockLists:
        """Lists of partial and of full blocks, which tell nothing."""
        columns, _ = column_and_met(self.entries)
        full, total = self.full[..., None], self.total[..., None]
        place = lax.broadcasted_iota(jnp.int32, columns.shape, 3)
        behind = jnp.minimum(place + full, columns.shape[3] - 1)
        partial = jnp.take_along_axis(columns, behind, axis=3)
        return BlockLists(
            self.total - self.full,
            jnp.where(place < total - full, partial, 0),
            self.full,
            jnp.where(place < full, columns, 0),
        )


COLUMN_BITS, MET_BITS = 24, 7  # of an entry in a list that tells


def column_and_met(entry: Any) -> tuple[Any, Any]:
    """The column of a block, and a bit for each condition: whether all scores meet it.

    Of a condition there is no bit for, it is not said.
    """
    return entry & ((1 << COLUMN_BITS) - 1), entry >> COLUMN_BITS


@jax.jit
def all_lists(
    partial: Bool[Array, "B H R C"], full: Bool[Array, "B H R C"]
) -> tuple[Array, ...]:
    """Partial and full blocks by row, then by column: the fields of a BlockMask."""
    return (
        *list_blocks(partial),
        *list_blocks(full),
        *list_blocks(jnp.swapaxes(partial, 2, 3)),
        *list_blocks(jnp.swapaxes(full, 2, 3)),
    )


@jax.jit(static_argnums=1)
def spread(
    lists: BlockLists, columns: Any
) -> tuple[Bool[Array, "B H R C"], Bool[Array, "B H R C"]]:
    """The inverse of listing: which blocks are partial, and which are full."""

    def row(num: Array, indices: Array) -> Array:
        valid = (jnp.arange(indices.shape[0], dtype=jnp.int32) < num) & (indices >= 0)
        places = jnp.where(valid, indices, columns)
        return jnp.zeros(columns, bool).at[places].set(True, mode="drop")

    rows = jax.vmap(jax.vmap(jax.vmap(row)))
    return rows(lists.num, lists.indices), rows(lists.full_num, lists.full_indices)


def with_ragged_partial(
    partial: Bool[Array, "B H R C"],
    full: Bool[Array, "B H R C"],
    lengths: tuple[Any, Any],
    sizes: tuple[int, int],
) -> tuple[Bool[Array, "B H R C"], Bool[Array, "B H R C"]]:
    """A block that reaches beyond the end is never full."""
    whole = whole_blocks(lengths, sizes)
    return partial | (full & ~whole), full & whole


def block_counts(lengths: tuple[Any, Any], sizes: tuple[int, int]) -> tuple[Any, Any]:
    """Rows and columns of blocks."""
    return -(-lengths[0] // sizes[0]), -(-lengths[1] // sizes[1])


def whole_blocks(
    lengths: tuple[Any, Any], sizes: tuple[int, int]
) -> Bool[Array, "1 1 R C"]:
    """Which blocks do not reach beyond the end."""
    rows, columns = (
        (jnp.arange(count, dtype=jnp.int32) + 1) * size <= length
        for count, size, length in zip(
            block_counts(lengths, sizes), sizes, lengths, strict=True
        )
    )
    return (rows[:, None] & columns[None, :])[None, None]


def listed(
    num: Int[np.ndarray, "*rows"], indices: Int[np.ndarray, "*rows W"]
) -> Bool[np.ndarray, "*rows W"]:
    """Which entries of the lists are valid."""
    return np.arange(indices.shape[-1]) < num[..., None]


def known(arrays: Sequence[Any]) -> bool:
    """Whether the contents are at hand: not traced, donated or on another host."""
    return all(
        isinstance(x, np.ndarray)
        or (
            isinstance(x, jax.Array)
            and not isinstance(x, Tracer)
            and not x.is_deleted()
            and x.is_fully_addressable
        )
        for x in arrays
    )


@functools.partial(jnp.vectorize, signature="(c)->(),(c)")
def list_blocks(blocks: Bool[Array, " C"]) -> tuple[Int[Array, ""], Int[Array, " C"]]:
    """How many are True, and their indices in front, ascending; 0 behind the last.

    By counting and not by sorting: 8.7 for 31 ms, 1024 rows of 1024 on 2 CPU cores.
    """
    count = jnp.cumsum(blocks, dtype=jnp.int32)
    columns = jnp.arange(blocks.shape[0], dtype=jnp.int32)
    target = jnp.where(blocks, count - 1, blocks.shape[0])
    return count[-1], jnp.zeros_like(columns).at[target].set(columns, mode="drop")
