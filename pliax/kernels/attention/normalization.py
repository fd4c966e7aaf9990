"""A mod as a program for kernels: first-order equations that they can compute.

    flatten    : mod  ->  jaxpr of (captured arrays, arguments), without calls
    conditions : that of a mask_mod  ->  what must all be true where it shows a score
    compute    : equation, operands  ->  its result, from what a kernel has

A kernel inlines no call and has no `floor`, `pow` or `log1p`. What is missing is
computed from what is there, by the identities below.

References:
    Abramowitz and Stegun, "Handbook of Mathematical Functions", 1964, 4.1.27 and 4.2.1.
    Warren, "Hacker's Delight", 2nd edition, 2012, section 5-1 (population count).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core._jax import bind_equation
from pliax.core.dataflow import is_literal
from pliax.core.evaluation import evaluate
from pliax.core.jaxprs import ClosedFunction, Program


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
# Of these, what is an instruction or two and no special function.
PLAIN = frozenset(
    (
        *("abs", "add", "and", "clamp", "convert_element_type", "eq", "ge", "gt", "le"),
        *("integer_pow", "lt", "max", "min", "mul", "ne", "neg", "or", "select_n"),
        *("sign", "square", "sub", "xor"),
    )
)
_KINDS = frozenset(map(jnp.dtype, ("bool", "int32", "uint32", "float32")))
_HALVES = frozenset(map(jnp.dtype, ("bfloat16", "float16")))
_IDENTITIES = frozenset(
    ("copy", "copy_p", "optimization_barrier", "pvary", "stop_gradient")
)
_SMALL = 0.25  # below it the series are exact to a rounding
_CALLS = frozenset(
    ("checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2")
)


def flatten(mod: ClosedFunction) -> Any:
    """The program of a mod as a jaxpr whose arguments begin with what was captured.

    Calls and functions with derivative rules of their own are inlined, and what only
    concerns differentiation is gone: a kernel computes values.
    """
    jaxpr, count = mod.program.jaxpr, len(mod.captured)
    given = (*map(jax.typeof, mod.captured), *(v.aval for v in jaxpr.invars))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]

    def merged(*args: Any) -> Any:  # bias[b][h] reads no matrix, as bias[b, h] does not
        return evaluate(jaxpr, args[:count], args[count:])

    return first_order(merged, shapes).jaxpr


def first_order(function: Callable[..., Any], shapes: Sequence[Any]) -> Any:
    """The closed jaxpr of a function of arrays of these shapes, without calls."""
    return jax.make_jaxpr(_inlined(jax.make_jaxpr(function)(*shapes)))(*shapes)


def conditions(jaxpr: Any) -> list[Any]:
    """What must all be true where a mask shows a score: variables of its program.

    They are the operands of its last `and`, and of those that are one.
    """
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    found: list[Any] = []
    seen: set[int] = set()
    todo = list(jaxpr.outvars)
    while todo:
        v = todo.pop(0)
        if id(v) in seen:
            continue
        seen.add(id(v))
        eqn = None if is_literal(v) else makers.get(v)
        if eqn is not None and eqn.primitive.name == "and":
            todo = [*eqn.invars, *todo]
        else:
            found.append(v)
    return found


def each_condition(jaxpr: Any, captured: Sequence[Any]) -> list[Callable[..., Any]]:
    """The conditions of a mask that was flattened as functions of the indices.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pliax.core.jaxprs import close
        >>> index = jax.ShapeDtypeStruct((), jnp.int32)
        >>> mask = close(lambda b, h, q, k: (q >= k) & (q // 4 == k // 4), *[index] * 4)
        >>> each = each_condition(flatten(mask), mask.captured)
        >>> [bool(x(*map(jnp.int32, (0, 0, 5, 3)))) for x in each]
        [True, False]
    """

    def value(v: Any, *indices: Any) -> Any:
        given = *captured, *indices
        return jnp.asarray(evaluate(jaxpr.replace(outvars=[v]), (), given)[0])

    return [partial(value, v) for v in conditions(jaxpr)]


def _inlined(closed: Any) -> Callable[..., Any]:
    """A closed jaxpr as a function that calls none."""

    def run(*args: Any) -> list[Any]:
        jaxpr = getattr(closed, "jaxpr", closed)
        consts = getattr(closed, "consts", ())
        env = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
        )
        value = lambda x: x.val if is_literal(x) else env[x]  # noqa: E731
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


def with_slope(score_mod: ClosedFunction) -> ClosedFunction:
    """The modified score, and how much it changes with the score: two results."""
    score, index = (jax.ShapeDtypeStruct((), x) for x in (jnp.float32, jnp.int32))

    def both(s: Any, *indices: Any) -> Any:
        return jax.jvp(lambda s: score_mod(s, *indices), (s,), (jnp.ones_like(s),))

    closed = jax.make_jaxpr(both)(score, *[index] * 4)
    return ClosedFunction(Program(closed.jaxpr), tuple(closed.consts))


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
    name, is_bool = eqn.primitive.name, operands[0].dtype == jnp.bool_
    if expansion := _EXPANSIONS.get(name):
        return expansion(*operands)
    if name in ("max", "min") and is_bool:
        return operands[0] | operands[1] if name == "max" else operands[0] & operands[1]
    if name == "convert_element_type" and eqn.params["new_dtype"] == jnp.bool_:
        return operands[0] if is_bool else operands[0] != 0
    if name == "integer_pow":
        return _integer_pow(operands[0], eqn.params["y"])
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


def _series(x: Any, *coefficients: float) -> Any:
    """1 + c x (1 + c' x (1 + ...))."""
    total = 1.0
    for c in coefficients[::-1]:
        total = 1 + c * x * total
    return total


def _log1p(x: Any) -> Any:
    """2 artanh(x / (2 + x)) by its series where log(1 + x) would cancel."""
    t = x / (2 + x)
    small = 2 * t * _series(t * t, 1 / 3, 3 / 5, 5 / 7, 7 / 9)
    return jnp.where(abs(x) < _SMALL, small, lax.log(1 + x))


def _expm1(x: Any) -> Any:
    """X + x^2 / 2 + ... where exp(x) - 1 would cancel."""
    small = x * _series(x, *(1 / n for n in range(2, 9)))
    return jnp.where(abs(x) < _SMALL, small, lax.exp(x) - 1)


def _integer_pow(x: Any, y: int) -> Any:
    """Mosaic has those from x^2 on."""
    if y < 0:
        return 1 / _integer_pow(x, -y)
    return lax.integer_pow(x, y) if y > 1 else (x if y else jnp.ones_like(x))


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
    """X / sqrt(x), where that is neither 0 / 0 nor inf / inf."""
    root = x * lax.rsqrt(jnp.maximum(x, np.finfo(np.float32).tiny))
    return jnp.where(x < 0, np.nan, jnp.where(x == np.inf, x, root))


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
