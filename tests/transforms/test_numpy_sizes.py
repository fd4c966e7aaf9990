"""Laws of integers that NumPy computes of sizes: values and types are those of jax.jit.

Sizes are Python's integers, whose types give way to those of arrays; NumPy's stay.
"""

import copy
import math
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

import pliax as px


pytestmark = pytest.mark.usefixtures("standard_promotion")

INTEGERS = [1, 3, np.int64(2), np.int32(5), np.int8(1), np.uint8(2)]
OPERATORS = [operator.add, operator.sub, operator.mul, np.add, np.multiply]
OPERATORS += [np.minimum, np.maximum, np.subtract]
DIVISIONS = [operator.floordiv, operator.mod, np.floor_divide, np.remainder]
OF_ONE = [operator.neg, abs, np.negative, np.square, round, np.abs, operator.pos]
OF_ONE += [lambda e: np.prod((e, 2)), lambda e: np.sum((e, 3, e))]
DTYPES = [np.int8, np.uint8, np.int32, np.float32, jnp.bfloat16, bool]

# Expressions of sizes n and m, as functions of both.
SIZES = st.sampled_from([lambda n, m: n, lambda n, m: m])
LEAVES = st.sampled_from(INTEGERS).map(lambda k: lambda n, m: k) | SIZES


def _of_two(parts):
    f, a, b = parts
    return lambda n, m: f(a(n, m), b(n, m))


def _of_one(parts):
    f, a = parts
    return lambda n, m: f(a(n, m))


def _larger(inner):
    divisors = st.sampled_from([2, np.int64(3)]).map(lambda k: lambda n, m: k)
    return st.one_of(
        st.tuples(st.sampled_from(OPERATORS), inner, inner).map(_of_two),
        st.tuples(st.sampled_from(DIVISIONS), inner, divisors).map(_of_two),
        st.tuples(st.sampled_from(OF_ONE), inner).map(_of_one),
    )


EXPRESSIONS = st.recursive(LEAVES, _larger, max_leaves=6)
USES = {
    "times": lambda x, e: x * e,
    "plus, reversed": lambda x, e: e + x,
    "quotient": lambda x, e: x + e / 2,
    "power": lambda x, e: x ** (abs(e) % 5),
    "where": lambda x, e: jnp.where(x > 0, x, e),
    "array": lambda x, e: jnp.asarray(e),
    "among others": lambda x, e: jnp.array([e, 1]),
    "filled": lambda x, e: jnp.full((3,), e),
    "length": lambda x, e: jnp.zeros(abs(e) % 7 + 1).shape[0] * x,
    "returned": lambda x, e: e,
    "inner jit": lambda x, e: jax.jit(jnp.add)(x, e),
}


def described(x):
    return jnp.shape(x), jnp.asarray(x).dtype, jax.typeof(x).weak_type


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered")  # of NumPy's short scalars
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@given(
    expression=EXPRESSIONS,
    dtype=st.sampled_from(DTYPES),
    padding=st.sampled_from(["auto", "never"]),
)
def test_what_numpy_computes_of_sizes_has_the_type_that_jit_gives_it(
    use, expression, dtype, padding
):
    def f(x, y):
        return use(x, expression(x.shape[0], y.shape[0]))

    def outcome(f, n, m):
        try:
            return f(jnp.ones(n, dtype), jnp.ones(m))
        except (TypeError, OverflowError) as error:  # bfloat16 ** int8, uint8(-3)
            return type(error)

    compiled = px.compile(f, dynamic=True, padding=padding)
    for n, m in ((3, 4), (6, 5), (4, 9)):
        found, wanted = outcome(compiled, n, m), outcome(jax.jit(f), n, m)
        if isinstance(wanted, type):
            assert found is wanted
            continue
        assert described(found) == described(wanted)
        np.testing.assert_array_equal(found, wanted)


def test_an_integer_of_pythons_among_unsigned_ones_makes_the_total_signed():
    def f(x):
        n = np.uint8(2) + x.shape[0]
        return [
            g(held) for g in (np.prod, np.sum) for held in ((n, 2), (n, n, 2), (n, n))
        ]

    found, wanted = px.compile(f, dynamic=True), jax.jit(f)
    for n in (3, 6):
        each = (map(described, g(jnp.ones(n))) for g in (found, wanted))
        assert [*next(each)] == [*next(each)]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_the_type_of_a_result_does_not_change_with_the_second_size(dtype):
    f = px.compile(lambda x: x * np.prod((x.shape[0], 2)))
    for n in (100, 101, 102):
        found = f(np.ones(n, dtype))
        assert found.dtype == np.int32 and set(np.asarray(found)) == {2 * n}
    assert f.stats.traces == 2


