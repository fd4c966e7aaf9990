"""What a frame does with a size that it hashes: keys a cache, or looks integers up."""

import ast
import dis
import linecache
from types import FrameType


# What looks a size up among others, where equal integers must be found.
_LOOKUPS = {"get", "add", "setdefault", "pop", "discard", "remove", "fromkeys"}
_LOOKUPS |= {"hash", "set", "frozenset", "dict", "Counter", "update", "intersection"}
_LOOKUPS |= {"union", "difference", "issubset", "issuperset", "isdisjoint"}


def hashes_harmlessly(frame: FrameType) -> bool:
    """Whether a hash only keys a cache, as jit and lru_cache key theirs.

    Inside a cache a size meets itself alone: the cached result was made for it. In a
    set or dictionary of integers it would be missed, whatever its value.
    """
    instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    if not instruction.startswith("CALL"):
        return False
    called = _called(frame)
    return called is not None and called not in _LOOKUPS


def _called(frame: FrameType) -> str | None:
    """The last name of the function that a frame is calling, if its text is known."""
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
    function = getattr(call, "func", None)
    return getattr(function, "attr", getattr(function, "id", None))
