"""What a mask can be on a whole block, from bounds on its indices.

    mask_mod on (b, h, q_idx, kv_idx)    becomes    bounds on (b, h, [q_idx], [kv_idx])

Interval analysis: the mask's jaxpr is evaluated once with pairs (low, high) in place of
numbers. Every value the mask can take for indices inside the block lies between the
two. A bool from True to True is proven True for the whole block, one from False to True
is unknown. The mask is never evaluated at single scores, so that causal masks, windows
and packed documents cost as much as they have blocks.

The law: what the bounds prove holds for every score. A primitive without a rule, an
integer that might wrap around, an index that might be out of bounds and a float that
might be NaN are unknown, never an error. Floating arithmetic is widened by a few
roundings, since a compiler may fuse multiplications and additions.

References:
    Moore, "Interval Analysis", 1966, chapters 2 and 4.
    Cousot and Cousot, "Abstract interpretation", 1977, section 5.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from pliax.core._jax import bind_equation, is_pvary
from pliax.core.dataflow import is_literal
from pliax.core.jaxprs import ClosedFunction, close
from pliax.core.manual_axes import vary, varying_axes

from .interval_lookups import LOOKUPS
from .interval_rules import (
    RULES,
    Interval,
    divide,
    elementwise,
    interval,
    is_signed,
    known,
    literal,
    ordered,
    remainder,
    select,
    spread,
    unknown,
)


type Range = tuple[Int[Array, ""], Int[Array, ""]]

_BLOCKED = ("q", "k")
# Largest value by the number of blocked indices it varies with: what does not vary with
# them exists once a sequence and head, the others once a row, and once a block.
_AFFORDABLE = (None, 256, 8)
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
# Never decreasing in any operand, and exact: bounds go to bounds.
_MONOTONE = {
    *("min", "max", "clamp", "sign", "floor", "ceil", "round"),
    *("copy", "copy_p", "name", "optimization_barrier", "broadcast_in_dim", "reshape"),
    *("squeeze", "expand_dims", "transpose", "rev", "slice", "concatenate", "pad"),
    *("split", "reduce_min", "reduce_max", "cummin", "cummax"),
}
_MONOTONE_ON_BOOLS = {"and", "or", "reduce_and", "reduce_or"}
_EXACT = _MONOTONE | {"select_n", "neg", "abs", "dynamic_slice", "gather"}


def bounds(
    mask_mod: ClosedFunction,
    b: Int[Array, ""],
    h: Int[Array, ""],
    q_range: Range,
    kv_range: Range,
) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
    """Whether a mask shows all scores of a block, and whether it may show any.

    Args:
        mask_mod: The mask as data. Captured arrays may be tracers.
        b: Sequence of the batch.
        h: Query head.
        q_range: First and last query of the block.
        kv_range: First and last key of the block.

    Returns:
        (certain, possible): True where all scores are proven visible; False where all
        are proven masked.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pliax.core.jaxprs import close
        >>> index = jax.ShapeDtypeStruct((), jnp.int32)
        >>> causal = close(lambda b, h, q, k: q >= k, *(index,) * 4)
        >>> zero, last = jnp.int32(0), jnp.int32(15)
        >>> below = bounds(causal, zero, zero, (last, last), (zero, last))
        >>> diagonal = bounds(causal, zero, zero, (zero, last), (zero, last))
        >>> [bool(x) for x in (*below, *diagonal)]
        [True, True, False, True]

    References:
        Moore, "Interval Analysis", 1966, chapter 4.
    """
    jaxpr = mask_mod.program.jaxpr
    indices = (
        Interval(b, b, frozenset("b")),
        Interval(h, h, frozenset("h")),
        Interval(q_range[0], q_range[1], frozenset("q")),
        Interval(*kv_range, frozenset("k")),
    )
    (result,) = _interpret(jaxpr, (known(x) for x in mask_mod.captured), indices)
    # An unknown bool has bounds, never None: its dtype is ordered.
    return jnp.asarray(result.low), jnp.asarray(result.high)


# --- the loop over equations ----------------------------------------------------------


def _interpret(jaxpr: Any, consts: Iterable[Any], args: Iterable[Any]) -> list[Any]:
    """The results' intervals; None for what has no order, such as a random key."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def read(x: Any) -> Any:
        return literal(x) if is_literal(x) else env[x]

    for eqn in jaxpr.eqns:
        found = _idiom(eqn, made_by, read)
        results = _step(eqn, [read(x) for x in eqn.invars]) if found is None else found
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _step(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    """Intervals of one equation's results."""
    nothing = [unknown(v.aval) for v in eqn.outvars]
    if eqn.effects or any(x is None for x in operands):
        return nothing
    if is_pvary(eqn):
        return operands
    if all(x.known for x in operands) and _repeats(eqn, operands):
        return _evaluate(eqn, operands)
    name = eqn.primitive.name
    if name in _CALLS:
        inner = eqn.params[_CALLS[name]]
        consts = (known(x) for x in getattr(inner, "consts", ()))
        return _interpret(getattr(inner, "jaxpr", inner), consts, operands)
    if name == "cond":
        return _cond(eqn, *operands)
    varies = _together(operands)
    if not _has_order(eqn) or not _affordable(eqn, varies):
        return nothing
    if _monotone(eqn):
        return _move_bounds(eqn, operands, varies)
    rule = LOOKUPS.get(name) or partial(elementwise, RULES.get(name))
    pair = rule(eqn, *operands)
    return nothing if pair is None else [interval(pair[0], pair[1], varies)]


def _repeats(eqn: Any, operands: list[Any]) -> bool:
    """Whether evaluating known operands now gives what evaluating a tile will give.

    Floating arithmetic on what depends on b and h may be rounded differently there.
    """
    if not any(x.varies for x in operands) or eqn.primitive.name in _EXACT:
        return True
    floats = any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
    return eqn.primitive.name not in _CALLS and not floats


def _evaluate(eqn: Any, operands: list[Any]) -> list[Interval]:
    varies = _together(operands)
    results = [Interval(x, x, varies) for x in _bind(eqn, [x.low for x in operands])]
    return _with_parts(eqn, operands, results)


def _move_bounds(eqn: Any, operands: list[Any], varies: frozenset[str]) -> list[Any]:
    lows = _bind(eqn, [x.low for x in operands])
    highs = _bind(eqn, [x.high for x in operands])
    pairs = zip(lows, highs, strict=True)
    return _with_parts(
        eqn, operands, [interval(pair[0], pair[1], varies) for pair in pairs]
    )


def _with_parts(eqn: Any, operands: list[Any], results: list[Any]) -> list[Any]:
    """Remember what a vector of indices consists of."""
    if eqn.primitive.name != "concatenate" or len(eqn.outvars[0].aval.shape) != 1:
        return results
    if any(x.low.shape != (1,) for x in operands):
        return results
    return [replace(results[0], parts=tuple(operands))]


def _bind(eqn: Any, values: list[Any]) -> Sequence[Any]:
    return bind_equation(eqn, vary(values, varying_axes(values)))


def _cond(eqn: Any, which: Interval, *operands: Any) -> list[Any]:
    """The hull of the branches that may be taken."""
    branches = eqn.params["branches"]
    results = []
    for branch in branches:
        consts = (known(x) for x in getattr(branch, "consts", ()))
        jaxpr = getattr(branch, "jaxpr", branch)
        results.append(_interpret(jaxpr, consts, operands))
    joined = []
    for cases in zip(*results, strict=True):
        if any(x is None for x in cases):
            joined.append(None)
            continue
        varies = _together((which, *cases))
        joined.append(interval(*select(which, *cases), varies))
    return joined


def _together(operands: Iterable[Any]) -> frozenset[str]:
    """With which indices any of the operands varies."""
    return frozenset(index for x in operands for index in x.varies)


def _monotone(eqn: Any) -> bool:
    on_bools = all(v.aval.dtype == jnp.bool_ for v in eqn.invars)
    name = eqn.primitive.name
    return name in _MONOTONE or (on_bools and name in _MONOTONE_ON_BOOLS)


def _affordable(eqn: Any, varies: frozenset[str]) -> bool:
    most = _AFFORDABLE[sum(index in varies for index in _BLOCKED)]
    if most is None:
        return True
    shapes = [v.aval.shape for v in eqn.outvars]
    static = all(isinstance(n, int) for shape in shapes for n in shape)
    return static and all(prod(shape) <= most for shape in shapes)


def _has_order(eqn: Any) -> bool:
    return all(ordered(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars))


# --- floor division, which jnp writes as several equations ----------------------------


_IDIOMS: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
    (jnp.floor_divide, partial(divide, floor=True)),
    (jnp.remainder, partial(remainder, floor=True)),
)


