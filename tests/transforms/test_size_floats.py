"""Floats computed from sizes are Python's, and NumPy's where NumPy computes them."""

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, strategies as st
from jax import lax

import pliax as px
from pliax.core.float_formulas import COMPARISONS, is_monotone, where_true


SIZES = (2, 3, 7, 49, 1000)


def agree(f, sizes=SIZES, rtol=0.0, dtype=np.float32):
    """Whether a function has one program, whose results are those of `jax.jit`."""
    compiled = px.compile(f, dims={"x": "t"})
    for n in sizes:
        x = np.ones(n, dtype)
        found, wanted = compiled(x), jax.jit(f)(x)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), n
        assert found.weak_type == wanted.weak_type, n
        np.testing.assert_allclose(found, wanted, rtol=rtol, err_msg=str(n))
    assert compiled.stats.traces == 1
    return compiled


# Formulas of Python's ----------------------------------------------------------------


OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
NUMBERS = st.sampled_from([0.1, 0.7, 3.5, -0.3, 49.0, 1e9, 1e-7, 2, 10, -3])
LEAVES = st.one_of(st.just("n"), NUMBERS)
FORMULAS = st.recursive(
    LEAVES,
    lambda parts: st.tuples(st.sampled_from(sorted(OPERATIONS)), parts, parts),
    max_leaves=5,
)


def value(formula, n):
    if isinstance(formula, tuple):
        operation, *parts = formula
        return OPERATIONS[operation](*(value(part, n) for part in parts))
    return n if isinstance(formula, str) else formula


def is_fine(formula, n):
    """Whether Python has a number for a formula, and float32 room for it."""
    try:
        return 1e-30 < abs(value(formula, n)) < 1e9 or value(formula, n) == 0
    except ZeroDivisionError:
        return False


@given(formula=FORMULAS)
@example(formula=("-", 0.7, ("*", "n", 0.1)))  # which XLA would compute in one step
def test_a_float_of_sizes_is_pythons_rounded_once(formula):
    assume(all(is_fine(formula, n) for n in SIZES))
    assume(not all(isinstance(value(formula, n), int) for n in SIZES))
    agree(lambda x: x[0] * value(formula, x.shape[0]))


POWERS = {
    "bias correction": lambda n: 1 - 0.999**n,
    "of an integer, below 1": lambda n: 2 ** (1 - n) + 10**-n,
    "inverse": lambda n: n**-2,
    "root": lambda n: (n + 1) ** 0.5 - n**0.5,
}


@pytest.mark.parametrize("power", POWERS.values(), ids=POWERS)
def test_powers_are_pythons(power):
    agree(lambda x: x * power(x.shape[0]), rtol=1e-6)


@pytest.mark.usefixtures("standard_promotion")
def test_zero_has_no_inverse_and_integers_of_numpy_no_negative_powers():
    for base, error in ((0, ZeroDivisionError), (np.int32(2), ValueError)):
        f = px.compile(
            lambda x, base=base: x * base ** (3 - x.shape[0]), dims={"x": "t"}
        )
        assert f(np.ones(2))[0] == base
        with pytest.raises(error):
            f(np.ones(4))


def test_bits_of_sizes_are_those_of_integers():
    def f(x):
        n = x.shape[0]
        return x * ((n << 2) + (n >> 1) + (n & 1) + (7 & n))

    agree(f)


def test_a_python_integer_among_the_arguments_is_raised_as_python_does():
    f = px.compile(lambda x, n: x * 2**-n)
    for n in (2, 3, 4, 5):
        assert f(np.float32(1), n) == 2**-n


# Where floats go ---------------------------------------------------------------------


