"""Laws of the fused softmax, in JAX's interpreter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import gaussian
from attention_plain import attention as plain_attention
from helpers import assert_error_rule, in_float64
from hypothesis import example, given, settings, strategies as st

import pliax as px
from pliax.kernels.attention import mosaic_gpu
from pliax.kernels.attention.arguments import close_score_mod
from pliax.kernels.attention.derivatives import widened
from pliax.kernels.attention.merging import merge


S, VISIT = 320, 64
EVERYTHING = px.AuxRequest(lse=True, max_scores=True)
# How far the scores of a visit are from those of the one before: below and above what
# a maximum may grow by before sums are multiplied, and where float32 has no digits.
STEPS = st.sampled_from([-1e9, -60.0, -7.0, -1.0, 0.0, 1.0, 5.0, 7.0, 60.0, 1e4])
LEVELS = st.lists(STEPS, min_size=S // VISIT, max_size=S // VISIT).map(np.cumsum)
# Channels, and the blocks of a causal mask: kernels of one, two and three warpgroups,
# and of two whose sums are of parts of the keys.
KINDS = {"small": (64, 64), "wide": (128, None), "narrow": (64, None)}
KINDS |= {"parts": (128, None)}
PUT_OFF = ["small", "wide", "parts"]  # what can wait


def raised(level):
    """Scores of a key in its visit's level."""
    return lambda s, b, h, q, k: s + level[k // VISIT].astype(s.dtype)


def lowest(s, b, h, q, k):
    """As a mask: nothing is left of every fourth row, and of others what is ahead."""
    return jnp.where((q % 4 == 0) | (k < q), jnp.finfo(s.dtype).min, s)


def visible(kind):
    return px.kernels.masks.causal if KINDS[kind][1] else None


def plain(arrays, kind, score=None, scale=None):
    kw = {"score": score, "visible": visible(kind), "scale": scale}
    return plain_attention(*arrays, **kw)


def fused(arrays, kind, score=None, scale=None):
    if kind == "parts":
        return fused_in_parts(arrays, score, scale)
    block, mask = KINDS[kind][1], None
    if block:
        sizes = None, None, S, S
        mask = px.create_block_mask(visible(kind), *sizes, block_size=block)
    out, aux = px.flex_attention(
        *arrays, score_mod=score, block_mask=mask, scale=scale, return_aux=EVERYTHING,
        implementation="mosaic_gpu", kernel_options={"interpret": 1},
    )  # fmt: skip
    return out, aux.lse, aux.max_scores


def fused_in_parts(arrays, score, scale):
    """Merged by XLA: the interpreter would take a row after another."""
    query, *keys = arrays
    T, scale = query.shape[1], scale or query.shape[3] ** -0.5
    mod = widened(close_score_mod(score, jnp.float32))
    given, how = (query.swapaxes(1, 2), *keys), {"scale": scale, "interpret": True}
    acc, *statistics = mosaic_gpu.parts(given, mod, None, splits=2, **how)
    top, total = (x[..., :T] for x in statistics)
    out, lse, top, _ = merge((acc[..., :T, :], top, total))
    return tuple(x.swapaxes(1, 2) for x in (out.astype(query.dtype), lse, top))


@partial(jax.jit, static_argnums=2)
def fused_at(arrays, level, kind):
    return fused(arrays, kind, raised(level))


def arrays_of(kind, dtype=jnp.bfloat16):
    # A part needs more queries than a warpgroup has rows.
    lengths = 80 if kind == "parts" else S, S, S
    shapes = ((1, T, 1, KINDS[kind][0]) for T in lengths)
    return tuple(gaussian(n, shape, dtype) for n, shape in enumerate(shapes))


def assert_as_exact(found, formula, *given):
    assert_error_rule(found, formula(*given), in_float64(formula, *given))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5)
@given(level=LEVELS)
@example(np.arange(0, 10, 2.0))
@example(np.arange(0, 35, 7.0))
@example(np.arange(0, 300, 60.0))
@example(np.full(5, -1e9))
def test_maxima_may_grow_by_anything_from_one_visit_to_the_next(kind, level):
    arrays, level = arrays_of(kind), jnp.asarray(level, jnp.float32)

    def formula(arrays, level):
        return plain(arrays, kind, raised(level))

    assert_as_exact(fused_at(arrays, level, kind), formula, arrays, level)


