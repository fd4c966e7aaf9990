"""Laws of chained lookups: the elements of the chain, read at once when all is chosen."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import arrays_made
from hypothesis import given, strategies as st

from pliax.core.jaxprs import close


INDEX = jax.ShapeDtypeStruct((), jnp.int32)


@st.composite
def chains(draw):
    """An array, and indexing steps that leave fewer and fewer axes of it."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    steps, left = [], len(shape)
    while left and draw(st.booleans()):
        step = draw(st.lists(st.sampled_from("ij:-"), min_size=1, max_size=left))
        steps.append("".join(step))
        left -= sum(x != ":" for x in step)
    return shape, tuple(steps)


def chained(array, steps, i, j):
    """`i` and `j` may lie outside: they are clamped; "-" is the last element."""
    kinds = {"i": i, "j": j, ":": slice(None), "-": -1}
    for step in steps:
        array = array[tuple(kinds[x] for x in step)]
    return jnp.sum(array * (1 + jnp.arange(array.size).reshape(array.shape)))


@given(chains(), st.integers(-6, 6), st.integers(-6, 6))
def test_a_chain_of_lookups_finds_what_indexing_finds(chain, i, j):
    shape, steps = chain
    array = jnp.arange(np.prod(shape), dtype=jnp.int32).reshape(shape)
    i, j = jnp.int32(i), jnp.int32(j)
    closed = close(lambda i, j: chained(array, steps, i, j), INDEX, INDEX)
    assert int(closed(i, j)) == int(chained(array, steps, i, j))


def largest_result(function, *args):
    """The number of elements of the largest array an equation makes."""
    return max(math.prod(shape) for _, shape in arrays_made(function, *args))


@pytest.mark.parametrize(
    "lookup",
    [
        lambda x, i, j: x[i][j][i],
        lambda x, i, j: x[:, i][i][j],
        lambda x, i, j: jax.jit(lambda row: row[i, j])(x[i]),
        lambda x, i, j: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)[j, i],
    ],
    ids=["three steps", "a slice between", "across a jit", "by lax"],
)
def test_no_step_of_a_chain_is_an_array(lookup):
    array = jnp.ones((8, 9, 10))
    closed = close(lambda i, j: lookup(array, i, j), INDEX, INDEX)
    indices = jnp.int32(1), jnp.int32(2)
    places = (jnp.arange(6), jnp.arange(6))
    assert largest_result(lambda i, j: lookup(array, i, j), *indices) >= 80
    assert largest_result(jax.vmap(closed), *places) <= 6 * 3


def test_indices_of_several_dtypes_are_read_in_turn():
    array = jnp.arange(12).reshape(3, 4)
    closed = close(lambda i: array[i][i.astype(jnp.uint8)], INDEX)
    assert int(closed(jnp.int32(2))) == 10


def test_a_lookup_may_be_the_result():
    array = jnp.arange(12).reshape(3, 4)
    closed = close(lambda i: array[i][1:2][0], INDEX)
    np.testing.assert_array_equal(close(lambda i: array[i], INDEX)(2), array[2])
    assert int(closed(jnp.int32(2))) == 9