WRAPPED = {
    "itself": lambda x, e: e,
    "remainder": lambda x, e: x + e % 100,
    "quotient": lambda x, e: x + e // 3,
    "float": lambda x, e: x + e / 4,
    "asked": lambda x, e: x + (e > 7),
    "branch": lambda x, e: x + 1 if e % 3 == 0 else x,
    "shape": lambda x, e: jnp.zeros(e % 7),
    "cubed": lambda x, e: x + (e * e * e) // 5,
}
INTEGER_TYPES = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32]
INTEGER_TYPES += [np.int64, np.uint64]


@st.composite
def numbers(draw):
    """Two integers of one of NumPy's types, of all sizes."""
    dtype = draw(st.sampled_from(INTEGER_TYPES))
    limits = np.iinfo(dtype)
    of_dtype = st.integers(int(limits.min), int(limits.max)) | st.integers(0, 9)
    return dtype(draw(of_dtype)), dtype(draw(of_dtype))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("use", WRAPPED.values(), ids=WRAPPED)
@given(numbers=numbers(), is_x64=st.booleans())
def test_integers_of_numpys_wrap_as_they_do_of_integers(use, numbers, is_x64):
    factor, summand = numbers

    def f(x):
        return use(x, factor * x.shape[0] + summand)

    def outcome(f, x):
        try:
            return f(x)
        except OverflowError:  # 100 is not a number of all of them
            return OverflowError

    with jax.enable_x64(is_x64):
        compiled = px.compile(f, dims={"x": {0: px.Dim("t", max=128)}})
        for n in (2, 3, 7, 100):
            x = np.ones(n, np.int8)
            found, wanted = outcome(compiled, x), outcome(jax.jit(f), x)
            if wanted is OverflowError:
                assert found is wanted
                continue
            assert described(found) == described(wanted)
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("n", [1290, 1291, 46340, 46341, 70000])
def test_what_does_not_fit_an_int32_is_wrapped_where_numpy_wraps_it(n):
    def f(x):
        size = np.int32(1) * x.shape[0]
        return (size * size * size) // size, size * size > 0

    found, wanted = px.compile(f, dims={"x": "t"})(np.ones(n)), jax.jit(f)(np.ones(n))
    assert jax.tree.map(int, found) == jax.tree.map(int, wanted)


