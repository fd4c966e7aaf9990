"""Random numbers: the bits at valid positions are those of the logical shape."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import random
from transforms.padding.checking import check, check_each, run_padded, symbolic

from pliax.core.random_stream import stream_at
from pliax.transforms.padding.rules import PaddingRefused


HIGH = {"b": 4, "t": 8}
CHOICES = [{"b": b, "t": t} for b, t in ((3, 5), (1, 1), (4, 8))]


def key_of(name: str, seed: int = 0) -> Any:
    """A key of an implementation; "stream" is pliax's own."""
    if name != "stream":
        return random.key(seed, impl=name)
    offset = jnp.array([seed, 2**32 - 3], jnp.uint32)  # soon over the low word
    return stream_at(jnp.array([1, 2], jnp.uint32), offset)


def law(
    f: Callable[..., Any],
    *specs: str,
    key: Any = None,
    choices: Any = CHOICES,
    tolerance: float = 0.0,
) -> None:
    """The law for a function of a key (or keys of b, if none is given) and arrays."""

    def args(sizes: Mapping[str, int]) -> list[Any]:
        shapes = [eval(f"({spec},)", {}, dict(sizes)) for spec in specs]
        keys = random.split(random.key(5), sizes["b"]) if key is None else key
        return [keys, *(np.zeros(shape, np.float32) + 0.5 for shape in shapes)]

    first = "b" if key is None else ""
    check_each(f, (first, *specs), args, choices, HIGH, tolerance=tolerance)


KEY = random.key(3)
COUNTED = [
    "threefry2x32",
    "stream",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("threefry4x32", "philox2x32", "philox4x32")
    ),
]

DRAWS: dict[str, Callable[[Any, Any], Any]] = {
    "uint8": lambda k, x: random.bits(k, x.shape, jnp.uint8),
    "uint16": lambda k, x: random.bits(k, x.shape, jnp.uint16),
    "uint32": lambda k, x: random.bits(k, x.shape),
    "transposed": lambda k, x: random.bits(k, x.shape[::-1]),
    "between fixed axes": lambda k, x: random.bits(k, (2, *x.shape, 3)),
    "merged": lambda k, x: random.bits(k, (x.size,)).reshape(x.shape),
    "one more": lambda k, x: random.bits(k, (x.shape[0] + 1, 2 * x.shape[1])),
    "uniform": lambda k, x: random.uniform(k, x.shape, minval=-1.0, maxval=2.0),
    "bernoulli": lambda k, x: random.bernoulli(k, x, x.shape),
    "randint": lambda k, x: random.randint(k, x.shape, 0, 17),
    "randint below a size": lambda k, x: random.randint(k, (5,), 0, x.shape[1]),
    "categorical": lambda k, x: random.categorical(k, x),
    "choice": lambda k, x: random.choice(k, x, (3,)),
    "dropout": lambda k, x: jnp.where(random.bernoulli(k, 0.8, x.shape), x, 0.0),
    "split": lambda k, x: random.split(k, x.shape),
    "split and draw": lambda k, x: jax.vmap(random.bits)(random.split(k, x.shape[1])),
    "fold_in": lambda k, x: jax.vmap(random.fold_in, (None, 0))(
        k, jnp.arange(x.shape[1])
    ),
    "fold_in a size": lambda k, x: random.fold_in(k, x.shape[1]),
    "words": lambda k, x: random.key_data(random.clone(random.split(k, x.shape[0]))),
    "seeds": lambda k, x: jax.vmap(random.key)(jnp.arange(x.shape[1])),
    "raw keys": lambda k, x: jax.vmap(random.PRNGKey)(jnp.arange(x.shape[1])),
}
FLOATS: dict[str, Callable[[Any, Any], Any]] = {
    "normal": lambda k, x: random.normal(k, x.shape),
    "bfloat16": lambda k, x: random.normal(k, x.shape, jnp.bfloat16),
    "gumbel": lambda k, x: random.gumbel(k, x.shape),
    "truncated_normal": lambda k, x: random.truncated_normal(k, -1.0, 1.0, x.shape),
}
LOOPS: dict[str, Callable[[Any, Any], Any]] = {
    "gamma": lambda k, x: random.gamma(k, x + 1),
    "loggamma": lambda k, x: random.loggamma(k, x),
    "gamma of keys": lambda k, x: jax.vmap(random.gamma)(
        random.split(k, x.shape[0]), x
    ),
    "dirichlet": lambda k, x: random.dirichlet(k, x + 1),
    "poisson": lambda k, x: random.poisson(k, 20 * x),
    "binomial": lambda k, x: random.binomial(k, 9.0, x),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DRAWS)
def test_draws_are_those_of_the_logical_shape(case: str) -> None:
    law(DRAWS[case], "b, t", key=KEY)


