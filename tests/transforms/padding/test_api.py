"""What px.pad takes: sizes that keep what was declared, and words for all else."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pliax as px
from pliax.transforms.padding.rules import PaddingRefused


def total(x):
    return x.sum()


ONES = np.ones(8, np.float32)


@pytest.mark.parametrize("size", [3, np.int64(3), np.array(3), jnp.int32(3)])
def test_a_size_is_any_integer(size):
    padded = px.pad(total, dims={"x": "t"}, where="t <= 4")
    assert padded(ONES, sizes={"t": size}) == 3
    assert jax.jit(px.pad(total, dims={"x": "t"}))(ONES, sizes={"t": size}) == 3


@pytest.mark.parametrize("size", [3.7, "3", np.float32(3), True, None, np.array([3])])
def test_a_size_is_an_integer(size):
    with pytest.raises(TypeError, match=r"sizes says t = .* which is no integer"):
        px.pad(total, dims={"x": "t"})(ONES, sizes={"t": size})


@pytest.mark.parametrize("sizes", [3, [3], None])
def test_sizes_have_names(sizes):
    with pytest.raises(TypeError, match="which is no dictionary"):
        px.pad(total, dims={"x": "t"})(ONES, sizes=sizes)


@pytest.mark.parametrize(
    ("dims", "options", "size"),
    [
        ("t", {"where": "t <= 4"}, 6),
        ("t", {"where": ("t % 2 == 0",)}, 3),
        (px.Dim("t", multiple_of=4), {}, 6),
    ],
)
def test_sizes_keep_what_was_declared(dims, options, size):
    padded = px.pad(total, dims={"x": dims}, **options)
    assert padded(ONES, sizes={"t": 4}) == 4
    with pytest.raises(ValueError, match=r"was declared, but sizes is \{'t': "):
        padded(ONES, sizes={"t": size})


@pytest.mark.parametrize(
    ("limit", "size", "said"),
    [({"min": 3}, 1, 3), ({"max": 6}, 7, 6), ({"buckets": [6]}, 7, 6)],
)
def test_sizes_are_those_that_a_dim_allows(limit, size, said):
    padded = px.pad(total, dims={"x": {0: px.Dim("t", **limit)}})
    assert padded(ONES, sizes={"t": 5}) == 5
    text = rf"sizes says t = {size}, but Dim\('t'\) says at (least|most) {said}"
    with pytest.raises(ValueError, match=text):
        padded(ONES, sizes={"t": size})


@pytest.mark.parametrize(
    ("limit", "f"),
    [
        ({"min": 3}, lambda x: x.sum() if x.shape[0] >= 3 else x.max()),
        ({"max": 8}, lambda x: x.sum() if x.shape[0] <= 8 else x.max()),
        ({"multiple_of": 2}, lambda x: x.reshape(-1, 2).sum()),
        ({"min": 3, "multiple_of": 2}, lambda x: x[3:].sum() + x[:3].sum()),
    ],
)
def test_what_a_dim_allows_is_known_of_traced_sizes(limit, f):
    padded = px.pad(f, dims={"x": {0: px.Dim("t", **limit)}})
    assert jax.jit(lambda n: padded(ONES, sizes={"t": n}))(6) == 6


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"where": (3,)}, TypeError, "where holds 3 of type int"),
        ({"where": 3}, TypeError, "where is 3 of type int"),
        ({"where": "q <= 2"}, ValueError, "dims names no 'q'"),
        ({"min": 3}, TypeError, "min is 3, which gives no integers by name"),
        ({"min": {"t": "a"}}, TypeError, "gives no integers by name"),
        ({"min": {"q": 3}}, ValueError, "min names q, but dims names t"),
    ],
)
def test_options_are_refused_at_once(options, error, text):
    with pytest.raises(error, match=text):
        px.pad(total, dims={"x": "t"}, **options)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "missing a required argument: 'x'"),
        ((ONES, ONES), "too many positional arguments"),
        ((px.dynamic(ONES, 0),), "found px.dynamic on axes"),
    ],
)
def test_arguments_are_those_of_the_function(args, text):
    padded = px.pad(total, dims={"x": "t"})
    with pytest.raises(TypeError, match=rf"px.pad\(total\): {text}"):
        padded(*args, sizes={"t": 3})
    with pytest.raises(TypeError, match=rf"px.infer_sizes\(total\): {text}"):
        px.infer_sizes(total, *args, dims={"x": "t"})


def test_a_refusal_goes_from_process_to_process_and_is_copied():
    f = px.compile(
        lambda x: jnp.linalg.eigh(x)[1], dims={"x": "t, t"}, padding="require"
    )
    with pytest.raises(PaddingRefused) as found:
        f(np.eye(3, dtype=np.float32))
    for refusal in (pickle.loads(pickle.dumps(found.value)), copy.copy(found.value)):
        assert type(refusal) is PaddingRefused
        assert str(refusal) == str(found.value) and refusal.place == found.value.place


@pytest.mark.parametrize("bound", [4, 16])
def test_what_is_checked_of_a_size_that_is_traced_has_to_be_said(bound):
    def checked(x):
        px.check(x.shape[0] <= bound, "too long")
        return x.sum()

    def call(padded, n):
        return jax.jit(lambda n: padded(ONES, sizes={"t": n}))(n)

    declared = px.pad(checked, dims={"x": "t"}, where=f"t <= {min(bound, 8)}")
    assert call(declared, 3) == 3
    plain = px.pad(checked, dims={"x": "t"})
    assert plain(ONES, sizes={"t": 3}) == 3
    if bound >= len(ONES):
        assert call(plain, 3) == 3
        return
    with pytest.raises(PaddingRefused, match=r"(?s)where=.*too long.*checked"):
        call(plain, 3)
    with pytest.raises(ValueError, match=r"too long.*\n.*\nAsked was t <= 4, found t"):
        plain(ONES, sizes={"t": 5})


@pytest.mark.parametrize("join", [px.sym_or, px.sym_and])
def test_a_check_of_several_conditions_is_made_of_known_sizes(join):
    def checked(x):
        n = x.shape[0]
        px.check(join(n > 4, n % 2 == 0), "neither long nor even")
        return x.sum()

    def branching(x):
        n = x.shape[0]
        return x.sum() if join(n > 4, n % 2 == 0) else x.max()

    for n in range(1, 8):
        parts = n > 4, n % 2 == 0
        holds = any(parts) if join is px.sym_or else all(parts)
        assert px.pad(branching, dims={"x": "t"})(ONES, sizes={"t": n}) == (
            n if holds else 1
        )
        if holds:
            assert px.pad(checked, dims={"x": "t"})(ONES, sizes={"t": n}) == n
            continue
        with pytest.raises(
            ValueError, match=rf"neither long nor even.*\n.*\n.*t = {n}"
        ):
            px.pad(checked, dims={"x": "t"})(ONES, sizes={"t": n})