USES = {
    "a result": lambda x: x.shape[0] / 3,
    "a comparison": lambda x: jnp.where(x.shape[0] / 49 * 49 == x.shape[0], 1.0, -1.0),
    "rounded": lambda x: x + round(x.shape[0] / 2),
    "a loop": lambda x: lax.scan(lambda c, y: (c + y, c), x.shape[0] / 2, x)[0],
    "a branch": lambda x: lax.cond(
        x.sum() > 3, lambda a: a * 2, lambda a: a, x.shape[0] / 3
    ),
    "an inner jit": lambda x: jax.jit(lambda a, b: a * b)(x, x.shape[0] * 0.3),
    "a fill": lambda x: jnp.full((3,), x.shape[0] / 3),
    "an array": lambda x: jnp.array([x.shape[0] / 3, 1.0]),
    "an end": lambda x: jnp.linspace(0, x.shape[0] / 2, 5),
    "a derivative": lambda x: jax.grad(lambda y: (y * y).sum() / y.shape[0])(x),
    "vmap": lambda x: jax.vmap(lambda y: y * (x.shape[0] / 7))(x),
    "checkpoint": lambda x: jax.grad(
        jax.checkpoint(lambda y: (y * y * (x.shape[0] / 3)).sum())
    )(x),
    "half precision": lambda x: x.astype(jnp.bfloat16) * (x.shape[0] / 3),
    "a complex number": lambda x: x * (1j * (x.shape[0] / 3)),
    "in front of an array": lambda x: (x.shape[0] / 3) * x + x.shape[0] / x.sum(),
    "less than an array": lambda x: ((x.shape[0] / 3) < x) * 1.0,
    "a weak fill": lambda x: jnp.full_like(x, x.shape[0] / 3) + (x.shape[0] / 3),
    "a chain": lambda x: x * (sum([x.shape[0] * 0.1] * 300)),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.usefixtures("standard_promotion")
def test_a_float_goes_where_a_float_of_pythons_goes(use):
    agree(use, rtol=1e-6)


VALUES = {
    "float": lambda x: x * float(x.shape[0] / 2),
    "int": lambda x: x[: int(x.shape[0] * 0.8)],
    "math": lambda x: x * math.sqrt(x.shape[0] / 2),
    "key": lambda x: x * {1.5: 2.0}.get(x.shape[0] / 2, 1.0),
    "floor": lambda x: x[: math.floor(x.shape[0] ** 0.5)],
    "trunc": lambda x: x[: math.trunc(x.shape[0] / 2)],
    "numpy": lambda x: x * (np.arange(x.shape[0], dtype=np.float32)),
}


@pytest.mark.parametrize("use", VALUES.values(), ids=VALUES)
def test_what_needs_the_float_itself_is_compiled_for_each_size(use):
    f = px.compile(use, dynamic=True)
    for n in SIZES:
        x = np.ones(n, np.float32)
        np.testing.assert_allclose(f(x), jax.jit(use)(x), rtol=1e-6)
    with pytest.raises(px.ConstraintViolationError, match=r"needs t == 7 \(used as"):
        px.compile(use, dims={"x": "t"})(np.ones(7, np.float32))


def test_what_jax_needs_of_a_float_is_served_for_each_size():
    f = px.compile(lambda x: jnp.arange(x.shape[0] * 0.5), dims={"x": "t"})
    for n in SIZES:
        np.testing.assert_array_equal(f(np.ones(n)), np.arange(n * 0.5))
    assert "size by size" in f.explain()


# Questions about floats ----------------------------------------------------------------


STEPS = st.lists(
    st.tuples(st.sampled_from("+-*/"), st.booleans(), NUMBERS), min_size=1, max_size=4
)
RELATIONS = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])


def chained(steps, n):
    """A formula in which n stands once, and in no divisor."""
    for operation, is_first, number in steps:
        pair = (number, n) if is_first and operation != "/" else (n, number)
        n = OPERATIONS[operation](*pair)
    return n


@given(steps=STEPS, relation=RELATIONS, near=st.integers(1, 1000))
def test_a_question_about_one_float_is_a_guard_on_its_size(steps, relation, near):
    bound = chained(steps, near)
    assume(isinstance(bound, float))
    ask = COMPARISONS[relation]

    def f(x):
        return x[0] * (2.0 if ask(chained(steps, x.shape[0]), bound) else 1.0)

    compiled = px.compile(f, dynamic=True)
    for n in (near, near + 1, max(near - 1, 1), 1001):
        assert compiled(np.ones(n, np.float32)) == f(np.ones(n, np.float32)), n
    assert compiled.stats.traces <= 3
    for trace in compiled.traces:
        px.validate_guards(trace)


