"""JAX's functions of what is selected give what they give of arrays of that length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from ragged.laws import LENGTHS, Law, same, valid

import pliax as px
from pliax.ragged import boolean_mask


KEY = jax.random.key(3)
SOME = np.array([1, 3, 5, 9], np.float32) / 8
SEEDS = st.integers(0, 10**6)
SHARES = st.sampled_from([0.0, 0.4, 1.0])


def drawn(seed, length, share):
    """Some numbers more than once, of which about this share is positive."""
    rng = np.random.default_rng(seed)
    sign = np.where(rng.random(length) < share, 1, -1)
    return (sign * rng.integers(1, 6, length) / 8).astype(np.float32)


def of_selected(f):
    """The function of the positive numbers, and the same of a plain array."""
    return Law(lambda x: f(boolean_mask(x, x > 0))), lambda x: f(jnp.asarray(x[x > 0]))


def rows(x):
    return jnp.stack([x, 2 * x], axis=1)


FUNCTIONS = {
    "roll": lambda y: jnp.roll(y, 1),
    "roll backwards": lambda y: jnp.roll(y, -2),
    "roll around": lambda y: jnp.roll(y, 31),
    "roll of rows, flat": lambda y: jnp.roll(rows(y), 3),
    "roll of both axes": lambda y: jnp.roll(rows(y), (1, -1), axis=(0, 1)),
    "roll of one axis by two": lambda y: jnp.roll(y, (2, -3), axis=(0, 0)),
    "gradient of roll": lambda y: jax.grad(
        lambda z: jnp.vdot(jnp.roll(z, 1), y, precision="highest")
    )(y),
    "unique": lambda y: jnp.unique(y, size=4, fill_value=9),
    "unique, inverse": lambda y: jnp.unique(
        y, size=7, fill_value=0, return_inverse=True
    ),
    "unique of rows": lambda y: jnp.unique(rows(y), axis=0, size=3, fill_value=9),
    "isin": lambda y: jnp.isin(SOME, y),
    "isin, inverted": lambda y: jnp.isin(SOME, y, invert=True),
    "isin of it": lambda y: jnp.isin(y, SOME),
    "setdiff1d": lambda y: jnp.setdiff1d(SOME, y, size=4, fill_value=9),
    "permutation": lambda y: jax.random.permutation(KEY, y),
    "permutation of rows": lambda y: jax.random.permutation(KEY, rows(y)),
    "permutation in rows": lambda y: jax.random.permutation(
        KEY, rows(y), independent=True
    ),
    "permutation of a generator": lambda y: px.Generator(3).permutation(y)[1],
}
LAWS = {name: of_selected(f) for name, f in FUNCTIONS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("law, oracle", LAWS.values(), ids=LAWS)
@given(seed=SEEDS, length=LENGTHS, share=SHARES)
def test_functions_of_selected_elements_are_those_of_an_array(
    law, oracle, seed, length, share
):
    law(oracle, drawn(seed, length, share))


def test_a_selection_may_be_shorter_than_its_first_part():
    law = Law(lambda x: [p.sum() for p in jnp.split(boolean_mask(x, x > 0), [2, -1])])

    def oracle(x):
        return [p.sum() for p in np.split(x[x > 0], [2, -1])]

    for length in (1, 2, 3, 7, 12):
        law(oracle, drawn(length, length, 0.6))


# Where JAX stops for arrays without elements ------------------------------------------


def counted(y):
    return jnp.unique(y, size=3, return_index=True, return_counts=True)


@given(seed=SEEDS)
def test_unique_without_a_fill_value_is_jax_s_where_something_is_selected(seed):
    x = drawn(seed, 7, 1.0)
    found = COUNTED(x)
    same(valid(found), counted(jnp.asarray(x)))


COUNTED = px.compile(lambda x: counted(boolean_mask(x, x > 0)))


def test_unique_raises_at_run_time_where_it_has_nothing_to_fill_with():
    x = drawn(0, 7, 0.0)
    with pytest.raises(ValueError, match=r"needs a fill_value\n  at .*test_jax_func"):
        COUNTED(x)

    def filled(x):
        y = boolean_mask(x, x > 0)
        return jnp.unique(y, size=3, fill_value=0, return_counts=True)

    with pytest.raises(ValueError, match="the results have other shapes"):
        px.compile(filled)(x)


def test_what_is_stated_is_asserted_once():
    def f(x):
        y = boolean_mask(x, x > 0)
        px.check(y.shape[0] >= 1, "nothing is positive")
        return jnp.unique(y, size=2), jnp.roll(y, 1)

    f = px.compile(f)
    with pytest.raises(ValueError, match="nothing is positive"):
        f(drawn(0, 7, 0.0))
    found = f(np.array([3, -1, 2], np.float32))
    same(valid(found), (np.array([2, 3]), np.array([2, 3])))


# Rounds of a shuffle ------------------------------------------------------------------


def test_a_long_array_is_shuffled_in_as_many_rounds_as_the_device_counts():
    f = px.compile(lambda x: jax.random.permutation(KEY, boolean_mask(x, x > 0)))
    x = np.arange(1, 2001, dtype=np.float32)
    for count in (2000, 1626, 1625, 3, 0):
        y = np.where(x <= count, x, -x)
        same(f(y).to_numpy(), jax.random.permutation(KEY, jnp.asarray(x[:count])))
    assert f.stats.compilations == 1


@pytest.mark.parametrize("n", [1, 2, 5])
def test_unique_of_a_selection_of_one_element_is_that_element(n):
    def f(x):
        positive = px.ragged.boolean_mask(x, x > 0)
        return jnp.unique(positive, size=4, fill_value=-9.0)

    compiled = px.compile(f, dims={"x": "t"})
    x = np.arange(1.0, n + 1, dtype=np.float32)
    wanted = jnp.unique(jnp.asarray(x), size=4, fill_value=-9.0)
    np.testing.assert_array_equal(compiled(x), wanted)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "unique" in name])
def test_unique_of_a_selection_from_nothing_is_what_fills(name):
    nothing, function = np.zeros(0, np.float32), FUNCTIONS[name]
    selected = px.compile(lambda x: function(boolean_mask(x, x > 0)))
    same(valid(selected(nothing)), function(jnp.asarray(nothing)))
