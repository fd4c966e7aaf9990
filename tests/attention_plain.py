"""Attention by its formula, over whole arrays in plain jnp, with no code of ours.

In float64 it is the golden of every law, in the working dtype its rival: each step is
taken in the dtype of the arrays. `score` and `visible` are written for whole arrays:
indices come as (B, 1, 1, 1), (1, H, 1, 1), (1, 1, T, 1) and (1, 1, 1, S).
"""

import jax
import jax.numpy as jnp


def attention(query, key, value, *, score=None, visible=None, scale=None):
    """Output (B, T, H, V), log-sum-exp and maximum (B, T, H).

    A query that sees nothing gives 0, -inf and -inf.
    """
    B, T, H, D = query.shape
    S, K = key.shape[1:3]
    key, value = (
        jnp.repeat(jnp.broadcast_to(x, (B, *x.shape[1:])), H // K, axis=2)
        for x in (key, value)
    )
    s = jnp.einsum("bthd,bshd->bhts", query, key) * (
        D**-0.5 if scale is None else scale
    )
    index = indices(B, H, T, S)
    s = s if score is None else jnp.broadcast_to(score(s, *index), s.shape)
    if visible is not None:
        s = jnp.where(visible(*index), s, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(s, axis=-1))
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.where(s == -jnp.inf, 0.0, jnp.exp(s - shift[..., None]))
    total = jnp.sum(weights, axis=-1)
    some = jnp.where(total == 0.0, 1.0, total)
    lse = jnp.where(total == 0.0, -jnp.inf, shift + jnp.log(some))
    out = jnp.einsum("bhts,bshd->bthd", weights / some[..., None], value)
    return out, jnp.swapaxes(lse, 1, 2), jnp.swapaxes(top, 1, 2)


def indices(B, H, T, S):
    """b, h, q_idx and kv_idx, each along its own axis of (B, H, T, S)."""
    shapes = ((B, 1, 1, 1), (1, H, 1, 1), (1, 1, T, 1), (1, 1, 1, S))
    return tuple(jnp.arange(max(x), dtype=jnp.int32).reshape(x) for x in shapes)


def pulled_back(attend, arrays, floats, cotangents):
    """Output, lse and maximum, and the gradients of `arrays` and `floats`.

    `attend(arrays, floats)` gives the three results; the cotangents belong to the first
    two and are cast to their dtypes.
    """

    def differentiable(arrays, floats):
        out, lse, top = attend(arrays, floats)
        return (out, lse), top

    results, vjp, top = jax.vjp(differentiable, arrays, floats, has_aux=True)
    pairs = zip(cotangents, results, strict=True)
    return (*results, top), vjp(tuple(ct.astype(x.dtype) for ct, x in pairs))
