"""Softmax over keys in parts: each part's sums, and how they become one result.

    (o, m, l) of each part,   m = max m_i,   o = sum o_i exp(m_i - m),   l likewise

A part has an unnormalised output o, a maximum m and a sum l of exp(score - m); one that
sees nothing has (0, -inf, 0).

References:
    Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


FEW = 128
"""Fewer queries than this are decoding: their keys are split."""


def merge(
    parts: tuple[Float[Array, "P ... V"], Float[Array, "P ..."], Float[Array, "P ..."]],
) -> tuple[Float[Array, "... V"], Float[Array, "..."], Float[Array, "..."]]:
    """Output, maximum and sum of all parts, which their first axis counts."""
    out, maximum, total = parts
    largest = jnp.max(maximum, axis=0)
    shift = jnp.where(largest == -jnp.inf, jnp.zeros_like(largest), largest)
    share = jnp.exp(maximum - shift[None])
    total = jnp.sum(total * share, axis=0)
    return jnp.sum(out * share[..., None], axis=0), largest, total


def normalise(
    out: Float[Array, "... V"], maximum: Float[Array, "..."], total: Float[Array, "..."]
) -> tuple[Array, Array, Array, Array]:
    """Output, log-sum-exp, maximum and logarithm of the sum; 0 if nothing was seen."""
    empty = total == 0.0
    safe = jnp.where(empty, jnp.ones_like(total), total)
    shift = jnp.where(maximum == -jnp.inf, jnp.zeros_like(maximum), maximum)
    log_sum = jnp.log(safe)
    lse = jnp.where(empty, -jnp.inf, shift + log_sum)
    return out / safe[..., None], lse, maximum, log_sum
