"""Sizes of one trace in another: what a function kept of one call for the next.

    self.n = x.shape[0]  in one trace,  y.shape[0] > self.n  in another

Under `jax.jit` such a size is an integer, the one of the last trace. A symbolic size
stands for all sizes of its own trace and has no value in any other, so that every use
of it is an error: its name may well mean something else there. Only JAX's caches, which
compare what they were called with, are told that it differs.
"""

from types import FrameType
from typing import Any

from .dims import Size
from .provenance import is_the_users, user_place
from .size_expressions import bounds, variables


class UnknownSizeError(ValueError):
    """A question about a size that only the device knows, or only another trace."""


class UnknownIntegerError(UnknownSizeError, TypeError):
    """The same where an integer was asked for: JAX expects a TypeError of others."""


def value_of(size: Any) -> Any:
    """The value of a size whose trace is over if each of its calls had it, else itself.

    So it is where a question of that trace has made the size a constant.
    """
    if not isinstance(size, Size) or not size.assumptions.is_closed:
        return size
    low, high = bounds(size, size.assumptions.known.ranges)
    return int(low) if low == high else size


def are_of_two_traces(a: Any, b: Any) -> bool:
    """Whether two sizes cannot meet in an expression."""
    are_sizes = isinstance(a, Size) and isinstance(b, Size)
    return are_sizes and a.assumptions is not b.assumptions


def stray(a: Any, b: Any, use: str, frame: FrameType) -> UnknownSizeError:
    """The error where sizes of two traces, or one whose trace is over, are used.

    Args:
        a: a size or an integer.
        b: another.
        use: what they were used in or as.
        frame: who uses them.
    """
    sizes = [x for x in (a, b) if isinstance(x, Size)]
    size = next((x for x in sizes if x.assumptions.is_closed), sizes[-1])
    assumptions = size.assumptions
    symbols = assumptions.known.symbols
    origins = [f"{n} is {symbols[n].origin}" for n in sorted(variables(size))]
    trace = "the trace that it belongs to is over"
    if not assumptions.is_closed:
        trace = "it belongs to another trace than this"
    return UnknownSizeError(
        f"{assumptions.owner}: the size {size} ({', '.join(origins)}) has no value "
        f"where it is used now, {use}: {trace}.\n  at {user_place(frame)}\n"
        "A size stands for many sizes in one trace, and for none outside of it. Pass "
        "it as an argument, read it off an array that is one, or return it as an "
        "array, jnp.asarray(size)."
    )


def is_for_the_user(frame: FrameType | None) -> bool:
    """Whether the user's code asks, be it through JAX; not one of our transforms."""
    at = frame
    while at is not None:
        if (at.f_globals.get("__name__") or "").startswith("pliax.transforms."):
            return False
        if is_the_users(at.f_code):
            return True
        at = at.f_back
    return False
