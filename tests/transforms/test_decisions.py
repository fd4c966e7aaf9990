"""What one run found to change, the next knows; files merge, and are never half."""

import json
import os
import tempfile

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import pliax as px
from pliax.transforms._decisions import (
    Decisions,
    Learned,
    merged,
    read_decisions,
    write_decisions,
)


def counting(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "decisions.json"


def learn(f):
    """Shows a function that the length of its argument changes."""
    for size in (3, 4):
        f(counting(size))


FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


# A second run ------------------------------------------------------------------------


def scaled(x, y, n):
    return jnp.concatenate([x, y]) * n


CALLS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(-3, 9)),
    min_size=1, max_size=5,
)  # fmt: skip


@given(calls=CALLS)
@settings(FIXTURE, max_examples=8)
def test_a_second_run_traces_once_and_means_the_same(path, calls):
    path.unlink(missing_ok=True)
    traces = []
    for _ in range(2):
        f = px.compile(scaled, decisions=path)
        for a, b, n in calls:
            x, y = counting(a), counting(b)
            np.testing.assert_array_equal(
                f(x, y, n), np.concatenate([x, y]) * np.float32(n)
            )
        f.save_decisions()
        traces.append(f.stats.traces)
    assert traces[1] == 1 <= traces[0]


def test_a_first_run_needs_no_file_and_writes_none(path):
    f = px.compile(lambda x: x * 2, decisions=path)
    f(counting(3))
    assert not path.exists()


def test_only_what_changed_is_dynamic_in_the_next_run(path):
    f = px.compile(lambda x, w: x @ w)
    for b in (3, 4, 5, 5):
        f(counting(b, 2), counting(2, 4))
    f.save_decisions(path)
    (function,) = json.loads(path.read_text())["functions"].values()
    assert function["calls"] == {
        "x: float32[_,_], w: float32[_,_]": {
            "x.shape[0]": {"size": "s0", "seen": {"3": 1, "4": 1, "5": 2}}
        }
    }
    g = px.compile(f.__wrapped__, decisions=path)
    for b in (7, 6):
        g(counting(b, 2), counting(2, 4))
    assert g.stats.traces == 1
    g(counting(7, 3), counting(3, 4))  # an inner size that no run has seen to change
    assert g.stats.traces == 2


def test_kinds_of_calls_are_apart_and_named_by_their_static_values(path):
    def f(x, mode):
        return x * 2 if mode == "twice" else x

    g = px.compile(f, static_argnames="mode")
    for size in (3, 4):
        g(counting(size), "twice")
    g(counting(3), "once")
    g(counting(3).astype(np.int32), "twice")
    g.save_decisions(path)
    (function,) = json.loads(path.read_text())["functions"].values()
    assert list(function["calls"]) == ["x: float32[_], mode='twice'"]


def test_a_size_of_an_earlier_run_gives_way_where_the_program_fixes_it(path):
    def f(x):
        return x * 2

    first = px.compile(f)
    learn(first)
    first.save_decisions(path)
    f.__code__ = (lambda x: x * len(x)).__code__
    second = px.compile(f, decisions=path)
    np.testing.assert_array_equal(second(counting(3)), counting(3) * 3)
    assert [guard.condition for guard in second.guards] == ["s0 == 3"]


def test_words_of_the_user_go_before_the_file(path):
    f = px.compile(lambda x: x * 2)
    learn(f)
    f.save_decisions(path)
    for dynamic, mark in ((False, lambda x: x), (None, px.static)):
        g = px.compile(f.__wrapped__, decisions=path, dynamic=dynamic)
        for size in (3, 4, 5):
            g(mark(counting(size)))
        assert g.stats.traces == 3


def test_a_size_never_traced_for_all_is_not_saved(path):
    f = px.compile(jnp.vander)
    for size in (3, 4):
        f(counting(size))
    f.save_decisions(path)
    (function,) = json.loads(path.read_text())["functions"].values()
    assert "traced size by size" in f.explain() and function["calls"] == {}


def test_buckets_are_placed_by_the_sizes_of_earlier_runs(path):
    dims = {"x": px.Dim("t", max=1000)}
    f = px.compile(lambda x: x.sum(), dims=dims)
    for _ in range(200):
        f(counting(301))
    f.save_decisions(path)
    g = px.compile(f.__wrapped__, dims=dims, decisions=path)
    assert g(np.ones(301, np.float32)) == 301 and g.stats.waste == 0.0
    assert f.stats.waste > 0.1
    # One call of each geometric length is added: other sizes have a bucket near them.
    assert g(np.ones(80, np.float32)) == 80 and g.stats.groups["t<=120"].calls == 1
    assert "expected waste of t: 0.0% in 1 bucket, over the sizes of e" in g.explain()


