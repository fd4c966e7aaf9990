"""Does a backend work on this machine? `python -m pliax.info` asks."""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp

from .api import BACKENDS, flex_attention
from .block_mask import create_block_mask


def probes() -> Mapping[str, Callable[[], str | None]]:
    """From each backend's name to a function: None if it works, or the reason."""
    return {f"attention/{b.name}": partial(_probe, b.name) for b in BACKENDS}


def _probe(name: str) -> str | None:
    """Run causal attention and its gradient; the first query must see its own value."""
    shape = (3, 1, 128, 2, 64)
    query, key, value = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128)

    def first(value: jax.Array) -> jax.Array:
        out = flex_attention(query, key, value, block_mask=mask, implementation=name)
        return jnp.sum(out[:, 0].astype(jnp.float32))

    total, gradient = jax.value_and_grad(first)(value)
    wanted = jnp.sum(value[:, 0].astype(jnp.float32))
    right = jnp.allclose(total, wanted, atol=1e-3)
    right &= jnp.allclose(gradient[:, 0], 1.0) & ~jnp.any(gradient[:, 1:])
    return None if bool(right) else "it runs, but its results are wrong"
