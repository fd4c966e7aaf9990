"""Which programs give the same bits in whatever order they add.

    sums_exactly : jaxpr of arrays of small multiples of 1/8 -> bool

Such floats have few digits. A sum of them, or of products of two, is exact, and so is
whatever only moves or compares it. A root, after which nothing is
computed, rounds the same number the same way. Of everything else nothing is said: XLA
divides by a constant in another way than by a size.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


FACTORS = 2  # of how many inputs a product may be, for its sums to fit 24 bits
ROUNDED = 3  # correctly rounded: the same number, if nothing is computed with it
UNSURE = 4

_PRODUCTS = {
    "mul",
    "dot_general",
    "conv_general_dilated",
    "square",
    "ragged_dot_general",
}
_SUMS = {"add", "add_any", "sub", "reduce_sum", "cumsum", "scatter-add"}
_SUMS |= {"reduce_window_sum", "segment_sum", "select_and_scatter_add"}
_CORRECTLY_ROUNDED = {"sqrt"}
_MOVES = (
    "abs and argmax argmin bitcast_convert_type broadcast_in_dim ceil clamp complex "
    "concatenate conj convert_element_type copy copy_p cummax cummin dim_as_value "
    "dynamic_slice dynamic_update_slice eq expand_dims floor gather ge gt imag iota "
    "is_finite le lt max min ne neg not optimization_barrier or pad real reduce_and "
    "reduce_max reduce_min reduce_or reduce_precision reduce_window_max "
    "reduce_window_min rem reshape rev roll round scatter scatter_max scatter_min "
    "select_and_gather_add select_n sign slice sort split squeeze stack "
    "stop_gradient tile top_k transpose unstack xor"
)
_CALLS = {
    "jit": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
_CALLS |= {"remat": "jaxpr", "checkpoint": "jaxpr", "closed_call": "call_jaxpr"}


def sums_exactly(jaxpr: Any, consts: Sequence[Any]) -> bool:
    """Whether the results are the same bits in any order of additions."""
    known = dict.fromkeys(jaxpr.invars, 1)
    known |= dict(zip(jaxpr.constvars, map(_constant, consts), strict=True))
    return all(n <= ROUNDED for n in _factors(jaxpr, known))


def _factors(jaxpr: Any, known: dict[Any, int]) -> list[int]:
    """For each result, of how many inputs it is a product, or what else it is."""

    def of(x: Any) -> int:
        if not jnp.issubdtype(x.aval.dtype, jnp.inexact):
            return 0
        if x.aval.dtype.itemsize < 4:
            return UNSURE
        return _constant(x.val) if hasattr(x, "val") else known.get(x, UNSURE)

    for eqn in jaxpr.eqns:
        operands, name = [of(x) for x in eqn.invars], eqn.primitive.name
        if name in _CALLS:
            found = _of_call(eqn.params[_CALLS[name]], operands)
        elif name == "cond":
            every = [_of_call(b, operands[1:]) for b in eqn.params["branches"]]
            found = [max(numbers) for numbers in zip(*every, strict=True)]
        else:
            found = [_factor(name, operands)] * len(eqn.outvars)
        known.update(zip(eqn.outvars, found, strict=True))
    return [of(x) for x in jaxpr.outvars]


def _of_call(inner: Any, operands: list[int]) -> list[int]:
    inner = getattr(inner, "jaxpr", inner)
    return _factors(inner, dict(zip(inner.invars, operands, strict=True)))


def _constant(x: Any) -> int:
    """A constant of a program counts as an input if it has as few digits."""
    x = np.asarray(x)
    if not np.issubdtype(x.dtype, np.floating):
        return 0
    is_small = np.all(np.abs(x) < 64)
    return 1 if is_small and np.all(8 * x == np.round(8 * x)) else UNSURE


def _factor(name: str, operands: list[int]) -> int:
    most = max(operands, default=0)
    if name in _MOVES.split():
        return most
    if name in _SUMS and most <= FACTORS:
        return most
    if name in _PRODUCTS:
        number = 2 * most if name == "square" else sum(operands)
        return number if number <= FACTORS else UNSURE
    if name in _CORRECTLY_ROUNDED and most <= FACTORS:
        return ROUNDED
    return UNSURE