@given(steps=STEPS, relation=RELATIONS, bound=NUMBERS, low=st.integers(-50, 50))
def test_where_a_monotone_formula_exceeds_a_number_is_where_python_says(
    steps, relation, bound, low
):
    formula = ((0,),)
    for operation, is_first, number in steps:
        is_first = is_first and operation != "/"
        pair = (number, *formula) if is_first else (*formula, number)
        formula = (*pair, operation)
    assume(relation != "!=")
    assert is_monotone(formula)
    ends = where_true(formula, relation, bound, low, low + 60)
    assert ends is not None
    found = [n for n in range(low, low + 61) if ends[0] <= n <= ends[1]]
    ask = COMPARISONS[relation]
    values = [(n, chained(steps, n)) for n in range(low, low + 61)]
    assert found == [n for n, x in values if ask(x, bound)]


@given(k=st.sampled_from([2, 3, 7, 8, 1000]))
def test_quotients_round_to_sizes(k):
    agree(lambda x: jnp.zeros(math.ceil(x.shape[0] / k)) + 1, sizes=(2, 7, 8, 49, 1000))
    agree(lambda x: jnp.zeros(1 + math.floor((x.shape[0] - 2) / k)))
    agree(lambda x: jnp.zeros(math.ceil(k / x.shape[0])))
    agree(lambda x: jnp.zeros(math.ceil(x.shape[0] / float(k))))
    agree(lambda x: jnp.zeros(-math.floor(x.shape[0] / -k)))