@pytest.mark.parametrize("kind", PUT_OFF)
@pytest.mark.parametrize("step", [8.0, 20.0])
def test_float16_has_room_for_weights_whose_maximum_grows(kind, step):
    arrays = arrays_of(kind, jnp.float16)
    level = step * jnp.arange(S // VISIT, dtype=jnp.float32)

    def formula(arrays, level):
        return plain(arrays, kind, raised(level))

    assert_as_exact(fused_at(arrays, level, kind), formula, arrays, level)


@pytest.mark.parametrize("kind", PUT_OFF)
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("step", [4, 60])
def test_maxima_of_products_alone_may_grow_at_any_scale(kind, scale, step):
    query, key, value = (x.astype(jnp.float32) for x in arrays_of(kind))
    levels = step * jnp.repeat(jnp.arange(S // VISIT, dtype=jnp.float32), VISIT)
    query = 0.05 * query + 1 / query.shape[3]
    arrays = query, 0.05 * key + levels[None, :, None, None], value
    arrays = tuple(x.astype(jnp.bfloat16) for x in arrays)
    formula = partial(plain, kind=kind, scale=scale)
    assert_as_exact(fused(arrays, kind, scale=scale), formula, arrays)


@partial(jax.jit, static_argnums=(1, 2))
def fused_at_scale(arrays, kind, scale):
    return fused(arrays, kind, scale=scale)


@pytest.mark.parametrize("kind", ["small", "wide"])
@pytest.mark.parametrize("scale", [0.11, 0.125])
@settings(max_examples=10)
@given(factors=st.tuples(*[st.integers(128, 255)] * 2), more=st.integers(1, 3))
@example(factors=(233, 246), more=2)
@example(factors=(202, 232), more=2)
def test_maxima_may_grow_by_what_a_large_number_is_rounded_by(
    kind, scale, factors, more
):
    first, second = (128.0 * n for n in factors)
    rounding = np.spacing(np.float32(first * second))
    query, key, value = (x.astype(jnp.float16) for x in arrays_of(kind))
    query = jnp.zeros_like(query).at[..., 0].set(first).at[..., 1].set(8.0)
    steps = np.repeat(np.arange(S // VISIT, dtype=np.float16), VISIT)
    steps *= np.float16(more * rounding / 8)
    key = jnp.zeros_like(key).at[..., 0].set(second).at[..., 1].set(steps[:, None])
    out, lse, max_scores = fused_at_scale((query, key, value), kind, scale)
    assert (abs(out) <= abs(value).max()).all()
    assert (abs(lse - max_scores) <= np.log(S) + scale * rounding).all()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_may_be_the_least_number_there_is(kind):
    arrays = arrays_of(kind)

    def some(results):  # the other rows' statistics are as large as numbers are
        out, *statistics = results
        return out, *(x.reshape(-1, 4)[:, 1:] for x in statistics)

    def formula(arrays):
        return some(plain(arrays, kind, lowest))

    found = fused(arrays, kind, lowest)
    assert_as_exact(some(found), formula, arrays)
    for x in found[1:]:
        assert (x.reshape(-1, 4)[:, 0] == jnp.finfo(jnp.float32).min).all()


@pytest.mark.parametrize("kind", PUT_OFF)
def test_products_that_are_no_numbers_once_scaled_hide_all(kind):
    *given, value = arrays_of(kind)
    huge = 4e18 / value.shape[3] ** 0.5  # products of -1.6e37
    query, key = (
        jnp.full_like(x, y) for x, y in zip(given, (huge, -huge), strict=True)
    )
    found = fused((query, key, value), kind, scale=30.0)
    for x, wanted in zip(found, (0.0, -jnp.inf, -jnp.inf), strict=True):
        assert (x == wanted).all()


@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-4])
def test_a_row_that_sees_nothing_has_no_maximum_at_any_scale(scale):
    arrays = arrays_of("small")
    mask = px.create_block_mask(
        lambda b, h, q, k: (q >= k) & (q % 3 > 0), None, None, S, S, block_size=64
    )
    out, aux = px.flex_attention(
        *arrays, block_mask=mask, scale=scale, return_aux=EVERYTHING,
        implementation="mosaic_gpu", kernel_options={"interpret": 1},
    )  # fmt: skip
    is_blind = jnp.arange(S) % 3 == 0
    assert (out[:, is_blind] == 0).all()
    for x in aux.lse, aux.max_scores:
        assert (x[:, is_blind] == -jnp.inf).all()
        assert jnp.isfinite(x[:, ~is_blind]).all()


@pytest.mark.parametrize("scale", [0.1, 3.0, -3.0])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_row_may_see_nothing_in_its_first_visits_at_any_scale(scale, dtype):
    mask_mod, arrays = px.kernels.masks.sliding_window(40), arrays_of("small", dtype)
    mask = px.create_block_mask(mask_mod, None, None, S, S, block_size=64)

    def formula(arrays):
        return plain_attention(*arrays, visible=mask_mod, scale=scale)

    out, aux = px.flex_attention(
        *arrays, block_mask=mask, scale=scale, return_aux=EVERYTHING,
        implementation="mosaic_gpu", kernel_options={"interpret": 1},
    )  # fmt: skip
    assert_as_exact((out, aux.lse, aux.max_scores), formula, arrays)
