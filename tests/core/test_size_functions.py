"""Where JAX asks for a size's value, ours give JAX's results at every size, in one trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transforms.padding.checking import check_each, symbolic

import pliax as px
from pliax.transforms._trace_errors import NotSymbolicError


KEY = jax.random.key(7)
CHOICES = [{"t": t} for t in (7, 1, 2, 8, 16)]
HIGH = {"t": 16}


def counted(sizes):
    """1, 2, 3, …"""
    return (np.arange(1, sizes["t"] + 1, dtype=np.float32),)


def ordered(sizes):
    """Sorted floats with ties, infinities and a NaN, and queries of the same kind."""
    rng = np.random.default_rng(sizes["t"])
    kinds = np.array([-np.inf, -1, 0, 0, 0.5, 0.5, 2, np.inf, np.nan], np.float32)
    return np.sort(rng.choice(kinds, sizes["t"])), rng.choice(kinds, 5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", ["scan", "scan_unrolled", "sort", "compare_all"])
def test_searchsorted_is_jax_s_bit_for_bit(side, method):
    def search(x, v):
        return jnp.searchsorted(x, v, side=side, method=method)

    check_each(search, ("t", "5"), ordered, CHOICES, HIGH)


def test_searches_batch_and_interpolations_have_derivatives():
    def search(x, v):
        rows = jnp.stack([x, x + 1])
        return jax.vmap(lambda row: jnp.searchsorted(row, v))(rows)

    def slope(x, y):
        return jax.grad(lambda x, y: jnp.interp(jnp.float32(0.3), x, y), (0, 1))(x, y)

    check_each(search, ("t", "5"), ordered, CHOICES, HIGH)

    def grid(sizes):
        return (np.linspace(0, 1, sizes["t"], dtype=np.float32),) * 2

    check_each(slope, ("t", "t"), grid, CHOICES, HIGH, tolerance=1e-6)


DRAWS = {
    "of an array": lambda x: jax.random.permutation(KEY, x),
    "of a range": lambda x: jax.random.permutation(KEY, x.shape[0]),
    "of each row": lambda x: jax.random.permutation(
        KEY, jnp.stack([x, x]), axis=1, independent=True
    ),
    "without replacement": lambda x: jax.random.choice(
        KEY, x, (x.shape[0] // 2 + 1,), replace=False
    ),
    "of weights": lambda x: jax.random.choice(KEY, x, (4,), p=jnp.abs(x)),
    "of places": lambda x: jax.random.choice(KEY, x.shape[0], (2, x.shape[0])),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_permutations_and_choices_are_those_of_jax(draw):
    check_each(draw, ("t",), counted, CHOICES, HIGH)


def test_how_often_is_shuffled_is_a_guard():
    def shuffle(x):
        return jax.random.permutation(KEY, x)

    for size, wanted in ((1625, {"t <= 1625"}), (1626, {"t > 1625", "t <= 2642245"})):
        x = np.arange(size, dtype=np.int32)
        found = symbolic(shuffle, ("t",), (x,), {"t": size})
        assert {str(guard.condition) for guard in found.guards} == wanted
        check_each(shuffle, ("t",), lambda s, x=x: (x,), [{"t": size}], {"t": 1700})


def test_a_scan_may_be_as_long_as_a_size():
    def count(x):
        return jax.lax.scan(lambda c, _: (c + 1, c), 0, length=x.shape[0])

    def both(x):
        return jax.lax.scan(lambda c, y: (c + y, c), 0.0, x, length=x.shape[0])

    def longer(x):
        return jax.lax.scan(lambda c, y: (c, y), 0, x, length=x.shape[0] + 1)

    for f in (count, both):
        check_each(f, ("t",), counted, CHOICES, HIGH)
    with pytest.raises(NotSymbolicError, match=r"scan got `length` t \+ 1"):
        symbolic(longer, ("t",), counted({"t": 3}), {"t": 3})


COMPARED = {
    "cond": lambda x: jax.lax.cond(x.shape[0] > 4, jnp.sin, jnp.cos, x),
    "its gradient": jax.grad(
        lambda x: jax.lax.cond(x.shape[0] > 4, jnp.sum, lambda x: (x * x).sum(), x)
    ),
    "where": lambda x: jnp.where((x.shape[0] > 4) & (x.shape[0] < 9), x, -x),
    "select": lambda x: jax.lax.select(x.shape[0] != 8, x, -x),
    "array": lambda x: (x.shape[0] <= 2) | (x > 3),
    "while": lambda x: jax.lax.while_loop(
        lambda c: (x.shape[0] > 4) & (c < 3), lambda c: c + 1, 0
    ),
}


@pytest.mark.parametrize("f", COMPARED.values(), ids=COMPARED)
def test_a_comparison_used_as_a_value_is_a_run_time_boolean_without_a_guard(f):
    check_each(f, ("t",), counted, CHOICES, HIGH, tolerance=1e-6)
    assert not symbolic(f, ("t",), counted({"t": 3}), {"t": 3}).guards


def test_squeeze_drops_axes_of_one_and_no_others():
    f = px.compile(lambda x: jnp.squeeze(x[:, None]) * 2, dims={"x": "t"})
    for t in (3, 1, 7, 1, 8):
        x = np.arange(t, dtype=np.float32)
        assert np.array_equal(f(x), np.squeeze(x[:, None]) * 2)
    assert f.stats.traces == 2


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("measure", [jnp.cov, jnp.corrcoef])
def test_covariances_have_one_program(measure):
    f = px.compile(lambda x: measure(jnp.stack([x, x * x])), dims={"x": "t"})
    for t in (3, 2, 7, 8):
        x = np.arange(1, t + 1, dtype=np.float32)
        np.testing.assert_allclose(
            f(x), measure(jnp.stack([x, x * x])), rtol=1e-5, atol=1e-6
        )
    assert f.stats.traces == 1
