"""Every derivative, of every order, through every transformation, is the formula's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import gaussian
from attention_plain import attention as plain_attention
from helpers import assert_error_rule, in_float64
from jax import export

import pliax as px


B, T, S, H, K, D, V = 2, 19, 23, 4, 2, 4, 3
BLOCK = (8, 16)
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["reference", "xla"])
REQUEST = px.AuxRequest(lse=True)
P = jax.sharding.PartitionSpec


def arguments(batch=B):
    """Query, key, value and a table that score_mod captures."""
    shapes = (batch, T, H, D), (batch, S, K, D), (batch, S, K, V), (H, 9)
    return tuple(gaussian(n, x) for n, x in enumerate(shapes))


def documents(batch=B):
    """Of queries and keys; some queries see nothing."""
    ids = np.random.default_rng(5).integers(0, 4, (batch, S))
    return jnp.asarray(np.sort(ids, axis=1), jnp.int32)


def attend(q, k, v, table, ids, implementation="xla"):
    """Output and lse, 0 where it is -inf."""

    def score_mod(s, b, h, i, j):
        return jnp.sin(s) * (1.5 + table[h, (i + 2 * j) % 9]) + table[h, j % 9] * s

    def mask_mod(b, h, i, j):
        return (ids[b, i] == ids[b, j]) & (i >= j) & (i % 5 != 2)

    mask = px.create_block_mask(
        mask_mod, len(ids), None, q.shape[1], k.shape[1], block_size=BLOCK
    )
    out, aux = px.flex_attention(
        q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True,
        return_aux=REQUEST, implementation=implementation,
    )  # fmt: skip
    return out, jnp.where(aux.lse == -jnp.inf, 0.0, aux.lse)


def formula(q, k, v, table, ids):
    def score(s, b, h, i, j):
        return jnp.sin(s) * (1.5 + table[h, (i + 2 * j) % 9]) + table[h, j % 9] * s

    def visible(b, h, i, j):
        return (ids[b, i] == ids[b, j]) & (i >= j) & (i % 5 != 2)

    out, lse, _ = plain_attention(q, k, v, score=score, visible=visible)
    return out, jnp.where(lse == -jnp.inf, 0.0, lse)


def loss_of(attention):
    def loss(*operands):
        out, lse = attention(*operands)
        return jnp.sum(jnp.sin(2.0 * out)) + jnp.sum(jnp.cos(lse))

    return loss


def directions(count=4):
    return tuple(gaussian(40 + n, x.shape) for n, x in enumerate(arguments()))[:count]


ALL = (0, 1, 2, 3)


def _grad(f, x, rest, t):
    return jax.grad(lambda *x: f(*x, *rest), ALL)(*x)


def _jvp(f, x, rest, t):
    return jax.jvp(lambda *x: f(*x, *rest), x, t)


def _linearize(f, x, rest, t):
    value, linear = jax.linearize(lambda *x: f(*x, *rest), *x)
    return value, linear(*t)


def _jacfwd(f, x, rest, t):
    return jax.jacfwd(lambda scale: f(*x[:3], scale * x[3], *rest))(jnp.ones_like(x[3]))


def _hessian_vector(f, x, rest, t):
    """Forward over reverse."""
    return jax.jvp(lambda *x: _grad(f, x, rest, t), x, t)


def _grad_of_grad(f, x, rest, t):
    """Reverse over reverse."""

    def inner(*x):
        return sum(
            jnp.vdot(jnp.sin(g), d)
            for g, d in zip(_grad(f, x, rest, t), t, strict=True)
        )

    return jax.grad(inner, ALL)(*x)


def _reverse_over_forward(f, x, rest, t):
    return jax.grad(lambda *x: _jvp(f, x, rest, t)[1], ALL)(*x)


DERIVATIVES = {
    "grad": _grad,
    "jvp": _jvp,
    "linearize": _linearize,
    "jacfwd": _jacfwd,
    "hessian_vector": _hessian_vector,
    "grad_of_grad": _grad_of_grad,
    "reverse_over_forward": _reverse_over_forward,
}


@functools.cache
def golden_and_rival(name):
    def run(x, rest, t):
        return DERIVATIVES[name](loss_of(formula), x, rest, t)

    run = jax.jit(run)
    operands = arguments(), (documents(),), directions()
    return in_float64(run, *operands), run(*operands)


@pytest.mark.slow
@IMPLEMENTATIONS
@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_derivative_is_that_of_the_formula(name, implementation):
    """With lse in the loss, and queries that see nothing."""
    loss = loss_of(functools.partial(attend, implementation=implementation))

    @jax.jit
    def run(x, rest, t):
        return DERIVATIVES[name](loss, x, rest, t)

    found = run(arguments(), (documents(),), directions())
    golden, rival = golden_and_rival(name)
    assert_error_rule(found, rival, golden)


def test_derivatives_without_jit_are_the_same():
    loss = loss_of(attend)
    operands = arguments(), (documents(),), directions()
    golden, rival = golden_and_rival("hessian_vector")
    assert_error_rule(DERIVATIVES["hessian_vector"](loss, *operands), rival, golden)


@pytest.mark.slow
@IMPLEMENTATIONS
@pytest.mark.parametrize("stand_in", [-1e9, -1e30])
def test_a_finite_stand_in_for_minus_infinity_has_exact_gradients(
    stand_in, implementation
):
    """Of a sequence of padding alone every score is the stand-in, and its lse too."""
    real = jnp.asarray([0, 13], jnp.int32)

    def gradients(attention):
        def loss(q, k, v, table):
            def score(s, b, h, i, j):
                return jnp.where(j < real[b], s + table[h, j % 9], stand_in)

            return jnp.sum(jnp.sin(3.0 * attention(q, k, v, score)))

        return jax.jit(jax.grad(loss, ALL))

    def flex(q, k, v, score):
        return px.flex_attention(
            q, k, v, score_mod=score, enable_gqa=True, implementation=implementation
        )

    def plain(q, k, v, score):
        return plain_attention(q, k, v, score=score)[0]

    golden = in_float64(gradients(plain), *arguments())
    rival = gradients(plain)(*arguments())
    assert_error_rule(gradients(flex)(*arguments()), rival, golden)


@IMPLEMENTATIONS
def test_what_nobody_sees_may_be_nan(implementation):
    """Keys and values behind the padding, and queries that see nothing."""
    lengths = jnp.asarray([20, 7], jnp.int32)
    q, k, v, table = arguments()
    mask = px.create_block_mask(
        px.and_masks(px.kernels.masks.padding(lengths), lambda b, h, i, j: i != 3),
        B, None, T, S, block_size=BLOCK,
    )  # fmt: skip
    unseen = (jnp.arange(S)[None] >= lengths[:, None])[..., None, None]
    blind = (jnp.arange(T) == 3)[None, :, None, None]

    def loss(q, k, v, table):
        out, aux = px.flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True, return_aux=REQUEST,
            score_mod=lambda s, b, h, i, j: s * table[h, j % 9],
            implementation=implementation,
        )  # fmt: skip
        lse = jnp.where(aux.lse == -jnp.inf, 0.0, aux.lse)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(lse))

    @jax.jit
    def run(*x):
        first = jax.value_and_grad(loss, ALL)
        return first(*x), jax.jvp(jax.grad(loss, ALL), x, directions())[1]

    def filled(x):
        return (
            jnp.where(blind, x, q), jnp.where(unseen, x, k), jnp.where(unseen, x, v), table
        )  # fmt: skip

    clean, dirty = run(*filled(0.0)), run(*filled(jnp.nan))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(dirty))
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


@pytest.mark.slow
@pytest.mark.parametrize("over", [1, 6, 8, 16, 25, 31])
def test_gradients_through_vmap_are_a_loop(over):
    """Over any subset of query, key, value, the captured table and the mask's ids."""
    axes = tuple(0 if over >> n & 1 else None for n in range(5))
    many = [jnp.stack([x, x[..., ::-1], 0.5 * x]) for x in arguments()]
    ids = documents()
    many.append(jnp.stack([ids, ids // 2, jnp.zeros_like(ids)]))
    operands = [x if a == 0 else x[0] for x, a in zip(many, axes, strict=True)]
    each = _vmapped()
    found = jax.vmap(each, axes)(*operands)
    loop = [
        each(*(x[n] if a == 0 else x for x, a in zip(operands, axes, strict=True)))
        for n in range(3)
    ]
    assert_close(found, jax.tree.map(lambda *x: jnp.stack(x), *loop))


@functools.cache
def _vmapped():
    return jax.jit(jax.value_and_grad(loss_of(attend), ALL))


def assert_close(actual, expected):
    """To the rounding of float32 sums taken in another order."""
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        scale = float(np.abs(other).max(initial=1.0))
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["everything_saveable", "nothing_saveable", "dots_saveable", None]
)
def test_remat_changes_no_gradient(policy):
    chosen = policy and getattr(jax.checkpoint_policies, policy)
    loss = jax.checkpoint(loss_of(attend), policy=chosen)
    found = jax.jit(jax.value_and_grad(loss, ALL))(*arguments(), documents())
    assert_close(found, _vmapped()(*arguments(), documents()))


@IMPLEMENTATIONS
def test_a_scan_over_layers_is_a_loop_over_layers(implementation):
    """Each layer captures its own table."""
    q, k, v, table = arguments()
    v = jnp.concatenate([v, v[..., :1]], axis=-1)
    tables = jnp.stack([table, -table, table[:, ::-1]])
    ids = documents()

    def layer(x, table):
        return x + attend(x, k, v, table, ids, implementation)[0]

    def scanned(q, tables):
        last, _ = jax.lax.scan(lambda x, t: (layer(x, t), None), q, tables)
        return jnp.sum(jnp.sin(last))

    def looped(q, tables):
        for n in range(3):
            q = layer(q, tables[n])
        return jnp.sum(jnp.sin(q))

    found, expected = (
        jax.jit(jax.value_and_grad(f, (0, 1)))(q, tables) for f in (scanned, looped)
    )
    assert_close(found, expected)


def on_mesh(spec):
    """attend with its arrays in shards of `spec`, and its table's heads likewise."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=auto, devices=jax.devices()[:4])
    return jax.shard_map(
        lambda *x: attend(*x)[0],
        mesh=mesh,
        in_specs=(spec, spec, spec, P(spec[2]), P(spec[0])),
        out_specs=spec,
        check_vma=True,
    )


def test_shard_map_over_batch_and_heads_changes_nothing():
    """Gradients too, of the table whose heads are in shards and shared by the batch."""
    spec = P("x", None, "y")
    operands = *arguments(4), documents(4)

    def loss(attention):
        return jax.jit(
            jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(attention(*x))), ALL)
        )

    found = loss(on_mesh(spec))(*operands)
    assert_close(found, loss(lambda *x: attend(*x)[0])(*operands))


def test_shard_map_has_second_derivatives():
    """Forward over reverse, with a table that is shared and one that is in shards."""
    spec = P("x", None, "y")
    *operands, ids = *arguments(4), documents(4)
    along = tuple(jnp.cos(x) for x in operands)

    def curvature(attention):
        def loss(*operands):
            return jnp.sum(jnp.sin(attention(*operands, ids)))

        return jax.jit(lambda *x: jax.jvp(jax.grad(loss, ALL), x, along)[1])

    found = curvature(on_mesh(spec))(*operands)
    assert_close(found, curvature(lambda *x: attend(*x)[0])(*operands))


@IMPLEMENTATIONS
def test_a_mask_is_an_argument_of_shard_map(implementation):
    """A mask is given to every device; its captured arrays are not varying."""
    q, k, v, table = arguments(4)
    limit = jnp.int32(5)
    mask = px.create_block_mask(
        lambda b, h, i, j: i + limit >= j, None, None, T, S, block_size=BLOCK
    )
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("x",), axis_types=auto, devices=jax.devices()[:4])

    def attention(q, k, v, table, mask):
        return px.flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True, implementation=implementation,
            score_mod=lambda s, b, h, i, j: jax.nn.softplus(s) * table[h, j % 9],
        )  # fmt: skip

    x = P("x")
    sharded = jax.shard_map(
        attention, mesh=mesh, in_specs=(x, x, x, P(), P()), out_specs=x, check_vma=True
    )

    def differentiated(f):
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(f(*a))), ALL))

    operands = q, k, v, table, mask
    found = differentiated(sharded)(*operands)
    expected = differentiated(attention)(*operands)
    assert_close(found, expected)


@pytest.mark.slow
@IMPLEMENTATIONS
@pytest.mark.parametrize("symbolic", [False, True])
def test_an_exported_attention_is_attention(symbolic, implementation):
    """One artefact for all batches and lengths, with value and gradients."""
    names = export.symbolic_shape("b, t, s") if symbolic else (B, T, S)
    b, t, s = names

    def loss(q, k, v, table):
        offset = k.shape[1] - q.shape[1]
        mask = px.create_block_mask(
            lambda b, h, i, j: i + offset >= j, None, None, q.shape[1], k.shape[1],
            block_size=BLOCK,
        )  # fmt: skip
        out, aux = px.flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True, return_aux=REQUEST,
            score_mod=lambda s, b, h, i, j: jnp.tanh(s) * table[h, (i + j) % 9],
            implementation=implementation,
        )  # fmt: skip
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(aux.lse))

    step = jax.jit(jax.value_and_grad(loss, ALL))
    shapes = (b, t, H, D), (b, s, K, D), (b, s, K, V), (H, 9)
    exported = export.export(step)(
        *(jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes)
    )
    assert_close(exported.call(*arguments()), step(*arguments()))


@IMPLEMENTATIONS
def test_two_runs_give_identical_bits(implementation):
    loss = loss_of(functools.partial(attend, implementation=implementation))
    run = jax.jit(jax.value_and_grad(loss, ALL))
    first, second = (run(*arguments(), documents()) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
