"""Laws of closed functions: equal structure is the same program, and nothing else is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from pliax.core.jaxprs import ClosedFunction, Program, close


INDEX = jax.ShapeDtypeStruct((), jnp.int32)
NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


# Random programs: trees over x, i, captured tables and literals.
leaves = st.one_of(
    st.just(("x",)),
    st.tuples(st.just("literal"), st.sampled_from([0.0, -0.0, 1.0, 2.5, float("nan")])),
    st.tuples(st.just("table"), st.integers(0, 1)),
)
trees = st.recursive(
    leaves,
    lambda tree: st.one_of(
        st.tuples(st.sampled_from(["add", "mul", "sub", "max"]), tree, tree),
        st.tuples(st.sampled_from(["sin", "jit", "cond", "scan"]), tree),
    ),
    max_leaves=6,
)
BINARY = {"add": jnp.add, "mul": jnp.multiply, "sub": jnp.subtract, "max": jnp.maximum}


def evaluate(tree, x, i, tables):
    name, *rest = tree
    if name == "x":
        return x
    if name == "literal":
        return jnp.float32(rest[0])
    if name == "table":
        return tables[rest[0]][i]
    values = [evaluate(t, x, i, tables) for t in rest]
    if name in BINARY:
        return BINARY[name](*values)
    if name == "sin":
        return jnp.sin(values[0])
    if name == "jit":
        return jax.jit(lambda v: v + 1)(values[0])
    if name == "cond":
        return jax.lax.cond(i > 1, lambda v: v * 2, lambda v: v - 1, values[0])
    return jax.lax.scan(lambda c, _: (c * 0.5, None), values[0], length=3)[0]


def closed(tree, seed):
    tables = [
        jnp.asarray(np.random.default_rng(seed + k).normal(size=4), jnp.float32)
        for k in (0, 1)
    ]
    return close(lambda x, i: evaluate(tree, x, i, tables), NUMBER, INDEX)


@given(tree=trees, seed=st.integers(0, 3))
def test_a_closed_function_is_the_function(tree, seed):
    function = closed(tree, seed)
    tables = [
        jnp.asarray(np.random.default_rng(seed + k).normal(size=4), jnp.float32)
        for k in (0, 1)
    ]
    for i in (0, 3):
        expected = evaluate(tree, jnp.float32(1.5), jnp.int32(i), tables)
        np.testing.assert_allclose(
            function(jnp.float32(1.5), jnp.int32(i)), expected, rtol=1e-6
        )


@given(tree=trees)
def test_two_closures_of_one_factory_are_one_program(tree):
    one, other = closed(tree, 0), closed(tree, 7)
    assert one.program == other.program
    assert hash(one.program) == hash(other.program)
    assert jax.tree.structure(one) == jax.tree.structure(other)


@given(one=trees, other=trees)
def test_programs_that_print_differently_are_different(one, other):
    assume(repr(one) != repr(other))
    first, second = closed(one, 0).program, closed(other, 0).program
    if first == second:  # then JAX traced both to the same equations
        assert str(first.jaxpr) == str(second.jaxpr)


def program(function, *args):
    return close(function, *args).program


PAIRS = {
    "literal": (lambda x: x * 2.0, lambda x: x * 3.0),
    "sign of zero": (lambda x: x * 0.0, lambda x: x * -0.0),
    "operation": (jnp.sin, jnp.cos),
    "order of operands": (lambda x: x - jnp.sin(x), lambda x: jnp.sin(x) - x),
    "wiring": (
        lambda x: (jnp.sin(x) + jnp.cos(x)) * jnp.sin(x),
        lambda x: (jnp.sin(x) + jnp.cos(x)) * jnp.cos(x),
    ),
    "result": (lambda x: (jnp.sin(x), jnp.cos(x))[0], lambda x: (jnp.sin(x), jnp.cos(x))[1]),
    "inside a jit": (jax.jit(lambda x: x + 1), jax.jit(lambda x: x + 2)),
    "inside a branch": (
        lambda x: jax.lax.cond(x > 0, lambda v: v, lambda v: v + 1, x),
        lambda x: jax.lax.cond(x > 0, lambda v: v, lambda v: v + 2, x),
    ),
    "parameter": (lambda x: x**2, lambda x: x**3),
    "length of a scan": (
        lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, length=2)[0],
        lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, length=3)[0],
    ),
    "constant array": (
        lambda x: jax.lax.reduce_max(x * jnp.asarray(np.ones(2, np.float32)), (0,)),
        lambda x: jax.lax.reduce_max(x * jnp.asarray(np.ones(3, np.float32)), (0,)),
    ),
    "custom rule": (
        jax.custom_jvp(jnp.sin),
        jax.custom_jvp(jnp.sin),
    ),
}  # fmt: skip
for _function in PAIRS["custom rule"]:
    _function.defjvps(lambda t, y, x: t)
PAIRS["custom rule"][1].defjvps(lambda t, y, x: 2 * t)


@pytest.mark.parametrize("name", PAIRS)
def test_different_programs_differ(name):
    one, other = PAIRS[name]
    assert program(one, NUMBER) == program(one, NUMBER)
    assert program(one, NUMBER) != program(other, NUMBER)


def _straight_through(levels):
    """Rounds to the nearest level; its rule passes the gradient where x is inside."""

    @jax.custom_vjp
    def quantise(x):
        return jnp.round(x * levels) / levels

    quantise.defvjp(
        lambda x: (quantise(x), x), lambda x, g: (jnp.where(abs(x) < 1, g, 0),)
    )
    return quantise


CUSTOM = {
    "relu": lambda table: lambda x, i: jax.nn.relu(x - table[i]),
    "softplus": lambda table: lambda x, i: jax.nn.softplus(x) + table[i],
    "logaddexp": lambda table: lambda x, i: jnp.logaddexp(x, table[i]),
    "xlogy": lambda table: lambda x, i: jax.scipy.special.xlogy(x, table[i]),
    "custom_vjp": lambda table: lambda x, i: _straight_through(8)(x) + table[i],
    "jit that captures": lambda table: jax.jit(lambda x, i: x * table[i]),
    "jit in a jit": lambda table: jax.jit(lambda x, i: jax.jit(lambda v: v * table[i])(x)),
    "relu in a loop": lambda table: lambda x, i: jax.lax.fori_loop(
        0, 3, lambda n, c: jax.nn.relu(c) + table[n], x
    ),
}  # fmt: skip


def _captures(table):
    @jax.custom_jvp
    def scale(x):
        return x * table[1]

    scale.defjvp(lambda primals, tangents: (scale(*primals), 2 * tangents[0]))
    return scale


@pytest.mark.parametrize("name", CUSTOM)
def test_functions_with_rules_of_their_own_are_data_too(name):
    tables = jnp.arange(1.0, 5.0), jnp.arange(2.0, 6.0)
    one, other = (close(CUSTOM[name](t), NUMBER, INDEX) for t in tables)
    assert one.program == other.program
    assert hash(one.program) == hash(other.program)
    for function, table in zip((one, other), tables, strict=True):
        plain = CUSTOM[name](table)
        x, i = jnp.float32(1.5), jnp.int32(2)
        np.testing.assert_allclose(function(x, i), plain(x, i), rtol=1e-6)
        np.testing.assert_allclose(
            jax.grad(function)(x, i), jax.grad(plain)(x, i), rtol=1e-6
        )


def test_a_rule_that_captures_is_never_taken_for_another():
    tables = jnp.arange(1.0, 5.0), jnp.arange(2.0, 6.0)
    one, other = (close(_captures(table), NUMBER) for table in tables)
    assert one.program != other.program
    assert jax.tree.structure(one) != jax.tree.structure(other)
    for function, table in zip((one, other), tables, strict=True):
        assert float(function(jnp.float32(3))) == 3 * table[1]
        assert float(jax.grad(function)(jnp.float32(3))) == 2


def test_rules_that_differ_are_different_programs():
    assert program(_straight_through(8), NUMBER) != program(
        _straight_through(4), NUMBER
    )
    assert program(_straight_through(8), NUMBER) == program(
        _straight_through(8), NUMBER
    )


def test_weak_types_and_dtypes_are_part_of_a_program():
    identity = functools.partial(lambda x: x)
    assert program(identity, NUMBER) != program(identity, INDEX)
    weak = jax.make_jaxpr(lambda x: x)(1.0)
    strong = jax.make_jaxpr(lambda x: x)(np.float32(1.0))
    assert Program(weak.jaxpr) != Program(strong.jaxpr)


def test_jit_takes_it_as_an_argument_and_traces_once():
    traces = 0

    @jax.jit
    def call(function: ClosedFunction, x, i):
        nonlocal traces
        traces += 1
        return function(x, i)

    tree = ("add", ("x",), ("table", 0))
    values = [
        float(call(closed(tree, seed), jnp.float32(0), jnp.int32(2))) for seed in (0, 9)
    ]
    assert traces == 1
    assert values[0] != values[1]


def test_captured_tracers_get_gradients():
    def loss(table):
        function = close(lambda i: table[i] * table[i], INDEX)
        return function(jnp.int32(1))

    np.testing.assert_allclose(jax.grad(loss)(jnp.arange(3.0)), [0.0, 2.0, 0.0])


def test_more_than_one_result_is_refused():
    with pytest.raises(TypeError, match=r"pair must return one array; it returned \("):

        def pair(x):
            return x, x

        close(pair, NUMBER)
