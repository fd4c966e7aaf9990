"""What of padded arrays is valid, for mods and masks.

limits: valid batch, heads, queries and keys as scalars; None where all are
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pliax.core.jaxprs import ClosedFunction, close
from pliax.core.padded_calls import InBucket


type Limits = tuple[Any, ...]


def limits_of(here: InBucket, sizes: Sequence[Any]) -> Limits:
    """How many of each are valid, where arrays are longer.

    Args:
        here: The bucket.
        sizes: Batch, heads, queries and keys; None where a mask is for all.
    """
    return tuple(
        here.count(n) if n is not None and here.is_padded(n) else None for n in sizes
    )


def limited(here: InBucket, mod: ClosedFunction | None, limits: Limits) -> Any:
    """A mod for padded arrays, asked about the last valid index beyond it."""
    if mod is None:
        return None
    closed = here.closed(mod)
    if all(limit is None for limit in limits):
        return closed

    def inside(*args: Any) -> Any:
        *score, b, h, q_idx, kv_idx = args
        pairs = zip((b, h, q_idx, kv_idx), limits, strict=True)
        indices = [i if n is None else jnp.minimum(i, n - 1) for i, n in pairs]
        return closed(*score, *indices)

    return close(inside, *scalars(closed))


def hiding(mod: ClosedFunction, limits: Limits) -> ClosedFunction:
    """A mask that also hides what is beyond the limits."""
    if all(limit is None for limit in limits):
        return mod

    def visible(*indices: Any) -> Any:
        seen = mod(*indices)
        for i, limit in zip(indices, limits, strict=True):
            seen = seen if limit is None else seen & (i < limit)
        return seen

    return close(visible, *scalars(mod))


def scalars(closed: ClosedFunction) -> list[jax.ShapeDtypeStruct]:
    """The types of a mod's arguments."""
    invars = closed.program.jaxpr.invars
    return [jax.ShapeDtypeStruct((), v.aval.dtype) for v in invars]
