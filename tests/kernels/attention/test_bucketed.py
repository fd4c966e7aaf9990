"""Attention in buckets: what padding holds has no say, in results and gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transforms.padding.checking import check, check_each

import pliax as px
from pliax.kernels.attention import masks, mods
from pliax.transforms.padding import PaddingRefused


HIGH = {"b": 3, "t": 40, "s": 50}
CHOICES = [{"b": 2, "t": 33, "s": 33}, {"b": 3, "t": 40, "s": 50}]
CHOICES += [{"b": 1, "t": 3, "s": 17}, {"b": 2, "t": 32, "s": 48}]
BLOCKS = (16, 8)
SELF = [{"b": n["b"], "t": n["t"]} for n in CHOICES]
TOLERANCE = 2e-5


def causal(arrays: Any, T: Any, S: Any) -> px.BlockMask:
    return px.create_block_mask(masks.causal, None, None, T, S, block_size=BLOCKS)


def documents(arrays: Any, T: Any, S: Any) -> px.BlockMask:
    ids = arrays["ids"]

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)

    return px.create_block_mask(same, ids.shape[0], None, T, S, block_size=BLOCKS)


def by_head(arrays: Any, T: Any, S: Any) -> px.BlockMask:
    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx < 4 * (h + 1)) | (kv_idx < S // 4)

    return px.create_block_mask(near, None, 4, T, S, block_size=BLOCKS)


def bias(arrays: Any) -> Callable[..., Any]:
    table = arrays["table"]
    return lambda score, b, h, q, k: score + table[b, q] * (1 + h).astype(score.dtype)


def divided(arrays: Any) -> Callable[..., Any]:
    """0 / 0 on padding that is zero."""
    scale = arrays["scale"]
    return lambda score, b, h, q, k: score * scale[b] / scale[b] + 1 / scale[b]


def capped(arrays: Any) -> Callable[..., Any]:
    return mods.soft_cap(5.0)


MASKS = {"no mask": None, "causal": causal, "documents": documents, "by head": by_head}
MODS = {"no mod": None, "bias": bias, "divided": divided, "softcap": capped}


APART = [("no mask", "bias"), ("causal", "softcap"), ("causal", "divided")]
APART += [("no mask", "no mod")]
PAIRS = [("documents", "bias"), ("by head", "softcap"), ("causal", "divided")]
PAIRS += [("no mask", "bias"), ("documents", "no mod")]


def slow_but(cases: list[Any], fast: int) -> list[Any]:
    rest = [pytest.param(*case, marks=pytest.mark.slow) for case in cases[fast:]]
    return cases[:fast] + rest


def drawn(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def arguments(sizes: Mapping[str, int]) -> list[np.ndarray]:
    b, t = sizes["b"], sizes["t"]
    s = sizes.get("s", t)
    ids = np.sort(np.random.default_rng(b * t).integers(0, 4, (b, t)).astype(np.int32))
    return [
        drawn((b, t, 4, 8), 0),
        drawn((b, s, 2, 8), 1),
        drawn((b, s, 2, 4), 2),
        drawn((b, t), 3),
        np.abs(drawn((b,), 4)) + 1,
        ids,
    ]


def specs(s: str) -> list[str]:
    return ["b, t, 4, 8", f"b, {s}, 2, 8", f"b, {s}, 2, 4", "b, t", "b", "b, t"]


def attention(make_mask: Any, make_mod: Any, **options: Any) -> Callable[..., Any]:
    def f(query: Any, key: Any, value: Any, table: Any, scale: Any, ids: Any) -> Any:
        arrays = {"table": table, "scale": scale, "ids": ids}
        T, S = query.shape[1], key.shape[1]
        return px.flex_attention(
            query,
            key,
            value,
            score_mod=make_mod and make_mod(arrays),
            block_mask=make_mask and make_mask(arrays, T, S),
            enable_gqa=True,
            **options,
        )

    return f


def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    def loss(*args: Any) -> Any:
        out = f(*args)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out))

    return jax.value_and_grad(loss, (0, 1, 2, 3, 4))


@pytest.mark.slow
@pytest.mark.parametrize("mask, mod", slow_but(APART, 2))
def test_queries_and_keys_may_be_padded_apart(mask, mod):
    f = attention(MASKS[mask], MODS[mod])
    check_each(f, specs("s"), arguments, CHOICES, HIGH, tolerance=TOLERANCE)


@pytest.mark.parametrize("mask, mod", slow_but(PAIRS, 1))
def test_gradients_do_not_see_padding(mask, mod):
    f = gradients(attention(MASKS[mask], MODS[mod]))
    high = {"b": HIGH["b"], "t": HIGH["t"]}
    check_each(f, specs("t"), arguments, SELF, high, tolerance=TOLERANCE)


@pytest.mark.slow
def test_log_sum_exp_and_maximum_are_exact_too():
    request = px.AuxRequest(lse=True, max_scores=True)
    f = attention(documents, bias, return_aux=request)
    high = {"b": HIGH["b"], "t": HIGH["t"]}
    check_each(f, specs("t"), arguments, SELF, high, tolerance=TOLERANCE)


def test_keys_shared_by_a_padded_batch_get_gradients_of_valid_sequences():
    def loss(query, key, value):
        return jnp.sum(jnp.sin(px.flex_attention(query, key, value)))

    def make(sizes):
        b, t = sizes["b"], sizes["t"]
        return drawn((b, t, 2, 8), 0), drawn((1, 50, 2, 8), 1), drawn((1, 50, 2, 8), 2)

    shapes = ["b, t, 2, 8", "1, 50, 2, 8", "1, 50, 2, 8"]
    high = {"b": HIGH["b"], "t": HIGH["t"]}
    f = jax.grad(loss, (0, 1, 2))
    check_each(f, shapes, make, SELF, high, tolerance=TOLERANCE)


def test_narrow_captured_arrays_get_gradients_summed_in_float32():
    def loss(query, table):
        def mod(score, b, h, q, k):
            return score + table[q].astype(score.dtype)

        return jnp.sum(jnp.sin(px.flex_attention(query, query, query, score_mod=mod)))

    query, table = drawn((1, 40, 2, 8), 0), drawn((40,), 1).astype(jnp.bfloat16)
    shapes, sizes, high = ["1, t, 2, 8", "t"], {"t": 40}, {"t": 64}
    f = jax.grad(loss, (0, 1))
    check(f, shapes, [query, table], sizes, high, tolerance=TOLERANCE)


def test_attention_is_padded_under_vmap_scan_and_remat():
    def layer(x, weight):
        heads = (x @ weight).reshape(*x.shape[:-1], 2, 4)
        mask = px.create_block_mask(masks.causal, None, None, x.shape[1], x.shape[1])
        out = px.flex_attention(heads, heads, heads, block_mask=mask)
        return x + out.reshape(x.shape), None

    def loss(weights, x):
        one = jax.checkpoint(layer)
        run = jax.vmap(lambda x: jax.lax.scan(one, x, weights)[0])
        return jnp.sum(jnp.sin(run(x)))

    def make(sizes):
        return drawn((3, 8, 8), 0) / 4, drawn((sizes["n"], 2, sizes["t"], 8), 1)

    shapes, high = ["3, 8, 8", "n, 2, t, 8"], {"n": 3, "t": 20}
    choices = [{"n": 2, "t": 13}, {"n": 3, "t": 20}, {"n": 1, "t": 5}]
    f = jax.grad(loss, (0, 1))
    check_each(f, shapes, make, choices, high, tolerance=TOLERANCE)


def test_lists_that_decide_are_kept_inside_the_lengths():
    def f(query):
        T = query.shape[1]
        rows = -(-T // 32)
        num = jnp.ones((1, 1, rows), jnp.int32)
        indices = jnp.zeros((1, 1, rows, rows), jnp.int32)
        mask = px.BlockMask.from_kv_blocks(
            0 * num, indices, num, indices, block_size=32, seq_lengths=(T, T)
        )
        return px.flex_attention(query, query, query, block_mask=mask)

    def make(sizes):
        return [drawn((1, sizes["t"], 2, 8), 0)]

    choices = [{"t": 70}, {"t": 64}, {"t": 20}]
    check_each(f, ["1, t, 2, 8"], make, choices, {"t": 96}, tolerance=TOLERANCE)


def test_one_trace_serves_every_length():
    f = px.compile(
        attention(documents, bias),
        dims={
            "query": "b, t, _, _",
            "key": "b, t, _, _",
            "value": "b, t, _, _",
            "table": "b, t",
            "scale": "b",
            "ids": "b, t",
        },
        padding="require",
    )
    for sizes in SELF:
        args = list(map(jnp.asarray, arguments(sizes)))
        found, wanted = f(*args), f.__wrapped__(*args)
        np.testing.assert_allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert f.stats.traces == 1
    assert f.guards == ()


def test_padded_heads_are_refused_by_name():
    f = px.pad(lambda x: px.flex_attention(x, x, x), dims={"x": "_, _, h, _"})
    with pytest.raises(PaddingRefused, match="flex_attention: the number of heads"):
        f(jnp.ones((1, 4, 3, 2)), sizes={"h": 2})


def test_a_mask_is_created_for_sizes_of_which_the_first_is_1():
    def mask(x: Any) -> Any:
        return px.create_mask(masks.causal, x.shape[0], None, x.shape[1], x.shape[1])

    compiled = px.compile(mask, dims={"x": "b, t"}, padding="require")
    for shape in ((1, 1), (3, 1), (2, 5), (1, 7)):
        x = np.ones(shape, np.float32)
        np.testing.assert_array_equal(compiled(x), jax.jit(mask)(x))
    assert not compiled.guards
