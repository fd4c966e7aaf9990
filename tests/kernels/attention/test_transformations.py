"""flex_attention under JAX's transformations, and arrays that mods capture."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal

import pliax as px


T, H = 20, 2
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["reference", "xla"])


def qkv(*batch, dtype=jnp.float32):
    return tuple(normal(n, (*batch, 1, T, H, 8), dtype) for n in range(3))


def document_mask(ids):
    """Each position sees its own document; `ids` is captured."""
    return px.create_block_mask(
        lambda b, h, q, k: ids[q] == ids[k], None, None, T, T, block_size=8
    )


def documents():
    return jnp.asarray(np.arange(T)[None] // np.array([[4], [7], [20]]), jnp.int32)


def stack(results):
    return jax.tree.map(lambda *x: jnp.stack(x), *results)


def assert_close(actual, expected):
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@IMPLEMENTATIONS
def test_vmap_over_queries_is_a_loop(implementation):
    _, k, v = qkv()
    queries = qkv(3)[0]

    def attend(q):
        return px.flex_attention(q, k, v, implementation=implementation)

    assert_close(jax.vmap(attend)(queries), stack([attend(q) for q in queries]))


@IMPLEMENTATIONS
def test_vmap_over_masks_and_their_making_is_a_loop(implementation):
    q, k, v = qkv()

    @jax.jit
    def gradients(mask):
        def loss(q, k, v):
            out = px.flex_attention(
                q, k, v, block_mask=mask, implementation=implementation
            )
            return jnp.sum(jnp.sin(out))

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)

    masks = jax.vmap(document_mask)(documents())
    expected = [gradients(document_mask(ids)) for ids in documents()]
    assert_close(jax.vmap(gradients)(masks), stack(expected))


@IMPLEMENTATIONS
def test_vmap_over_a_captured_array_is_a_loop(implementation):
    q, k, v = qkv()
    slopes = normal(5, (3, H))

    def loss(slopes):
        out = px.flex_attention(
            q, k, v,
            score_mod=lambda s, b, h, i, j: s * slopes[h] - (i - j).astype(s.dtype),
            implementation=implementation,
        )  # fmt: skip
        return jnp.sum(jnp.sin(out))

    each = jax.jit(jax.value_and_grad(loss))
    assert_close(jax.vmap(each)(slopes), stack([each(x) for x in slopes]))


@IMPLEMENTATIONS
def test_scan_over_masks_is_a_loop(implementation):
    q, k, v = qkv()

    def layer(x, mask):
        out = px.flex_attention(x, k, v, block_mask=mask, implementation=implementation)
        return x + out, jnp.sum(out)

    masks = jax.vmap(document_mask)(documents())
    last, sums = jax.lax.scan(layer, q, masks)
    x, expected = q, []
    for ids in documents():
        x, total = layer(x, document_mask(ids))
        expected.append(total)
    assert_close((last, sums), (x, jnp.stack(expected)))


@IMPLEMENTATIONS
def test_checkpoint_changes_no_gradient(implementation):
    def loss(q, k, v, slopes):
        mask = document_mask(documents()[0])
        out = px.flex_attention(
            q, k, v, block_mask=mask, implementation=implementation,
            score_mod=lambda s, b, h, i, j: s * slopes[h],
        )  # fmt: skip
        return jnp.sum(jnp.sin(out))

    arguments = (*qkv(), normal(5, (H,)))
    plain, again = (
        jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(*arguments)
        for f in (loss, jax.checkpoint(loss))
    )
    assert_close(again, plain)


@IMPLEMENTATIONS
def test_half_precision_captures_get_gradients_in_half_precision(implementation):
    def gradient(slopes, *arrays):
        def loss(slopes):
            out = px.flex_attention(
                *arrays, implementation=implementation,
                score_mod=lambda s, b, h, i, j: s * slopes[h].astype(s.dtype),
            )  # fmt: skip
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.jit(jax.grad(loss))(slopes)

    half = (normal(5, (H,), jnp.bfloat16), *qkv(dtype=jnp.bfloat16))
    actual = gradient(*half)
    expected = gradient(*(x.astype(jnp.float32) for x in half))
    assert actual.dtype == jnp.bfloat16
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    scale = np.abs(expected).max()
    assert np.abs(actual.astype(jnp.float32) - expected).max() <= 4 * eps * scale


@IMPLEMENTATIONS
def test_integer_captures_pass_beside_floating_ones(implementation):
    arrays, table = qkv(), normal(5, (5,))
    buckets = jnp.asarray(np.arange(T) * 7 % 5, jnp.int32)

    def loss(table, buckets):
        out = px.flex_attention(
            *arrays, implementation=implementation,
            score_mod=lambda s, b, h, i, j: s + table[buckets[j]],
        )  # fmt: skip
        return jnp.sum(jnp.sin(out))

    def formula(table, buckets):
        q, k, v = arrays
        s = (
            jnp.einsum("bthd,bshd->bhts", q, k) * 8**-0.5
            + table[buckets][None, None, None]
        )
        out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, axis=-1), v)
        return jnp.sum(jnp.sin(out))

    assert_close(
        jax.jit(jax.value_and_grad(loss))(table, buckets),
        jax.jit(jax.value_and_grad(formula))(table, buckets),
    )


def test_numpy_arrays_are_what_jnp_asarray_makes_of_them():
    """float64 from NumPy is float32 while x64 is off: no warning, no mixed dtypes."""
    wide = [np.asarray(x, np.float64) for x in qkv()]
    single = [x.astype(np.float32) for x in wide]
    mixed = px.flex_attention(wide[0], single[1], jnp.asarray(single[2]))
    assert mixed.dtype == jnp.float32
    np.testing.assert_array_equal(mixed, px.flex_attention(*single))
