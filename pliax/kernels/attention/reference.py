"""The definition of flex_attention: the whole score matrix, softmax in float32.

    s   = score_mod(scale <q, k>, b, h, q_idx, kv_idx),   -inf where not mask_mod
    lse = log sum exp s,     out = sum exp(s - lse) v

Every other implementation is judged by this one. Memory is quadratic. All of JAX's
transformations apply, since it is plain JAX.

Two details keep NaN out. `score_mod` is evaluated at visible places only, because its
derivative at a masked place may be infinite, and zero times infinity is not zero. A row
without any visible key takes 0 as its maximum, so that it never computes inf - inf.

Sharp edge: masked keys and values must be finite, since 0 NaN is NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float

from pliax.core.jaxprs import ClosedFunction

from .tiles import mask_tile, score_tile, score_tile_where, softmax_dtype


def attend(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K V"],
    *,
    score_mod: ClosedFunction | None,
    block_mask: Any,
    scale: float,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B T H"], Float[Array, "B T H"]]:
    """Attention by its definition: output, log-sum-exp and maximum of the scores."""
    dtype = softmax_dtype(query.dtype)
    groups = query.shape[2] // key.shape[2]
    q, k, v = (
        rearrange(x.astype(dtype), "b t (k g) d -> b k g t d", g=g)
        for x, g in ((query, groups), (key, 1), (value, 1))
    )
    highest = jax.lax.Precision.HIGHEST
    products = jnp.einsum(
        "bkgtd,bkgsd->bkgts", q, _repeat(k, groups), precision=highest
    )
    scores, visible = _modified(
        rearrange(products, "b k g t s -> b (k g) t s") * dtype.type(scale),
        score_mod,
        None if block_mask is None else block_mask.mask_mod,
    )
    weights, lse, maximum = _softmax(scores, visible)
    weights = rearrange(weights, "b (k g) t s -> b k g t s", g=groups)
    out = jnp.einsum(
        "bkgts,bkgsv->bkgtv", weights, _repeat(v, groups), precision=highest
    )
    out = rearrange(out, "b k g t v -> b t (k g) v").astype(query.dtype)
    return out, rearrange(lse, "b h t -> b t h"), rearrange(maximum, "b h t -> b t h")


def _repeat(x: Float[Array, "B K 1 S D"], groups: int) -> Float[Array, "B K G S D"]:
    return jnp.broadcast_to(x, (*x.shape[:2], groups, *x.shape[3:]))


def _modified(
    scores: Float[Array, "B H T S"],
    score_mod: ClosedFunction | None,
    mask_mod: ClosedFunction | None,
) -> tuple[Float[Array, "B H T S"], Bool[Array, "B H T S"]]:
    """Scores after both mods, and which of them are visible."""
    b, h, q_idx, kv_idx = (jnp.arange(n, dtype=jnp.int32) for n in scores.shape)
    if mask_mod is None:
        tiles = jax.vmap(score_tile, (None, 0, 0, None, None, None))
        scores = tiles(score_mod, scores, b, h, q_idx, kv_idx)
        return scores, jnp.ones(scores.shape, bool)
    tiles = jax.vmap(mask_tile, (None, 0, None, None, None))
    visible = tiles(mask_mod, b, h, q_idx, kv_idx)
    tiles = jax.vmap(score_tile_where, (None, 0, 0, 0, None, None, None))
    scores = tiles(score_mod, visible, scores, b, h, q_idx, kv_idx)
    return jnp.where(visible, scores, -jnp.inf), visible


def _softmax(
    scores: Float[Array, "B H T S"], visible: Bool[Array, "B H T S"]
) -> tuple[Float[Array, "B H T S"], Float[Array, "B H T"], Float[Array, "B H T"]]:
    """Weights, log-sum-exp and maximum; a row that sees nothing has weights 0."""
    maximum = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
    shift = jnp.where(maximum == -jnp.inf, jnp.zeros_like(maximum), maximum)
    exponentials = jnp.where(visible, jnp.exp(scores - shift[..., None]), 0.0)
    total = jnp.sum(exponentials, axis=-1)
    empty = total == 0.0
    safe = jnp.where(empty, jnp.ones_like(total), total)
    lse = jnp.where(empty, -jnp.inf, shift + jnp.log(safe))
    return exponentials / safe[..., None], lse, maximum
