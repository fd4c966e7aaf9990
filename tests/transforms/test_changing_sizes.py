"""Laws of px.compile where sizes change: traces, guards, buckets, padding, reasons."""

import contextlib
import dataclasses
import inspect
import itertools
import re
import threading
import warnings
from collections import Counter
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from hypothesis import given, strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding

import pliax as px
from pliax.transforms import _buffers
from pliax.transforms.padding import interpreter, rules


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


def counting(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def attend(x, y):
    """Softmax attention of x over y: reductions, products and shapes of two sizes."""
    weights = jax.nn.softmax(x @ y.T, axis=-1)
    return {"out": weights @ y, "mean": x.mean(), "rows": x.reshape(-1)[: x.shape[0]]}


def same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


# One trace --------------------------------------------------------------------------


SIZES = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=5
)


@given(sizes=SIZES)
def test_named_sizes_take_one_trace_and_mean_what_jit_means(sizes):
    f = px.compile(attend, dims={"x": "b, 3", "y": "t, 3"}, padding="require")
    for b, t in sizes:
        x, y = np.sin(counting(b, 3)), np.cos(counting(t, 3))
        same(f(x, y), jax.jit(attend)(x, y))
    assert f.stats.traces == 1
    assert f.stats.compilations <= len(set(sizes))


@given(sizes=SIZES)
def test_never_padded_means_the_same_from_one_trace(sizes):
    f = px.compile(attend, dims={"x": "b, 3", "y": "t, 3"}, padding="never")
    for b, t in sizes:
        x, y = np.sin(counting(b, 3)), np.cos(counting(t, 3))
        same(f(x, y), jax.jit(attend)(x, y))
    assert (f.stats.traces, f.stats.compilations) == (1, len(set(sizes)))


def test_expressions_of_names():
    f = px.compile(lambda x, y: x.reshape(2, -1) + y, dims={"x": "2*b", "y": "2, b"})
    for b in (3, 4, 5):
        same(f(counting(2 * b), counting(2, b)), counting(2 * b).reshape(2, b) * 2)
    assert f.stats.traces == 1
    with pytest.raises(ValueError, match=r"dimension 0 of x is 2\*b, but it is 7"):
        f(counting(7), counting(2, 3))


def test_automatic_sizes_take_two_traces():
    f = px.compile(lambda x: x * 2 + x.shape[0])
    for size in (3, 4, 5, 6, 3):
        same(f(counting(size)), jnp.float32(2) * counting(size) + jnp.float32(size))
    assert f.stats.traces == 2


def test_sizes_that_change_together_share_a_symbol():
    f = px.compile(lambda x, y, w: (x + y) @ w)
    for b in (3, 4, 5, 6):
        same(f(ones(b, 2), ones(b, 2), ones(2, 4)), 4 * ones(b, 4))
    assert f.stats.traces == 2


def test_sizes_that_part_get_a_trace_of_their_own():
    f = px.compile(lambda x, y: x.sum() + y.sum(), dynamic=True)
    for b, t in ((3, 3), (4, 4), (3, 5), (7, 2)):
        assert f(ones(b), ones(t)) == b + t
    assert f.stats.traces == 2


def test_sizes_that_the_program_ties_are_tied():
    f = px.compile(lambda x, y: x[1:] * y, dynamic=True, padding="require")
    for t in (4, 5, 9):
        same(f(counting(t), ones(t - 1)), counting(t)[1:])
    assert f.stats.traces == 2  # the first found s0 - 1 and s1 different
    assert [g.condition for g in f.guards] in (["s0 - 1 == s1"], ["s1 == s0 - 1"])
    with pytest.raises(TypeError, match="incompatible shapes"):
        f(counting(4), ones(4))


def test_empty_arrays_are_a_case_of_their_own():
    f = px.compile(lambda x: x.sum(), dynamic=True)
    assert f(ones(3)) == 3 and f(ones(0)) == 0 and f(ones(4)) == 4
    assert f.stats.traces == 2


# Python integers --------------------------------------------------------------------


def test_integers_are_constants_until_they_change():
    f = px.compile(lambda x, n: jnp.zeros(n) + x * n)
    for n in (3, 4, 5, 2, 1):
        same(f(jnp.float32(2), n), jnp.full(n, 2.0 * n))
    assert f.stats.traces == 2


@given(values=st.lists(st.integers(-1000, 1000), min_size=1, max_size=5))
def test_integers_of_any_sign_run_as_values(values):
    f = px.compile(lambda x, n: x * n + n // 3, dynamic=True)
    for n in values:
        assert f(jnp.int32(5), n) == 5 * n + n // 3
    assert f.stats.traces <= 2 and f.stats.compilations <= 2


def test_a_counter_compiles_twice():
    f = px.compile(lambda state, step: state + step)
    for step in range(100):
        f(jnp.int32(0), step)
    assert (f.stats.traces, f.stats.compilations) == (2, 2)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, n: jnp.where(jnp.arange(9) < n + 2, x, 0),
        lambda x, n: x * (2 * n),
        lambda x, n: x + n**2,
        lambda x, n: x.at[n - 1 + x.shape[0]].set(n + x.shape[0]),
        lambda x, n: x + sum([n, n]),
    ],
    ids=["plus", "times", "power", "length", "sum"],
)
def test_what_is_computed_of_an_integer_is_for_all_values(f):
    compiled = px.compile(f)
    for n in range(2, 12):
        same(compiled(ones(9), n), f(ones(9), n))
    assert (compiled.stats.traces, compiled.stats.compilations) == (2, 2)


def test_an_integer_of_which_something_is_too_large_costs_no_other_one():
    f = px.compile(lambda x, n: x + n * n)
    large = [40_000, 1_100, 46_340, 30_000]
    for n in [2, 3, *large, 0, 5, *large]:
        assert f(jnp.int32(1), n) == 1 + n * n
    with pytest.raises(OverflowError):
        f(jnp.int32(1), 50_000)
    assert f(jnp.int32(1), 6) == 37
    # a constant; up to 2**10, up to 2**15, and two of their own; once more after 50,000
    assert f.stats.compilations <= 6


def test_integers_in_containers():
    f = px.compile(lambda x, ns: x * ns[0] + ns[1])
    for ns in ([1, 2], [3, 2], [4, 2], [0, 2]):
        assert f(jnp.int32(5), ns) == 5 * ns[0] + ns[1]
    assert f.stats.traces == 2


# Guards -----------------------------------------------------------------------------


def branching(x):
    if x.shape[0] > 5:
        return x * 2
    return x + 100


def test_a_branch_is_a_guard_and_old_traces_keep_serving():
    f = px.compile(branching, dims={"x": "t"})
    for t in (3, 8, 4, 9, 5, 6):
        same(f(counting(t)), branching(jnp.asarray(counting(t))))
    assert f.stats.traces == 2
    assert {g.condition for g in f.guards} == {"t <= 5", "t > 5"}
    text = f.explain()
    assert "guard failed: t <= 5  # " in text and "if x.shape[0] > 5:" in text


def test_a_declared_size_that_becomes_a_constant_is_an_error():
    def f(x):
        return x + jnp.arange(12.0)

    compiled = px.compile(f, dims={"x": "t"})
    with pytest.raises(px.ConstraintViolationError) as caught:
        compiled(counting(12))
    text = str(caught.value)
    assert "'t' (x.shape[0] = 12) was declared dynamic" in text
    assert 'Suggested fix: declare "t = 12"' in text and "return x + jnp.arange" in text


def test_a_size_without_a_name_that_fixes_another_is_told():
    f = px.compile(lambda p, q: p * q, dims={"p": "t"})
    with pytest.raises(px.ConstraintViolationError) as caught:
        f(counting(5), counting(5))
    assert "As long here, and without a name: q.shape[0]." in str(caught.value)


def asserted(x):
    assert x.shape[0] % 2 == 0  # the question
    return 2 * x


