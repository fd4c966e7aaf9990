"""Laws of the fused softmax, in JAX's interpreter."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import gaussian
from attention_plain import attention as plain_attention
from helpers import assert_error_rule, in_float64
from hypothesis import example, given, settings, strategies as st

import pliax as px


S, VISIT = 320, 64
EVERYTHING = px.AuxRequest(lse=True, max_scores=True)
# How far the scores of a visit are from those of the one before: below and above what
# a maximum may grow by before sums are multiplied, and where float32 has no digits.
STEPS = st.sampled_from([-1e9, -60.0, -7.0, -1.0, 0.0, 1.0, 5.0, 7.0, 60.0, 1e4])
LEVELS = st.lists(STEPS, min_size=S // VISIT, max_size=S // VISIT).map(np.cumsum)
# Channels, and the blocks of a causal mask: kernels of one, two and three warpgroups.
KINDS = {"small": (64, 64), "wide": (128, None), "narrow": (64, None)}


def raised(level):
    """Scores of a key in its visit's level."""
    return lambda s, b, h, q, k: s + level[k // VISIT].astype(s.dtype)


def visible(kind):
    return px.kernels.masks.causal if KINDS[kind][1] else None


def plain(arrays, level, kind):
    return plain_attention(*arrays, score=raised(level), visible=visible(kind))


@cache
def fused(kind):
    block, mask = KINDS[kind][1], None
    if block:
        sizes = None, None, S, S
        mask = px.create_block_mask(visible(kind), *sizes, block_size=block)

    @jax.jit
    def attend(arrays, level):
        out, aux = px.flex_attention(
            *arrays, score_mod=raised(level), block_mask=mask, return_aux=EVERYTHING,
            implementation="mosaic_gpu", kernel_options={"interpret": 1},
        )  # fmt: skip
        return out, aux.lse, aux.max_scores

    return attend


def arrays_of(kind):
    shape = 1, S, 1, KINDS[kind][0]
    return tuple(gaussian(n, shape, jnp.bfloat16) for n in range(3))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5)
@given(level=LEVELS)
@example(np.arange(0, 35, 7.0))
@example(np.arange(0, 300, 60.0))
@example(np.full(5, -1e9))
def test_maxima_may_grow_by_anything_from_one_visit_to_the_next(kind, level):
    given = arrays_of(kind), jnp.asarray(level, jnp.float32)
    formula = partial(plain, kind=kind)
    found, golden = fused(kind)(*given), in_float64(formula, *given)
    assert_error_rule(found, formula(*given), golden)


@pytest.mark.parametrize("scale", [0.1, 3.0, -3.0])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_row_may_see_nothing_in_its_first_visits_at_any_scale(scale, dtype):
    mask_mod = px.kernels.masks.sliding_window(40)
    mask = px.create_block_mask(mask_mod, None, None, S, S, block_size=64)
    arrays = tuple(x.astype(dtype) for x in arrays_of("small"))

    def formula(*arrays):
        return plain_attention(*arrays, visible=mask_mod, scale=scale)

    out, aux = px.flex_attention(
        *arrays, block_mask=mask, scale=scale, return_aux=EVERYTHING,
        implementation="mosaic_gpu", kernel_options={"interpret": 1},
    )  # fmt: skip
    found = out, aux.lse, aux.max_scores
    assert_error_rule(found, formula(*arrays), in_float64(formula, *arrays))
