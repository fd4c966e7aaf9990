r"""One key, one stream of 2^64 random words, each a hash of its own position.

With T Threefry-2x32-20, a keyed bijection of pairs of 32-bit words, word i of the
stream of key k is

    word(k, i) = T(k, i)_0 xor T(k, i)_1         (8-, 16- and 32-bit draws, truncated)
    word(k, i) = 2^32 T(k, i)_0 + T(k, i)_1      (64-bit draws)

Element j of a draw at offset o, j its row-major index, costs the one hash at i = o + j
and reads nothing else. A draw is thus elementwise: it partitions for any shape and
sharding with no communication, and no value depends on where it is computed.

`STREAM` tells this to `jax.random`: a key of four words (k_0, k_1, o_high, o_low).
Inside its formulas `split` changes k alone and carries the offset along, so that a
formula of several streams (`randint` reads two) obeys the law of positions too.
Children hang from two reserved positions at the very end of the stream,

    split(k, i) = T(T(k, 2^64 - 2), i),     fold_in(k, d) = T(T(k, 2^64 - 1), d).

Sharp edge: positions wrap after 2^64 words, and the last two belong to the children.

References:
    Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
    section 2 (a stream is a function of its counter) and section 4 (Threefry).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, Shaped, UInt, UInt32

from ._jax import define_prng_impl, iota_2x32_shape, threefry2x32_p
from .words import LAST, Words, add_words


_SPLIT, _FOLD_IN = (LAST, LAST - 1), (LAST, LAST)  # the reserved positions


def stream_at(key: UInt32[Array, "2"], offset: UInt32[Array, "2"]) -> Key[Array, ""]:
    """A key for `jax.random` that draws the words offset, offset + 1, ... of a key."""
    return jax.random.wrap_key_data(jnp.concatenate([key, offset]), impl=STREAM)


def key_words(key: Any) -> UInt32[Array, "2"]:
    """The two words of a key of `jax.random`; other numbers of words are hashed to two.

    The hash chains pairs, s <- T(s, pair), from s = (0, number of words).

    Raises:
        TypeError: if the key is neither typed nor an array of uint32.
        ValueError: if it is a batch of keys.
    """
    batch, words = _key_data(key)
    if batch:
        raise ValueError(
            f"Generator.from_key: one key was asked for, but found keys of shape "
            f"{batch}.\nMap over them, jax.vmap(Generator.from_key)(keys)."
        )
    return words if words.size == 2 else _hashed(words)


@jax.jit
def child_key(
    key: UInt32[Array, "2"], message: tuple[UInt32[Array, "..."], ...]
) -> UInt32[Array, "2"]:
    """Hashes a message of words into the key of a child: a chain of `fold_in`."""
    child = stream_at(key, jnp.zeros(2, jnp.uint32))
    for word in (word for words in message for word in words.ravel()):
        child = jax.random.fold_in(child, word)
    return jax.random.key_data(child)[:2]


def child_keys(key: UInt32[Array, "2"], shape: tuple) -> UInt32[Array, "..."]:
    """The keys of the numbered children of a key, two words along the last axis."""
    children = jax.random.split(stream_at(key, jnp.zeros(2, jnp.uint32)), shape)
    return jax.random.key_data(children)[..., :2]


def _key_data(key: Any) -> tuple[tuple[int, ...], UInt32[Array, "..."]]:
    """The shape of the batch, and the words of one key."""
    dtype = getattr(key, "dtype", np.dtype(object))
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return key.shape, jax.random.key_data(key).ravel()
    if dtype == np.uint32 and np.ndim(key) and np.size(key):
        return key.shape[:-1], jnp.asarray(key).ravel()
    raise TypeError(
        f"Generator.from_key: a key of jax.random was asked for, but found {key!r} "
        f"({type(key).__name__}).\nPass jax.random.key(seed), or the raw uint32 words "
        "of a key; an integer seed goes to Generator(seed)."
    )


def _hashed(words: UInt32[Array, "n"]) -> UInt32[Array, "2"]:
    pairs = jnp.pad(words, (0, words.size % 2)).reshape(-1, 2)
    state = (jnp.uint32(0), jnp.uint32(words.size))
    for pair in pairs:
        state = _threefry(state, (pair[0], pair[1]))
    return jnp.stack(state)


def _threefry(key: Words, counter: Words) -> Words:
    first, second = threefry2x32_p.bind(*key, *counter)
    return first, second


def _salt(state: UInt32[Array, "4"], position: tuple[int, int]) -> Words:
    high, low = (jnp.uint32(word) for word in position)
    return _threefry((state[0], state[1]), (high, low))


def _seed(seed: Shaped[Array, ""]) -> UInt32[Array, "4"]:
    key = jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
    return jnp.concatenate([key, jnp.zeros(2, jnp.uint32)])


def _random_bits(
    state: UInt32[Array, "4"], bit_width: int, shape: tuple
) -> UInt[Array, "..."]:
    high, low = iota_2x32_shape(shape)
    positions = add_words((high, low), (state[2], state[3]))
    first, second = _threefry((state[0], state[1]), positions)
    dtype = jnp.dtype(f"uint{bit_width}")
    if bit_width == 64:
        upper = first.astype(dtype) << jnp.asarray(32, dtype)
        return upper | second.astype(dtype)
    return (first ^ second).astype(dtype)


def _split(state: UInt32[Array, "4"], shape: tuple) -> UInt32[Array, "..."]:
    high, low = iota_2x32_shape(shape)
    children = _threefry(_salt(state, _SPLIT), (high, low))
    offset = (jnp.broadcast_to(word, shape) for word in (state[2], state[3]))
    return jnp.stack([*children, *offset], axis=-1)


def _fold_in(state: UInt32[Array, "4"], data: Shaped[Array, ""]) -> UInt32[Array, "4"]:
    # One array of both: under vmap the CPU lowering asks for words of one shape.
    counter = jnp.stack([jnp.uint32(0), data.astype(jnp.uint32)])
    child = _threefry(_salt(state, _FOLD_IN), (counter[0], counter[1]))
    return jnp.stack([*child, state[2], state[3]])


STREAM = define_prng_impl(
    key_shape=(4,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,  # pyright: ignore[reportArgumentType]  (JAX passes an array)
    name="pliax_stream",
    tag="pliax_stream",
)
