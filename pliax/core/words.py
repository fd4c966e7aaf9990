"""64-bit integers as two 32-bit words, high first: JAX has no uint64 without x64."""

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Integer, UInt32, UInt64

from ._jax import is_symbolic_dim


type Words = tuple[UInt32[Array, "..."], UInt32[Array, "..."]]

LAST = 2**32 - 1  # the largest word


def add_words(a: Words, b: Words) -> Words:
    """Adds modulo 2^64: the low words overflow exactly when their sum is below b's."""
    low = a[1] + b[1]
    carry = (low < b[1]).astype(jnp.uint32)
    return a[0] + b[0] + carry, low


@jax.jit
def advance(offset: UInt32[Array, "2"], step: UInt32[Array, "2"]) -> UInt32[Array, "2"]:
    """Moves a position forward."""
    return jnp.stack(add_words((offset[0], offset[1]), (step[0], step[1])))


def is_concrete(words: Any) -> bool:
    """Whether numbers can be read now: no tracer, no placeholder, not donated."""
    if isinstance(words, Tracer) or not isinstance(words, np.ndarray | jax.Array):
        return False
    return isinstance(words, np.ndarray) or not words.is_deleted()


def integer_words(value: Any, what: str) -> UInt32[Array, "2"]:
    """The words (high, low) of an integer modulo 2^64; negative ones sign-extend.

    Args:
        value: an integer of Python or numpy, an integer scalar of JAX (traced or not),
            or a symbolic size.
        what: the subject of the error messages.

    Raises:
        TypeError: if the value is no integer.
        ValueError: if it has an axis or does not fit in 64 bits.
    """
    if is_symbolic_dim(value):
        return _array_words(jnp.asarray(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return _int_words(value, what)
    if not jnp.issubdtype(getattr(value, "dtype", object), jnp.integer):
        _refuse(value, what)
    if np.ndim(value):
        raise ValueError(
            f"{what} must be one integer, but found an array of shape "
            f"{np.shape(value)}.\nMap over the array with jax.vmap, or pass one of it; "
            "the words of a key of jax.random go to Generator.from_key."
        )
    if isinstance(value, Array):
        return _array_words(value)
    return _int_words(int(value), what)  # jnp.asarray would cut 64 bits down to 32


def read_integer(words: Any, what: str) -> int | UInt64[np.ndarray, "..."]:
    """Reads words (..., high, low) on the host: an int, or an array if there are axes.

    Raises:
        TypeError: if there is nothing to read.
    """
    if not is_concrete(words):
        raise TypeError(
            f"Generator: {what} was asked for where the generator is traced, abstract "
            "or donated, and has no numbers.\nReturn the generator from the "
            "transformed function and ask outside, or compute with its uint32 words "
            "(high, low): key, offset = jax.tree.leaves(gen)."
        )
    high, low = np.moveaxis(np.asarray(words).astype(np.uint64), -1, 0)
    value = (high << np.uint64(32)) | low
    return value if value.ndim else int(value)


def _int_words(number: int, what: str) -> UInt32[Array, "2"]:
    if not -(2**63) <= number < 2**64:
        raise ValueError(
            f"{what} must fit in 64 bits, but found {number}, which needs "
            f"{number.bit_length()}.\nReduce it first, for example modulo 2**64."
        )
    return jnp.asarray(np.array([number >> 32 & LAST, number & LAST], np.uint32))


def _array_words(value: Integer[Array, ""]) -> UInt32[Array, "2"]:
    if value.dtype.itemsize == 8:
        high = jax.lax.shift_right_logical(value, jnp.asarray(32, value.dtype))
    elif jnp.issubdtype(value.dtype, jnp.signedinteger):
        high = jnp.asarray(value, jnp.int32) >> jnp.int32(31)
    else:
        high = jnp.zeros_like(value)
    return jnp.stack([high.astype(jnp.uint32), value.astype(jnp.uint32)])


def _refuse(value: Any, what: str) -> NoReturn:
    found = getattr(value, "dtype", type(value).__name__)
    raise TypeError(
        f"{what} must be an integer of at most 64 bits, but found {value!r} "
        f"({found}).\nPass a Python int, a numpy integer or an integer scalar of JAX; "
        "a key of jax.random goes to Generator.from_key."
    )
