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
    mapped = [None if _is_one(x.shape[0]) else 0 for x in args]
    args = tuple(x[0] if m is None else x for x, m in zip(args, mapped, strict=True))
    if all(m is None for m in mapped):
        return jax.tree.map(lambda x: x[None], inner(*args))
    return jax.vmap(inner, mapped)(*args)


def _is_one(n: Any) -> bool:
    """Whether a size is 1; a symbolic one is a size like others and is not asked."""
    return isinstance(n, int) and n == 1


def modify(
    score_mod: ClosedFunction | None, scores: Float[Array, "B K G M N"], place: Place
) -> Float[Array, "B K G M N"]:
    """`score_mod` on a tile of scores."""
    if score_mod is None:
        return scores
    return broadcast(score_mod, 5, scores, *place).astype(scores.dtype)


def look(mask_mod: ClosedFunction, place: Place) -> Bool[Array, "..."]:
    """`mask_mod` on a tile, True where the query may see the key.

    Axes of batch and heads along which no index varies that it reads are 1: a mask for
    all heads is not computed, nor reduced over, once a head.
    """
    read = (x if mask_mod.reads(i) else x[:1, :1, :1] for i, x in enumerate(place))
    return broadcast(mask_mod, 5, *read)


def retreat(
    visible: Bool[Array, "..."], scores: Float[Array, "B K G M N"], place: Place
) -> tuple[Float[Array, "B K G M N"], Place]:
    """Scores and places of a tile with every masked one replaced by a visible one.

    For the gradient of what a mod captured: its derivative at a masked place may be
    infinite, and zero times infinity is not zero. A masked key gives way to the first
    one its query sees, a query that sees nothing to the first of its head that does,
    and a head without any to the first head that has one. So an index keeps the axes it
    had, but for that of the keys: what depends on the query alone still does.
    """
    heads = visible.shape[:3]
    sees = jnp.any(visible, axis=4, keepdims=True)
    head_sees = jnp.any(sees, axis=3, keepdims=True)
    column, row = jnp.argmax(visible, axis=4), jnp.argmax(sees[..., 0], axis=3)
    donor = jnp.unravel_index(jnp.argmax(head_sees.reshape(-1)), heads)

    def of_row(x: Array) -> Array:
        """Its value at the first key each query sees, (B, K, G, M, 1)."""
        return broadcast(_at, 4, x, column)[..., None]

    def of_head(x: Array) -> Array:
        """Its value at the first query of each head that sees something."""
        pick = broadcast(_at, 3, x, row)[:, :, :, None]
        lent = pick
        for axis in range(3):
            if 1 not in (heads[axis], pick.shape[axis]):
                lent = jax.lax.dynamic_index_in_dim(lent, donor[axis], axis)
        return jnp.where(head_sees, pick, lent)

    def of_key(x: Array) -> Array:
        first = of_row(x)
        return jnp.where(visible, x, jnp.where(sees, first, of_head(first)))

    b, h, q_idx, kv_idx = place
    q_idx = jnp.where(sees, q_idx, of_head(q_idx))
    b, h = (jnp.where(head_sees, x, of_head(x)) for x in (b, h))
    held = of_key(jax.lax.stop_gradient(scores))
    return jnp.where(visible, scores, held), Place(b, h, q_idx, of_key(kv_idx))


def _at(x: Array, index: Array) -> Array:
    """An element, or the only one."""
    return x[index % x.shape[0]]


def softmax_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """float64 for float64 arrays, else float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
