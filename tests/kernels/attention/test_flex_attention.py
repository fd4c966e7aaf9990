"""Laws of flex_attention that are not a table: empty rows, padding, lse, memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import B, H, K
from helpers import compilations, normal

import pliax as px
from pliax.kernels.attention.masks import causal


D, V = 16, 8
EVERYTHING = px.AuxRequest(lse=True, max_scores=True)


def qkv(length, dtype=jnp.float32, kv_length=None):
    kv_length = kv_length or length
    shapes = (B, length, H, D), (B, kv_length, K, D), (B, kv_length, K, V)
    return tuple(normal(i, shape, dtype) for i, shape in enumerate(shapes))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_query_that_sees_nothing_gives_zero_and_no_gradient(implementation):
    q, k, v = qkv(40)
    mask = px.create_block_mask(lambda b, h, q, k: k < 0, None, None, 40, 40)

    def loss(q, k, v):
        out, aux = px.flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True,
            return_aux=EVERYTHING, implementation=implementation,
        )  # fmt: skip
        return jnp.sum(out), (out, aux)

    gradients, (out, aux) = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    assert not np.any(out)
    assert np.all(aux.lse == -np.inf)
    assert np.all(aux.max_scores == -np.inf)
    assert all(not np.any(g) for g in gradients)


@pytest.mark.parametrize("length", [17, 130])
def test_a_mod_that_blows_up_beyond_the_end_leaves_no_trace(length):
    """log and 1/s are finite at every real score here, and 0 lies in the padding."""
    q, k, v = qkv(length)
    scale = jnp.ones(length)

    def loss(q, k, v, scale):
        out = px.flex_attention(
            jnp.abs(q) + 1, jnp.abs(k) + 1, v, enable_gqa=True, implementation="xla",
            score_mod=lambda s, b, h, i, j: scale[j] * jnp.log(s) + 1 / s,
            kernel_options={"block_q": 64, "block_kv": 64},
        )  # fmt: skip
        return jnp.sum(jnp.square(out))

    value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(q, k, v, scale)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in gradients)


def test_lse_merges_two_attentions_into_one():
    q, k, v = qkv(64)
    whole, aux = px.flex_attention(q, k, v, enable_gqa=True, return_aux=EVERYTHING)
    halves = [
        px.flex_attention(
            q, k[:, part], v[:, part], enable_gqa=True, return_aux=EVERYTHING
        )
        for part in (slice(0, 20), slice(20, 64))
    ]
    lse = jnp.logaddexp(halves[0][1].lse, halves[1][1].lse)
    merged = sum(o * jnp.exp(a.lse - lse)[..., None] for o, a in halves)
    np.testing.assert_allclose(merged, whole, atol=1e-6)
    np.testing.assert_allclose(lse, aux.lse, atol=1e-5)
    assert aux.lse.shape == (B, 64, H)


def test_max_scores_carry_no_gradient():
    q, k, v = qkv(16)

    def loss(q):
        request = px.AuxRequest(max_scores=True)
        _, aux = px.flex_attention(q, k, v, enable_gqa=True, return_aux=request)
        assert aux.lse is None
        return jnp.sum(aux.max_scores)

    assert not np.any(jax.grad(loss)(q))


def test_key_and_value_of_one_sequence_serve_the_whole_batch():
    q, k, v = qkv(32)
    shared = px.flex_attention(q, k[:1], v[:1], enable_gqa=True)
    repeated = (jnp.broadcast_to(x[:1], x.shape) for x in (k, v))
    np.testing.assert_array_equal(
        shared, px.flex_attention(q, *repeated, enable_gqa=True)
    )


def test_new_contents_of_a_captured_array_neither_trace_nor_repeat_old_results():
    traces = 0
    q, k, v = qkv(48)

    @jax.jit
    def attend(q, k, v, mask):
        nonlocal traces
        traces += 1
        return px.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    def mask_of(ids):
        return px.create_block_mask(
            lambda b, h, q, k: ids[q] == ids[k], None, None, 48, 48
        )

    outs = []
    for cut in (10, 30):
        mask = mask_of((jnp.arange(48) >= cut).astype(jnp.int32))
        outs.append(attend(q, k, v, mask))
        dense = px.flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True, implementation="reference"
        )
        np.testing.assert_allclose(outs[-1], dense, atol=2e-6)
    assert traces == 1
    assert np.abs(outs[0] - outs[1]).max() > 1e-2


def test_attention_is_not_compiled_again_for_a_fresh_closure():
    q, k, v = qkv(24)

    def attend(slope):
        slopes = jnp.full(H, slope)
        return px.flex_attention(
            q, k, v, enable_gqa=True, score_mod=lambda s, b, h, i, j: s * slopes[h]
        )

    attend(0.5)
    with compilations() as seen:
        outs = attend(0.5), attend(2.0)
    assert not seen
    assert np.abs(outs[0] - outs[1]).max() > 1e-3


def test_attention_is_mapped_and_sharded_over_the_batch(mesh_4x2):
    q, k, v = (jnp.concatenate([x, x + 1]) for x in qkv(40))
    expected = px.flex_attention(q, k, v, enable_gqa=True)
    each = jax.vmap(lambda *a: px.flex_attention(*a, enable_gqa=True)[0])
    np.testing.assert_allclose(
        each(*(x[:, None] for x in (q, k, v))), expected, atol=2e-6
    )
    spec = jax.sharding.PartitionSpec("x", None, "y")
    placed = (jax.device_put(x, jax.NamedSharding(mesh_4x2, spec)) for x in (q, k, v))
    out = jax.jit(lambda *a: px.flex_attention(*a, enable_gqa=True))(*placed)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_memory_of_xla_is_linear_in_the_length():
    def temporary(length):
        arrays = [jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)] * 3

        def loss(q, k, v):
            return jnp.sum(px.flex_attention(q, k, v, implementation="xla"))

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    short, long = temporary(4096), temporary(16384)
    assert long < 6 * short
    assert long < 16384 * 16384 // 8


# --- refusals -------------------------------------------------------------------------


def refused(kind, text, length=16, **changes):
    q, k, v = qkv(length)
    arguments = {"query": q, "key": k, "value": v, "enable_gqa": True, **changes}
    arrays = [arguments.pop(name) for name in ("query", "key", "value")]
    with pytest.raises(kind, match=text):
        px.flex_attention(*arrays, **arguments)


BAD = {
    "gqa": (ValueError, r"query has 4 heads but key has 2 \(query f32\[2,16,4,16\], key "
            r"f32\[2,16,2,16\].*\)\.\nPass enable_gqa=True", {"enable_gqa": False}),
    "multiple": (ValueError, "multiple of the number of key heads",
                 {"query": normal(0, (2, 16, 3, 16))}),
    "rank": (ValueError, "query must have 4 dimensions",
             {"query": normal(0, (2, 16, 16))}),
    "head dimension": (ValueError, "differ in their head dimension",
                       {"query": normal(0, (2, 16, 4, 8))}),
    "value": (ValueError, "key and value differ", {"value": normal(0, (2, 15, 2, 8))}),
    "batch": (ValueError, "query's batch size, or 1", {"query": normal(0, (3, 16, 4, 16))}),
    "zero": (ValueError, "length 0", {"query": normal(0, (2, 0, 4, 16))}),
    "integers": (TypeError, "float16", {"query": jnp.ones((2, 16, 4, 16), jnp.int32)}),
    "dtypes": (TypeError, "one dtype", {"query": normal(0, (2, 16, 4, 16), jnp.bfloat16)}),
    "mask_mod given": (TypeError, "expected 5 positional parameters.*got 4",
                       {"score_mod": lambda b, h, q, k: q}),
    "score shape": (TypeError, "score_mod must return one float32",
                    {"score_mod": lambda s, b, h, q, k: jnp.ones(3) * s}),
    "score dtype": (TypeError, "score_mod must return one float32",
                    {"score_mod": lambda s, b, h, q, k: q}),
    "score tuple": (TypeError, "must return one array",
                    {"score_mod": lambda s, b, h, q, k: (s, s)}),
    "implementation": (ValueError, "'nope' is unknown; there is 'mosaic_gpu', 'xla', 'reference', 'triton'",
                       {"implementation": "nope"}),
    "options": (ValueError, "which reads: block_q, block_kv",
                {"kernel_options": {"BLOCK_M": 3}}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_say_what_was_found_and_what_to_do(name):
    kind, text, changes = BAD[name]
    refused(kind, text, **changes)


def test_a_mask_for_other_sizes_is_refused_with_both_sizes():
    mask = px.create_block_mask(causal, None, None, 32, 16)
    refused(
        ValueError,
        r"\(1, 1, 32, 16\), the arrays have \(2, 4, 16, 16\)",
        block_mask=mask,
    )
    mask = px.create_block_mask(causal, 3, None, 16, 16)
    refused(ValueError, r"\(3, 1, 16, 16\)", block_mask=mask)


def test_aux_output_is_a_pytree():
    aux = px.AuxOutput(lse=jnp.ones((1, 2, 3)))
    assert len(jax.tree.leaves(aux)) == 1
    assert dataclasses.replace(aux, lse=None) == px.AuxOutput()
