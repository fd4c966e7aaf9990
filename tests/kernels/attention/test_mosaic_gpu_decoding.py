"""Laws of few queries in the fused kernels: heads in tiles and parts of keys."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import distance, gaussian
from attention_plain import attention as plain_attention
from helpers import assert_error_rule, in_float64
from hypothesis import given, settings, strategies as st

import pliax as px
from pliax.kernels import masks, mods, paging
from pliax.kernels.attention import (
    mosaic_gpu,
    mosaic_gpu_decoding,
    mosaic_gpu_limits,
)
from pliax.kernels.attention.configs import decoding_config, splits as splits_of
from pliax.kernels.attention.head_packing import pack
from pliax.kernels.attention.mosaic_gpu_visits import Visits


B, H = 2, 8
BF16 = jnp.bfloat16
EVERYTHING = px.AuxRequest(lse=True, max_scores=True)
SLOPES = 2.0 ** -jnp.arange(1.0, H + 1)


@dataclass(frozen=True)
class Mod:
    """A mod `(lengths, table) -> score_mod`, for scalars and for whole arrays."""

    make: Any = lambda n, t: None
    plain: Any = lambda n, t: None
    table: Any = lambda T, S: (1, 1)


def _alibi(of_head):
    def make(n, t):
        return lambda s, b, h, q, k: s - of_head(h, s) * distance(s, n[b] + q, k)

    return make


def _by_query(n, t):
    return lambda s, b, h, q, k: s * (q - 3 * h).astype(s.dtype)


MODS = {
    "none": Mod(),
    "alibi": Mod(
        _alibi(lambda h, s: SLOPES[h].astype(s.dtype)),
        _alibi(lambda h, s: SLOPES.astype(s.dtype)[None, :, None, None]),
    ),
    "query": Mod(_by_query, _by_query),
    "head and query": Mod(
        lambda n, t: lambda s, b, h, q, k: s + t[h, q].astype(s.dtype),
        lambda n, t: lambda s, b, h, q, k: s + t[None, :, :, None].astype(s.dtype),
        lambda T, S: (H, T),
    ),
    "head and key": Mod(
        lambda n, t: lambda s, b, h, q, k: s * t[h, k].astype(s.dtype),
        lambda n, t: lambda s, b, h, q, k: s * t[None, :, None].astype(s.dtype),
        lambda T, S: (H, S),
    ),
}


@dataclass(frozen=True)
class Case:
    """Some queries under a mod and a mask, at some sizes, in some parts."""

    mod: str = "none"
    mask: Any = None  # (batch, block), or none
    lengths: tuple[int, int] = (1, 200)
    heads: int = 2  # of keys
    channels: tuple[int, int] = (64, 64)
    splits: int | None = 2
    shares_keys: bool = False
    filled: tuple[int, int] = (150, 33)
    dtype: Any = BF16
    is_interpreted: bool = True

    def __str__(self):
        sizes = "x".join(map(str, (*self.lengths, self.heads, *self.channels)))
        mask = self.mask and f"{self.mask[0]}-{self.mask[1]}"
        return f"{self.mod}-{mask}-{sizes}-{self.splits}"


CASES = [
    Case(),
    Case(heads=1, mask=(2, 128), splits=3),
    Case("alibi", mask=(2, (1, 64)), splits=2),
    Case("alibi", mask=(1, 64), lengths=(5, 150), splits=4),
    Case("head and query", lengths=(16, 130), heads=1, splits=1),
    Case("head and key", mask=(2, 128), lengths=(3, 140), splits=2),
    Case("query", lengths=(17, 300), heads=2, mask=(2, 128), splits=2),
    Case(lengths=(20, 160), heads=H, mask=(2, (64, 64)), splits=2),
    Case(lengths=(100, 260), mask=(1, 64), splits=2),  # two rows of blocks
    Case("alibi", channels=(128, 96), lengths=(2, 200), splits=3, dtype=jnp.float16),
    Case(channels=(256, 256), mask=(2, 64), lengths=(1, 200), splits=2),
    Case(mask=(2, 128), shares_keys=True, filled=(1, 0), splits=5),
    Case(lengths=(127, 130), mask=(1, 128), splits=2, filled=(3, 3)),
    Case(lengths=(130, 130), mask=(1, 128), splits=2, filled=(0, 0)),
    Case(lengths=(1, 17), splits=None),
]
OFTEN = (2, 9, 11)


def operands(case):
    (T, S), (D, V), K = case.lengths, case.channels, case.heads
    batch = 1 if case.shares_keys else B
    shapes = (B, T, H, D), (batch, S, K, D), (batch, S, K, V)
    arrays = tuple(gaussian(n, x, case.dtype) for n, x in enumerate(shapes))
    table = gaussian(3, MODS[case.mod].table(T, S))
    return arrays, table, jnp.asarray(case.filled, jnp.int32)


def plain(case, arrays, table, lengths):
    visible = None
    if case.mask:
        n = lengths if case.mask[0] > 1 else lengths[:1].repeat(B)
        visible = lambda b, h, q, k: n[b] + q >= k  # noqa: E731
    score = MODS[case.mod].plain(lengths, table)
    return plain_attention(*arrays, score=score, visible=visible)


def fused(case, arrays, table, lengths):
    (T, S), block_mask = case.lengths, None
    if case.mask:
        batch, block = case.mask
        n = lengths if batch > 1 else lengths[0]
        causal = masks.with_offset(masks.causal, n)
        batch = batch if batch > 1 else None
        block_mask = px.create_block_mask(causal, batch, None, T, S, block_size=block)
    options = {"interpret": 1} if case.is_interpreted else {}
    options |= {"splits": case.splits} if case.splits else {}
    out, aux = px.flex_attention(
        *arrays, score_mod=MODS[case.mod].make(lengths, table), block_mask=block_mask,
        enable_gqa=True, return_aux=EVERYTHING, implementation="mosaic_gpu",
        kernel_options=options,
    )  # fmt: skip
    return out, aux.lse, aux.max_scores


def obey(case):
    args = operands(case)
    formula = jax.jit(partial(plain, case))
    found = jax.jit(partial(fused, case))(*args)
    assert_error_rule(found, formula(*args), in_float64(formula, *args))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(x, marks=[] if n in OFTEN else [pytest.mark.slow], id=str(x))
        for n, x in enumerate(CASES)
    ],
)
def test_parts_of_keys_and_packed_heads_are_as_exact_as_the_plain_formula(case):
    obey(case)


@pytest.mark.parametrize(
    "attend", [mosaic_gpu_decoding.forward, mosaic_gpu_decoding.inference]
)
@pytest.mark.parametrize(
    ("queries", "options", "has_parts"),
    [
        (127, {}, True),
        (128, {}, False),
        (128, {"splits": 3}, True),
        (5, {"asked": {"block_q": 64}}, False),
    ],
)
def test_few_queries_have_parts_whatever_is_asked_for(
    attend, queries, options, has_parts
):
    arrays = [jnp.zeros((1, T, 2, 64), jnp.bfloat16) for T in (queries, 1024, 1024)]
    run = partial(attend, score_mod=None, block_mask=None, scale=0.1, **options)
    program = str(jax.make_jaxpr(run)(arrays))
    assert ("'parts'" in program) == has_parts
    if "splits" in options:
        assert f"grid=(1, {options['splits']}, " in program


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 4)
@given(
    mod=st.sampled_from(list(MODS)),
    queries=st.integers(1, 40),
    keys=st.integers(1, 300),
    heads=st.sampled_from([1, 2, 4, H]),
    splits=st.sampled_from([1, 2, 5]),
    mask=st.sampled_from([None, (1, 64), (2, 128)]),
    filled=st.tuples(st.integers(0, 300), st.integers(0, 300)),
)
def test_sizes_do_not_matter(mod, queries, keys, heads, splits, mask, filled):
    lengths = queries, keys
    obey(Case(mod, mask, lengths, heads, splits=splits, filled=filled))


@given(
    full=st.integers(0, 40), partly=st.integers(0, 40), parts=st.sampled_from([1, 3, 7])
)
def test_parts_of_visits_are_all_visits_and_of_equal_length(full, partly, parts):
    place = lambda i: (64 * i, 3 * i)  # noqa: E731
    whole = Visits(jnp.int32(full), jnp.int32(full + partly), place)
    found, lengths = [], []
    for n in range(parts):
        part = whole.part(jnp.int32(n), parts)
        visits = [part.place(i) for i in range(int(part.total))]
        assert visits == [] or part.first(0) == visits[0][0]
        found += [(*map(int, x), i < int(part.full)) for i, x in enumerate(visits)]
        lengths.append(len(visits))
    assert found == [(64 * i, 3 * i, i < full) for i in range(full + partly)]
    assert max(lengths) == -(-(full + partly) // parts)


@given(
    rows=st.integers(1, 1100),
    channels=st.tuples(*[st.sampled_from([64, 128, 192, 256])] * 2),
    blocks=st.sampled_from([None, (64, 64), (128, 128), (192, 64), (128, 192)]),
)
def test_every_configuration_fits_into_a_thread_block(rows, channels, blocks):
    config = decoding_config(rows, channels, blocks)
    matrices = config.stages * config.columns * sum(channels) * 2
    tiles = config.groups * config.rows * max(2 * channels[0], 4 * channels[1])
    assert matrices + tiles <= 227 * 2**10 and config.stages >= 2
    assert config.stages % config.takers == 0
    assert blocks is None or not (blocks[0] % config.span or blocks[1] % config.columns)


@pytest.mark.parametrize("blocks", [1, 2, 16, 100, 132, 500])
def test_parts_keep_all_multiprocessors_busy(blocks):
    visits, n = 2048, splits_of(blocks, 2048)
    waves = -(-blocks * n // 132)
    assert blocks * visits / 132 / (waves * -(-visits // n)) > 0.85
    assert splits_of(blocks, 1) == 1


def test_rows_are_query_heads_of_their_key_head():
    query = jnp.arange(2.0 * 3 * 8).reshape(2, 3, 8, 1)
    rows = pack(query, 4)
    assert rows.shape == (2, 2, 12, 1) and rows[1, 1, 7, 0] == query[1, 1, 7, 0]


# --- caches ---------------------------------------------------------------------------


def step_of(implementation, options=None):
    """One token more, at the end of what each sequence has."""

    def step(query, keys, values, lengths):
        causal = masks.with_offset(masks.causal, lengths)
        mask = px.create_block_mask(causal, B, None, 1, keys.shape[1], block_size=64)
        return px.flex_attention(
            query, keys, values, block_mask=mask, enable_gqa=True,
            score_mod=mods.with_offset(mods.alibi(H), lengths),
            implementation=implementation, kernel_options=options,
        )  # fmt: skip

    run: Any = jax.jit(step)
    return run


def test_a_cache_that_fills_compiles_nothing_and_its_rest_may_hold_nan():
    query = gaussian(0, (B, 1, H, 64), BF16)
    keys, values = (gaussian(n, (B, 256, 2, 64), BF16) for n in (1, 2))
    step, known = step_of("mosaic_gpu", {"interpret": 1, "splits": 3}), step_of("xla")

    def found(run, lengths):
        rest = (jnp.arange(256)[None] > lengths[:, None])[..., None, None]
        dirty = (jnp.where(rest, jnp.nan, x).astype(BF16) for x in (keys, values))
        return np.asarray(run(query, *dirty, lengths), np.float32)

    fill = [jnp.asarray(x, jnp.int32) for x in ([0, 255], [70, 128], [71, 129])]
    # JAX's interpreter, loaded by the first kernel, adds to what caches are keyed by.
    found(step_of("mosaic_gpu", {"interpret": 1, "splits": 3}), fill[0])
    first = [found(step, x) for x in fill]
    assert step._cache_size() == 1
    for x, lengths in zip(first, fill, strict=True):
        np.testing.assert_allclose(x, found(known, lengths), rtol=0.02, atol=8e-3)


@pytest.mark.parametrize("queries", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_pages_give_what_their_sequences_give(queries):
    """Sequences share keys and values, whose pages lie in any order."""
    length, size, pages = 200, 64, 10
    query = gaussian(0, (B, queries, H, 64), BF16)
    keys, values = (gaussian(n, (B, length, 2, 64), BF16) for n in (1, 2))
    cache = paging.PagedCache.create(B, pages, size, 2, 64, dtype=BF16, max_pages=4)
    for n in range(0, length, 50):  # in turns: so their pages alternate
        cache = paging.reserve(cache, jnp.arange(B), n + 50)
        positions = jnp.tile(n + jnp.arange(50), (B, 1))
        new = (x[:, n : n + 50] for x in (keys, values))
        cache = paging.assign(cache, jnp.arange(B), positions, *new)
    bias = mods.with_offset(mods.alibi(H), cache.lengths - queries)
    causal = masks.with_offset(masks.causal, cache.lengths - queries)
    mask = px.create_block_mask(causal, B, None, queries, 256, block_size=(16, size))
    attend = partial(
        px.flex_attention, enable_gqa=True, implementation="mosaic_gpu",
        kernel_options={"interpret": 1, "splits": 2},
    )  # fmt: skip

    def of_pages(query, cache):
        return attend(
            query, cache.keys, cache.values,
            score_mod=paging.convert_score_mod(cache, bias),
            block_mask=paging.convert_block_mask(cache, mask),
        )  # fmt: skip

    paged = of_pages(query, cache)
    program = jax.make_jaxpr(of_pages)(query, cache)  # knows of pages, not of rows
    assert f"[{B},{pages}]" in str(program)
    assert f"[{B},{pages * size}" not in str(program)
    short = px.create_block_mask(causal, B, None, queries, length)
    wanted = px.flex_attention(
        query, keys, values, score_mod=bias, block_mask=short, enable_gqa=True
    )
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (paged, wanted)), rtol=0.02, atol=8e-3
    )


@pytest.mark.parametrize("far", [2**30, pytest.param(9, marks=pytest.mark.slow)])
def test_queries_may_begin_where_float32_holds_no_position(far, monkeypatch):
    """One sequence begins near, so that its distances are differences of floats."""
    monkeypatch.setattr(mosaic_gpu, "MANY", 1)
    offsets = jnp.asarray([40, far], jnp.int32)
    query = gaussian(0, (B, 16, H, 64), BF16)
    keys, values = (gaussian(n, (B, 256, 1, 64), BF16) for n in (1, 2))
    attend = partial(
        px.flex_attention, query, keys, values, enable_gqa=True,
        score_mod=lambda s, b, h, q, k: s - abs(q + offsets[b] - k).astype(s.dtype) / 64,
    )  # fmt: skip
    options = {"interpret": 1, "splits": 2}
    found = attend(implementation="mosaic_gpu", kernel_options=options)
    wanted = attend(implementation="reference")
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (found, wanted)), rtol=0.02, atol=8e-3
    )


# --- gradients, refusals, lowering ----------------------------------------------------


@pytest.mark.parametrize("block", [(1, 64), pytest.param(128, marks=pytest.mark.slow)])
def test_gradients_of_few_queries_are_those_of_the_formula(block):
    """By the backward kernels, or by `xla` where these do not take the blocks."""
    query = gaussian(0, (B, 1, H, 64), BF16)
    keys, values = (gaussian(n, (B, 130, 2, 64), BF16) for n in (1, 2))
    causal = masks.with_offset(masks.causal, jnp.asarray([100, 30], jnp.int32))
    mask = px.create_block_mask(causal, B, None, 1, 130, block_size=block)

    def gradients(implementation, options=None):
        def loss(query, keys, values, slopes):
            out, aux = px.flex_attention(
                query, keys, values, score_mod=mods.alibi(slopes), block_mask=mask,
                enable_gqa=True, implementation=implementation, kernel_options=options,
                return_aux=EVERYTHING,
            )  # fmt: skip
            return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(aux.lse)

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(query, keys, values, SLOPES)

    found, wanted = gradients("mosaic_gpu", {"interpret": 1}), gradients("reference")
    for x, y in zip(found, wanted, strict=True):
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=0.03, atol=0.03 * abs(y).max())


@pytest.mark.slow
def test_few_queries_in_a_bucket_leave_no_trace_of_the_padding():
    def attend(q, k, v):
        return px.flex_attention(
            q, k, v, enable_gqa=True, implementation="mosaic_gpu",
            kernel_options={"interpret": 1, "splits": 2},
        )  # fmt: skip

    q = gaussian(0, (1, 5, H, 64), BF16)
    k, v = (gaussian(n, (1, 70, 2, 64), BF16) for n in (1, 2))
    dims = {"q": "_, t, _, _", "k": "_, s, _, _", "v": "_, s, _, _"}
    widths = lambda n: ((0, 0), (0, n), (0, 0), (0, 0))  # noqa: E731
    filled = [
        jnp.pad(x, widths(n), constant_values=jnp.nan)
        for x, n in ((q, 3), (k, 58), (v, 58))
    ]
    found = px.pad(attend, dims=dims)(*filled, sizes={"t": 5, "s": 70})[:, :5]
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (found, attend(q, k, v))), rtol=0.02, atol=8e-3
    )  # fmt: skip


def test_heads_with_lists_of_their_own_are_rows_of_their_own():
    args = operands(Case(lengths=(2, 130)))
    mask_mod = lambda b, h, q, k: k >= 16 * h  # noqa: E731
    mask = px.create_block_mask(mask_mod, None, H, 2, 130, block_size=64)
    reason = mosaic_gpu_limits.refused_packing(args[0][:2], None, mask)
    assert reason is not None and "lists of blocks of their own" in reason
    attend = partial(px.flex_attention, *args[0], block_mask=mask, enable_gqa=True)
    options = {"interpret": 1, "splits": 2}
    found = attend(implementation="mosaic_gpu", kernel_options=options)
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (found, attend())), rtol=0.02, atol=8e-3
    )


def test_masks_with_several_rows_of_small_blocks_are_refused_with_the_reason():
    (q, k, v), *_ = operands(Case(lengths=(40, 128)))
    mask = px.create_block_mask(masks.causal, None, None, 40, 128, block_size=(16, 64))
    with pytest.raises(NotImplementedError, match=r"one row .* may be of any height"):
        px.flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True, implementation="mosaic_gpu",
            kernel_options={"interpret": 1},
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", [x for x in CASES if x.lengths[0] < 128], ids=str)
def test_few_queries_lower_for_a_gpu(case, monkeypatch):
    monkeypatch.setattr(mosaic_gpu_limits, "refused_device", lambda: None)
    case = replace(case, is_interpreted=False)
    traced = jax.jit(partial(fused, case)).trace(*operands(case))
    lowered = traced.lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_in_a_shard_map_over_heads_the_kernels_lower_for_a_gpu(monkeypatch):
    monkeypatch.setattr(mosaic_gpu_limits, "refused_device", lambda: None)
    shapes = (B, 2, H, 64), (B, 256, 2, 64), (B, 256, 2, 64)
    arrays = [gaussian(n, x, BF16) for n, x in enumerate(shapes)]
    spec = jax.sharding.PartitionSpec(None, None, "heads")
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
    def in_shards(q, k, v):
        return px.flex_attention(q, k, v, enable_gqa=True, implementation="mosaic_gpu")

    lowered = jax.jit(in_shards).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 2
