"""Explicit random state whose draws do not depend on the sharding.

A `Generator` is a key and a position in the key's one stream of random words
(`pliax.core.random_stream`). A method returns the advanced generator and its value:

    gen, x = gen.normal((16, 24))

Element j of a draw at position o is made of word o + j, wherever it is computed. All
the formulas are those of `jax.random`; only where the words come from is ours.

Sharp edge: a generator used twice draws the same words twice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import index as as_index
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Inexact, Integer, Key, Shaped, UInt, UInt32

from ._jax import is_symbolic_dim
from .random_samplers import (
    as_shape,
    bernoulli,
    permutation,
    permuted_range,
    sample,
)
from .random_stream import child_key, child_keys, key_words
from .words import advance, integer_words, is_concrete, read_integer


type Shape = int | np.integer | Sequence | np.ndarray
type DType = DTypeLike | None
type Sharding = NamedSharding | PartitionSpec | None

_BLOCK = 4  # every draw starts at a multiple of 4 words, a 128-bit boundary
_KEY, _SPLIT, _FOLD_IN = range(3)  # first words of the messages children hash from


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Generator:
    """A random key and the position of its next word: explicit, immutable state.

    Every draw starts at the public `offset` o and advances it by the number of elements
    of the value, rounded up to 4; `key`, `split` and `fold_in` advance it by 4. The
    words of a draw of n elements are words o, ..., o + n - 1 of the key's one stream,
    whatever the shape. So a value depends on (seed, offset, shape), and on neither the
    devices, nor the sharding, nor jit, vmap, scan or remat around it.

    A generator is a pytree of two plain uint32 arrays, `key` (k_0, k_1) and `offset`
    (high, low), the leading axes those of a batch. `split` and `vmap` make batches; a
    batch has a length, is indexed, unpacked and mapped over, but draws under `jax.vmap`
    only.

    Args:
        seed: an integer of at most 64 bits, taken modulo 2^64: a Python int, a numpy
            integer or an integer scalar of JAX, traced or not. For 0 <= seed < 2^32 the
            generator equals `Generator.from_key(jax.random.key(seed))`.

    Raises:
        TypeError: if the seed is no integer.
        ValueError: if the seed has an axis or does not fit in 64 bits.

    Examples:
        >>> gen = Generator(0)
        >>> gen, x = gen.uniform((2, 3))
        >>> gen, y = gen.randint((3,), 0, 10)
        >>> gen.offset  # 6 elements take 8 words, 3 take 4
        12
        >>> _, (first, _) = Generator(0).uniform((6,))[0].split(2)
        >>> first == gen
        False
        >>> _, flat = Generator(0).uniform((6,))
        >>> bool((flat == x.ravel()).all())
        True
    """

    _key: UInt32[Array, "*batch 2"]
    _offset: UInt32[Array, "*batch 2"]

    def __init__(self, seed: Any):
        object.__setattr__(self, "_key", integer_words(seed, "Generator: the seed"))
        object.__setattr__(self, "_offset", jnp.zeros(2, jnp.uint32))

    @classmethod
    def from_key(cls, key: Any, *, offset: Any = 0) -> "Generator":
        """Starts from a key of `jax.random`: the generator of its stream.

        Args:
            key: one typed key of any implementation, or the raw uint32 words of one
                (`jax.random.PRNGKey`). Two words are the key as they are; any other
                number is hashed down to two.
            offset: the position of the next word, an integer below 2^64.

        Raises:
            TypeError: if the key is no key.
            ValueError: if it is a batch of keys.
        """
        start = integer_words(offset, "Generator.from_key: the offset")
        return cls._at(key_words(key), start)

    @property
    def offset(self) -> int | np.ndarray:
        """The position of the next word: an int, for a batch a numpy uint64 array."""
        return read_integer(self._offset, "the offset")

    def bits(
        self, shape: Shape = (), dtype: DType = None, *, out_sharding: Sharding = None
    ) -> tuple["Generator", UInt[Array, "..."]]:
        """Draws unsigned integers, every bit fair; the default dtype is uint32."""
        options = {"shape": as_shape(shape), "dtype": dtype}
        return self._draw(jax.random.bits, {}, out_sharding, **options)

    def normal(
        self, shape: Shape = (), dtype: DType = None, *, out_sharding: Sharding = None
    ) -> tuple["Generator", Inexact[Array, "..."]]:
        """Draws from N(0, 1) by sqrt(2) erf_inv(u), u uniform in (-1, 1)."""
        options = {"shape": as_shape(shape), "dtype": dtype}
        return self._draw(jax.random.normal, {}, out_sharding, **options)

    def uniform(
        self,
        shape: Shape = (),
        dtype: DType = None,
        minval: ArrayLike = 0.0,
        maxval: ArrayLike = 1.0,
        *,
        out_sharding: Sharding = None,
    ) -> tuple["Generator", Inexact[Array, "..."]]:
        """Draws from the uniform distribution on [minval, maxval)."""
        bounds = {"minval": minval, "maxval": maxval}
        return self._draw(
            jax.random.uniform, bounds, out_sharding, shape=as_shape(shape), dtype=dtype
        )

    def bernoulli(
        self,
        p: ArrayLike = 0.5,
        shape: Shape | None = None,
        mode: str = "low",
        *,
        out_sharding: Sharding = None,
    ) -> tuple["Generator", Bool[Array, "..."]]:
        """Draws True with probability p; the default shape is that of p.

        Args:
            p: floating probabilities, broadcast against shape.
            shape: the shape of the value.
            mode: "high" resolves a p below 2^-24 by a second uniform number, taken from
                a child stream, so that an element still costs one word of this one.
            out_sharding: where the value shall live.
        """
        shape = np.shape(p) if shape is None else as_shape(shape)
        return self._draw(bernoulli, {"p": p}, out_sharding, shape=shape, mode=mode)

    def randint(
        self,
        shape: Shape,
        minval: ArrayLike,
        maxval: ArrayLike,
        dtype: DType = None,
        *,
        out_sharding: Sharding = None,
    ) -> tuple["Generator", Integer[Array, "..."]]:
        """Draws integers in [minval, maxval), by a remainder of twice their bits."""
        bounds = {"minval": minval, "maxval": maxval}
        return self._draw(
            jax.random.randint, bounds, out_sharding, shape=as_shape(shape), dtype=dtype
        )

    def permutation(
        self,
        x: Any,
        axis: int = 0,
        independent: bool = False,
        *,
        out_sharding: Sharding = None,
    ) -> tuple["Generator", Shaped[Array, "..."]]:
        """Shuffles an array along an axis, or range(x) for an int x.

        Args:
            x: an int or an array.
            axis: the axis to shuffle along.
            independent: shuffle each vector along the axis in an order of its own.
            out_sharding: where the value shall live.
        """
        options = {"axis": as_index(axis), "independent": bool(independent)}
        is_size = is_symbolic_dim(x)
        if not is_size and np.ndim(x):
            return self._draw(
                permutation, {"x": jnp.asarray(x)}, out_sharding, **options
            )
        n = x if is_size else as_index(x)
        return self._draw(permuted_range, {}, out_sharding, n=n, **options)

    def key(self) -> tuple["Generator", Key[Array, ""]]:
        """Derives a typed Threefry key for the functions of `jax.random`."""
        words = self._child(_KEY)
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return self._advanced(_BLOCK), key

    def split(self, num: Shape = 2) -> tuple["Generator", "Generator"]:
        """Derives a batch of num child generators, each at offset 0 of its own key."""
        keys = child_keys(self._child(_SPLIT), as_shape(num))
        return self._advanced(_BLOCK), self._at(keys, jnp.zeros_like(keys))

    def fold_in(self, data: Any) -> tuple["Generator", "Generator"]:
        """Derives the child of an integer of at most 64 bits: a step, a layer, a rank.

        Distinct data at one offset give distinct children, so `gen.fold_in(i)[1]` for
        every layer i needs one generator only.
        """
        key = self._child(_FOLD_IN, integer_words(data, "Generator.fold_in: the data"))
        return self._advanced(_BLOCK), self._at(key, jnp.zeros_like(key))

    def _draw(
        self, sampler: Callable, operands: dict, out_sharding: Sharding, **options: Any
    ) -> tuple["Generator", Shaped[Array, "..."]]:
        value = sample(*self._stream(), sampler, operands, options, out_sharding)
        return self._advanced(value.size), value

    def _child(self, kind: int, *data: UInt32[Array, "2"]) -> UInt32[Array, "2"]:
        key, offset = self._stream()
        return child_key(key, (jnp.uint32(kind), offset, *data))

    def _advanced(self, size: Any) -> "Generator":
        step = integer_words(-(-size // _BLOCK) * _BLOCK, "Generator: the step")
        key, offset = self._stream()
        return self._at(key, advance(offset, step))

    def _stream(self) -> tuple[UInt32[Array, "2"], UInt32[Array, "2"]]:
        if self._key.ndim != 1:
            raise ValueError(
                "Generator: a draw was asked of a batch of generators of shape "
                f"{self._key.shape[:-1]}.\nMap over it, jax.vmap(lambda g: "
                "g.normal((8,)))(gen), or take one of it, gen[0]."
            )
        return jnp.asarray(self._key), jnp.asarray(self._offset)  # from a checkpoint

    @classmethod
    def _at(cls, key: Any, offset: Any) -> "Generator":
        """Builds without a look at the leaves: tree transformations put anything in."""
        gen = object.__new__(cls)
        object.__setattr__(gen, "_key", key)
        object.__setattr__(gen, "_offset", offset)
        return gen

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        if self._key.ndim == 1:
            raise TypeError("Generator: one generator has no length, only a batch has.")
        return self._key.shape[0]

    def __getitem__(self, index: Any) -> "Generator":
        if isinstance(index, int | np.integer) and not -len(self) <= index < len(self):
            raise IndexError(f"Generator: index {index} of a batch of {len(self)}.")
        index = index if isinstance(index, tuple) else (index,)
        rest = () if any(i is ... for i in index) else (...,)
        return jax.tree.map(lambda words: words[*index, *rest, :], self)

    def __iter__(self) -> Iterator["Generator"]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Generator):
            return NotImplemented
        return _contents(self) == _contents(other)

    def __hash__(self) -> int:
        return hash(_contents(self))

    def __repr__(self) -> str:
        if is_concrete(self._key) and is_concrete(self._offset):
            key = np.vectorize("{:#018x}".format)(read_integer(self._key, "text"))
            return f"Generator(key={key}, offset={self.offset})"
        key, offset = (str(getattr(w, "aval", w)) for w in (self._key, self._offset))
        return f"Generator(key={key}, offset={offset})"


def _contents(gen: Generator) -> tuple:
    leaves = (read_integer(words, "equality") for words in (gen._key, gen._offset))
    key, offset = (np.asarray(leaf, np.uint64) for leaf in leaves)
    return key.shape, key.tobytes(), offset.tobytes()


_KEYS = (jax.tree_util.GetAttrKey("key"), jax.tree_util.GetAttrKey("offset"))

jax.tree_util.register_pytree_with_keys(
    Generator,
    lambda gen: (tuple(zip(_KEYS, (gen._key, gen._offset), strict=True)), None),
    lambda _, leaves: Generator._at(*leaves),
    lambda gen: ((gen._key, gen._offset), None),
)
