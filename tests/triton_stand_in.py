"""Triton's language on NumPy, as far as the kernels use it: they run where it is not.

Numbers have the types they have there: none is made wider where two meet, quotients of
integers are rounded towards 0, and a truth is a byte of memory. Nobody reads or writes
beyond the end of an array.
"""

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
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

    # A new tile, as large as is needed: the old one stays as it is.

    def __iadd__(self, other: Any) -> "Block":
        return self + other

    def __imul__(self, other: Any) -> "Block":
        return self * other

    def __iand__(self, other: Any) -> "Block":
        return self & other


class Pointer:
    """An array's first element; with tiles added, elements."""

    def __init__(self, x: Any, place: Any = 0) -> None:
        self.array, self.place = np.asarray(x).reshape(-1), place

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.array.dtype)

    def __add__(self, place: Any) -> "Pointer":
        return Pointer(self.array, self.place + np.asarray(place, np.int64))


def block(x: Any, dtype: Any = None) -> Block:
    return np.asarray(x, dtype or np.asarray(x).dtype).view(Block)


def _load(pointer: Pointer, is_there: Any = True, other: Any = 0) -> Block:
    place, is_there = np.broadcast_arrays(pointer.place, is_there)
    found = np.full(place.shape, other, pointer.array.dtype)
    found[is_there] = pointer.array[_inside(pointer, place[is_there])]
    return block(found)


def _store(pointer: Pointer, x: Any, is_there: Any) -> None:
    place, is_there, x = np.broadcast_arrays(pointer.place, is_there, x)
    pointer.array[_inside(pointer, place[is_there])] = x[is_there]


def _inside(pointer: Pointer, place: Any) -> Any:
    assert np.all((place >= 0) & (place < len(pointer.array))), "beyond the end"
    return place


def _dot(x: Any, y: Any, total: Any = 0, input_precision: str = "") -> Block:
    assert input_precision == "ieee", "not all of AMD's GPUs have another"
    assert x.dtype == y.dtype, "Triton multiplies equal types"
    x, y = (np.asarray(z, np.float32) for z in (x, y))
    return block(x @ y + np.float32(total), np.float32)


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


class _Anything(type):
    def __instancecheck__(cls, _: Any) -> bool:
        return True


class Constant(metaclass=_Anything):
    """A number as it is."""

    def __new__(cls, x: Any) -> Any:
        return x


tl = SimpleNamespace(
    constexpr=Constant,
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
    arange=lambda first, end: block(np.arange(first, end, dtype=np.int32)),
    broadcast_to=lambda x, shape: block(np.broadcast_to(x, shape)),
    cast=lambda x, dtype: block(np.asarray(x), dtype),
    dot=_dot,
    exp=_elementwise(np.exp),
    exp2=_elementwise(np.exp2),
    full=lambda shape, value, dtype: block(np.full(shape, value or 0, dtype)),  # no -0
    load=_load,
    log=_elementwise(np.log),
    max=lambda x, axis: block(np.fmax.reduce(np.asarray(x), axis)),
    maximum=_ordered(np.fmax, np.maximum),
    minimum=_ordered(np.fmin, np.minimum),
    rsqrt=_elementwise(lambda x: 1 / np.sqrt(x)),
    store=_store,
    sum=lambda x, axis: block(np.sum(np.asarray(x), axis, x.dtype)),
    trans=lambda x: x.T,
    where=_where,
    zeros=lambda shape, dtype: block(np.zeros(shape, dtype)),
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


# --- whole kernels --------------------------------------------------------------------


class Function:
    """What `triton.jit` makes of a function."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.__name__ = fn, fn.__name__

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)


def triton_call(
    *arrays: Any,
    kernel: Function,
    out_shape: Sequence[Any],
    grid: tuple[int],
    num_warps: int,
    num_stages: int,
) -> list[Any]:
    """A kernel's results, one program after another; what none wrote is NaN."""
    assert num_warps > 0 < num_stages

    def launch(*arrays: Any) -> tuple[Any, ...]:
        results = tuple(np.full(x.shape, np.nan, x.dtype) for x in out_shape)
        pointers = [Pointer(x) for x in (*arrays, *results)]
        with np.errstate(all="ignore"):
            for n in range(*grid):
                tl.program_id = lambda axis, n=n: block(np.int32(n))
                kernel(*pointers)
        return results

    return list(jax.pure_callback(launch, tuple(out_shape), *arrays))


def modules() -> dict[str, ModuleType]:
    """What stands in for the packages, by the names they are imported by."""

    def module(name: str, **names: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(names)
        return made

    functions = module("triton.language.extra.libdevice", **vars(libdevice))
    extra = module("triton.language.extra", libdevice=functions)
    language = module("triton.language", extra=extra, **vars(tl))
    language.__getattr__ = lambda name: getattr(tl, name)
    made = module("triton", language=language, jit=Function)
    calls = module("jax_triton", triton_call=triton_call)
    return {x.__name__: x for x in (made, language, extra, calls)}
