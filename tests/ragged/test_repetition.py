"""Repeats equal NumPy's; what exceeds the bound is an error, never an answer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from ragged.laws import BUCKET, same, valid

import pliax as px
from pliax.ragged import repeat


REPEATS = st.lists(st.integers(0, 4), min_size=1, max_size=BUCKET)
ROWS = px.compile(
    lambda x, repeats: repeat(x, repeats, bound=4 * BUCKET),
    dims={"x": "t, _", "repeats": "t"},
)
SUMS = px.compile(
    lambda x, repeats: jax.ops.segment_sum(
        repeat(x, repeats, bound=4 * BUCKET),
        repeat(jnp.arange(x.shape[0]), repeats, bound=4 * BUCKET),
        x.shape[0],
    ),
    dims={"x": "t", "repeats": "t"},
)


@given(repeats=REPEATS)
def test_repeat_is_that_of_numpy(repeats):
    counts = np.array(repeats, np.int32)
    x = np.arange(2 * len(counts), dtype=np.float32).reshape(-1, 2)
    wanted = np.repeat(x, counts, axis=0)
    same(valid(repeat(x, counts, bound=4 * BUCKET)), wanted)
    same(valid(repeat(x.T, counts, axis=-1, bound=4 * BUCKET)), wanted.T)
    same(valid(ROWS(x, counts)), wanted)
    assert ROWS.stats.traces == 1


@given(repeats=REPEATS)
def test_a_segment_sum_undoes_a_repeat(repeats):
    counts = np.array(repeats, np.int32)
    x = np.arange(len(counts), dtype=np.float32)
    same(SUMS(x, counts), x * counts)


def test_one_number_repeats_every_element_and_an_empty_array_has_none():
    same(valid(repeat(jnp.arange(3), 2, bound=6)), np.repeat(np.arange(3), 2))
    same(valid(repeat(jnp.zeros(0), 2, bound=6)), np.zeros(0))
    same(valid(repeat(jnp.arange(3), 0, bound=0)), np.zeros(0))


def test_gradients_count_the_repeats():
    counts = np.array([2, 0, 3], np.int32)
    f = px.compile(jax.grad(lambda x: (repeat(x, counts, bound=8) ** 2).sum()))
    same(f(np.array([1.0, 2.0, 3.0], np.float32)), np.array([4.0, 0.0, 18.0]))


@pytest.mark.parametrize("repeats", [[3, 3, 3], [2, -1, 2], [2**30] * 3])
def test_more_than_the_bound_or_less_than_none_is_an_error(repeats):
    x, counts = np.arange(3.0, dtype=np.float32), np.array(repeats, np.int32)
    message = "add up to more than bound=8, or one is negative"
    with pytest.raises(ValueError, match=message):
        repeat(x, counts, bound=8).to_numpy()
    f = px.compile(lambda x, n: repeat(x, n, bound=8).sum())
    assert f(x, np.array([3, 3, 2], np.int32)) == 7
    with pytest.raises(ValueError, match=message + ".*\n  at .*test_repetition.py:"):
        f(x, counts)
    with pytest.raises(ValueError, match=message):  # of an argument
        px.compile(jnp.sum)(repeat(x, counts, bound=8))
    assert f(x, np.array([0, 0, 1], np.int32)) == 2
    assert f.stats.compilations == 1


def test_the_bound_may_be_a_size():
    f = px.compile(lambda x: repeat(x, 2, bound=2 * x.shape[0]), dims={"x": "t"})
    for length in (3, 4, 7):
        x = np.arange(length, dtype=np.float32)
        same(valid(f(x)), np.repeat(x, 2))


def test_what_does_not_fit_is_an_error():
    x = jnp.ones((4, 3))
    with pytest.raises(TypeError, match="the repeats hold float32, not integers"):
        repeat(x, jnp.ones(4), bound=8)
    with pytest.raises(ValueError, match=r"repeats of shape \(3,\) for axis 0"):
        repeat(x, jnp.ones(3, jnp.int32), bound=8)
    with pytest.raises(ValueError, match="axis 2 of an array of shape"):
        repeat(x, 2, axis=2, bound=8)
    with pytest.raises(ValueError, match="axis None of an array of shape"):
        repeat(x, 2, axis=None, bound=8)
    for bound in (-3, 2.0, (8,)):
        with pytest.raises(ValueError, match=f"bound is {re.escape(repr(bound))}"):
            repeat(x, 2, bound=bound)
