"""Laws of what kernels compute in place of JAX's primitives: the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import gaussian
from hypothesis import given, strategies as st
from jax import lax
from mod_programs import INDEX, MODS, REFUSED, SCORE, as_float

import pliax as px
from pliax.core.jaxprs import close
from pliax.kernels.attention import mosaic_gpu
from pliax.kernels.attention.normalization import (
    compute,
    each_condition,
    flatten,
    is_elementwise,
)
from pliax.kernels.attention.separation import SCORE_MOD, Inseparable, separate


def by_hand(mod, *args):
    """Its equations one by one, each by what a kernel has."""
    jaxpr = flatten(mod)
    env = dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        assert is_elementwise(eqn), eqn
        values = [
            jnp.full(args[0].shape, v.val, v.aval.dtype)
            if hasattr(v, "val")
            else env[v]
            for v in eqn.invars
        ]
        env[eqn.outvars[0]] = compute(eqn, values)
    return env[jaxpr.outvars[0]]


@pytest.mark.parametrize("name", MODS)
def test_a_kernel_computes_what_jax_does(name):
    rng = np.random.default_rng(0)
    special = [
        0.0,
        -0.0,
        0.5,
        -0.5,
        1.5,
        2.5,
        -1.0,
        1.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-9,
        -1e-9,
        30.0,
        -30.0,
        1e30,
    ]
    s = jnp.asarray([*special, *rng.normal(size=240) * 4], jnp.float32)
    indices = (jnp.asarray(rng.integers(0, 300, s.shape), jnp.int32) for _ in range(4))
    args = s, *indices
    mod = close(MODS[name], SCORE, *[INDEX] * 4)
    found, wanted = by_hand(mod, *args), jax.vmap(MODS[name])(*args)
    np.testing.assert_allclose(
        found, wanted, rtol=3e-5 if "power" in name else 2e-6, atol=1e-7
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODS)
def test_what_a_kernel_computes_lowers_for_a_gpu(name):
    mod = close(MODS[name], SCORE, *[INDEX] * 4)
    arrays = (gaussian(0, (1, 64, 1, 64), jnp.bfloat16),) * 3

    def attend(arrays):
        return mosaic_gpu.forward(arrays, mod, None, scale=0.1)

    jax.jit(attend).trace(arrays).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_computes_is_refused(name):
    mod = close(lambda s, b, h, q, k: REFUSED[name](s), SCORE, *[INDEX] * 4)
    with pytest.raises(Inseparable, match="for each score"):
        separate(mod, SCORE_MOD)


def test_the_refusal_names_the_primitive():
    x = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)
    with pytest.raises(
        NotImplementedError, match="of score_mod, no kernel computes erf"
    ):
        px.flex_attention(
            x, x, x, score_mod=lambda s, b, h, q, k: lax.erf(s),
            implementation="mosaic_gpu", kernel_options={"interpret": 1},
        )  # fmt: skip


LOOKED_INTO = {
    "of each query": lambda t: lambda s, b, h, q, k: s + (t[q] * 2)[k],
    "of each query, cast": lambda t: lambda s, b, h, q, k: s + as_float(t[q] > 0)[k],
}


@pytest.mark.parametrize("name", LOOKED_INTO)
def test_an_array_made_for_each_query_is_not_looked_into(name):
    mod = close(LOOKED_INTO[name](gaussian(0, (9, 9))), SCORE, *[INDEX] * 4)
    with pytest.raises(Inseparable, match="of each query or key"):
        separate(mod, SCORE_MOD)


def test_a_sum_that_is_used_often_is_computed_once():
    def mod(s, b, h, q, k):
        d = q - k
        for _ in range(40):
            d = jnp.maximum(d, -d)
        return s + as_float(d)

    arrays = (gaussian(0, (1, 64, 1, 64), jnp.bfloat16),) * 3
    closed = close(mod, SCORE, *[INDEX] * 4)
    run = jax.jit(lambda x: mosaic_gpu.forward(x, closed, None, scale=0.1))
    run.trace(arrays).lower(lowering_platforms=("cuda",))


CONDITIONS = (
    lambda b, h, q, k: q >= k,
    lambda b, h, q, k: q // 4 == k // 4,
    lambda b, h, q, k: b == 0,
    lambda b, h, q, k: jnp.bool_(True),
    lambda b, h, q, k: (q == 3) | (k != 5),
)
_indices = st.integers(0, len(CONDITIONS) - 1)
_masks = st.recursive(
    _indices, lambda x: st.tuples(st.sampled_from("&&|"), x, x), max_leaves=6
)


@given(_masks)
def test_a_mask_shows_what_meets_all_of_its_conditions(tree):
    def value(tree, at):
        if isinstance(tree, int):
            return CONDITIONS[tree](*at)
        name, *sides = tree
        x, y = (value(side, at) for side in sides)
        return x & y if name == "&" else x | y

    mask = close(lambda *at: value(tree, at), *[INDEX] * 4)
    at = jnp.ix_(jnp.arange(2), jnp.arange(1), jnp.arange(8), jnp.arange(8))
    each = [x(*at) for x in each_condition(flatten(mask), mask.captured)]
    whole = [jnp.broadcast_to(x, (2, 1, 8, 8)) for x in (*each, value(tree, at))]
    np.testing.assert_array_equal(np.all(whole[:-1], axis=0), whole[-1])
    assert len(each) == 1 or isinstance(tree, tuple)


def test_conditions_that_share_their_parts_are_found_once():
    def shared(b, h, q, k):
        x = (q >= k) & (q // 4 == k // 4)
        for _ in range(40):
            x = x & x
        return x

    mask = close(shared, *[INDEX] * 4)
    assert len(each_condition(flatten(mask), mask.captured)) == 2
