"""Which implementation runs where nobody names one, on a machine with a Hopper GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import gaussian

import pliax as px
from pliax.kernels._backends import choose
from pliax.kernels.attention import api, mosaic_gpu_limits


T = 200
BF16 = jnp.bfloat16
TURN = "stablehlo.transpose"
SHAPE = (1, 256, 2, 64)


@pytest.fixture
def hopper(monkeypatch):
    """As if the default device were one Hopper GPU; programs still run on the CPU."""
    monkeypatch.setattr(mosaic_gpu_limits, "refused_device", lambda: None)
    monkeypatch.setattr(jax, "device_count", lambda *_: 1)


def operands():
    return tuple(gaussian(n, (1, T, 2, 64), BF16) for n in range(3))


def causal():
    return px.create_block_mask(px.kernels.masks.causal, None, None, T, T)


def loss(q, k, v, slope, **options):
    out = px.flex_attention(
        q, k, v, block_mask=causal(), score_mod=lambda s, b, h, i, j: s + slope[h] * (j - i).astype(s.dtype),
        **options,
    )  # fmt: skip
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


GRADIENTS = jax.value_and_grad(loss, (0, 1, 2, 3))


def chosen(shape=(1, T, 2, 64), dtype=BF16, options=()):
    x = jnp.zeros(shape, dtype)
    arguments = api._Arguments((x, x, x), None, None, dict(options))
    return choose("flex_attention", api.BACKENDS, arguments, None).name


@pytest.mark.usefixtures("hopper")
def test_the_fused_kernels_are_compiled_for_the_gpu_and_xla_for_the_cpu():
    given = *operands(), jnp.ones(2)
    traced = jax.jit(GRADIENTS).trace(*given)
    on_gpu, on_cpu = (
        traced.lower(lowering_platforms=(name,)).as_text() for name in ("cuda", "cpu")
    )
    assert "mosaic_gpu" in on_gpu and "mosaic_gpu" not in on_cpu


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("named", [{}, {"implementation": "mosaic_gpu"}])
@pytest.mark.parametrize("request_of", [(True, True), (True, False), (False, True)])
def test_on_a_gpu_lse_and_max_scores_are_turned_by_nobody(named, request_of):
    """The kernel writes them as they are returned, (B, T, H)."""
    attend = partial(px.flex_attention, return_aux=px.AuxRequest(*request_of), **named)
    asked, with_residuals = (
        on_gpu(x) for x in (attend, lambda *given: jax.vjp(attend, *given)[0])
    )
    assert "mosaic_gpu" in asked and TURN not in asked
    assert "mosaic_gpu" in with_residuals and TURN in with_residuals


def on_gpu(function):
    """What is lowered for a GPU."""
    traced = jax.jit(function).trace(*(gaussian(n, SHAPE, BF16) for n in range(3)))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("request_of", [None, px.AuxRequest()])
def test_who_asks_for_neither_has_the_faster_layout(request_of):
    """By head, (B, H, T), through shared memory: XLA drops what nobody asks for."""
    program = on_gpu(partial(px.flex_attention, return_aux=request_of))
    assert "tensor<1x2x384xf32>" in program and "tensor<1x384x2xf32>" not in program


@pytest.mark.usefixtures("hopper")
def test_in_a_bucket_they_are_turned_by_nobody_either():
    request = px.AuxRequest(lse=True, max_scores=True)
    attend = px.pad(
        partial(px.flex_attention, return_aux=request),
        dims=dict.fromkeys(("query", "key", "value"), "_, t, _, _"),
    )
    asked = on_gpu(partial(attend, sizes={"t": 200}))
    assert "mosaic_gpu" in asked and TURN not in asked


@pytest.mark.usefixtures("hopper")
def test_on_a_cpu_the_default_gives_what_xla_gives():
    given = *operands(), jnp.ones(2)
    found = jax.jit(GRADIENTS)(*given)
    by_xla = jax.value_and_grad(lambda *x: loss(*x, implementation="xla"), (0, 1, 2, 3))
    jax.tree.map(np.testing.assert_array_equal, found, jax.jit(by_xla)(*given))


@pytest.mark.usefixtures("hopper")
def test_transformations_meet_the_default():
    q, k, v = operands()
    many = jnp.stack([q, -q])

    def attend(q, **options):
        return px.flex_attention(q, k, v, block_mask=causal(), **options)

    found = jax.vmap(attend)(many)
    for one, x in zip(found, many, strict=True):
        wanted = attend(x, implementation="xla")  # sums in another order
        np.testing.assert_allclose(
            *(np.asarray(a, np.float32) for a in (one, wanted)), rtol=0.02, atol=1e-3
        )

    def norm(q, **options):
        return jnp.sum(jnp.square(attend(q, **options).astype(jnp.float32)))

    def of_layers(q, **options):
        layer = jax.checkpoint(lambda c, _: (attend(c, **options), None))
        return norm(jax.lax.scan(layer, q, None, 2)[0], **options)

    for function in (norm, of_layers):
        by_xla = jax.grad(lambda q, f=function: f(q, implementation="xla"))
        found = jax.vmap(jax.grad(function))(many)
        for one, x in zip(found, many, strict=True):
            one, wanted = (np.asarray(a, np.float32) for a in (one, by_xla(x)))
            np.testing.assert_allclose(one, wanted, rtol=0.05, atol=0.02)
    tangents = jax.jvp(attend, (q,), (q,))[1]
    wanted = jax.jvp(lambda q: attend(q, implementation="xla"), (q,), (q,))[1]
    np.testing.assert_array_equal(tangents, wanted)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("call", "name"),
    [
        ({}, "mosaic_gpu"),
        ({"dtype": jnp.float16}, "mosaic_gpu"),
        ({"dtype": jnp.float32}, "xla"),
        ({"shape": (1, T, 2, 512)}, "xla"),
        ({"shape": (1, 127, 2, 64)}, "mosaic_gpu"),
        ({"shape": (1, 1, 2, 64)}, "mosaic_gpu"),
        ({"options": [("splits", 2)]}, "xla"),
    ],
)
def test_xla_is_the_default_for_what_the_kernels_do_not_take(call, name):
    assert chosen(**call) == name


def few(queries, H):
    """Arguments of few queries, whose mask has lists of blocks for `H` heads."""
    query, key = (jnp.zeros((1, T, H, 64), BF16) for T, H in ((queries, 4), (200, 2)))
    of_head = lambda b, h, q, k: k >= h  # noqa: E731
    mask_mod = of_head if H else px.kernels.masks.causal
    mask = px.create_block_mask(mask_mod, None, H, queries, 200)
    return api._Arguments((query, key, key), None, mask, {})


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("queries", "H", "name"),
    [
        (1, None, "mosaic_gpu"),
        (127, None, "mosaic_gpu"),
        (3, 4, "xla"),
        (127, 4, "xla"),
        (128, 4, "mosaic_gpu"),
    ],
)
def test_few_queries_take_the_kernels_where_their_heads_share_a_tile(queries, H, name):
    backend = choose("flex_attention", api.BACKENDS, few(queries, H), None)
    assert backend.name == name


@pytest.mark.usefixtures("hopper")
def test_the_default_refuses_few_queries_with_a_reason_and_a_name_does_not():
    arguments, (*_, named) = few(3, 4), api.BACKENDS
    assert named.by_default is not None
    assert named.by_default.supports(arguments) == (
        "fewer than 128 queries would read a key once for each head: "
        "query heads of one key head have lists of blocks of their own"
    )
    assert named.supports(arguments) is None


def decode(q, k, v, lengths, table):
    causal = px.kernels.masks.with_offset(px.kernels.masks.causal, lengths)
    mask = px.create_block_mask(causal, 1, None, 3, k.shape[1], block_size=(3, 128))
    return px.flex_attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s + table[h].astype(s.dtype) * (j - i).astype(s.dtype),
        block_mask=mask, enable_gqa=True,
    )  # fmt: skip


def decoded(run):
    _, k, v = operands()
    query = gaussian(3, (1, 3, 4, 64), BF16)
    return run(query, k, v, jnp.asarray([150]), jnp.linspace(0.01, 0.1, 4))


def total(*args):
    return jnp.sum(jnp.sin(decode(*args).astype(jnp.float32)))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("function", [decode, jax.grad(total, (0, 1, 2, 4))])
def test_few_queries_are_compiled_for_the_gpu_and_for_the_cpu(function):
    traced = decoded(jax.jit(function).trace)
    on_gpu, on_cpu = (
        traced.lower(lowering_platforms=(name,)).as_text() for name in ("cuda", "cpu")
    )
    assert "mosaic_gpu" in on_gpu and "mosaic_gpu" not in on_cpu


@pytest.mark.parametrize("function", [decode, jax.grad(total, (0, 1, 2, 4))])
def test_on_a_cpu_few_queries_give_what_xla_gives(function, hopper, monkeypatch):
    found = decoded(jax.jit(function))
    monkeypatch.undo()
    jax.tree.map(
        np.testing.assert_array_equal, found, decoded(jax.jit(lambda *x: function(*x)))
    )


@pytest.mark.usefixtures("hopper")
def test_few_queries_over_keys_that_change_take_the_kernels_too():
    _, k, v = operands()
    query = gaussian(3, (1, 3, 2, 64), BF16)
    attend = lambda k, v: px.flex_attention(query, k, v)  # noqa: E731
    padded = px.pad(attend, dims=dict.fromkeys("kv", "_, s, _, _"))
    traced = jax.jit(lambda k, v: padded(k, v, sizes={"s": 150})).trace(k, v)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    wanted = attend(k[:, :150], v[:, :150])
    found = padded(k, v, sizes={"s": 150})
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (found, wanted)), rtol=0.02, atol=1e-3
    )


def test_among_several_devices_xla_is_the_default(monkeypatch):
    monkeypatch.setattr(mosaic_gpu_limits, "refused_device", lambda: None)
    assert jax.device_count() > 1 and chosen() == "xla"


@pytest.mark.usefixtures("hopper")
def test_a_name_takes_the_kernel_itself():
    """Which has no way to run where a program is compiled for a CPU."""
    q, k, v = operands()
    named = jax.jit(lambda q: px.flex_attention(q, k, v, implementation="mosaic_gpu"))
    with pytest.raises(
        (NotImplementedError, ValueError), match=r"(?i)mosaic|interpret mode"
    ):
        named.lower(q)


@pytest.mark.usefixtures("hopper")
def test_options_are_for_an_implementation_that_is_named():
    with pytest.raises(ValueError, match=r"\['interpret'\] are unknown to .*'xla'"):
        px.flex_attention(*operands(), kernel_options={"interpret": 1})


@pytest.mark.usefixtures("hopper")
def test_a_program_for_any_size_is_exported_with_xla():
    T, S = jax.export.symbolic_shape("t, s")
    specs = [jax.ShapeDtypeStruct((1, n, 2, 64), BF16) for n in (T, S, S)]
    exported = jax.export.export(jax.jit(px.flex_attention))(*specs)
    found, wanted = exported.call(*operands()), px.flex_attention(*operands())
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (found, wanted)), rtol=0.02, atol=1e-3
    )


@pytest.mark.usefixtures("hopper")
def test_sizes_that_change_take_the_kernels_too():
    """Inside the buckets of `px.pad` sizes are known."""
    q, k, v = operands()

    def total(q, k, v):
        return jnp.sum(px.flex_attention(q, k, v).astype(jnp.float32))

    padded = px.pad(jax.value_and_grad(total), dims=dict.fromkeys("qkv", "_, t, _, _"))
    short = [x[:, :150] for x in (q, k, v)]
    filled = [jnp.pad(x, ((0, 0), (0, 50), (0, 0), (0, 0))) for x in short]
    value, gradient = padded(*filled, sizes={"t": 150})
    exact, wanted = jax.value_and_grad(total)(*short)
    np.testing.assert_allclose(value, exact, rtol=1e-2)
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32)[:, :150] for x in (gradient, wanted)),
        rtol=0.05, atol=0.02,
    )  # fmt: skip
