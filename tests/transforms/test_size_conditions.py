"""Laws of conditions on sizes: contradictions are told, equations are read."""

import itertools

import jax.numpy as jnp
import pytest
from hypothesis import example, given, strategies as st

import pliax as px
from pliax.core.constraints import constraint
from pliax.core.size_expressions import evaluate_text
from pliax.transforms._size_conditions import bounds_of, contradiction


TERMS = st.sampled_from(["t", "u", "2*t", "t % 3", "u % 4", "t + u", "t - u", "t*u"])
RELATIONS = st.sampled_from(["<=", "<", ">=", ">", "=="])
CONDITIONS = st.builds("{} {} {}".format, TERMS, RELATIONS, TERMS | st.integers(0, 9))
LISTS = st.lists(CONDITIONS.map(constraint), max_size=4).map(tuple)
SIZES = [{"t": t, "u": u} for t, u in itertools.product(range(30), repeat=2)]


def satisfied(conditions, sizes):
    return all(evaluate_text(text, sizes) for text in conditions)


@given(LISTS)
@example(("t <= u - 1", "u <= t - 1"))
def test_what_is_called_a_contradiction_has_no_sizes_and_no_condition_too_many(given):
    found = contradiction(given)
    assert not found or not any(satisfied(found, sizes) for sizes in SIZES)
    for text in found:
        assert not contradiction([c for c in found if c != text])


@given(LISTS, st.sampled_from(SIZES[31:]))
def test_bounds_of_a_size_hold_every_size_that_satisfies_the_conditions(given, sizes):
    low, high = bounds_of("t", given)
    if satisfied(given, sizes):
        assert low <= max(sizes["t"], 1)
        assert high is None or sizes["t"] <= high


MAKERS = {
    "compile": lambda **said: px.compile(both, **said),
    "pad": lambda **said: px.pad(both, **said)(X, X, sizes={"t": 5, "u": 5}),
    "infer_sizes": lambda **said: px.infer_sizes(both, X, X, **said),
}
X = jnp.ones(5)


def both(x, y):
    return x.sum() + y.sum()


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("t<t", "t<t"),
        (("u >= 1", "t <= 4", "t >= 8"), "t <= 4 and t >= 8"),
        (("t % 2 == 0", "t % 2 == 1"), "t % 2 == 0 and t % 2 == 1"),
        (("t < u", "u < t"), "t < u and u < t"),
        (("t == u", "t <= 4", "u >= 8"), "t == u and t <= 4 and u >= 8"),
        ("u >= 7", r"u <= 6 \(of Dim\('u'\)\) and u >= 7"),
        ("u // 2 == 9", r"u <= 6 \(of Dim\('u'\)\) and u // 2 == 9"),
    ],
)
def test_conditions_that_contradict_each_other_are_named_before_any_call(
    maker, where, named
):
    dims = {"x": "t", "y": px.Dim("u", max=6)}
    with pytest.raises(ValueError, match=f"no sizes satisfy {named}.\nDrop a"):
        MAKERS[maker](dims=dims, where=where)


def test_conditions_that_only_empty_arrays_satisfy_are_no_contradiction():
    f = px.compile(jnp.sum, dims={"a": "t"}, where=("t % 4 == 0", "t <= 3"))
    assert f(jnp.ones(0)) == 0


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    "where",
    ["t + u == 10", "5 == t", "t - u == 0", "1 == t % 4", "t % 4 + t // 4 == 2",
     "2*t + 3 == 13", "t**2 == 25"],
)  # fmt: skip
def test_equations_may_be_written_in_any_way(maker, where):
    found = MAKERS[maker](dims={"x": "t", "y": "u"}, where=where)
    if maker == "compile":
        assert found(X, X) == 10 and found.stats.traces == 1
    if maker == "infer_sizes":
        condition = constraint(where)
        assert all(evaluate_text(condition, c.example) for c in found.classes)


def test_a_name_may_hold_the_name_of_a_function():
    assert bounds_of("minutes", [constraint("2*minutes <= 9")]) == (1, 4)
