"""Laws of what a mod captures: always its present contents, finite gradients, any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_plain import attention as plain_attention
from helpers import assert_error_rule, in_float64, normal

import pliax as px


B, T, H, D = 2, 24, 2, 8
QKV = tuple(normal(i, (B, T, H, D)) for i in range(3))
CAUSAL = px.create_block_mask(px.kernels.masks.causal, None, None, T, T, block_size=16)
IMPLEMENTATIONS = ["reference", "xla"]


def plain(distance):
    """Causal attention with a bias of the distance, masked before it is evaluated."""

    def attend(q, k, v, slopes):
        i, j = np.arange(T)[:, None], np.arange(T)[None, :]
        bias = distance(jnp.asarray(np.maximum(i - j, 0), q.dtype))[None, None]
        s = jnp.einsum("bthd,bshd->bhts", q, k) * D**-0.5
        s = s - slopes[None, :, None, None] * bias
        weights = jax.nn.softmax(jnp.where((i >= j)[None, None], s, -jnp.inf))
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    return attend


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("distance", [jnp.log1p, jnp.sqrt], ids=["log1p", "sqrt"])
def test_a_derivative_without_value_at_masked_places_leaves_no_trace(
    distance, implementation
):
    """log1p(i - j) is NaN above the diagonal, and so is its product with zero."""

    def flex(q, k, v, slopes):
        def score_mod(s, b, h, i, j):
            return s - slopes[h] * distance((i - j).astype(s.dtype))

        return px.flex_attention(
            q, k, v, score_mod=score_mod, block_mask=CAUSAL, implementation=implementation
        )  # fmt: skip

    def gradients(f):
        return jax.jit(
            jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), argnums=(0, 1, 2, 3))
        )

    operands = (*QKV, jnp.asarray([0.3, 0.7]))
    golden = in_float64(gradients(plain(distance)), *operands)
    found, formula = gradients(flex)(*operands), gradients(plain(distance))(*operands)
    assert_error_rule(found, formula, golden)


# Each hides query 0, at which the bias below has no derivative, and more.
BLIND = {
    "a sequence": (lambda b, h, i, j: (b == 1) & (i >= 1), B, None),
    "a head": (lambda b, h, i, j: (h == 1) & (i >= 1), None, H),
    "all but one": (lambda b, h, i, j: (h == 0) & (b == 1) & (i >= 20), B, H),
    "rows": (lambda b, h, i, j: (i % 5 == 4) & (j <= i), None, None),
    "everything": (lambda b, h, i, j: (i < 0) & (j < 0), None, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", BLIND)
def test_what_is_blind_leaves_no_trace_in_a_gradient(name, implementation):
    """Whatever sees nothing borrows a place that is seen, if there is one."""
    mask_mod, batch, heads = BLIND[name]
    mask = px.create_block_mask(mask_mod, batch, heads, T, T, block_size=16)

    def loss(attend):
        def squared(q, k, v, w):
            return jnp.sum(jnp.square(attend(q, k, v, w)))

        return jax.jit(jax.grad(squared, argnums=(0, 1, 2, 3)))

    def flex(q, k, v, w):
        return px.flex_attention(
            q, k, v, block_mask=mask, implementation=implementation,
            score_mod=lambda s, b, h, i, j: s + w * s / i.astype(s.dtype),
        )  # fmt: skip

    def formula(q, k, v, w):
        def score(s, b, h, i, j):
            return s + w * s / jnp.maximum(i, 1).astype(s.dtype)

        return plain_attention(q, k, v, score=score, visible=mask_mod)[0]

    operands = (*QKV, jnp.float32(0.3))
    golden = in_float64(loss(formula), *operands)
    assert_error_rule(loss(flex)(*operands), loss(formula)(*operands), golden)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lookup",
    [
        lambda bias, b, h, i, j: bias[b, h, i, j],
        lambda bias, b, h, i, j: bias[b][h][i][j],
        lambda bias, b, h, i, j: bias[:, h][b, i][j],
    ],
    ids=["at once", "one by one", "out of order"],
)
def test_a_captured_bias_costs_no_more_than_its_gradient(lookup):
    """However it is indexed, and though every tile looks up a part of it."""
    length = 1024
    mask = px.create_block_mask(px.kernels.masks.causal, None, None, length, length)

    def loss(q, k, v, bias):
        def score_mod(s, b, h, i, j):
            return s + lookup(bias, b, h, i, j)

        return jnp.sum(px.flex_attention(q, k, v, score_mod=score_mod, block_mask=mask))

    shapes = (*[(1, length, H, D)] * 3, (1, H, length, length))
    arguments = (jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*arguments).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 4 * H * length * length


class Slopes:
    """A module-like mod whose contents are replaced from outside."""

    def __init__(self, value):
        self.value = value

    def __call__(self, s, b, h, i, j):
        return s * self.value[h]


def test_a_mod_used_again_sees_what_it_holds_now():
    mod = Slopes(jnp.full(H, 1.0))
    outs = [px.flex_attention(*QKV, score_mod=mod)]
    mod.value = jnp.full(H, 5.0)
    outs.append(px.flex_attention(*QKV, score_mod=mod))
    assert np.abs(outs[0] - outs[1]).max() > 1e-2

    def loss(value):
        mod.value = value
        return jnp.sum(px.flex_attention(*QKV, score_mod=mod))

    first, second = (jax.grad(loss)(jnp.full(H, x)) for x in (1.0, 2.0))
    assert np.abs(first - second).max() > 1e-4


def test_a_mask_used_again_sees_what_it_holds_now():
    window = [jnp.int32(2)]

    def mask_mod(b, h, i, j):
        return i - j < window[0]

    counts = []
    for width in (1, 60):
        window[0] = jnp.int32(width)
        mask = px.create_block_mask(mask_mod, None, None, 64, 64, block_size=16)
        counts.append(int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()))
    assert counts[0] < counts[1]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("axes", [("x",), ("x", None, "y"), ()])
def test_explicit_axes_give_the_same_numbers_where_the_query_lies(axes, implementation):
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh(
        (2, 2), ("x", "y"), axis_types=explicit, devices=jax.devices()[:4]
    )
    spec = jax.sharding.PartitionSpec(*axes)

    slopes = jnp.asarray([0.3, 0.7])

    def attend(*qkv):
        def score_mod(s, b, h, i, j):
            return jnp.where(i > j + 2, s * slopes[h], s - h.astype(s.dtype))

        def causal(b, h, i, j):
            return i >= j

        mask = px.create_block_mask(causal, None, None, T, T, block_size=16)
        return px.flex_attention(
            *qkv, score_mod=score_mod, block_mask=mask, implementation=implementation
        )

    def loss(*qkv):
        return jnp.sum(jnp.square(attend(*qkv)))

    expected, gradient = attend(*QKV), jax.jit(jax.grad(loss))(*QKV)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in QKV]
        out = attend(*placed)
        assert out.sharding.is_equivalent_to(placed[0].sharding, 4)
        found = jax.jit(jax.grad(loss))(*placed)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_allclose(found, gradient, atol=1e-5)
