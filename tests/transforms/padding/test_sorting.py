"""Sorting and selection: bit for bit, with NaNs, signed zeros, extremes and ties."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax
from transforms.padding.checking import check, check_each, run_padded, symbolic

import pliax as px
from pliax.transforms.padding.interpreter import run
from pliax.transforms.padding.layouts import Bucket
from pliax.transforms.padding.rules import PaddingRefused


HIGH = {"b": 3, "t": 32}
SHORT = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e5m2fnuz"]
CHOICES = [{"b": b, "t": t} for b, t in ((2, 5), (1, 1), (3, 31), (3, 32), (1, 23))]

_ODD = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -1.5]
_KINDS: dict[str, Callable[[Any, tuple[int, ...]], Any]] = {
    "float32": lambda rng, shape: rng.choice(np.array(_ODD, np.float32), shape),
    "bfloat16": lambda rng, shape: rng.choice(np.array(_ODD, jnp.bfloat16), shape),
    "int32": lambda rng, shape: _integers(rng, shape, np.int32),
    "int8": lambda rng, shape: _integers(rng, shape, np.int8),
    "uint32": lambda rng, shape: _integers(rng, shape, np.uint32),
    "bool": lambda rng, shape: rng.random(shape) < 0.5,
    "complex64": lambda rng, shape: _complex(rng, shape),
}
REAL = [kind for kind in _KINDS if kind != "complex64"]


def _integers(rng: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Half of them the least or the greatest there are."""
    info = np.iinfo(dtype)
    some = rng.integers(-3 if info.min else 0, 4, shape).astype(dtype)
    ends = rng.choice(np.array([info.min, info.max], dtype), shape)
    return np.where(rng.random(shape) < 0.5, some, ends)


def _complex(rng: Any, shape: tuple[int, ...]) -> Any:
    x = np.zeros(shape, np.complex64)
    x.real, x.imag = (_KINDS["float32"](rng, shape) for _ in range(2))
    return x


def drawn(text: str, sizes: Mapping[str, int], seed: int = 0) -> Any:
    """An array: "b, t; int32"."""
    shape, _, kind = text.partition(";")
    shape = eval(f"({shape},)", {}, dict(sizes))
    rng = np.random.default_rng((seed, *shape))
    return np.asarray(_KINDS[kind.strip() or "float32"](rng, shape))


