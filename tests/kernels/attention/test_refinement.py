"""Laws of a sparse mask's halves: the blocks a mask of that size would have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_plain import attention as plain_attention
from hypothesis import assume, example, given, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import pliax as px
from pliax.kernels.attention import refinement
from pliax.kernels.attention.block_lists import column_and_met, listed, spread
from pliax.kernels.attention.refinement import for_keys, for_queries


def refined(mask):
    """As for a call with the mask's sequences and heads."""
    return refinement.refined(mask, *mask.shape[:2])


def documents(T, length=128):
    return px.create_block_mask(
        lambda b, h, q, k: (q // length == k // length) & (q >= k), None, None, T, T
    )


def window(T, length):
    return px.create_block_mask(
        lambda b, h, q, k: (q - k < length) & (q >= k), None, None, T, T
    )


def test_a_mask_is_sparse_where_it_is_known_that_few_queries_see_a_key():
    assert refined(documents(384)).halves and refined(documents(1024)).halves
    assert refined(window(4096, 256)).halves
    for mask in (documents(256), window(4096, 1024), window(512, 512)):
        assert refined(mask) is mask
    seen = []
    jax.jit(lambda mask: seen.append(refined(mask).halves))(documents(384))
    assert seen == [None]


@given(
    lengths=st.sampled_from([(1200, 1200), (1100, 1500)]),
    documents=st.lists(st.integers(20, 400), min_size=8, max_size=30),
    past=st.integers(60, 400),
    shape=st.sampled_from([(None, None), (2, 2)]),
    sizes=st.sampled_from([(128, 128), (256, 384)]),
    separate=st.booleans(),
    given_lists=st.booleans(),
)
@example((1200, 1200), [300] * 4, 400, (2, 2), (128, 128), True, False)
@example((1100, 1500), [300] * 4, 400, (2, 2), (256, 384), False, True)
def test_halves_are_the_blocks_of_a_mask_of_their_size(
    lengths, documents, past, shape, sizes, separate, given_lists
):
    ids = np.searchsorted(np.cumsum(documents), np.arange(1500), "right")
    ids, past = jnp.asarray(ids), jnp.asarray(past)

    def visible(b, h, q, k):
        return (ids[q] == ids[k]) & (q - k >= -(b + h)) & (q - k < past)

    mask = px.create_block_mask(
        visible, *shape, *lengths, block_size=sizes, separate_full_blocks=separate
    )
    if given_lists:
        mask = mask.with_mask_mod(visible)
    found = refined(mask)
    is_sparse = mask.sparsity() >= 66 and (1 - mask.sparsity() / 100) * lengths[0] < 900
    assert (found.halves is not None) == is_sparse
    assume(is_sparse)
    halves = found.halves
    cuts = [
        ((64, 64), halves.queries, False),
        ((64, 64), halves.keys, True),
        ((128, 128), halves.wide_queries, False),
    ]
    b, h, q, k = jnp.ix_(*map(jnp.arange, mask.shape))
    dense = visible(b, h, q, k)
    asked = [ids[q] == ids[k], q - k >= -(b + h), q - k < past]
    asked = [np.broadcast_to(x, dense.shape) for x in asked]
    for size, lists, is_transposed in cuts:
        some, every = in_blocks(dense, size)
        met = [in_blocks(x, size, beyond=True)[1] for x in asked]
        if is_transposed:
            some, every, *met = (x.swapaxes(2, 3) for x in (some, every, *met))
        partial, full = spread(lists.apart(), some.shape[3])
        np.testing.assert_array_equal(partial, some & ~every)
        np.testing.assert_array_equal(full, every)
        columns, told = map(np.asarray, column_and_met(lists.entries))
        is_listed = listed(*map(np.asarray, (lists.total, columns)))
        is_full = listed(*map(np.asarray, (lists.full, columns)))
        in_lists = np.take_along_axis(np.asarray(full), columns, axis=3)
        np.testing.assert_array_equal(is_full[is_listed], in_lists[is_listed])
        for n, of_blocks in enumerate(met):
            in_lists = np.take_along_axis(of_blocks, columns, axis=3)
            is_told = (told >> n) & 1 == 1
            assert np.array_equal(is_told[is_listed], in_lists[is_listed])


def in_blocks(dense, size, beyond=False):
    """Whether some score of a block is seen, and every one; `beyond` the end, too."""
    widths = [(0, -n % size) for n, size in zip(dense.shape[2:], size, strict=True)]
    padded = np.pad(dense, ((0, 0), (0, 0), *widths), constant_values=beyond)
    (B, H, T, S), (m, n) = padded.shape, size
    blocks = padded.reshape(B, H, T // m, m, S // n, n)
    return blocks.any(axis=(3, 5)), blocks.all(axis=(3, 5))


def test_halves_made_while_a_function_is_traced_are_there_for_others():
    mask = documents(384)
    first = jax.jit(lambda: jnp.asarray(refined(mask).halves.keys.total))()
    assert np.array_equal(refined(mask).halves.keys.total, first)
    assert refined(mask).halves is refined(mask).halves


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_halves_are_made_under_any_mesh_of_arrays_on_it(kind):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    ids = jax.device_put(jnp.arange(1024) // 60, NamedSharding(mesh, P()))
    mask = px.create_block_mask(
        lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), None, None, 1024, 1024
    )
    found = []

    def look(x):
        found.append(refined(mask).halves)
        return x

    with jax.set_mesh(mesh):
        jax.jit(jax.shard_map(look, in_specs=P(), out_specs=P()))(jnp.ones(2))
    assert found[0].wide_queries.total.shape == (1, 1, 8)
    jnp.add(1, found[0].keys.total)  # it lies where other arrays do


def test_wide_kernels_keep_the_blocks_of_queries():
    halves = refined(documents(384)).halves
    assert for_queries(halves, is_wide=True) == ((128, 128), halves.wide_queries)
    assert for_queries(halves, is_wide=False) == ((64, 64), halves.queries)
    assert for_keys(halves) == ((64, 64), halves.keys)


@pytest.mark.parametrize("size", [64, 192, (128, 64)])
def test_masks_of_blocks_that_are_not_made_of_whole_ones_are_left(size):
    mask = px.create_block_mask(
        lambda b, h, q, k: q == k, None, None, 1024, 1024, block_size=size
    )
    assert refined(mask) is mask


def test_halves_are_made_under_a_guard_of_transfers():
    mask = documents(384)
    with jax.transfer_guard("disallow"):
        assert refined(mask).halves


@pytest.mark.parametrize("axis", [0, 1])
def test_lists_that_a_mask_which_asks_whose_they_are_shares_are_left(axis):
    lengths = jnp.asarray([64, 128], jnp.int32)  # of the second more is seen

    def visible(b, h, q, k):
        length = lengths[(b, h)[axis]]
        return (q // length == k // length) & (q >= k)

    counts = [1, 1]
    counts[axis] = 2
    each = px.create_block_mask(visible, counts[0], counts[1], 1024, 1024)
    lists = each.kv_num_blocks, each.kv_indices
    full = each.full_kv_num_blocks, each.full_kv_indices
    first = [jnp.take(x, jnp.arange(1), axis) for x in (*lists, *full)]
    shared = px.BlockMask.from_kv_blocks(
        *first, mask_mod=visible, seq_lengths=(1024, 1024)
    )
    assert refinement.refined(shared, counts[0], counts[1]) is shared
    assert refinement.refined(shared, 1, 1).halves
    assert refinement.refined(each, counts[0], counts[1]).halves


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 128])
def test_kernels_ask_what_lists_do_not_tell(D):
    """Eleven conditions, of which lists tell of seven."""
    hidden = [3, 70, 130, 200, 260, 301, 333, 350, 380]
    ids = jnp.searchsorted(jnp.asarray([128, 256, 356]), jnp.arange(512), side="right")

    def visible(b, h, q, k):
        found = (ids[q] == ids[k]) & (q >= k)
        for n in hidden:
            found &= (k != n) | (q == k)
        return found

    mask = px.create_block_mask(visible, None, None, 512, 512)
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(k, (1, 512, 1, D), jnp.bfloat16) for k in keys]
    assert refined(mask).halves

    def ours(*arrays):
        options = {"interpret": 1}
        return px.flex_attention(
            *arrays, block_mask=mask, implementation="mosaic_gpu",
            kernel_options=options,
        )  # fmt: skip

    def plain(*arrays):
        return plain_attention(*arrays, visible=visible)[0]

    def results(attend, dtype):
        def loss(*arrays):
            out = attend(*arrays)
            return (out.astype(jnp.float32) ** 2).sum(), out

        given = [x.astype(dtype) for x in arrays]
        gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(*given)
        return [x.astype(jnp.float32) for x in (out, *gradients)]

    calls = (ours, jnp.bfloat16), (plain, jnp.bfloat16), (plain, jnp.float32)
    for x, y, golden in zip(*(results(*call) for call in calls), strict=True):
        assert jnp.abs(x - golden).mean() <= 1.1 * jnp.abs(y - golden).mean()
