"""Convolutions with every option, their gradients, and values that are not finite."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax
from transforms.padding.checking import check, check_each, run_padded, symbolic

from pliax.transforms.padding.rules import PaddingRefused


HIGH = {"b": 3, "c": 3, "s": 6, "t": 8}
CHOICES = [
    {"b": 2, "c": 2, "s": 3, "t": 5},
    {"b": 3, "c": 3, "s": 6, "t": 8},
    {"b": 1, "c": 1, "s": 1, "t": 7},
]
LINE = ("NWC", "WIO", "NWC")
IMAGE = ("NHWC", "HWIO", "NHWC")
OPTIONS: dict[str, dict[str, Any]] = {
    "same": {},
    "valid": {"padding": "VALID"},
    "causal": {"padding": ((2, 0),)},
    "strides, same": {"window_strides": (2,)},
    "strides, same, lower": {"window_strides": (3,), "padding": "SAME_LOWER"},
    "strides, valid": {"window_strides": (2,), "padding": "VALID"},
    "dilated kernel": {"padding": ((4, 1),), "rhs_dilation": (2,)},
    "dilated array": {"padding": ((1, 2),), "lhs_dilation": (2,)},
    "all of it": {
        "padding": ((1, 2),),
        "lhs_dilation": (3,),
        "rhs_dilation": (2,),
        "window_strides": (2,),
    },
    "less": {"padding": ((-1, 2),)},
    "less, strides": {"padding": ((3, -1),), "window_strides": (2,)},
}


_IN_FULL = ("same", "strides, same", "all of it")  # what the fast tests differentiate


def eighths(text: str, sizes: Mapping[str, int], seed: int = 0) -> Any:
    """Small multiples of 1/8, whose products' sums are exact."""
    shape = eval(f"({text},)", {}, dict(sizes))
    rng = np.random.default_rng((seed, *shape))
    return (rng.integers(-8, 9, shape) / 8).astype(np.float32)


def assert_law(
    f: Callable, *specs: str, choices: Any = CHOICES, **options: Any
) -> None:
    names = [n for n in HIGH if any(n in spec for spec in specs)]
    make = options.pop("make", eighths)
    check_each(
        f,
        specs,
        lambda sizes: [make(spec, sizes, i) for i, spec in enumerate(specs)],
        [{n: sizes[n] for n in names} for sizes in choices],
        {n: HIGH[n] for n in names},
        **options,
    )


def convolution(numbers: Any = LINE, **options: Any) -> Callable[[Any, Any], Any]:
    ones = (1,) * (len(numbers[0]) - 2)
    options = {"window_strides": ones, "padding": "SAME", **options}
    return lambda x, k: lax.conv_general_dilated(
        x, k, dimension_numbers=numbers, **options
    )


def gradients(f: Callable) -> Callable[[Any, Any], Any]:
    """Of a loss that is not linear, for both operands."""
    return jax.grad(lambda x, k: (f(x, k) ** 2).sum(), argnums=(0, 1))


# --- along a padded axis --------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
def test_a_line(options):
    assert_law(convolution(**OPTIONS[options]), "b, t, 3", "3, 3, 4")


@pytest.mark.parametrize(
    "options",
    [
        *_IN_FULL,
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in OPTIONS
            if n not in _IN_FULL
        ),
    ],
)
def test_gradients_along_a_line(options):
    f = convolution(**OPTIONS[options])
    assert_law(gradients(f), "b, t, 3", "3, 3, 4")


@pytest.mark.parametrize("numbers", [IMAGE, ("NCHW", "OIHW", "NCHW"), None])
@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
def test_an_image(numbers, strides):
    is_last = numbers == IMAGE
    x, k = ("b, s, t, 2", "3, 2, 2, 4") if is_last else ("b, 2, s, t", "4, 2, 3, 2")
    numbers = numbers or ("NCHW", "OIHW", "NCHW")
    assert_law(convolution(numbers, window_strides=strides), x, k)


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 0), (2, 1))])
@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
def test_gradients_of_an_image(padding, strides):
    f = convolution(IMAGE, window_strides=strides, padding=padding)
    assert_law(gradients(f), "b, s, t, 2", "2, 3, 2, 4")


@pytest.mark.parametrize("width", [6, 9])
def test_nothing_is_left_of_a_line_shorter_than_the_kernel(width):
    f = convolution(padding="VALID")
    assert_law(f, "b, t, 3", f"{width}, 3, 4")


def test_dimensions_in_any_order():
    numbers = ("CWHN", "WOIH", "HNCW")
    f = convolution(numbers, window_strides=(2, 1), padding=((1, 0), (0, 1)))
    assert_law(f, "2, t, s, b", "3, c, 2, 2")


