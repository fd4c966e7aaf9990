"""Who asks a size something: JAX or the user, and whether a hash only keys a cache."""

import functools
import re
import sys
from types import FrameType, MethodType
from typing import Any

import jax

from .call_sites import Made, callees
from .provenance import is_of_jax, is_the_users


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


# --- who asks -------------------------------------------------------------------------


_CHECKERS = ("jaxtyping.", "beartype.")
_PASSED = (  # what sizes are made of
    "pliax.core.collapse",
    "pliax.core.conditions",
    "pliax.core.dims",
    "pliax.core.guards",
    "pliax.core.known_sizes",
    "pliax.core.numpy_functions",
    "pliax.core.reals",
    "pliax.core.size_bits",
    "pliax.core.size_expressions",
    "pliax.core.size_values",
    "pliax.core.symbols",
    *_CHECKERS,
)


def asker(passed: tuple[str, ...] = _PASSED) -> FrameType:
    """The frame that asks a size something: the nearest outside of sizes' own modules.

    Where types are checked at run time, wrappers of the checkers lie in between.

    Args:
        passed: the modules it is outside of, instead.
    """
    frame: FrameType | None = sys._getframe(1)
    passed = (__name__, *_CHECKERS, *passed)
    while frame is not None and _is_passed(frame, passed):
        frame = frame.f_back
    return frame or sys._getframe(1)


def _is_passed(frame: FrameType, passed: tuple[str, ...] = _PASSED) -> bool:
    name = frame.f_globals.get("__name__") or ""
    return name.startswith(passed) or frame.f_code.co_filename.startswith("<@beartype")


def compares_for_the_user(frame: FrameType) -> bool:
    """Whether a frame of JAX's compares what a user compares: two types of arrays."""
    if frame.f_code.co_name not in ("__eq__", "__ne__"):
        return False
    return frame.f_back is not None and not is_inside(frame.f_back)


def is_asked_by_jax() -> bool:
    """Whether the nearest frame outside of this floor is JAX's, or our transforms'."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (_is_passed(frame) or _is_of_the_floor(frame)):
        frame = frame.f_back
    return is_inside(frame)


def _is_of_the_floor(frame: FrameType) -> bool:
    return (frame.f_globals.get("__name__") or "").startswith("pliax.core.")


_WITHIN = ("jax.", "jaxlib", "pliax.transforms.")


def is_inside(frame: FrameType | None) -> bool:
    """Whether a question about a size comes from inside JAX, or from our transforms.

    Both take symbolic sizes for what they are: unequal unless the same expression.
    """
    name = frame.f_globals.get("__name__", "") if frame else ""
    return name.startswith(_WITHIN) or name == "jax"


# Of JAX's modules those that call what users name, and are not named themselves.
_PLUMBING = re.compile(
    r"jax\._src\.(api|api_util|core|linear_util|pjit|profiler|traceback_util|util"
    r"|interpreters\..*|numpy\.(array_methods|indexing|util)|tree_util)"
)


def function_of_jax(frame: FrameType | None) -> str:
    """The function of JAX's that the user has called, around a frame; "" if none."""
    found = ""
    while frame is not None and not is_the_users(frame.f_code):
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__") or ""
        is_named = name[0] not in "_<" and is_of_jax(frame.f_code)
        if is_named and not _PLUMBING.fullmatch(module):
            found = name
        frame = frame.f_back
    return found