def _idiom(eqn: Any, made_by: dict[Any, Any], read: Any) -> list[Any] | None:
    """The result of `x // y` or `x % y`, if this equation ends one.

    Rule by rule their bounds are loose: jnp corrects a truncated quotient where the
    signs differ, and intervals do not see that a sign belongs to the same number.
    """
    if eqn.primitive.name != "select_n" or not is_signed(eqn.outvars[0].aval.dtype):
        return None
    aval = eqn.outvars[0].aval
    for function, rule in _IDIOMS:
        atoms = _match(_pattern(function, aval.dtype), eqn, made_by)
        operands = [] if atoms is None else [read(x) for x in atoms]
        if operands and None not in operands:
            varies = _together(operands)
            if all(x.known for x in operands) or not _affordable(eqn, varies):
                return None
            x, y = (spread(x, aval.shape) for x in operands)
            low, high = rule(x, y)
            return [interval(low, high, varies)]
    return None


@cache
def _pattern(function: Callable[..., Any], dtype: Any) -> Any:
    """The equations JAX makes of a function of two integers."""
    scalar = jax.ShapeDtypeStruct((), dtype)
    return close(function, scalar, scalar).program.jaxpr


def _match(pattern: Any, eqn: Any, made_by: dict[Any, Any]) -> list[Any] | None:
    """The operands with which `eqn` is the last equation of the pattern, or None."""
    pattern_by = {v: e for e in pattern.eqns for v in e.outvars}
    found: dict[Any, Any] = {}

    def same_atom(p: Any, x: Any) -> bool:
        if is_literal(p):
            return _equal(p, x)
        if p not in pattern_by:
            return _equal(found.setdefault(p, x), x)
        maker = None if is_literal(x) else made_by.get(x)
        return maker is not None and same_equation(pattern_by[p], maker)

    def same_equation(p: Any, e: Any) -> bool:
        if p.primitive is not e.primitive or p.params != e.params:
            return False
        return all(same_atom(a, b) for a, b in zip(p.invars, e.invars, strict=True))

    matches = same_equation(pattern_by[pattern.outvars[0]], eqn)
    return [found[v] for v in pattern.invars] if matches else None


def _equal(x: Any, y: Any) -> bool:
    """The same variable, or literals of one value."""
    if not (is_literal(x) and is_literal(y)):
        return x is y
    return x.aval.dtype == y.aval.dtype and bool(np.array_equal(x.val, y.val))
