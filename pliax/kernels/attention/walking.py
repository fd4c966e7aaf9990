"""Walking over the blocks of a mask: which rows visit which columns, and in what order.

    row_lists   block mask  ->  lists of partial blocks, full ones, squares of full ones
    walk        one row     :   visit its full blocks, then its partial ones
    over_rows   all rows    :   each row, or the rows of a square together

Sequences and heads with lists of their own, (Bm, Km, Gm) of them, take step i of their
lists together; one that has come to its end is not active. Every order is fixed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pliax.core.typing import Leaf

from .block_lists import list_blocks, spread
from .block_mask import BlockMask


@dataclass(frozen=True)
class Layout:
    """What is static about one call.

    Attributes:
        scale: Factor of the products.
        lengths: Queries and keys.
        blocks: Queries and keys of a block.
        heads: Key heads, and query heads of each.
        square: Blocks of queries and of keys that a visit of full blocks takes at once.
        splits: Parts the keys of few queries are cut into; see `decoding`.
    """

    scale: float
    lengths: tuple[Any, Any]
    blocks: tuple[Any, ...]
    heads: tuple[int, int]
    square: tuple[int, ...]
    splits: int


class Visits(NamedTuple):
    """What each row visits, (R, Bm, Km, Gm[, C]): the first `num` of `columns`."""

    num: Leaf
    columns: Leaf


class Lists(NamedTuple):
    """What the rows of a square visit.

    Attributes:
        partial: Partial blocks of each row, (R / rows of a square, those rows, ...).
        full: Full blocks of each row that belong to no square, likewise.
        square: Squares of full blocks by their first column, (R / rows, ...); or None.
    """

    partial: Visits
    full: Visits
    square: Visits | None


class Visit(NamedTuple):
    """One step of a walk.

    Attributes:
        columns: The first key block of each list, (Bm, Km, Gm).
        active: Whether the list is not yet at its end; None if there is one list.
        size: Blocks of queries and of keys taken at once.
        partly: Whether `mask_mod` must be asked.
    """

    columns: Leaf
    active: Leaf
    size: tuple[int, ...]
    partly: bool


def row_lists(layout: Layout, block_mask: BlockMask | None) -> Lists:
    """What each row of blocks visits."""
    if block_mask is None:
        return _dense_lists(layout)
    partly = Visits(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = Visits(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    square = None
    if layout.square != (1, 1):
        full, square = _take_squares(block_mask, layout.square)
        square = Visits(*(_by_row(layout, x, 1)[:, 0] for x in square))
    partly, full = (
        Visits(*(_by_row(layout, x, layout.square[0]) for x in visits))
        for visits in (partly, full)
    )
    return Lists(partly, full, square)


def _by_row(
    layout: Layout, x: Int[Array, "Bm Hm R ..."], together: int
) -> Int[Array, "Q t Bm Km Gm ..."]:
    """Lists of the rows, `together` at a time; rows are filled up with empty lists."""
    heads = (1, 1) if x.shape[1] == 1 else layout.heads
    missing = -x.shape[2] % together
    x = jnp.pad(x, [(0, missing if axis == 2 else 0) for axis in range(x.ndim)])
    x = x.reshape(x.shape[0], *heads, -1, together, *x.shape[3:])
    return jnp.moveaxis(x, (3, 4), (0, 1))


def _dense_lists(layout: Layout) -> Lists:
    """Every key block: full, but for a last one that reaches beyond the end."""
    (T, S), (M, N) = layout.lengths, layout.blocks
    rows, columns = -(-T // M), -(-S // N)
    whole = jnp.arange(columns, dtype=jnp.int32)
    num = jnp.sum((whole + 1) * N <= S, dtype=jnp.int32)
    last = jnp.full((1,), columns - 1, jnp.int32)
    shape = (rows, 1, 1, 1, 1)

    def everywhere(num: Array, columns: Array) -> Visits:
        columns = jnp.broadcast_to(columns, (*shape, *columns.shape))
        return Visits(jnp.broadcast_to(num, shape), columns)

    return Lists(everywhere(columns - num, last), everywhere(num, whole), None)


def _take_squares(
    block_mask: BlockMask, square: tuple[int, ...]
) -> tuple[Visits, Visits]:
    """Full blocks outside and inside of squares that start at a multiple of their size.

    Squares are listed by row of squares and named by their first column.
    """
    rows, columns = square
    lists = block_mask.lists(transposed=False)
    full = spread(lists, block_mask.kv_indices.shape[-1])[1]
    R, C = full.shape[2:]
    padded = jnp.pad(full, ((0, 0), (0, 0), (0, -R % rows), (0, -C % columns)))
    pattern = "b h (r m) (c n) -> b h r c"
    whole = einops.reduce(padded, pattern, "all", m=rows, n=columns)
    inside = jnp.repeat(jnp.repeat(whole, rows, axis=2), columns, axis=3)
    num, first = list_blocks(whole)
    single = list_blocks(full & ~inside[:, :, :R, :C])
    return Visits(*single), Visits(num, first * columns)


def walk(visit: Callable[..., Any], lists: Lists, state: Any) -> Any:
    """Visit the blocks of one row: full ones, then partial ones."""
    state = visit_all(visit, lists.full, (1, 1), False, state)
    return visit_all(visit, lists.partial, (1, 1), True, state)


def visit_all(
    visit: Callable[..., Any],
    visits: Visits,
    size: tuple[int, ...],
    partly: bool,
    state: Any,
) -> Any:
    """One visit for each listed block: `(Visit, state) -> state`."""
    num, columns = visits
    alone = num.size == 1

    def step(i: Array, state: Any) -> Any:
        last = jnp.maximum(num - 1, 0)
        at = jnp.minimum(i, last)[..., None]
        column = jnp.take_along_axis(columns, at, axis=-1)[..., 0]
        active = None if alone else i < num
        return visit(Visit(column, active, size, partly), state)

    return jax.lax.fori_loop(0, jnp.max(num), step, state)


def visit_squares(
    layout: Layout, prepare: Callable[[], Any], squares: Visits | None, state: Any
) -> Any:
    """`visit_all` with what `prepare` gives, where there are any squares at all."""
    if squares is None:
        return state

    def some(state: Any) -> Any:
        return visit_all(prepare(), squares, layout.square, False, state)

    return jax.lax.cond(jnp.max(squares.num) > 0, some, lambda state: state, state)


def each_row(
    layout: Layout,
    row: Callable[..., Any],
    carry: Any,
    r: Array,
    lists: Lists,
    state: Any,
) -> Any:
    """The rows of a square in turn, from `r` on: (carry, r, lists, state) -> carry.

    Each goes on with its part of `state`, (B, K, G, M, ...) of the rows together.
    """
    rows, M = layout.square[0], layout.blocks[0]
    lists = lists._replace(square=None)
    if rows == 1:
        return row(carry, r, jax.tree.map(lambda x: x[0], lists), state)

    def step(carry: Any, x: Any) -> Any:
        i, lists = x
        part = partial(jax.lax.dynamic_slice_in_dim, slice_size=M, axis=3)
        of_row = jax.tree.map(lambda x: part(x, i * M), state)
        return row(carry, r + i, lists, of_row), None

    return jax.lax.scan(step, carry, (jnp.arange(rows, dtype=jnp.int32), lists))[0]


def over_rows(
    layout: Layout, rows: Callable[..., Any], carry: Any, lists: Lists
) -> Any:
    """Every row of squares in turn: (carry, its first row, its lists) -> carry."""
    first = jnp.arange(lists.partial.num.shape[0], dtype=jnp.int32)

    def step(carry: Any, x: Any) -> Any:
        return rows(carry, *x), None

    return jax.lax.scan(step, carry, (first * layout.square[0], lists))[0]
