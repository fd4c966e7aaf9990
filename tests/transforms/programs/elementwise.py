"""Functions that work on each element: nothing moves, only the shape grows."""

from types import ModuleType

import jax
import jax.numpy as jnp
from jax import lax

from ._program import Program, named, program, table


_UNARY = {
    "b, t": "abs absolute fabs negative positive sign signbit square ceil floor rint "
    "round around trunc isfinite isinf isnan isneginf isposinf sin cos tan arctan atan "
    "arcsinh asinh sinh cosh tanh exp exp2 expm1 cbrt deg2rad degrees rad2deg radians "
    "conj conjugate real imag angle isreal iscomplex nan_to_num sinc i0 spacing modf "
    "frexp copy array asarray",
    "t; positive": "log log10 log1p log2 sqrt reciprocal",
    "2*b; unit": "arcsin asin arccos acos arctanh atanh",
    "b, t; boolean": "logical_not",
    "b, t; integer": "bitwise_not bitwise_invert invert bitwise_count",
}
_BINARY = {
    ("b, t", "b, t"): "add subtract multiply maximum minimum fmax fmin hypot logaddexp "
    "logaddexp2 copysign nextafter arctan2 atan2 heaviside equal not_equal greater "
    "greater_equal less less_equal isclose",
    ("t", "t; positive"): "divide true_divide floor_divide mod remainder fmod divmod",
    ("b, t; positive", "b, t"): "power pow float_power",
    ("t; integer", "t; integer"): "bitwise_and bitwise_or bitwise_xor gcd lcm",
    ("b, t; integer", "b, t; index:8"): "left_shift right_shift bitwise_left_shift "
    "bitwise_right_shift",
    ("t; boolean", "t; boolean"): "logical_and logical_or logical_xor",
}
_LAX_UNARY = {
    "t": "abs neg sign floor ceil round is_finite exp exp2 expm1 sin cos tan sinh cosh "
    "tanh asinh atan cbrt logistic square erf erfc lgamma digamma bessel_i0e bessel_i1e "
    "one_minus_square stop_gradient optimization_barrier stage",
    "b, t; positive": "log log1p log2 sqrt rsqrt reciprocal",
    "a; unit": "acos asin atanh erf_inv",
    "b, t; integer": "bitwise_not clz population_count",
    "t; complex64": "real imag conj",
}
_LAX_BINARY = {
    ("t", "t"): "add sub mul max min atan2 nextafter eq ne lt le gt ge complex",
    ("b, t", "b, t; positive"): "div rem",
    ("t; positive", "t"): "pow",
    ("t; integer", "t; integer"): "bitwise_and bitwise_or bitwise_xor mulhi",
    ("t; integer", "t; index:8"): "shift_left shift_right_arithmetic "
    "shift_right_logical",
    ("b, t; positive", "b, t; positive"): "igamma igammac igamma_grad_a "
    "random_gamma_grad",
}
# fmt: off
_OTHERS = [
    ("jnp.acosh[t]", lambda x: jnp.acosh(1.0 + x), "t; positive"),
    ("jnp.arccosh[t]", lambda x: jnp.arccosh(1.0 + x), "t; positive"),
    ("lax.acosh[t]", lambda x: lax.acosh(1.0 + x), "t; positive"),
    ("jnp.ldexp[t]", jnp.ldexp, "t", "t; integer"),
    ("jnp.isclose[equal_nan]", lambda x: jnp.isclose(x, x, equal_nan=True), "b, t"),
    ("jnp.astype[int]", lambda x: jnp.astype(x, jnp.int32), "b, t"),
    ("jnp.round[decimals=2]", lambda x: jnp.round(x, 2), "b, t"),
    ("jnp.clip[scalars]", lambda x: jnp.clip(x, -1.0, 1.0), "b, t"),
    ("jnp.clip[arrays]", jnp.clip, "t", "t; unit", "t; positive"),
    ("jnp.where[arrays]", jnp.where, "b, t; boolean", "b, t", "b, t"),
    ("jnp.where[scalar]", lambda x: jnp.where(x > 0, x, 0.0), "b, t"),
    ("jnp.where[broadcast]", jnp.where, "b, 1; boolean", "b, t", "1, t"),
    ("jnp.add[row+column]", jnp.add, "b, 1", "1, t"),
    ("jnp.multiply[scalar]", lambda x, y: x * y, "b, t", ""),
    ("jnp.add[complex]", jnp.add, "b, t; complex64", "b, t; complex64"),
    ("jnp.abs[complex]", jnp.abs, "t; complex64"),
    ("jnp.exp[bfloat16]", jnp.exp, "b, t; bfloat16"),
    ("jnp.add[uint8 overflow]", lambda x: x + x, "t; uint8; index:200"),
    ("jnp.power[t, 3]", lambda x: x**3, "b, t"),
    ("jnp.iscomplexobj & where", lambda x: x + float(jnp.iscomplexobj(x)), "t"),
    ("jnp.select[3 cases]", lambda x: _select(x), "b, t"),
    ("jnp.piecewise[t]", lambda x: _piecewise(x), "t"),
    (
        "jnp.choose[t]",
        lambda i, x, y: jnp.choose(i, [x, y], mode="clip"),
        "t; index:2",
        "t",
        "t",
    ),
    ("lax.clamp[scalars]", lambda x: lax.clamp(-1.0, x, 1.0), "b, t"),
    ("lax.clamp[arrays]", lax.clamp, "t; unit", "t", "t; positive"),
    ("lax.select[b, t]", lax.select, "b, t; boolean", "b, t", "b, t"),
    (
        "lax.select_n[3 cases]",
        lax.select_n,
        "t; index:3",
        "t",
        "t",
        "t",
    ),
    ("lax.integer_pow[-2]", lambda x: lax.integer_pow(x, -2), "t; positive"),
    ("lax.reduce_precision[bf16]", lambda x: lax.reduce_precision(x, 8, 7), "b, t"),
    (
        "lax.convert_element_type[int8]",
        lambda x: lax.convert_element_type(x, jnp.int8),
        "t",
    ),
    (
        "lax.bitcast_convert_type[f32->i32]",
        lambda x: lax.bitcast_convert_type(x, jnp.int32),
        "b, t",
    ),
    (
        "lax.bitcast_convert_type[f32->u8, new axis]",
        lambda x: lax.bitcast_convert_type(x, jnp.uint8),
        "t",
    ),
    ("mask arithmetic", lambda m: (m & ~m) | (m ^ True), "b, t; boolean"),
    ("jnp.nan_to_num[inf]", lambda x: jnp.nan_to_num(jnp.where(x > 1, jnp.inf, x)), "b, t"),
    ("jnp.frompyfunc[t]", lambda x, y: _ufunc(x, y), "t", "t"),
    ("jnp.vectorize[elementwise]", jnp.vectorize(lambda x, y: x * y), "b, t", "b, t"),
]
_ROUNDED = [
    ("lax.betainc[t]", lax.betainc, "t; positive", "t; positive", "t; probability"),
    ("lax.zeta[t]", lambda x: lax.zeta(1.5 + x, x), "t; positive"),
    ("lax.polygamma[t]", lambda x: lax.polygamma(jnp.ones_like(x), x), "t; positive"),
    ("jnp.tanh & jnp.exp[chain]", lambda x: jnp.tanh(jnp.exp(-x * x) + 0.5 * x), "t"),
    ("jnp.polyval[elements]", lambda x: jnp.polyval(jnp.array([1.0, -2, 3]), x), "t"),
    ("lax.polynomial[elements]", lambda x: lax.polynomial(x, [1.0, -2.0, 3.0]), "t"),
    ("jnp.multiply[number of elements]", lambda x: x / x.shape[0], "t"),
    ("jnp.multiply[jnp.size]", lambda x: x * jnp.size(x), "b, t"),
    ("jnp.add[jnp.shape]", lambda x: x + jnp.shape(x)[1], "b, t"),
    (
        "jnp.add[1/sqrt(size)]",
        lambda x: x / jnp.sqrt(jnp.float32(x.shape[-1])),
        "b, t",
    ),
    ("jnp.isrealobj & jnp.ndim", lambda x: x * float(jnp.ndim(x) + jnp.isrealobj(x)), "t"),
]
# fmt: on


