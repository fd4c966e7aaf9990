"""Laws of the record that a trace keeps of answers about sizes."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

import pliax as px
from pliax.core.guards import Assumptions
from pliax.core.symbols import Symbol


RELATIONS = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
TERMS = st.sampled_from(
    ["b", "t", "b + 1", "2 * t", "b * t", "t // 2", "b % 3", "t - b", "7"]
)
QUESTIONS = st.lists(st.tuples(TERMS, RELATIONS, TERMS), min_size=1, max_size=6)
VALUES = st.fixed_dictionaries({"b": st.integers(1, 30), "t": st.integers(1, 30)})


def assume(*constraints, split=False, **hints):
    symbols = [Symbol(n, hint, n) for n, hint in hints.items()]
    return Assumptions(symbols, constraints, split=split)


def conditions(assumptions):
    return [d.condition for d in assumptions.decisions.values()]


@given(questions=QUESTIONS, hints=VALUES, values=VALUES)
def test_what_is_on_record_holds_wherever_the_guards_do(questions, hints, values):
    assumptions = assume(**hints)
    names = dict(zip("bt", assumptions.known.parse("b, t"), strict=True))
    answers = [bool(eval(" ".join(question), names)) for question in questions]
    assert answers == [eval(" ".join(question), dict(hints)) for question in questions]
    held = all(guard.holds(values) for guard in assumptions.guards.values())
    for sizes in (hints, values) if held else (hints,):
        assert all(eval(text, dict(sizes)) for text in conditions(assumptions))


def test_each_question_is_on_record_once_with_its_line():
    (t,) = (assumptions := assume(t=5)).known.parse("t")
    for _ in range(3):
        assert t + 1 != t  # follows
        assert t > 4  # is decided
    follows, decided = assumptions.decisions.values()
    assert (follows.condition, follows.decided) == ("t + 1 != t", None)
    assert str(decided.decided) == "t > 4" and decided.answer
    assert "assert t + 1 != t  # follows" in str(follows)
    assert not follows.is_from_jax


@pytest.mark.parametrize(
    ("use", "wanted"),
    [
        (lambda t: int(t), ["t == 5"]),
        (lambda t: t in {4, 5}, ["t == 5"]),
        (lambda t: px.statically_known_true(t >= 1), ["t >= 1"]),
        (lambda t: px.statically_known_true(t == 5), []),
        (lambda t: px.guard_or_false(t == 5), ["t == 5"]),
        (lambda t: px.guard_or_true(t < 1), ["t >= 1"]),
        (lambda t: px.check(t <= 9), ["t <= 9"]),
        (lambda t: bool(px.sym_and(t > 2, t < 9)), ["(t > 2) and (t < 9)"]),
        (lambda t: bool(px.sym_or(t > 7, t == 6)), ["(t <= 7) and (t != 6)"]),
    ],
)
def test_every_way_to_ask_is_on_record(use, wanted):
    (t,) = (assumptions := assume(t=5)).known.parse("t")
    use(t)
    assert conditions(assumptions)[-1:] == wanted


def traced(assumptions, f):
    (shape,) = (assumptions.known.parse("b, t"),)
    return jax.make_jaxpr(f)(jax.ShapeDtypeStruct(shape, jnp.float32))


def test_sizes_that_jax_calls_different_are_no_decision():
    def f(x):
        return x + x.mean(axis=0, keepdims=True)

    traced(assumptions := assume(b=1, t=5), f)
    assert not assumptions.guards
    assert all(d.is_from_jax for d in assumptions.decisions.values())
    assert "b != 1" not in conditions(assumptions)


def test_where_sizes_are_split_whatever_jax_asks_leaves_a_guard():
    def f(x):
        return x + x.mean(axis=0, keepdims=True)

    for b, wanted in ((1, "b == 1"), (3, "b != 1")):
        traced(assumptions := assume(b=b, t=5, split=True), f)
        assert wanted in assumptions.guards and wanted in conditions(assumptions)


def test_a_divisor_that_may_be_zero_is_a_question():
    b, t = (assumptions := assume(b=3, t=7)).known.parse("b, t")
    assert str(t // (b - 2)) == "t // (b - 2)" and (t % b) is not None
    assert list(assumptions.guards) == ["b - 2 != 0"]
    with pytest.raises(ZeroDivisionError):
        divmod(t, b - 3)
    n, t = Assumptions(
        [Symbol("n", None, "nonzero", low=0), Symbol("t", 7, "t")]
    ).known.parse("n, t")
    assert str(t // n) == "t // n"  # only the device knows n
