"""Equations that say where arrays are: on which devices, on the host, in a reference.

Arrays are placed in their buckets, which must divide among the devices as they are.
Where they would be handed out with their padding, the program is refused.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from .layouts import Bucket, Padded
from .rules import bind, refuse, rule


@rule("pure_callback", "io_callback", "debug_callback", "debug_print")
def callback(bucket: Bucket, eqn: Any, *operands: Padded) -> Padded:
    """Never: what the host is shown it sees whole."""
    raise refuse(eqn, "the host would see the padding")


@rule("sharding_constraint")
def sharding_constraint(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """Of the bucket, if it divides among the devices."""
    x = bucket.simplified(x)
    _require_divisible(eqn, x, eqn.params["sharding"])
    return Padded(bind(eqn, x.data), x.axes, x.fill)


def placed(
    bucket: Bucket, eqn: Any, xs: Sequence[Padded], shardings: Sequence[Any] | None
) -> Sequence[Padded]:
    """Arrays where a jitted function wants its arguments or its results."""
    given = shardings or [None] * len(xs)
    pairs = zip(xs, given, strict=True)
    return [
        _at(bucket, eqn, x, s) if isinstance(s, jax.sharding.Sharding) else x
        for x, s in pairs
    ]


def _at(bucket: Bucket, eqn: Any, x: Padded, sharding: Any) -> Padded:
    x = bucket.simplified(x)
    _require_divisible(eqn, x, sharding)
    return Padded(lax.with_sharding_constraint(x.data, sharding), x.axes, x.fill)


def _require_divisible(eqn: Any, x: Padded, sharding: Any) -> None:
    if not isinstance(sharding, jax.sharding.Sharding):
        return
    try:
        sharding.shard_shape(x.data.shape)
    except ValueError as error:
        reason = f"the bucket {x.data.shape} does not divide among the devices: {error}"
        raise refuse(eqn, reason) from error


_REFUSED = {
    "shard_map": "the body of a shard_map has the sizes of one device's part",
    "custom_partitioning": "its partitioning has a say in the sizes",
    "run_state": "references to padded arrays may be written anywhere",
    "new_ref": "references to padded arrays may be written anywhere",
    "ref": "references to padded arrays may be written anywhere",
}


@rule(*_REFUSED)
def refused(bucket: Bucket, eqn: Any, *operands: Padded) -> Padded:
    """What is not looked into; without padding and symbolic sizes it is kept as is."""
    raise refuse(eqn, _REFUSED[eqn.primitive.name])
