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
from pliax.core.dataflow import is_literal

from .block_mask import BlockMask
from .normalization import flatten, is_elementwise


_OF_EQUALS = {"eq": True, "ge": True, "le": True, "ne": False, "lt": False, "gt": False}
_NEUTRAL = {"and": True, "or": False}


class _Constant(NamedTuple):
    dtype: str
    value: bytes


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
    numbers = dict[Hashable, int]()

    def name(x: Any) -> Hashable:
        if not is_literal(x):
            return names[x]
        return _constant(x.val) if np.ndim(x.val) == 0 else ("literal", id(x))

    for eqn in jaxpr.eqns:
        found = _results(eqn, [name(x) for x in eqn.invars], numbers)
        names.update(zip(eqn.outvars, found, strict=True))
    return queries == keys and name(jaxpr.outvars[0]) == _TRUE


def _constant(x: Any) -> _Constant:
    x = np.asarray(x)
    return _Constant(str(x.dtype), x.tobytes())  # 0.0 is not -0.0


_FALSE, _TRUE = _constant(np.bool_(False)), _constant(np.bool_(True))


def _results(
    eqn: Any, names: Sequence[Hashable], numbers: dict[Hashable, int]
) -> Sequence[Hashable]:
    """The names of an equation's results: equal results have one number."""
    known = _decided(eqn, names)
    if known is not None:
        return [known]
    constants = [x for x in names if isinstance(x, _Constant)]
    if names and len(constants) == len(names) and _is_foldable(eqn):
        values = [np.frombuffer(x.value, x.dtype)[0] for x in constants]
        with jax.ensure_compile_time_eval():
            return [_constant(x) for x in bind_equation(eqn, values)]
    parameters = tuple(sorted(eqn.params.items(), key=lambda x: x[0]))
    try:
        hash(parameters)
    except TypeError:
        parameters = id(eqn)
    made = eqn.primitive.name, parameters, str(parameters), *names
    each = ((*made, n) for n in range(len(eqn.outvars)))
    return [numbers.setdefault(x, len(numbers)) for x in each]


def _is_scalar(eqn: Any) -> bool:
    return all(v.aval.shape == () for v in eqn.outvars)


def _is_foldable(eqn: Any) -> bool:
    """Scalars that a kernel computes to the bit."""
    dtypes = [v.aval.dtype for v in (*eqn.invars, *eqn.outvars)]
    are_exact = all(x == jnp.bool_ or jnp.issubdtype(x, jnp.integer) for x in dtypes)
    return _is_scalar(eqn) and is_elementwise(eqn) and are_exact


def _decided(eqn: Any, names: Sequence[Hashable]) -> Hashable | None:
    """The result's name where the operands' names say it."""
    if not names:
        return None
    primitive, aval = eqn.primitive.name, eqn.invars[0].aval
    if primitive in _NEUTRAL and aval.dtype == jnp.bool_:
        return _of_logic(_NEUTRAL[primitive], names)
    if primitive == "select_n" and names[0] in (_FALSE, _TRUE):
        return names[1 + (names[0] == _TRUE)]
    is_same = len(names) == 2 and names[0] == names[1] and _is_scalar(eqn)
    if not is_same or jnp.issubdtype(aval.dtype, jnp.inexact):  # NaN is not itself
        return None
    if primitive in _OF_EQUALS:
        return _TRUE if _OF_EQUALS[primitive] else _FALSE
    return _constant(np.zeros((), aval.dtype)) if primitive == "sub" else None


def _of_logic(neutral: bool, names: Sequence[Hashable]) -> Hashable | None:
    same, decisive = (_TRUE, _FALSE) if neutral else (_FALSE, _TRUE)
    if decisive in names:
        return decisive
    rest = [x for x in names if x != same]
    return rest[0] if len(rest) == 1 else same if not rest else None
