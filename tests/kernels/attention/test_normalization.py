"""Laws of what kernels compute in place of JAX's primitives: the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import gaussian
from jax import lax

import pliax as px
from pliax.core.jaxprs import close
from pliax.kernels.attention import mosaic_gpu
from pliax.kernels.attention.normalization import compute, flatten, is_elementwise
from pliax.kernels.attention.separation import SCORE_MOD, Inseparable, separate


SCORE, INDEX = (jax.ShapeDtypeStruct((), x) for x in (jnp.float32, jnp.int32))


def as_float(x):
    return x.astype(jnp.float32)


def as_int(x):
    return x.astype(jnp.int32)


FLOATS = {
    "abs": jnp.abs, "ceil": lax.ceil, "cos": lax.cos, "cosh": lax.cosh, "exp": lax.exp,
    "exp2": lax.exp2, "expm1": lax.expm1, "floor": lax.floor, "log": lax.log,
    "log1p": lax.log1p, "log2": lax.log2, "logistic": lax.logistic, "neg": lax.neg,
    "rsqrt": lax.rsqrt, "sign": lax.sign, "sin": lax.sin, "sinh": lax.sinh,
    "sqrt": lax.sqrt, "square": lax.square, "tan": lax.tan, "tanh": lax.tanh,
    "round": lax.round, "fifth": lambda s: s**5, "to int": lambda s: as_float(as_int(s)),
    "even": lambda s: lax.round(s, lax.RoundingMethod.TO_NEAREST_EVEN),
    "clamp": lambda s: lax.clamp(-1.0, s, 1.0), "min": lambda s: jnp.minimum(s, 1.0),
    "is_finite": lambda s: jnp.where(jnp.isfinite(s), s, 7.0),
    "square root of a power": lambda s: lax.pow(s, jnp.float32(1.5)),
    "odd power": lambda s: lax.pow(s, jnp.float32(3)),
    "inverse": lambda s: s**-1, "inverse square": lambda s: s**-2,
    "even power": lambda s: lax.pow(s, jnp.float32(-2)),
    "tanh's slope": lambda s: jax.jvp(jnp.tanh, (s,), (jnp.ones_like(s),))[1],
}  # fmt: skip
INTEGERS = {
    "abs": lambda q, k: abs(q - k), "and": lambda q, k: q & k, "or": lambda q, k: q | k,
    "xor": lambda q, k: q ^ k, "not": lambda q, k: ~(q - k), "//": lambda q, k: q // (k + 1),
    "div": lambda q, k: lax.div(q, k + 1), "%": lambda q, k: (q - k) % (k + 1),
    "rem": lambda q, k: lax.rem(q - k, k + 1), "sign": lambda q, k: lax.sign(q - k),
    "<<": lambda q, k: q << (k % 8), ">>": lambda q, k: (q - k) >> 2,
    "logical": lambda q, k: lax.shift_right_logical(q - k, 2), "cube": lambda q, k: (q - k) ** 3,
    "bits": lambda q, k: lax.population_count(q * k - 3), "max": jnp.maximum,
    "clamp": lambda q, k: lax.clamp(0, q - k, 9),
    "uint": lambda q, k: as_int((q * k).astype(jnp.uint32) >> jnp.uint32(3)),
    "uint %": lambda q, k: as_int((q * k).astype(jnp.uint32) % jnp.uint32(7)),
    "not of truths": lambda q, k: as_int(~(q > k)),
    "and of truths": lambda q, k: as_int((q > k) & (k > 2)),
    "or of truths": lambda q, k: as_int((q > k) | (k > 2)),
    "xor of truths": lambda q, k: as_int((q > k) ^ (k > 2)),
    "equal truths": lambda q, k: as_int((q > k) == (k > 2)),
    "greater truth": lambda q, k: as_int(jnp.maximum(q > k, k > 2)),
    "lesser truth": lambda q, k: as_int(jnp.minimum(q > k, k > 2)),
    "to a truth": lambda q, k: as_int((q - k).astype(jnp.bool_)),
    "select": lambda q, k: as_int(jnp.where(q > k, k > 2, q < 5)),
}  # fmt: skip
REFUSED = {
    "atan2": lambda s: lax.atan2(s, s + 1), "erf": lax.erf, "cbrt": lax.cbrt,
    "float rem": lambda s: lax.rem(s, jnp.float32(3)),
    "of three": lambda s: lax.select_n(as_int(jnp.clip(s, 0, 2)), s, s + 1, s * 2),
}  # fmt: skip
MODS = {f"float {n}": lambda s, b, h, q, k, f=f: f(s) for n, f in FLOATS.items()}
MODS |= {
    f"int {n}": lambda s, b, h, q, k, f=f: s + as_float(f(q, k))
    for n, f in INTEGERS.items()
}


def by_hand(mod, *args):
    """Its equations one by one, each by what a kernel has."""
    jaxpr = flatten(mod)
    env = dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        assert is_elementwise(eqn), eqn
        values = [
            jnp.full(args[0].shape, v.val, v.aval.dtype)
            if hasattr(v, "val")
            else env[v]
            for v in eqn.invars
        ]
        env[eqn.outvars[0]] = compute(eqn, values)
    return env[jaxpr.outvars[0]]


@pytest.mark.parametrize("name", MODS)
def test_a_kernel_computes_what_jax_does(name):
    rng = np.random.default_rng(0)
    special = [
        0.0,
        -0.0,
        0.5,
        -0.5,
        1.5,
        2.5,
        -1.0,
        1.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-9,
        -1e-9,
        30.0,
        -30.0,
        1e30,
    ]
    s = jnp.asarray([*special, *rng.normal(size=240) * 4], jnp.float32)
    indices = (jnp.asarray(rng.integers(0, 300, s.shape), jnp.int32) for _ in range(4))
    args = s, *indices
    mod = close(MODS[name], SCORE, *[INDEX] * 4)
    found, wanted = by_hand(mod, *args), jax.vmap(MODS[name])(*args)
    np.testing.assert_allclose(
        found, wanted, rtol=3e-5 if "power" in name else 2e-6, atol=1e-7
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODS)
def test_what_a_kernel_computes_lowers_for_a_gpu(name):
    mod = close(MODS[name], SCORE, *[INDEX] * 4)
    arrays = (gaussian(0, (1, 64, 1, 64), jnp.bfloat16),) * 3

    def attend(arrays):
        return mosaic_gpu.forward(arrays, mod, None, scale=0.1)

    jax.jit(attend).trace(arrays).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_computes_is_refused(name):
    mod = close(lambda s, b, h, q, k: REFUSED[name](s), SCORE, *[INDEX] * 4)
    with pytest.raises(Inseparable, match="for each score"):
        separate(mod, SCORE_MOD)


def test_the_refusal_names_the_primitive():
    x = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)
    with pytest.raises(
        NotImplementedError, match="of score_mod, no kernel computes erf"
    ):
        px.flex_attention(
            x, x, x, score_mod=lambda s, b, h, q, k: lax.erf(s),
            implementation="mosaic_gpu", kernel_options={"interpret": 1},
        )  # fmt: skip


LOOKED_INTO = {
    "of each query": lambda t: lambda s, b, h, q, k: s + (t[q] * 2)[k],
    "of each query, cast": lambda t: lambda s, b, h, q, k: s + as_float(t[q] > 0)[k],
}


@pytest.mark.parametrize("name", LOOKED_INTO)
def test_an_array_made_for_each_query_is_not_looked_into(name):
    mod = close(LOOKED_INTO[name](gaussian(0, (9, 9))), SCORE, *[INDEX] * 4)
    with pytest.raises(Inseparable, match="of each query or key"):
        separate(mod, SCORE_MOD)


def test_a_sum_that_is_used_often_is_computed_once():
    def mod(s, b, h, q, k):
        d = q - k
        for _ in range(40):
            d = jnp.maximum(d, -d)
        return s + as_float(d)

    arrays = (gaussian(0, (1, 64, 1, 64), jnp.bfloat16),) * 3
    closed = close(mod, SCORE, *[INDEX] * 4)
    run = jax.jit(lambda x: mosaic_gpu.forward(x, closed, None, scale=0.1))
    run.trace(arrays).lower(lowering_platforms=("cuda",))
