"""What a text in Triton's language needs, on NumPy: it runs where Triton is not.

Numbers have the types they have there: none is made wider where two meet, quotients of
integers are rounded towards 0, and a truth is a byte of memory.
"""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np


class Block(np.ndarray):
    """A tile, or a scalar."""

    def to(self, dtype: Any, bitcast: bool = False) -> "Block":
        if bitcast:
            return block(np.asarray(self).view(dtype))
        if np.issubdtype(dtype, np.integer) and self.dtype.kind == "f":
            limits = np.iinfo(dtype)  # as the instruction does: NaN is 0
            whole = np.nan_to_num(np.asarray(self, np.float64), nan=0.0)
            return block(np.clip(np.trunc(whole), limits.min, limits.max), dtype)
        return block(self, dtype)

    def __array_finalize__(self, _: Any) -> None:
        assert self.dtype.itemsize <= 8

    def __floordiv__(self, other: Any) -> "Block":
        x, y = (np.asarray(z, np.int64) for z in (self, other))
        y = np.where(y == 0, 1, y)  # by 0 it may be anything
        return block(np.sign(x) * np.sign(y) * (abs(x) // abs(y)), self.dtype)

    def __mod__(self, other: Any) -> "Block":
        x, y = (np.asarray(z, np.int64) for z in (self, other))
        return block(x - np.asarray(self // other, np.int64) * y, self.dtype)


class Pointer:
    """An array's first element; with tiles added, elements."""

    def __init__(self, x: Any, place: Any = 0) -> None:
        self.array, self.place = np.asarray(x).reshape(-1), place

    def __add__(self, place: Any) -> "Pointer":
        return Pointer(self.array, self.place + np.asarray(place, np.int64))


def block(x: Any, dtype: Any = None) -> Block:
    return np.asarray(x, dtype or np.asarray(x).dtype).view(Block)


def _load(pointer: Pointer) -> Block:
    place = np.asarray(pointer.place)
    assert place.size == 0 or (place.min() >= 0 and place.max() < len(pointer.array))
    return block(pointer.array[place])


def _ordered(choose: Any, spread: Any) -> Any:
    def run(x: Any, y: Any, propagate_nan: bool = False) -> Block:
        return block((spread if propagate_nan else choose)(x, y))

    return run


def _elementwise(f: Any) -> Any:
    return lambda x: block(np.asarray(f(np.asarray(x)), x.dtype))


def _round(x: Any) -> Any:
    return np.trunc(x + np.copysign(0.5, x))


def _where(test: Any, x: Any, y: Any) -> Block:
    dtypes = [z.dtype for z in (x, y) if isinstance(z, np.ndarray)]
    assert len(set(dtypes)) == 1, "Triton would make one of them wider"
    return block(np.where(test, x, y), dtypes[0])


tl = SimpleNamespace(
    int1=np.dtype(bool),
    int8=np.dtype("int8"),
    int32=np.dtype("int32"),
    int64=np.dtype("int64"),
    uint32=np.dtype("uint32"),
    float32=np.dtype("float32"),
    float16=np.dtype("float16"),
    bfloat16=jnp.dtype("bfloat16"),
    PropagateNan=SimpleNamespace(ALL=True),
    abs=lambda x: block(np.abs(x)),
    exp=_elementwise(np.exp),
    exp2=_elementwise(np.exp2),
    full=lambda shape, value, dtype: block(np.full(shape, value, dtype)),
    load=_load,
    maximum=_ordered(np.fmax, np.maximum),
    minimum=_ordered(np.fmin, np.minimum),
    rsqrt=_elementwise(lambda x: 1 / np.sqrt(x)),
    where=_where,
)
libdevice = SimpleNamespace(
    cos=_elementwise(np.cos),
    log=_elementwise(np.log),
    log2=_elementwise(np.log2),
    nearbyint=_elementwise(np.rint),
    round=_elementwise(_round),
    sin=_elementwise(np.sin),
    tanh=_elementwise(np.tanh),
)


def run(text: str, *args: Any) -> Any:
    """The result of the function `mod` that a text defines."""
    namespace = {"tl": tl, "libdevice": libdevice, "look_up": _load}
    namespace["fast_tanh"] = libdevice.tanh
    exec(text, namespace)
    with np.errstate(all="ignore"):
        return namespace["mod"](*args)
