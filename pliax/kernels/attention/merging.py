"""Softmax over keys in parts: each part's sums, and how they become one result.

    (o, m, l) of each part,   m = max m_i,   o = sum o_i exp(m_i - m),   l likewise

A part has an unnormalised output o, a maximum m and a sum l of exp(score - m); one that
sees nothing has (0, -inf, 0).

References:
    Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


FEW = 128
"""Fewer queries than this are decoding: their keys are split."""


def merge(
    parts: tuple[Float[Array, "P ... V"], Float[Array, "P ..."], Float[Array, "P ..."]],
) -> tuple[Array, Array, Array, Array]:
    """All parts, which their first axis counts, as one result, like `normalise`."""
    out, maximum, total = parts
    largest = jnp.max(maximum, axis=0)
    share = jnp.exp(maximum - _finite(largest)[None])
    total = jnp.sum(total * share, axis=0)
    weights = share / jnp.where(total == 0.0, jnp.ones_like(total), total)[None]
    # Once for each row, not once for each of its channels: beside those XLA would not
    # add up the parts as it reads them (one H200, 16 rows in 132 parts: 2.1 of 6.5 us).
    weights = lax.optimization_barrier(weights)
    out = jnp.sum(out * weights[..., None], axis=0)
    return out, *_logarithms(largest, total)


def normalise(
    out: Float[Array, "... V"], maximum: Float[Array, "..."], total: Float[Array, "..."]
) -> tuple[Array, Array, Array, Array]:
    """Output, log-sum-exp, maximum and logarithm of the sum; 0 if nothing was seen."""
    safe = jnp.where(total == 0.0, jnp.ones_like(total), total)
    return out / safe[..., None], *_logarithms(maximum, total)


def _logarithms(maximum: Array, total: Array) -> tuple[Array, Array, Array]:
    empty = total == 0.0
    log_sum = jnp.log(jnp.where(empty, jnp.ones_like(total), total))
    return jnp.where(empty, -jnp.inf, _finite(maximum) + log_sum), maximum, log_sum


def _finite(maximum: Array) -> Array:
    """0 for the maximum of nothing, from which scores are to be subtracted."""
    return jnp.where(maximum == -jnp.inf, jnp.zeros_like(maximum), maximum)
