import dataclasses
import functools
import math
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import pliax as px
from pliax.core.collapse import ConstraintViolationError, multiple_of
from pliax.core.constraints import constraint
from pliax.core.dims import Size
from pliax.core.guards import Assumptions
from pliax.core.other_traces import UnknownSizeError
from pliax.core.size_expressions import bounds, evaluate, substitute, variables
from pliax.core.symbols import Symbol
from pliax.core.unbacked import new_size


def assume(*constraints, strong=False, **hints):
    symbols = [Symbol(n, hint, n, is_strong=strong) for n, hint in hints.items()]
    return Assumptions(symbols, constraints)


def sizes(assumptions, text):
    return assumptions.known.parse(text)


# Arithmetic -------------------------------------------------------------------------


LEAVES = ["b", "t", "1", "2", "3", "7"]
EXPRESSIONS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(
            "({0[0]} {0[1]} {0[2]})".format
        ),
        st.tuples(inner, st.sampled_from(["//", "%"]), st.sampled_from("2357")).map(
            "({0[0]} {0[1]} {0[2]})".format
        ),
    ),
    max_leaves=6,
)
VALUES = st.fixed_dictionaries({"b": st.integers(1, 40), "t": st.integers(1, 40)})


def symbolic(text, assumptions):
    b, t = sizes(assumptions, "b, t")
    return eval(text, {"b": b, "t": t})


@given(text=EXPRESSIONS, values=VALUES)
def test_arithmetic_of_sizes_is_that_of_their_values(text, values):
    size = symbolic(text, assume(b=3, t=5))
    assert evaluate(size, values) == eval(text, dict(values))
    assert eval(str(size), dict(values)) == eval(text, dict(values))


@given(text=EXPRESSIONS, values=VALUES)
def test_bounds_hold_every_value(text, values):
    low, high = bounds(symbolic(text, assume(b=3, t=5)), {"b": (1, 40), "t": (1, 40)})
    assert low <= eval(text, dict(values)) <= high


@given(text=EXPRESSIONS, values=VALUES)
def test_substitution_commutes_with_evaluation(text, values):
    assumptions = assume(b=3, t=5)
    (b,) = sizes(assumptions, "b")
    replaced = substitute(symbolic(text, assumptions), {"t": b + 2})
    assert "t" not in variables(replaced)
    wanted = eval(text, {"b": values["b"], "t": values["b"] + 2})
    assert evaluate(replaced, values) == wanted


def test_extremes_are_sizes():
    b, t = sizes(assume(b=3, t=5), "b, t")
    assert evaluate(b.max(t), {"b": 3, "t": 5}) == evaluate(t.max(b), {"b": 3, "t": 5})
    assert evaluate(b.min(4), {"b": 9}) == 4
    assert (b + 1).max(1) is b + 1


# Questions --------------------------------------------------------------------------


@given(
    text=EXPRESSIONS,
    relation=st.sampled_from(["==", "!=", "<", "<=", ">", ">="]),
    other=EXPRESSIONS,
    hints=VALUES,
    values=VALUES,
)
def test_an_answer_holds_wherever_its_guards_do(text, relation, other, hints, values):
    assumptions = assume(**hints)
    a, b = symbolic(text, assumptions), symbolic(other, assumptions)
    answer = bool(eval(f"a {relation} b", {"a": a, "b": b}))
    question = f"({text}) {relation} ({other})"
    assert answer == eval(question, dict(hints))
    guards = assumptions.guards.values()
    assert all(guard.holds(hints) for guard in guards)
    if all(guard.holds(values) for guard in guards):
        assert answer == eval(question, dict(values))


def test_what_is_known_leaves_no_guard():
    assumptions = assume("t <= 4096", "mod(b, 8) == 0", b=16, t=100)
    b, t = sizes(assumptions, "b, t")
    assert t <= 5000 and t >= 1 and not t > 4096 and b % 8 == 0 and t + 1 != t
    assert not assumptions.guards
    assert t < 128
    assert t < 128 and t <= 127 and not t >= 128
    assert list(assumptions.guards) == ["t < 128"]


