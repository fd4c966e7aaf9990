"""Scalar mods on whole tiles of scores, and the blocks a mask is made of.

    score_mod, mask_mod : scalars -> scalar     become     tile -> tile

Mods are written for one score at a time. Each index is mapped by its own `vmap`, so
that what depends on the query alone (a document id, say) is computed once a row of the
tile and not once a score.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pliax.core.jaxprs import ClosedFunction


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