# Files -------------------------------------------------------------------------------


SEEN = st.dictionaries(st.integers(-5, 99), st.integers(0, 9), max_size=4)
LEARNED = st.builds(Learned, st.sampled_from(["s0", "s1", "s2"]), SEEN)
NAMES = st.sampled_from(["x.shape[0]", "y.shape[1]", "n", "m"])
DECISIONS = st.builds(
    Decisions,
    st.dictionaries(
        st.sampled_from(["a", "b"]), st.dictionaries(NAMES, LEARNED, max_size=4)
    ),
    st.dictionaries(st.sampled_from(["t", "b"]), SEEN),
)


def partition(learned):
    """Which names share a label."""
    groups = {}
    for name, x in learned.items():
        groups.setdefault(x.label, set()).add(name)
    return {frozenset(group) for group in groups.values()}


@given(a=DECISIONS, b=DECISIONS)
def test_merging_is_a_join(a, b):
    ab = merged(a, b)
    assert merged(ab, ab) == ab == merged(b, a)
    assert merged(ab, a) == ab == merged(ab, b)
    for kind, learned in a.calls.items():
        assert learned.keys() <= ab.calls[kind].keys()
        for group in partition(ab.calls[kind]):  # no size is equal to more than it was
            inner = group & learned.keys()
            assert not inner or any(inner <= whole for whole in partition(learned))


@given(a=DECISIONS, b=DECISIONS)
@settings(FIXTURE)
def test_what_is_written_is_read_and_writing_twice_changes_nothing(path, a, b):
    path.unlink(missing_ok=True)
    write_decisions(path, "f", a, "px.compile(f)")
    write_decisions(path, "g", b, "px.compile(g)")
    first = path.read_bytes()
    write_decisions(path, "f", a, "px.compile(f)")
    assert path.read_bytes() == first
    found = read_decisions(path, "f", "px.compile(f)")
    assert merged(found, a) == merged(a, a) == merged(found, found)
    assert read_decisions(path, "h", "px.compile(h)").calls == {}
    assert os.listdir(path.parent) == [path.name]


def text_of(**changes):
    return json.dumps(
        {"format": "pliax decisions", "version": 1, "functions": {}} | changes
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is not JSON"),
        ("[1]", "it is not a file of decisions"),
        ('{"version": 1}', "it is not a file of decisions"),
        (text_of(version=2), "its version is 2, and 1 is read here"),
        (text_of(functions=[]), "an entry is malformed"),
        (text_of(functions={"f": {"calls": {}}}), "an entry is malformed"),
        (
            text_of(functions={"f": {"calls": {}, "sizes": {"t": {"many": 1}}}}),
            "malformed",
        ),
        (
            text_of(functions={"f": {"calls": {}, "sizes": {"t": {"3": -1}}}}),
            "malformed",
        ),
    ],
)
def test_a_file_that_is_none_is_refused_by_name_and_kept(path, text, why):
    path.write_text(text)
    with pytest.raises(ValueError, match=why) as caught:
        px.compile(lambda x: x, decisions=path)
    assert str(path) in str(caught.value) and "Delete the file" in str(caught.value)
    with pytest.raises(ValueError, match=why):
        px.compile(lambda x: x).save_decisions(path)
    assert path.read_text() == text


def test_what_is_no_path_is_refused():
    with pytest.raises(TypeError, match="decisions is 3 of type int"):
        px.compile(lambda x: x, decisions=3)
    with pytest.raises(TypeError, match="the path of save_decisions is 3 of type int"):
        px.compile(lambda x: x).save_decisions(3)
    with pytest.raises(ValueError, match=r"(?s)Is a directory.*may be read and writ"):
        px.compile(lambda x: x, decisions=tempfile.gettempdir())
    with pytest.raises(ValueError, match="save_decisions has no path"):
        px.compile(lambda x: x).save_decisions()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    f = px.compile(lambda x: x * 2)
    learn(f)
    f.save_decisions(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError("no space left on device")

    f(counting(5))
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        f.save_decisions(path)
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]
