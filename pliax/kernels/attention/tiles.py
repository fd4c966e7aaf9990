"""Scalar mods on whole tiles of scores, and the blocks a mask is made of.

    score_mod, mask_mod : scalars -> scalar     become     tile -> tile

Mods are written for one score at a time, and mapped over the axes along which their
arguments vary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pliax.core.jaxprs import ClosedFunction
from pliax.core.typing import Leaf


class Place(NamedTuple):
    """Where the scores of a tile lie: five axes (B, K, G, M, N), 1 where shared.

    Batch, key heads, query heads of a key head, queries, keys. Each index keeps the
    axes it varies along, so that what depends on the query alone (a document id, say)
    is computed once a row of the tile and not once a score.

    Attributes:
        b: Batch, (B, 1, 1, 1, 1).
        h: Query head, (1, K, G, 1, 1).
        q_idx: Queries, (1 or B, 1 or K, 1 or G, M, 1).
        kv_idx: Keys, (1 or B, 1 or K, 1 or G, 1, N).
    """

    b: Leaf
    h: Leaf
    q_idx: Leaf
    kv_idx: Leaf


def broadcast(function: Callable[..., Any], axes: int, *args: Array) -> Any:
    """`function` mapped over the first `axes` axes, which broadcast as NumPy's do.

    An axis that is 1 in all arguments is not mapped and stays 1 in the results: what
    does not vary along it is computed once.
    """
    if axes == 0:
        return function(*args)
    inner = partial(broadcast, function, axes - 1)
    mapped = [0 if x.shape[0] != 1 else None for x in args]
    args = tuple(x[0] if m is None else x for x, m in zip(args, mapped, strict=True))
    if all(m is None for m in mapped):
        return jax.tree.map(lambda x: x[None], inner(*args))
    return jax.vmap(inner, mapped)(*args)


def modify(
    score_mod: ClosedFunction | None, scores: Float[Array, "B K G M N"], place: Place
) -> Float[Array, "B K G M N"]:
    """`score_mod` on a tile of scores."""
    if score_mod is None:
        return scores
    return broadcast(score_mod, 5, scores, *place).astype(scores.dtype)


def look(mask_mod: Callable[..., Any], place: Place) -> Bool[Array, "..."]:
    """`mask_mod` on a tile, True where the query may see the key."""
    return broadcast(mask_mod, 5, *place)


def retreat(
    visible: Bool[Array, "..."], scores: Float[Array, "B K G M N"], place: Place
) -> tuple[Float[Array, "B K G M N"], Place]:
    """Scores and places of a tile with every masked one replaced by a visible one.

    For the gradient of what a mod captured: its derivative at a masked place may be
    infinite, and zero times infinity is not zero. A head takes its own first visible
    place; one that sees nothing takes that of the first head which sees something.
    """
    heads = visible.shape[:3]
    flat = visible.reshape(*heads, -1)
    sees = jnp.any(flat, axis=-1)[..., None, None]
    first = jnp.argmax(flat, axis=-1)
    row, column = first // visible.shape[4], first % visible.shape[4]
    donor = jnp.unravel_index(jnp.argmax(sees.reshape(-1)), heads)

    def of_head(x: Array) -> Array:
        """Its value at the place of each head, (B, K, G, 1, 1)."""
        pick = broadcast(_at, 3, x, row, column)[..., None, None]
        lent = pick
        for axis in range(3):
            if 1 not in (heads[axis], x.shape[axis]):
                lent = jax.lax.dynamic_index_in_dim(lent, donor[axis], axis)
        return jnp.where(sees, pick, lent)

    held = jax.lax.stop_gradient(scores)
    places = [jnp.where(visible, x, of_head(x)) for x in place]
    return jnp.where(visible, scores, of_head(held)), Place(*places)


def _at(tile: Array, row: Array, column: Array) -> Array:
    return tile[row % tile.shape[0], column % tile.shape[1]]


def softmax_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """float64 for float64 arrays, else float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
