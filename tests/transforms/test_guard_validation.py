"""Laws of px.validate_guards: exact translation, proofs, and faults that it catches."""

import dataclasses
import itertools
import operator
import sys

import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

import pliax as px
from pliax.core import guards
from pliax.core.guards import Assumptions
from pliax.core.known_sizes import KnownSizes
from pliax.transforms import guard_validation
from pliax.transforms._proofs import Facts, Prover, every, holds


# The translation --------------------------------------------------------------------


TERMS = st.recursive(
    st.sampled_from(["a", "b", "0", "1", "2", "7", "-3"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(
            "({0[0]} {0[1]} {0[2]})".format
        ),
        st.tuples(st.sampled_from(["max", "min", "mod", "floordiv"]), inner, inner).map(
            "{0[0]}({0[1]}, {0[2]})".format
        ),
        inner.map("-({})".format),
        inner.map("({}) ** 2".format),
    ),
    max_leaves=5,
)
COMPARISONS = st.tuples(
    TERMS, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), TERMS
).map("{0[0]} {0[1]} {0[2]}".format)
CONDITIONS = st.recursive(
    COMPARISONS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(
            "({0[0]}) {0[1]} ({0[2]})".format
        ),
        inner.map("not ({})".format),
    ),
    max_leaves=3,
)
FUNCTIONS = {"mod": operator.mod, "floordiv": operator.floordiv, "max": max, "min": min}


@given(condition=CONDITIONS, a=st.integers(-9, 9), b=st.integers(-9, 9))
def test_a_condition_means_to_z3_what_it_means_to_python(condition, a, b):
    prover = Prover(Facts((("a", a, a), ("b", b, b))), 5000, "test")
    found = [
        prover.find(text) is not None for text in (condition, f"not ({condition})")
    ]
    try:
        wanted = eval(condition, {**FUNCTIONS, "a": a, "b": b})
        assert found == [wanted, not wanted]
    except ZeroDivisionError:
        assert found == [False, False]  # Python has no answer
    assert (prover.find(outside=[condition]) is None) == found[0]


@given(conditions=st.lists(CONDITIONS, min_size=1, max_size=3))
def test_the_smallest_sizes_are_those_of_a_search(conditions):
    prover = Prover(Facts((("a", 1, 7), ("b", 1, 7)), tuple(conditions)), 5000, "test")
    box = [{"a": a, "b": b} for a, b in itertools.product(range(1, 8), repeat=2)]
    inside = [sizes for sizes in box if holds(every(conditions), sizes)]
    first = min(inside, key=lambda s: (s["a"] + s["b"], s["a"]), default=None)
    assert prover.smallest() == first


# Proofs -----------------------------------------------------------------------------


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


def branching(x):
    b, t = x.shape
    x = x[:, 1:] if t % 2 and t > 4 else x
    rows = b + 1
    return x.reshape(-1), jnp.ones(b * t // 2), 1 if rows == b or b * t >= t else 2


@given(sizes=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), max_size=3))
def test_every_decision_of_a_trace_is_proved(sizes):
    f = px.compile(branching, dims={"x": "b, t"}, where="b <= 64")
    for b, t in sizes:
        f(ones(b, t))
    report = px.validate_guards(f)
    assert not report.unknown and report.proved >= 3 * f.stats.traces
    assert (report.traces, report.guards) == (f.stats.traces, len(f.guards))
    text = f"{report.proved} of {report.proved} decisions proved"
    assert text in str(report)


def test_sizes_that_jax_was_told_are_equal_are_proved():
    f = px.compile(lambda x, y: x[1:] * y, dynamic=True)
    f(ones(4), ones(3))
    (trace,) = f.traces
    assert trace.equal  # what padding takes for another name is among the decisions
    report = px.validate_guards(trace)
    assert report.proved > len(trace.assumptions.decisions) and not report.unknown


# Faults -----------------------------------------------------------------------------


def flip_an_equality(monkeypatch):
    proves = KnownSizes.proves

    def flipped(self, a, relation, b):
        answer = proves(self, a, relation, b)
        return not answer if str(a) == "t - 2" and relation == "==" else answer

    monkeypatch.setattr(KnownSizes, "proves", flipped)


def lose_a_guard(monkeypatch):
    monkeypatch.setattr(Assumptions, "guard", lambda *_, **__: None)


def learn_too_much(monkeypatch):
    def narrow(self, _):
        self.ranges["t"] = 8, 8

    monkeypatch.setattr(KnownSizes, "_narrow", narrow)