@pytest.mark.parametrize("hints", [{"a": 3, "b": 5}, {"a": 5, "b": 3}])
@pytest.mark.parametrize("ask", [lambda a, b: a < b, lambda a, b: a >= b])
def test_which_of_two_sizes_is_smaller_is_asked_once(hints, ask):
    assumptions = assume(**hints)
    a, b = sizes(assumptions, "a, b")
    bool(ask(a, b))
    low, high = (a, b) if hints["a"] < hints["b"] else (b, a)
    assert len(assumptions.guards) == 1
    assert low <= high and high >= low
    assert low.min(high) is high.min(low) is low and low.max(high) is high
    if list(assumptions.guards) != ["a >= b"]:
        assert low < high and low != high and high + 2 > low + 1
    assert len(assumptions.guards) == 1


def test_a_guard_names_the_line_that_asked():
    (t,) = sizes(assumptions := assume(t=100), "t")
    if t > 64:  # the line in question
        pass
    (guard,) = assumptions.guards.values()
    assert guard.condition == "t > 64"
    assert guard.place.function.endswith("test_a_guard_names_the_line_that_asked")
    assert "if t > 64:  # the line in question" in str(guard)


@dataclasses.dataclass
class Extent:
    height: int
    width: int


def test_a_guard_names_the_line_behind_a_dataclass_but_code_without_a_file_too():
    (t,) = sizes(assumptions := assume(t=72), "t")
    assert Extent(t, 3) != Extent(5, 3)  # the line that compares
    (guard,) = assumptions.guards.values()
    assert "the line that compares" in str(guard)
    (t,) = sizes(assumptions := assume(t=72), "t")
    exec("def ask(t):\n    return bool(t > 64)\nask(t)", {"t": t})
    (guard,) = assumptions.guards.values()
    assert (guard.place.file, guard.place.function) == ("<string>", "ask")


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t in {12, 13},
        lambda t: t in {13},
        lambda t: {12: "a"}.get(t),
        lambda t: {12: "a"}[t],
        lambda t: int(t),
        lambda t: list(range(t)),
        lambda t: float(t),
        lambda t: [0] * 99 and [*range(20)][t],
        lambda t: {t},
        lambda t: {t: 1},
        lambda t: np.zeros(t),
    ],
)
def test_a_size_used_as_an_integer_becomes_one(use):
    (t,) = sizes(assumptions := assume(t=12), "t")
    assert np.all(use(t) == use(12))
    assert "t == 12" in assumptions.guards
    assert assumptions.guards["t == 12"].reason


def test_lookups_find_equal_integers():
    (t,) = sizes(assume(t=12), "t")
    assert t in {12, 13} and t in [3, 12] and t in (12,)
    assert t not in {13} and t not in [13]


TABLE = {12: 2, 13: 3}
from_table = TABLE.get


@pytest.mark.parametrize(
    "look_up",
    [
        lambda t: from_table(t),
        lambda t: next(map(TABLE.get, [t])),
        lambda t: functools.partial(TABLE.get, t)(),
        lambda t: operator.getitem(TABLE, t),
        lambda t: next(filter(TABLE.__contains__, [t])) - 10,
        lambda t: 1 + len({12, 13}.symmetric_difference([t])),
    ],
)
def test_lookups_by_any_way_find_equal_integers(look_up):
    (t,) = sizes(assumptions := assume(t=12), "t")
    assert look_up(t) == 2
    assert "t == 12" in assumptions.guards


def test_caches_keep_sizes_symbolic():
    @functools.lru_cache
    def double(n):
        return 2 * n

    (t,) = sizes(assumptions := assume(t=12), "t")
    assert double(t) is double(t)
    assert not assumptions.guards


class Cached:
    """Methods that keep their results."""

    @functools.cache  # noqa: B019
    def double(self, n):
        return 2 * n

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def doubled(self, n):
        return jnp.asarray(2 * n)


@functools.cache
def double(n, factor=2):
    return factor * n


def _in_a_loop(n):
    total = 0
    for found in map(double, [n]):
        total += found
    return total


CACHED = Cached()


CACHES = {
    "function": lambda n: double(n),
    "keyword": lambda n: double(n, factor=2),
    "unpacked": lambda n: double(*[n]),
    "method": lambda n: Cached().double(n),
    "bound": lambda n, f=CACHED.double: f(n),
    "jitted": lambda n, c=CACHED: c.doubled(n),
    "element": lambda n, fs=(double,): fs[0](n),
    "by name": lambda n, fs={"a": double}, key="a": fs[key](n),
    "either": lambda n, f=CACHED.double: (f if n is None else double)(n),
    "inline": lambda n: jax.jit(lambda m: jnp.asarray(2 * m), static_argnums=0)(n),
    "made": lambda n: functools.lru_cache(maxsize=3)(lambda m: 2 * m)(n),
    "partial": lambda n: functools.partial(double, n)(),
    "mapped": lambda n: sum(list(map(double, [n]))),
    "starred": lambda n: sum([*map(double, [n])]),
    "loop": _in_a_loop,
    "no text": eval("lambda n: double(n)", {"double": double}),
    "no text, method": eval("lambda n: c.double(n)", {"c": Cached()}),
}