TRUTHS = {
    "plus an integer": lambda c, d, x: x * (c + 1),
    "times a float": lambda c, d, x: x * (c * 2.0),
    "from one": lambda c, d, x: x * (1 - c),
    "halved": lambda c, d, x: x * (c / 2),
    "counted": lambda c, d, x: x * sum([c, d, c]),
    "in order": lambda c, d, x: x * (c < d) + (c >= d),
    "negative": lambda c, d, x: x * -c,
    "a result": lambda c, d, x: d + 1,
    "with a size": lambda c, d, x: x * (x.shape[0] + d) * (c + x.shape[0]),
    "with a float of a size": lambda c, d, x: x * (c * (x.shape[0] / 3)),
    "power": lambda c, d, x: x ** (c + 1) + 2**d,
    "a factor": lambda c, d, x: c * x + x * d,
    "of an array of NumPy": lambda c, d, x: np.ones(3, np.float32) * c,
    "of a number of NumPy": lambda c, d, x: np.float32(2) * c + d * np.float16(3),
    "of booleans": lambda c, d, x: (c * jnp.ones(3, bool)) | d,
    "of a complex number": lambda c, d, x: x * (c * 1j),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", TRUTHS.values(), ids=TRUTHS)
@pytest.mark.usefixtures("standard_promotion")
def test_truths_about_sizes_are_counted_as_python_counts(use):
    agree(lambda x: use(x.shape[0] / 8 > 1, x.shape[0] > 3, x), rtol=1e-6)


@pytest.mark.parametrize(
    "ask",
    [
        lambda n: n / 8 < math.inf,
        lambda n: min(n / 8, math.inf) < 1e9,
        lambda n: n / 8 == math.nan,
        lambda n: n == np.float64(2.5),
        lambda n: n * 0.5 < 10**400,
        lambda n: np.float64(0.5) < n,
    ],
)
def test_questions_with_one_answer_leave_no_guard(ask):
    f = agree(lambda x: x if ask(x.shape[0]) else -x)
    assert not f.guards


@pytest.mark.parametrize(
    "ask",
    [
        lambda n: np.float64(7.5) <= n,
        lambda n: np.float64(0.3) <= n * 0.1,
        lambda n: np.less(n / 4, np.float64(2)),
        lambda n: n * 0.1 >= 0.3,
        lambda n: 3 - n * 0.5 > 0,
    ],
)
def test_a_question_is_one_guard_from_either_side(ask):
    f = px.compile(lambda x: x if ask(x.shape[0]) else -x, dims={"x": "t"})
    for n in SIZES:
        x = np.ones(n, np.float32)
        np.testing.assert_array_equal(f(x), x if ask(n) else -x)
    assert f.stats.traces == len(f.guards) == 2


def test_the_larger_of_floats_asks_them():
    f = px.compile(lambda x: x * max(x.shape[0] / 3, 1.0), dims={"x": "t"})
    for n in SIZES:
        x = np.ones(n, np.float32)
        np.testing.assert_array_equal(f(x), np.float32(max(n / 3, 1.0)) * x)
    assert [str(g.condition) for t in f.traces for g in t.guards] == ["t <= 2", "t > 2"]


@pytest.mark.parametrize(
    ("divide", "error"),
    [
        (lambda n: n / (n - 7), ZeroDivisionError),
        (lambda n: 1.5 % (n - 7), ZeroDivisionError),
        (lambda n: (n - 7) ** -1, ZeroDivisionError),
        (lambda n: (n / 3) // 0, ZeroDivisionError),
        (lambda n: np.power(2, 3 - n), ValueError),
    ],
)
def test_what_python_refuses_is_refused(divide, error):
    f = px.compile(lambda x: x * divide(x.shape[0]), dims={"x": "t"})
    with pytest.raises(error):
        f(np.ones(7))
    with pytest.raises(error):
        jax.jit(lambda x: x * divide(x.shape[0]))(np.ones(7))


def test_a_float_is_no_size():
    with pytest.raises(TypeError, match="Shapes must be 1D sequences"):
        px.compile(lambda x: jnp.zeros(x.shape[0] / 2), dims={"x": "t"})(np.ones(4))


# NumPy -------------------------------------------------------------------------------


NUMPYS = {
    "sqrt": lambda n: 1 / np.sqrt(n),
    "of a float": lambda n: np.cos(1e4 * n / 3),
    "of two": lambda n: np.hypot(n, n / 3),
    "log": lambda n: np.log(n) + np.exp(-n / 3),
    "divide": lambda n: np.divide(n, 3),
    "power": lambda n: np.power(2.0, -n),
    "truth": lambda n: np.isfinite(n / 3),
    "float64": lambda n: np.float64(2) / n,
    "float32": lambda n: np.float32(2) * n,
    "float16": lambda n: np.float16(2) * n,
    "float64, behind": lambda n: n * np.float64(0.5),
    "float64, exact": lambda n: np.float64(1) - 0.999999999**n,
    "float32, behind a float": lambda n: (n / 3) * np.float32(1.3),
    "float16, behind a float": lambda n: (n / 3) + np.float16(1.3),
    "integer, behind a float": lambda n: (n / 3) * np.int32(3),
    "integers, behind a float": lambda n: (n / 3) * np.ones(3, np.int8),
    "inverse root": lambda n: 1 / np.sqrt(n) * 0.7,
    "compared": lambda n: (n / 3) < np.int32(3),
    "array": lambda n: np.ones(3, np.float32) * n,
    "array of integers": lambda n: (n + np.arange(3)).sum(),
}


@pytest.mark.slow
@pytest.mark.parametrize("compute", NUMPYS.values(), ids=NUMPYS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.usefixtures("standard_promotion")
def test_numbers_of_numpy_keep_their_types(compute, dtype):
    agree(lambda x: x[:1] * compute(x.shape[0]), rtol=2e-6, dtype=dtype)


@pytest.mark.usefixtures("standard_promotion")
def test_integers_of_numpy_are_sizes():
    agree(lambda x: x[: np.maximum(x.shape[0] - 2, 1)])
    agree(lambda x: x[: np.mod(np.int64(3) * x.shape[0], 5) + 1], sizes=(5, 9, 7))
    agree(lambda x: x + (np.int64(7) == x.shape[0]), sizes=(5, 6, 8))
