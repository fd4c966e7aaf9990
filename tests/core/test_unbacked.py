"""Sizes born from data are at least 0: nothing takes them for at least 1."""

import pytest
from hypothesis import given, strategies as st

import pliax as px
from pliax.core.conditions import Condition
from pliax.core.guards import Assumptions
from pliax.core.other_traces import UnknownSizeError
from pliax.core.provenance import NOWHERE
from pliax.core.size_expressions import bounds, evaluate
from pliax.core.symbols import Symbol
from pliax.core.unbacked import most, new_size, with_unbacked


def assume():
    assumptions = Assumptions([Symbol("t", 5, "x.shape[0]", high=16)])
    (t,) = assumptions.known.parse("t")
    return assumptions, t, new_size(assumptions, t, "the test")


LEAVES = ["u0", "t", "0", "1", "2", "3"]
EXPRESSIONS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-"), inner).map(
            "({0[0]}{0[1]}{0[2]})".format
        ),
        st.tuples(st.sampled_from(["max", "min"]), inner, inner).map(
            "{0[0]}({0[1]}, {0[2]})".format
        ),
        st.tuples(inner, st.sampled_from(["//", "%"]), st.sampled_from("23")).map(
            "({0[0]}{0[1]}{0[2]})".format
        ),
    ),
    max_leaves=6,
)
VALUES = st.integers(1, 16).flatmap(
    lambda t: st.fixed_dictionaries({"t": st.just(t), "u0": st.integers(0, t)})
)


def symbolic(text, t, u):
    def larger(a, b):
        if isinstance(a, int) and isinstance(b, int):
            return max(a, b)
        return b.max(a) if isinstance(a, int) else a.max(b)

    def smaller(a, b):
        if isinstance(a, int) and isinstance(b, int):
            return min(a, b)
        return b.min(a) if isinstance(a, int) else a.min(b)

    return eval(text, {"t": t, "u0": u, "max": larger, "min": smaller})


@given(text=EXPRESSIONS, values=VALUES)
def test_arithmetic_and_bounds_hold_for_every_value(text, values):
    assumptions, t, u = assume()
    size = symbolic(text, t, u)
    wanted = eval(text, dict(values))
    assert evaluate(size, values) == wanted
    assert evaluate(assumptions.known.same_form(size), values) == wanted
    low, high = bounds(size, assumptions.known.ranges)
    assert low <= wanted <= high
    assert wanted <= most(size, assumptions, {"t": values["t"]})


@given(text=EXPRESSIONS, other=EXPRESSIONS, values=VALUES)
def test_what_is_proved_holds_for_every_value(text, other, values):
    assumptions, t, u = assume()
    a, b = symbolic(text, t, u), symbolic(other, t, u)
    for relation in ("==", "!=", "<", "<=", ">", ">="):
        answer = assumptions.known.proves(a, relation, b)
        wanted = eval(f"({text}) {relation} ({other})", dict(values))
        assert answer is None or answer == wanted


def test_what_is_known_of_it():
    assumptions, t, u = assume()
    assert str(u) == "u0" and u >= 0 and u <= t and t - u >= 0 and u <= 16
    assert assumptions.known.proves(u, ">=", 1) is None
    assert str(u.max(1)) == "max(u0, 1)" and u.max(0) is u
    assert assumptions.known.proves(u - u.min(1), "==", (u - 1).max(0))
    assert not assumptions.guards
    with pytest.raises(UnknownSizeError, match=r"u0 >= 1, but only .* u0 \(the test\)"):
        bool(u >= 1)
    assert not px.guard_or_false(u >= 1) and px.guard_or_true(u >= 1)


def test_names_are_fresh():
    assumptions = Assumptions([Symbol("u0", 5, "x.shape[0]"), Symbol("u2", 5, "y")])
    made = [str(new_size(assumptions, 8, "the test")) for _ in range(3)]
    assert made == ["u1", "u3", "u4"]


def test_what_is_stated_narrows_the_room():
    assumptions, t, u = assume()
    assert with_unbacked(assumptions, {"t": (1, 16)})["u0"] == (0, 16)
    assumptions.learn(Condition("<=", (u, 4), assumptions), NOWHERE)
    assumptions.learn(Condition(">=", (u, 1), assumptions), NOWHERE)
    assert with_unbacked(assumptions, {"t": (1, 16)})["u0"] == (1, 4)
    assert u >= 1 and u < 5
    assumptions.learn(Condition("==", (u, t - 1), assumptions), NOWHERE)
    assert {n: str(x) for n, x in assumptions.known.solved.items()} == {"u0": "t - 1"}
