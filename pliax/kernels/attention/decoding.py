"""Few queries and many keys: the keys are split, and the parts merged by their lse.

One row of queries would walk over its key blocks alone, a small product at a time.
Here the list of a row is cut into parts of equal length which walk together, and are
merged (`merging`). The query heads of a key head are the rows of one product
(`xla.compare`). Lengths are data: a mask with traced contents says which blocks a cache
has filled.

References:
    Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pliax.core.manual_axes import vary, varying_axes

from .block_mask import BlockMask
from .merging import merge
from .walking import Layout, Lists, Visits, over_rows, row_lists, walk
from .xla import fold, put_row, row_of, split


def forward(
    layout: Layout, arrays: Any, score_mod: Any, block_mask: BlockMask | None
) -> tuple[Float[Array, "B T H ..."], ...]:
    """Output, log-sum-exp, maximum and logarithm of the sum, as `xla.forward`."""
    axes = varying_axes(arrays, score_mod, block_mask)
    arrays, score_mod, block_mask = vary((arrays, score_mod, block_mask), axes)
    query, tile = split(layout, arrays, score_mod, block_mask)

    def rows(results: Any, r: Array, lists: Lists) -> Any:
        q = row_of(layout, query, r, 1)
        start = vary(tile.nothing_seen(query, 1), axes)

        def part(lists: Lists) -> Any:
            return walk(lambda: partial(fold, tile, q, r), lists, start)

        cut = partial(_cut, layout.splits)
        parts = Lists(cut(lists.partial), cut(lists.full))
        found = merge(jax.vmap(part)(parts))
        return tuple(
            put_row(layout, whole, r, x)
            for whole, x in zip(results, found, strict=True)
        )

    results = tile.no_results(query)
    results = over_rows(
        layout, rows, vary(results, axes), row_lists(layout, block_mask)
    )
    return tuple(x[:, : layout.lengths[0]] for x in results)


def _cut(parts: int, visits: Visits) -> Visits:
    """The list of one row as lists of equal length, by a leading axis."""
    num, columns = visits.num[0], visits.columns[0]
    length = (num + parts - 1) // parts

    def part(i: Array) -> Visits:
        first = i * length
        position = jax.lax.broadcasted_iota(jnp.int32, columns.shape, columns.ndim - 1)
        position = jnp.minimum(first[..., None] + position, columns.shape[-1] - 1)
        taken = jnp.take_along_axis(columns, position, axis=-1)
        return Visits(jnp.clip(num - first, 0, length), taken)

    return jax.vmap(part)(jnp.arange(parts, dtype=jnp.int32))
