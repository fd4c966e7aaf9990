"""Laws of the fused kernels, in JAX's interpreter: as exact as the plain formula."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import MASKS, MODS, Mod, gaussian
from attention_plain import attention as plain_attention, pulled_back
from helpers import assert_error_rule, in_float64
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

import pliax as px
from pliax.kernels.attention import (
    mosaic_gpu,
    mosaic_gpu_columns,
    mosaic_gpu_limits,
    mosaic_gpu_tiles,
    mosaic_gpu_vjp,
)
from pliax.kernels.attention.arguments import close_score_mod
from pliax.kernels.attention.configs import Kernel
from pliax.kernels.attention.derivatives import widened
from pliax.kernels.attention.mosaic_gpu_backward import Order, counters_of, taken_at


INTERPRET = {"interpret": 1}
EVERYTHING = px.AuxRequest(lse=True, max_scores=True)
BF16_TABLE = Mod(
    "bf16_table",
    lambda t: lambda s, b, h, q, k: s + (t[h, k] * t.dtype.type(2)).astype(s.dtype),
    lambda t: lambda s, b, h, q, k: s + (2 * t)[None, :, None, :].astype(s.dtype),
    floats=lambda T, S: ((4, S),),
)
MOD = {x.name: x for x in (*MODS, BF16_TABLE)}
MASK = {x.name: x for x in MASKS}
B, H = 2, 4


@dataclass(frozen=True)
class Case:
    """One mod under one mask, at some sizes."""

    mod: str = "none"
    mask: str = "dense"
    lengths: tuple[int, int] = (192, 160)
    heads: int = 2  # of keys
    channels: tuple[int, int] = (64, 64)
    dtype: Any = jnp.bfloat16
    shares_keys: bool = False
    block: tuple[int, int] = (128, 128)
    scale: float | None = None
    options: dict = field(default_factory=dict)

    def __str__(self):
        sizes = "x".join(map(str, (*self.lengths, self.heads, *self.channels)))
        asked = "".join(f"-{name}{n}" for name, n in self.options.items())
        return f"{self.mod}-{self.mask}-{sizes}{asked}"


SMALL = {"block_q": 64, "block_kv": 64, "bwd_block_q": 64, "bwd_block_kv": 64}
CASES = [
    Case(lengths=(256, 256)),
    Case(mask="causal", lengths=(257, 257), heads=1),
    Case(mod="alibi", mask="causal"),
    Case(mod="soft_cap", mask="sliding_window", lengths=(130, 300)),
    Case(mask="document_ids", lengths=(200, 200), heads=4),
    Case(mod="relative_bias", mask="prefix_lm", lengths=(150, 150)),
    Case(mask="causal", channels=(128, 128), lengths=(128, 256), dtype=jnp.float16),
    Case(mask="causal", channels=(256, 96), lengths=(100, 140)),
    Case(mod="alibi", mask="causal", channels=(128, 128), lengths=(130, 130)),
    Case(mod="softplus", channels=(32, 80), lengths=(37, 45), shares_keys=True),
    Case(mask="causal", lengths=(140, 140), block=(64, 192)),
    Case(lengths=(1, 17), scale=-0.3),
    # Blocks that end beyond the keys, or the queries, though tiles do not.
    Case(mask="noop", channels=(256, 256), lengths=(64, 192)),
    Case(mask="noop", lengths=(64, 384), block=(64, 256)),
    Case(mask="sliding_window", lengths=(300, 300), block=(512, 512)),
    Case(mod="bf16_table", channels=(192, 192), lengths=(40, 40)),
    # All gradients in one kernel: keys of all sequences, squares of dq for one group.
    Case(mask="causal", lengths=(140, 140), shares_keys=True),
    Case(mask="causal", channels=(64, 128), lengths=(70, 130)),
    Case(mask="document_ids", channels=(128, 64), lengths=(260, 260), block=(192, 128)),
    # Small thread blocks, that move their own data, in the mask's blocks or as those.
    Case(mask="document_ids", lengths=(200, 200), options=SMALL),
    Case(mask="document_ids", lengths=(200, 260), heads=2, block=(64, 64)),
    Case(mod="alibi", lengths=(130, 150), options=SMALL | {"stages": 1}),
    Case(mod="soft_cap", mask="causal", channels=(64, 128), block=(64, 64)),
    Case(mask="causal", channels=(128, 128), options={"block_q": 64, "stages": 3}),
    Case(mask="causal", options={"bwd_block_kv": 64, "bwd_stages": 1}, heads=1),
    Case(mod="alibi", mask="causal", channels=(128, 128), options=SMALL),
    Case(mask="noop", options={"block_q": 192, "block_kv": 192}, block=(384, 384)),
]
OFTEN = (1, 5, 21)


def operands(case):
    (T, S), (D, V), K = case.lengths, case.channels, case.heads
    batch = 1 if case.shares_keys else B
    shapes = (B, T, H, D), (batch, S, K, D), (batch, S, K, V)
    arrays = tuple(gaussian(n, x, case.dtype) for n, x in enumerate(shapes))
    mod, mask = MOD[case.mod], MASK[case.mask]
    floats = tuple(
        gaussian(n + 3, x, mod.dtype or case.dtype)
        for n, x in enumerate(mod.floats(T, S))
    )
    others = mod.others(T, S), mask.arrays(T, S)
    cotangents = gaussian(20, (B, T, H, V), case.dtype), gaussian(21, (B, T, H))
    return arrays, floats, *others, cotangents


def plain(case, arrays, floats, others, seen, cotangents):
    mod, mask = MOD[case.mod], MASK[case.mask]
    show = mask.plain or mask.make

    def attend(arrays, floats):
        score = (mod.plain or mod.make)(*floats, *others)
        visible = show and show(*seen)
        return plain_attention(*arrays, score=score, visible=visible, scale=case.scale)

    return pulled_back(attend, arrays, floats, cotangents)


def fused(case, arrays, floats, others, seen, cotangents):
    attend = kernels_of(case, others, seen)
    return pulled_back(attend, arrays, floats, cotangents)


def kernels_of(case, others, seen):
    """Attention of arrays and floats."""
    mod, mask = MOD[case.mod], MASK[case.mask]
    block_mask = None
    if mask.make:
        sizes = B if mask.batch else None, H if mask.heads else None, *case.lengths
        block_mask = px.create_block_mask(
            mask.make(*seen), *sizes, block_size=case.block
        )

    def attend(arrays, floats):
        out, aux = px.flex_attention(
            *arrays, score_mod=mod.make(*floats, *others), block_mask=block_mask,
            enable_gqa=True, return_aux=EVERYTHING, scale=case.scale,
            implementation="mosaic_gpu", kernel_options=INTERPRET | case.options,
        )  # fmt: skip
        return out, aux.lse, aux.max_scores

    return attend


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(x, marks=[] if n in OFTEN else [pytest.mark.slow], id=str(x))
        for n, x in enumerate(CASES)
    ],
)
def test_the_kernels_are_as_exact_as_the_plain_formula(case):
    given = operands(case)
    formula = jax.jit(partial(plain, case))
    found = jax.jit(partial(fused, case))(*given)
    assert_error_rule(found, formula(*given), in_float64(formula, *given))


def both_ways(attend):
    """What runs where nothing is differentiated, and where something is."""
    return jax.jit(attend), jax.jit(lambda *given: jax.vjp(attend, *given)[0])


ASKED = [
    Case(mask="causal", lengths=(257, 257), heads=1),
    Case(mod="alibi", lengths=(130, 150), options=SMALL),
    Case(mod="soft_cap", mask="sliding_window", lengths=(130, 300)),
    Case(mask="document_ids", lengths=(200, 260), block=(64, 64)),
    Case(channels=(256, 96), lengths=(1, 140), scale=-0.3, dtype=jnp.float16),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(x, marks=[] if n == 3 else [pytest.mark.slow], id=str(x))
        for n, x in enumerate(ASKED)
    ],
)
def test_lse_and_max_scores_are_the_same_with_and_without_derivatives(case):
    arrays, floats, others, seen, _ = operands(case)
    runs = both_ways(kernels_of(case, others, seen))
    found, wanted = (run(arrays, floats) for run in runs)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("stranger", [0.0, jnp.nan])
def test_lse_and_max_scores_of_a_second_try_are_those_with_derivatives(stranger):
    mask = px.create_block_mask(partly_unseen, 2, None, 150, 150)
    q, k, v = (gaussian(n, (2, 150, 2, 64), jnp.bfloat16) for n in range(3))
    k, v = (x.at[1, 70:].set(stranger) for x in (k, v))
    attend = partial(
        px.flex_attention, block_mask=mask, return_aux=EVERYTHING,
        implementation="mosaic_gpu", kernel_options=INTERPRET,
    )  # fmt: skip
    (out, aux), wanted = (
        run(q.at[:, 3].set(stranger), k, v) for run in both_ways(attend)
    )
    jax.tree.map(np.testing.assert_array_equal, (out, aux), wanted)
    assert np.isneginf(aux.lse[:, 3]).all() and np.isneginf(aux.max_scores[:, 3]).all()
    assert all(np.isfinite(np.delete(x, 3, axis=1)).all() for x in (aux.lse, out))


MANY_TILES = [
    Case(mask="causal", lengths=(257, 257), heads=1),
    Case(mask="document_ids", lengths=(260, 260), heads=4),
    Case(mod="alibi", channels=(64, 128), lengths=(130, 300), heads=4),
    Case(
        mod="bf16_table", mask="sliding_window", lengths=(300, 300), channels=(128, 128)
    ),
]


@pytest.mark.parametrize(
    ("case", "workers"),
    [
        pytest.param(x, n, id=f"{x}-{n}", marks=[] if i == 1 else [pytest.mark.slow])
        for i, x in enumerate(MANY_TILES)
        for n in (3, 5)
    ],
)
def test_a_thread_block_that_takes_many_tiles_finds_what_one_for_each_does(
    case, workers, monkeypatch
):
    arrays, floats, others, seen, _ = operands(case)

    def traced():
        jax.clear_caches()  # of what the number of multiprocessors is part of
        runs = both_ways(kernels_of(case, others, seen))
        programs = [str(run.trace(arrays, floats).jaxpr) for run in runs]
        return programs, [run(arrays, floats) for run in runs]

    _, wanted = traced()
    monkeypatch.setattr(mosaic_gpu, "MULTIPROCESSORS", workers)
    programs, found = traced()
    assert all("axis_name=workers" in x for x in programs)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


MANY_TILES_OF_KEYS = [
    Case(mask="causal", lengths=(257, 257), heads=1),
    Case(mask="sliding_window", lengths=(390, 390), shares_keys=True),
    Case(mask="prefix_lm", lengths=(300, 300), heads=4, scale=0.3),
]


@pytest.mark.parametrize(
    ("case", "workers"),
    [
        pytest.param(x, n, id=f"{x}-{n}", marks=[] if n == 2 else [pytest.mark.slow])
        for x, n in zip(MANY_TILES_OF_KEYS, (2, 3, 5), strict=True)
    ],
)
def test_backward_too_a_thread_block_may_take_many_tiles(case, workers, monkeypatch):
    given = operands(case)

    def traced():
        jax.clear_caches()  # of what the number of multiprocessors is part of
        run = jax.jit(partial(fused, case))
        return str(run.trace(*given).jaxpr), run(*given)

    _, wanted = traced()
    monkeypatch.setattr(mosaic_gpu_vjp, "MULTIPROCESSORS", workers)
    program, found = traced()
    assert f"grid=({workers},)" in program
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize(
    ("case", "takes_many"),
    [
        (Case(mask="causal", lengths=(257, 257), dtype=jnp.float16), True),
        (Case(mask="document_ids", lengths=(257, 257)), True),
        (Case(lengths=(257, 257)), False),  # registers are for visits
        (Case(mod="alibi", mask="causal", lengths=(257, 257)), False),
        (Case(mask="causal", lengths=(257, 257), scale=-0.3), False),
        (Case(mask="causal", lengths=(257, 257), channels=(128, 128)), False),
        (Case(mask="causal", lengths=(257, 257), channels=(64, 128)), False),
        (Case(mask="causal", lengths=(140, 300)), False),  # keys nobody sees
        (Case(mask="causal", lengths=(257, 257), block=(64, 64)), False),
    ],
    ids=str,
)
def test_backward_thread_blocks_take_many_tiles_where_they_can(
    case, takes_many, monkeypatch
):
    jax.clear_caches()  # of what the number of multiprocessors is part of
    monkeypatch.setattr(mosaic_gpu_vjp, "MULTIPROCESSORS", 3)
    program = jax.jit(partial(fused, case)).trace(*operands(case)).jaxpr
    assert ("grid_names=('workers',)" in str(program)) == takes_many


@given(sizes=st.tuples(*[st.integers(1, 9)] * 3), data=st.data())
def test_tiles_taken_are_counted_where_no_addition_is(sizes, data):
    counters = counters_of(*sizes)
    place = tuple(data.draw(st.integers(0, n - 1)) for n in sizes)
    assert place != taken_at(counters)
    assert all(0 <= x < n for x, n in zip(taken_at(counters), counters, strict=True))


@given(data=st.data(), tiles=st.integers(1, 9), sequences=st.integers(1, 4))
def test_every_tile_has_a_number_and_those_before_it_in_its_head_lower_ones(
    data, tiles, sequences
):
    of_sequence = data.draw(st.integers(1, 6))
    heads = sequences * of_sequence
    together = data.draw(st.sampled_from([n for n in (1, 2, 3, 6) if heads % n == 0]))
    order = Order(heads, tiles, together, of_sequence)
    places = [tuple(map(int, order.place(jnp.int32(n)))) for n in range(order.total)]
    assert len(set(places)) == order.total
    for head in {x[:2] for x in places}:
        assert [x[2] for x in places if x[:2] == head] == list(range(tiles))


def test_under_vmap_each_call_takes_all_of_its_own_tiles(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "MULTIPROCESSORS", 3)
    q, k, v = (gaussian(n, (2, 1, 260, 2, 64), jnp.bfloat16) for n in range(3))
    mask = px.create_block_mask(px.kernels.masks.causal, None, None, 260, 260)
    attend = partial(
        px.flex_attention, block_mask=mask, implementation="mosaic_gpu",
        kernel_options=INTERPRET,
    )  # fmt: skip
    found = jax.jit(jax.vmap(attend, in_axes=(0, None, 0)))(q, k[0], v)
    for n in range(2):
        np.testing.assert_array_equal(found[n], jax.jit(attend)(q[n], k[0], v[n]))


@pytest.mark.slow
@pytest.mark.parametrize("channels", [(64, 64), (192, 192)])
def test_what_mods_know_of_columns_may_find_no_room_beside_them(channels, monkeypatch):
    case = Case(
        mod="bf16_table", mask="document_ids", lengths=(130, 130), channels=channels
    )
    given, runs = operands(case), []
    for room in (Kernel.room, lambda self, config: 0):
        monkeypatch.setattr(Kernel, "room", room)
        jax.clear_caches()
        runs.append(jax.jit(partial(fused, case))(*given))
    jax.tree.map(np.testing.assert_array_equal, *runs)


def test_a_query_that_sees_nothing_gives_nothing_whatever_it_holds():
    q, k, v = (gaussian(n, (1, 130, 2, 64), jnp.bfloat16) for n in range(3))
    mask = px.create_block_mask(
        lambda b, h, i, j: (i >= j) & (i != 5), None, None, 130, 130
    )

    def loss(q, k, v):
        out, aux = px.flex_attention(
            q, k, v, block_mask=mask, return_aux=EVERYTHING,
            implementation="mosaic_gpu", kernel_options=INTERPRET,
        )  # fmt: skip
        return jnp.sum(out.astype(jnp.float32)), (out, aux.lse)

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    clean = run(q.at[:, 5].set(0), k, v)
    dirty = run(q.at[:, 5].set(3e4), k, v)
    (_, (out, lse)), _ = dirty
    assert not out[:, 5].any() and np.isneginf(lse[:, 5]).all()
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


@pytest.mark.parametrize(
    "n",
    [
        64,
        pytest.param(96, marks=pytest.mark.slow),
        pytest.param(128, marks=pytest.mark.slow),
    ],
)
def test_a_mod_may_know_of_blocks_of_keys(n):
    """One number for all keys of a tile, or, where tiles are larger, one for each."""
    T = 200
    q, k, v = (gaussian(i, (B, T, H, 64), jnp.bfloat16) for i in range(3))
    bias = gaussian(3, (H, -(-T // n)))
    ends = jnp.asarray([[T, 0, 9, T]] * B, jnp.int32)

    def attend(implementation, bias, options=None):
        return px.flex_attention(
            q, k, v, implementation=implementation, kernel_options=options,
            score_mod=lambda s, b, h, i, j: s + bias[h, jax.lax.div(j, n)],
            block_mask=px.create_block_mask(
                lambda b, h, i, j: (j <= ends[b, jax.lax.div(j, n)]) | (i == j),
                B, None, T, T,
            ),
        ).astype(jnp.float32)  # fmt: skip

    def both(*args):
        out, vjp = jax.vjp(lambda x: attend(args[0], x, *args[1:]), bias)
        return out, *vjp(jnp.cos(out))

    for x, y in zip(both("mosaic_gpu", INTERPRET), both("reference"), strict=True):
        np.testing.assert_allclose(x, y, rtol=0.03, atol=0.02 * abs(y).max())


@pytest.mark.parametrize("hidden", [0.0, jnp.nan])
def test_blocks_of_keys_come_in_windows_that_follow_each_other(hidden, monkeypatch):
    """A window holds two numbers here, and its place is taken two visits later."""
    for module in (mosaic_gpu_columns, mosaic_gpu_tiles):
        monkeypatch.setattr(module, "MOVED", 2)
    T, S, n = 128, 1280, 128
    q, k, v = (
        gaussian(i, (1, x, 1, 64), jnp.bfloat16) for i, x in enumerate((T, S, S))
    )
    bias = gaussian(3, (S // n,)) * 3
    ends = jnp.arange(S // n, dtype=jnp.int32) * n + n // 2
    mask = px.create_block_mask(
        lambda b, h, i, j: j <= ends[jax.lax.div(j, n)], 1, None, T, S
    )
    attend = partial(
        px.flex_attention, q, k, block_mask=mask,
        score_mod=lambda s, b, h, i, j: s + bias[jax.lax.div(j, n)],
    )  # fmt: skip
    options = INTERPRET | {"block_q": 128, "block_kv": 128, "stages": 2}
    dirty = v.at[:, n - 3 : n].set(hidden)
    found = attend(dirty, implementation="mosaic_gpu", kernel_options=options)
    wanted = attend(v, implementation="reference")
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (found, wanted)), rtol=0.02, atol=8e-3
    )


def test_a_block_of_keys_may_be_asked_for_beyond_the_end():
    """A visit of a large block of a mask reaches far beyond the last key."""
    T, S, n = 130, 100, 64
    q, k, v = (
        gaussian(i, (1, x, 1, 64), jnp.bfloat16) for i, x in enumerate((T, S, S))
    )
    bias = gaussian(3, (2,))
    mask = px.create_block_mask(
        px.kernels.masks.causal, 1, None, T, S, block_size=(64, 2112)
    )
    attend = partial(
        px.flex_attention, q, k, v, block_mask=mask,
        score_mod=lambda s, b, h, i, j: s + bias[jax.lax.div(j, n)],
    )  # fmt: skip
    options = INTERPRET | {"block_q": 64, "block_kv": 64}
    found = attend(implementation="mosaic_gpu", kernel_options=options)
    wanted = attend(implementation="reference")
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (found, wanted)), rtol=0.02, atol=8e-3
    )


LUT, WEIGHTS = jnp.asarray([1, 0, 2], jnp.int32), gaussian(9, (3, 256))
OF_BLOCKS = {
    "by query and a number of a block": lambda s, b, h, i, j: (
        s + WEIGHTS[LUT[jax.lax.div(j, 128)], i]
    ),
    "likewise, of each head": lambda s, b, h, i, j: (
        s
        + jnp.cumsum(WEIGHTS * (1 + h).astype(s.dtype), 0)[LUT[jax.lax.div(j, 128)], i]
    ),
    "made of no argument": lambda s, b, h, i, j: (
        s * (jnp.arange(3).astype(s.dtype) + 1.0)[LUT[jax.lax.div(j, 128)]]
    ),
}


@pytest.mark.parametrize("name", OF_BLOCKS)
def test_what_blocks_of_keys_share_may_choose_in_other_arrays(name, monkeypatch):
    monkeypatch.setattr(mosaic_gpu_limits, "refused_device", lambda: None)
    q, k, v = (gaussian(i, (1, 256, 1, 128), jnp.bfloat16) for i in range(3))
    attend = partial(px.flex_attention, score_mod=OF_BLOCKS[name])
    fused = partial(attend, implementation="mosaic_gpu")
    traced = jax.jit(fused).trace(q, k, v)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    found = fused(q, k, v, kernel_options=INTERPRET)
    wanted = attend(q, k, v, implementation="reference")
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (found, wanted)), rtol=0.02, atol=8e-3
    )


def test_a_mod_is_asked_about_no_query_beyond_the_end():
    qkv = tuple(gaussian(n, (1, 192, 1, 64), jnp.bfloat16) for n in range(3))
    mask = px.create_block_mask(px.kernels.masks.causal, None, None, 192, 192)

    def loss(qkv):
        def score_mod(s, b, h, i, j):
            return s + jnp.log((192 - i).astype(jnp.float32))

        out = px.flex_attention(
            *qkv, block_mask=mask, score_mod=score_mod,
            implementation="mosaic_gpu", kernel_options=INTERPRET,
        )  # fmt: skip
        return jnp.sum(out.astype(jnp.float32))

    gradients = jax.jit(jax.grad(loss))(qkv)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in gradients)


STEEP = {
    "steep at 0": lambda s, b, h, i, j: jnp.sign(s) * jnp.sqrt(jnp.abs(s)),
    "none": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("mask_mod", [None, px.kernels.masks.causal])
@pytest.mark.parametrize("name", STEEP)
def test_keys_beyond_the_end_add_nothing_to_the_gradient_of_queries(name, mask_mod):
    """Their scores are those of zeros, far above all others: as if they were hidden."""
    q, k, v, d_out = (gaussian(n, (1, 40, 1, 64), jnp.bfloat16) for n in range(4))
    q, k = 4 + q / 8, k / 8 - 4

    def gradients(k, v, mask):
        attend = partial(
            px.flex_attention, score_mod=STEEP[name], block_mask=mask,
            implementation="mosaic_gpu", kernel_options=INTERPRET,
        )  # fmt: skip
        return jax.jit(lambda qkv: jax.vjp(attend, *qkv)[1](d_out))((q, k, v))

    mask = mask_mod and px.create_block_mask(mask_mod, None, None, 40, 40)
    found = gradients(k, v, mask)
    hidden = px.and_masks(
        lambda b, h, i, j: j < 40, mask_mod or px.kernels.masks.noop_mask
    )
    k, v = (jnp.pad(x, ((0, 0), (0, 88), (0, 0), (0, 0))) for x in (k, v))
    mask = px.create_block_mask(hidden, None, None, 40, 128)
    for x, wanted in zip(found, gradients(k, v, mask), strict=True):
        x, wanted = (np.asarray(a, np.float32)[:, :40] for a in (x, wanted))
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, wanted, rtol=1e-2, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [132, 3])
def test_under_vmap_gradients_are_those_of_each_call(workers, monkeypatch):
    """The counters of dq's additions are not shared between the calls."""
    jax.clear_caches()  # of what the number of multiprocessors is part of
    monkeypatch.setattr(mosaic_gpu_vjp, "MULTIPROCESSORS", workers)
    q, k, v = (gaussian(n, (3, 1, 130, 2, 64), jnp.bfloat16) for n in range(3))
    mask = px.create_block_mask(px.kernels.masks.causal, None, None, 130, 130)

    def loss(q, k, v):
        out = px.flex_attention(
            q, k, v, block_mask=mask, implementation="mosaic_gpu",
            kernel_options=INTERPRET,
        )  # fmt: skip
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    gradients = jax.grad(loss, (0, 1, 2))
    found = jax.jit(jax.vmap(gradients, in_axes=(0, None, 0)))(q, k[0], v)
    each = jax.jit(gradients)
    for n in range(3):
        one = jax.tree.map(lambda x, n=n: x[n], found)
        jax.tree.map(np.testing.assert_array_equal, one, each(q[n], k[0], v[n]))


