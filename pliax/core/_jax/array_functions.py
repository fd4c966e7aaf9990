"""Functions of jax.numpy that compute with sizes, and the indices of arrays."""

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core as _core, dtypes as _dtypes
from jax._src.array import ArrayImpl as _ArrayImpl
from jax._src.lax import lax as _lax, slicing as _slicing
from jax._src.numpy import (
    indexing as _indexing,
    lax_numpy as _lax_numpy,
    setops as _setops,
    ufuncs as _ufuncs,
)
from jax._src.random import core as _random

from .stand_ins import _Changed


def index_by_size(kind: type, constant: Callable[[Any, Any], Any]) -> None:
    """Has indices that are negative or wrap meet a size as they meet an integer.

    JAX's way for symbolic dimensions casts them, also to a type that is too short.

    Args:
        kind: the class of sizes.
        constant: `(indices, size)` to the size in their type.
    """
    const, is_constant = _lax._const, _core.is_constant_dim

    def of_size(example: Any, value: Any) -> Any:
        return (constant if isinstance(value, kind) else const)(example, value)

    def is_constant_or_size(n: Any) -> bool:
        return isinstance(n, kind) or is_constant(n)

    _indexing.lax = _Changed(_lax, _const=of_size)
    _indexing.core = _Changed(_core, is_constant_dim=is_constant_or_size)


def shuffle_by_size(kind: type, shuffled: Callable[..., Any]) -> None:
    """Has jax.random.permutation and choice shuffle by another function."""
    shuffle = _random._shuffle

    def choose(key: Any, x: Any, axis: int) -> Any:
        by = shuffled if isinstance(x.size, kind) else shuffle
        return by(key, x, axis)

    _random._shuffle = choose


def arange_by_size(
    kind: type, ranged: Callable[[Any, Any, Any, Any], Any], *others: type
) -> None:
    """Has jnp.arange with floats, or in a short float, up to a size count otherwise.

    The types of sizes that NumPy computed are those of its elements, as of integers.

    Args:
        kind: the class of sizes.
        ranged: `(start, stop, step, dtype)` to the array; None leaves it to JAX.
        others: classes of numbers that are computed of sizes.
    """
    arange = _lax_numpy._arange

    def of_sizes(
        start: Any,
        stop: Any = None,
        step: Any = None,
        dtype: Any = None,
        out_sharding: Any = None,
    ) -> Any:
        given = start, stop, step
        found = None
        numbers = (x for x in given if isinstance(x, (kind, np.integer)))
        # JAX asks no dimension for its type.
        if dtype is None and any(hasattr(type(x), "dtype") for x in numbers):
            dtype = _dtypes.result_type(*(x for x in given if x is not None))
        if out_sharding is None and any(isinstance(x, (kind, *others)) for x in given):
            ends = (0, start) if stop is None else (start, stop)
            found = ranged(*ends, step, dtype)
        return arange(*given, dtype, out_sharding) if found is None else found

    _lax_numpy._arange = of_sizes


def equiv_by_size(kind: type) -> None:
    """Has jnp.array_equiv broadcast first, whose error it takes for False."""
    equiv = _lax_numpy.array_equiv

    @functools.wraps(equiv)
    def array_equiv(a1: Any, a2: Any) -> Any:
        if kind in map(type, (*jnp.shape(a1), *jnp.shape(a2))):
            a1, a2 = jnp.broadcast_arrays(a1, a2)
        return equiv(a1, a2)

    _lax_numpy.array_equiv = jnp.array_equiv = array_equiv


def indices_by_size(kind: type) -> None:
    """Has jnp.indices and jnp.diag_indices take sizes; JAX insists on integers."""
    indices, diag_indices = _lax_numpy.indices, _lax_numpy.diag_indices

    @functools.wraps(indices)
    def of_sizes(dimensions: Any, dtype: Any = None, sparse: bool = False) -> Any:
        if kind not in map(type, dimensions):
            return indices(dimensions, dtype, sparse)
        along = (jnp.arange(n, dtype=dtype or int) for n in dimensions)
        found = jnp.meshgrid(*along, indexing="ij", sparse=sparse)
        return tuple(found) if sparse else jnp.stack(found)

    @functools.wraps(diag_indices)
    def diagonal(n: Any, ndim: int = 2) -> Any:
        if not isinstance(n, kind):
            return diag_indices(n, ndim)
        return (jnp.arange(n, dtype=int),) * ndim

    _lax_numpy.indices = jnp.indices = of_sizes
    _lax_numpy.diag_indices = jnp.diag_indices = diagonal