def forget_a_part(monkeypatch):
    def remaining(condition):
        return condition.parts[0] if condition.operation == "and" else condition

    monkeypatch.setattr(guards, "remaining", remaining)


def program(x):
    t = x.shape[0]
    if px.sym_and(t > 6, t % 2 == 0):
        x = x * 2
    if t - 2 == 8:
        x = x + 1
    return x


@pytest.mark.parametrize(
    ("fault", "where", "condition", "line"),
    [
        (flip_an_equality, "t <= 9", "t - 2 == 8", "if t - 2 == 8:"),
        (lose_a_guard, (), "(t > 6) and (t % 2 == 0)", "if px.sym_and(t > 6, t % 2"),
        (forget_a_part, (), "(t > 6) and (t % 2 == 0)", "if px.sym_and(t > 6, t % 2"),
        (learn_too_much, (), "t - 2 != 8", "if t - 2 == 8:"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_is_caught_with_the_sizes_and_the_line(
    fault, where, condition, line, monkeypatch
):
    fault(monkeypatch)
    f = px.compile(program, dims={"x": "t"}, where=where)
    with pytest.raises(px.GuardValidationError) as caught:
        f(ones(8))  # as soon as it is traced: PLIAX_VALIDATE_GUARDS is set in tests
    error = caught.value
    assert error.condition == condition
    assert not eval(condition, dict(error.sizes))
    text = str(error)
    assert f"relies on {condition}" in text and f"t = {error.sizes['t']}." in text
    assert line in str(error.place) and str(error.place) in text


def test_validation_is_asked_for(monkeypatch):
    monkeypatch.setenv("PLIAX_VALIDATE_GUARDS", "0")
    lose_a_guard(monkeypatch)
    f = px.compile(program, dims={"x": "t"})
    f(ones(8))
    with pytest.raises(px.GuardValidationError, match=r"do not imply: t = \d+"):
        px.validate_guards(f)


def test_what_z3_cannot_tell_is_reported_and_not_claimed(monkeypatch):
    monkeypatch.setenv("PLIAX_VALIDATE_GUARDS", "0")
    monkeypatch.setattr(KnownSizes, "proves", lambda self, a, relation, b: False)

    def cubes(x, y, z):
        a, b, c = x.shape[0], y.shape[0], z.shape[0]
        return x * 2 if a**3 + b**3 == c**3 else x  # never, as Euler proved

    f = px.compile(cubes, dims={"x": "a", "y": "b", "z": "c"})
    f(ones(3), ones(4), ones(5))
    report = px.validate_guards(f, timeout=50)
    (unknown,) = report.unknown
    assert "c ** 3" in unknown and "as Euler proved" in unknown
    assert f"{report.proved} of {report.proved + 1} decisions" in str(report)


# Boundaries -------------------------------------------------------------------------


def test_without_z3_it_says_what_to_install(monkeypatch):
    f = px.compile(lambda x: x * 2 if x.shape[0] != 77 else x, dims={"x": "t"})
    f(ones(8))
    guard_validation._prover.cache_clear()
    guard_validation._verdict.cache_clear()
    monkeypatch.setitem(sys.modules, "z3", None)
    with pytest.raises(ImportError, match=r'pip install "pliax\[verify\]"'):
        px.validate_guards(f)
    with pytest.raises(ImportError, match=r"px\.infer_sizes"):
        px.infer_sizes(lambda x: x, ones(3), dims={"x": "t"})


@pytest.mark.parametrize(
    ("target", "timeout", "error", "text"),
    [
        (lambda x: x, 100, TypeError, "Pass a function of px.compile"),
        (px.compile(lambda x: x), 0, ValueError, "timeout is 0"),
    ],
)
def test_what_has_no_traces_is_refused(target, timeout, error, text):
    with pytest.raises(error, match=text):
        px.validate_guards(target, timeout=timeout)


def test_what_calls_are_asked_is_validated():
    f = px.compile(lambda x: x * 2 if x.shape[0] <= 4 else x, dims={"x": "t"})
    f(ones(3))
    (trace,) = f.traces
    (key, guard) = trace.assumptions.guards.popitem()
    wrong = dataclasses.replace(guard, condition="t != 5")
    trace.assumptions.guards[key] = wrong
    with pytest.raises(px.GuardValidationError, match=r"relies on t <= 4, .*\n.*<= 4"):
        px.validate_guards(f)
