"""Named sizes: what is known of them, and what follows from that.

    ranges, the user's constraints, comparisons that hold  ->  True, False or unknown

Nobody asks here and nothing is decided by the sizes of one call: `guards.py` does that
where this room does not know. It proves by intervals (`intervals.py`), by the normal
form of `jax.export`'s dimensions and their own bounds, by divisors, and by what was
learned before.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from ._jax import extreme_of_dimensions
from .conditions import Condition
from .dims import LARGEST, Size
from .size_expressions import (
    bounds,
    divided,
    evaluate,
    is_remainder,
    modulo,
    slope_of,
    substitute,
    variables,
)
from .symbols import Symbol, scope_of


class KnownSizes:
    """What is known of the named sizes of one trace.

    Args:
        symbols: The named sizes.
        constraints: What else is known, in `jax.export`'s notation: "t <= 4096".
        assumptions: Whom the sizes that are made here ask what they do not know.
    """

    def __init__(
        self, symbols: Iterable[Symbol], constraints: Sequence[str], assumptions: Any
    ):
        self.symbols = {symbol.name: symbol for symbol in symbols}
        self.constraints = tuple(constraints)
        self.assumptions = assumptions
        self.ranges = self.declared_ranges
        self.unbacked: dict[str, Any] = {}  # sizes born from data, and their bounds
        self.facts: list[Condition] = []  # what was stated, and needs no guard
        self.equalities: list[tuple[Any, Any]] = []
        self._divisors: dict[str, int] = {}  # of which named sizes are multiples
        for name, divisor in re.findall(_IS_MULTIPLE, "\n".join(constraints), re.M):
            self._learn_divisor(name, int(divisor))
        self._scope = scope_of(self.symbols.values(), constraints)
        self._sizes: dict[Any, Any] = {}
        self._known: dict[tuple[str, Any], bool] = {}

    # --- making sizes -----------------------------------------------------------------

    def parse(self, text: str) -> tuple[Any, ...]:
        """The sizes of a shape in `jax.export`'s notation, "b, 2*t, 4"."""
        found = jax.export.symbolic_shape(text, scope=self._scope)
        return tuple(self.size(x) for x in found)

    def size(self, expression: Any) -> Any:
        """A symbolic dimension of this scope as a `Size`; an integer as itself."""
        if isinstance(expression, int):
            return expression
        made = self._sizes.get(expression)
        if made is None:
            made = self._sizes[expression] = Size(expression, self.assumptions)
        return made

    def extreme(self, kind: str, a: Any, b: Any) -> Any:
        """The "max" or "min" of two sizes, as a size."""
        is_first = self.proves(a, ">=" if kind == "max" else "<=", b)
        is_second = self.proves(b, ">=" if kind == "max" else "<=", a)
        if is_first or is_second:
            return a if is_first else b
        if self._may_be_empty(a) or self._may_be_empty(b):
            made = extreme_of_dimensions(kind, _expression(a), _expression(b))
        else:
            a, b = (a, b) if isinstance(a, Size) else (b, a)
            made = getattr(a.expression, kind)(_expression(b))
        return self.size(made)

    def same_form(self, size: Any) -> Any:
        """A size in which extremes are written as max(…, 0), where it may be 0.

        Equal sizes such as u - min(u, 1) and max(u - 1, 0) then have one form.
        """
        if not self._may_be_empty(size):
            return size

        def larger(a: Any, b: Any) -> Any:
            difference = a - b
            if str(difference).startswith("-"):
                a, b, difference = b, a, -difference
            return b + self.extreme("max", difference, 0)

        extremes = {"max": larger, "min": lambda a, b: a + b - larger(a, b)}
        own = {name: self.parse(name)[0] for name in variables(size)}
        return evaluate(size, own, extremes)

    @property
    def hints(self) -> dict[str, int]:
        """The value of each named size in the call that is traced."""
        known = self.symbols.values()
        return {s.name: s.hint for s in known if s.hint is not None}

    def forget_hints(self) -> None:
        """Ends the call that is traced: no named size has a value any more."""
        self.symbols = {
            name: dataclasses.replace(symbol, hint=None)
            for name, symbol in self.symbols.items()
        }

    @property
    def declared_ranges(self) -> dict[str, tuple[int, int]]:
        """The values each named size may have, before anything was learned."""
        known = self.symbols.values()
        return {s.name: (s.low, s.high or LARGEST) for s in known}

    def range_of(self, size: Size) -> tuple[Any, Any]:
        """An interval that holds every value of a size, both ends inclusive."""
        return bounds(size, self.ranges)

    # --- what follows -----------------------------------------------------------------

    def proves(self, a: Any, relation: str, b: Any) -> bool | None:
        """The answer where it follows from what is known; no guard is made."""
        key, positive = self._question(a, relation, b)
        answer = self._is_zero(key[1]) if key[0] == "==" else self._at_least(key[1])
        return None if answer is None else answer == positive

    def _question(self, a: Any, relation: str, b: Any) -> tuple[tuple[str, Any], bool]:
        """A comparison as "difference == 0" or "difference >= 0", or its opposite."""
        if relation in ("==", "!="):
            return ("==", _expression(a) - _expression(b)), relation == "=="
        larger, smaller, positive = _AT_LEAST[relation]
        sides = {"a": _expression(a), "b": _expression(b)}
        difference = sides[larger] - sides[smaller]
        if str(difference).startswith("-"):  # d < 0 is -d - 1 >= 0: one form of both
            difference, positive = -difference - 1, not positive
        return (">=", difference), positive

    def _at_least(self, difference: Any) -> bool | None:
        if isinstance(difference, int):
            return difference >= 0
        known = self._known.get((">=", difference))
        if known is None and self._known.get((">=", difference - 1)):
            known = True  # of u < t, that u <= t
        if known is None and self._known.get((">=", difference + 1)) is False:
            known = False
        if known is None:
            known = self._compare(difference, 0)
            if known is not None:
                self._known[">=", difference] = known
        return known

    def _compare(self, expression: Any, least: int) -> bool | None:
        """Whether an expression is at least a number, for all sizes there are."""
        size = self.size(expression)
        low, high = bounds(size, self.ranges)
        if low >= least or high < least:
            return low >= least
        if empty := self._may_be_empty(size):  # JAX takes every name for at least 1
            shifted = substitute(size, {n: self._one_more(n) - 1 for n in empty})
            expression = _expression(shifted)
        try:
            return bool(expression >= least)
        except jax.errors.InconclusiveDimensionOperation:
            return None

    def _may_be_empty(self, size: Any) -> list[str]:
        """The named sizes in a size that may be 0."""
        empty = {name for name, (low, _) in self.ranges.items() if low < 1}
        return sorted(empty & variables(size)) if empty else []

    def _one_more(self, name: str) -> Any:
        """A name of at least 1 for another's value plus 1."""
        low, high = self.ranges[name]
        self.ranges[f"{name}_plus_1"] = low + 1, high + 1
        return self.parse(f"{name}_plus_1")[0]

    def _is_zero(self, difference: Any) -> bool | None:
        if isinstance(difference, int):
            return difference == 0
        known = self._known.get(("==", difference))
        if known is None:
            form = self.same_form(self.size(difference))
            known = form == 0 if isinstance(form, int) else None
        if known is None:
            known = self._is_zero_by_facts(self.size(difference))
        if known is None and self._is_never_zero(difference):
            known = self._known["==", difference] = False
        return known

    def _is_zero_by_facts(self, size: Any) -> bool | None:
        """What ranges and divisors say: of t % 8 == 0 that t % 4 == 0 as well."""
        if bounds(size, self.ranges) == (0, 0):
            return True
        if is_remainder(size):
            dividend, divisor = divided(size)
            by = divisor if isinstance(divisor, int) else 0
            rest = modulo(dividend, by) % by if by else size
            if isinstance(rest, int):  # of n + (-n % 4), divided by 4
                if rest == 0:
                    self._learn_quotient(size, 0)
                return rest == 0
        if not self._divisors or not any(x in str(size) for x in ("//", "%")):
            return None
        scaled = {n: k * self.parse(n)[0] for n, k in self._divisors.items()}
        form = substitute(size, scaled)
        return form == 0 if isinstance(form, int) else None

    def _is_never_zero(self, difference: Any) -> bool:
        ends = self._at_least(difference - 1), self._at_least(-difference - 1)
        return True in ends

    # --- what is learned --------------------------------------------------------------

    def learn(self, condition: Condition) -> None:
        """Takes a comparison for true, with what follows from it."""
        a, b = condition.parts
        key, positive = self._question(a, condition.operation, b)
        self._known[key] = positive
        if key[0] == ">=":
            self._narrow(key[1] if positive else -key[1] - 1)
        elif positive:
            self._narrow(key[1])
            self._narrow(-key[1])
            self._learn_quotient(a, b)
        if condition.operation == "==":
            self.equalities.append((a, b))

    def _narrow(self, positive: Any) -> None:
        """Learns a bound of one named size from an expression that is at least 0."""
        size = self.size(positive)
        names = variables(size)
        slope = slope_of(size, next(iter(names))) if len(names) == 1 else 0
        if slope:
            (name,) = names
            offset = evaluate(size, {name: 0})
            low, high = self.ranges[name]
            low = max(low, -offset) if slope > 0 else low
            high = min(high, offset) if slope < 0 else high
            self.ranges[name] = low, high

    def _learn_quotient(self, a: Any, b: Any) -> None:
        """Of t % 8 == 0, that 8 * (t // 8) is t."""
        if is_remainder(a) and isinstance(b, int) and b == 0:
            dividend, divisor = divided(a)
            if str(dividend) in self.symbols and isinstance(divisor, int):
                self._learn_divisor(str(dividend), divisor)
            rest = _expression(dividend - divisor * (dividend // divisor))
            self._known["==", rest] = self._known["==", -rest] = True

    def _learn_divisor(self, name: str, divisor: int) -> None:
        """That a named size is a multiple of a number."""
        self._divisors[name] = math.lcm(self._divisors.get(name, 1), divisor)

    @property
    def solved(self) -> dict[str, Any]:
        """Named sizes that a guard fixes, or ties to others: what they equal."""
        found: dict[str, Any] = {}
        for a, b in self.equalities:
            difference = substitute(a, found) - substitute(b, found)
            names = sorted(variables(difference), key=self._precedence, reverse=True)
            name = next((n for n in names if slope_of(difference, n)), "")
            if name:
                (itself,) = self.parse(name)
                value = itself - slope_of(difference, name) * difference
                found = {n: substitute(x, {name: value}) for n, x in found.items()}
                found[name] = value
        return found

    def _precedence(self, name: str) -> tuple[int, str]:
        """Sizes born from data come after those that calls bring, in their order."""
        return [*self.unbacked].index(name) + 1 if name in self.unbacked else 0, name


_IS_MULTIPLE = r"^mod\((\w+), (\d+)\) == 0$"

# Each order as "larger - smaller >= 0", and whether that is to be true.
_AT_LEAST = {
    ">=": ("a", "b", True),
    "<": ("a", "b", False),
    "<=": ("b", "a", True),
    ">": ("b", "a", False),
}


def _expression(x: Any) -> Any:
    return x.expression if isinstance(x, Size) else int(x)
