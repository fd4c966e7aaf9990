"""Laws of the order in which rows of keys add to the gradient of queries."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

import pliax as px
from pliax.kernels.attention.mosaic_gpu_vjp import _turns


@settings(max_examples=25)
@given(
    seen=hnp.arrays(bool, st.tuples(st.just(2), st.integers(1, 4), st.integers(1, 4))),
    ragged=st.tuples(st.integers(0, 63), st.integers(0, 63)),
)
def test_turns_count_the_blocks_of_keys_that_were_seen_before(seen, ragged):
    _, R, C = seen.shape
    lengths = 64 * R - ragged[0], 64 * C - ragged[1]
    table = jnp.asarray(seen)
    mask = px.create_block_mask(
        lambda b, h, q, k: table[h, q // 64, k // 64], None, 2, *lengths, block_size=64
    )
    turns, is_seen = jax.jit(_turns)(mask)
    np.testing.assert_array_equal(turns[0], np.cumsum(seen, axis=-1) - seen)
    rows = np.repeat(seen.any(-1), 64, axis=-1).T
    np.testing.assert_array_equal(is_seen[0, :, :, 0], rows)
