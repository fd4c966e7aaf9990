"""Laws of the walk: each listed block is visited once, alone or with others."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from hypothesis import given, settings, strategies as st

import pliax as px
from pliax.kernels.attention.block_lists import list_blocks
from pliax.kernels.attention.walking import Layout, row_lists
from pliax.kernels.attention.xla import layout


EMPTY, PARTIAL, FULL = range(3)
seeds = st.integers(0, 2**32 - 1)


def draw_blocks(seed, shape):
    """Kinds of blocks, with runs of full ones: squares need four that touch."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(3, shape, p=(0.2, 0.3, 0.5))
    whole = rng.random(shape) < 0.3
    return np.where(
        np.repeat(whole[:, :, ::2], 2, axis=2)[:, :, : shape[2]], FULL, kinds
    )


def mask_of(kinds, sizes, mask_mod=None):
    rows, columns = kinds.shape[2:]
    lists = (
        x for kind in (PARTIAL, FULL) for x in list_blocks(jnp.asarray(kinds == kind))
    )
    return px.BlockMask.from_kv_blocks(
        *lists,
        block_size=sizes,
        mask_mod=mask_mod,
        seq_lengths=(rows * sizes[0], columns * sizes[1]),
    )


def visited(of: Layout, lists, shape):
    """How often each block is visited, as a partial and as a full one."""
    rows, columns = of.square
    counts = np.zeros((2, *shape), int)

    def mark(visits, row_of, height, width, kind_of):
        num, indices = (np.asarray(x) for x in visits)
        for place in np.ndindex(num.shape):
            *group, b, k, g = place
            head = k * num.shape[-1] + g
            for column in indices[place][: num[place]]:
                for i, j in itertools.product(range(height), range(width)):
                    row = row_of(group) + i
                    kind = kind_of(row, (b, k, g), column)
                    counts[kind, b, head, row, column + j] += 1

    def alone(group):
        return group[0] * rows + group[1]

    def first(group):
        return group[0] * rows

    def mixed(row, where, column):
        return int(np.asarray(lists.whole)[(row // rows, row % rows, *where, column)])

    mark(lists.partial, alone, 1, 1, lambda *_: 0)
    mark(lists.full, alone, 1, 1, lambda *_: 1)
    if lists.square is not None:
        mark(lists.square, first, rows, columns, lambda *_: 1)
    if lists.tall is not None:
        mark(lists.tall, first, rows, 1, mixed)
    return counts


@given(
    seed=seeds,
    sizes=st.tuples(
        st.sampled_from([32, 64, 128, 256]), st.sampled_from([64, 128, 256])
    ),
    lists=st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 4])),
    counts=st.tuples(st.integers(1, 7), st.integers(1, 6)),
)
def test_each_listed_block_is_visited_once(seed, sizes, lists, counts):
    kinds = draw_blocks(seed, (*lists, *counts))
    mask = mask_of(kinds, sizes)
    B, H = kinds.shape[:2]
    query = jnp.zeros((B, counts[0] * sizes[0], 4, 8))
    key = jnp.zeros((B, counts[1] * sizes[1], 2, 8))
    of = layout(query, key, mask, scale=1.0)
    found = visited(of, row_lists(of, mask), (B, H, of.square[0] * 8, counts[1]))
    for kind in (PARTIAL, FULL):
        expected = np.zeros(found.shape[1:], int)
        expected[:, :, : counts[0]] = kinds == kind
        np.testing.assert_array_equal(found[kind - 1], expected)


@pytest.mark.parametrize(
    ("sizes", "lists"),
    [
        ((64, 64), (1, 1)),
        pytest.param((64, 64), (2, 1), marks=pytest.mark.slow),
        pytest.param((128, 64), (1, 4), marks=pytest.mark.slow),
        ((64, 128), (2, 4)),
    ],
)
@settings(max_examples=2)
@given(seed=seeds)
def test_blocks_taken_together_attend_as_their_scores_do(seed, sizes, lists):
    """The mask_mod says no to much of what full blocks show: it has no say there."""
    rows, columns = 320 // sizes[0], 256 // sizes[1]
    mask = mask_of(
        draw_blocks(seed, (*lists, rows, columns)),
        sizes,
        lambda b, h, q, k: q % 3 > k % 2,
    )
    T, S = mask.seq_lengths
    operands = (
        normal(0, (2, T, 4, 8)),
        normal(1, (2, S, 2, 8)),
        normal(2, (2, S, 2, 8)),
    )
    bias = normal(3, (4, S))

    def loss(implementation, q, k, v, bias):
        out = px.flex_attention(
            q,
            k,
            v,
            score_mod=lambda s, b, h, i, j: s + bias[h, j],
            block_mask=mask,
            enable_gqa=True,
            implementation=implementation,
        )
        return jnp.sum(jnp.sin(3 * out)), out

    def run(implementation):
        grad = jax.grad(loss, (1, 2, 3, 4), has_aux=True)
        return grad(implementation, *operands, bias)

    found, expected = (jax.tree.leaves(run(x)) for x in ("xla", "reference"))
    for actual, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_rows_are_taken_together_where_only_the_keys_are_symbolic():
    """One artefact for every number of keys."""

    def step(q, k, v):
        mask = px.create_block_mask(
            px.kernels.masks.causal, None, None, q.shape[1], k.shape[1], block_size=64
        )

        def loss(q, k, v):
            out = px.flex_attention(q, k, v, block_mask=mask, implementation="xla")
            return jnp.sum(jnp.sin(out))

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    (s,) = jax.export.symbolic_shape("s")
    shapes = ((2, 300, 2, 8), (2, s, 2, 8), (2, s, 2, 8))
    operands = (jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes)
    exported = jax.export.export(jax.jit(step))(*operands)
    for length in (200, 333):
        q, k, v = (normal(i, (2, n, 2, 8)) for i, n in enumerate((300, length, length)))
        found, expected = exported.call(q, k, v), step(q, k, v)
        for actual, wanted in zip(
            *map(jax.tree.leaves, (found, expected)), strict=True
        ):
            np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)