KEPT = {
    "and": lambda n, e, k: n & k,
    "and, reversed": lambda n, e, k: k & n,
    "or": lambda n, e, k: e | k,
    "exclusive or": lambda n, e, k: e ^ k,
    "with an integer": lambda n, e, k: (e & 7, e | 7, e ^ 7),
    "shifts": lambda n, e, k: (e << 2, e >> 9),
    "power": lambda n, e, k: 3**e,
    "ceiling": lambda n, e, k: math.ceil(e / 4),
    "floor": lambda n, e, k: math.floor(np.prod((n, 3)) / 4),
    "rounded": lambda n, e, k: (round(e / 4), round(n / 4)),
    "root": lambda n, e, k: np.sqrt(e),
    "angle": lambda n, e, k: np.arctan2(e, k),
    "float16": lambda n, e, k: e * np.float16(2.1),
    "float32": lambda n, e, k: np.float32(2.1) / e,
    "root of a float": lambda n, e, k: e ** np.float32(0.5),
    "more than a float": lambda n, e, k: 1 if e > np.float32(6.5) else 2,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("of_sizes", KEPT.values(), ids=KEPT)
@given(
    dtype=st.sampled_from(INTEGER_TYPES),
    other=st.sampled_from([np.int8(5), np.int16(6), np.uint8(9), np.int64(3)]),
    of_array=st.sampled_from([np.int8, np.float16]),
    is_x64=st.booleans(),
)
def test_bits_powers_and_floats_of_numpys_integers_have_the_types_that_jit_gives(
    of_sizes, dtype, other, of_array, is_x64
):
    assume(np.result_type(dtype, other).kind != "f")  # of which there are no bits

    def f(x):
        found = of_sizes(x.shape[0], dtype(1) * x.shape[0], other)
        return jax.tree.leaves(jax.tree.map(lambda e: x[:1] + e, found))

    with jax.enable_x64(is_x64):
        compiled = px.compile(f, dims={"x": "t"})
        for n in (3, 40):
            x = np.ones(n, of_array)
            for found, wanted in zip(compiled(x), jax.jit(f)(x), strict=True):
                assert described(found) == described(wanted)
                is_float = jnp.issubdtype(wanted.dtype, jnp.floating)
                most = 4 * jnp.finfo(wanted.dtype).eps if is_float else 0
                np.testing.assert_allclose(found, wanted, rtol=most)


RANGES = {
    "to": lambda e, n: jnp.arange(e),
    "from, to": lambda e, n: jnp.arange(2, e),
    "steps": lambda e, n: jnp.arange(0, n, np.int8(2)),
    "backwards": lambda e, n: jnp.arange(np.int16(1) * n, 0, -1),
    "floats": lambda e, n: jnp.arange(0, e, 0.5),
    "given": lambda e, n: jnp.arange(e, dtype=np.float32),
    "grid": lambda e, n: jnp.mgrid[0:e],
    "clipped": lambda e, n: jnp.int8(1) + np.clip(n, 2, 8),
    "clipped below": lambda e, n: jnp.int8(1) + np.clip(e, np.int32(2), None),
    "clipped by a size": lambda e, n: jnp.int8(1) + np.clip(e, None, n),
    "clipped by floats": lambda e, n: jnp.int8(1) + np.clip(e, 2.5, 8),
    "clipped below by a float": lambda e, n: jnp.int8(1) + np.clip(n, 2.5, None),
    "complex": lambda e, n: jnp.int8(1) * (e * 2j + e / 4j),
    "complex of NumPy's": lambda e, n: jnp.int8(1) * (np.complex64(2j) * e - 1j),
    "imaginary part": lambda e, n: jnp.int8(1) + e.imag,
    "sum": lambda e, n: jnp.int8(1) + np.sum([e, np.int8(3)]),
    "product of an array": lambda e, n: jnp.int8(1) + np.array([e, e]).prod(),
    "one of Python's": lambda e, n: jnp.int8(1) + np.sum([n, np.int8(3)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("function", RANGES.values(), ids=RANGES)
@given(dtype=st.sampled_from(INTEGER_TYPES[:-1]), is_x64=st.booleans())
def test_ranges_sums_and_clipped_sizes_have_the_types_that_jit_gives(
    function, dtype, is_x64
):
    def f(x):
        return function(dtype(1) * x.shape[0], x.shape[0])

    with jax.enable_x64(is_x64):
        compiled = px.compile(f, dims={"x": "t"})
        for n in (3, 11):
            x = np.ones(n, np.int8)
            found, wanted = compiled(x), jax.jit(f)(x)
            assert described(found) == described(wanted)
            np.testing.assert_array_equal(found, wanted)
    assert compiled.stats.traces == 1


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.uint8])
@pytest.mark.parametrize(
    "function",
    [
        lambda e: round(e, -1),
        lambda e: pickle.loads(pickle.dumps(e)),
        lambda e: copy.deepcopy([e])[0],
    ],
    ids=["rounded to tens", "pickled", "copied"],
)
def test_numpys_integers_of_a_size_keep_their_type_as_they_do_in_jit(function, dtype):
    def f(x):
        return x * function(dtype(2) * x.shape[0])

    compiled = px.compile(f)
    for n in (3, 4, 11):
        x = np.ones(n, np.int8)
        found, wanted = compiled(x), jax.jit(f)(x)
        assert described(found) == described(wanted)
        np.testing.assert_array_equal(found, wanted)


def test_bits_of_numpys_integers_are_one_trace_for_all_sizes():
    def f(x):
        n = np.int16(1) * x.shape[0]
        return x * (n & 6), x * (n | np.int32(5)), x * math.ceil(n / 4), x * np.sqrt(n)

    compiled = px.compile(f, dims={"x": "t"})
    for n in (3, 7, 40):
        compiled(np.ones(n, np.int8))
    assert compiled.stats.traces == 1


THAT_FIT = {
    "int32": lambda x: np.int32(1) * x.shape[0],
    "int32, less": lambda x: np.int32(1) * x.shape[0] - 1,
    "uint32": lambda x: np.uint32(2) * x.shape[0],
    "int64": lambda x: np.int64(2) * x.shape[0] + 3,
    "minimum": lambda x: np.minimum(x.shape[0], 4),
    "product": lambda x: np.prod(x.shape),
    "sum": lambda x: np.sum((*x.shape, 1)),
    "remainder": lambda x: np.prod(x.shape) % np.int32(3),
}


@pytest.mark.parametrize("function", THAT_FIT.values(), ids=THAT_FIT)
def test_what_fits_for_all_sizes_leaves_no_guard(function):
    f = px.compile(lambda x: x * function(x), dims={"x": "s, t"})
    for n in (4, 6, 900):
        f(np.ones((n, n + 1), np.int8))
    assert f.stats.traces == 1 and not f.guards


@pytest.mark.parametrize("dtype", [np.int8, np.int32])
def test_what_fits_for_most_sizes_is_one_trace_for_them(dtype):
    f = px.compile(lambda x: x * (dtype(3) * x.shape[0] * 2), dims={"x": "t"})
    for n in (4, 6, 9, 21):
        assert f(np.ones(n, np.int8)).dtype == dtype
    assert f.stats.traces == 1


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_sizes_born_from_data_fit_where_their_bounds_do(dtype):
    def f(x):
        n = px.ragged.nonzero(x)[0].shape[0]
        return x + (dtype(3) * n - 1), x + np.prod((n, x.shape[0], n))

    compiled = px.compile(f, dims={"x": "t"})
    for n in (4, 6):
        for found, wanted in zip(compiled(np.ones(n)), (3 * n, n**3 + 1), strict=True):
            np.testing.assert_array_equal(found, wanted)
    assert compiled.stats.traces == 1


def test_what_numpy_computes_of_sizes_born_from_data_has_its_type():
    def f(x):
        return x * (np.int64(2) * px.ragged.nonzero(x)[0].shape[0])

    found = px.compile(f)(np.array([100, 0, 100, 0], np.int8))
    assert found.dtype == np.int32 and list(found) == [400, 0, 400, 0]


def test_a_size_of_numpys_is_an_integer_of_pythons_in_shapes_and_as_an_item():
    def f(x):
        n = np.int64(2) * x.shape[0]
        assert type(jnp.zeros(n).shape[0]) is type(n.item()) is type(x.shape[0])
        return x * n.item(), x * jnp.zeros(n).shape[0], x * round(n)

    for found in px.compile(f, dims={"x": "t"})(np.ones(5, np.int8)):
        assert found.dtype == np.int8 and set(np.asarray(found)) == {10}


OF_SEVERAL = {
    "sum": np.sum,
    "product": np.prod,
    "mean": np.mean,
    "of sums": lambda sizes: np.sum((np.sum(sizes), 1, np.int64(2) * sizes[0])),
    "mean of sums": lambda sizes: np.mean((np.sum(sizes), np.prod(sizes), 4)),
    "dot": lambda sizes: np.dot(np.array(sizes), np.array(sizes)),
}


@pytest.mark.parametrize("function", OF_SEVERAL.values(), ids=OF_SEVERAL)
def test_what_numpy_computes_of_several_sizes_is_one_trace(function):
    def f(x):
        return x * function((x.shape[0], 3, x.shape[0]))

    compiled = px.compile(f, dims={"x": "t"})
    for n in (4, 6):
        found, wanted = compiled(jnp.ones(n)), jax.jit(f)(jnp.ones(n))
        assert described(found) == described(wanted)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert compiled.stats.traces == 1


def test_means_and_variances_of_sizes_are_floats():
    def f(x):
        sizes = x.shape[0], 3
        return x * np.mean(sizes), x * np.var(sizes)

    compiled = px.compile(f, dynamic=True)
    for n in (4, 6):
        x = jnp.ones(n)
        for found, wanted in zip(compiled(x), jax.jit(f)(x), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_sizes_that_numpy_computes_are_of_64_bits_where_jax_is():
    with jax.enable_x64(True):
        f = px.compile(lambda x: x * np.prod((x.shape[0], 2)), dynamic=True)
        for n in (3, 4):
            assert f(jnp.ones(n, np.int32)).dtype == np.int64


def test_explain_says_that_an_integer_wraps_and_how_one_trace_serves_all_sizes():
    def hashed(x):
        return x * ((np.uint32(2654435761) * x.shape[0]) % np.uint32(1000))

    def on_the_device(x):
        return x * ((jnp.uint32(2654435761) * x.shape[0]) % jnp.uint32(1000))

    f, g = (px.compile(h, dims={"x": "t"}) for h in (hashed, on_the_device))
    for n in (3, 4, 5):
        x = np.ones(n, np.float32)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(f(x), g(x))
            np.testing.assert_array_equal(f(x), jax.jit(hashed)(x))
    text = "2654435761 * t is out of bounds for uint32, in which NumPy wraps it; jnp.uint32"
    assert text in f.explain() and "at " in f.explain().partition(text)[2]
    assert g.stats.traces == 1