EVEN = {
    "asserted": asserted,
    "reshape": lambda x: x.reshape(-1, 2).sum(1),
    "of a size": lambda x: x.reshape(x.shape[0] // 2, 2),
    "halves": lambda x: x[::2] + x[1::2],
    "split": lambda x: sum(jnp.split(x, 2)),
}


@pytest.mark.parametrize("f", EVEN.values(), ids=EVEN)
def test_a_size_that_must_be_a_multiple_is_told_how_to_be_declared(f):
    compiled, x = px.compile(f, dims={"x": "t"}), np.ones(8, np.float32)
    compiled(x)
    with pytest.raises((TypeError, ValueError, AssertionError)) as caught:
        compiled(x[:7])
    notes = "\n".join(caught.value.__notes__)
    assert "served sizes before for which" in notes and "test_changing_sizes" in notes
    assert 'Suggested fix: declare "t = 2*_t": write 2*_t for t in dims' in notes
    declared = px.compile(f, dims={"x": "2*_t"})
    np.testing.assert_array_equal(declared(x), f(jnp.asarray(x)))
    assert not declared.guards
    with pytest.raises(ValueError, match=r"dimension 0 of x is 2\*_t, but it is 7"):
        declared(x[:7])


def test_a_branch_for_odd_sizes_is_told_nothing():
    def f(x):
        if x.shape[0] % 2:
            raise ValueError(x.shape[0] % 3)  # of another mistake nothing is said
        return x

    compiled = px.compile(f, dims={"x": "t"})
    with pytest.raises(ValueError, match="1") as caught:
        compiled(np.ones(7, np.float32))
    assert not any("px" in n for n in getattr(caught.value, "__notes__", ()))

    def g(x):
        return x[::2] if x.shape[0] % 2 else x

    compiled = px.compile(g, dims={"x": "t"})
    assert [compiled(np.ones(n)).shape for n in (8, 7, 6)] == [(8,), (4,), (6,)]


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: x.reshape(-1, 2)[:, 0] + y,
        lambda x, y: x.reshape(2, -1)[0] + y,
        lambda x, y: x.reshape(y.shape[0], 2).sum(1) + y,
    ],
)
def test_a_size_that_is_a_multiple_of_another_is_tied_to_it(f):
    x, y = np.ones(8, np.float32), np.ones(4, np.float32)
    with pytest.raises(px.ConstraintViolationError, match=r'declare "t = 2 \* s"'):
        px.compile(f, dims={"x": "t", "y": "s"})(x, y)
    tied = px.compile(f, dims={"x": "2*s", "y": "s"})
    for s in (4, 5, 3):
        x, y = np.ones(2 * s, np.float32), np.ones(s, np.float32)
        np.testing.assert_array_equal(tied(x, y), f(jnp.asarray(x), jnp.asarray(y)))
    assert tied.stats.traces == 1 and not tied.guards


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: jnp.stack([x[1:], y], axis=1),
        lambda x, y: jax.lax.scan(lambda c, z: (c, z[0] * z[1]), 0, (x[1:], y))[1],
        lambda x, y: jax.vmap(jnp.multiply)(x[1:], y),
    ],
    ids=["stack", "scan", "vmap"],
)
def test_lengths_that_jax_puts_in_a_set_are_tied_to_each_other(f):
    x, y = counting(6), counting(5)
    with pytest.raises(px.ConstraintViolationError) as caught:
        px.compile(f, dims={"x": "a", "y": "b"})(x, y)
    text = str(caught.value)
    assert 'declare "a - 1 = b"' in text and f"{__file__}:" in text
    compiled = px.compile(f, dims={"x": "t", "y": "t - 1"}, padding="require")
    for t in (6, 7, 12):
        same(compiled(counting(t), counting(t - 1)), f(counting(t), counting(t - 1)))
    assert compiled.stats.traces == 1


def test_the_line_is_the_users_where_python_looks_a_size_up():
    f = px.compile(lambda x: x * Counter([x.shape[0]])[3], dims={"x": "t"})
    with pytest.raises(px.ConstraintViolationError, match=rf"  at {__file__}:\d+ in"):
        f(counting(3))


def test_a_mark_that_becomes_a_constant_is_an_error_about_the_mark():
    with pytest.raises(px.ConstraintViolationError) as caught:
        px.compile(lambda x: x + jnp.arange(3.0))(px.dynamic(counting(3), 0))
    assert "(x.shape[0] = 3) was marked as dynamic" in str(caught.value)
    assert "mark it with px.maybe_dynamic or px.static" in str(caught.value)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.reshape(2, -1)[0] + jnp.zeros(12),
        lambda x: x.reshape(4, 3, -1) + jnp.zeros((4, 3, 2)),
    ],
)
def test_equalities_that_leave_one_size_are_an_error(f):
    with pytest.raises(px.ConstraintViolationError, match='declare "t = 24"'):
        px.compile(f, dims={"x": "t"})(counting(24))


def test_the_line_is_the_users_where_numpy_asks():
    f = px.compile(lambda x: x + np.ones(x.shape, np.float32), dims={"x": "t"})
    with pytest.raises(px.ConstraintViolationError, match=rf"  at {__file__}:\d+ in"):
        f(counting(3))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: sum(row for row in x),
        lambda x: jnp.stack([*x][::-1]),
        lambda x: jnp.stack([2 * row for row in reversed(x)]),
        lambda x: dict(enumerate(x)),
    ],
    ids=["loop", "star", "reversed", "enumerate"],
)
def test_iteration_needs_the_number_of_rows(f):
    with pytest.raises(px.ConstraintViolationError, match=rf"{__file__}:\d+ in"):
        px.compile(f, dims={"x": "t"})(counting(3))
    g = px.compile(f, dynamic=True)
    for t in (3, 4, 3):
        jax.tree.map(same, g(counting(t)), jax.jit(f)(counting(t)))
    assert g.stats.traces == 2
    assert {x.condition for x in g.guards} == {"s0 == 3", "s0 == 4"}


def test_a_truth_about_sizes_is_an_integer_to_python():
    def f(x):
        is_long = x.shape[0] > 4
        return x * int(is_long) + [1, 2][is_long] + float(is_long)

    g = px.compile(f, dims={"x": "t"})
    for t in (3, 4, 5, 9):
        same(g(counting(t)), f(counting(t)))
    assert {x.condition for x in g.guards} == {"t <= 4", "t > 4"}


@pytest.mark.parametrize(
    "divide",
    [
        lambda x: x.reshape(2, -1),
        lambda x: x.reshape(-1, 2),
        lambda x: x.reshape(1, 2, -1),
        lambda x: x.reshape(-1, 2).reshape(-1) + x,
        lambda x: jnp.stack(jnp.split(x.reshape(2, -1).reshape(-1), 2)),
    ],
)
def test_a_reshape_leaves_one_guard_as_users_write_it(divide):
    f = px.compile(divide, dims={"x": "t"})
    for t in (12, 6, 2):
        same(f(counting(t)), divide(counting(t)))
    assert [x.condition for x in f.guards] == ["t % 2 == 0"]
    with pytest.raises(TypeError, match="cannot reshape"):
        f(counting(7))


def test_an_undeclared_size_that_becomes_a_constant_specialises():
    f = px.compile(lambda x: x * len(x), dynamic=True)
    for t in (3, 4, 3):
        same(f(counting(t)), t * counting(t))
    assert f.stats.traces == 2
    assert {g.condition for g in f.guards} == {"s0 == 3", "s0 == 4"}
    told = "specialised: s0 (x.shape[0] = 3) became a constant: the program needs s0"
    assert told in f.explain() and "s0: x.shape[0]" in f.explain()