@pytest.mark.parametrize("case", FLOATS)
def test_floats_of_the_same_bits(case: str) -> None:
    """XLA rounds log and erf_inv by the code it makes around them."""
    law(FLOATS[case], "b, t", key=KEY, tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", LOOPS)
def test_rejection_loops(case: str) -> None:
    law(LOOPS[case], "b, t", key=KEY, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTED)
def test_every_generator_that_counts(name: str) -> None:
    def f(k: Any, x: Any) -> Any:
        split = jax.vmap(lambda key: random.bits(key, (3,)))(
            random.split(k, x.shape[0])
        )
        return random.bits(k, x.shape), split, random.bits(k, x.shape[:1], jnp.uint8)

    law(f, "b, t", key=key_of(name))


def test_bits_of_a_padded_batch_of_keys() -> None:
    def f(keys: Any, x: Any) -> Any:
        padded = jax.vmap(lambda key, row: random.bits(key, row.shape))(keys, x)
        fixed = jax.vmap(lambda key: random.bits(key, (2, 3), jnp.uint16))(keys)
        children = jax.vmap(lambda key, row: random.split(key, row.shape))(keys, x)
        return padded, fixed, children, jax.vmap(jax.vmap(random.bits))(children)

    law(f, "b, t")


def test_numbers_folded_into_a_padded_batch_of_keys() -> None:
    def f(keys: Any, x: Any) -> Any:
        rows, columns = jnp.arange(x.shape[0]), jnp.arange(x.shape[1])
        each = jax.vmap(random.fold_in)
        all_pairs = jax.vmap(jax.vmap(random.fold_in, (None, 0)), (0, None))
        return each(keys, rows), all_pairs(keys, columns), jax.vmap(random.bits)(keys)

    law(f, "b, t")


@pytest.mark.parametrize("partitionable", [True, False])
def test_both_ways_of_threefry_even_in_one_program(partitionable: bool) -> None:
    def f(k: Any, x: Any) -> Any:
        with jax.threefry_partitionable(partitionable):
            bits, children = random.bits(k, x.shape), random.split(k, x.shape[0])
            exact = random.bits(k, (3,)), random.split(k, 3)
        return bits, children, exact, random.bits(k, x.shape)

    law(f, "b, t", key=KEY)


def test_no_guard_is_added_when_the_trace_is_done() -> None:
    """Four numbers of 8 bits share a word: is there a last one with fewer?"""

    def f(k: Any, x: Any) -> Any:
        with jax.threefry_partitionable(False):
            return random.bits(k, x.shape, jnp.uint8)

    x, sizes = np.zeros((3, 5), np.float32), {"b": 3, "t": 5}
    traced = symbolic(f, ["", "b, t"], [KEY, x], sizes)
    with pytest.raises(PaddingRefused, match="computed depends on the sizes"):
        run_padded(traced, [KEY, x], sizes, HIGH)
    assert not traced.guards


def test_64_bits() -> None:
    with jax.enable_x64(True):
        law(lambda k, x: random.bits(k, x.shape, jnp.uint64), "b, t", key=KEY)


@pytest.mark.parametrize("name", ["rbg", "unsafe_rbg"])
def test_a_generator_that_does_not_count_is_refused(name: str) -> None:
    key = key_of(name)
    law(lambda k, x: random.bits(k, (3,)) + x.shape[0], "b, t", key=key)
    for f in (
        lambda k, x: random.bits(k, x.shape),
        lambda k, x: jax.vmap(random.bits)(jnp.repeat(k, x.shape[0])),
        lambda k, x: jax.lax.rng_bit_generator(random.key_data(k), x.shape),
        lambda k, x: jax.lax.rng_uniform(0.0, 1.0, x.shape),
    ):
        with pytest.raises(PaddingRefused, match="depend on how many") as refusal:
            law(f, "b, t", key=key)
        assert "test_random_bits.py" in str(refusal.value)


def test_buckets_that_one_word_does_not_count_are_refused() -> None:
    def f(k: Any, x: Any) -> Any:
        return random.bits(k, (x.shape[0] * 2**20, 2**20), jnp.uint8)[:2, :2]

    with pytest.raises(PaddingRefused, match="more than 2\\^32 elements"):
        check(f, ["", "b"], [KEY, np.zeros(3, np.float32)], {"b": 3}, {"b": 2**13})


_SIZES = st.sampled_from(["b", "t", "2", "1", "3"])


@pytest.mark.slow
@settings(max_examples=10)
@given(batch=st.lists(_SIZES, max_size=2), shape=st.lists(_SIZES, max_size=3))
def test_any_mixture_of_padded_and_fixed_axes(batch: list, shape: list) -> None:
    """Keys of one shape draw numbers of another."""

    def f(k: Any, x: Any) -> Any:
        names = {"b": x.shape[0], "t": x.shape[1]}
        sizes = tuple(names.get(n) or int(n) for n in shape)
        axes = tuple(names.get(n) or int(n) for n in batch)
        draw = lambda key: (random.bits(key, sizes), random.split(key, sizes))  # noqa: E731
        for _ in axes:
            draw = jax.vmap(draw)
        return draw(random.split(k, axes))

    law(f, "b, t", key=KEY, choices=CHOICES[:2])
