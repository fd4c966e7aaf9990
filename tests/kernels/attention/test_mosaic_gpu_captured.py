"""Laws of the sums that gradients of captured arrays are made of, on Hopper GPUs."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import gaussian
from attention_plain import attention as plain_attention, pulled_back
from helpers import assert_error_rule, in_float64
from hypothesis import given, settings, strategies as st

import pliax as px
from pliax.kernels.attention import (
    api,
    mosaic_gpu_captured,
    mosaic_gpu_limits,
    tile_sums,
)
from pliax.kernels.attention.mosaic_gpu_captured import _Captured


def by_difference(sizes, *given):
    return jax.jit(partial(tile_sums.by_difference, sizes))(*given)


def in_tiles(scores, columns):
    """The sums along the diagonals of 64 rows and so many columns."""
    R, C = (-(-n // size) for n, size in zip(scores.shape, (64, columns), strict=True))
    widths = zip((64 * R, columns * C), scores.shape, strict=True)
    tiles = np.pad(scores, [(0, n - m) for n, m in widths])
    tiles = tiles.reshape(R, 64, C, columns).swapaxes(1, 2)
    found = np.zeros((R, C, 64 + columns), scores.dtype)
    for n in range(64 + columns - 1):
        found[:, :, n] = np.trace(tiles, columns - 1 - n, 2, 3)
    return found


@settings(max_examples=10)
@given(
    T=st.integers(1, 300),
    S=st.integers(1, 300),
    columns=st.sampled_from([64, 128]),
    seed=st.integers(0, 2**16),
)
def test_sums_along_diagonals_of_tiles_are_those_of_all_scores(T, S, columns, seed):
    scores = np.random.default_rng(seed).integers(-99, 99, (T, S)).astype(np.float32)
    found = jnp.asarray(in_tiles(scores, columns))[None, None, :, :, None]
    parts = 128 // columns  # of which each has a share
    found = jnp.concatenate([found - 1, *[jnp.ones_like(found)] * (parts - 1)], axis=4)
    found = found if parts > 1 else found + 1
    wanted = [np.trace(scores, -d) for d in range(1 - S, T)]
    found = by_difference({"q": T, "k": S}, found, None)
    np.testing.assert_array_equal(found[0, 0], wanted)


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize(("seen", "lengths"), [
    ([1, 0, 1, 0, 0, 0], (256, 384)), ([0, 1, 0, 1, 1, 1], (156, 300)),
])  # fmt: skip
def test_nothing_is_read_of_tiles_that_are_not_visited(seen, lengths, columns):
    table = jnp.asarray(seen, bool).reshape(2, 3)
    mask = px.create_block_mask(
        lambda b, h, q, k: table[q // 128, k // 128], None, None, *lengths
    )
    shown = np.repeat(np.repeat(np.asarray(table), 128, 0), 128, 1)
    scores = np.where(shown[: lengths[0], : lengths[1]], 1.0, 0.0).astype(np.float32)
    found = in_tiles(scores, columns)
    R, C = found.shape[:2]
    is_visited = shown[::64, ::columns][:R, :C]
    found = np.where(is_visited[..., None], found, np.nan)[None, None, :, :, None]
    wanted = [np.trace(scores, -d) for d in range(1 - lengths[1], lengths[0])]
    sizes = dict(zip("qk", lengths, strict=True))
    is_visited = tile_sums.visited(mask, (R, C), columns)
    found = by_difference(sizes, jnp.asarray(found), is_visited)
    np.testing.assert_array_equal(found[0, 0], wanted)
    tiles = np.full((R * 64, C * columns), np.nan, np.float32)
    tiles[: lengths[0], : lengths[1]] = np.where(scores, 1.0, np.nan)
    tiles = jnp.asarray(tiles.reshape(1, 1, R, 64, C, columns))
    np.testing.assert_array_equal(
        tile_sums.by_pair(sizes, tiles, is_visited)[0, 0], scores
    )


@dataclass(frozen=True)
class Case:
    """Gradients of what one mod captured, under one mask, at some sizes."""

    mask: Any = None
    lengths: tuple[int, int] = (130, 130)
    heads: tuple[int, int] = (2, 1)
    channels: tuple[int, int] = (64, 64)
    dtype: Any = jnp.bfloat16
    block: int = 128


CASES = {
    "causal": Case(lambda b, h, q, k: q >= k),
    "no mask": Case(lengths=(70, 150), heads=(2, 2)),
    "small blocks": Case(lambda b, h, q, k: (q // 50 == k // 50) & (q >= k), block=64),
    "wide": Case(channels=(128, 80), dtype=jnp.float16),
    "widest": Case(lambda b, h, q, k: q >= k, channels=(192, 256), lengths=(70, 70)),
    "few queries": Case(lengths=(3, 200)),
    # Whole blocks that nobody visits, and places of others, hold anything.
    "unseen": Case(lambda b, h, q, k: (q >= k) & (k < 100) & (q != 3), (300, 300)),
}


def operands(case):
    """Query, key and value, what the mod captures, and the mask."""
    (T, S), (H, K), (D, V) = case.lengths, case.heads, case.channels
    shapes = (1, T, H, D), (1, S, K, D), (1, S, K, V)
    arrays = [gaussian(n, x, case.dtype) for n, x in enumerate(shapes)]
    shapes = (H,), (1, T), (1, S), (H, 600), (T, H, S + 1)
    floats = [gaussian(n + 3, x, case.dtype) for n, x in enumerate(shapes)]
    mask = case.mask and px.create_block_mask(
        case.mask, None, None, T, S, block_size=case.block
    )
    return arrays, floats, mask


def score_of(floats):
    """A mod with sums by query, by key, by difference and by pair."""
    heads, rows, columns, distances, pairs = floats

    def score(s, b, h, q, k):
        near = s * distances[h, q - k + 300].astype(s.dtype)
        near += columns[b, k].astype(s.dtype) * heads[h].astype(s.dtype)
        near += pairs[q, h, k + 1].astype(s.dtype)
        return jnp.where(q >= k, near, s - rows[b, q].astype(s.dtype))

    return score


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x != "causal")) for x in CASES]
)
def test_gradients_of_captured_arrays_are_as_exact_as_those_of_the_formula(
    name, monkeypatch
):
    """Those of all kinds of sums, and no other way is taken."""
    case = CASES[name]
    arrays, floats, mask = operands(case)
    T, H, V = case.lengths[0], case.heads[0], case.channels[1]
    cotangents = gaussian(20, (1, T, H, V), case.dtype), gaussian(21, (1, T, H))

    def fused(arrays, floats):
        out, aux = px.flex_attention(
            *arrays, score_mod=score_of(floats), block_mask=mask, enable_gqa=True,
            return_aux=px.AuxRequest(lse=True, max_scores=True),
            implementation="mosaic_gpu", kernel_options={"interpret": 1},
        )  # fmt: skip
        return out, aux.lse, aux.max_scores

    def formula(arrays, floats):
        return plain_attention(*arrays, score=score_of(floats), visible=case.mask)

    def gradients(attend, arrays, floats):
        return pulled_back(attend, arrays, floats, cotangents)[1][1]

    monkeypatch.delattr(api, "_captured_gradients")
    plain = jax.jit(partial(gradients, formula))
    golden = in_float64(plain, arrays, floats)
    expected = plain(arrays, floats)
    if name == "unseen":  # the formula multiplies NaN by 0
        arrays = [arrays[0], *(x.at[:, 100:].set(jnp.nan) for x in arrays[1:])]
    found = jax.jit(partial(gradients, fused))(arrays, floats)
    assert_error_rule(found, expected, golden)


@pytest.mark.slow
def test_queries_beyond_the_last_leave_no_trace_in_sums_by_difference():
    """Of their scores, which are 0, the mod makes NaN."""
    T, S = 70, 128
    arrays = [gaussian(n, (1, x, 1, 64), jnp.bfloat16) for n, x in enumerate((T, S, S))]

    def loss(table, **how):
        out = px.flex_attention(
            *arrays, score_mod=lambda s, b, h, i, j: s / jnp.abs(s) + table[i - j + S],
            **how,
        )  # fmt: skip
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    table, options = gaussian(3, (T + S,)), {"interpret": 1}
    found = jax.grad(loss)(table, implementation="mosaic_gpu", kernel_options=options)
    wanted = jax.grad(loss)(table, implementation="xla")
    assert jnp.abs(found - wanted).max() <= 0.02 * jnp.abs(wanted).max()


@pytest.mark.slow
def test_places_in_pictures_are_looked_up_by_pair_and_added_in_one_order(monkeypatch):
    """As in Swin (Liu et al., 2021), of windows that all sequences are."""
    monkeypatch.delattr(api, "_captured_gradients")
    width, T = 6, 36
    arrays = [gaussian(n, (3, T, 2, 64), jnp.bfloat16) for n in range(3)]

    def loss(table, **how):
        def score(s, b, h, q, k):
            row, column = q // width - k // width, q % width - k % width
            return s + table[row + width - 1, column + width - 1, h]

        out = px.flex_attention(*arrays, score_mod=score, **how)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    table, options = gaussian(3, (2 * width - 1, 2 * width - 1, 2)), {"interpret": 1}
    fused = partial(loss, implementation="mosaic_gpu", kernel_options=options)
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(fused))(table))
    atomic = partial(fused, kernel_options=options | {"deterministic": False})
    assert "scatter-add" in str(jax.make_jaxpr(jax.grad(atomic))(table))
    found, wanted = jax.grad(fused)(table), jax.grad(loss)(table)
    assert jnp.abs(found - wanted).max() <= 0.02 * jnp.abs(wanted).max()


@pytest.mark.slow
def test_sequences_may_take_turns_where_memory_does_not_hold_all_tiles(monkeypatch):
    """Two of four; each has its mask, and numbers of its own."""
    B, T = 4, 70
    arrays = [gaussian(n, (B, T, 2, 64), jnp.bfloat16) for n in range(3)]
    shapes = (2, T, T), (B, T, T), (B, 2 * T), (B, T)
    floats = [gaussian(n + 3, x) for n, x in enumerate(shapes)]
    ends = jnp.asarray([70, 9, 40, 66])
    mask = px.create_block_mask(lambda b, h, q, k: k < ends[b], B, None, T, T)

    def gradients(**how):
        def loss(floats):
            pairs, own, distances, rows = floats

            def score(s, b, h, q, k):
                own_pairs = own[b, q, k] + distances[b, q - k + T] * rows[b, q]
                return s + pairs[h, q, k] + own_pairs

            out = px.flex_attention(*arrays, score_mod=score, block_mask=mask, **how)
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.grad(loss)(floats)

    monkeypatch.delattr(api, "_captured_gradients")
    monkeypatch.setattr(mosaic_gpu_captured, "_MOST", 2**20)
    parts = []
    add = mosaic_gpu_captured._over_parts
    monkeypatch.setattr(
        mosaic_gpu_captured,
        "_over_parts",
        lambda *given: parts.append(given[1].parts) or add(*given),
    )
    found = gradients(implementation="mosaic_gpu", kernel_options={"interpret": 1})
    assert parts == [2]
    for x, wanted in zip(found, gradients(), strict=True):
        assert jnp.abs(x - wanted).max() <= 0.02 * jnp.abs(wanted).max()


@pytest.mark.parametrize(("limit", "T"), [("_MOST", 64), ("CAPTURED_LEAVES", 96)])
def test_sums_that_would_fill_the_memory_are_left_to_another_way(limit, T, monkeypatch):
    monkeypatch.setattr(mosaic_gpu_captured, limit, 0)
    arrays = [gaussian(n, (1, T, 1, 64), jnp.bfloat16) for n in range(3)]
    taken = []
    monkeypatch.setattr(
        api,
        "_captured_gradients",
        lambda arrays, mod, *_, **__: taken.append(1) or mod.captured,
    )

    def loss(table):
        out = px.flex_attention(
            *arrays, score_mod=lambda s, b, h, q, k: s + table[q - k + T],
            implementation="mosaic_gpu", kernel_options={"interpret": 1},
        )  # fmt: skip
        return jnp.sum(out.astype(jnp.float32))

    jax.make_jaxpr(jax.grad(loss))(gaussian(3, (2 * T,)))
    assert taken


@pytest.mark.parametrize(("name", "parts"), [
    ("causal", 1), ("no mask", 1), ("small blocks", 1), ("small blocks", 2), ("widest", 1)
])  # fmt: skip
def test_the_kernels_of_all_kinds_of_sums_lower_for_a_gpu(name, parts, monkeypatch):
    monkeypatch.setattr(mosaic_gpu_limits, "refused_device", lambda: None)
    monkeypatch.delattr(api, "_captured_gradients")
    monkeypatch.setattr(
        mosaic_gpu_captured,
        "_in_parts",
        lambda gradient, kinds: _Captured(gradient, kinds, parts),
    )
    case = CASES[name]
    arrays, floats, mask = operands(case)
    arrays, floats = jax.tree.map(
        lambda x: jnp.repeat(x, parts, axis=0) if x.shape[0] == 1 else x,
        (arrays, floats),
    )

    def loss(floats):
        out = px.flex_attention(
            *arrays, score_mod=score_of(floats), block_mask=mask, enable_gqa=True,
            implementation="mosaic_gpu",
        )  # fmt: skip
        return jnp.sum(out.astype(jnp.float32))

    lowered = jax.jit(jax.grad(loss)).trace(floats).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 2


@pytest.mark.parametrize("way", ["half precision", "loop", "blocks"])
def test_where_sums_have_no_order_that_is_refused_if_one_is_asked_for(way):
    arrays = [gaussian(n, (1, 64, 1, 64), jnp.bfloat16) for n in range(3)]
    places = jnp.asarray([0, 2, 2, 5])

    def loss(table, **options):
        def score(s, b, h, q, k):
            if way == "loop":
                rows = jax.lax.map(lambda n: table[places] * n, table[:4])
                return s + rows[q % 4, k % 4]
            table_in_half = table.astype(jnp.bfloat16)
            return s + table_in_half[(q + k) % 8].astype(jnp.float32)

        out = px.flex_attention(
            *arrays, score_mod=score, block_mask=mask, implementation="mosaic_gpu",
            kernel_options=options | {"interpret": 1},
        )  # fmt: skip
        return jnp.sum(out.astype(jnp.float32))

    mask = None
    if way == "blocks":
        causal = px.kernels.masks.causal
        mask = px.create_block_mask(causal, None, None, 64, 64, block_size=(96, 64))
    table = gaussian(3, (8,))
    assert "scatter-add" in str(jax.make_jaxpr(jax.grad(loss))(table))
    with pytest.raises(NotImplementedError, match=r"in no order.*\n.*XLA"):
        jax.make_jaxpr(jax.grad(partial(loss, deterministic=True)))(table)
