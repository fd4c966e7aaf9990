"""Laws of `specialize_on` for sizes born from data: the same meaning, less work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax

import pliax as px
from pliax.ragged import boolean_mask, nonzero, repeat, unique


LENGTH = 12
FEW = [lambda n: n == 0, lambda n: n <= 3, lambda n: n % 4 == 0]


def selected(x, cases):
    return boolean_mask(x, x > 0, specialize_on=cases)


def statistics(x, cases):
    y = selected(x, cases)
    return y.mean(), y.max(initial=-9.0), jnp.sort(y), jnp.cumsum(y), y.shape[0]


def gradient(x, cases):
    def loss(x):
        y = jnp.sin(selected(x, cases))
        return (y[:, None] * y[None]).sum()

    return jax.value_and_grad(loss)(x)


def two_sizes(x, cases):
    low = boolean_mask(-x, x < 0, specialize_on=cases)
    return jnp.outer(selected(x, cases), x).sum(0), low, low.sum()


def of_integers(x, cases):
    counts = jnp.abs(x).astype(jnp.int32)
    values, number = unique(counts, return_counts=True, specialize_on=cases)
    (places,) = nonzero(counts, specialize_on=cases)
    room = repeat(x, counts, bound=5 * LENGTH, specialize_on=cases)
    return values * number, places, room.sum(), (places + 1).prod()


def in_loops(x, cases):
    def step(total, row):
        y = selected(row, cases)
        return total + y.sum(), y.shape[0]

    total = lax.scan(step, 0.0, x.reshape(2, -1))
    again = jax.jit(lambda x: selected(x, cases).sum())(x)
    return total, again, jax.checkpoint(lambda x: selected(x, cases).sum())(x)


def checked(x, cases):
    y = selected(x, cases)
    px.check(y.shape[0] < 100, "too many")
    return y * 2, jax.random.bits(jax.random.key(0), y.shape)


def by_checkpoint(x, cases):
    @jax.checkpoint
    def inner(x):
        return (selected(x, cases) ** 2).sum()

    return jax.value_and_grad(lambda x: inner(x) + inner(-x))(x)


def twice(x, cases):
    @jax.checkpoint
    def inner(x):
        return selected(x, cases).sum() * boolean_mask(x, x < 0).sum()

    return inner(x) + inner(-x)


def through_results(x, cases):
    f = jax.jit(jax.checkpoint(lambda x: selected(x, cases)))
    return jax.grad(lambda x: (f(x) ** 2).sum())(x)


def derived(x, cases):
    y = selected(x, cases)
    return y[1:], y[1:][0], y[:-1].sum(), y[2:].max(initial=0.0), y[::2]


def in_branches(x, cases):
    def one(x):
        return selected(x, cases).sum()

    total = lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, one(x)), (0, 0.0))
    return total, lax.cond(x[0] > 0, one, lambda x: one(-x) + 1, x)


def keys(x, cases):
    y = jax.random.split(jax.random.key(3), x.shape[0])
    return jax.random.key_data(boolean_mask(y, x > 0, specialize_on=cases)), selected(
        x, cases
    )


PROGRAMS = [by_checkpoint, twice, through_results, derived, in_branches, keys]
PROGRAMS += [statistics, gradient, two_sizes, of_integers, in_loops, checked]


def valid(tree):
    is_ragged = lambda x: isinstance(x, px.ragged.Ragged)  # noqa: E731
    leaves = jax.tree.leaves(tree, is_leaf=is_ragged)
    return [x.to_numpy() if is_ragged(x) else np.asarray(x) for x in leaves]


@pytest.fixture(scope="module")
def compiled():
    """Each program without cases and with them, at a fixed length and at any."""

    def both(program, **options):
        plain = px.compile(lambda x: program(x, ()), **options)
        return plain, px.compile(lambda x: program(x, FEW), **options)

    dims = {"x": {0: px.Dim("t", max=LENGTH, multiple_of=2, buckets=[LENGTH])}}
    options = ({}, {"dims": dims, "padding": "require"})
    return {p: [both(p, **o) for o in options] for p in PROGRAMS}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@given(data=st.data())
def test_cases_change_no_result(program, compiled, data):
    length = data.draw(st.sampled_from([LENGTH, LENGTH, 10, 4]))
    numbers = st.lists(st.integers(-4, 4), min_size=length, max_size=length)
    share = data.draw(st.sampled_from([0, 1, 2, LENGTH]))  # how many may be positive
    x = np.array(data.draw(numbers), np.float32) / 2
    x[share:] = -np.abs(x[share:])
    for plain, cases in compiled[program]:
        for a, b in zip(valid(plain(x)), valid(cases(x)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
            assert a.dtype == b.dtype


def test_one_trace_and_one_executable_hold_all_cases():
    f = px.compile(lambda x: statistics(x, FEW))
    for count in range(LENGTH + 1):
        f(np.where(np.arange(LENGTH) < count, 1, -1).astype(np.float32))
    assert f.stats.compilations == 1 and f.stats.calls == LENGTH + 1
    assert "u0 <= 12, 3 specialised  # px.ragged.boolean_mask at" in f.explain()


# What the device does -----------------------------------------------------------------


def branches(f, *args):
    """The programs of each switch of a padded function, outermost first."""
    jaxpr = jax.make_jaxpr(px.pad(f, dims={}))(*args, sizes={}).jaxpr
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "cond"]
    return [b.jaxpr for b in eqn.params["branches"]]


def contractions(jaxpr):
    """The shapes of the first operands of all products of matrices."""
    return [
        e.invars[0].aval.shape for e in jaxpr.eqns if e.primitive.name == "dot_general"
    ]


def test_a_case_computes_on_arrays_as_short_as_it_allows():
    w = jnp.ones((4, 4))
    x = jnp.ones((64, 4))

    def f(x, w):
        rows = boolean_mask(x, x[:, 0] > 0, specialize_on=[lambda n: n <= 8])
        return rows @ w

    short, long = branches(f, x, w)
    assert contractions(short) == [(8, 4)] and contractions(long) == [(64, 4)]


def test_sizes_do_not_multiply_each_others_cases():
    def f(x):
        return two_sizes(x, [lambda n: n <= 2])

    special, rest = branches(f, jnp.ones(LENGTH))
    inside = [[e.primitive.name for e in b.eqns].count("cond") for b in (special, rest)]
    assert inside == [0, 1]


def test_the_first_condition_that_holds_counts_and_empty_cases_are_left_out():
    def cases(*conditions):
        f = lambda x: selected(x, conditions).sum()  # noqa: E731
        names = [
            e.primitive.name
            for e in jax.make_jaxpr(px.pad(f, dims={}))(x, sizes={}).jaxpr.eqns
        ]
        return len(branches(f, x)) if "cond" in names else 1

    x = jnp.ones(LENGTH)
    assert cases(lambda n: n < 3, lambda n: n < 3) == 2
    assert cases(lambda n: n < 3, lambda n: n >= 3) == 2
    assert cases(lambda n: n > LENGTH) == 1
    assert cases(lambda n: True) == 1


# What users pass ----------------------------------------------------------------------


def test_conditions_are_no_part_of_what_is_passed_on():
    x = np.array([3.0, -1.0, 2.0, -5.0], np.float32)
    f = px.compile(lambda y: y.sum())
    for _ in range(3):  # a new function each time
        assert f(boolean_mask(x, x > 0, specialize_on=[lambda n: n <= 2])) == 5
    assert f.stats.compilations == 1


def test_without_jit_cases_mean_nothing():
    x = np.array([3.0, -1.0, 2.0], np.float32)
    with jax.disable_jit():
        assert px.compile(lambda x: selected(x, FEW).sum())(x) == 5


@pytest.mark.parametrize("given", [5, [5], lambda n: n < 3, "n < 3", ["n < 3"]])
def test_conditions_are_a_list_of_functions(given):
    x = np.ones(3, np.float32)
    wanted = r"specialize_on is .*\n.*list of functions of the size, \[lambda n: n <="
    for f in (lambda x: selected(x, given), px.compile(lambda x: selected(x, given))):
        with pytest.raises(TypeError, match=f"px.ragged.boolean_mask: {wanted}"):
            f(x)
    with pytest.raises(TypeError, match=f"Dim.'t'.: {wanted}"):
        px.Dim("t", specialize_on=given)


def test_what_was_checked_before_narrows_the_cases():
    def f(x):
        y = selected(x, [lambda n: n <= 1])
        px.check(y.shape[0] > 1, "too few")
        return y[1:].argmax()

    f = px.compile(f)
    assert f(np.array([1, -1, 5, 2], np.float32)) == 0
    with pytest.raises(ValueError, match="too few"):
        f(np.array([1, -1, -5, -2], np.float32))


def test_an_error_in_a_condition_is_the_users():
    def wrong(n):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        px.compile(lambda x: selected(x, [wrong]).sum())(np.ones(3, np.float32))
