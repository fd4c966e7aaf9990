"""The definition of flex_attention: the whole score matrix, softmax in float32.

    s   = score_mod(scale <q, k>, b, h, q_idx, kv_idx),   -inf where not mask_mod
    lse = log sum exp s,     out = sum exp(s - lse) v

Every other implementation is judged by this one. Memory is quadratic. All of JAX's
transformations apply, since it is plain JAX.

Two details keep NaN out. `score_mod` is evaluated at visible places only, because its
derivative at a masked place may be infinite, and zero times infinity is not zero. A row
without any visible key takes 0 as its maximum, so that it never computes inf - inf.

A key or query that takes no part, because nothing sees it or it sees nothing, may hold
anything, also NaN: it is replaced by 0 before products with weights of 0.
"""

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float

from pliax.core.jaxprs import ClosedFunction

from .derivatives import floating_captures, widened, with_floating_captures
from .tiles import Place, broadcast, modify, retreat, softmax_dtype


def attend(
    query: Float[Array, "B T H D"],
    key: Float[Array, "#B S K D"],
    value: Float[Array, "#B S K V"],
    *,
    score_mod: ClosedFunction | None,
    block_mask: Any,
    scale: float,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B T H"], Float[Array, "B T H"]]:
    """Attention by its definition: output, log-sum-exp and maximum of the scores."""
    dtype, score_mod = softmax_dtype(query.dtype), widened(score_mod)
    heads = key.shape[2]
    q = rearrange(query.astype(dtype), "b t (k g) d -> b k g t d", k=heads)
    k, v = (rearrange(x.astype(dtype), "b s k d -> b k s d") for x in (key, value))
    place = _places(q, k)
    visible = None if block_mask is None else broadcast(block_mask.visible, 5, *place)
    k, v = (jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in (k, v))
    q, k, v = _without_unseen(q, k, v, visible)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bkgtd,bksd->bkgts", q, k, precision=highest) * scale
    if visible is None:
        scores = modify(score_mod, scores, place)
        visible = jnp.ones_like(scores, bool)
    else:
        score_mod = _without_gradient_unless(jnp.any(visible), score_mod)
        scores = modify(score_mod, *retreat(visible, scores, place))
        scores = jnp.where(visible, scores, -jnp.inf)
    weights, lse, maximum = _softmax(scores, visible)
    out = jnp.einsum("bkgts,bksv->bkgtv", weights, v, precision=highest)
    out, lse, maximum = (
        rearrange(x, "b k g t ... -> b t (k g) ...") for x in (out, lse, maximum)
    )
    return out.astype(query.dtype), lse, maximum


def _places(q: Float[Array, "B K G T D"], k: Float[Array, "#B K S D"]) -> Place:
    sizes = (q.shape[0], q.shape[1] * q.shape[2], q.shape[3], k.shape[2])
    b, h, q_idx, kv_idx = (jnp.arange(n, dtype=jnp.int32) for n in sizes)
    return Place(
        b.reshape(-1, 1, 1, 1, 1),
        h.reshape(1, *q.shape[1:3], 1, 1),
        q_idx.reshape(1, 1, 1, -1, 1),
        kv_idx.reshape(1, 1, 1, 1, -1),
    )


def _without_unseen(
    q: Array, k: Array, v: Array, visible: Bool[Array, "..."] | None
) -> tuple[Array, Array, Array]:
    """0 in place of queries that see nothing, and of keys and values nothing sees."""
    if visible is None:
        return q, k, v
    sees = jnp.any(visible, axis=4)[..., None]
    seen = jnp.any(visible, axis=(2, 3))[..., None]
    q = jnp.where(sees, q, jnp.zeros_like(q))
    k, v = (jnp.where(seen, x, jnp.zeros_like(x)) for x in (k, v))
    return q, k, v


def _without_gradient_unless(
    some: Bool[Array, ""], score_mod: ClosedFunction | None
) -> ClosedFunction | None:
    """Where nothing at all is visible, there is no place with a finite derivative."""
    captured = floating_captures(score_mod)
    kept = [jnp.where(some, x, jax.lax.stop_gradient(x)) for x in captured]
    return with_floating_captures(score_mod, kept)


def _softmax(
    scores: Float[Array, "B K G T S"], visible: Bool[Array, "..."]
) -> tuple[Float[Array, "B K G T S"], Float[Array, "B K G T"], Float[Array, "B K G T"]]:
    """Weights, log-sum-exp and maximum; a row that sees nothing has weights 0."""
    maximum = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
    shift = jnp.where(maximum == -jnp.inf, jnp.zeros_like(maximum), maximum)
    exponentials = jnp.where(visible, jnp.exp(scores - shift[..., None]), 0.0)
    total = jnp.sum(exponentials, axis=-1)
    empty = total == 0.0
    safe = jnp.where(empty, jnp.ones_like(total), total)
    lse = jnp.where(empty, -jnp.inf, shift + jnp.log(safe))
    return exponentials / safe[..., None], lse, maximum
