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


ENDS = {
    "0 to n": lambda n: (0, n),
    "1 to n - 1": lambda n: (1, n - 1),
    "n // 2 to n": lambda n: (n // 2, n),
    "n to 10": lambda n: (n, 10),
    "NumPy's": lambda n: (0, np.int32(1) * n),
}


@pytest.mark.slow
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("options", [{}, {"unroll": 2}])
@pytest.mark.parametrize("has_x64", [False, True])
def test_a_loop_up_to_a_size_has_derivatives_in_one_trace(ends, options, has_x64):
    def loop(x):
        first, last = ends(x.shape[0])
        step = lambda i, state: (i, 0.5 * state[1] + x[i % x.shape[0]] ** 2)  # noqa: E731
        start = jax.lax.fori_loop(0, 1, lambda i, _: i, 0), jnp.float32(0)
        return jax.lax.fori_loop(first, last, step, start, **options)

    def slope(x):
        return jax.grad(lambda x: loop(x)[1])(x), loop(x)[0]

    with jax.enable_x64(has_x64):
        f, plain = px.compile(slope, dims={"x": "t"}), jax.jit(slope)
        for n in (5, 6, 1, 13, 11):
            x = jnp.linspace(0.1, 0.9, n, dtype=jnp.float32)
            (found, last), (wanted, index) = f(x), plain(x)
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
            assert last == index and jax.typeof(last) == jax.typeof(index)
    assert f.stats.traces == 1 and "not padded" not in f.explain()


def test_a_loop_up_to_a_python_integer_is_one_executable():
    def loop(x, n):
        return jax.lax.fori_loop(0, n, lambda i, y: y + i, x)

    f = px.compile(loop, dynamic=True)
    for n in (3, 900, 0, 40):
        assert f(jnp.zeros(2, int), n).tolist() == [n * (n - 1) // 2] * 2
    assert f.stats.compilations == 1


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


@pytest.mark.slow
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


# Running reductions -------------------------------------------------------------------

RUNNING = ["cumprod", "cummax", "cummin", "cumlogsumexp"]


def contents(kind):
    """Numbers of a size: with ties and zeros, or also infinite and none."""
    odd = [np.inf, -np.inf, np.nan] if kind == "odd" else []

    def of(sizes):
        rng = np.random.default_rng(sizes["t"])
        return (rng.choice(np.array([-1, 0, 0.5, 1, 2, *odd], np.float32), sizes["t"]),)

    return of


def weights(x):
    return 1 + jnp.arange(x.shape[0], dtype=jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ties", "odd"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", RUNNING)
def test_gradients_of_running_reductions_are_those_of_jax(name, reverse, kind):
    def f(x):
        return jnp.sum(weights(x) * getattr(jax.lax, name)(x, reverse=reverse))

    def both(x):
        return jax.grad(f)(x), jax.jvp(f, (x,), (weights(x),))[1]

    tolerance = 1e-6 if name == "cumlogsumexp" else 0.0  # the others are dyadic here
    check_each(both, ("t",), contents(kind), CHOICES, HIGH, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNING)
def test_second_derivatives_and_batches_of_running_reductions(name):
    def f(x):
        return jnp.sum(weights(x) * getattr(jax.lax, name)(x))

    def rows(x):
        return jnp.stack([x, x + 1], axis=1) * weights(x)[:, None]

    def batches(x):
        y = rows(x)
        return jax.vmap(jax.grad(f), 1)(y), jax.vmap(jax.grad(f))(y @ y.T)

    def second(x):
        return jax.hessian(f)(x), jax.grad(lambda y: jnp.sum(jax.grad(f)(y) ** 2))(x)

    check_each(second, ("t",), contents("ties"), CHOICES[:3], HIGH, tolerance=1e-5)
    check_each(batches, ("t",), contents("ties"), CHOICES[:3], HIGH, tolerance=1e-5)


def test_running_reductions_have_gradients_over_any_axis_of_several():
    def f(x):
        return jnp.sum(jnp.cumprod(x, 1) ** 2) + jnp.sum(jax.lax.cummax(x, axis=0) ** 2)

    def args(sizes):
        rng = np.random.default_rng(sizes["t"])
        return (rng.integers(-2, 3, (sizes["b"], sizes["t"])).astype(np.float32) / 2,)

    choices = [{"b": 2, "t": 5}, {"b": 1, "t": 1}, {"b": 4, "t": 3}, {"b": 3, "t": 8}]
    check_each(jax.grad(f), ("b, t",), args, choices, {"b": 4, "t": 8})


def test_the_gradient_of_a_running_product_is_padded():
    f = px.compile(jax.grad(lambda x: jnp.cumprod(x).sum()), dims={"x": "t"})
    for t in (5, 6, 7):
        x = np.arange(1, t + 1, dtype=np.float32)
        np.testing.assert_array_equal(f(x), jax.grad(lambda x: jnp.cumprod(x).sum())(x))
    assert f.stats.traces == 1 and f.stats.compilations == 2


# Ranges -------------------------------------------------------------------------------

RANGES = {
    "from 1.": lambda n: jnp.arange(1.0, n),
    "from 0.": lambda n: jnp.arange(0.0, n),
    "from a half": lambda n: jnp.arange(0.5, n),
    "from below": lambda n: jnp.arange(-2.0, n),
    "by steps": lambda n: jnp.arange(1.0, n, 2),
    "by fractions": lambda n: jnp.arange(0, n, 0.25),
    "by fractions from a size": lambda n: jnp.arange(n, 20.0, 1.5),
    "down": lambda n: jnp.arange(n, 0, -1.0),
    "to a half": lambda n: jnp.arange(n / 2),
    "down to a quarter": lambda n: jnp.arange(3.5, n / 4, -0.5),
    "of NumPy's float": lambda n: jnp.arange(np.float64(1), n),
    "in integers": lambda n: jnp.arange(1.5, n, dtype=jnp.int32),
    "in a short float": lambda n: jnp.arange(1.0, n, dtype=jnp.bfloat16),
    "in a short float by steps": lambda n: jnp.arange(0, 97 * n, 3, jnp.bfloat16),
    "of nothing": lambda n: jnp.arange(20.0, n),
}


@pytest.mark.parametrize("make", RANGES.values(), ids=RANGES)
def test_ranges_of_floats_are_those_of_jax(make):
    check_each(lambda x: make(x.shape[0]), ("t",), counted, CHOICES, HIGH)


def test_a_range_that_is_counted_by_rounded_floats_is_refused():
    for make in (
        lambda x: jnp.arange(0.0, x.shape[0], 0.1),
        lambda x: jnp.arange(x.shape[0] / 3),
        lambda x: jnp.arange(np.float32(1), x.shape[0]),
    ):
        with pytest.raises(NotSymbolicError):
            symbolic(make, ("t",), counted({"t": 7}), {"t": 7})
        f = px.compile(make, dims={"x": "t"})
        for t in (7, 3):
            np.testing.assert_array_equal(f(*counted({"t": t})), make(np.ones(t)))
