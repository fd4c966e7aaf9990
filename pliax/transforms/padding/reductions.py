"""Reductions and running reductions: the padding holds the identity."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from .layouts import Bucket, Padded
from .rules import bind, rule


def lowest(dtype: Any) -> Any:
    """The identity of max."""
    if jnp.issubdtype(dtype, jnp.floating):
        return -float("inf")
    return False if dtype == jnp.bool_ else int(jnp.iinfo(dtype).min)


def highest(dtype: Any) -> Any:
    """The identity of min."""
    if jnp.issubdtype(dtype, jnp.floating):
        return float("inf")
    return True if dtype == jnp.bool_ else int(jnp.iinfo(dtype).max)


def _zero(dtype: Any) -> Any:
    return dtype.type(0).item()


def _ones(dtype: Any) -> Any:
    """All bits set."""
    return True if dtype == jnp.bool_ else np.invert(np.zeros((), dtype)).item()


IDENTITIES = {
    "sum": _zero,
    "prod": lambda dtype: dtype.type(1).item(),
    "max": lowest,
    "min": highest,
    "and": _ones,
    "or": _zero,
    "xor": _zero,
    "logsumexp": lowest,
}


@rule(*(f"reduce_{n}" for n in ("sum", "prod", "max", "min", "and", "or", "xor")))
def reduce(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """Over every factor of the reduced axes."""
    identity = IDENTITIES[eqn.primitive.name.removeprefix("reduce_")](x.dtype)
    gone = eqn.params["axes"]
    axes = tuple(a for i, a in enumerate(x.axes) if i not in gone)
    if any(not same_size(bucket, x.axes[i]) for i in gone):
        x = bucket.filled(x, identity)
    places = tuple(place for axis in gone for place in x.places(axis))
    fill = identity if type(x.fill) is type(identity) and x.fill == identity else None
    return Padded(bind(eqn, x.data, axes=places), axes, fill)


def same_size(bucket: Bucket, factors: tuple[Any, ...]) -> bool:
    """Whether an axis has no padding."""
    return all(isinstance(f, int) for f in factors)


@rule("argmax", "argmin")
def argument(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """The first best place: padding comes last and is never better."""
    (axis,) = eqn.params["axes"]
    worst = lowest if eqn.primitive.name == "argmax" else highest
    x = bucket.packed(x, axis)
    if not same_size(bucket, x.axes[axis]):
        x = bucket.filled(x, worst(x.dtype))
    axes = tuple(a for i, a in enumerate(x.axes) if i != axis)
    return Padded(bind(eqn, x.data, axes=x.places(axis)), axes)


@rule("reduce")
def general_reduce(bucket: Bucket, eqn: Any, *operands: Padded) -> list[Padded]:
    """By any function: the padding holds the initial value, which XLA may repeat."""
    half = len(operands) // 2
    xs, starts = operands[:half], operands[half:]
    gone = eqn.params["dimensions"]
    xs = bucket.aligned(xs)
    mask = bucket.valid(xs[0].axes)
    data = [x.data for x in xs]
    if mask is not None:
        data = [jnp.where(mask, x, s.data) for x, s in zip(data, starts, strict=True)]
    places = tuple(place for axis in gone for place in xs[0].places(axis))
    axes = tuple(a for i, a in enumerate(xs[0].axes) if i not in gone)
    results = bind(eqn, *data, *(s.data for s in starts), dimensions=places)
    return [Padded(r, axes) for r in results]


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def running(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """Forwards the padding comes last and matters to none; backwards it is filled."""
    axis = eqn.params["axis"]
    x = bucket.packed(x, axis)
    if eqn.params["reverse"] and not same_size(bucket, x.axes[axis]):
        kind = eqn.primitive.name.removeprefix("cum")
        x = bucket.filled(x, IDENTITIES[kind](x.dtype))
    (place,) = x.places(axis)
    return Padded(bind(eqn, x.data, axis=place), x.axes)
