"""Scalar mods on whole tiles of scores, and the blocks a mask is made of.

    score_mod, mask_mod : scalars -> scalar     become     tile -> tile

Mods are written for one score at a time. Each index is mapped by its own `vmap`, so
that what depends on the query alone (a document id, say) is computed once a row of the
tile and not once a score.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pliax.core.jaxprs import ClosedFunction
from pliax.core.typing import Leaf


def score_tile(
    score_mod: ClosedFunction | None,
    scores: Float[Array, "G M N"],
    b: Int[Array, ""],
    h: Int[Array, " G"],
    q_idx: Int[Array, " M"],
    kv_idx: Int[Array, " N"],
) -> Float[Array, "G M N"]:
    """`score_mod` on a tile: heads `h`, queries `q_idx`, keys `kv_idx`."""
    if score_mod is None:
        return scores
    over_keys = jax.vmap(score_mod, (0, None, None, None, 0))
    over_queries = jax.vmap(over_keys, (0, None, None, 0, None))
    over_heads = jax.vmap(over_queries, (0, None, 0, None, None))
    return over_heads(scores, b, h, q_idx, kv_idx).astype(scores.dtype)


def score_tile_where(
    score_mod: ClosedFunction | None,
    visible: Bool[Array, "G M N"],
    scores: Float[Array, "G M N"],
    b: Int[Array, ""],
    h: Int[Array, " G"],
    q_idx: Int[Array, " M"],
    kv_idx: Int[Array, " N"],
) -> Float[Array, "G M N"]:
    """`score_mod` at the visible places of a tile, and there only.

    A masked place repeats the first visible one of its head. For the gradient of what
    the mod captured: its derivative at a masked place may be infinite, and zero times
    infinity is not zero.
    """
    if score_mod is None:
        return scores
    first = jnp.argmax(visible.reshape(len(visible), -1), axis=1)[:, None, None]
    row, column = first // visible.shape[2], first % visible.shape[2]
    flat = jax.lax.stop_gradient(scores).reshape(len(scores), -1, 1)
    seen = jnp.take_along_axis(flat, first, axis=1)
    places = (
        jnp.where(visible, scores, seen),
        b,
        h,
        jnp.where(visible, q_idx[None, :, None], q_idx[row]),
        jnp.where(visible, kv_idx[None, None, :], kv_idx[column]),
    )
    over_keys = jax.vmap(score_mod, (0, None, None, 0, 0))
    over_queries = jax.vmap(over_keys, (0, None, None, 0, 0))
    over_heads = jax.vmap(over_queries, (0, None, 0, 0, 0))
    return over_heads(*places).astype(scores.dtype)


def mask_tile(
    mask_mod: Callable[..., Any],
    b: Int[Array, ""],
    h: Int[Array, " G"],
    q_idx: Int[Array, " M"],
    kv_idx: Int[Array, " N"],
) -> Bool[Array, "G M N"]:
    """`mask_mod` on a tile; True where the query may see the key."""
    over_keys = jax.vmap(mask_mod, (None, None, None, 0))
    over_queries = jax.vmap(over_keys, (None, None, 0, None))
    over_heads = jax.vmap(over_queries, (None, 0, None, None))
    return over_heads(b, h, q_idx, kv_idx)


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


def block_positions(
    block: Int[Array, ""] | int, size: int, length: int
) -> tuple[Int[Array, " size"], Bool[Array, " size"]]:
    """Indices of one block, kept inside the true length, and which of them are real.

    The last block of a ragged length reaches beyond the end. Its indices are clamped,
    so that a mod never sees one it was not written for.
    """
    index = block * size + jnp.arange(size, dtype=jnp.int32)
    return jnp.minimum(index, length - 1), index < length