def wrap_by_size(kind: type) -> None:
    """Has jnp.pad(mode="wrap") read around the end, where JAX counts whole copies."""
    pad = _lax_numpy._pad_wrap

    def padded(array: Any, widths: Any) -> Any:
        if kind not in map(type, array.shape):
            return pad(array, widths)
        for axis, ends in enumerate(widths):
            before, after = (n if isinstance(n, kind) else int(n) for n in ends)
            if not (type(before) is type(after) is int and before == after == 0):
                count = before + array.shape[axis] + after
                places = jnp.arange(count, dtype="int32") - before
                array = jnp.take(array, places, axis, mode="wrap")
        return array

    _lax_numpy._pad_wrap = padded


def power_by_size(kind: type, powered: Callable[[Any, Any], Any]) -> None:
    """Has powers of integer arrays read all bits of a size: JAX reads 6 of a tracer."""
    array: Any = _core.ShapedArray
    power, operate = _ufuncs.power, array._pow

    @functools.wraps(power)
    def by_size(x1: Any, x2: Any, /) -> Any:
        is_whole = isinstance(x2, kind) and not _is_inexact(x1)
        return powered(x1, x2) if is_whole else power(x1, x2)

    def operated(x1: Any, x2: Any) -> Any:
        return by_size(x1, x2) if isinstance(x2, kind) else operate(x1, x2)

    _ufuncs.power = jnp.power = by_size
    array._pow = staticmethod(operated)
    setattr(_ArrayImpl, "__pow__", operated)  # noqa: B010  (pyright knows its own)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jax.dtypes.result_type(x), jnp.inexact)


def split_by_size(kind: type, is_born: Callable[[Any], bool]) -> None:
    """Has jnp.split cut slices where only the device knows how long they are."""
    split = _lax_numpy._split

    def cut(op: str, ary: Any, where: Any, axis: int = 0) -> Any:
        n = jnp.shape(ary)[operator.index(axis)]
        is_list = isinstance(where, list | tuple)
        if not isinstance(n, kind) or not is_list or not is_born(n):
            return split(op, ary, where, axis)
        rows = jnp.moveaxis(ary, axis, 0)
        ends = zip([0, *where], [*where, None], strict=True)
        return [jnp.moveaxis(rows[a:b], 0, axis) for a, b in ends]

    _lax_numpy._split = cut


def squeeze_by_size(kind: type, is_one: Callable[[Any], bool]) -> None:
    """Has jnp.squeeze without axes ask each size whether it is 1."""
    squeeze = _lax_numpy._squeeze

    def squeezed(a: Any, axis: Any) -> Any:
        if axis is None and kind in map(type, a.shape):
            axis = tuple(i for i, n in enumerate(a.shape) if is_one(n))
        return squeeze(a, axis)

    _lax_numpy._squeeze = squeezed


def roll_by_size(kind: type, may_be_empty: Callable[[Any], bool]) -> None:
    """Has jnp.roll take a constant as it takes a scalar where there may be nothing.

    Its shorter way divides by the size.
    """
    roll = _lax_numpy._roll_static

    def rolled(a: Any, shift: Any, axis: Any) -> Any:
        sizes = [a.shape[i] for i in axis]
        if any(isinstance(n, kind) and may_be_empty(n) for n in sizes):
            return _lax_numpy._roll_dynamic(a, jnp.asarray(shift), axis)
        return roll(a, shift, axis)

    _lax_numpy._roll_static = rolled


def unique_by_size(
    kind: type,
    require_some: Callable[[Any, str], None],
    is_empty: Callable[[Any], bool],
) -> None:
    """Has jnp.unique state that there is something, where it would do without.

    Of arrays without elements it raises, or gives results of other shapes.
    """
    unique = _setops._unique
    signature = inspect.signature(unique)

    @functools.wraps(unique)
    def found(ar: Any, axis: int, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(ar, axis, *args, **kwargs)
        given.apply_defaults()
        why, n = _why_unique_wants_some(given.arguments), ar.shape[axis]
        if isinstance(n, kind) and is_empty(n):
            nothing = _slicing.slice_in_dim(ar, 0, 0, axis=axis)
            return unique(nothing, axis, *args, **kwargs)
        if why and isinstance(n, kind):
            require_some(n, f"jnp.unique: {why}")
        return unique(ar, axis, *args, **kwargs)

    _setops._unique = found


def _why_unique_wants_some(given: dict[str, Any]) -> str:
    if given["size"] and given["fill_value"] is None:
        return "an array without elements needs a fill_value"
    if given["return_index"] or given["return_counts"]:
        return "of an array without elements the results have other shapes"
    return ""
