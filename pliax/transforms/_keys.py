"""What an executable depends on in one argument, as a hashable key."""

import functools
from collections.abc import Hashable
from typing import Any

import jax


def leaf_key(leaf: Any) -> tuple[Any, Hashable]:
    """Type and placement of one leaf; an uncommitted leaf has no place of its own."""
    try:
        aval, committed = leaf.aval, leaf.committed
    except AttributeError:  # a NumPy array or a Python number: never committed
        return jax.typeof(leaf), None
    return aval, _canonical(leaf.sharding) if committed else None


@functools.lru_cache(maxsize=4096)
def _canonical(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """P("x", None) and P("x") place alike: one key for both."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    spec = sharding.spec
    if not len(spec) or spec[-1] is not None or spec.unreduced or spec.reduced:
        return sharding
    return sharding.update(spec=jax.P(*trim(tuple(spec))))


def trim(spec: tuple[Any, ...]) -> tuple[Any, ...]:
    """A partition spec without the trailing Nones, which mean nothing."""
    while spec and spec[-1] is None:
        spec = spec[:-1]
    return spec