def test_conditions_on_sizes_are_checked_and_used():
    def f(x):
        assert px.statically_known_true(x.shape[0] % 8 == 0)
        return x.reshape(-1, 8).sum(axis=1)

    g = px.compile(f, dims={"x": "b"}, where=("b % 8 == 0", "b <= 64"))
    for b in (8, 24, 64):
        same(g(counting(b)), counting(b).reshape(-1, 8).sum(axis=1))
    assert g.stats.traces == 1 and not g.guards
    with pytest.raises(ValueError, match="where says b % 8 == 0, but b = 12 in `x`"):
        g(counting(12))
    with pytest.raises(ValueError, match="where says b <= 64, but b = 72"):
        g(counting(72))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"where": "t <= 4"}, ValueError, "dims names no 't'"),
        ({"where": "b != 4"}, ValueError, "cannot be read"),
        ({"where": (3,)}, TypeError, "where holds 3"),
        ({"where": 3}, TypeError, "where is 3"),
        ({"where": "b / 2 <= 4"}, ValueError, "cannot be read"),
        ({"where": "b <= 2.5"}, ValueError, "cannot be read"),
        ({"where": "2**b <= 16"}, ValueError, "cannot be read"),
        ({"where": "b**-1 <= 4"}, ValueError, "cannot be read"),
        ({"where": "b % 0 == 0"}, ValueError, "cannot be read"),
        ({"where": "max(b) <= 4"}, ValueError, "cannot be read"),
        ({"padding": "always"}, ValueError, "Pass one of auto, require, never"),
        ({"recompile_limit": 0}, ValueError, "at least 1"),
        ({"on_limit": "stop"}, ValueError, "on_limit is 'stop'"),
    ],
)
def test_wrong_options_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        px.compile(lambda x: x, dims={"x": "b"}, **options)


@pytest.mark.parametrize("shape", ["b*b", "b**2", "b // 2", "b % 3", "max(b, 2)"])
def test_a_size_is_read_off_what_is_linear_in_it(shape):
    with pytest.raises(ValueError, match=r"from which b cannot be read\.\nName each"):
        px.compile(jnp.sin, dims={"x": shape})(ones(4))
    f = px.compile(lambda x, y: x[:1] + y, dims={"x": shape, "y": "b"})
    for b in (4, 7):
        size = eval(shape, {"b": b, "max": max})
        same(f(ones(size), ones(b)), 2 * ones(b))


@pytest.mark.parametrize("name", ["max", "mod", "True", "if", "not", "floordiv(b)"])
def test_a_size_cannot_be_called_like_a_function(name):
    with pytest.raises(ValueError, match="cannot be read"):
        px.compile(lambda x: x, dims={"x": name})
    with pytest.raises(ValueError, match="identifier that a size can have"):
        px.Dim(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    ["t <= 100", "t < 101", "100 >= t", "t <= 10*10", "2*t <= 201", "-t >= -100"],
)
def test_any_linear_condition_bounds_the_buckets(where):
    f = px.compile(lambda x: x.sum(), dims={"x": "t"}, where=where)
    for t in range(1, 101):
        assert f(ones(t)) == t
    assert f.stats.compilations <= 14
    with pytest.raises(ValueError, match="where says"):
        f(ones(101))


@pytest.mark.parametrize("where", ["t*t >= 4", "t*t*t - 3*t*t + 3*t >= 2", "t**2 >= 4"])
def test_other_conditions_bound_nothing_but_hold(where):
    f = px.compile(lambda x: x.sum(), dims={"x": "t"}, where=where)
    for t in (2, 3, 9):
        assert f(ones(t)) == t
    with pytest.raises(ValueError, match="where says"):
        f(ones(1))


def test_dims_take_the_operators_of_python():
    f = px.compile(lambda x, y: x[::2] * y, dims={"x": "t", "y": "(t + 1) // 2"})
    for t in (5, 6, 1):
        same(f(counting(t), ones((t + 1) // 2)), counting(t)[::2])
    with pytest.raises(ValueError, match="is floordiv"):
        f(counting(5), ones(2))


def test_a_hint_decides_the_branches_of_the_first_trace():
    dim = px.Dim("t", hint=9)
    f = px.compile(lambda x: 2 * x if x.shape[0] > 5 else x, dims={"x": dim})
    for t, factor in ((3, 1), (9, 2), (4, 1), (12, 2)):
        same(f(counting(t)), factor * counting(t))
    assert f.stats.traces == 2
    assert "t <= 5" in f.explain() and "t > 5" in f.explain()


def test_a_dim_refuses_other_sizes():
    dim = px.Dim("t", min=4, max=16, multiple_of=4)
    f = px.compile(lambda x: x.sum(), dims={"x": {1: dim}})
    assert f(ones(3, 8)) == 24
    for size in (2, 20, 6):
        with pytest.raises(
            ValueError, match=rf"t is {size} in `x`, but Dim\('t'\) says at le"
        ):
            f(ones(3, size))


LIMITS = {
    "max": ({"max": 4}, None, [9], "t is 9 in `x`, but Dim"),
    "min": ({"min": 3}, None, [2], "t is 2 in `x`, but Dim"),
    "min, empty": ({"min": 1}, None, [0], "t is 0 in `x`, but Dim.*at least 1"),
    "list": ({"buckets": [4, 6]}, None, [6, 7], "t is 7 in `x`, but Dim.*at most 6"),
    "multiple": ({"multiple_of": 2}, None, [6, 5], "t is 5 in `x`, but Dim"),
    "where": ({}, "t <= 4", [9], "where says t <= 4, but t = 9 in `x`"),
    "where, empty": ({}, "t >= 1", [0], "where says t >= 1, but t = 0 in `x`"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("options", "where", "sizes", "text"), LIMITS.values())
@pytest.mark.parametrize("dims", [None, {"y": "s"}])
def test_limits_of_sizes_hold_in_another_compiled_function(
    options, where, sizes, text, dims
):
    axes = {"x": {0: px.Dim("t", **options)}}
    inner = px.compile(lambda x: x * 2, dims=axes, where=where)
    for order in ([4, *sizes], sizes, [4, *sizes, 4]):
        outer = px.compile(lambda y: inner(y) + 1, dims=dims)
        for n in order:
            is_allowed = n in (4, 6)
            with (
                contextlib.nullcontext()
                if is_allowed
                else pytest.raises(ValueError, match=text)
            ):
                same(outer(ones(n)), 2 * ones(n) + 1)


def test_a_limit_of_an_inner_function_is_a_guard_of_the_outer_one():
    inner = px.compile(lambda x: x * 2, dims={"x": {0: px.Dim("t", max=64)}})
    outer = px.compile(lambda y: inner(y) + 1, dims={"y": "s"})
    for n in (3, 5, 9, 64):
        same(outer(ones(n)), 2 * ones(n) + 1)
    assert outer.stats.traces == 1
    (guard,) = outer.guards
    assert guard.condition == "s <= 64" and "test_changing_sizes" in guard.place.file


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap, px.compile])
def test_a_call_inside_a_transformation_is_the_function_after_any_calls(
    transform, count
):
    compiled = px.compile(jnp.sum, dims={"a": "t"})
    for _ in range(count):
        same(compiled(counting(17)), counting(17).sum())  # in a bucket of 18
    x = counting(3, 17) if transform is jax.vmap else counting(17)
    same(transform(compiled)(x), transform(jnp.sum)(x))


@pytest.mark.parametrize("options", [{"min": 3}, {"buckets": [4, 8]}])
@pytest.mark.parametrize("padding", ["auto", "never"])
def test_limits_of_sizes_are_one_error_however_a_function_runs(options, padding):
    axes = {0: px.Dim("t", **options)}
    compiled = px.compile(lambda x: x.sum(), dims={"x": axes}, padding=padding)
    calls = [compiled, jax.jit(compiled), jax.grad(compiled), px.compile(compiled)]
    found = set()
    for f in (*calls, lambda x: jax.vmap(compiled)(x[None])):
        f(ones(5))
        with pytest.raises(ValueError, match="in `x`, but Dim") as refusal:
            f(ones(0 if "min" in options else 9))
        found.add(str(refusal.value))
    with jax.disable_jit(), pytest.raises(ValueError, match="in `x`, but Dim"):
        compiled(ones(0 if "min" in options else 9))
    assert len(found) == 1


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_limits_of_sizes_hold_inside_other_transformations(transform):
    axes = {0: px.Dim("t", max=8)}
    compiled = px.compile(lambda x, y: (x * y).sum(), dims={"x": axes}, where="t >= 2")
    f = transform(compiled)

    def call(n):
        x = np.ones((2, n) if transform is jax.vmap else n, np.float32)
        return f(x, x)

    for n in (2, 8):
        call(n)
    with pytest.raises(ValueError, match=r"t is 9 in `x`, but Dim\('t'\) says"):
        call(9)
    with pytest.raises(ValueError, match="where says t >= 2, but t = 1 in `x`"):
        call(1)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"min": -1}, ValueError, "min is -1"),
        ({"hint": 0}, ValueError, "hint is 0"),
        ({"hint": 9, "buckets": [8]}, ValueError, "not at most 8, its largest bucket"),
        ({"max": 3, "min": 4}, ValueError, "max is 3, less than min 4"),
        ({"multiple_of": 0}, ValueError, "multiple_of is 0"),
        ({"hint": 3, "multiple_of": 2}, ValueError, "hint is 3"),
        ({"max": 2.5}, TypeError, "max is 2.5"),
        ({"min": 5, "max": 7, "multiple_of": 8}, ValueError, "no multiple of 8"),
        ({"histogram": {"a": 3}}, TypeError, "Pass a mapping from sizes"),
        ({"histogram": [1, 2]}, TypeError, "Pass a mapping from sizes"),
        ({"max": 9, "histogram": {9: 1, 10: 2}}, ValueError, "has the size 10, which"),
        (
            {"multiple_of": 4, "histogram": {6: 2}},
            ValueError,
            "6, which is not a multiple of 4",
        ),
        ({"buckets": "linear"}, TypeError, "buckets is 'linear'"),
        ({"buckets": []}, ValueError, "at least one length"),
        ({"buckets": [8], "max": 9}, ValueError, "largest bucket is 8, but max is 9"),
        ({"buckets": [8], "min": 9}, ValueError, "largest bucket is 8, but min is 9"),
        ({"max": 0}, ValueError, "max is 0, so that all arrays would be empty"),
    ],
)
def test_a_dim_that_contradicts_itself_is_refused(options, error, text):
    with pytest.raises(error, match=text):
        px.Dim("t", **options)