@pytest.mark.parametrize("call", CACHES)
def test_caches_that_are_called_by_any_way_keep_sizes_symbolic(call):
    f = px.compile(lambda x: x * CACHES[call](x.shape[0]), dims={"x": "t"})
    for n in (3, 4, 6):
        np.testing.assert_array_equal(f(jnp.ones(n)), np.full(n, 2.0 * n))
    assert f.stats.traces == 1 and not f.guards


LOOKUPS = {
    "set of results": lambda n: set(map(double, [n])),
    "either": lambda n, get={12: 3}.get: (get if n is not None else double)(n),
    "another's result": lambda n: functools.partial({12: 3}.get)(n),
    "no text": eval("lambda n: {12: 3}.get(n)"),
}


@pytest.mark.parametrize("look_up", LOOKUPS)
def test_a_strong_size_that_is_looked_up_is_an_error_that_says_so(look_up):
    (t,) = sizes(assume(t=12, strong=True), "t")
    with pytest.raises(ConstraintViolationError, match=r"== (12|6) \(used by hash"):
        LOOKUPS[look_up](t)


def test_a_strong_size_that_collapses_is_an_error_with_a_fix():
    (t,) = sizes(assume(t=12, strong=True), "t")
    text = (
        re.escape("but the program needs t == 12") + r"(.|\n)*Suggested fix: .*t = 12"
    )
    with pytest.raises(ConstraintViolationError, match=text):
        int(t)
    a, b = sizes(assume(a=4, b=4, strong=True), "a, b")
    with pytest.raises(ConstraintViolationError, match='declare "a = b"'):
        bool(a == b)
    a, b = sizes(assume(a=4, b=8, strong=True), "a, b")
    with pytest.raises(ConstraintViolationError, match="b = 2"):
        bool(b == 2 * a)
    assert t > 3 and t % 4 == 0  # narrower, but no constant


def test_solved_equations_tie_names():
    a, b, c = sizes(assumptions := assume(a=4, b=3, c=9), "a, b, c")
    assert a - 1 == b and c == 9
    assert {n: str(x) for n, x in assumptions.known.solved.items()} in (
        {"a": "b + 1", "c": "9"},
        {"b": "a - 1", "c": "9"},
    )


# Conditions -------------------------------------------------------------------------


def test_sym_and_keeps_one_guard():
    b, t = sizes(assumptions := assume(b=8, t=12), "b, t")
    assert px.sym_and(b == 8, t > 10)
    assert list(assumptions.guards) == ["(b == 8) and (t > 10)"]
    assert b == 8 and t > 10
    assert len(assumptions.guards) == 1
    assert not px.sym_or(b == 9, t > 100)
    assert list(assumptions.guards)[1:] == ["t <= 100"]  # b == 9 is known to be false


def test_sym_or_is_undecided_until_it_is_needed():
    b, t = sizes(assumptions := assume(b=8, t=12), "b, t")
    either = px.sym_or(b == 8, t == 3, False)
    assert not assumptions.guards
    assert either
    assert list(assumptions.guards) == ["(b == 8) or (t == 3)"]
    assert px.sym_or(t == 3, True) is True
    assert px.sym_and() is True and px.sym_or() is False


def test_statically_known_true_leaves_no_guard():
    (t,) = sizes(assumptions := assume("t <= 64", t=12), "t")
    assert px.statically_known_true(t <= 64)
    assert not px.statically_known_true(t == 12)
    assert not px.statically_known_true(t > 64)
    assert px.statically_known_true(px.sym_or(t > 9, t >= 1))
    assert not assumptions.guards


