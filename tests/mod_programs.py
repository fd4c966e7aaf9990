"""Mods of every primitive that kernels compute, and of some that none does."""

import jax
import jax.numpy as jnp
from jax import lax


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
    "zeros of two signs": lambda s: 1 / jnp.where(s > 0, -0.0, 0 * s),
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
    "uint sign": lambda q, k: as_int(lax.sign((q * k).astype(jnp.uint32))),
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