def test_a_dim_takes_the_integers_of_numpy():
    given = {"min": np.int32(2), "max": np.int64(8), "multiple_of": np.uint8(2)}
    plain = {name: int(n) for name, n in given.items()}
    assert px.Dim("t", **given) == px.Dim("t", **plain)
    with pytest.raises(TypeError, match="Pass an integer"):
        px.Dim("t", max=np.bool_(True))


CHECKS = {
    "declared": ({"dims": {"x": "t"}}, [9], r"t <= 8, found t = 9 \(x.shape\[0\]\)"),
    "changed": ({}, [5, 6, 9], r"s0 <= 8, found s0 = 9 \(x.shape\[0\]\)"),
    "first": ({}, [9], "few tokens"),
}


@pytest.mark.parametrize(("options", "sizes", "text"), CHECKS.values(), ids=CHECKS)
def test_a_check_that_fails_names_its_message_and_the_sizes(options, sizes, text):
    def checked(x):
        px.check(x.shape[0] <= 8, "few tokens, please")
        return x.sum()

    f = px.compile(checked, **options)
    *allowed, refused = sizes
    for n in allowed:
        f(ones(n))
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"px.check: few.*\n  at .*(\n.*)?{text}"):
            f(ones(refused))
    f(ones(7))
    assert "size by size" not in f.explain()


def test_a_check_that_fails_names_python_integers():
    def checked(x, n):
        px.check(n < x.shape[0])
        return x[:n]

    f = px.compile(checked, dims={"x": "t"})
    same(f(ones(5), 3), ones(3))
    with pytest.raises(
        ValueError, match=r"found s1 - 1 = 7 \(n\), t = 5 \(x.shape\[0\]\)."
    ):
        f(ones(5), 7)


# Marks ------------------------------------------------------------------------------


def test_a_mark_makes_a_size_dynamic_at_the_first_call():
    f = px.compile(lambda x: x * 2)
    same(f(px.dynamic(counting(3), 0)), counting(3) * 2)
    same(f(px.dynamic(counting(5), 0)), counting(5) * 2)
    assert f.stats.traces == 1
    with pytest.raises(px.ConstraintViolationError, match=r"x\.shape\[0\] = 3"):
        px.compile(lambda x: x * len(x))(px.dynamic(counting(3), 0))


def test_a_weak_mark_gives_way():
    f = px.compile(lambda x: x * len(x))
    same(f(px.maybe_dynamic(counting(3), 0)), counting(3) * 3)
    assert [g.condition for g in f.guards] == ["s0 == 3"]


def test_a_static_mark_keeps_each_size_a_constant():
    f = px.compile(lambda x: x * 2, dynamic=True)
    for t in (3, 4, 5):
        same(f(px.static(counting(t))), counting(t) * 2)
    assert f.stats.traces == 3


@pytest.mark.parametrize("axis", [0.5, (0,), "0"])
def test_marks_refuse_what_is_no_axis(axis):
    with pytest.raises(TypeError, match="Name axes one by one"):
        px.dynamic(ones(3), axis)


@pytest.mark.parametrize("mark", [px.dynamic, px.maybe_dynamic, px.static])
def test_marks_refuse_what_has_no_such_axis(mark):
    with pytest.raises(ValueError, match="axis 2 of an array of rank 1"):
        mark(counting(3), 2)
    with pytest.raises(TypeError, match="Mark arrays"):
        mark(3, 0)
    with pytest.raises(TypeError, match="marked already"):
        mark(mark(counting(3)), 0)
    with pytest.raises(TypeError, match=r"by px.static on axes \(0\).\n.*one mark"):
        mark(px.static(counting(3)), 0)


# Buckets ----------------------------------------------------------------------------


def lengths(f):
    return sorted(int(group.partition("=")[2]) for group in f.stats.groups)


def test_geometric_buckets_are_at_most_fourteen():
    dim = px.Dim("t", min=16, max=1024)
    f = px.compile(lambda x: x.sum(), dims={"x": dim})
    rng = np.random.default_rng(0)
    for t in rng.integers(16, 1025, 60):
        assert float(f(np.ones(t, np.float32))) == t
    assert f.stats.traces == 1 and f.stats.compilations <= 14
    assert max(lengths(f)) <= 1024


