"""Laws of sums in one order: those of XLA's scattered additions, without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from hypothesis import given, strategies as st
from jax import lax

from pliax.kernels.attention import ordered_scatters
from pliax.kernels.attention.ordered_scatters import in_order
from pliax.kernels.attention.separation import Inseparable


MODES = ("promise_in_bounds", "clip", "drop")
WAYS = {"compared": 2**28, "sorted": 0}  # pairs that may be


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    for name in ("_COMPARED", "_COMPARED_ANYWAY"):
        monkeypatch.setattr(ordered_scatters, name, WAYS[request.param])


def scattered(function, *args):
    return str(jax.make_jaxpr(function)(*args)).count("scatter-add")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("way")
@given(data=st.data())
def test_sums_are_those_of_scattered_additions(mode, data):
    """Of whole numbers, of which float32 has all sums, for indices of any values."""
    M, N = data.draw(st.sampled_from([(1, 3), (5, 1), (4, 9)]))
    inside = mode == "promise_in_bounds"
    places = st.integers(0, M - 1) if inside else st.integers(-M - 2, 2 * M)
    lists = st.lists(places, min_size=N, max_size=N)
    indices = jnp.asarray(data.draw(lists), jnp.int32)
    values = st.lists(st.integers(-99, 99), min_size=2 * N, max_size=2 * N)
    updates = jnp.asarray(data.draw(values), jnp.float32).reshape(N, 2)

    def add(updates):
        return (jnp.ones((M, 2)).at[indices].add(updates, mode=mode),)

    np.testing.assert_array_equal(in_order(add, updates)[0], add(updates)[0])
    assert scattered(lambda x: in_order(add, x), updates) == 0


LOOKUPS = {
    "elements": lambda x: x[jnp.asarray([[0, 2], [2, 2]]), 1],
    "rows": lambda x: x[jnp.asarray([1, 1, 0])],
    "windows": lambda x: jax.vmap(lambda n: lax.dynamic_slice(x, (n, n), (2, 3)))(
        jnp.arange(-1, 5)
    ),
    "of each row": lambda x: jnp.take_along_axis(x, jnp.asarray([[3, 3, 0, 9]]), 1),
    "batched": lambda x: jax.vmap(lambda row, n: row[n])(
        x, jnp.asarray([[3, 3], [0, 1], [3, 2]])
    ),
    "of a jitted function": lambda x: jax.jit(lambda x: x[jnp.asarray([2, 2])])(x),
}


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.usefixtures("way")
def test_gradients_of_lookups_are_in_one_order(name):
    x = normal(0, (3, 4))
    y, transpose = jax.vjp(LOOKUPS[name], x)
    d_y = normal(1, y.shape)
    (found,), (wanted,) = in_order(transpose, d_y, is_strict=True), transpose(d_y)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    assert scattered(transpose, d_y)
    assert not scattered(lambda x: in_order(transpose, x), d_y)


@pytest.mark.usefixtures("way")
def test_what_is_not_finite_stays_in_its_place():
    def add(x):
        return (jnp.zeros(4).at[jnp.asarray([2, 0, 2, 3])].add(x),)

    (found,) = in_order(add, jnp.asarray([1.0, jnp.inf, 2.0, jnp.nan]))
    np.testing.assert_array_equal(found, [jnp.inf, 0, 3, jnp.nan])


@pytest.mark.usefixtures("way")
def test_sums_of_half_precision_are_rounded_once():
    """256 + 1 is 256 in bfloat16."""

    def add(x):
        return (jnp.zeros(2, x.dtype).at[jnp.ones(1024, jnp.int32)].add(x),)

    (found,) = in_order(add, jnp.ones(1024, jnp.bfloat16))
    np.testing.assert_array_equal(found.astype(jnp.float32), [0, 1024])


def test_additions_to_places_of_their_own_stay():
    """A GPU has one order for these."""

    def add(x):
        return (jnp.zeros(4).at[jnp.arange(3)].add(x, unique_indices=True),)

    assert scattered(lambda x: in_order(add, x), jnp.ones(3)) == 1


LEFT = {
    "in a loop": lambda x: lax.map(lambda n: x[jnp.asarray([0, 2, 2])] * n, x[0]),
    "in a branch": lambda x: lax.cond(
        x[0, 0] > 0, lambda x: x[jnp.asarray([0, 2, 2])], lambda x: 2 * x, x
    ),
    "of windows": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_stays_as_it_is_is_refused_where_that_is_asked_for(name):
    x = normal(0, (3, 4))
    y, transpose = jax.vjp(LEFT[name], x)
    (found,), (wanted,) = in_order(transpose, y), transpose(y)
    np.testing.assert_array_equal(found, wanted)
    with pytest.raises(Inseparable, match="in a loop or branch"):
        in_order(transpose, y, is_strict=True)


def test_very_many_additions_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(ordered_scatters, "_COMPARED_ANYWAY", 0)
    monkeypatch.setattr(ordered_scatters, "_SORTED", 2)
    y, transpose = jax.vjp(lambda x: x[jnp.asarray([2, 0, 2])], normal(0, (5,)))
    assert scattered(lambda y: in_order(transpose, y), y) == 1
    with pytest.raises(Inseparable, match="very many"):
        in_order(transpose, y, is_strict=True)


def test_additions_of_integers_have_one_result_in_any_order():
    def add(x):
        return (jnp.zeros(2, x.dtype).at[jnp.asarray([1, 1, 0])].add(x),)

    (found,) = in_order(add, jnp.asarray([100, 100, 3], jnp.int8), is_strict=True)
    np.testing.assert_array_equal(found, [3, -56])
