"""What px.compile computes with sizes: equal ones, remainders, huge ones, none at all."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

import pliax as px


def counting(n, dtype: Any = np.float32):
    return np.arange(n).astype(dtype)


def agree(f, sizes, make=counting, **options):
    """Whether a compiled function is the plain one at all sizes; the compiled one."""
    compiled = px.compile(f, **options)
    for n in sizes:
        found, wanted = compiled(make(n)), jax.jit(f)(make(n))
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), n
        np.testing.assert_allclose(found, wanted, rtol=2e-6, err_msg=str(n))
    return compiled


# Truth values ------------------------------------------------------------------------


def same_truth(n):
    return (n > 4) == (n > 3)


TRUTHS = {
    "equal": same_truth,
    "different": lambda n: (n > 4) != (n > 3),
    "exclusive": lambda n: (n > 4) ^ (n % 2 == 0),
    "a constant": lambda n: (n > 4) == True,  # noqa: E712
    "an integer": lambda n: (n > 4) == 1,
    "in a tuple": lambda n: (n > 4) in (True,),
    "counted": lambda n: [n > 4, True, n > 3].count(True) == 2,
    "a key": lambda n: {True: False, False: True}[n > 4],
    "in a set": lambda n: len({n > 4, True}) == 1,
}


@pytest.mark.parametrize("holds", TRUTHS.values(), ids=TRUTHS)
def test_truth_values_compare_as_those_of_python(holds):
    f = agree(lambda x: 2 * x if holds(x.shape[0]) else x, (3, 4, 5), dims={"x": "t"})
    assert f.guards


def test_a_comparison_that_is_returned_has_the_type_that_jit_gives_it():
    f = px.compile(lambda x: x.shape[0] > 3, dims={"x": "t"})
    assert [(bool(f(ones)), f(ones).weak_type) for ones in map(np.ones, (3, 4))] == [
        (False, False),
        (True, False),
    ]


# Equal sizes ------------------------------------------------------------------------


def _strided(x):
    return lax.conv_general_dilated(x[None, None], jnp.ones((1, 1, 3)), (2,), "SAME")


HALVES = {
    "every second": lambda x: x[::2],
    "(n + 1) // 2": lambda x: x[: (x.shape[0] + 1) // 2],
    "-(-n // 2)": lambda x: x[: -(-x.shape[0] // 2)],
    "n - n // 2": lambda x: x[x.shape[0] // 2 :],
    "convolution": lambda x: _strided(x)[0, 0],
    "pool": lambda x: lax.reduce_window(x, 0.0, lax.add, (1,), (2,), "SAME"),
}
MEETINGS = {
    "add": operator.add,
    "where": lambda a, b: jnp.where(a > 2, a, b),
    "product": lambda a, b: jnp.dot(a, b),
    "sort": lambda a, b: lax.sort((a, b), num_keys=1)[1],
    "loss": lambda a, b: jax.grad(lambda a: ((a - b) ** 2).sum())(a),
}
PAIRS = st.tuples(*[st.sampled_from(sorted(HALVES))] * 2)


@given(names=PAIRS, meet=st.sampled_from(sorted(MEETINGS)))
def test_equal_sizes_meet_however_they_are_written(names, meet):
    first, second = (HALVES[name] for name in names)

    def f(x):
        return MEETINGS[meet](first(x), second(x + 1))

    agree(f, (5, 4, 8, 1, 9), dims={"x": "t"})


@pytest.mark.parametrize("meet", ["where", "sort"])
def test_equal_sizes_meet_in_one_trace(meet):
    def f(x):
        return MEETINGS[meet](HALVES["convolution"](x), HALVES["every second"](x))

    compiled = agree(f, (5,), dims={"x": "t"}, padding="require")
    before = compiled.stats.traces
    for n in (6, 7, 9):
        np.testing.assert_allclose(compiled(counting(n)), f(counting(n)))
    assert compiled.stats.traces == before


@given(data=st.data())
def test_results_are_as_long_as_their_size_says(data):
    """Sizes of several remainders and quotients, each of which an interval misjudges."""
    text = "n"
    for _ in range(data.draw(st.integers(1, 3))):
        step = data.draw(
            st.sampled_from(["+ 3", "* 2", "// 2", "% 4", "% 3", "- n % 2"])
        )
        text = f"({text} {step})"
    text = data.draw(
        st.sampled_from([text, f"(-{text}) % 5", f"n - n % (max({text}, 0) + 1)"])
    )

    def f(x):
        n = x.shape[0]
        return jnp.pad(x, (0, n))[: eval(text, {"n": n}) % (2 * n + 1)]

    agree(f, (5, 8, 3, 13), dims={"x": "t"})


def test_padding_to_a_multiple_has_its_length():
    def f(x):
        return jnp.pad(x, (0, -x.shape[0] % 4)).reshape(-1, 4)

    agree(f, (1, 2, 8, 7), dims={"x": "t"}, padding="require")
    padded = px.pad(f, dims={"x": "t"})
    assert padded.out_shapes(np.ones(8), sizes={"t": 8}) == (2, 4)


@pytest.mark.parametrize("number", [3.0, np.float64(3)])
def test_a_size_may_equal_a_float(number):
    agree(lambda x: 2 * x if x.shape[0] == number else x, (2, 3, 4))
    agree(lambda x: 2 * x if x.shape[0] != 2.5 else x, (2, 3), dims={"x": "t"})


ASKS_ABOUT_1 = {
    "fill_diagonal": lambda x: jnp.fill_diagonal(jnp.outer(x, x), 1.0, inplace=False),
    "searchsorted": lambda x: jnp.searchsorted(x[1:], x),
    "gather": lambda x: x[:-1][jnp.argsort(x[1:])],
    "diff": lambda x: jnp.diff(x, n=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("f", ASKS_ABOUT_1.values(), ids=ASKS_ABOUT_1)
def test_what_jax_asks_of_a_size_of_1_makes_no_constant_of_it(f):
    agree(f, (1, 2, 5), dims={"x": "t"})
    agree(f, (4, 1, 7), dims={"x": "t"})


def test_one_call_with_an_empty_part_leaves_the_others_in_buckets():
    f = agree(ASKS_ABOUT_1["searchsorted"], (1, 5, 6, 1, 7, 9), dims={"x": "t"})
    assert f.stats.compilations == 4  # t = 1, and buckets up to 5, 7 and 9
    assert "traced for this call alone" in f.explain()


def test_a_mistake_of_the_user_is_told_at_one_element_too():
    def f(x):
        raise RuntimeError(f"{x + x[:1]} is wrong")

    for n in (3, 1):
        with pytest.raises(RuntimeError, match="is wrong"):
            px.compile(f, dims={"x": "t"})(counting(n))


def test_sizes_that_are_equal_by_chance_hide_no_reason():
    def f(x, y):
        most = min(x.shape[0], y.shape[0])
        return jnp.array_split(x[:most] + y[:most], 2)[0]  # for integers only

    compiled = px.compile(f, dims={"x": "s", "y": "t"})
    for s, t in [(6, 6), (4, 9), (3, 3)]:
        x, y = counting(s), counting(t)
        np.testing.assert_array_equal(compiled(x, y), f(x, y))
    assert "has no value while it is traced" in compiled.explain()


RESHAPES = {
    "to constants": lambda x: x.reshape(2, 3),
    "to pairs": lambda x: x.reshape(x.shape[0] // 2, 2).sum(1),
    "to triples": lambda x: lax.reshape(x, (x.shape[0] // 3, 3)),
    "of a product": lambda x: (x[:, None] * x[None]).reshape(3, -1, x.shape[0]),
    "in a loop": lambda x: lax.map(lambda r: (r * x).reshape(2, -1), jnp.arange(3.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"dims": {"x": "t"}}])
@pytest.mark.parametrize("f", RESHAPES.values(), ids=RESHAPES)
def test_a_reshape_keeps_the_number_of_elements_or_is_an_error(f, options):
    """JAX asks that of integers only, and XLA would drop or repeat what is left."""
    compiled = px.compile(f, **options)
    for n in (6, 7, 12, 8, 4, 9, 6):
        try:
            wanted = jax.jit(f)(counting(n))
        except (TypeError, ValueError):  # the second where only the compiler sees it
            with pytest.raises(
                (TypeError, ValueError), match=r"reshape|output elements"
            ):
                compiled(counting(n))
            continue
        if "dims" in options and f is RESHAPES["to constants"]:
            with pytest.raises(px.ConstraintViolationError, match='declare "t = 6"'):
                compiled(counting(n))
        else:
            np.testing.assert_allclose(compiled(counting(n)), wanted, rtol=1e-6)


def test_described_arrays_compare_as_their_shapes_do():
    def f(x, y):
        alike = jax.eval_shape(lambda: x) == jax.eval_shape(lambda: y)
        return 10 * x if alike else x

    for dims in ({"x": "a", "y": "b"}, None):
        compiled = px.compile(f, dims=dims)
        for a, b in ((4, 2), (3, 3), (5, 4), (6, 6)):
            found = compiled(counting(a), counting(b))
            np.testing.assert_array_equal(found, f(counting(a), counting(b)))


# Huge sizes -------------------------------------------------------------------------


def _kurtosis(x):
    n, d = x.shape[0], x - x.mean()
    ratio = n * (n + 1) * (n - 1) / ((n - 2) * (n - 3))
    return ratio * (d**4).sum() / (d**2).sum() ** 2 - 3 * (n - 1) ** 2 / (
        (n - 2) * (n - 3)
    )


BEYOND = {
    "kurtosis": (_kurtosis, (1200, 1400, 2000)),
    "pairs": (lambda x: x.sum() / (x.shape[0] * (x.shape[0] - 1) / 2), (40000, 70000)),
    "root": (lambda x: x @ x / (x.shape[0] ** 3) ** 0.5, (500, 1500, 2000)),
    "float": (lambda x: x.sum() * (0.5 * x.shape[0] ** 3), (500, 1500, 2000)),
    "slice": (lambda x: x[x.shape[0] ** 3 // 4002000 :].sum(), (500, 1500, 2000)),
    "compared": (lambda x: jnp.where(x.shape[0] ** 3 > 10, x, -x), (500, 1500, 2000)),
}


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["auto", "never"])
@pytest.mark.parametrize(("f", "sizes"), BEYOND.values(), ids=BEYOND)
def test_sizes_beyond_int32_are_what_python_makes_of_them(f, sizes, padding):
    agree(f, sizes, padding=padding)
    agree(f, sizes, padding=padding, dims={"x": "t"})


@pytest.mark.parametrize(
    "f", [lambda x: x / x.shape[0] ** 3, lambda x: x * 2 ** x.shape[0]]
)
def test_integers_that_jit_refuses_as_too_large_are_refused(f):
    compiled = agree(f, (10, 20), dims={"x": "t"})
    for call in (compiled, jax.jit(f)):
        with pytest.raises(OverflowError):
            call(counting(2000))
    np.testing.assert_allclose(compiled(counting(12)), f(counting(12)), rtol=1e-6)


def test_a_power_of_an_integer_gives_way_to_the_types_of_arrays():
    agree(lambda x: x * 2 ** x.shape[0], (3, 4, 5), lambda n: counting(n, np.uint8))


STARTS = {
    "sum": lambda x: lax.reduce(x, 5.0, lax.add, (0,)),
    "product": lambda x: lax.reduce(x / 4, 2.0, lax.mul, (0,)),
    "logaddexp": lambda x: lax.reduce(x, 0.0, jnp.logaddexp, (0,)),
    "two": lambda x: jnp.stack(
        lax.reduce(
            (x, 2 * x),
            (1.0, -3.0),
            lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])),
            (0,),
        )
    ),
}


@pytest.mark.parametrize("f", STARTS.values(), ids=STARTS)
def test_a_reduction_counts_its_initial_value_once(f):
    """Of one element XLA gives the element, whatever the initial value."""
    agree(f, (5, 6, 8, 3), dims={"x": "t"}, padding="require")


# None -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["b + 1", "2*b + 1", "b + 3", "5 - b"])
def test_a_name_that_is_solved_to_less_than_1_is_a_case_of_its_own(text):
    for sizes in ((1, 3, 1), (4, 1, 2), (5, 7, 5)):
        sizes = [n for n in sizes if not (text.startswith("2") and n % 2 == 0)]
        agree(lambda x: 2 * x.sum(), sizes, dims={"x": text})


# Sizes elsewhere ----------------------------------------------------------------------


def test_a_size_may_fill_what_is_read_outside():
    def f(x):
        places = jnp.array([0, 3, 100])
        return jnp.take(x, places, mode="fill", fill_value=x.shape[0])

    agree(f, (4, 6, 5), dims={"x": "t"}, padding="require")


def test_a_size_may_be_a_power():
    agree(lambda x: lax.integer_pow(x, x.shape[0]), (3, 4, 2), dims={"x": "t"})


def test_traced_sizes_are_refused_where_nobody_can_check_a_guard():
    padded = px.pad(lambda x: x[: min(x.shape[0], 3)].sum(), dims={"x": "t"})
    x = np.array([1, 2, np.nan, np.nan, np.nan], np.float32)
    assert padded(x, sizes={"t": 2}) == 3
    with pytest.raises(px.PaddingRefused, match="nobody can check while t is traced"):
        jax.jit(lambda x, t: padded(x, sizes={"t": t}))(x, 2)


def test_a_check_that_a_bucket_cannot_meet_fails_with_its_message():
    def f(x):
        chosen = px.ragged.boolean_mask(x, x >= 0)
        px.check(chosen.shape[0] >= 2, "few")
        return chosen.sum()

    for order in ((3, 1), (1, 3)):
        compiled = px.compile(f, dims={"x": "t"})
        for n in order:
            if n == 3:
                assert compiled(counting(n)) == 3
            else:
                with pytest.raises(ValueError, match=r"px\.check: few"):
                    compiled(counting(n))


def test_reshape_relies_on_what_is_checked():
    def f(x):
        chosen = px.ragged.boolean_mask(x, x > 0)
        px.check(chosen.shape[0] % 2 == 0, "odd")
        return chosen.reshape(-1, 2).sum(0)

    np.testing.assert_array_equal(px.compile(f, dims={"x": "t"})(counting(5)), [4, 6])


@pytest.mark.parametrize("seeks", [jax.debug_nans, jax.debug_infs])
def test_nan_in_the_padding_is_nobodys(seeks):
    f = px.compile(lambda x: x / x, dims={"x": px.Dim("t", buckets=[8])})
    with seeks(True):
        np.testing.assert_array_equal(f(np.ones(5)), np.ones(5))


def test_what_debug_nans_finds_is_what_it_says():
    compiled = px.compile(lambda x: jnp.log(x - 2), dims={"x": "t"})
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        compiled(np.ones(3, np.float32))


# Python integers among the arguments --------------------------------------------------

SMALL = st.integers(-(2**20), 2**20)
BITS = {
    "exclusive or": lambda n: n ^ 5,
    "reflected": lambda n: -6 ^ n,
    "or": lambda n: n | 12,
    "and": lambda n: n & 10,
    "a mask": lambda n: n & 7,
    "of what is computed": lambda n: ((n + 3) ^ 9) + (n | 1),
    "and what is computed of it": lambda n: (n | 1) * 100000 // 1000,
    "with a negative one": lambda n: (n & -7) + (n | -100),
    "inverted": lambda n: ~n,
    "inverted with a large one": lambda n: ~n & (2**31 - 1),
    "a quotient": lambda n: (n * 100) // 7,
}


def of_integers(f):
    """The function compiled, which has seen its integers change."""
    compiled = px.compile(lambda *numbers: jnp.ones((), jnp.int32) * f(*numbers))
    count = f.__code__.co_argcount
    for n in (-3, 5):
        compiled(*[n] * count)
    return compiled


@pytest.mark.parametrize("f", BITS.values(), ids=BITS)
def test_bits_of_an_integer_are_a_run_time_value(f):
    compiled = of_integers(f)
    before = compiled.stats.compilations

    @given(n=SMALL)
    def law(n):
        assert int(compiled(n)) == f(n)

    law()
    assert compiled.stats.compilations <= before + 4  # by orders of magnitude


@pytest.mark.parametrize(
    "f", [lambda n, m: (n * 100) // m, lambda n, m: (n * 100) % m], ids=["//", "%"]
)
def test_quotients_of_products_of_integers_are_run_time_values(f):
    compiled = of_integers(f)

    @settings(derandomize=True)  # what is drawn decides how many executables
    @given(n=SMALL, m=SMALL.filter(bool))
    def law(n, m):
        assert int(compiled(n, m)) == f(n, m)

    law()
    assert compiled.stats.traces <= 3 and compiled.stats.compilations <= 8
    counts = []
    for n, m in ((5, 3), (7, 2), (900, 31), (12, 1000)):
        assert int(compiled(n, m)) == f(n, m)
        counts.append(compiled.stats.compilations)
    assert len(set(counts)) == 1
    with pytest.raises(ZeroDivisionError):
        compiled(3, 0)


def test_bits_with_an_integer_that_is_no_int32_are_those_of_python():
    compiled = px.compile(lambda x, n: x + ((n ^ 2**40) >> 30))
    for n in (3, 5, -7):
        assert compiled(np.float32(0), n) == (n ^ 2**40) >> 30


@given(seed=st.integers(0, 10**6))
def test_bits_of_a_size_are_those_of_python(seed):
    n = int(np.random.default_rng(seed).integers(1, 300))
    assert BITS_OF_SIZE(np.zeros(n, np.float32)) == (n ^ 5) + (n | 64) + (3 & n)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dims": {"x": "t"}}])
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x[0] * 0 + (x.shape[0] | 1) * 100000 // 1000,
        lambda x: x[0] * 0 + (x.shape[0] & 10) * 10**9 // 10**9,
        lambda x: x[0] * 0 + ((x.shape[0] | 8) << 40 >> 40),
        lambda x: x[:2] * ((x.shape[0] | 2**24) / 3),
        lambda x: x[0] * (100 // (x.shape[0] ^ 5)),
    ],
)
def test_what_is_computed_of_bits_of_a_size_is_what_jit_makes_of_it(f, options):
    compiled = px.compile(f, **options)
    for n in (9, 10, 50_000, 6):
        x = np.arange(float(n), dtype=np.float32)
        np.testing.assert_array_equal(compiled(x), jax.jit(f)(x))


def test_a_division_by_no_bits_is_an_error():
    compiled = px.compile(lambda x: x * (100 // (x.shape[0] ^ 5)), dims={"x": "t"})
    compiled(np.ones(6, np.float32))
    with pytest.raises(ZeroDivisionError):
        compiled(np.ones(5, np.float32))


BITS_OF_SIZE = px.compile(
    lambda x: (n := x.shape[0]) and (n ^ 5) + (n | 64) + (3 & n), dims={"x": "t"}
)


def test_an_integer_that_is_an_axis_is_a_constant_and_sizes_stay_in_buckets():
    def f(x, n):
        return jnp.cumsum(x, axis=n).sum(0)  # the axis

    compiled = px.compile(f)
    for t, n in ((5, 0), (6, 1), (7, 0), (8, 1), (9, 0), (10, 1)):
        x = np.arange(3.0 * t, dtype=np.float32).reshape(t, 3)
        np.testing.assert_array_equal(compiled(x, n), np.cumsum(x, axis=n).sum(0))
    text = compiled.explain()
    assert "constant: `n`: the program needs its value: TypeError" in text
    assert "# the axis" in text and "not padded" not in text
    assert "new bucket" in text


def test_an_axis_is_a_constant_and_the_other_integers_of_a_call_are_not():
    def f(x, axis, counts):
        return x.sum(axis=axis) * counts[0] + counts[1]  # the axis

    compiled = px.compile(f)
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    for axis, counts in (
        (0, [1, 2]),
        (1, [2, 3]),
        (0, [3, 5]),
        (1, [7, 4]),
        (0, [0, 0]),
    ):
        expected = x.sum(axis=axis) * counts[0] + counts[1]
        np.testing.assert_array_equal(compiled(x, axis, counts), expected)
    assert compiled.stats.compilations == 3
    text = compiled.explain()
    assert "constant: `axis`: the program needs its value: TypeError" in text
    assert "# the axis" in text and "constant: `counts" not in text


TIED_TO_INTEGERS = {
    "a length": (lambda x, n, m: x + jnp.arange(n, dtype=x.dtype), 1, 0),
    "a product": (lambda x, n, m: x.reshape(n, m).sum(0), 2, 2),
    "a length, by an axis": (
        lambda x, n, m: jnp.cumsum(x + jnp.arange(n, dtype=x.dtype), axis=m), 1, 0
    ),
}  # fmt: skip


@pytest.mark.parametrize("f, times, m", TIED_TO_INTEGERS.values(), ids=TIED_TO_INTEGERS)
def test_a_named_size_may_be_what_integers_say_from_the_first_call_on(f, times, m):
    compiled = px.compile(f, dims={"x": "t"})
    for n in (4, 5, 6, 4):
        x = np.arange(times * n, dtype=np.float32)
        np.testing.assert_array_equal(compiled(x, n, m), f(jnp.asarray(x), n, m))
    assert len(compiled.traces) == 1


def test_a_named_size_that_is_fixed_otherwise_is_an_error_beside_integers():
    compiled = px.compile(lambda x, n: (x + jnp.zeros(7)) * n, dims={"x": "t"})
    for n in (3, 4):
        with pytest.raises(px.ConstraintViolationError, match="needs t == 7"):
            compiled(np.ones(7, np.float32), n)


def test_the_reason_of_a_trace_is_the_integer_alone_where_sizes_changed_before():
    compiled = px.compile(lambda x, n: x * n)
    for t, n in ((3, 1), (4, 2), (5, -3)):
        compiled(np.ones(t, np.float32), n)
    assert "new value: `n`: 2 -> -3" in compiled.explain()


def test_decimals_are_a_constant_with_its_line_in_explain():
    compiled = px.compile(lambda x, n: jnp.round(x, n))
    for n in (0, 1, 2, 1):
        x = np.array([0.125, 1.26], np.float32)
        np.testing.assert_array_equal(compiled(x, n), jnp.round(jnp.asarray(x), n))
    assert compiled.stats.compilations == 3
    assert "constant: `n`: the program needs its value" in compiled.explain()


def test_a_call_that_is_wrong_makes_no_constant_of_an_integer():
    compiled = px.compile(lambda x, n: x.reshape(n, 2).sum(0))
    compiled(counting(6), 3)
    with pytest.raises(TypeError, match="cannot reshape"):
        compiled(counting(6), 4)
    for n in (4, 5, 6):
        np.testing.assert_array_equal(
            compiled(counting(2 * n), n), counting(2 * n).reshape(n, 2).sum(0)
        )
    assert "constant: " not in compiled.explain()


# Sizes that short integers do not hold -------------------------------------------------


I8, U8 = np.array([-1, 3], np.int8), np.array([1, 200], np.uint8)
SHORT_INTEGERS = {
    "negative indices": lambda x: x[I8.astype(np.int8)],
    "written": lambda x: x.at[I8].set(-5.0),
    "of a traced array": lambda x: x[jnp.asarray(I8) * jnp.int8(1)],
    "wrapped": lambda x: jnp.take(x, I8, mode="wrap"),
    "a sum": lambda x: I8 + x.shape[0],
    "unsigned": lambda x: U8 - (x.shape[0] - 50),
    "a multiple": lambda x: I8.astype(np.int16) * (300 * x.shape[0]),
    "an extreme": lambda x: np.maximum(I8, x.shape[0]),
    "compared": lambda x: (x.shape[0] > I8) & (x.shape[0] >= U8),
    "equal": lambda x: x.shape[0] == U8,
}


def outcome(f, x):
    """The result of a function, or the type of its error."""
    try:
        return np.asarray(f(x))
    except Exception as error:
        return type(error)


@pytest.mark.slow
@pytest.mark.parametrize("f", SHORT_INTEGERS.values(), ids=SHORT_INTEGERS)
def test_a_size_that_an_integer_type_does_not_hold_is_an_error_as_in_jax(f):
    """Where JAX itself wraps, px.compile does; nowhere else."""
    compiled = px.compile(f, dims={"x": "t"})
    for n in (100, 127, 128, 200, 300, 40):
        found, wanted = outcome(compiled, counting(n)), outcome(jax.jit(f), counting(n))
        np.testing.assert_array_equal(found, wanted, err_msg=str(n))


def test_a_size_born_from_data_meets_short_integers_that_hold_its_bound():
    compiled = px.compile(
        lambda x: px.ragged.boolean_mask(x, x > 0)[I8], dims={"x": "t"}
    )
    for n in (100, 127, 20):
        x = counting(n)
        np.testing.assert_array_equal(compiled(x), x[x > 0][I8])
    with pytest.raises(ValueError, match="Convert what it meets to int32"):
        compiled(counting(128))


FEW = np.arange(5, dtype=np.int32)
POWERS = {
    "array": lambda x: x ** x.shape[0],
    "power": lambda x: jnp.power(x, x.shape[0] // 2),
    "pow": lambda x: jnp.pow(x[:4], 2 * x.shape[0]),
    "truths": lambda x: (x > 3) ** x.shape[0],
    "scalar": lambda x: (jnp.int8(3) ** x.shape[0]).astype(x.dtype) + x,
    "integer": lambda x: jnp.power(3, x.shape[0]) + x,
    "NumPy's": lambda x: (FEW ** x.shape[0]).astype(x.dtype) + x[:1],
}


@pytest.mark.slow
@pytest.mark.parametrize("f", POWERS.values(), ids=POWERS)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
def test_powers_of_integer_arrays_wrap_as_those_by_an_integer_do(f, dtype):
    """Also by 64 and more, of which JAX reads 6 bits where an array holds them."""
    make = lambda n: (np.arange(n) - 2).astype(dtype)  # noqa: E731
    agree(f, (5, 31, 63, 64, 65, 130, 257), make, dims={"x": "t"})


def test_an_integer_array_to_a_negative_power_is_the_error_that_jax_has():
    compiled = px.compile(lambda x, n: x**n)
    for n in (2, 70):
        np.testing.assert_array_equal(compiled(jnp.arange(4), n), jnp.arange(4) ** n)
    with pytest.raises(TypeError, match="negative powers"):
        compiled(jnp.arange(4), -1)
