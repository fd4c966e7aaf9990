"""Calls of known sizes run no Python of JAX, whatever happened before, in any form."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import pliax as px
from pliax.core._jax import with_first
from pliax.transforms import _ledger


@pytest.fixture(autouse=True, params=[1023, 1], ids=["searched", "guessed"])
def longest_wait(request, monkeypatch):
    """After how many calls what served them is tried first."""
    monkeypatch.setattr(_ledger, "_LONGEST_WAIT", request.param)


def python_of_jax(call):
    """The names of JAX's Python functions that a call runs."""
    names = []

    def note(frame, event, _):
        if event == "call" and "/jax/" in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


def scaled(weight, x):
    return weight * x.sum()


def compiled_for(sizes):
    dim = px.Dim("n", min=1, max=sizes[-1], buckets=sizes)
    return px.compile(scaled, dims={"x": {0: dim}})


@pytest.fixture
def warm():
    """A function, and a call of it that it knows."""
    f, w, x = compiled_for([8, 16]), jnp.float32(2), jnp.ones(8)
    for _ in range(4):
        f(w, x)
    return f, lambda: f(w, x)


def test_a_wrong_guess_slows_no_later_call(warm):
    f, call = warm
    for _ in range(4):
        f(jnp.float32(2), jnp.ones(16))
    for _ in range(4):
        call()
    assert f(jnp.float32(2), jnp.ones(16)) == 32
    assert python_of_jax(call) == []


def with_guesses(**options):
    """A function of many kinds of arguments, and what it is without px.compile."""

    def f(w, x, unread, number):
        total = w * x.astype(jnp.float32).sum()
        return total + 100 * unread.shape[0] + number

    return px.compile(f, **options), f


SIZES = {"x": {0: px.Dim("n", max=16)}, "unread": {0: px.Dim("m", max=16)}}
CALLS = st.lists(
    st.tuples(
        st.sampled_from([jnp.float32(2), np.float32(3), 1.5]),
        st.sampled_from([np.ones(8, np.float32), jnp.ones(8, int), jnp.ones(5)]),
        st.sampled_from([8, 5]),
        st.sampled_from([1, 2, 1.0]),
        st.integers(1, 6),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"dims": SIZES}, {"dynamic": True}, {}])
@given(calls=CALLS)
def test_calls_in_any_order_are_the_function_s_and_are_counted(options, calls):
    compiled, f = with_guesses(**options)
    for w, x, m, number, times in calls:
        args = w, x, jnp.ones(m), number
        wanted = float(f(*args))
        for _ in range(times):
            assert float(compiled(*args)) == wanted
    assert compiled.stats.calls == sum(times for *_, times in calls)


def test_a_call_of_known_sizes_runs_no_python_of_jax(warm):
    assert python_of_jax(warm[1]) == []


def test_after_caches_were_cleared_calls_are_soon_as_short_again(warm):
    f, call = warm
    traces = f.stats.traces
    jax.clear_caches()
    for _ in range(3):
        assert call() == 16
    assert python_of_jax(call) == []
    assert f.stats.traces == traces


def test_calls_on_another_device_are_soon_as_short(warm):
    f, call = warm
    w, x = jax.device_put((jnp.float32(2), jnp.ones(8)), jax.devices()[1])
    for _ in range(4):
        assert f(w, x) == 16
    assert python_of_jax(lambda: f(w, x)) == []
    assert python_of_jax(call) == []


def test_sizes_are_placed_once_on_all_devices():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    f = compiled_for([8, 16, 64])
    w = jax.device_put(jnp.float32(2), NamedSharding(mesh, P()))
    for n in (16, 64):
        x = jax.device_put(jnp.ones(n), NamedSharding(mesh, P("d")))
        for _ in range(4):
            assert f(w, x) == 2 * n
        assert python_of_jax(lambda x=x: f(w, x)) == []


def test_one_executable_serves_sizes_that_need_no_padding():
    f = px.compile(lambda x, n: x * n, dynamic=True)
    x = jnp.ones(4)
    for n in (3, 5, 7, 3, 5, 7):
        assert f(x, n).tolist() == [float(n)] * 4
    assert f.stats.compilations == 1


@pytest.mark.parametrize("first", [(), (3.0,)])
def test_after_an_error_in_a_trace_arguments_are_served_as_others_are(first):
    fails = [True]

    def f(*xs):
        if fails:
            raise KeyError(fails.pop())
        return sum(xs)

    called = with_first(jax.jit(f), *map(jnp.float32, first), refusal=ValueError)
    x = jnp.float32(2)
    with pytest.raises(KeyError):
        called(x)
    for _ in range(2):
        assert called(x) == 2 + sum(first)
    assert python_of_jax(lambda: called(x)) == []


@pytest.mark.parametrize("within", [jax.jit, jax.vmap, jax.grad])
def test_a_transformation_is_refused(within):
    called = with_first(jax.jit(lambda x, y: x * y), jnp.float32(3), refusal=ValueError)
    assert called(jnp.float32(2)) == 6
    x = jnp.ones(2)[0] if within is jax.grad else jnp.ones(2)
    with pytest.raises(ValueError):
        within(called)(x)


@pytest.mark.parametrize("within", [jax.jit, jax.vmap, jax.grad])
@pytest.mark.parametrize("n", [7, 8])
def test_known_arrays_inside_a_transformation_belong_to_it(within, n):
    f, w, x = compiled_for([8, 16]), jnp.float32(2), jnp.ones(n)
    for _ in range(4):
        f(w, x)
    y = jnp.float32(1) if within is jax.grad else jnp.ones(2)
    compilations = f.stats.compilations
    primitives = str(jax.make_jaxpr(within(lambda y: (f(w, x) * y).sum()))(y))
    assert "reduce_sum" in primitives
    assert "pad" not in primitives
    assert f.stats.compilations == compilations
    assert f(w, x) == 2 * n


@pytest.mark.slow
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_arguments_mean_the_same_by_position_and_by_name_in_any_order(order):
    def f(w, x, bias=1.0):
        return w * x.sum() + bias

    compiled = px.compile(f, dims={"x": "n"})
    x = jnp.ones(4)
    forms = [
        lambda: compiled(2.0, x),
        lambda: compiled(2.0, x, 1.0),
        lambda: compiled(2.0, bias=1.0, x=x),
        lambda: compiled(x=x, w=2.0),
    ]
    for number in (*order, *order, *order):
        assert forms[number]() == 9
    assert compiled.stats.calls == 12


@pytest.mark.parametrize("calls", [0, 1, 4])
def test_wrong_arguments_are_told_as_python_tells_them(calls):
    f, w, x = compiled_for([8, 16]), jnp.float32(2), jnp.ones(8)
    for _ in range(calls):
        f(w, x)
    with pytest.raises(TypeError, match=r"scaled\(\) missing 1 required .*'x'"):
        f(w)
    with pytest.raises(TypeError, match=r"takes 2 positional .* but 3 were given"):
        f(w, x, x)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        f(w, x, z=x)
    assert f(w, x) == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["_run", "again", "bound", "globals", "latest", "leaf", "table0", "unknown"]
)
def test_parameters_may_have_any_name(name):
    names = {}
    exec(f"def f(x, {name}): return x.sum() * {name}", names)
    f = px.compile(names["f"], dims={"x": "n"})
    for n in (3, 4, 3, 4):
        assert f(jnp.ones(n), 2.0) == 2 * n
        assert f(jnp.ones(n), **{name: 2.0}) == 2 * n
