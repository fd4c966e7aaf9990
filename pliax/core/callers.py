"""What a frame does with a size that it hashes: keys a cache, or looks integers up."""

import ast
import dis
import functools
import linecache
from types import FrameType
from typing import Any

import jax

from .provenance import is_of_jax


_CACHES = (type(jax.jit(abs)), functools._lru_cache_wrapper)


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
    instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    if not instruction.startswith("CALL"):
        return False
    called = _found(_called(frame), frame)
    while isinstance(called, functools.partial):
        called = called.func
    return isinstance(called, _CACHES)


def _found(name: ast.expr | None, frame: FrameType) -> Any:
    """What a name, or an attribute of one, stands for in a frame; else None."""
    if isinstance(name, ast.Attribute):
        return getattr(_found(name.value, frame), name.attr, None)
    if not isinstance(name, ast.Name):
        return None
    scopes = (frame.f_locals, frame.f_globals, frame.f_builtins)
    return next((scope[name.id] for scope in scopes if name.id in scope), None)


def _called(frame: FrameType) -> ast.expr | None:
    """The function that a frame is calling, if its text is known."""
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    first, last, begin, end = positions
    if first is None or last is None or begin is None or end is None:
        return None
    lines = [
        linecache.getline(frame.f_code.co_filename, n) for n in range(first, last + 1)
    ]
    if not lines[-1]:
        return None
    lines[-1] = lines[-1].encode()[:end].decode(errors="ignore")
    lines[0] = lines[0].encode()[begin:].decode(errors="ignore")
    try:
        call = ast.parse("(" + "".join(lines) + ")", mode="eval").body
    except SyntaxError:
        return None
    return getattr(call, "func", None)