@pytest.mark.parametrize(
    ("buckets", "wanted"),
    [([8, 32], [8, 32]), (lambda n: -(-n // 16) * 16, [16, 32]), (None, [3, 8, 9, 31])],
)
def test_buckets_are_what_the_user_says(buckets, wanted):
    f = px.compile(lambda x: x.sum(), dims={"x": px.Dim("t", buckets=buckets)})
    for t in (3, 8, 9, 31, 3):
        assert f(ones(t)) == t
    assert lengths(f) == wanted
    assert any("<=" in group for group in f.stats.groups) == (buckets is not None)


@pytest.mark.parametrize("top", [1024, 1100, None])
def test_buckets_of_multiples_are_multiples(top):
    dim = px.Dim("t", max=top, multiple_of=128)
    f = px.compile(lambda x: x.sum(), dims={"x": dim})
    for t in (128, 256, 640, 1024, 384):
        assert f(ones(t)) == t
    assert f.stats.compilations == 5
    assert f.stats.waste == 0 or top is None
    assert all(int(n) % 128 == 0 for n in re.findall(r"t<=(\d+)", f.explain()))


@pytest.mark.parametrize("length", [np.int64(8), 8])
def test_a_function_of_buckets_may_return_any_integer(length):
    dim = px.Dim("t", buckets=lambda size: length)
    f = px.compile(lambda x: x.sum(), dims={"x": dim})
    assert f(ones(3)) == 3 and f(ones(8)) == 8
    with pytest.raises(ValueError, match=r"the buckets of t gave .*8.* for 9"):
        f(ones(9))


def test_a_size_beyond_the_largest_bucket_is_named():
    f = px.compile(lambda x: x.sum(), dims={"x": px.Dim("t", buckets=[4])})
    with pytest.raises(
        ValueError, match=r"t is 5 in `x`, .* at most 4, its largest bucket"
    ):
        f(ones(5))


def test_without_a_largest_size_buckets_grow_by_a_quarter():
    f = px.compile(lambda x: x.sum(), dims={"x": "t"})
    for t in range(1, 200):
        f(np.ones(t, np.float32))
    grown = lengths(f)
    pairs = itertools.pairwise(grown)
    assert all(b <= max(a + 1, np.ceil(a * 1.25)) for a, b in pairs)
    assert f.stats.compilations == len(grown) < 24


def test_a_histogram_places_buckets():
    dim = px.Dim("t", max=100, histogram={10: 90, 50: 5, 100: 1})
    f = px.compile(lambda x: x.sum(), dims={"x": dim})
    for t in (3, 10, 11, 99):
        f(ones(t))
    assert lengths(f) == [10, 50, 100]


# Waste ------------------------------------------------------------------------------


@given(sizes=st.lists(st.sampled_from([(1, 3), (2, 9), (4, 16), (3, 5)]), min_size=1))
def test_waste_is_the_share_of_all_buckets_that_was_padding(sizes):
    dims = {"x": {0: px.Dim("b", buckets=[4]), 1: px.Dim("t", buckets=[4, 16])}}
    f = px.compile(lambda x: x.sum(), dims=dims)
    for b, t in sizes:
        f(np.ones((b, t), np.float32))
    held = [4 * (4 if t <= 4 else 16) for _, t in sizes]
    wanted = 1 - sum(b * t for b, t in sizes) / sum(held)
    assert f.stats.waste == pytest.approx(wanted)
    for group, stats in f.stats.groups.items():
        served = [(b, t) for b, t in sizes if (t <= 4) == (group == "b<=4, t<=4")]
        part = 1 - np.mean([b * t for b, t in served]) / (
            16 if group == "b<=4, t<=4" else 64
        )
        assert stats.calls == len(served) and stats.waste == pytest.approx(part)


def test_exact_sizes_waste_nothing_and_constants_do_not_count():
    f = px.compile(lambda x: x.sum(), dims={"x": px.Dim("t", buckets=[4])})
    f(ones(2))
    assert f.stats.waste == 0.5 and " 50.0% " in f.explain()
    for padding, dynamic in (("never", None), ("auto", False)):
        options = {"padding": padding, "dynamic": dynamic}
        g = px.compile(lambda x: x.sum(), dims={"x": "t"}, **options)
        for size in (2, 3):
            g(ones(size))
        assert g.stats.waste == 0.0


# Specialisations --------------------------------------------------------------------


def test_specialisations_share_the_trace_and_compile_on_their_first_match():
    dim = px.Dim("t", max=64, specialize_on=[lambda t: t == 1, lambda t: t % 32 == 0])
    f = px.compile(lambda x: x * 2 + x.shape[0], dims={"x": dim})
    for t in (1, 32, 33, 1, 64, 40):
        same(f(counting(t)), counting(t) * np.float32(2) + np.float32(t))
    assert f.stats.traces == 1
    assert {"t=1", "t=32", "t=64"} <= set(f.stats.groups)
    assert f.stats.groups["t=1"].calls == 2
    assert "specialize_on[0] of t holds; first call" in f.explain()


def test_specialisations_of_two_sizes_are_no_product():
    cases = [lambda n: n == 1, lambda n: n == 2]
    b, t = (px.Dim(name, buckets=[9], specialize_on=cases) for name in "bt")
    f = px.compile(lambda x: x.sum(0), dims={"x": {0: b, 1: t}})
    for shape in itertools.product((1, 2, 9), repeat=2):
        same(f(ones(*shape)), ones(*shape).sum(0))
    assert f.stats.traces == 1 and f.stats.compilations == 5
    assert {"b=1, t<=9", "b<=9, t=2", "b<=9, t<=9"} <= set(f.stats.groups)


def test_a_special_part_of_a_bucket_has_a_name_of_its_own():
    dim = px.Dim("t", buckets=[9], specialize_on=[lambda n: n % 3 == 0])
    f = px.compile(lambda x: x.sum(0), dims={"x": dim})
    for n in (3, 4, 6, 9):
        same(f(ones(n)), ones(n).sum(0))
    assert set(f.stats.groups) == {"t<=9 (specialize_on[0] of t)", "t<=9"}


def test_a_specialisation_inside_another_bucket_does_not_serve_its_neighbours():
    dim = px.Dim("t", buckets=[8], specialize_on=[lambda t: t == 4])
    f = px.compile(lambda x: x.sum(), dims={"x": dim})
    for t in (4, 3, 5, 4, 8):
        assert f(ones(t)) == t
    assert set(f.stats.groups) == {"t=4", "t<=8"}


def test_the_shorter_of_two_arrays_has_one_trace_on_either_side():
    def shared(x, y):
        n = min(x.shape[0], y.shape[0])
        return x[:n] * y[:n]

    f = px.compile(shared, dims={"x": "t", "y": "u"}, padding="require")
    for t, u in ((5, 7), (7, 7), (1, 7), (7, 1), (1, 1), (9, 8), (16, 3)):
        x, y = counting(t), counting(u)
        same(f(x, y), shared(x, y))
    assert f.stats.traces == 2


# Refusals and limits ----------------------------------------------------------------


def spectrum(x):
    return jnp.linalg.eigvalsh(x @ x.T)


def test_what_cannot_be_padded_runs_at_exact_sizes_and_says_why():
    f = px.compile(spectrum, dims={"x": "t, _"})
    for t in (3, 4, 3):
        same(f(np.sin(counting(t, 3))), spectrum(jnp.sin(counting(t, 3))))
    assert f.stats.traces == 1 and f.stats.compilations == 2
    assert "not padded: eigh: " in f.explain()
    assert "in spectrum: return jnp.linalg.eigvalsh(x @ x.T)" in f.explain()


def first_half(x):
    return jnp.array_split(x, 2)[0]


def test_what_jax_cannot_trace_for_all_sizes_is_traced_size_by_size():
    f = px.compile(first_half, dims={"x": "t"})
    for t in (3, 4, 3):
        same(f(counting(t)), first_half(counting(t)))
    assert f.stats.compilations == 2
    reason = "not padded: traced size by size: TypeError: the size t % 2 has no value"
    assert reason in f.explain()
    assert "in first_half: return jnp.array_split(x, 2)[0]" in f.explain()
    with pytest.raises(px.PaddingRefused, match="in first_half"):
        px.compile(first_half, dims={"x": "t"}, padding="require")(counting(3))


def test_what_runs_at_exact_sizes_beside_what_is_padded_says_why(mesh_4x2):
    total = px.compile(jnp.sum, dims={"a": "t"})
    for t in (5, 0, 7):
        same(total(counting(t)), counting(t).sum())
    assert "this call alone: an axis that dims names is empty" in total.explain()

    cut = px.compile(lambda x, n: x[:n].sum(), dims={"x": "t"})
    for n in (-2, -1):
        same(cut(counting(5), n), counting(5)[:n].sum())
    assert "exact sizes of s1: it may be negative" in cut.explain()

    squared = px.compile(lambda x, n: x.sum() + n * n, dims={"x": "t"})
    for n in (40_000, 46_000):
        same(squared(counting(5), n), counting(5).sum() + n * n)
    assert "exact sizes of s1: what is computed of it may not" in squared.explain()

    doubled = px.compile(lambda x: x * 2, dims={"x": "t"})
    doubled(jax.device_put(counting(8), NamedSharding(mesh_4x2, jax.P("x"))))
    assert "exact sizes of t: its axis is divided by devices" in doubled.explain()


def test_a_mistake_of_the_user_is_told_as_jit_tells_it():
    f = px.compile(lambda x, y: x + y, dims={"x": "a", "y": "b"})
    with pytest.raises(TypeError, match=r"incompatible shapes.*\(3,\), \(4,\)"):
        f(counting(3), counting(4))


@pytest.mark.parametrize("padding", ["auto", "require", "never"])
@pytest.mark.parametrize("mark", [None, px.dynamic])
def test_one_size_that_a_function_does_not_take_is_told_as_it_tells_it(padding, mark):
    def spread(x):
        if x.shape[0] == 1:
            raise LookupError("one row has no spread")
        return x - x.mean(axis=0)

    dims = None if mark else {"x": "t"}
    f = px.compile(spread, dims=dims, padding=padding)
    for n in (1, 4, 1, 7):
        x = mark(ones(n), 0) if mark else ones(n)
        if n > 1:
            same(f(x), jnp.zeros(n))
            continue
        with pytest.raises(LookupError, match="one row has no spread"):
            f(x)
    assert len(f.traces) == 1 and "size by size" not in f.explain()


def test_required_padding_makes_a_refusal_an_error():
    f = px.compile(spectrum, dims={"x": "t, _"}, padding="require")
    with pytest.raises(px.PaddingRefused, match="in spectrum"):
        f(np.sin(counting(3, 3)))


@pytest.mark.parametrize("f", [jnp.fft.fft, jnp.vander], ids=["padded", "traced"])
def test_a_refusal_names_the_call_where_the_whole_function_is_jaxs(f):
    here = "in test_a_refusal_names_the_call_where_the_whole_function_is_jaxs: "
    required = px.compile(f, dynamic=True, padding="require")
    with pytest.raises(px.PaddingRefused, match=rf"{here}required\(counting\(3\)\)"):
        required(counting(3))
    padded = px.pad(f, dims={next(iter(inspect.signature(f).parameters)): "t"})
    with pytest.raises(px.PaddingRefused, match=rf"{here}padded\("):
        padded(counting(4), sizes={"t": 3})
    free = px.compile(f, dynamic=True)
    same(free(counting(3)), f(counting(3)))
    assert f"{here}same(free(" in free.explain()


def test_too_many_traces_warn_once_and_go_on():
    f = px.compile(lambda x: x * len(x), recompile_limit=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in (3, 4, 5, 6, 7):
            same(f(counting(t)), counting(t) * t)
    (warning,) = [w for w in caught if "recompile_limit=2" in str(w.message)]
    assert "guard failed: s0 == 4" in str(warning.message)
    assert warning.filename == __file__


def test_too_many_traces_raise_where_that_is_asked():
    f = px.compile(lambda x: x * len(x), recompile_limit=2, on_limit="raise")
    f(counting(3))
    f(counting(4))
    with pytest.raises(px.RecompileLimitError, match="3 traces, more than recompile_l"):
        f(counting(5))


# With the rest of JAX ---------------------------------------------------------------


def test_inside_transformations_the_function_itself_is_traced():
    f = px.compile(lambda x: (x**2).sum(), dims={"x": "t"})
    f(counting(3))
    same(jax.grad(f)(counting(4)), 2 * counting(4))
    same(jax.vmap(f)(counting(2, 3)), (counting(2, 3) ** 2).sum(axis=1))
    same(jax.jit(f)(counting(5)), np.float32(30))


def test_a_train_step_in_buckets_is_the_unpadded_one():
    def loss(w, x, y):
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2)

    def step(w, x, y):
        value, gradient = jax.value_and_grad(loss)(w, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradient), value

    f = px.compile(step, dims={"x": "b, _", "y": "b, _"}, padding="require")
    w = {"a": np.sin(counting(3, 5)), "b": np.cos(counting(5, 2))}
    for b in (7, 3, 8, 5):
        x, y = np.sin(counting(b, 3)), np.cos(counting(b, 2))
        same(f(w, x, y), jax.jit(step)(w, x, y))
    assert f.stats.traces == 1


def test_donated_arrays_are_given_away_also_where_they_are_padded():
    f = px.compile(lambda x, y: x + y, dims={"x": "t", "y": "t"}, donate_argnums=0)
    x = ones(6)
    same(f(x, ones(6)), 2 * ones(6))
    assert x.is_deleted()


def test_arrays_of_either_kind_dtype_and_placement_pass_through_buckets():
    f = px.compile(lambda x: x[::-1], dims={"x": "t"})
    device = jax.devices()[1]
    for dtype in (np.float32, np.int8, jnp.bfloat16, bool):
        x = (np.arange(6) % 3).astype(dtype)
        for array in (x, jnp.asarray(x), jax.device_put(x, device)):
            found = f(array)
            same(found, jnp.asarray(x[::-1]))
            committed = isinstance(array, jax.Array) and array.committed
            assert found.devices() == ({device} if committed else {jax.devices()[0]})


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sizes_that_are_spread_over_devices_stay_exact(kind):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    f = px.compile(lambda x: jnp.tanh(x).sum(axis=1), dims={"x": "b, t"})
    with jax.set_mesh(mesh):
        for b, t in ((8, 3), (8, 6), (8, 7), (12, 7)):
            x = jax.device_put(counting(b, t), NamedSharding(mesh, jax.P("x")))
            same(f(x), jnp.tanh(counting(b, t)).sum(axis=1))
            assert f(x).sharding.spec == jax.P("x")
    assert f.stats.traces == 1
    assert set(f.stats.groups) == {"b=8, t<=3", "b=8, t<=7", "b=12, t<=7"}


def test_a_program_sees_where_explicit_axes_have_its_arrays():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))

    def f(x):
        is_spread = jax.typeof(x).sharding.spec[0] == "x"
        rows = jax.lax.scan(lambda h, r: (h + r, None), jnp.zeros_like(x[:, 0]), x.T)[0]
        return jax.sharding.reshard(rows * (2 if is_spread else 3), jax.P("x"))

    for padding in ("require", "auto", "never"):
        compiled = px.compile(f, dims={"x": "_, t"}, padding=padding)
        with jax.set_mesh(mesh):
            for t in (3, 6, 7):
                x = jax.device_put(counting(8, t), NamedSharding(mesh, jax.P("x")))
                found, wanted = compiled(x), jax.jit(f)(x)
                same(found, wanted)
                assert jax.typeof(found) == jax.typeof(wanted)


def softmax_loss(x):
    return jnp.mean(jax.nn.softmax(x @ jnp.ones((x.shape[1], 3))) ** 2)


DIVIDED: dict[str, Any] = {
    "type": lambda x: x * (2 if jax.typeof(x).sharding.spec[0] == "x" else 3),
    "grad": jax.grad(softmax_loss),
    "shard_map": lambda x: jax.shard_map(
        lambda y: y * 2, in_specs=jax.P("x"), out_specs=jax.P("x")
    )(x),
    "where": lambda x: jnp.where(jnp.arange(x.shape[0])[:, None] < 3, x, 0),
    "mean": lambda x: x / x.shape[0] - x.mean(1, keepdims=True),
    "scan": lambda x: jax.lax.scan(
        lambda h, r: (h + r, h), jnp.zeros_like(x[:, 0]), x.T
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVIDED)
def test_declared_sizes_may_be_divided_by_explicit_axes(name):
    f = DIVIDED[name]
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    compiled = px.compile(f, dims={"x": "b, t"})
    with jax.set_mesh(mesh):
        for b, t in ((8, 3), (4, 5), (12, 5)):
            x = jax.device_put(counting(b, t) / 8, NamedSharding(mesh, jax.P("x")))
            found, wanted = compiled(x), jax.jit(f)(x)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, wanted
            )
            assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, wanted)
    assert compiled.stats.traces == 1
    assert "not padded" not in str(compiled.explain())


