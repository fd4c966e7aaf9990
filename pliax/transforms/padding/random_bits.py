"""Random bits: number i of a draw is a hash of its position in the logical shape.

JAX draws with a formula of few parts, `iota_2x32_shape` (the row-major position of each
element) and `threefry2x32` (a hash, element by element). The positions are counted with
the run-time strides of the logical shape; the rest of the formula, that of JAX or of
`pliax.core.random_stream`, is run by the rules of what it is made of. Formulas with
other parts are refused there: in those the bits depend on how many are drawn.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .elementwise import at_each_place
from .formulas import by_formula
from .layouts import Bucket, Padded
from .rules import bind, refuse, rule, sizes_of


_POSITIONS = 2**32  # as many as one word counts


# --- the parts of which formulas are made ---------------------------------------------


@rule("iota_2x32_shape")
def positions(bucket: Bucket, eqn: Any) -> list[Padded]:
    """The row-major position of each valid element, the high and the low word."""
    sizes = [bucket.size(n) for n in eqn.params["shape"]]
    lengths = bucket.shape(sizes)
    if np.prod(lengths, dtype=np.float64) > _POSITIONS:
        raise refuse(eqn, f"a bucket of {lengths} has more than 2^32 elements")
    low, stride = lax.full(lengths, 0, jnp.uint32), np.uint32(1)
    for axis in reversed(range(len(sizes))):
        count = lax.broadcasted_iota(jnp.uint32, lengths, axis)
        low = lax.add(low, lax.mul(count, lax.full_like(count, stride)))
        size = lax.convert_element_type(bucket.scalar(sizes[axis]), jnp.uint32)
        stride = lax.mul(stride, size)
    return [bucket.simple(x, sizes) for x in (lax.full_like(low, 0), low)]


@rule("threefry2x32", "threefry4x32", "philox2x32", "philox4x32")
def hashed(bucket: Bucket, eqn: Any, *words: Padded) -> list[Padded]:
    """A hash of the words in one place into as many words."""
    made = at_each_place(bucket, eqn, *words)
    return [Padded(x, made.axes) for x in made.data]


@rule("rng_bit_generator", "rng_uniform")
def counted(bucket: Bucket, eqn: Any, *operands: Padded) -> Padded:
    """Not by position in the logical shape."""
    raise refuse(eqn, "its numbers depend on how many are drawn")


# --- keys -----------------------------------------------------------------------------


rule("random_seed", "random_clone", "random_fold_in")(at_each_place)


@rule("random_wrap")
def wrap(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """The words of a key, along the last axes, as a key."""
    rank = len(sizes_of(eqn.outvars[0]))
    for axis in range(rank, x.rank):
        x = bucket.packed(x, axis)
    return Padded(bind(eqn, x.data), x.axes[:rank])


@rule("random_unwrap")
def unwrap(bucket: Bucket, eqn: Any, keys: Padded) -> Padded:
    """The words of each key along new last axes."""
    words = sizes_of(eqn.outvars[0])[keys.rank :]
    return Padded(bind(eqn, keys.data), (*keys.axes, *((n,) for n in words)))


# --- draws ----------------------------------------------------------------------------


@rule("random_bits")
def bits(bucket: Bucket, eqn: Any, keys: Padded) -> Sequence[Padded]:
    """The bits of each key."""
    width, shape = eqn.params["bit_width"], eqn.params["shape"]
    kind = keys.dtype._impl

    def formula(keys: Any) -> Any:
        draw = _for_each(lambda key: kind.random_bits(key, width, shape), keys.ndim)
        return draw(jax.random.key_data(keys))

    return by_formula(bucket, eqn, formula, keys)


@rule("random_split")
def random_split(bucket: Bucket, eqn: Any, keys: Padded) -> Sequence[Padded]:
    """The children of each key."""
    shape, kind = eqn.params["shape"], keys.dtype._impl

    def formula(keys: Any) -> Any:
        split = _for_each(lambda key: kind.split(key, shape), keys.ndim)
        words = split(jax.random.key_data(keys))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(keys))

    return by_formula(bucket, eqn, formula, keys)


@rule("random_gamma")
def random_gamma(
    bucket: Bucket, eqn: Any, keys: Padded, alpha: Padded
) -> Sequence[Padded]:
    """Rejection sampling in a loop for each element, as JAX lowers it."""

    def formula(keys: Any, alpha: Any) -> Any:
        return eqn.primitive.impl(keys, alpha, **eqn.params, use_vmap=True)

    return by_formula(bucket, eqn, formula, keys, alpha)


def _for_each(f: Callable[..., Any], rank: int) -> Callable[..., Any]:
    for _ in range(rank):
        f = jax.vmap(f)
    return f
