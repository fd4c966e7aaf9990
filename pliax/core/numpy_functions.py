"""NumPy's functions of sizes: operators stay sizes, all else is computed on the device.

    np.int64(2) * t, np.maximum(t, 1)  -> as Python's operators, which give sizes
    np.sqrt(t), np.float64(2) * t      -> a run-time scalar or array

NumPy's scalars and arrays have types that give way to no other, so the results have.
"""

from typing import Any

import jax
import numpy as np

from .reals import Real, as_scalars, by_numpy


# The methods of a size by which it is the first operand, and the second.
_METHODS = {
    np.add: ("__add__", "__radd__"),
    np.subtract: ("__sub__", "__rsub__"),
    np.multiply: ("__mul__", "__rmul__"),
    np.floor_divide: ("__floordiv__", "__rfloordiv__"),
    np.remainder: ("__mod__", "__rmod__"),
    np.divmod: ("__divmod__", "__rdivmod__"),
    np.divide: ("__truediv__", "__rtruediv__"),
    np.power: ("__pow__", "__rpow__"),
    np.equal: ("__eq__", "__eq__"),
    np.not_equal: ("__ne__", "__ne__"),
    np.less: ("__lt__", "__gt__"),
    np.less_equal: ("__le__", "__ge__"),
    np.greater: ("__gt__", "__lt__"),
    np.greater_equal: ("__ge__", "__le__"),
    np.negative: ("__neg__", ""),
    np.positive: ("__pos__", ""),
    np.absolute: ("__abs__", ""),
}
_EXTREMES = {np.maximum: ("max", "max"), np.minimum: ("min", "min")}


def apply(
    kind: type, ufunc: np.ufunc, method: str, inputs: tuple, options: dict
) -> Any:
    """What a function of NumPy's gives for operands of which one is a size.

    Args:
        kind: the class of sizes.
        ufunc: the function.
        method: "__call__", or another of its methods, which no size can serve.
        inputs: its operands.
        options: its further arguments.
    """
    if method != "__call__" or options:
        return NotImplemented
    if any(isinstance(x, np.ndarray) and x.dtype == object for x in inputs):
        return ufunc(*(_in_an_array(x) if isinstance(x, kind) else x for x in inputs))
    inputs = as_scalars(inputs)
    found = _by_operator(kind, ufunc, inputs)
    if found is NotImplemented:
        return by_numpy(ufunc, inputs)
    if isinstance(found, Real):
        return found.as_typed()
    return found.astype(found.dtype) if isinstance(found, jax.Array) else found


def _by_operator(kind: type, ufunc: np.ufunc, inputs: tuple) -> Any:
    if ufunc is np.square:
        ufunc, inputs = np.multiply, inputs * 2
    methods = _METHODS.get(ufunc)
    if all(isinstance(x, int | np.integer | kind) for x in inputs):
        methods = methods or _EXTREMES.get(ufunc)
        if ufunc is np.power and not inputs[1] >= 0:
            raise ValueError("Integers to negative integer powers are not allowed.")
    if methods is None:
        return NotImplemented
    first, *others = inputs
    if isinstance(first, kind):
        return getattr(first, methods[0])(*others)
    return getattr(others[0], methods[1])(first)


def _in_an_array(size: Any) -> np.ndarray:
    array = np.empty((), object)
    array[()] = size
    return array
