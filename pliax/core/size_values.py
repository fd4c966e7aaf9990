"""The values of sizes that a program needs as Python integers.

    Size, use  ->  the integer of the sizes at hand, under a guard that names the use

A size that only the device knows has none, nor has one whose trace is over, unless its
trace made it a constant.
"""

import math
import re
from types import FrameType
from typing import Any

import numpy as np

from .call_sites import is_calling
from .callers import (
    asks_if_all_are_equal,
    function_of_jax,
    hashes_harmlessly,
    is_inside,
)
from .conditions import Condition
from .dims import LARGEST, Size
from .other_traces import (
    UnknownIntegerError,
    UnknownSizeError,
    are_of_two_traces,
    is_for_the_user,
    stray,
    value_of,
)
from .provenance import user_place
from .size_expressions import evaluate, substitute, variables


# In these NumPy takes a TypeError for "no integer", and raises one of its own.
_USES_OF_NUMPY = ("as an integer", "in an array of NumPy's")


class SizeValues:
    """What the program gets that needs the value of a size.

    Args:
        assumptions: who decides about the sizes, and keeps a record.
    """

    def __init__(self, assumptions: Any):
        self._assumptions = assumptions
        self._known = assumptions.known

    def as_integer(self, size: Size, use: str, frame: FrameType) -> int:
        """The value of a size that the program needs as a Python integer."""
        if isinstance(value := self.value_afterwards(size, use, frame), int):
            return value
        is_unknown = bool(variables(size) - self._known.hints.keys())
        if is_inside(frame) and (self._assumptions.is_closed or not is_unknown):
            raise TypeError(
                f"the size {size} has no value while it is traced{_needed_in(frame)}"
            )
        if is_unknown:
            inside = _needed_in(frame)
            is_numpys = use in _USES_OF_NUMPY and not is_inside(frame)
            raise (UnknownSizeError if is_numpys else UnknownIntegerError)(
                f"{self._needs(f'the value of {size} ({use}{inside})', size)}.\n"
                f"  at {user_place(frame)}\n"
                "Use it as an array, jnp.asarray(size), or as a size of arrays."
            )
        value = evaluate(size, self._known.hints)
        condition = Condition("==", (size, value), self._assumptions)
        self._assumptions.guard(condition, user_place(frame), f"used {use}")
        self._assumptions.record(condition, True, frame, condition)
        return value

    def value_afterwards(self, size: Size, use: str, frame: FrameType) -> Any:
        """What the user gets of a size after its trace: its value, or an error."""
        if not self._assumptions.is_closed or not is_for_the_user(frame):
            return size
        if isinstance(value := value_of(size), Size):
            raise stray(size, 0, use, frame)
        return value

    def refuse_afterwards(self, condition: Condition, frame: FrameType) -> None:
        """Raises where the user asks about sizes whose trace is over."""
        if self._assumptions.is_closed and is_for_the_user(frame):
            raise stray(*_sizes_in(condition), f"in {condition}", frame)

    def operands(self, a: Any, b: Any, frame: FrameType) -> tuple[Any, Any]:
        """Two sizes, or integers, that are to meet in an expression."""
        x, y = value_of(a), value_of(b)
        if are_of_two_traces(x, y):
            raise stray(x, y, f"with {b}", frame)
        return x, y

    def fits_as_exponent(self, size: Size, base: int, frame: FrameType) -> None:
        """Raises where a power of integers does not fit an int32; else a guard."""
        if abs(base) < 2:
            return
        most = int(math.log(LARGEST, abs(base)))
        asked = self._assumptions
        condition = Condition("<=", (size, most), asked)
        if self._known.proves(size, "<=", most) or not asked.has_hints(condition):
            return
        if not asked.decide(condition, frame):
            raise OverflowError(
                f"{base} ** {size} is too large for int32, in which sizes run"
            )

    def fits_in(
        self, size: Size, dtype: Any, frame: FrameType, remedy: str = ""
    ) -> None:
        """Raises where an integer type does not hold a size; else a guard.

        Of a size that only the device knows its bound is asked.
        """
        limits, asked = np.iinfo(dtype), self._assumptions
        most = self._at_most(size)
        for relation, end in ((">=", limits.min), ("<=", limits.max)):
            if self._known.proves(size, relation, end):
                continue
            bounded = Condition(relation, (most, end), asked)
            if asked.has_hints(bounded) and asked.decide(bounded, frame):
                continue
            if variables(size) - self._known.hints.keys():
                raise UnknownSizeError(
                    f"{self._needs(f'{size} as {dtype}', size)}.\n"
                    f"  at {user_place(frame)}\n"
                    f"Convert what it meets to int32, or state px.check({size} "
                    f"{relation} {end})."
                )
            text = f"the size {size} is out of bounds for {dtype}"
            raise OverflowError(f"{text}{remedy}")

    def _at_most(self, size: Size) -> Any:
        """A size with bounds for what only the device knows, where it grows with it."""
        unbacked = self._known.unbacked
        most: Any = size
        while re.fullmatch(_GROWS, str(most)) and variables(most) & unbacked.keys():
            most = substitute(most, unbacked)
        return most

    def hashed(self, size: Size, frame: FrameType) -> int | None:
        """The value of a size that user code looks up among integers, else None."""
        if asks_if_all_are_equal(frame):
            return _OF_EACH_SIZE
        if is_inside(frame) or hashes_harmlessly(frame):
            return None
        use = "by hash, in a call" if is_calling(frame) else "by hash"
        return self.as_integer(size, use, frame)

    def _needs(self, what: str, size: Size) -> str:
        why = self._assumptions.unknown(variables(size))
        return f"{self._assumptions.owner}: the program needs {what}, but {why}"


# Sums of products, less an integer at most: names of sizes are not negative.
_GROWS = r"[\w*^+ ]+(- \d+)?"
_OF_EACH_SIZE = 3  # equal hashes: a set compares its elements, under guards


def _needed_in(frame: FrameType) -> str:
    """Which function of JAX's needs a value, if one does."""
    name = function_of_jax(frame)
    return f", which JAX's {name} needs" if name else ""


def _sizes_in(condition: Condition) -> tuple[Any, Any]:
    """The two sides of the first comparison in a condition."""
    while condition.operation in ("and", "or"):
        condition = condition.parts[0]
    a, b = condition.parts
    return a, b
