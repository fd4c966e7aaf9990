"""Laws of interval analysis: what is proven of a block holds for every score of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pliax.core.jaxprs import close
from pliax.kernels.attention.classification import decide


INDEX = jax.ShapeDtypeStruct((), jnp.int32)
LENGTH, BLOCK = 240, 16
ROWS = LENGTH // BLOCK
RNG = np.random.default_rng(0)
SORTED = np.sort(RNG.integers(0, 6, LENGTH)).astype(np.int32)
BATCH = np.sort(RNG.integers(0, 6, (2, LENGTH)), axis=1).astype(np.int32)
MIXED = RNG.integers(-300, 300, LENGTH).astype(np.int32)
ENDS = np.array([70, 200], np.int32)
HOLES = np.where(RNG.random(LENGTH) < 0.05, np.nan, 1.0).astype(np.float32)
FEW = np.array([True, False, True])


def closed(mask_mod):
    return close(mask_mod, *(INDEX,) * 4)


def dense(mask_mod, batch=2, lengths=(LENGTH, LENGTH)):
    """Every score, one evaluation of the mask each."""
    mapped = closed(mask_mod)
    for axis in (3, 2, 0):
        mapped = jax.vmap(mapped, [0 if i == axis else None for i in range(4)])
    b, q, k = (jnp.arange(n, dtype=jnp.int32) for n in (batch, *lengths))
    return mapped(b, jnp.int32(0), q, k)


def in_blocks(visible):
    """Any and all by block, (B, 1, R, C)."""
    shape = (visible.shape[0], 1, ROWS, BLOCK, ROWS, BLOCK)
    blocks = visible.reshape(shape)
    return blocks.any(axis=(3, 5)), blocks.all(axis=(3, 5))


def undecided(mask_mod):
    """How many blocks intervals leave open; what they decide is right."""

    @jax.jit
    def both_ways(mask):
        return decide(mask, 2, 1, (LENGTH, LENGTH), (BLOCK, BLOCK)), dense(mask_mod)

    (certain, possible), visible = both_ways(closed(mask_mod))
    certain, possible, visible = map(np.asarray, (certain, possible, visible))
    some, every = in_blocks(visible)
    assert (every | ~certain).all(), "proven visible, but something is masked"
    assert (possible | ~some).all(), "proven masked, but something is visible"
    return int((certain != possible).sum())


def gathered(mode):
    def mask_mod(b, h, q, k):
        one, other = (jnp.asarray(BATCH).at[b, i].get(mode=mode) for i in (q, k))
        return one == other

    return mask_mod


# Masks, and how many rows of undecided blocks each may leave to both sequences.
DECIDED = {
    "causal": (lambda b, h, q, k: q >= k, 1),
    "causal window": (lambda b, h, q, k: (q >= k) & (q - k < 40), 3),
    "window": (lambda b, h, q, k: abs(q - k) < 40, 4),
    "prefix": (lambda b, h, q, k: (q >= k) | (k < jnp.asarray(ENDS)[b]), 2),
    "documents": (
        lambda b, h, q, k: (
            (jnp.asarray(SORTED)[q] == jnp.asarray(SORTED)[k]) & (q >= k)
        ),
        3,
    ),
    "documents by sequence": (
        lambda b, h, q, k: jnp.asarray(BATCH)[b, q] == jnp.asarray(BATCH)[b, k],
        4,
    ),
    "documents by row": (
        lambda b, h, q, k: jnp.asarray(BATCH)[b][q] == jnp.asarray(BATCH)[b][k],
        4,
    ),
    "documents, chained": (
        lambda b, h, q, k: jnp.asarray(ENDS)[jnp.asarray(SORTED)[q] // 4] > k,
        2,
    ),
    "documents, taken": (
        lambda b, h, q, k: (
            jnp.take(jnp.asarray(BATCH)[b], q) == jnp.take(jnp.asarray(BATCH)[b], k)
        ),
        4,
    ),
    "documents, filled": (gathered("fill"), 4),
    "documents, clipped": (gathered("clip"), 4),
    "documents of bytes": (
        lambda b, h, q, k: (
            jnp.asarray(SORTED.astype(np.uint8))[q]
            == jnp.asarray(SORTED.astype(np.uint8))[k]
        ),
        4,
    ),
    "padding": (lambda b, h, q, k: k < jnp.asarray(ENDS)[b], 1),
    "block diffusion": (lambda b, h, q, k: q // 48 >= k // 48, 0),
    "floor division of negative numbers": (
        lambda b, h, q, k: (q - 100) // 48 >= (k - 100) // 48,
        2,
    ),
    "remainder of negative numbers": (
        lambda b, h, q, k: (q - 96) % 48 < 16 + 0 * k,
        0,
    ),
    "shifts": (lambda b, h, q, k: (q >> 4) == (k >> 4), 0),
    "bits": (lambda b, h, q, k: (q & 64) == (k & 64), 0),
    "selected": (lambda b, h, q, k: jnp.where(b == 0, q >= k, q <= k), 1),
    "branches": (
        lambda b, h, q, k: lax.cond(b == 0, lambda: q >= k, lambda: q - k > 3),
        2,
    ),
    "checkpointed": (lambda b, h, q, k: jax.checkpoint(jnp.add)(q, 3) >= k, 2),
    "clamped": (lambda b, h, q, k: lax.clamp(jnp.int32(5), q, jnp.int32(99)) >= k, 1),
    "floats": (
        lambda b, h, q, k: q.astype(jnp.float32) * 0.5 >= k.astype(jnp.float32),
        2,
    ),
    "small reduction": (
        lambda b, h, q, k: jnp.any(jnp.asarray(ENDS) <= q) & (k < jnp.max(ENDS)),
        2,
    ),
    "squares": (lambda b, h, q, k: (q - k) ** 2 < 900, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DECIDED)
def test_intervals_leave_open_a_few_blocks_a_row(name):
    mask_mod, per_row = DECIDED[name]
    assert undecided(mask_mod) <= 2 * per_row * ROWS


_BIG = jnp.iinfo(jnp.int32).max


TRAPS = {
    "products wrap around": lambda b, h, q, k: q * 30_000_000 > k * 29_999_999,
    "sums wrap around": lambda b, h, q, k: q + (_BIG - 100) > k,
    "differences wrap around": lambda b, h, q, k: -q - (_BIG - 100) < k,
    "powers wrap around": lambda b, h, q, k: (q * 20) ** 3 > k,
    "the least integer": lambda b, h, q, k: abs(q - _BIG - 1) > k,
    "bytes wrap around": lambda b, h, q, k: q.astype(jnp.int8) + jnp.int8(9) > 0,
    "unsigned differences": lambda b, h, q, k: (
        q.astype(jnp.uint32) - k.astype(jnp.uint32) < jnp.uint32(9)
    ),
    "negative to unsigned": lambda b, h, q, k: (q - k).astype(jnp.uint32) > 9,
    "shifted out": lambda b, h, q, k: (q << 26) > (k << 27),
    "shifted too far": lambda b, h, q, k: (q >> (k // 6)) > 0,
    "logical shift of negatives": lambda b, h, q, k: (
        lax.shift_right_logical(q - k, jnp.int32(3)) > 9
    ),
    "division by negatives": lambda b, h, q, k: (q - 99) // -7 > k % -5,
    "division by a range over zero": lambda b, h, q, k: q // (k - 99) > 1,
    "truncated remainder": lambda b, h, q, k: lax.rem(q - k, jnp.int32(7)) > 2,
    "truncated quotient": lambda b, h, q, k: lax.div(q - k, jnp.int32(7)) >= 0,
    "bits of negatives": lambda b, h, q, k: ((q - 99) ^ k) & (q | -k) > 5,
    "negative indices": lambda b, h, q, k: jnp.asarray(MIXED)[q - 99] > k,
    "out of bounds": lambda b, h, q, k: jnp.asarray(MIXED)[q + 99] > k - 200,
    "out of bounds, filled": lambda b, h, q, k: (
        jnp.asarray(MIXED).at[q + k].get(mode="fill", fill_value=7) > 0
    ),
    "out of bounds, clipped": lambda b, h, q, k: (
        jnp.asarray(MIXED).at[q - 300].get(mode="clip") > k - 99
    ),
    "out of bounds, taken": lambda b, h, q, k: jnp.take(SORTED, q + 30) >= 0,
    "mixed contents as indices": lambda b, h, q, k: (
        jnp.asarray(SORTED)[jnp.asarray(MIXED)[q]] > 2
    ),
    "two ranges": lambda b, h, q, k: jnp.asarray(BATCH)[q, k] > 3,
    "slices": lambda b, h, q, k: lax.dynamic_slice(SORTED, (q,), (4,)).sum() > k,
    "NaN is above nothing": lambda b, h, q, k: jnp.asarray(HOLES)[q] >= 1.0,
    "NaN is below nothing": lambda b, h, q, k: ~(jnp.asarray(HOLES)[q] < 1.0),
    "NaN differs from itself": lambda b, h, q, k: (
        jnp.asarray(HOLES)[q] == jnp.asarray(HOLES)[q]
    ),
    "NaN as a bool": lambda b, h, q, k: jnp.asarray(HOLES)[q].astype(bool),
    "NaN among extremes": lambda b, h, q, k: (
        jnp.maximum(jnp.asarray(HOLES)[q], 2.0) > 1.5
    ),
    "infinity minus infinity": lambda b, h, q, k: (
        (jnp.where(q > 9, jnp.inf, 1.0) - jnp.where(k > 9, jnp.inf, 1.0)) >= 0.0
    ),
    "halves overflow": lambda b, h, q, k: (
        (q * 300).astype(jnp.float16) >= (k * 300).astype(jnp.float16)
    ),
    "bools as indices": lambda b, h, q, k: jnp.asarray(FEW)[(q % 3 == 0).astype(int)],
    "captured bools": lambda b, h, q, k: jnp.asarray(FEW)[q // 80] | (k > 9),
    "no order": lambda b, h, q, k: jax.random.bernoulli(
        jax.random.fold_in(jax.random.key(0), q)
    ),
    "loops": lambda b, h, q, k: lax.fori_loop(0, 3, lambda i, x: x * 2 - i, q) > k,
    "transcendental": lambda b, h, q, k: jnp.sin(q.astype(jnp.float32)) > 0.3,
    "a constant": lambda b, h, q, k: jnp.bool_(True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAPS)
def test_what_intervals_prove_holds_for_every_score(name):
    undecided(TRAPS[name])


def test_lookups_find_the_extremes_of_any_contents():
    table = jnp.asarray(MIXED)
    blocks = MIXED.reshape(ROWS, BLOCK)
    for level in (-100, 0, 250):
        mask = closed(lambda b, h, q, k, level=level: table[q] > level)
        sizes = (1, 1, (LENGTH, BLOCK), (BLOCK, BLOCK))
        certain, possible = jax.jit(decide, static_argnums=(1, 2, 3, 4))(mask, *sizes)
        np.testing.assert_array_equal(certain[0, 0, :, 0], blocks.min(1) > level)
        np.testing.assert_array_equal(possible[0, 0, :, 0], blocks.max(1) > level)


def test_windows_of_every_width_and_place():
    table = jnp.asarray(MIXED)
    mask = closed(lambda b, h, q, k: table[q + k] > 0)
    for width in (1, 3, 31, 32, 33):
        lengths = (LENGTH - width, width)
        decided = jax.jit(decide, static_argnums=(1, 2, 3, 4))
        certain, _ = decided(mask, 1, 1, lengths, (1, width))
        wanted = [MIXED[i : i + width].min() > 0 for i in range(lengths[0])]
        np.testing.assert_array_equal(certain[0, 0, :, 0], wanted)