def bits(x: Any) -> Any:
    """What an array holds, NaN's sign and payload and the sign of 0 included."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return bits(x.real), bits(x.imag)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def assert_law(
    f: Callable, *texts: str, choices: Any = CHOICES, exactly: bool = True
) -> None:
    """The law for several sizes, on bits where the sort is stable."""
    names = {n for n in HIGH if any(n in t.partition(";")[0] for t in texts)}
    choices = [{n: sizes[n] for n in sorted(names)} for sizes in choices]
    high = {n: HIGH[n] for n in sorted(names)}

    def program(*args: Any) -> Any:
        result = f(*args)
        return jax.tree.map(bits, result) if exactly else result

    check_each(
        program,
        [text.partition(";")[0] for text in texts],
        lambda sizes: [drawn(t, sizes, i) for i, t in enumerate(texts)],
        choices,
        high,
    )


# --- sort -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
def test_sort_and_argsort_of_any_dtype(kind):
    assert_law(lambda x: (jnp.sort(x), jnp.argsort(x)), f"t; {kind}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "f",
    [
        lambda x: lax.sort(x, dimension=1),
        lambda x: lax.sort(x, dimension=0),
        lambda x: jnp.sort(x, axis=None),  # a merged axis
        lambda x: jnp.sort(x, descending=True),
        lambda x: jnp.argsort(x, axis=1, descending=True),
        lambda x: jnp.sort(x.T, axis=0),
        lambda x: jnp.sort(x.reshape(-1, 1), axis=1),  # beside a merged axis
        lambda x: jnp.sort(_beside(x, -x).reshape(len_of(x), -1), axis=1),
    ],
)
def test_sort_along_any_axis(f):
    assert_law(f, "b, t")


def _beside(x: Any, y: Any) -> Any:
    return jnp.concatenate([x[..., None], y[..., None]], axis=-1)


@pytest.mark.parametrize("keys", [1, 2, 3])
def test_sort_by_several_keys_moves_the_other_operands_along(keys):
    def f(a: Any, b: Any, c: Any) -> Any:
        return tuple(lax.sort((a, b, c, lax.iota(jnp.int32, len_of(a))), num_keys=keys))

    assert_law(f, "t; bool", "t", "t; int32")


def len_of(x: Any) -> Any:
    """Its size, which may be symbolic."""
    return x.shape[0]


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: jnp.lexsort((x, y)),
        lambda x, y: jnp.argsort(jnp.argsort(y)),
        lambda x, y: lax.sort_key_val(y, x),
    ],
)
def test_orders_made_of_sorts(f):
    assert_law(f, "t", "t; int32")


def test_an_unstable_sort_gives_the_same_values():
    assert_law(lambda x: lax.sort(x, is_stable=False), "b, t; int32")
    assert_law(lambda x: lax.sort(x, is_stable=False), "b, t", exactly=False)


def test_an_unstable_sort_by_key_keeps_its_pairs():
    def f(x: Any) -> Any:
        keys, places = lax.sort(
            (x, lax.iota(jnp.int32, len_of(x))), num_keys=1, is_stable=False
        )
        return keys, jnp.sort(places)  # ties may come in any order

    assert_law(f, "t; int32")


def test_a_sort_knows_what_its_padding_holds():
    x = drawn("t; int32", {"t": 5})
    traced = symbolic(lambda x: lax.sort(x), ["t"], [x], {"t": 5})
    bucket = Bucket({"t": (1, 8)}, {"t": np.int32(5)})
    full = bucket.simple(
        np.arange(8, dtype=np.int32), traced.jaxpr.invars[0].aval.shape
    )
    (result,) = run(bucket, traced.jaxpr, traced.consts, [full])
    assert result.fill == np.iinfo(np.int32).max
    np.testing.assert_array_equal(result.data[5:], result.fill)


@given(st.lists(st.sampled_from(_ODD), min_size=1, max_size=12), st.booleans())
@pytest.mark.slow
def test_a_stable_sort_of_anything(values, descending):
    x = np.array(values, np.float32)
    sizes = {"t": len(values)}

    def f(x: Any) -> Any:
        places = jnp.argsort(x, descending=descending)
        return bits(jnp.sort(x, descending=descending)), places

    check(f, ["t"], [x], sizes, {"t": 12})


# --- top_k ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REAL)
def test_top_k_of_any_dtype(kind):
    assert_law(lambda x: lax.top_k(x, len_of(x)), f"t; {kind}")


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("axis", [0, 1])
def test_top_k_along_any_axis(k, axis):
    choices = [{"b": b, "t": t} for b, t in ((2, 5), (1, 7), (3, 31), (3, 32))]
    axes = ("b, t", "t, b")[1 - axis]
    assert_law(lambda x: lax.top_k(x, k, axis=axis), axes, choices=choices)
    assert_law(lambda x: lax.top_k(x, k, axis=axis), f"{axes}; int8", choices=choices)


@pytest.mark.parametrize(
    "count",
    [
        lambda t: t - t // 2,
        lambda t: (t + 1) // 2,
        lambda t: -(-t // 3),
        lambda t: t * 2 - t - 2 * (t // 2) + t // 2,  # whose bound exceeds t's
    ],
)
def test_top_k_of_a_symbolic_number(count):
    assert_law(lambda x: lax.top_k(x, count(len_of(x))), "t; int32")


@pytest.mark.parametrize("value", [-np.inf, -np.nan, np.nan])
@pytest.mark.parametrize("is_stable", [True, False])
def test_top_k_of_equal_elements_takes_the_first_valid_ones(value, is_stable):
    x = np.full(5, value, np.float32)

    def f(x: Any) -> Any:
        return lax.top_k(x, 4, is_stable=is_stable)

    check(f, ["t"], [x], {"t": 5}, {"t": 8})


def test_top_k_of_the_lowest_integers_takes_valid_ones():
    x = np.full(5, np.iinfo(np.int32).min, np.int32)
    check(lambda x: lax.top_k(x, 4), ["t"], [x], {"t": 5}, {"t": 8})


def test_top_k_in_a_merged_axis():
    choices = [{"b": 2, "t": 5}, {"b": 1, "t": 4}, {"b": 3, "t": 32}]
    assert_law(lambda x: lax.top_k(x.reshape(-1), 4), "b, t", choices=choices)


@pytest.mark.parametrize("axis", [0, 1])
def test_partition_has_the_least_in_front(axis):
    choices = [{"b": b, "t": t} for b, t in ((2, 5), (1, 2), (3, 32))]

    def f(x: Any) -> Any:
        return jnp.sort(jnp.partition(x, 1, axis=1 - axis)[:2], axis=0)

    text = "t, 3; int32" if axis else "3, t; int32"
    assert_law(f, text, choices=choices)


# --- what is built on them ------------------------------------------------------------


def _values(text: str, sizes: Mapping[str, int], seed: int = 0) -> Any:
    """Distinct dyadic numbers, which have no ties and no NaN."""
    shape = eval(f"({text},)", {}, dict(sizes))
    rng = np.random.default_rng((seed, *shape))
    count = int(np.prod(shape))
    return (rng.permutation(count).reshape(shape) / 8).astype(np.float32)


@pytest.mark.parametrize(
    "f",
    [
        jnp.median,
        lambda x: jnp.median(x, axis=0),
        lambda x: jnp.median(x, axis=1, keepdims=True),
        lambda x: jnp.quantile(x, 0.25, axis=1, method="lower"),
        lambda x: jnp.percentile(x, 50.0, axis=1, method="midpoint"),
    ],
)
def test_quantiles(f):
    """At points that no rounding of q (n - 1) moves over a border."""
    choices = [{"b": b, "t": t} for b, t in ((2, 5), (1, 1), (3, 31), (3, 32))]
    check_each(
        f, ["b, t"], lambda s: [_values("b, t", s)], choices, HIGH, tolerance=1e-6
    )


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (jnp.sort(x) * jnp.arange(len_of(x))).sum(),
        lambda x: (lax.top_k(x, 3)[0] * jnp.arange(3)).sum(),
        lambda x: jnp.median(x),
    ],
)
def test_gradients_go_where_the_values_came_from(f):
    choices = [{"t": t} for t in (5, 3, 31, 32)]
    with jax.numpy_dtype_promotion("standard"):
        check_each(jax.grad(f), ["t"], lambda s: [_values("t", s)], choices, {"t": 32})


# --- refusals -------------------------------------------------------------------------


def test_approximate_search_over_a_padded_axis_is_refused():
    x = _values("t", {"t": 5})
    traced = symbolic(lambda x: lax.approx_max_k(x, 2), ["t"], [x], {"t": 5})
    with pytest.raises(PaddingRefused, match="depends on the length of the axis"):
        run_padded(traced, [x], {"t": 5}, {"t": 8})


@pytest.mark.parametrize("find", [lax.approx_max_k, lax.approx_min_k])
def test_approximate_search_beside_a_padded_axis(find):
    choices = [{"b": b} for b in (2, 1, 3)]
    high = {"b": 3}
    check_each(
        lambda x: find(x, 2), ["b, 9"], lambda s: [_values("b, 9", s)], choices, high
    )


ORDERED = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "argmax": jnp.argmax,
    "argmin": jnp.argmin,
    "cummax": lambda x: lax.cummax(x, reverse=True),
    "sort": jnp.sort,
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "dot": lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*SHORT, "float8_e8m0fnu"])
@pytest.mark.parametrize("f", ORDERED.values(), ids=ORDERED)
def test_floats_of_8_bits_have_an_order_or_are_refused(f, dtype):
    """Many have no infinity, some one NaN, and one no 0."""
    compiled = px.compile(f, dynamic=True)
    for t in (6, 7, 5):
        x = np.resize([1.0, 2, 3] if dtype == "float8_e8m0fnu" else [-1.0, -2, -3], t)
        x = x.astype(getattr(jnp, dtype))
        found, wanted = (np.asarray(g(x), np.float32) for g in (compiled, jax.jit(f)))
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("index_dtype", [np.int8, np.uint8, np.int16])
@pytest.mark.parametrize("find", [lax.argmax, lax.argmin])
def test_places_in_short_integers_are_those_of_valid_elements(find, index_dtype):
    """An axis may be longer in its bucket than such an integer counts."""
    dims = {"x": {1: px.Dim("t", buckets=[70_000])}}
    compiled = px.compile(
        lambda x: find(x, 1, index_dtype), dims=dims, padding="require"
    )
    for t in (100, 1, 128, 200, 260):
        least = [np.zeros((1, t), bool), np.full((1, t), -np.inf, np.float32)]
        for x in (*least, *(~x for x in least[:1]), -least[1], drawn("2, t", {"t": t})):
            wanted = jax.jit(lambda x: find(x, 1, index_dtype))(x)
            np.testing.assert_array_equal(compiled(x), wanted)


COMPLEX = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "cummax": lambda x: lax.cummax(x, reverse=True),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, reverse=True),
    "window": lambda x: lax.reduce_window(
        x, -jnp.inf + 0j, lax.max, (3,), (1,), "SAME"
    ),
}


@pytest.mark.parametrize("f", COMPLEX.values(), ids=COMPLEX)
def test_the_order_of_complex_numbers_has_no_ends(f):
    """NaN in one of the parts is neither below nor above what padding could hold."""
    compiled = px.compile(f, dims={"x": "t"})
    for t in (5, 4):
        x = _complex(np.random.default_rng(t), (t,))
        np.testing.assert_array_equal(compiled(x), jax.jit(f)(x))
    with pytest.raises(PaddingRefused, match="no complex64 is below or above all"):
        px.compile(f, dims={"x": "t"}, padding="require")(x)


def test_complex_numbers_are_ordered_along_an_axis_without_padding():
    compiled = px.compile(lambda x: x.max(1), dims={"x": "b, _"}, padding="require")
    for b in (2, 3):
        x = _complex(np.random.default_rng(b), (b, 4))
        np.testing.assert_array_equal(compiled(x), jnp.max(x, 1))
