"""A mod as a program for kernels: first-order equations that they can compute.

    flatten : mod  ->  jaxpr of (captured arrays, arguments), without calls
    compute : equation, operands  ->  its result, from what a kernel has

A kernel inlines no call and has no `floor`, `pow` or `log1p`. What is missing is
computed from what is there, by the identities below.

References:
    Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, 2002, section
    1.14.1 (expm1 and log1p, after Kahan).
    Warren, "Hacker's Delight", 2nd edition, 2012, section 5-1 (population count).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core._jax import bind_equation
from pliax.core.evaluation import evaluate
from pliax.core.jaxprs import ClosedFunction


# What Mosaic GPU computes for each element of an array.
_NATIVE = frozenset(
    (
        *("abs", "add", "and", "clamp", "convert_element_type", "cos", "div"),
        *("eq", "exp", "exp2", "ge", "gt", "integer_pow", "le", "log", "log2"),
        *("logistic", "lt", "max", "min", "mul", "ne", "neg", "or", "rem"),
        *("round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic"),
        *("shift_right_logical", "sign", "sin", "square", "sub", "tanh", "xor"),
    )
)
_KINDS = frozenset(map(jnp.dtype, ("bool", "int32", "uint32", "float32")))
_HALVES = frozenset(map(jnp.dtype, ("bfloat16", "float16")))
_IDENTITIES = frozenset(("copy", "copy_p", "optimization_barrier", "stop_gradient"))
_CALLS = frozenset(
    ("checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2")
)


def flatten(mod: ClosedFunction) -> Any:
    """The program of a mod as a jaxpr whose arguments begin with what was captured.

    Calls and functions with derivative rules of their own are inlined, and what only
    concerns differentiation is gone: a kernel computes values.
    """
    jaxpr, count = mod.program.jaxpr, len(mod.captured)
    shapes = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
        for v in (*jaxpr.constvars, *jaxpr.invars)
    ]

    def merged(*args: Any) -> Any:  # bias[b][h] reads no matrix, as bias[b, h] does not
        return evaluate(jaxpr, args[:count], args[count:])

    return jax.make_jaxpr(_inlined(jax.make_jaxpr(merged)(*shapes)))(*shapes).jaxpr


def _inlined(closed: Any) -> Callable[..., Any]:
    """A closed jaxpr as a function that calls none."""

    def run(*args: Any) -> list[Any]:
        jaxpr = getattr(closed, "jaxpr", closed)
        consts = getattr(closed, "consts", ())
        env = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
        )
        value = lambda x: x.val if hasattr(x, "val") else env[x]  # noqa: E731
        for eqn in jaxpr.eqns:
            results = _results(eqn, [value(x) for x in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [value(x) for x in jaxpr.outvars]

    return run


def _results(eqn: Any, values: list[Any]) -> Sequence[Any]:
    if eqn.primitive.name in _IDENTITIES:
        return values
    if eqn.primitive.name in _CALLS:
        params = eqn.params
        return _inlined(params.get("jaxpr", params.get("call_jaxpr")))(*values)
    return bind_equation(eqn, values)


def is_elementwise(eqn: Any) -> bool:
    """Whether a kernel computes this equation for each element of a tile."""
    name, avals = eqn.primitive.name, [v.aval for v in (*eqn.invars, *eqn.outvars)]
    kinds = _KINDS | _HALVES if name == "convert_element_type" else _KINDS
    known = name in _NATIVE or name in _EXPANSIONS
    if name == "rem":
        known = jnp.issubdtype(avals[0].dtype, jnp.integer)
    if name == "select_n":
        known = avals[0].dtype == jnp.bool_
    return known and all(a.shape == () and a.dtype in kinds for a in avals)


def compute(eqn: Any, operands: Sequence[Any]) -> Any:
    """The result of an elementwise equation for arrays of one shape."""
    if expansion := _EXPANSIONS.get(eqn.primitive.name):
        return expansion(*operands)
    (result,) = bind_equation(eqn, operands)
    return result


# --- identities -----------------------------------------------------------------------


def _nearest(x: Any) -> Any:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _floor(x: Any) -> Any:
    whole = _nearest(x)
    return jnp.where(whole > x, whole - 1, whole)


def _ceil(x: Any) -> Any:
    whole = _nearest(x)
    return jnp.where(whole < x, whole + 1, whole)


def _log1p(x: Any) -> Any:
    """log(u) x / (u - 1) for u = 1 + x: what rounds u wrong cancels."""
    u = 1 + x
    exact = (u == 1) | (u == np.inf)
    slope = x / jnp.where(exact, 1.0, u - 1)
    return jnp.where(u == 1, x, jnp.where(u == np.inf, u, lax.log(u) * slope))


def _expm1(x: Any) -> Any:
    """(u - 1) x / log(u) for u = exp(x), likewise."""
    u = lax.exp(x)
    less = u - 1
    extreme = (u == 1) | (less == -1) | (u == np.inf)
    found = less * x / lax.log(jnp.where(extreme, 2.0, u))
    return jnp.where(u == 1, x, jnp.where(extreme, less, found))


def _not(x: Any) -> Any:
    return x ^ True if x.dtype == jnp.bool_ else ~x


def _pow(x: Any, y: Any) -> Any:
    """2^(y log2 |x|), with the sign of an odd power and NaN of a broken one."""
    y = y.astype(x.dtype)
    size = lax.exp2(y * lax.log2(abs(x)))
    is_odd = _nearest(y / 2) != y / 2
    broken = jnp.where(x == -np.inf, size, np.nan)
    signed = jnp.where(_nearest(y) == y, jnp.where(is_odd, -size, size), broken)
    return jnp.where((y == 0) | (x == 1), 1.0, jnp.where(x < 0, signed, size))


def _sqrt(x: Any) -> Any:
    """X / sqrt(x), where that is not 0 / 0 or inf / inf."""
    plain = (x == 0) | (x == np.inf)
    return jnp.where(plain, x, x * lax.rsqrt(jnp.where(plain, 1.0, x)))


def _population_count(x: Any) -> Any:
    """Sums of neighbouring bits, pairs, nibbles; the product adds the bytes."""
    word = lambda n: jnp.asarray(n, x.dtype)  # noqa: E731
    right = lambda x, n: lax.shift_right_logical(x, word(n))  # noqa: E731
    x = x - (right(x, 1) & word(0x55555555))
    x = (x & word(0x33333333)) + (right(x, 2) & word(0x33333333))
    x = (x + right(x, 4)) & word(0x0F0F0F0F)
    return right(x * word(0x01010101), 24)


_EXPANSIONS: dict[str, Callable[..., Any]] = {
    "add_any": lambda x, y: x + y,
    "ceil": _ceil,
    "cosh": lambda x: (lax.exp(x) + lax.exp(-x)) / 2,
    "expm1": _expm1,
    "floor": _floor,
    "is_finite": lambda x: abs(x) < np.inf,
    "log1p": _log1p,
    "not": _not,
    "one_minus_square": lambda x: (1 - x) * (1 + x),
    "population_count": _population_count,
    "pow": _pow,
    "sinh": lambda x: (_expm1(x) - _expm1(-x)) / 2,
    "sqrt": _sqrt,
    "tan": lambda x: lax.sin(x) / lax.cos(x),
}