def test_padding_leaves_no_trace_though_it_holds_nan():
    """In the buckets of px.pad: the true lengths are part of the mask."""

    def loss(q, k, v):
        mask = px.create_block_mask(
            px.kernels.masks.causal, None, None, q.shape[1], k.shape[1]
        )
        out = px.flex_attention(
            q, k, v, block_mask=mask, implementation="mosaic_gpu", kernel_options=INTERPRET
        )  # fmt: skip
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    T, longer = 70, 128
    qkv = tuple(gaussian(n, (1, T, 2, 64), jnp.bfloat16) for n in range(3))
    step = px.pad(
        jax.value_and_grad(loss, (0, 1, 2)), dims=dict.fromkeys("qkv", "_, t, _, _")
    )
    widths = ((0, 0), (0, longer - T), (0, 0), (0, 0))
    poisoned = [jnp.pad(x, widths, constant_values=jnp.nan) for x in qkv]
    value, gradients = step(*poisoned, sizes={"t": T})
    exact, wanted = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*qkv)
    np.testing.assert_allclose(value, exact, rtol=1e-4)
    for found, x in zip(gradients, wanted, strict=True):
        found, x = (np.asarray(a, np.float32)[:, :T] for a in (found, x))
        np.testing.assert_allclose(found, x, rtol=0.02, atol=4e-3)