def test_a_new_array_that_devices_divide_has_exact_sizes():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))

    def f(x):
        return jnp.zeros((4 * x.shape[0],), out_sharding=jax.P("x")) + 1

    compiled = px.compile(f, dims={"x": "t"})
    with jax.set_mesh(mesh):
        for t in (5, 1, 6):
            found, wanted = compiled(counting(t)), jax.jit(f)(counting(t))
            same(found, wanted)
            assert jax.typeof(found) == jax.typeof(wanted)
    assert "the size 4 * t is divided among devices" in compiled.explain()


def test_an_axis_of_an_explicit_mesh_may_have_one_device():
    mesh = jax.make_mesh((1, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    f = px.compile(lambda x: x * 2, dims={"x": "t, 2*s"}, padding="require")
    with jax.set_mesh(mesh):
        for t in (3, 4):
            x = jax.device_put(counting(t, 4), NamedSharding(mesh, jax.P("x", "y")))
            same(f(x), x * 2)
    assert f.stats.traces == 1


def test_a_program_sees_which_memory_has_its_arrays():
    host = jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="pinned_host"
    )

    def f(x):
        return x * (3 if jax.typeof(x).memory_space == jax.memory.Space.Host else 2)

    compiled = px.compile(f)
    for t in (3, 4, 5):
        same(compiled(jax.device_put(counting(t), host)), 3 * counting(t))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [jax.P(None, "x"), jax.P(None, None)])
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sum(0),
        lambda x: jnp.sort(x, 0),
        lambda x: jax.nn.softmax(x, 0),
        lambda x: jnp.pad(x, ((1, 1), (0, 0))),
        lambda x: jax.grad(lambda y: (y * y).mean())(x),
    ],
    ids=["sum", "sort", "softmax", "pad", "grad"],
)
def test_explicit_axes_need_no_mesh_in_context(f, spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    compiled = px.compile(f, dims={"x": "t, _"}, padding="require")
    for t in (5, 6, 7):
        x = jax.device_put(counting(t, 4), NamedSharding(mesh, spec))
        found, wanted = compiled(x), jax.jit(f)(x)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        assert jax.typeof(found) == jax.typeof(wanted)


def test_a_size_with_a_name_is_no_constant():
    f = px.compile(lambda x: x.sum(), dims={"x": "t"})
    with pytest.raises(ValueError, match=r"marked by px.static, but dims names it 't'"):
        f(px.static(ones(3), 0))


def test_sizes_served_whole_may_come_divided_among_devices(mesh_4x2):
    f = px.compile(lambda x: x * 2, dims={"x": "t, _"})
    for t in (64, 63, 64):  # a bucket that four devices cannot divide
        f(np.ones((t, 4), np.float32))
    x = counting(64, 4)
    spread = jax.device_put(x, NamedSharding(mesh_4x2, jax.P("x")))
    for _ in range(2):
        out = f(spread)
        assert out.sharding.is_equivalent_to(spread.sharding, 2)
        np.testing.assert_array_equal(out, 2 * x)
    np.testing.assert_array_equal(f(np.asarray(x)), 2 * x)
    assert (f.stats.calls, f.stats.compilations) == (6, 2)


def test_spread_arrays_are_padded_and_cut_where_they_are_whole(caplog):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    f = px.compile(lambda x: jnp.abs(x) + x.sum(), dims={"x": "_, t"})
    args = [
        jax.device_put(counting(8, t), NamedSharding(mesh, jax.P("x")))
        for t in (15, 14, 13)
    ]
    f(args[0])
    with jax.log_compiles(), caplog.at_level("WARNING"):
        found = [f(x) for x in args[1:]]
    assert not [text for text in caplog.messages if "Compiling" in text]
    for x, y in zip(args[1:], found, strict=True):
        assert y.sharding.spec == jax.P("x")
        same(y, np.abs(np.asarray(x)) + np.asarray(x).sum())


ON_A_MESH = {
    "weak results": lambda x: jnp.where(x > 0, 1.0, 2.0),
    "keys": lambda x: jax.random.split(jax.random.key(0), x.shape[0]),
    "weak arguments": lambda x: x * 2,
    "scanned": lambda x: lax.scan(lambda k, y: (k + y, k * y), 1.0, x),
}


@pytest.mark.slow
@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("function", ON_A_MESH.values(), ids=ON_A_MESH)
def test_in_the_context_of_a_mesh_arrays_go_into_buckets_and_out(
    function, kind, is_large, monkeypatch
):
    if is_large:  # as arrays on a GPU, which NumPy does not read
        monkeypatch.setattr(_buffers, "_readable", lambda _: -1)
    f = px.compile(function, dynamic=True)
    with jax.set_mesh(jax.make_mesh((8,), ("d",), axis_types=(kind,))):
        for n in (16, 24, 17):
            x = jnp.where(jnp.arange(n) > 3, 1.0, 2.0)  # weakly typed
            found, wanted = (jax.tree.leaves(g(x)) for g in (f, jax.jit(function)))
            for y, z in zip(found, wanted, strict=True):
                assert (y.aval, y.sharding, y.committed) == (
                    z.aval,
                    z.sharding,
                    z.committed,
                )
                if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
                    y, z = jax.random.key_data(y), jax.random.key_data(z)
                np.testing.assert_allclose(y, z, rtol=1e-6)
    assert f.stats.traces == 1


def test_keys_go_into_buckets():
    f = px.compile(jax.vmap(jax.random.bits), dims={"key": "b"}, padding="require")
    for b in (3, 6, 8):
        keys = jax.random.split(jax.random.key(0), b)
        same(f(keys), jax.vmap(jax.random.bits)(keys))


def test_what_no_rule_can_run_is_left_to_jax(monkeypatch):
    def broken(*_):
        raise RuntimeError("a mistake of ours")

    interpreter.load_rules()
    monkeypatch.setitem(rules.RULES, "jit", broken)
    f = px.compile(jax.jit(jnp.cumsum), dims={"a": "t"})
    for t in (3, 4):
        same(f(counting(t)), jnp.cumsum(counting(t)))
    assert "traced size by size: jit: its rule failed with RuntimeError" in f.explain()


def test_threads_share_traces():
    f = px.compile(lambda x: x * 2, dims={"x": "t"})
    failures = []

    def work(seed):
        for t in np.random.default_rng(seed).integers(1, 30, 20):
            if not np.array_equal(f(counting(t)), counting(t) * 2):
                failures.append(t)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and f.stats.traces == 1
    assert f.stats.calls == 80


@pytest.mark.parametrize("options", [{"dims": {"x": "t"}}, {"dynamic": True}, {}])
@pytest.mark.parametrize("first", [5, 8])
def test_a_call_that_fails_tells_nothing_about_other_sizes(options, first):
    def halves(x):
        if x.shape[0] % 2:
            raise ValueError("an odd length")
        return x.reshape(2, -1).sum(axis=0)

    served = px.compile(halves, **options)
    for n in (first, 5, 8, 16, 7, 6, 24, 12):
        if n % 2:
            with pytest.raises(ValueError, match="an odd length"):
                served(jnp.ones(n))
        else:
            np.testing.assert_array_equal(served(jnp.ones(n)), halves(jnp.ones(n)))
    assert "size by size" not in served.explain()
    assert len(served.traces) == 1


def test_results_have_the_weak_types_that_plain_ones_have():
    def f(x, k):
        positive = jnp.where(x > 0, 1.0, 0.0)
        return positive, -positive, x.shape[0], k, 1, x.astype("bfloat16")

    served = px.compile(f)
    for n in (3, 4, 5, 6):
        arguments = counting(n), n + 1
        found, wanted = (jax.tree.leaves(g(*arguments)) for g in (served, jax.jit(f)))
        assert [*map(jax.typeof, found)] == [*map(jax.typeof, wanted)]


@pytest.mark.parametrize(
    "options", [{}, {"dims": {"x": {0: px.Dim("t", buckets=[16])}}}]
)
def test_random_keys_may_be_results(options):
    served = px.compile(
        lambda x: jax.random.split(jax.random.key(0), x.size), **options
    )
    for n in (8, 5, 3, 6, 16):
        found, wanted = served(counting(n)), jax.random.split(jax.random.key(0), n)
        assert (jax.random.key_data(found) == jax.random.key_data(wanted)).all()


@pytest.mark.parametrize("dim", ["t", {0: px.Dim("t", multiple_of=1, max=8)}])
def test_an_empty_array_of_a_declared_size_is_a_case_of_its_own(dim):
    served = px.compile(lambda x, y: (x * 2, y.sum()), dims={"x": dim})
    for n in (5, 0, 4, 0, 6):
        doubled, total = served(counting(n), counting(n + 1))
        np.testing.assert_array_equal(doubled, 2 * counting(n))
        assert total == counting(n + 1).sum()


def test_python_integers_of_any_sign_and_size_are_served():
    x = counting(6)
    part, product = px.compile(lambda x, n: x[:n]), px.compile(lambda x, n: x * n)
    for n in (2, 3, -1, -2, 4, 0, 100, -100):
        np.testing.assert_array_equal(part(x, n), x[:n])
    for n in (2, 3, 4, 2**31 - 1, 2**30, 2**31 - 5, -(2**31), -5):
        np.testing.assert_array_equal(product(x, n), jax.jit(jnp.multiply)(x, n))


# Pytrees and models -------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: Any
    labels: Any


def test_shapes_may_stand_in_a_dataclass():
    f = px.compile(lambda b: b.tokens + b.labels, dims={"b": Batch("t", "t")})
    for t in (3, 5, 4):
        same(f(Batch(counting(t), counting(t))), 2 * counting(t))
    assert f.stats.traces == 1


def test_a_recurrent_net_of_linen_runs_over_any_length():
    net = linen.RNN(linen.GRUCell(4))
    weights = net.init(jax.random.key(0), ones(2, 3, 3))
    f = px.compile(net.apply, dims={"args[0]": "b, t, _"}, padding="require")
    for b, t in [(2, 5), (3, 7), (1, 1)]:
        same(
            f(weights, np.sin(counting(b, t, 3))),
            net.apply(weights, np.sin(counting(b, t, 3))),
        )
    assert f.stats.traces == 1


def test_a_function_keeps_its_name_and_its_place():
    f = px.compile(px.compile(attend), dims={"x": "a, b", "y": "a"})
    with pytest.raises(ValueError, match=r"px.compile\(attend\): dims gives y"):
        f(ones(3, 3), ones(3, 3))
    line = inspect.getsourcelines(branches_on_values)[1]
    with pytest.raises(jax.errors.TracerBoolConversionError, match=f"py:{line}"):
        px.compile(branches_on_values)(ones(3))


def test_a_function_keeps_the_types_of_what_it_takes():
    def scaled(x: jax.Array, by: int = 3) -> jax.Array:
        return x * by

    for f in (scaled, px.compile(scaled)):
        assert get_type_hints(px.compile(f)) == get_type_hints(scaled)


def branches_on_values(x):
    return x if x[0] > 0 else -x


def test_a_branch_on_half_of_a_size_ties_no_names():
    def f(x, y):
        half = x.reshape(-1, 2)[:, 0]
        return x.sum() * (1 if half.shape == y.shape else 2)

    compiled = px.compile(f, dims={"x": "t", "y": "s"})
    for t, s in ((8, 4), (8, 3), (6, 3), (10, 4)):
        x, y = np.ones(t, np.float32), np.ones(s, np.float32)
        assert compiled(x, y) == f(jnp.asarray(x), y)


def test_no_multiple_is_suggested_where_other_sizes_were_served():
    def f(x):
        n = x.shape[0]
        if n % 2 == 0:
            return x.sum()
        if n > 5:
            raise ValueError("too long")
        return x.prod()

    compiled = px.compile(f, dims={"x": "t"})
    for n in (8, 3):
        compiled(np.ones(n, np.float32))
    with pytest.raises(ValueError, match="too long") as caught:
        compiled(np.ones(7, np.float32))
    assert not any("served" in note for note in getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize("entry", ["a, b", "..."])
@pytest.mark.parametrize("axis", [0, -1])
def test_an_axis_has_one_entry(axis, entry):
    with pytest.raises(ValueError, match="Give each axis one entry"):
        px.compile(lambda x: x, dims={"x": {axis: entry}})


def test_a_scalar_has_no_last_axis():
    compiled = px.compile(lambda x: x, dims={"x": {-1: "t"}})
    with pytest.raises(ValueError, match="it has no axis to name"):
        compiled(np.float32(1))


def test_a_range_in_a_float_of_pythons_runs_in_buckets_without_a_warning():
    def f(x):
        return x + jnp.arange(0.0, x.shape[0], dtype=float)

    compiled = px.compile(f, dims={"x": "t"}, padding="require")
    for n in (5, 6, 7):
        x = np.ones(n, np.float32)
        np.testing.assert_array_equal(compiled(x), f(jnp.asarray(x)))
    assert compiled.stats.traces == 1


@pytest.mark.parametrize("padding", ["auto", "require"])
def test_a_hint_with_which_the_program_fails_takes_nothing_from_other_sizes(padding):
    dim = px.Dim("t", hint=5)
    halves = px.compile(
        lambda x: x.reshape(4, -1).sum(0), dims={"x": {0: dim}}, padding=padding
    )
    for n in (8, 16, 12, 40):
        x = np.arange(n, dtype=np.float32)
        np.testing.assert_array_equal(halves(x), x.reshape(4, -1).sum(0))
    assert len(halves.traces) == 1 and "not padded" not in halves.explain()


OVER_MAPPED_AXES = {
    "psum": lambda v: v * lax.psum(v, "b"),
    "pmax": lambda v: v - lax.pmax(lax.stop_gradient(v), "b"),
    "pmean": lambda v: v - lax.pmean(v, "b"),
    "axis_size": lambda v: v / lax.axis_size("b") + lax.axis_index("b").astype(v.dtype),
    "all_gather": lambda v: lax.all_gather(v, "b").T @ lax.all_gather(v * 2, "b"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OVER_MAPPED_AXES)
def test_collectives_over_a_mapped_axis_are_reductions_in_the_bucket(name):
    def f(x):
        return jax.vmap(OVER_MAPPED_AXES[name], axis_name="b")(x)

    def both(x):
        return f(x), jax.grad(lambda x: (f(x) ** 2).sum())(x)

    compiled = px.compile(both, dims={"x": "n, _"}, padding="require")
    for n in (5, 1, 2, 7):
        found, wanted = compiled(counting(n, 3) / 8), jax.jit(both)(counting(n, 3) / 8)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            found,
            wanted,
        )
    assert compiled.stats.traces == 1


def test_a_part_that_may_be_empty_is_rolled_under_a_guard():
    def f(x):
        return jnp.roll(x[: x.shape[0] // 4], 1)

    compiled = px.compile(f, dims={"x": "t"}, padding="require")
    for t in (5, 9, 13):
        same(compiled(counting(t)), f(counting(t)))
    assert compiled.stats.traces == 1
    same(compiled(counting(3)), f(counting(3)))


def test_children_of_a_partial_are_named_by_number():
    f = px.compile(lambda g, x: g(x), dims={"g[0][0]": "n", "x": "n"})
    for n in (3, 4):
        g = jax.tree_util.Partial(jnp.multiply, counting(n))
        same(f(g, counting(n)), counting(n) ** 2)
    assert f.stats.traces == 1


def test_bytes_in_another_order_are_told_what_to_do():
    with pytest.raises(TypeError, match=r"(?s)dtype >f4.*x.astype\(x.dtype.newbyte"):
        px.compile(lambda x: x * 2)(np.ones(3, ">f4"))