def _select(x: jax.Array) -> jax.Array:
    return jnp.select([x < -1.0, x > 1.0], [-x, x * 2.0], 0.0)


def _piecewise(x: jax.Array) -> jax.Array:
    return jnp.piecewise(x, [x < 0, x > 1], [jnp.negative, jnp.square, 0.5])


def _ufunc(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.frompyfunc(lambda u, v: u * v, nin=2, nout=1)(x, y)


# Chains of float operations: XLA may fuse them differently for another shape.
_CHAINS = (
    "sinc i0 logaddexp logaddexp2 hypot power pow float_power digamma lgamma igamma "
    "igammac igamma_grad_a random_gamma_grad bessel_i0e bessel_i1e logistic erf_inv"
)
# XLA may compute them by other instructions, one element at a time or several.
_FUNCTIONS = (
    "exp exp2 expm1 log log10 log1p log2 sin cos tan asin acos atan arcsin arccos arctan "
    "atan2 arctan2 sinh cosh tanh asinh acosh atanh arcsinh arccosh arctanh erf erfc cbrt"
)
_LAST_BITS = 1e-6


def _each(prefix: str, module: ModuleType, names: dict) -> list[Program]:
    """The programs of a table: exact where one float operation is all there is."""
    chains, functions = _CHAINS.split(), _FUNCTIONS.split()
    return [
        p
        for key, text in names.items()
        for name in text.split()
        for p in named(
            prefix,
            module,
            name,
            *([key] if isinstance(key, str) else key),
            exact=name not in (*chains, *functions),
            **({"tolerance": _LAST_BITS} if name in functions else {}),
        )
    ]


PROGRAMS = (
    *_each("jnp", jnp, _UNARY),
    *_each("jnp", jnp, _BINARY),
    *_each("lax", lax, _LAX_UNARY),
    *_each("lax", lax, _LAX_BINARY),
    *table("", _OTHERS, exact=True),
    *table("", _ROUNDED),
    program(
        "lax.expand_dims & lax.mul[outer]",
        lambda x, y: x[:, None] * y[None, :],
        "b",
        "t",
        exact=True,
    ),
)
