"""Pooling of any shape, its derivatives, and windows whose shape is symbolic."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax
from transforms.padding.checking import check, check_each, run_padded, symbolic

from pliax.transforms.padding.rules import PaddingRefused


HIGH = {"b": 3, "s": 6, "t": 8}
CHOICES = [
    {"b": 2, "s": 4, "t": 5},
    {"b": 1, "s": 3, "t": 3},
    {"b": 3, "s": 5, "t": 7},
    {"b": 3, "s": 6, "t": 8},
]
PADDINGS: dict[str, Any] = {
    "same": "SAME",
    "lower": "SAME_LOWER",
    "valid": "VALID",
    "more behind": ((0, 0), (1, 4)),
    "more in front": ((0, 0), (2, 0)),
    "less": ((0, 0), (-1, -1)),
}
_SLOW = pytest.mark.slow
KINDS = {"sum": (0.0, lax.add), "max": (-np.inf, lax.max), "min": (np.inf, lax.min)}
# The fast tests take max for min: the two differ in a sign.
SOME_KINDS = ["sum", "max", pytest.param("min", marks=_SLOW)]


def eighths(text: str, sizes: Mapping[str, int], seed: int = 0) -> Any:
    """Small multiples of 1/8, whose sums are exact; few, so that many are equal."""
    shape = eval(f"({text},)", {}, dict(sizes))
    rng = np.random.default_rng((seed, *shape))
    return (rng.integers(-8, 9, shape) / 8).astype(np.float32)


def assert_law(
    f: Callable, *specs: str, choices: Any = CHOICES, make: Any = eighths
) -> None:
    names = [n for n in HIGH if any(n in spec for spec in specs)]
    check_each(
        f,
        specs,
        lambda sizes: [make(spec, sizes, i) for i, spec in enumerate(specs)],
        [{n: sizes[n] for n in names} for sizes in choices],
        {n: HIGH[n] for n in names},
    )


def pool(kind: str, *shape: Any, **options: Any) -> Callable[[Any], Any]:
    start, function = KINDS[kind]
    options = {"window_strides": (1,) * len(shape), "padding": "VALID", **options}
    return lambda x: lax.reduce_window(x, start, function, shape, **options)


# --- windows of fixed shape -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("stride", [1, 2, pytest.param(3, marks=_SLOW)])
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_pooling_along_a_padded_axis(kind, stride, padding):
    strides, padding = (1, stride), PADDINGS[padding]
    f = pool(kind, 1, 3, window_strides=strides, padding=padding)
    assert_law(f, "b, t")


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_pooling_an_image(kind):
    strides = (1, 2, 1, 1)
    f = pool(kind, 1, 2, 3, 1, window_strides=strides, padding="SAME")
    assert_law(f, "b, s, t, 2")
    assert_law(f, "b, 5, 4, 2")  # a batch is all that is padded


@pytest.mark.slow
@pytest.mark.parametrize("base", [1, 2])
@pytest.mark.parametrize("apart", [1, 2])
def test_pooling_dilated_elements_with_dilated_windows(base, apart):
    for kind in KINDS:
        options = {"base_dilation": (1, base), "window_dilation": (1, apart)}
        f = pool(kind, 1, 3, padding=((0, 0), (2, 1)), **options)
        assert_law(f, "b, t")


def test_pooling_integers_and_nan():
    f = pool("max", 1, 3, padding="SAME")
    assert_law(lambda x: lax.reduce_window(
        lax.convert_element_type(x * 8, jnp.int8), np.int8(-128), lax.max,
        (1, 3), (1, 2), "SAME",
    ), "b, t")  # fmt: skip

    def make(text: str, sizes: Mapping[str, int], seed: int) -> Any:
        x = eighths(text, sizes, seed)
        return np.where(x > 0.75, np.nan, np.where(x < -0.75, -np.inf, x))

    assert_law(f, "b, t", make=make)
    assert_law(pool("sum", 1, 3, padding="SAME"), "b, t", make=make)


def test_pooling_beside_a_merged_axis():
    f = pool("max", 1, 2, window_strides=(1, 2))
    assert_law(lambda x: f(x.reshape(-1, 4)), "b, t, 4")
    assert_law(lambda x: f(x.reshape(2, -1)), "2, b, t")


def test_pooling_under_vmap():
    f = pool("max", 3, window_strides=(2,), padding="SAME")
    assert_law(jax.vmap(jax.vmap(f)), "b, s, t")


def test_the_length_of_a_pooled_axis_can_be_used():
    f = pool("sum", 1, 3, window_strides=(1, 2), padding="SAME")
    with jax.numpy_dtype_promotion("standard"):
        assert_law(lambda x: f(x) * f(x).shape[1], "b, t")


def test_nothing_is_left_of_an_axis_shorter_than_the_window():
    f = pool("max", 1, 3)
    choices = [{"b": 2, "t": 2}, {"b": 1, "t": 1}, {"b": 3, "t": 8}]
    assert_law(f, "b, t", choices=choices)


# --- any function ---------------------------------------------------------------------


@pytest.mark.parametrize("padding", PADDINGS)
def test_windows_reduced_by_any_function(padding):
    def f(x: Any) -> Any:
        return lax.reduce_window(
            x, jnp.float32(1), lax.mul, (1, 3), (1, 2), PADDINGS[padding]
        )

    assert_law(f, "b, t")


def test_the_starting_value_counts_once_though_the_padding_is_seen():
    def f(x: Any) -> Any:
        start = jnp.float32(5)
        return lax.reduce_window(x, start, lax.add, (1, 3), (1, 1), "SAME")

    assert_law(f, "b, t")


def test_windows_of_two_operands():
    """The place of the greatest element, by a function of pairs."""

    def later(a: Any, b: Any) -> Any:
        first = a[0] >= b[0]
        return tuple(lax.select(first, *c) for c in zip(a, b, strict=True))

    def f(x: Any) -> Any:
        places = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        starts = (-jnp.inf, jnp.int32(-1))
        return lax.reduce_window((x, places), starts, later, (1, 3), (1, 2), "SAME")

    assert_law(f, "b, t")


# --- derivatives ----------------------------------------------------------------------


def loss(f: Callable) -> Callable:
    """Not linear in what is pooled, and different at each place."""
    return lambda x: (f(x) ** 2 * (1 + jnp.arange(f(x).shape[-1]))).sum()


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["same", "lower", "valid", "more behind"])
@pytest.mark.parametrize("stride", [1, 2, pytest.param(3, marks=_SLOW)])
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_gradients_of_pooling(kind, stride, padding):
    strides, padding = (stride,), PADDINGS[padding]
    padding = padding[1:] if isinstance(padding, tuple) else padding
    f = pool(kind, 3, window_strides=strides, padding=padding)
    with jax.numpy_dtype_promotion("standard"):
        assert_law(jax.grad(loss(f)), "t")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_gradients_of_pooling_an_image(kind):
    f = pool(kind, 1, 2, 3, 1, window_strides=(1, 2, 2, 1), padding="SAME")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert_law(jax.grad(loss(f)), "b, s, t, 2")
        assert_law(jax.grad(loss(f)), "b, 5, 4, 2")
        assert_law(jax.grad(lambda x: loss(f)(x.reshape(-1, 5, 4, 2))), "b, t, 40")


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_tangents_of_pooling(kind, padding):
    f = pool(kind, 1, 3, window_strides=(1, 2), padding=padding)
    assert_law(lambda x, v: jax.jvp(f, (x,), (v,)), "b, t", "b, t")

    def make(text: str, sizes: Mapping[str, int], seed: int) -> Any:
        x = eighths(text, sizes, seed)
        return x if seed else np.where(x > 0.5, np.nan, np.where(x < 0, np.inf, x))

    assert_law(lambda x, v: jax.jvp(f, (x,), (v,)), "b, t", "b, t", make=make)


def test_tangents_of_pooling_dilated_elements():
    options = {"padding": ((0, 0), (1, 2)), "base_dilation": (1, 2)}
    f = pool("max", 1, 3, window_dilation=(1, 2), **options)
    assert_law(lambda x, v: jax.jvp(f, (x,), (v,)), "b, t", "b, t")


@_SLOW
def test_gradients_of_gradients_of_pooling():
    f = pool("max", 3, window_strides=(2,), padding="SAME")
    with jax.numpy_dtype_promotion("standard"):
        g = jax.grad(loss(f))
        assert_law(jax.grad(lambda x: (g(x) ** 2).sum()), "t")


# --- windows of symbolic shape --------------------------------------------------------


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_one_window_over_all_of_an_axis(kind):
    assert_law(lambda x: pool(kind, 1, x.shape[1])(x), "b, t")
    assert_law(lambda x: pool(kind, 1, *x.shape[1:3], 1)(x), "b, s, t, 2")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_gradients_of_one_window_over_all_of_an_axis(kind):
    f = pool
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert_law(jax.grad(lambda x: loss(f(kind, x.shape[0]))(x)), "t")
        assert_law(jax.grad(lambda x: loss(f(kind, 1, x.shape[1], 1))(x)), "b, t, 2")


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize(
    "window",
    [
        lambda t: ((t,), (1,), ((t - 1, 0),)),  # everything so far
        lambda t: ((3,), (1,), ((t // 2, 1),)),
        lambda t: ((t // 2 + 1,), (1,), ((1, 1),)),
        lambda t: ((2,), (t // 3 + 1,), ((1, 0),)),
        lambda t: ((t - 1,), (2,), ((0, t),)),
    ],
)
def test_windows_that_depend_on_the_size_of_the_axis(kind, window):
    def f(x: Any) -> Any:
        shape, strides, padding = window(x.shape[0])
        return pool(kind, *shape, window_strides=strides, padding=padding)(x)

    assert_law(f, "t")


def test_windows_that_depend_on_the_size_of_another_array():
    assert_law(lambda x, y: pool("max", 1, y.shape[0])(x), "b, t", "s", choices=CHOICES)


def test_other_windows_of_symbolic_shape_are_refused():
    x = eighths("t", {"t": 5})

    def f(x: Any) -> Any:
        return lax.reduce_window(
            x, jnp.float32(1), lax.mul, (x.shape[0] - 1,), (1,), "VALID"
        )

    traced = symbolic(f, ["t"], [x], {"t": 5})
    with pytest.raises(PaddingRefused, match=r"its window has size t - 1\n  at .*f"):
        run_padded(traced, [x], {"t": 5}, {"t": 8})


# --- anything -------------------------------------------------------------------------


@st.composite
def geometries(draw) -> tuple[Sequence[int], ...]:
    """window, stride, low, high, base dilation, window dilation."""
    numbers = st.integers(1, 3)
    ends = st.integers(-1, 4)
    return draw(st.tuples(numbers, numbers, ends, ends, numbers, numbers))


@given(geometries(), st.integers(4, 8), st.sampled_from(list(KINDS)))
@_SLOW
def test_pooling_of_any_geometry(geometry, t, kind):
    window, stride, low, high, base, apart = geometry
    f = pool(
        kind,
        window,
        window_strides=(stride,),
        padding=((low, high),),
        base_dilation=(base,),
        window_dilation=(apart,),
    )
    check(f, ["t"], [eighths("t", {"t": t})], {"t": t}, {"t": 8})
