"""The proof that every query sees the key at its own place never proves too much."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import pliax as px
from pliax.kernels.attention.diagonals import sees_itself


masks = px.kernels.masks
S = 24
IDS = jnp.asarray(np.arange(S) // 5, jnp.int32)
FLOATS = jnp.asarray(np.where(np.arange(S) == 7, np.nan, np.arange(S)), jnp.float32)
ATOMS = {
    "causal": masks.causal,
    "strictly": lambda b, h, q, k: q > k,
    "window": lambda b, h, q, k: q - k < 6,
    "empty window": lambda b, h, q, k: q - k < 0,
    "both sides": lambda b, h, q, k: jnp.abs(q - k) <= 2,
    "same document": lambda b, h, q, k: IDS[q] == IDS[k],
    "later document": lambda b, h, q, k: IDS[q] != IDS[k],
    "dilated": lambda b, h, q, k: (q - k) % 2 == 0,
    "odd": lambda b, h, q, k: (q - k) % 2 == 1,
    "prefix": lambda b, h, q, k: k < 7,
    "real": lambda b, h, q, k: k < 20,
    "nan is not itself": lambda b, h, q, k: FLOATS[q] == FLOATS[k],
    "chosen": lambda b, h, q, k: jnp.where(q == k, q < 3, k > 2),
    "head": lambda b, h, q, k: h < 1,
    "wraps around": lambda b, h, q, k: (q - k) * 2 + jnp.int32(2**31 - 1) + 1 > 0,
    "narrow": lambda b, h, q, k: (q - k + 256).astype(jnp.int8) == 0,
    "chosen by number": lambda b, h, q, k: jax.lax.select_n(
        jnp.clip(q - k + 1, 0, 2), q < 0, q >= 0, q > 3
    ),
    "neighbour": lambda b, h, q, k: IDS[jnp.minimum(q + 1, S - 1)] == IDS[k],
}


def shown(mask_mod, queries=S, keys=S, batch=None, heads=None):
    return px.create_block_mask(mask_mod, batch, heads, queries, keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask_mod",
    [
        masks.causal,
        masks.sliding_window(5),
        masks.prefix_lm(4),
        lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k),
        masks.or_masks(masks.causal, ATOMS["prefix"]),
        *(ATOMS[name] for name in ("window", "both sides", "dilated")),
    ],
)
def test_masks_of_training_have_a_proof(mask_mod):
    assert sees_itself(shown(mask_mod))


def test_a_proof_is_found_at_once_where_a_mask_uses_its_parts_often():
    def often(x):
        for _ in range(40):
            x = x * x + x
        return x

    assert sees_itself(shown(lambda b, h, q, k: often(q) == often(k)))
    assert not sees_itself(shown(lambda b, h, q, k: often(q) != often(k)))


@pytest.mark.parametrize(
    "name", ["strictly", "empty window", "odd", "prefix", "nan is not itself", "chosen"]
)
def test_where_somebody_does_not_see_himself_there_is_none(name):
    assert not sees_itself(shown(ATOMS[name]))


def test_as_many_keys_as_queries_are_needed_and_lists_that_follow_from_the_mask():
    assert not sees_itself(shown(masks.causal, S, S + 1))
    mask = shown(masks.causal)
    again = px.BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask_mod=masks.causal, seq_lengths=(S, S)
    )
    assert not sees_itself(again)


def test_captured_arrays_may_be_traced():
    @jax.jit
    def proofs(ids):
        same = shown(lambda b, h, q, k: ids[q] == ids[k])
        small = shown(lambda b, h, q, k: q - k < ids[0])
        assert sees_itself(same) and not sees_itself(small)
        return ids

    proofs(IDS)


def test_a_mask_that_draws_random_bits_has_no_proof_and_no_error():
    def some(b, h, q, k):
        key = jax.random.fold_in(jax.random.key(0), k)
        return (q > k) | jax.random.bernoulli(key, 0.1)

    assert not sees_itself(shown(some))


def test_zeros_of_two_signs_are_two_numbers():
    def differ(b, h, q, k):
        i, j = (x.astype(jnp.float32) + 1 for x in (q, k))
        return (i / 0.0 > 0) == (j / -0.0 > 0)

    assert not sees_itself(shown(differ))


def combined(names):
    operators = st.sampled_from([masks.and_masks, masks.or_masks])
    pair = lambda x: st.tuples(operators, x, x).map(lambda t: t[0](t[1], t[2]))  # noqa: E731
    negated = lambda x: x.map(masks.not_mask)  # noqa: E731
    return st.recursive(
        st.sampled_from(names).map(ATOMS.__getitem__),
        lambda x: st.one_of(pair(x), negated(x)),
        max_leaves=4,
    )


@given(combined(sorted(ATOMS)))
def test_of_what_is_proved_every_query_sees_itself(mask_mod):
    if sees_itself(mask := shown(mask_mod, heads=2)):
        listed = mask.to_dense()
        assert bool(jnp.all(jnp.diagonal(listed, axis1=-2, axis2=-1) > 0))
        dense = px.create_mask(mask_mod, 1, 2, S, S)
        assert bool(jnp.all(jnp.diagonal(dense, axis1=-2, axis2=-1)))
