"""What is known of an integer that is not: from where to where it goes, how far steps.

Both compute with +, -, *, //, %, **, as sizes do, and are safe: what an expression of
integers gives lies in what the same expression of these gives.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any


class Interval:
    """All integers from `low` to `high`, either of which may be infinite."""

    __slots__ = ("high", "low")

    def __init__(self, low: Any, high: Any):
        self.low, self.high = low, high

    def __add__(self, other: Any) -> "Interval":
        other = interval(other)
        return Interval(self.low + other.low, self.high + other.high)

    __radd__ = __add__

    def __neg__(self) -> "Interval":
        return Interval(-self.high, -self.low)

    def __sub__(self, other: Any) -> "Interval":
        return self + (-interval(other))

    def __rsub__(self, other: Any) -> "Interval":
        return interval(other) + (-self)

    def __mul__(self, other: Any) -> "Interval":
        return _at_corners(_product, self, interval(other))

    __rmul__ = __mul__

    def __pow__(self, power: int) -> "Interval":
        result = functools.reduce(operator.mul, [self] * power, Interval(1, 1))
        return Interval(max(result.low, 0), result.high) if power % 2 == 0 else result

    def __floordiv__(self, other: Any) -> "Interval":
        other = interval(other)
        if other.low <= 0 <= other.high:  # XLA's quotient by 0 is -1, floored -2
            most = max(abs(self.low), abs(self.high))
            return Interval(min(-most, -2), most)
        return _at_corners(_quotient, self, other)

    def __rfloordiv__(self, other: Any) -> "Interval":
        return interval(other) // self

    def __mod__(self, other: Any) -> "Interval":
        other = interval(other)
        ends = self.low, self.high, other.low, other.high
        is_point = self.low == self.high and other.low == other.high != 0
        if is_point and not any(map(math.isinf, ends)):
            return Interval(self.low % other.low, self.low % other.low)
        if other.low <= 0:  # XLA's remainder by 0 is the dividend
            low, high = min(other.low, self.low, 0), max(other.high, self.high, 0)
            return Interval(low, high)
        if self.low >= 0 and self.high < other.low:
            return self
        return Interval(0, other.high - 1)

    def __rmod__(self, other: Any) -> "Interval":
        return interval(other) % self


def interval(x: Any) -> Interval:
    """An interval, or the one of a single number."""
    return x if isinstance(x, Interval) else Interval(x, x)


def _at_corners(f: Callable[[Any, Any], Any], a: Any, b: Any) -> Interval:
    """The range of an operation that is monotone in each operand."""
    values = [f(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return Interval(min(values), max(values))


def _product(a: Any, b: Any) -> Any:
    return 0 if a == 0 or b == 0 else a * b  # none of infinitely many is 0


def _quotient(a: Any, b: Any) -> Any:
    if math.isinf(b):
        return 0 if a == 0 or (a > 0) == (b > 0) else -1
    return a * math.copysign(1, b) if math.isinf(a) else a // b


def _extreme(choose: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Interval]:
    def apply(a: Any, b: Any) -> Interval:
        a, b = interval(a), interval(b)
        return Interval(choose(a.low, b.low), choose(a.high, b.high))

    return apply


INTERVALS = {"max": _extreme(max), "min": _extreme(min)}


@functools.total_ordering
class Magnitude:
    """What neither an integer nor any step on the way to it exceeds."""

    __slots__ = ("most",)

    def __init__(self, most: Any):
        self.most = most

    def __add__(self, other: Any) -> "Magnitude":
        return Magnitude(self.most + magnitude_of(other).most)

    __radd__ = __sub__ = __rsub__ = __add__

    def __mul__(self, other: Any) -> "Magnitude":
        return Magnitude(max(self.most, 1) * max(magnitude_of(other).most, 1))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> "Magnitude":
        return max(self, magnitude_of(other))

    __rfloordiv__ = __mod__ = __rmod__ = __floordiv__

    def __pow__(self, power: int) -> "Magnitude":
        return Magnitude(max(self.most, 1) ** power)

    def __neg__(self) -> "Magnitude":
        return self

    def __eq__(self, other: Any) -> bool:
        return self.most == magnitude_of(other).most

    def __lt__(self, other: Any) -> bool:
        return self.most < magnitude_of(other).most


def magnitude_of(x: Any) -> Magnitude:
    """A magnitude, or that of a number."""
    return x if isinstance(x, Magnitude) else Magnitude(abs(x))
