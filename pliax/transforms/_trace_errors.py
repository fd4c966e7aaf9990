"""What goes wrong in a trace for many sizes, in one line and at the user's."""

import dataclasses
import re

from pliax.core.caught_errors import CaughtError, first_line
from pliax.core.guards import Assumptions
from pliax.core.provenance import NOWHERE, Place, user_place


class NotSymbolicError(Exception):
    """A function that cannot be traced for all sizes at once.

    Attributes:
        reason: what went wrong.
        place: the line of the user's code.
        original: the error of the trace.
        is_about_one_call: whether it can be traced where sizes are not, as in this
            call, equal by chance.
    """

    def __init__(
        self,
        reason: str,
        place: Place,
        original: Exception,
        is_about_one_call: bool = False,
    ):
        self.reason, self.place, self.original = reason, place, original
        self.is_about_one_call = is_about_one_call
        super().__init__(f"{reason}\n  at {place}")


class GoesOnError(Exception):
    """A program went on after an error of JAX's, which may depend on sizes."""

    def __init__(self, found: CaughtError):
        self.place = found.place
        super().__init__(f"the function goes on after JAX's {found.text}")


def reason_of(error: Exception) -> str:
    """What went wrong, in one line."""
    return str(error) if isinstance(error, GoesOnError) else first_line(error)


def place_of(error: Exception) -> Place:
    """The last line of the user's that an error came through."""
    if isinstance(error, GoesOnError):
        return error.place
    found = NOWHERE
    step = error.__traceback__
    while step is not None:
        place = user_place(step.tb_frame, only=True)
        if place is not NOWHERE:
            found = dataclasses.replace(place, line=step.tb_lineno)
        step = step.tb_next
    return found


def note_births(error: Exception, assumptions: Assumptions, place: Place) -> None:
    """Notes under an error about sizes born from data where they were, and a remedy.

    Args:
        error: what a trace raised.
        assumptions: of that trace.
        place: the user's line that it came from.
    """
    mentioned = re.findall(r"\bu\d+\b", str(error))
    names = [n for n in dict.fromkeys(mentioned) if n in assumptions.known.unbacked]
    if not names:
        return
    origins = [f"  {n}: {assumptions.known.symbols[n].origin}" for n in names]
    remedy = _OF_ONE if len(names) == 1 else _OF_SEVERAL
    lines = [
        f"{assumptions.owner}: {' and '.join(names)} came from data, and only the "
        "device knows their values:",
        *origins,
        f"They were used at {place}",
        remedy,
    ]
    error.add_note("\n".join(lines))


_OF_ONE = (
    "Where JAX needs such a value, keep the whole array and mask it, "
    "jnp.where(mask, x, 0)."
)
_OF_SEVERAL = (
    "Two sizes born from data are different to JAX. Select once and use the result "
    "twice, or state px.check(a.shape[0] == b.shape[0]) where they are equal."
)
