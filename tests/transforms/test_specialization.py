"""Buckets: no placement of as many lengths wastes less, and waste is what was said."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

import pliax as px
from pliax.transforms._buckets import Placement
from pliax.transforms.specialization import expected_waste, geometric, listed


HISTOGRAMS = st.dictionaries(
    st.integers(1, 30), st.integers(1, 50), min_size=1, max_size=6
)


@given(histogram=HISTOGRAMS, steps=st.integers(1, 4))
def test_no_other_lengths_waste_less_of_a_histogram(histogram, steps):
    placed = geometric(1, 30, histogram, steps=steps)
    assert len(placed.lengths) <= steps and placed.lengths[-1] == 30
    inner = [n for n in histogram if n < 30]
    others = [
        listed((*lengths, 30))
        for count in range(min(steps, len(inner) + 1))
        for lengths in itertools.combinations(inner, count)
    ]
    least = min(expected_waste(buckets, histogram) for buckets in others)
    assert expected_waste(placed, histogram) == pytest.approx(least)


@given(low=st.integers(1, 40), more=st.integers(0, 5000), steps=st.integers(1, 20))
def test_geometric_lengths_hold_every_size_in_so_many_steps(low, more, steps):
    lengths = geometric(low, low + more, None, steps=steps).lengths
    assert len(lengths) <= steps and lengths[-1] == low + more
    assert list(lengths) == sorted(set(lengths)) and lengths[0] >= low


@given(histogram=HISTOGRAMS)
def test_the_waste_of_calls_is_the_waste_expected_of_their_histogram(histogram):
    dim = px.Dim("t", max=30, histogram=histogram)
    f = px.compile(lambda x: x.sum(), dims={"x": dim})
    for size, count in histogram.items():
        for _ in range(count):
            f(np.ones(size, np.float32))
    wanted = expected_waste(geometric(1, 30, histogram), histogram)
    assert f.stats.waste == pytest.approx(wanted)
    buckets = f.stats.compilations
    words = f"{buckets} bucket" + ("s" if buckets > 1 else "")
    assert f"expected waste of t: {wanted:.1%} in {words}, over its h" in f.explain()


def test_explain_tells_expected_waste_once_for_each_size_with_a_histogram():
    dims = {
        "x": {
            0: px.Dim("b"),
            1: px.Dim("t", buckets=[4, 8], histogram={4: 1, 5: 1}),
        },
        "y": {
            0: px.Dim("n", max=9, histogram={9: 1}, specialize_on=[lambda n: n == 3])
        },
    }
    f = px.compile(lambda x, y: x.sum() + y.sum(), dims=dims)
    lines = [x for x in f.explain().splitlines() if x.startswith("expected waste")]
    assert lines == [
        "expected waste of n: 0.0% in 1 bucket, over its histogram",
        "expected waste of t: 25.0% in 2 buckets, over its histogram",
    ]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ({"buckets": lambda n: n // 0}, "the buckets of t"),
        ({"specialize_on": [lambda n: n > 9, lambda n: n // 0]}, "specialize_on[1] of"),
    ],
)
def test_an_error_of_the_users_function_says_who_asked(words, asked):
    f = px.compile(lambda x: x.sum(), dims={"x": px.Dim("t", **words)})
    with pytest.raises(ZeroDivisionError) as caught:
        f(np.ones(3, np.float32))
    (note,) = caught.value.__notes__
    assert asked in note and note.endswith("asked about the size 3.")
    assert __file__ in note


def test_an_answer_that_is_no_truth_says_who_asked():
    vague = px.Dim("t", specialize_on=[lambda n: np.array([n, 1]) > 1])
    with pytest.raises(ValueError, match="truth value") as caught:
        px.compile(lambda x: x.sum(), dims={"x": vague})(np.ones(3, np.float32))
    assert "specialize_on[0] of t" in caught.value.__notes__[0]


@pytest.mark.parametrize("function", [lambda: True, lambda n, m: n, lambda *, n: n])
def test_a_function_of_sizes_takes_one_argument(function):
    with pytest.raises(
        TypeError, match=r"Dim\('t'\): specialize_on\[1\] is <lambda>.*"
    ):
        px.Dim("t", specialize_on=[lambda n, m=1: n > m, function])
    with pytest.raises(TypeError, match=f"buckets is <lambda>.*{__file__}:.*one size"):
        px.Dim("t", buckets=function)
    with pytest.raises(TypeError, match="Pass a function of one argument"):
        px.compile(
            lambda x: px.ragged.boolean_mask(x, x > 0, specialize_on=[function])
        )(np.ones(3, np.float32))


# Conditions of specialize_on ----------------------------------------------------------


def placed(condition, high):
    """The intervals of sizes, for a Dim with one condition and geometric buckets."""
    dim = px.Dim("t", max=high, specialize_on=[condition])
    placement = Placement({"t": dim}, {}, "f")

    def interval(size):
        special = placement.special({"t": size})
        return placement.interval(dim.symbol, size, special and special[1])

    return interval


HIGHS = st.sampled_from([64, 4096, 10**5, 10**6])


@given(high=HIGHS, data=st.data())
def test_a_condition_that_holds_of_one_size_has_one_executable_of_that_size(high, data):
    size = data.draw(st.integers(1, high))
    interval = placed(lambda t: t == size, high)
    assert interval(size) == (size, size)
    other = data.draw(st.integers(1, high).filter(lambda t: t != size))
    low, end = interval(other)
    assert low <= other <= end


@given(high=HIGHS, data=st.data())
def test_sizes_above_a_bound_share_executables(high, data):
    bound = data.draw(st.integers(1, high))
    interval = placed(lambda t: t >= bound, high)
    sizes = data.draw(st.lists(st.integers(bound, high), min_size=1))
    found = {interval(size) for size in sizes}
    assert len({end for _, end in found}) <= 14
    assert all(low <= size <= end for size in sizes for low, end in [interval(size)])


@given(high=HIGHS, step=st.sampled_from([2, 32, 128]), data=st.data())
def test_buckets_of_multiples_are_multiples_and_as_many_as_buckets(high, step, data):
    assume(high >= step)
    interval = placed(lambda t: t % step == 0, high)
    number = data.draw(st.integers(1, high // step))
    low, end = interval(step * number)
    assert low <= step * number <= end <= high and end % step == 0 == low % step
    multiples = range(step, high + 1, max(step, high // 512 // step * step))
    assert len({interval(n) for n in multiples}) <= 14