def test_the_gradient_of_a_gradient():
    f = convolution(window_strides=(2,))
    first = jax.grad(lambda x, k: (f(x, k) ** 2).sum())
    second = jax.grad(lambda x, k: (first(x, k) ** 2).sum(), argnums=(0, 1))
    assert_law(second, "b, t, 2", "3, 2, 2", choices=CHOICES[:2])


# --- beside padded axes ---------------------------------------------------------------


def test_a_batch_channels_and_filters():
    f = convolution()
    for specs in (
        ("b, 5, 3", "3, 3, 4"),
        ("2, 5, c", "3, c, 4"),
        ("2, 5, 3", "3, 3, c"),
    ):
        assert_law(f, *specs)
        assert_law(gradients(f), *specs)


def test_all_sizes_are_padded():
    f = convolution(window_strides=(2,))
    assert_law(f, "b, t, c", "3, c, s")
    assert_law(gradients(f), "b, t, c", "3, c, s", choices=CHOICES[:2])


def test_merged_axes_stay_apart():
    f = convolution()
    assert_law(lambda x, k: f(x.reshape(-1, 5, 2), k), "b, t, 10", "3, 2, 4")
    assert_law(lambda x, k: f(x.reshape(2, 5, -1), k.reshape(3, -1, 4)),
               "2, 5, b, t", "3, b, t, 4")  # fmt: skip
    assert_law(lambda x, k: f(x, k.reshape(3, 2, -1)), "2, 5, 2", "3, 2, b, t")
    assert_law(lambda x, k: f(x.reshape(2, -1, 2), k), "2, b, t, 2", "3, 2, 4")


def test_vmap_over_the_array_and_over_the_kernel():
    f = convolution()
    assert_law(jax.vmap(f, (0, None)), "b, 2, t, 3", "3, 3, 4")
    assert_law(gradients(jax.vmap(f, (0, None))), "b, 2, t, 3", "3, 3, 4")


def test_vmap_over_both_makes_as_many_groups_as_there_are_examples():
    f = jax.vmap(convolution())
    assert_law(f, "b, 2, t, 2", "b, 3, 2, 4")
    assert_law(gradients(f), "b, 2, t, 2", "b, 3, 2, 4", choices=CHOICES[:2])


# --- groups ---------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 2])
def test_groups_of_channels(stride):
    f = convolution(feature_group_count=2, window_strides=(stride,))
    assert_law(f, "b, t, 4", "3, 2, 6")
    assert_law(gradients(f), "b, t, 4", "3, 2, 6", choices=CHOICES[:2])
    assert_law(f, "b, t, 2*c", "3, c, 6")
    assert_law(f, "b, t, 4", "3, 2, 2*c")


def test_as_many_groups_as_there_are_channels():
    def f(x: Any, k: Any) -> Any:
        return convolution(feature_group_count=x.shape[2])(x, k)

    assert_law(f, "b, t, 4", "3, 1, 4")
    assert_law(f, "b, t, c", "3, 1, c")
    assert_law(f, "b, t, c", "3, 1, 2*c")


@pytest.mark.parametrize("stride", [1, 2])
def test_groups_of_examples(stride):
    f = convolution(batch_group_count=2, window_strides=(stride,))
    assert_law(f, "2*b, t, 3", "3, 3, 4")
    assert_law(f, "4, t, c", "3, c, 2*c")
    assert_law(gradients(f), "2*b, t, 3", "3, 3, 4", choices=CHOICES[:2])


def test_as_many_groups_as_there_are_examples():
    def f(x: Any, k: Any) -> Any:
        return convolution(batch_group_count=x.shape[0])(x, k)

    assert_law(f, "b, t, 3", "3, 3, 2*b", choices=CHOICES[:2])  # groups, so b > 1


def test_groups_that_may_not_divide_are_refused():
    f = convolution(feature_group_count=2)
    args = eighths("2, 5, 4", {}), eighths("3, 2, 6", {})
    sizes = {"c": 6}
    traced = symbolic(f, ["2, 5, 4", "3, 2, c"], args, sizes)
    with pytest.raises(PaddingRefused, match="2 groups need a multiple of 2, not c"):
        run_padded(traced, args, sizes, {"c": 8})


# --- a padded kernel ------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
@pytest.mark.parametrize(
    "function", [jnp.convolve, pytest.param(jnp.correlate, marks=pytest.mark.slow)]
)
def test_two_signals(function, mode):
    def f(x: Any, k: Any) -> Any:
        return function(x, k, mode=mode)

    assert_law(f, "t", "s")
    assert_law(f, "t", "3")
    assert_law(f, "9", "s")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "same", "valid"])
def test_gradients_of_two_signals(mode):
    assert_law(gradients(lambda x, k: jnp.convolve(x, k, mode=mode)), "t", "s")


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "VALID"},
        {"padding": "SAME"},
        {"padding": ((2, 1),), "window_strides": (2,), "rhs_dilation": (2,)},
        {"padding": ((2, 1),), "lhs_dilation": (2,)},
    ],
)
def test_a_kernel_of_symbolic_size(options):
    assert_law(convolution(**options), "b, t, 2", "s, 2, 3")


