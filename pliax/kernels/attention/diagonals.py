"""Masks under which every query sees the key at its own place, as can be proved.

    sees_itself : mask  ->  whether there is a proof

Equal expressions have equal names, the key's index that of the query's: so `q >= k` and
`ids[q] == ids[k]` compare a thing with itself. What compares equals, or is made of
constants, is decided. Where all see themselves, no query sees nothing and no key is
seen by nobody.

References:
    Alpern, Wegman and Zadeck, "Detecting equality of variables in programs", 1988.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pliax.core._jax import bind_equation

from .block_mask import BlockMask
from .normalization import flatten


_OF_EQUALS = {"eq": True, "ge": True, "le": True, "ne": False, "lt": False, "gt": False}
_NEUTRAL = {"and": True, "or": False}


class _Constant(NamedTuple):
    dtype: str
    value: bool | int | float


def sees_itself(mask: BlockMask) -> bool:
    """Whether there is a proof of as many keys as queries, and `mask_mod(b, h, i, i)`.

    Args:
        mask: Any mask; there is no proof for one whose lists decide, too.
    """
    queries, keys = mask.seq_lengths
    if mask.lists_decide or not isinstance(queries, int) or not isinstance(keys, int):
        return False
    jaxpr = flatten(mask.mask_mod)
    *captured, b, h, q_idx, kv_idx = jaxpr.invars
    names: dict[Any, Hashable] = {v: ("given", n) for n, v in enumerate(captured)}
    names |= {b: "b", h: "h", q_idx: "i", kv_idx: "i"}

    def name(x: Any) -> Hashable:
        if not hasattr(x, "val"):
            return names[x]
        return _constant(x.val) if np.ndim(x.val) == 0 else ("literal", id(x))

    for eqn in jaxpr.eqns:
        found = _results(eqn, [name(x) for x in eqn.invars])
        names.update(zip(eqn.outvars, found, strict=True))
    return queries == keys and name(jaxpr.outvars[0]) == _constant(np.bool_(True))


def _constant(x: Any) -> _Constant:
    x = np.asarray(x)
    return _Constant(str(x.dtype), x.item())


def _results(eqn: Any, names: Sequence[Hashable]) -> Sequence[Hashable]:
    known = _decided(eqn, names)
    if known is not None:
        return [known]
    if names and all(isinstance(x, _Constant) for x in names) and _is_scalar(eqn):
        values = [np.asarray(x.value, x.dtype) for x in names]  # type: ignore[union-attr]
        with jax.ensure_compile_time_eval():
            return [_constant(x) for x in bind_equation(eqn, values)]
    parameters = tuple(sorted(eqn.params.items(), key=lambda x: x[0]))
    try:
        hash(parameters)
    except TypeError:
        parameters = id(eqn)
    made = eqn.primitive.name, parameters, *names
    return [(*made, n) for n in range(len(eqn.outvars))]


def _is_scalar(eqn: Any) -> bool:
    return all(v.aval.shape == () for v in eqn.outvars)


def _decided(eqn: Any, names: Sequence[Hashable]) -> Hashable | None:
    """The result's name where the operands' names say it."""
    if not names:
        return None
    primitive, aval = eqn.primitive.name, eqn.invars[0].aval
    if primitive in _NEUTRAL and aval.dtype == jnp.bool_:
        return _of_logic(_NEUTRAL[primitive], names)
    if primitive == "select_n" and isinstance(names[0], _Constant):
        return names[1 + int(names[0].value)]
    is_same = len(names) == 2 and names[0] == names[1] and _is_scalar(eqn)
    if not is_same or jnp.issubdtype(aval.dtype, jnp.inexact):  # NaN is not itself
        return None
    if primitive in _OF_EQUALS:
        return _constant(np.bool_(_OF_EQUALS[primitive]))
    return _constant(np.zeros((), aval.dtype)) if primitive == "sub" else None


def _of_logic(neutral: bool, names: Sequence[Hashable]) -> Hashable | None:
    neutral_one, other_one = (_constant(np.bool_(x)) for x in (neutral, not neutral))
    if other_one in names:
        return other_one
    rest = [x for x in names if x != neutral_one]
    return rest[0] if len(rest) == 1 else neutral_one if not rest else None