LENGTHS = jnp.asarray([130, 70], jnp.int32)


def partly_unseen(b, h, i, j):
    """Keys behind a sequence's end are seen by nobody, query 3 sees nothing."""
    return (i >= j) & (j < LENGTHS[b]) & (i != 3)


@pytest.mark.parametrize(
    ("mod", "D", "block"),
    [
        (None, 64, 128),
        pytest.param(None, 64, 64, marks=pytest.mark.slow),
        pytest.param("alibi", 64, 128, marks=pytest.mark.slow),
        ("soft_cap", 128, 128),
        pytest.param(None, 128, 128, marks=pytest.mark.slow),
        pytest.param("soft_cap", 256, 128, marks=pytest.mark.slow),
    ],
)
def test_what_nobody_sees_or_sees_nothing_may_hold_nan(mod, D, block):
    T = 150
    mask = px.create_block_mask(partly_unseen, 2, None, T, T, block_size=block)
    q, k, v, d_out = (gaussian(n, (2, T, 2, D), jnp.bfloat16) for n in range(4))
    unseen = (jnp.arange(T)[None] >= LENGTHS[:, None])[..., None, None]
    blind = (jnp.arange(T) == 3)[None, :, None, None]
    score = MOD[mod].make if mod else None

    @jax.jit
    def run(stranger):
        attend = partial(
            px.flex_attention, score_mod=score and score(), block_mask=mask,
            implementation="mosaic_gpu", kernel_options=INTERPRET,
        )  # fmt: skip
        given = (
            jnp.where(blind, stranger, q),
            *(jnp.where(unseen, stranger, x) for x in (k, v)),
        )
        out, vjp = jax.vjp(attend, *given)
        return out, *vjp(d_out)

    zero, nan = (jnp.asarray(x, jnp.bfloat16) for x in (0, jnp.nan))
    for found, wanted in zip(run(nan), run(zero), strict=True):
        found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
        assert np.isfinite(found).all()
        # Added one by one, not as a product: to the rounding of half precision.
        np.testing.assert_allclose(found, wanted, rtol=0.02, atol=8e-3)


