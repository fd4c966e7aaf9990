"""Native primitives in Triton's language, with what JAX says of their corners.

A shift by more than a word's bits, a quotient by 0, the larger of NaN and a number, the
opposite of 0: the hardware has its own answers, which programs must not see.

References:
    NVIDIA, "Parallel Thread Execution ISA", 9.7.3: tanh.approx.f32 is off by at most
    2^-11 of its result.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core.dataflow import is_literal


TYPES = {
    "bool": "tl.int1",
    "int32": "tl.int32",
    "uint32": "tl.uint32",
    "float32": "tl.float32",
    "float16": "tl.float16",
    "bfloat16": "tl.bfloat16",
}
_BITS = 32


def expression(eqn: Any, operands: Sequence[str], *, hardware_tanh: bool) -> str:
    """The result of an equation on tiles.

    Args:
        eqn: Of scalars.
        operands: Names or calls.
        hardware_tanh: Whether the instruction for tanh is exact enough.
    """
    name, dtype = eqn.primitive.name, eqn.invars[0].aval.dtype
    if name == "tanh" and hardware_tanh:
        return f"fast_tanh({operands[0]})"
    if name in _BY_KIND:
        return _BY_KIND[name](eqn, *operands)
    if jnp.issubdtype(dtype, jnp.floating) and name in _OF_FLOATS:
        return _OF_FLOATS[name].format(*operands)
    if _is_unsigned(eqn) and name in _OF_UNSIGNED:
        return _OF_UNSIGNED[name].format(*operands)
    return _TEXTS[name].format(*operands)


def constant(value: Any, dtype: Any) -> str:
    """A number with its type, or Triton would give it another."""
    x = np.asarray(value).astype(dtype).item()
    text, kind = repr(x), TYPES[str(jnp.dtype(dtype))]
    if isinstance(x, float) and not math.isfinite(x):
        text = f'float("{x}")'
    if text == "-0.0":  # which Triton takes for 0
        return f"(tl.full((), 0.0, {kind}) * -1.0)"
    return f"tl.full((), {text}, {kind})"


_ORDER = "propagate_nan=tl.PropagateNan.ALL"
_SAME = "{0}"
_TEXTS = {
    "abs": "tl.abs({0})",
    "add": "{0} + {1}",
    "and": "{0} & {1}",
    "clamp": "tl.minimum(tl.maximum({1}, {0}), {2})",
    "copy": _SAME,
    "cos": "libdevice.cos({0})",
    "device_put": _SAME,
    "eq": "{0} == {1}",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "ge": "{0} >= {1}",
    "gt": "{0} > {1}",
    "le": "{0} <= {1}",
    "log": "libdevice.log({0})",
    "log2": "libdevice.log2({0})",
    "logistic": "1.0 / (1.0 + tl.exp({0} * -1.0))",
    "lt": "{0} < {1}",
    "max": "tl.maximum({0}, {1})",
    "min": "tl.minimum({0}, {1})",
    "mul": "{0} * {1}",
    "ne": "{0} != {1}",
    "neg": "0 - {0}",
    "not": "~{0}",
    "or": "{0} | {1}",
    "rsqrt": "tl.rsqrt({0})",
    "select_n": "tl.where({0}, {2}, {1})",
    "sign": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, {0}))",
    "sin": "libdevice.sin({0})",
    "square": "{0} * {0}",
    "sub": "{0} - {1}",
    "tanh": "libdevice.tanh({0})",
    "xor": "{0} ^ {1}",
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze"), _SAME),
}
_OF_FLOATS = {
    "clamp": f"tl.minimum(tl.maximum({{1}}, {{0}}, {_ORDER}), {{2}}, {_ORDER})",
    "div": "{0} / {1}",
    "max": f"tl.maximum({{0}}, {{1}}, {_ORDER})",
    "min": f"tl.minimum({{0}}, {{1}}, {_ORDER})",
    "neg": "{0} * -1.0",  # 0 - 0 is not -0
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0}))",
}
_OF_UNSIGNED = {"sign": "tl.where({0} > 0, 1, {0})"}  # there is no -1 beside them


def _looked_up(eqn: Any, pointer: str, place: str) -> str:
    found = f"look_up({pointer} + {place})"
    is_truth = eqn.invars[0].aval.dtype == jnp.bool_
    return f"{found} != 0" if is_truth else found


def _convert(eqn: Any, x: str) -> str:
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    if old == new:
        return x
    return f"{x} != 0" if new == jnp.bool_ else f"({x}).to({TYPES[str(new)]})"


def _quotient(eqn: Any, x: str, y: str) -> str:
    """Rounded towards 0; of a division by 0, -1."""
    if jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating):
        return _OF_FLOATS["div"].format(x, y)
    plain = f"{x} // {y}"
    if _is_harmless(eqn):
        return plain
    if _is_unsigned(eqn):
        return f"tl.where({y} == 0, {y} - 1, {x} // tl.maximum({y}, 1))"
    safe = f"tl.where(({y} == 0) | ({y} == -1), 1, {y})"
    return f"tl.where({y} == 0, -1, tl.where({y} == -1, 0 - {x}, {x} // {safe}))"


def _remainder(eqn: Any, x: str, y: str) -> str:
    """With the sign of the dividend, which it is of a division by 0."""
    plain = f"{x} % {y}"
    if _is_harmless(eqn):
        return plain
    if _is_unsigned(eqn):
        return f"tl.where({y} == 0, {x}, {x} % tl.maximum({y}, 1))"
    safe = f"tl.where(({y} == 0) | ({y} == -1), 1, {y})"
    return f"tl.where({y} == 0, {x}, {x} % {safe})"


def _is_unsigned(eqn: Any) -> bool:
    return jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.unsignedinteger)


def _is_harmless(eqn: Any) -> bool:
    y = eqn.invars[1]
    return is_literal(y) and int(y.val) not in (0, -1)


def _shift(operator: str, kind: str | None, beyond: str) -> Callable[..., str]:
    """A shift of a word of some kind; by more than it has, what is `beyond`."""

    def write(eqn: Any, x: str, n: str) -> str:
        own = TYPES[str(eqn.invars[0].aval.dtype)]
        words = own if kind is None else kind
        as_words = x if words == own else f"({x}).to({words}, bitcast=True)"
        shifts = eqn.invars[1]
        if is_literal(shifts) and 0 <= int(shifts.val) < _BITS:
            found = f"{as_words} {operator} {int(shifts.val)}"
        else:
            is_in = f"({n} >= 0) & ({n} < {_BITS})"
            few = f"({n} & {_BITS - 1})"
            few += "" if words == own else f".to({words}, bitcast=True)"
            some = f"({as_words} {operator} {few})"
            rest = beyond.format(as_words)
            found = f"tl.where({is_in}, {some}, {rest})"
        return found if words == own else f"({found}).to({own}, bitcast=True)"

    return write


def _power(eqn: Any, x: str) -> str:
    """By squaring; normalization leaves those from 2 on."""
    y = eqn.params["y"]
    if y == 1:
        return x
    half = _power_text(x, y // 2)
    return f"{half} * {half}" + (f" * {x}" if y % 2 else "")


def _power_text(x: str, y: int) -> str:
    if y == 1:
        return x
    half = _power_text(x, y // 2)
    return f"({half} * {half}" + (f" * {x})" if y % 2 else ")")


def _round(eqn: Any, x: str) -> str:
    is_even = eqn.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    return f"libdevice.{'nearbyint' if is_even else 'round'}({x})"


_BY_KIND: dict[str, Callable[..., str]] = {
    "convert_element_type": _convert,
    "dynamic_slice": _looked_up,
    "div": _quotient,
    "integer_pow": _power,
    "rem": _remainder,
    "round": _round,
    "shift_left": _shift("<<", None, "0"),
    "shift_right_arithmetic": _shift(">>", "tl.int32", "({0} >> 31)"),
    "shift_right_logical": _shift(">>", "tl.uint32", "0"),
}
