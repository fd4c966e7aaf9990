"""Loops, scans and searches as long as a size is."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import dtypes as _dtypes
from jax._src.lax.control_flow import loops as _loops
from jax._src.numpy import hijax as _hijax


def search_by_size(kind: type, searched: Callable[..., Any]) -> None:
    """Has jnp.searchsorted bisect an axis of symbolic size by another function.

    JAX's primitive for it checks that the size fits its dtype, so it is passed by.
    """
    scan = _hijax._searchsorted_scan_impl

    def bisect(values: Any, query: Any, side: str, dtype: Any, unrolled: bool) -> Any:
        if isinstance(values.shape[0], kind):
            return searched(values, query, side, dtype)
        return scan(values, query, side=side, dtype=dtype, unrolled=unrolled)

    def passing_by(primitive: Callable[..., Any]) -> Callable[..., Any]:
        def search(values: Any, query: Any, /, **options: Any) -> Any:
            if kind not in map(type, values.shape):
                return primitive(values, query, **options)
            given = {"side": "left", "dimension": 0, "batch_dims": 0, "method": "scan"}
            given |= {"dtype": "int32", **options}
            return _hijax._searchsorted_impl(values, query, **given)

        return search

    _hijax._searchsorted_scan_impl = bisect
    for name in ("searchsorted", "searchsorted_via_expand"):  # jax 0.12 and 0.11
        if hasattr(_hijax, name):
            setattr(_hijax, name, passing_by(getattr(_hijax, name)))


def scan_by_size(kind: type, scanned: Callable[..., Any]) -> None:
    """Has associative scans along an axis of symbolic size made by another function."""
    scan = _loops.associative_scan

    @functools.wraps(scan)
    def associative_scan(
        fn: Callable[..., Any], elems: Any, reverse: bool = False, axis: int = 0
    ) -> Any:
        shapes = [x.shape for x in jax.tree.leaves(elems)]
        rank = len(shapes[0]) if shapes else 0
        if -rank <= axis < rank:
            sizes = [s[axis % rank] for s in shapes if len(s) > axis % rank]
            is_one = len(sizes) == len(shapes) and all(n is sizes[0] for n in sizes)
            if is_one and isinstance(sizes[0], kind):
                return scanned(fn, elems, reverse, axis)
        return scan(fn, elems, reverse, axis)

    for module in (_loops, jax.lax):
        module.__dict__["associative_scan"] = associative_scan


def loop_by_size(kind: type, looped: Callable[..., Any]) -> None:
    """Has lax.fori_loop up to a size be a scan, as it is up to an integer.

    Args:
        kind: the class of sizes.
        looped: `(lower, upper, body, init, unroll)` to the result, in a tuple; None
            leaves it to JAX.
    """
    loop = _loops.fori_loop

    @functools.wraps(loop)
    def fori_loop(
        lower: Any, upper: Any, body_fun: Any, init_val: Any, *, unroll: Any = None
    ) -> Any:
        found, ends = None, (lower, upper)
        are_numbers = all(isinstance(x, int | np.integer | kind) for x in ends)
        is_counted = are_numbers and any(isinstance(x, kind) for x in ends)
        is_right = callable(body_fun) and is_counted and _may_be_ends(*ends)
        if is_right and unroll is not True:
            found = looped(lower, upper, body_fun, init_val, int(unroll or 1))
        if found is None:
            return loop(lower, upper, body_fun, init_val, unroll=unroll)
        return found[0]

    for module in (_loops, jax.lax):
        module.__dict__["fori_loop"] = fori_loop


def _may_be_ends(lower: Any, upper: Any) -> bool:
    """Whether JAX takes numbers of these types for the ends of a loop."""
    a, b = _dtypes.dtype(lower), _dtypes.dtype(upper)
    gives_way = _dtypes.is_weakly_typed(lower) != _dtypes.is_weakly_typed(upper)
    return a == b or (gives_way and a.kind == b.kind == "i")