# --- what is not finite ---------------------------------------------------------------


def odd(text: str, sizes: Mapping[str, int], seed: int = 0) -> Any:
    """An infinity and a NaN among eighths, in the first operand."""
    x = eighths(text, sizes, seed)
    if seed == 0:
        rng = np.random.default_rng(x.size)
        x.reshape(-1)[rng.integers(x.size)] = np.inf
        x.reshape(-1)[rng.integers(x.size)] = np.nan
    return x


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ["same", "valid", "strides, same", "dilated kernel"]
)
def test_an_array_that_is_not_finite(options):
    f = convolution(**OPTIONS[options])
    assert_law(f, "b, t, 2", "3, 2, 3", make=odd)
    assert_law(gradients(f), "b, t, 2", "3, 2, 3", make=odd, choices=CHOICES[:2])


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "VALID"},
        {"padding": "SAME"},
        {"padding": ((2, 1),), "window_strides": (2,), "rhs_dilation": (2,)},
        {"padding": ((2, 1),), "feature_group_count": 2},
        {"padding": ((2, 1),), "batch_group_count": 2},
    ],
)
def test_a_symbolic_kernel_over_an_array_that_is_not_finite(options):
    """0 in the padding of the kernel must not meet it."""
    f = convolution(**options)
    channels = 4 if "feature_group_count" in options else 2
    assert_law(f, f"2*b, t, {channels}", "s, 2, 4", make=odd)


def test_a_symbolic_kernel_over_an_image_that_is_not_finite():
    f = convolution(("HWCN", "OHWI", "CNHW"), padding=((1, 0), (0, 1)))
    choices = [{**c, "s": min(c["s"], 3)} for c in CHOICES]
    assert_law(f, "t, 5, 2, b", "3, s, 2, 2", make=odd, choices=choices)


@pytest.mark.parametrize(
    "options", ["same", "valid", "strides, same", "dilated kernel"]
)
def test_a_kernel_that_is_not_finite(options):
    """XLA multiplies the edge of the array by it, here as there."""

    def f(k: Any, x: Any) -> Any:
        return convolution(**OPTIONS[options])(x, k)

    assert_law(f, "3, 2, 3", "b, t, 2", make=odd)


# --- dtypes ---------------------------------------------------------------------------


_SLOW_COMPLEX = pytest.param(np.complex64, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.int32, np.int8, jnp.bfloat16, _SLOW_COMPLEX])
def test_other_dtypes(dtype):
    wide = {np.int8: np.int32, jnp.bfloat16: np.float32}.get(dtype)
    f = convolution(window_strides=(2,), preferred_element_type=wide)

    def make(text: str, sizes: Mapping[str, int], seed: int) -> Any:
        return (8 * eighths(text, sizes, seed)).astype(dtype)

    assert_law(f, "b, t, c", "3, c, 4", make=make)
    assert_law(f, "b, t, 2", "s, 2, 4", make=make)


def test_rounding_is_that_of_another_order_at_most():
    def make(text: str, sizes: Mapping[str, int], seed: int) -> Any:
        x = eighths(text, sizes, seed)
        return np.random.default_rng(seed).standard_normal(x.shape).astype(np.float32)

    f = gradients(convolution(window_strides=(2,)))
    assert_law(f, "b, t, c", "3, c, 4", make=make, tolerance=1e-4)


# --- refusals -------------------------------------------------------------------------


def test_symbolic_strides_are_refused():
    def f(x: Any, k: Any) -> Any:
        return convolution(window_strides=(x.shape[1],), padding="VALID")(x, k)

    sizes = {"t": 5}
    args = eighths("2, t, 2", sizes), eighths("3, 2, 2", sizes)
    traced = symbolic(f, ["2, t, 2", "3, 2, 2"], args, sizes)
    with pytest.raises(
        PaddingRefused, match=r"its window has stride t\n  at .*test_con"
    ):
        run_padded(traced, args, sizes, {"t": 8})


# --- anything -------------------------------------------------------------------------


@st.composite
def geometries(draw) -> dict[str, Any]:
    one = st.integers(1, 3)
    return {
        "window_strides": (draw(one),),
        "padding": ((draw(st.integers(-1, 4)), draw(st.integers(-1, 4))),),
        "lhs_dilation": (draw(one),),
        "rhs_dilation": (draw(one),),
    }


@given(geometries(), st.integers(5, 8), st.integers(1, 3))
@pytest.mark.slow
def test_any_geometry(geometry, t, s):
    sizes = {"t": t, "s": s}
    args = eighths("1, t, 2", sizes), eighths("s, 2, 2", sizes, 1)
    check(
        convolution(**geometry), ["1, t, 2", "s, 2, 2"], args, sizes, {"t": 8, "s": 3}
    )
