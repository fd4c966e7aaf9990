"""Laws of block masks: the blocks of a dense mask, as data."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import pliax as px


def dense(mask_mod, shape):
    indices = np.meshgrid(*(np.arange(n, dtype=np.int32) for n in shape), indexing="ij")
    return np.broadcast_to(np.asarray(mask_mod(*indices)), shape)


def classified(visible, sizes):
    """Which blocks hold something visible, and which nothing masked, by hand."""
    (q, k), (m, n) = visible.shape[2:], sizes
    padded = np.pad(visible, ((0, 0), (0, 0), (0, -q % m), (0, -k % n)))
    shape = (*visible.shape[:2], -(-q // m), m, -(-k // n), n)
    blocks = padded.reshape(shape)
    return blocks.any(axis=(3, 5)), blocks.all(axis=(3, 5))


def listed(num, indices):
    """The blocks that lists name, as a dense array of bools."""
    num, indices = np.asarray(num), np.asarray(indices)
    found = np.zeros(indices.shape, bool)
    for place in np.ndindex(num.shape):
        named = indices[place][: num[place]]
        assert list(named) == sorted(set(named))
        found[place][named] = True
    return found


@given(
    lengths=st.sampled_from([(1, 1), (16, 40), (40, 16), (50, 50)]),
    sizes=st.sampled_from([(16, 16), (8, 24)]),
    batch=st.sampled_from([None, 2]),
    heads=st.sampled_from([None, 3]),
    window=st.integers(0, 60),
    stride=st.integers(1, 4),
    separate=st.booleans(),
)
def test_blocks_are_those_of_the_dense_mask(
    lengths, sizes, batch, heads, window, stride, separate
):
    def mask_mod(b, h, q, k):
        return (abs(q - k) <= window) & ((q // 8 + b + h) % stride == 0)

    mask = px.create_block_mask(
        mask_mod,
        batch,
        heads,
        *lengths,
        block_size=sizes,
        separate_full_blocks=separate,
    )
    some, every = classified(dense(mask_mod, (batch or 1, heads or 1, *lengths)), sizes)
    full = every if separate else np.zeros_like(every)
    for transposed in (False, True):
        lists = mask.lists(transposed=transposed)
        for blocks, name in ((some & ~full, ""), (full, "full_")):
            blocks = np.swapaxes(blocks, 2, 3) if transposed else blocks
            num, indices = (getattr(lists, name + f) for f in ("num", "indices"))
            assert num.dtype == indices.dtype == jnp.int32
            np.testing.assert_array_equal(listed(num, indices), blocks)


def test_shape_broadcasts_batch_and_heads():
    mask = px.create_block_mask(lambda b, h, q, k: q >= k, None, None, 300, 200)
    assert mask.shape == (1, 1, 300, 200)
    assert mask.kv_indices.shape == (1, 1, 3, 2)
    assert mask.q_indices.shape == (1, 1, 2, 3)


def test_building_under_jit_traces_once_for_new_contents():
    traces = 0

    @jax.jit
    def build(ids):
        nonlocal traces
        traces += 1
        return px.create_block_mask(
            lambda b, h, q, k: ids[b, q] == ids[b, k], 2, None, 64, 64, block_size=16
        )

    first = build(jnp.zeros((2, 64), jnp.int32))
    second = build(jnp.tile(jnp.arange(64, dtype=jnp.int32), (2, 1)))
    assert traces == 1
    assert first.full_kv_num_blocks.sum() == 2 * 4 * 4
    assert second.kv_num_blocks.sum() == 2 * 4
    assert jax.tree.structure(first) == jax.tree.structure(second)


def test_documents_of_128k_tokens_are_classified_by_their_bounds():
    """Within 2 GB and 20 s on 2 cores, where a dense mask has 16 GiB."""
    length = 2**17

    @jax.jit
    def build(ids):
        def mask_mod(b, h, q, k):
            return (ids[q] == ids[k]) & (q >= k)

        return px.create_block_mask(mask_mod, None, None, length, length)

    ids = jnp.asarray(np.arange(length) * 12 // length, jnp.int32)
    start = time.process_time()
    compiled = build.lower(ids).compile()
    mask = jax.block_until_ready(compiled(ids))
    assert time.process_time() - start < 20
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 2**28
    assert 95 < mask.sparsity() < 96


def test_memory_is_far_below_the_dense_mask():
    length = 32768
    build = jax.jit(
        lambda: px.create_block_mask(
            lambda b, h, q, k: q >= k, None, None, length, length
        )
    )
    analysis = build.lower().compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes <= length * length // 16


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (
            (lambda s, b, h, q, k: True, None, None, 8, 8),
            TypeError,
            "expected 4 .*got 5",
        ),
        (
            (lambda b, h, q, k: q, None, None, 8, 8),
            TypeError,
            r"must return one bool\[\]",
        ),
        ((lambda b, h, q, k: q >= k, None, None, 0, 8), ValueError, "'q_len': 0"),
        ((lambda b, h, q, k: q >= k, 0, None, 8, 8), ValueError, "Pass B=None"),
    ],
)
def test_bad_arguments_say_what_was_found(arguments, kind, text):
    with pytest.raises(kind, match=text):
        px.create_block_mask(*arguments)


def test_defaults_do_not_count_as_parameters():
    def mask_mod(b, h, q, k, window=4):
        return q - k < window

    assert px.create_block_mask(mask_mod, None, None, 8, 8).shape == (1, 1, 8, 8)
