"""Reductions and running reductions: the padding holds the identity."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core.evaluation import evaluate

from .layouts import Bucket, Padded
from .rules import bind, refuse, rule


def lowest(dtype: Any) -> Any:
    """The identity of max."""
    if jnp.issubdtype(dtype, jnp.floating):
        return -float("inf") if _has_infinity(dtype) else float(jnp.finfo(dtype).min)
    return False if dtype == jnp.bool_ else int(jnp.iinfo(dtype).min)


def highest(dtype: Any) -> Any:
    """The identity of min."""
    if jnp.issubdtype(dtype, jnp.floating):
        return float("inf") if _has_infinity(dtype) else float(jnp.finfo(dtype).max)
    return True if dtype == jnp.bool_ else int(jnp.iinfo(dtype).max)


def _has_infinity(dtype: Any) -> bool:
    """Not so of most floats of 8 bits."""
    return bool(np.isinf(np.asarray(np.inf, dtype)))


def zero_of(dtype: Any) -> Any:
    """0 of the type that constants of a dtype have, also where it has no 0."""
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return 0.0 if is_float else np.zeros((), dtype).item()


def _ones(dtype: Any) -> Any:
    """All bits set."""
    return True if dtype == jnp.bool_ else np.invert(np.zeros((), dtype)).item()


IDENTITIES = {
    "sum": zero_of,
    "prod": lambda dtype: dtype.type(1).item(),
    "max": lowest,
    "min": highest,
    "and": _ones,
    "or": zero_of,
    "xor": zero_of,
    "logsumexp": lowest,
}
_ORDERED = {"max", "min", "logsumexp"}


def identity_of(eqn: Any, kind: str, dtype: Any, *, is_needed: bool = True) -> Any:
    """What padding holds in a reduction; None if there is nothing and no need."""
    if kind in _ORDERED and jnp.issubdtype(dtype, jnp.complexfloating):
        if is_needed:
            reason = f"no {dtype} is below or above all others, some of which hold NaN"
            raise refuse(eqn, reason)
        return None
    return IDENTITIES[kind](dtype)


@rule(*(f"reduce_{n}" for n in ("sum", "prod", "max", "min", "and", "or", "xor")))
def reduce(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """Over every factor of the reduced axes."""
    gone = eqn.params["axes"]
    kind = eqn.primitive.name.removeprefix("reduce_")
    axes = tuple(a for i, a in enumerate(x.axes) if i not in gone)
    is_padded = any(not same_size(bucket, x.axes[i]) for i in gone)
    identity = identity_of(eqn, kind, x.dtype, is_needed=is_padded)
    if is_padded:
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
    (place,), dtype = x.places(axis), eqn.params["index_dtype"]
    if x.data.shape[place] - 1 > jnp.iinfo(dtype).max:
        places = _places_in(bucket, x, axis, dtype)
        return Padded(_best(eqn, x.data, places, place, worst(x.dtype)), axes)
    return Padded(bind(eqn, x.data, axes=(place,)), axes)


def _places_in(bucket: Bucket, x: Padded, axis: int, dtype: Any) -> Any:
    """The places along an axis as a short integer counts them; padding's is the last.

    They wrap as JAX's do. Of equal elements the one with the least place is taken.
    """
    (place,) = x.places(axis)
    places = lax.broadcasted_iota(dtype, x.data.shape, place)
    last = jnp.iinfo(dtype).max
    return bucket.filled(Padded(places, x.axes), last).data


def _best(eqn: Any, data: Any, places: Any, along: int, worst: Any) -> Any:
    """The place of the best element: the reduction to which JAX lowers argmax."""
    better = lax.gt if eqn.primitive.name == "argmax" else lax.lt

    def choose(left: list[Any], right: list[Any]) -> list[Any]:
        (x, i), (y, j) = left, right
        is_better = lax.bitwise_or(better(x, y), lax.ne(x, x))  # or NaN
        is_first = lax.bitwise_and(lax.eq(x, y), lax.lt(i, j))
        taken = lax.bitwise_or(is_better, is_first)
        return [lax.select(is_better, x, y), lax.select(taken, i, j)]

    start = [np.asarray(worst, data.dtype), np.zeros((), places.dtype)]
    return lax.reduce([data, places], start, choose, [along])[1]


@rule("reduce")
def general_reduce(bucket: Bucket, eqn: Any, *operands: Padded) -> list[Padded]:
    """By any function, of which no identity is known: each value says if it counts.

    The initial value counts as often as XLA takes it.
    """
    half = len(operands) // 2
    xs, starts = operands[:half], [s.data for s in operands[half:]]
    gone = eqn.params["dimensions"]
    xs = bucket.aligned(xs)
    places = tuple(place for axis in gone for place in xs[0].places(axis))
    axes = tuple(a for i, a in enumerate(xs[0].axes) if i not in gone)
    data = [x.data for x in xs]
    if all(same_size(bucket, xs[0].axes[i]) for i in gone):
        results = bind(eqn, *data, *starts, dimensions=places)
        return [Padded(r, axes) for r in results]
    inner = eqn.params["jaxpr"]

    def both(left: list[Any], right: list[Any]) -> list[Any]:
        (*a, counts_a), (*b, counts_b) = left, right
        values = [
            lax.select(counts_a, lax.select(counts_b, found, x), y)
            for found, x, y in zip(
                evaluate(inner, inner.consts, [*a, *b]), a, b, strict=True
            )
        ]
        return [*values, lax.bitwise_or(counts_a, counts_b)]

    mask = bucket.valid(xs[0].axes)
    starts = [*starts, np.True_]
    *results, _ = lax.reduce([*data, mask], starts, both, places)
    return [Padded(r, axes) for r in results]


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def running(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """Forwards the padding comes last and matters to none; backwards it is filled."""
    axis = eqn.params["axis"]
    x = bucket.packed(x, axis)
    if eqn.params["reverse"] and not same_size(bucket, x.axes[axis]):
        kind = eqn.primitive.name.removeprefix("cum")
        x = bucket.filled(x, identity_of(eqn, kind, x.dtype))
    (place,) = x.places(axis)
    return Padded(bind(eqn, x.data, axis=place), x.axes)