@pytest.mark.parametrize(
    "follows",
    [
        lambda t: t % 4 == 0,
        lambda t: 2 * t % 16 == 0,
        lambda t: (t + 8) % 4 == 0,
        lambda t: 4 * (t // 4) == t,
        lambda t: (t + 1) % 4 == 1,
        lambda t: (t + 2) % 4 != 0,
    ],
)
def test_divisors_of_a_divisor_leave_no_guard(follows):
    f = px.compile(
        lambda x: x if px.statically_known_true(follows(x.shape[0])) else -x,
        dims={"x": {0: px.Dim("t", multiple_of=8)}},
    )
    for n in (8, 16, 24):
        np.testing.assert_array_equal(f(jnp.ones(n)), np.ones(n))
        assert follows(n)
    assert not f.guards
    (t,) = sizes(assumptions := assume(t=24), "t")
    assert t % 8 == 0 and follows(t)
    assert list(assumptions.guards) == ["t % 8 == 0"]


def test_what_does_not_follow_from_a_divisor_is_asked():
    (t,) = sizes(assume("mod(t, 6) == 0", t=12), "t")
    assert not px.statically_known_true(t % 4 == 0)
    assert not px.statically_known_true(t % 12 == 0)


def test_a_reshape_by_a_divisor_of_a_divisor_leaves_no_guard():
    dims = {"x": {0: px.Dim("t", multiple_of=8)}}
    f = px.compile(lambda x: x.reshape(4, -1), dims=dims)
    for n in (8, 24):
        assert f(jnp.ones(n)).shape == (4, n // 4)
    assert not f.guards


def test_an_empty_range_is_nothing():
    n = new_size(assumptions := assume(), 0, "the test")
    assert px.statically_known_true(n == 0)
    assert not assumptions.guards


def test_sizes_that_only_the_device_knows():
    assumptions = Assumptions([Symbol("n", None, "nonzero(x)", high=8)])
    (n,) = assumptions.known.parse("n")
    assert px.guard_or_true(n == 3) is True and px.guard_or_false(n == 3) is False
    assert px.guard_or_false(n <= 8) is True and px.guard_or_true(n > 8) is False
    with pytest.raises(UnknownSizeError, match=r"only the device knows n \(nonzero"):
        if n == 3:
            pass
    assert not assumptions.guards


def test_guard_or_false_guards_where_sizes_are_at_hand():
    (t,) = sizes(assumptions := assume(t=12), "t")
    assert px.guard_or_false(t == 12) is True and px.guard_or_true(t > 20) is False
    assert list(assumptions.guards) == ["t == 12"]


def test_check_is_remembered():
    (t,) = sizes(assumptions := assume(t=12), "t")
    px.check(t <= 64, "rows have at most 64 tokens")
    assert list(assumptions.guards) == ["t <= 64"]
    assert px.statically_known_true(t < 100)
    with pytest.raises(
        ValueError, match=r"px.check: too short\n  at .*test_check_is_remembered"
    ):
        px.check(t > 64, "too short")


def test_a_check_without_a_message_says_what_does_not_hold():
    (t,) = sizes(assume(t=12), "t")
    with pytest.raises(ValueError, match=r"px.check: t > 64 does not hold\n  at"):
        px.check(t > 64)
    with pytest.raises(ValueError, match=r"px.check: the condition does not hold\n"):
        px.check(3 > 4)


def test_a_remainder_is_zero_whatever_the_sign_of_the_divisor():
    (t,) = sizes(assumptions := assume(t=12), "t")
    assert t % -3 == 0 and t % 3 == 0 and t % -5 != 0
    assert list(assumptions.guards) == ["t % 3 == 0", "t % 5 != 0"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("b % 8 == 0", "mod(b, 8) == 0"),
        ("t // 2 <= 7", "floordiv(t, 2) <= 7"),
        ("a < 2*b", "a <= 2 * b - 1"),
    ],
)
def test_constraints_are_written_in_python(text, wanted):
    assert constraint(text) == wanted


@pytest.mark.parametrize("text", ["t", "t != 3", "1 < t < 3", "t <="])
def test_what_is_no_constraint_is_refused(text):
    with pytest.raises(ValueError, match="cannot be read"):
        constraint(text)


# Inside a trace ---------------------------------------------------------------------


def traced(f, assumptions, *shapes):
    args = [
        jax.ShapeDtypeStruct(assumptions.known.parse(s), jnp.float32) for s in shapes
    ]
    return jax.make_jaxpr(f)(*args)


def test_jax_itself_leaves_no_guards():
    def f(x, w):
        y = jax.nn.softmax(x @ w, axis=-1)
        y = y.reshape(-1, 4).sum(axis=0) + jnp.concatenate([x, x]).mean()
        return y, x[:, 1:], x[x.shape[0] // 2], jnp.arange(x.shape[1])

    def loss(x, w):
        return sum(jnp.sum(y.astype(jnp.float32)) for y in f(x, w))

    assumptions = assume(b=1, t=1, strong=True)
    traced(jax.grad(loss), assumptions, "b, t", "t, 4")
    assert not assumptions.guards


def test_a_size_as_an_index_is_a_run_time_scalar():
    assumptions = assume(b=6)
    jaxpr = traced(lambda x: x[x.shape[0] // 2] * x.shape[0], assumptions, "b, 3")
    assert "dim_as_value" in str(jaxpr) and not assumptions.guards
    assert isinstance(assumptions.known.parse("b")[0], Size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.fft.rfftfreq(x.shape[0]),
        lambda x: jnp.fft.fftfreq(x.shape[0]),
        lambda x: jnp.packbits(x > 0),
        lambda x: jax.nn.glu(jnp.concatenate([x, x])),
    ],
    ids=["rfftfreq", "fftfreq", "packbits", "glu"],
)
def test_a_remainder_that_jax_asks_about_is_a_guard(function):
    served = px.compile(function, dims={"x": "t"})
    for n in (5, 8, 16, 7, 6, 24, 1):
        x = jnp.cos(jnp.arange(n, dtype="float32"))
        np.testing.assert_array_equal(served(x), function(x))
    assert served.stats.traces <= 2


@pytest.mark.parametrize("options", [{"dims": {"x": "b", "y": "t"}}, {"dynamic": True}])
def test_sizes_that_jax_finds_different_are_so_by_a_guard(options):
    served = px.compile(lambda x, y: jnp.array_equal(x, y), **options)
    for b, t in ((4, 5), (4, 4), (7, 7), (1, 1), (5, 4)):
        assert served(jnp.ones(b), jnp.ones(t)) == (b == t)
        assert served(jnp.ones(b), 1 + jnp.ones(b)) == False  # noqa: E712


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.linspace(0, 1, x.shape[0]),
        lambda x: jnp.linspace(0, 1, x.shape[0] // 2, endpoint=False),
        lambda x: jnp.pad(x, (0, x.shape[0] // 2), mode="linear_ramp"),
        lambda x: jax.grad(jnp.linalg.det)(jnp.diag(x + 1.0)),
    ],
    ids=["linspace", "linspace of half", "linear_ramp", "gradient of det"],
)
@pytest.mark.parametrize("options", [{"dims": {"x": "t"}}, {"dynamic": True}, {}])
def test_a_size_of_one_that_jax_asks_about_is_a_guard_and_no_error(function, options):
    served = px.compile(function, **options)
    for n in (7, 5, 1, 3, 2, 8):
        x = jnp.cos(jnp.arange(n, dtype="float32"))
        found, wanted = served(x), function(x)
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_sequence_repeated_by_a_size_needs_its_value():
    served = px.compile(lambda x: x + jnp.array([1.0] * x.shape[0]))
    for n in (3, 4, 5):
        np.testing.assert_array_equal(served(jnp.ones(n)), 2 * np.ones(n))
    with pytest.raises(ConstraintViolationError, match="needs t == 3"):
        px.compile(lambda x: x.shape[0] * (1.0,), dims={"x": "t"})(jnp.ones(3))


def test_what_cannot_be_broadcast_symbolically_may_still_be_equal():
    served = px.compile(lambda x, y: jnp.array_equiv(x, y), dynamic=True)
    for b, t in ((4, 4), (7, 7), (1, 5), (5, 1), (1, 1)):
        assert served(jnp.ones(b), jnp.ones(t))
        assert not served(jnp.ones(b), jnp.zeros(t))
    with pytest.raises(ConstraintViolationError, match="needs b == t"):
        px.compile(lambda x, y: jnp.array_equiv(x, y), dims={"x": "b", "y": "t"})(
            jnp.ones(4), jnp.ones(4)
        )


@pytest.mark.parametrize("sizes", [(1, 5), (5, 1), (4, 4), (1, 1)])
def test_a_violation_is_an_error_also_where_somebody_catches_it(sizes):
    def broadcast(x, y):  # JAX tries its cache first, and swallows what is raised there
        return sum(jnp.broadcast_arrays(x, y))

    def careless(x, y):
        try:
            return x + y
        except ValueError:
            return x

    x, y = (jnp.ones(n) for n in sizes)
    for f in (broadcast, careless):
        served = px.compile(f, dims={"x": "b", "y": "t"})
        with pytest.raises(ConstraintViolationError, match="was declared dynamic"):
            served(x, y)
        assert px.compile(f, dynamic=True)(x, y).shape == (max(sizes),)


def test_a_remainder_of_a_size_born_from_data_is_no_answer_to_jax():
    with pytest.raises(UnknownSizeError, match="only the device knows"):
        px.compile(lambda x: jnp.packbits(px.ragged.boolean_mask(x, x)))(
            jnp.ones(16, bool)
        )


@pytest.mark.parametrize(
    "ask",
    [
        px.check,
        px.guard_or_false,
        px.guard_or_true,
        px.statically_known_true,
        px.sym_and,
        px.sym_or,
    ],
)
def test_a_condition_is_about_sizes_not_about_what_arrays_hold(ask):
    f = px.compile(lambda x: ask(x.sum() > 0), dims={"x": "t"})
    with pytest.raises(TypeError, match=rf"px.{ask.__name__}: the condition is an arr"):
        f(np.ones(3, np.float32))
    with pytest.raises(TypeError, match=r"the condition is an array, bool\[3\]"):
        ask(np.ones(3, bool))
    ask(np.bool_(True))


@pytest.mark.parametrize("given", ["t > 3", 5, None, [True], lambda t: t > 3])
@pytest.mark.parametrize(
    "ask", [px.check, px.guard_or_false, px.statically_known_true, px.sym_and]
)
def test_a_condition_is_no_text_number_or_function(ask, given):
    with pytest.raises(TypeError, match=rf"px.{ask.__name__}: the condition is .* of"):
        ask(given)


# Sizes that must be multiples ---------------------------------------------------------

MULTIPLES = [
    "t % {k} == 0",
    "t == {k} * (t // {k})",
    "(t + {k} - 1) // {k} == t // {k}",
    "t % {k} <= 0",
    "max(t % {k}, 0) == 0",
]


@given(form=st.sampled_from(MULTIPLES), k=st.integers(2, 64))
def test_what_asks_for_a_multiple_is_recognised_however_it_is_written(form, k):
    assert multiple_of(form.format(k=k)) == ("t", k)


@pytest.mark.parametrize(
    "condition",
    ["t == 12", "t % 2 == 1", "t > 4", "t % s == 0", "t % 4 == 2", "8 % (t - 3) == 0"],
)
def test_what_asks_for_something_else_is_no_multiple(condition):
    assert multiple_of(condition) is None


# What integers have -----------------------------------------------------------------


BY_VALUE = {
    "bit_length": lambda n: (n - 1).bit_length(),
    "bit_count": lambda n: n.bit_count(),
    "to_bytes": lambda n: int.from_bytes(n.to_bytes(2, "big")),
    "format": lambda n: int(f"{n:03d}"),
    "round": lambda n: round(n, -1),
    "array": lambda n: np.array(n),
    "elements": lambda n: np.array([n, 1])[:1],
}


@pytest.mark.parametrize("use", BY_VALUE)
def test_what_integers_have_by_value_needs_the_value_of_a_size(use):
    f = px.compile(lambda x: x * BY_VALUE[use](x.shape[0]))
    for n in (6, 7, 8):
        x = jnp.ones(n, jnp.int32)
        np.testing.assert_array_equal(f(x), np.ones(n) * BY_VALUE[use](n))
    with pytest.raises(
        ConstraintViolationError, match=r"needs t == 6 \(used|t - 1 == 5"
    ):
        px.compile(f.__wrapped__, dims={"x": "t"})(x[:6])


@pytest.mark.parametrize(
    "use",
    [
        lambda n: n.real + n.imag,
        lambda n: n.numerator // n.denominator,
        lambda n: n.conjugate(),
        lambda n: n.as_integer_ratio()[0],
        lambda n: n if n.is_integer() else 0,
        lambda n: round(n) + math.floor(n) - math.ceil(n),
        lambda n: np.prod(np.array([n, 1])).item(),
        lambda n: n if f"{n}" else 0,
    ],
)
def test_what_integers_have_is_a_size_where_it_can_be(use):
    f = px.compile(lambda x: x * use(x.shape[0]), dims={"x": "t"})
    for n in (3, 4, 6):
        np.testing.assert_array_equal(f(jnp.ones(n)), np.full(n, 1.0 * n))
    assert f.stats.traces == 1 and not f.guards
