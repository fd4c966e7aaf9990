"""Laws of few queries: split keys are the whole, and lengths are data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import B, H, K
from helpers import compilations, normal
from hypothesis import given, settings, strategies as st

import pliax as px
from pliax.kernels import masks, mods


D, V = 16, 8


def inputs(queries, keys, *, shared=False, seed=0):
    batch = 1 if shared else B
    return (
        normal(seed, (B, queries, H, D)),
        normal(seed + 1, (batch, keys, K, D)),
        normal(seed + 2, (batch, keys, K, V)),
    )


def attend(arrays, **options):
    return px.flex_attention(*arrays, enable_gqa=True, **options)


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 2)
@given(
    queries=st.sampled_from([1, 3, 17]),
    keys=st.sampled_from([1, 50, 130]),
    splits=st.sampled_from([1, 2, 5, 40]),
    shared=st.booleans(),
    batched=st.booleans(),
    block=st.sampled_from([8, (4, 16)]),
)
def test_any_split_of_the_keys_is_the_whole(
    queries, keys, splits, shared, batched, block
):
    arrays = inputs(queries, keys, shared=shared)
    lengths = jnp.array([keys, (keys + 1) // 2], jnp.int32)
    mask = px.create_block_mask(
        masks.padding(lengths)
        if batched
        else masks.with_offset(masks.causal, keys // 2),
        B if batched else None,
        None,
        queries,
        keys,
        block_size=block,
    )
    request = px.AuxRequest(lse=True, max_scores=True)
    for block_mask in (mask, None):
        options = {"block_mask": block_mask, "return_aux": request}
        whole = attend(arrays, implementation="reference", **options)
        split = attend(arrays, kernel_options={"splits": splits}, **options)
        for x, y in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


def test_gradients_do_not_depend_on_splits():
    arrays = inputs(5, 70)
    slopes = jnp.array([0.5, 0.25, 0.1, 0.05])
    mask = px.create_block_mask(
        masks.with_offset(masks.causal, 65), None, None, 5, 70, block_size=16
    )

    def loss(arrays, slopes, **options):
        mod = mods.alibi(slopes)
        out = attend(arrays, score_mod=mod, block_mask=mask, **options)
        return jnp.sum(jnp.sin(out))

    split = jax.grad(loss, (0, 1))(arrays, slopes, kernel_options={"splits": 3})
    whole = jax.grad(loss, (0, 1))(arrays, slopes, implementation="reference")
    for x, y in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_growing_cache_compiles_once_and_is_the_causal_attention(splits):
    length = 40
    q, k, v = inputs(length, length)
    causal = px.create_block_mask(
        masks.causal, None, None, length, length, block_size=16
    )
    whole = attend((q, k, v), block_mask=causal, implementation="reference")
    traces = 0

    @jax.jit
    def step(cache, token, offsets):
        nonlocal traces
        traces += 1
        q, k, v = token
        rows = jnp.arange(B)
        keys, values = (
            cache[0].at[rows, offsets].set(k[:, 0]),
            cache[1].at[rows, offsets].set(v[:, 0]),
        )
        mask = px.create_block_mask(
            masks.with_offset(masks.causal, offsets), B, None, 1, length, block_size=16
        )
        options = {"block_mask": mask, "kernel_options": {"splits": splits}}
        return (keys, values), attend((q, keys, values), **options)

    # The second sequence begins three tokens later: offsets differ by sequence. What a
    # cache holds beyond its length is never seen, not even NaN.
    cache = tuple(jnp.full_like(x, jnp.nan) for x in (k, v))
    for i in range(length + 3):
        offsets = jnp.clip(jnp.array([i, i - 3], jnp.int32), 0, length - 1)
        token = tuple(x[jnp.arange(B), offsets][:, None] for x in (q, k, v))
        cache, out = step(cache, token, offsets)
        expected = whole[jnp.arange(B), offsets][:, None]
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)
    assert traces == 1


def test_chunked_prefill_is_the_whole_prompt():
    length, chunk = 48, 16
    q, k, v = inputs(length, length)
    mask = px.create_block_mask(masks.causal, None, None, length, length, block_size=8)
    whole = attend((q, k, v), block_mask=mask)

    @jax.jit
    def prefill(q, offset):
        mask_mod = masks.with_offset(masks.causal, offset)
        mask = px.create_block_mask(mask_mod, None, None, chunk, length, block_size=8)
        return attend((q, k, v), block_mask=mask)

    parts = [
        prefill(q[:, i : i + chunk], jnp.int32(i)) for i in range(0, length, chunk)
    ]
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, rtol=2e-5, atol=2e-6)
    with compilations() as seen:
        prefill(q[:, :chunk], jnp.int32(5))
    assert not seen


def test_splits_are_taken_beside_a_block_mask_and_must_be_positive():
    arrays = inputs(2, 20)
    many = attend(arrays, kernel_options={"splits": 5000})
    np.testing.assert_allclose(many, attend(arrays), rtol=2e-5, atol=2e-6)
    with pytest.raises(ValueError, match=r"must be at least 1, found \{'splits': 0\}"):
        attend(arrays, kernel_options={"splits": 0})
    with pytest.raises(
        ValueError, match=r"below 2\*\*31, found \{'splits': 2147483648"
    ):
        attend(arrays, kernel_options={"splits": 2**31})