@pytest.mark.parametrize("hidden", [0.0, jnp.nan])
def test_small_thread_blocks_write_nothing_twice_out_of_order(
    hidden, monkeypatch, caplog
):
    detects = partial(plgpu.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(plgpu, "InterpretGPUParams", detects)
    T = 136  # of no other test: programs are kept by shape
    mask = px.create_block_mask(
        lambda b, h, q, k: (q >= k) & (k != 9), None, None, T, T, block_size=64
    )
    query = jnp.ones((1, T, 1, 128), jnp.bfloat16)
    key = query.at[:, 9].set(hidden)
    out = px.flex_attention(
        query, key, key, block_mask=mask, implementation="mosaic_gpu",
        kernel_options={"interpret": 1},
    )  # fmt: skip
    np.testing.assert_array_equal(out, query)
    assert "RACE" not in caplog.text


# NumPy, of which the interpreter is made, says so.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("D", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["key", "query"])
def test_an_infinity_that_is_seen_counts_backwards_as_it_did_forwards(where, D):
    """A cap makes its scores finite; beside it nobody sees key 9, 3 sees nothing."""
    T = 150
    mask = px.create_block_mask(
        lambda b, h, i, j: (i >= j) & (j != 9) & (i != 3), None, None, T, T
    )
    q, k, v, d_out = (gaussian(n, (1, T, 2, D), jnp.bfloat16) for n in range(4))
    q, k = q.at[:, 3].set(jnp.nan), k.at[:, 9].set(jnp.nan)
    if where == "key":
        k = k.at[:, 5, :, 0].set(jnp.inf)
    else:
        q = q.at[:, 5, :, 0].set(jnp.inf)

    def gradients(implementation, options=None):
        attend = partial(
            px.flex_attention, block_mask=mask, implementation=implementation,
            score_mod=lambda s, b, h, i, j: 20 * jnp.tanh(s / 20), kernel_options=options,
        )  # fmt: skip
        return jax.jit(lambda *x: jax.vjp(attend, *x)[1](d_out))(q, k, v)

    found, wanted = gradients("mosaic_gpu", INTERPRET), gradients("reference")
    for x, y in list(zip(found, wanted, strict=True))[1:]:
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        is_known = np.isfinite(y)  # 0 times inf is not
        is_known[:, 9] = False  # likewise, where the definition puts 0 for the key
        assert is_known.mean() > 0.9
        np.testing.assert_allclose(x[is_known], y[is_known], rtol=0.03, atol=0.03)


@pytest.mark.parametrize("lengths", [(150, 150), (130, 150)])
def test_nan_that_is_seen_is_seen_where_it_is_seen_alone(lengths):
    """In its channel, by those who see it; in the blocks that are looked into."""
    T, S = lengths
    mask = px.create_block_mask(
        lambda b, h, i, j: (i >= j) & (j != 9), None, None, T, S
    )
    q, k, v = (
        gaussian(n, (1, x, 2, 64), jnp.bfloat16) for n, x in enumerate((T, S, S))
    )
    v = v.at[:, 5, :, 3].set(jnp.nan).at[:, 9].set(jnp.inf)
    out = px.flex_attention(
        q, k, v, block_mask=mask, implementation="mosaic_gpu", kernel_options=INTERPRET
    )  # fmt: skip
    is_nan = np.isnan(np.asarray(out, np.float32)[0])
    wanted = np.zeros_like(is_nan)
    wanted[5:, :, 3] = True
    np.testing.assert_array_equal(is_nan, wanted)
    assert np.isfinite(np.asarray(out, np.float32)[0][~wanted]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["none", "alibi", "soft_cap", "relative_bias", "softplus"]
)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask_mod", [px.kernels.masks.causal, partly_unseen])
@pytest.mark.parametrize("block", [64, 128])
def test_the_kernels_lower_for_a_gpu(name, D, mask_mod, block):
    """No GPU is needed to know that Mosaic has what a mod asks for."""
    T = 256
    mask = px.create_block_mask(mask_mod, 1, None, T, T, block_size=block)
    mod = MOD[name]
    floats = (
        gaussian(n, x, mod.dtype or jnp.bfloat16)
        for n, x in enumerate(mod.floats(T, T))
    )
    made = mod.make and mod.make(*floats, *mod.others(T, T))
    score_mod = close_score_mod(made, jnp.float32)
    score_mod = widened(jax.tree.map(jnp.asarray, score_mod))
    arrays = tuple(gaussian(n, (1, T, H, D), jnp.bfloat16) for n in range(3))
    statistics = gaussian(4, (1, T, H)), gaussian(5, (1, T, H))

    def every(arrays):
        out, lse, *rest = mosaic_gpu.forward(arrays, score_mod, mask, scale=0.1)
        results, cotangents = (out, *statistics), (out, lse)
        asked = mosaic_gpu.inference(arrays, score_mod, mask, scale=0.1)
        return (
            asked,
            rest,
            mosaic_gpu_vjp.backward(
                arrays, score_mod, mask, results, cotangents, scale=0.1
            ),
        )

    lowered = jax.jit(every).trace(arrays).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 4


@pytest.mark.parametrize(
    ("name", "D", "block", "is_asked"),
    [
        ("alibi", 128, 128, True),
        ("alibi", 256, 128, True),
        ("none", 128, 128, False),
        ("alibi", 64, 128, False),
        ("alibi", 128, 64, False),
    ],
)
def test_exponentials_are_asked_for_before_a_turn_where_a_mod_puts_off(
    name, D, block, is_asked
):
    """By a fence that is never reached (`settle`): it must be there to be of use."""
    T = 256
    mask = px.create_block_mask(
        px.kernels.masks.causal, 1, None, T, T, block_size=block
    )
    made = px.kernels.mods.alibi(H) if name == "alibi" else None
    score_mod = close_score_mod(made, jnp.float32)
    score_mod = widened(jax.tree.map(jnp.asarray, score_mod))
    arrays = tuple(gaussian(n, (1, T, H, D), jnp.bfloat16) for n in range(3))
    forward = partial(mosaic_gpu.forward, scale=0.1)
    traced = jax.jit(lambda x: forward(x, score_mod, mask)).trace(arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("fence.acq_rel.cta" in text) == is_asked


@pytest.mark.parametrize("is_asked", [False, True])
def test_parts_ask_for_exponentials_where_a_mod_computes_others_of_each_score(is_asked):
    made = px.kernels.mods.soft_cap(9.0) if is_asked else px.kernels.mods.alibi(H)
    score_mod = widened(jax.tree.map(jnp.asarray, close_score_mod(made, jnp.float32)))
    rows = tuple(gaussian(n, (1, H, 256, 128), jnp.bfloat16) for n in range(3))
    arrays = rows[0], *(x.swapaxes(1, 2) for x in rows[1:])
    parts = partial(mosaic_gpu.parts, scale=0.1, splits=2)
    traced = jax.jit(lambda x: parts(x, score_mod, None)).trace(arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("fence.acq_rel.cta" in text) == is_asked


def test_under_vmap_thread_blocks_of_many_tiles_lower_for_a_gpu(monkeypatch):
    jax.clear_caches()  # of what the number of multiprocessors is part of
    for module in (mosaic_gpu, mosaic_gpu_vjp):
        monkeypatch.setattr(module, "MULTIPROCESSORS", 2)
    q, k, v = (gaussian(n, (3, 1, 256, 2, 64), jnp.bfloat16) for n in range(3))
    mask = px.create_block_mask(px.kernels.masks.causal, None, None, 256, 256)
    scale = 64**-0.5
    statistics = gaussian(4, (1, 256, 2)), gaussian(5, (1, 256, 2))

    def both(*arrays):
        out, lse, *_ = mosaic_gpu.forward(arrays, None, mask, scale=scale)
        given = (out, *statistics), (out, lse)
        return mosaic_gpu_vjp.backward(arrays, None, mask, *given, scale=scale)

    program = jax.jit(jax.vmap(both, (0, None, 0))).trace(q, k[0], v)
    assert str(program.jaxpr).count("grid=(3, 2)") == 2
    assert "mosaic_gpu" in program.lower(lowering_platforms=("cuda",)).as_text()


def _gradients_of(arrays, slopes, mask):
    """Of attention with slopes for the heads."""

    def loss(q, k, v, slope):
        out = px.flex_attention(
            q, k, v, block_mask=mask, implementation="mosaic_gpu",
            score_mod=lambda s, b, h, i, j: s + slope[h] * (j - i).astype(s.dtype),
        )  # fmt: skip
        return jnp.sum(out.astype(jnp.float32))

    return jax.grad(loss, (0, 1, 2, 3))(*arrays, slopes)


@pytest.mark.parametrize(
    "mask_mod", [px.kernels.masks.causal, lambda b, h, i, j: (i >= j) & (i != 3)]
)
def test_under_vmap_and_shard_map_the_kernels_lower_for_a_gpu(mask_mod, monkeypatch):
    monkeypatch.setattr(mosaic_gpu_limits, "refused_device", lambda: None)
    monkeypatch.setattr(mosaic_gpu, "MULTIPROCESSORS", 2)
    T = 256
    q, k, v = (gaussian(n, (2, 4, T, 4, 64), jnp.bfloat16) for n in range(3))
    mask, slopes = px.create_block_mask(mask_mod, None, None, T, T), jnp.ones(4)
    mesh = jax.make_mesh(
        (2, 2), ("data", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    spec, of_heads = P("data", None, "heads"), P("heads")

    @jax.shard_map(
        mesh=mesh, in_specs=(spec,) * 3 + (of_heads,), out_specs=((spec,) * 3, of_heads)
    )
    def in_shards(q, k, v, slopes):
        *found, d_slopes = _gradients_of((q, k, v), slopes, mask)
        return tuple(found), d_slopes

    def in_copies(q, k, v):
        one = lambda q, k, v, slopes: _gradients_of((q, k, v), slopes, mask)  # noqa: E731
        each = jax.vmap(one, (0, 0, None, None))
        return jax.vmap(each, (None, 0, 0, 0))(
            q, jnp.stack([k, k]), v, jnp.stack([slopes] * 2)
        )

    for run, arrays in (
        (in_shards, (q[0], k[0], v[0], slopes)),
        (in_copies, (q, k, v)),
    ):
        lowered = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count("mosaic_gpu") >= 2


@pytest.mark.parametrize(("block", "queries"), [(128, 256), (64, 256), (128, 1)])
def test_masks_of_what_varies_over_a_shard_map_lower_for_a_gpu(
    block, queries, monkeypatch
):
    """Each device has sequences with ends of their own."""
    monkeypatch.setattr(mosaic_gpu_limits, "refused_device", lambda: None)
    lengths = queries, 256
    q, k, v = (
        gaussian(n, (2, m, 2, 64), jnp.bfloat16)
        for n, m in enumerate((queries, 256, 256))
    )
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.shard_map(
        mesh=mesh, in_specs=(P("data"),) * 5, out_specs=((P("data"),) * 3, P("data"))
    )
    def in_shards(q, k, v, slopes, ends):
        mask = px.create_block_mask(
            lambda b, h, i, j: j < ends[b], 1, None, *lengths, block_size=block
        )
        *found, d_slopes = _gradients_of((q, k, v), slopes, mask)
        return tuple(found), d_slopes

    arrays = q, k, v, jnp.ones(4), jnp.asarray([100, 30])
    lowered = jax.jit(in_shards).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 2


X = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
WIDE = jnp.zeros((1, 128, 2, 320), jnp.bfloat16)
REFUSED = {
    "device": ((X,) * 3, {}, "compute capability 9.0 .*, found cpu"),
    "dtype": ((X.astype(jnp.float32),) * 3, INTERPRET, "found float32"),
    "dtypes": ((X, *[X.astype(jnp.float8_e4m3fn)] * 2), INTERPRET, "float8_e4m3fn"),
    "channels": ((WIDE,) * 3, INTERPRET, "up to 256 channels, found 320"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_cannot_do_is_refused_with_the_reason(name):
    arrays, options, text = REFUSED[name]
    with pytest.raises(NotImplementedError, match=text):
        px.flex_attention(*arrays, implementation="mosaic_gpu", kernel_options=options)


def test_64_bits_are_refused_with_the_reason():
    attend = partial(px.flex_attention, implementation="mosaic_gpu")
    with (
        jax.enable_x64(True),
        pytest.raises(NotImplementedError, match="32 bits, and jax_enable_x64 is on"),
    ):
        attend(X, X, X, kernel_options=INTERPRET)


def test_the_interpreter_is_refused_for_several_devices_of_a_shard_map():
    def mapped(devices):
        attend = partial(px.flex_attention, implementation="mosaic_gpu")
        run = lambda x: attend(x, x, x, kernel_options=INTERPRET)  # noqa: E731
        mesh = jax.make_mesh((devices,), ("x",), (jax.sharding.AxisType.Auto,))
        return jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"))

    X2 = jnp.concatenate([X, X])
    with pytest.raises(NotImplementedError, match=r"one device.*jax\.shard_map over 2"):
        jax.eval_shape(mapped(2), X2)
    assert jax.eval_shape(mapped(1), X2).shape == X2.shape


def test_what_is_asked_for_beside_the_interpreter_does_not_keep_it_waiting():
    @jax.jit
    def attend(x):
        kw = {"implementation": "mosaic_gpu", "kernel_options": INTERPRET}
        return px.flex_attention(x, x, x, **kw)

    product = jax.jit(lambda x: x @ x @ x)
    slow = lambda: X + product(jnp.zeros((1500, 1500)))[0, 0].astype(X.dtype)  # noqa: E731
    many = jnp.ones((64, 64))
    jax.block_until_ready((attend(X), slow(), jnp.sin(many) + 1))
    for _ in range(5):
        found = attend(slow())  # which nobody has waited for
        for _ in range(100):  # of which XLA would let 32 be in flight
            many = jnp.sin(many) + 1
        np.testing.assert_array_equal(found, X)


def test_small_blocks_and_loops_in_a_mod_are_refused_with_the_reason():
    attend = partial(
        px.flex_attention,
        X,
        X,
        X,
        implementation="mosaic_gpu",
        kernel_options=INTERPRET,
    )
    mask = px.create_block_mask(
        px.kernels.masks.causal, None, None, 128, 128, block_size=32
    )
    with pytest.raises(
        NotImplementedError, match=r"multiples of 64 x 64, found block_size=\(32, 32\)"
    ):
        attend(block_mask=mask)
    with pytest.raises(
        NotImplementedError,
        match=r"of score_mod, no kernel computes (concatenate|stack)",
    ):
        attend(score_mod=lambda s, b, h, i, j: jnp.cumsum(jnp.stack([s, s]))[1])
