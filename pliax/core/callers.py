"""What a frame does with a size that it hashes: keys a cache, or looks integers up."""

import functools
from types import FrameType, MethodType
from typing import Any

import jax

from .call_sites import Made, callees
from .provenance import is_of_jax


_CACHES = (type(jax.jit(abs)), functools._lru_cache_wrapper)
_MAKERS = (jax.jit, functools.cache, functools.lru_cache)


# JAX's scan, stack, vmap and lexsort: lengths go into a set that must have one.
_WANT_ONE_LENGTH = {"_infer_scan_length", "_stack_shape_rule", "_mapped_axis_size"}
_WANT_ONE_LENGTH |= {"_lexsort_tuple"}


def asks_if_all_are_equal(frame: FrameType) -> bool:
    """Whether a frame puts lengths in a set to see if they are one, as scans do."""
    if frame.f_globals.get("__name__") == "flax.core.lift":
        return True
    at: FrameType | None = frame
    for _ in range(3):  # of vmap: a wrapper, who asks for it, and who wants to know
        if at is None:
            return False
        if at.f_code.co_name in _WANT_ONE_LENGTH and is_of_jax(at.f_code):
            return True
        at = at.f_back
    return False


def hashes_harmlessly(frame: FrameType) -> bool:
    """Whether a hash only keys a cache, as jit and lru_cache key theirs.

    Inside a cache a size meets itself alone: the cached result was made for it. In a
    set or dictionary of integers it would be missed, whatever its value.
    """
    called = callees(frame)
    return bool(called) and all(map(_is_cache, called))


def _is_cache(called: Any) -> bool:
    """Whether a function keeps what it returned, by what it was called with."""
    while isinstance(called, functools.partial | MethodType):
        if isinstance(called, functools.partial):
            called = called.func
        else:
            called = called.__func__
    made = called
    while isinstance(made, Made):  # jax.jit(f, static_argnums=0)(n)
        made = made.maker
    if isinstance(called, Made):
        return any(made is maker for maker in _MAKERS)
    return isinstance(called, _CACHES)
