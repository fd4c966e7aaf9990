"""Which integers are constants is found by traces with some of them at run time."""

from hypothesis import given, strategies as st

from pliax.transforms._needed_integers import needed_integers


ERROR = TypeError("of all together")
NUMBERS = st.integers(1, 40)


def traces_of(refuses):
    """A failure of traces, and what it was asked."""
    asked = []

    def failure(integers):
        asked.append(tuple(integers))
        return TypeError(f"of {integers}") if refuses(set(integers)) else None

    return failure, asked


@given(NUMBERS, st.data())
def test_those_that_fail_alone_are_found_with_their_own_reasons(count, data):
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=2))
    failure, asked = traces_of(lambda some: some & bad)
    found = needed_integers(range(count), failure, ERROR)
    assert bad <= set(found)
    if len(asked) < 16 and count > 1:
        assert found == {i: f"of range({i}, {i + 1})" for i in bad}


@given(NUMBERS, st.data())
def test_few_traces_find_them_and_none_is_missed(count, data):
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    failure, asked = traces_of(lambda some: some & bad)
    assert bad <= set(needed_integers(range(count), failure, ERROR))
    assert len(asked) <= 17


@given(NUMBERS)
def test_all_are_constants_where_no_single_one_is_at_fault(count):
    for refuses in (lambda some: True, lambda some: len(some) == count):
        failure, _ = traces_of(refuses)
        found = needed_integers(range(count), failure, ERROR)
        assert found == dict.fromkeys(range(count), "of all together")
