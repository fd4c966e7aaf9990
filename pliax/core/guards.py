"""What is assumed about named sizes, who asked, and where.

    Assumptions : questions about sizes -> answers, and guards under which they hold

A question that follows from what is known (every size is at least 1, the user's
constraints, earlier answers) is answered without a trace. Any other is answered for
the sizes at hand (the hints), and the answer is recorded as a `Guard`: the traced
program is right for all sizes that give the same answers.

JAX asks much: whether a size is 1, whether two shapes are one. It is written to be
right for symbolic dimensions which it calls different unless they are the same
expression. So its `==` is answered that way and leaves no guard; if a trace then fails
because two sizes that agree would have had to be equal, it is repeated with
`unify=True`, where JAX's `==` is answered by the hints as well. With `split=True` it is
answered by the hints either way, which tells all sizes apart that JAX does.

Where JAX computes something else for equal sizes, its symbolic dimensions are wrong.
So the hints answer, under a guard, for remainders (`jnp.fft.rfftfreq` tells odd from
even) and wherever JAX's library asks (`jnp.array_equal`), but for a few functions that
are known to be right either way.

Each answer goes on record as a `Decision` (`decisions.py`).
"""

import dataclasses
import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import jax
import numpy as np

from ._jax import (
    asks_whether_windows_fit,
    extreme_of_dimensions,
    may_call_equal_sizes_different,
    may_call_nothing_something,
)
from .call_sites import is_calling
from .callers import asks_if_all_are_equal, hashes_harmlessly
from .collapse import (
    ConstraintViolationError as ConstraintViolationError,
    Symbol as Symbol,
    fix_of,
    holds,
    in_words,
    is_collapse,
    only_value,
    violation,
)
from .conditions import Condition, opposite, proven, remaining
from .config import dynamic_log, guards_log
from .decisions import Decision, comparison_key, key_of
from .dims import (
    LARGEST,
    Size,
    asker,
    bounds,
    code,
    compares_for_the_user,
    divided,
    evaluate,
    is_inside,
    is_quotient,
    is_remainder,
    larger,
    smaller,
    substitute,
    variables,
)
from .float_formulas import COMPARISONS
from .other_traces import (
    UnknownIntegerError,
    UnknownSizeError as UnknownSizeError,
    are_of_two_traces,
    is_for_the_user,
    stray,
    value_of,
)
from .provenance import Place, user_place


@dataclasses.dataclass(frozen=True)
class Guard:
    """A condition on sizes under which a trace may be used.

    Attributes:
        condition: Python over the named sizes, "t <= 4096".
        place: The line of the user's code that asked.
        reason: Why it was asked.
    """

    condition: str
    place: Place
    reason: str = ""

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether the condition is true of these sizes."""
        return holds(self.condition, sizes)

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.condition}  # {self.place}{reason}"


class Assumptions:
    """What one trace assumes about its named sizes.

    Args:
        symbols: The named sizes.
        constraints: What else is known, in `jax.export`'s notation: "t <= 4096".
        unify: Whether JAX's own `==` is True, under a guard, where the hints agree.
        split: Whether it is also False under a guard where they do not.
        owner: How errors name the function.
    """

    def __init__(
        self,
        symbols: Iterable[Symbol],
        constraints: Sequence[str] = (),
        *,
        unify: bool = False,
        split: bool = False,
        owner: str = "px.compile",
    ):
        self.symbols = {symbol.name: symbol for symbol in symbols}
        self.constraints = tuple(constraints)
        self.unify = unify or split
        self.split = split
        self.is_closed = False
        self.violation: ConstraintViolationError | None = None  # JAX may swallow it
        self.owner = owner
        self.guards: dict[str, Guard] = {}
        self.decisions: dict[Hashable, Decision] = {}
        self.equalities: list[tuple[Any, Any]] = []
        self.collapsed: list[str] = []  # weak sizes that became constants, in words
        self.multiples: dict[str, int] = {}  # by what each named size is divided
        for name, divisor in re.findall(_IS_MULTIPLE, "\n".join(constraints), re.M):
            self._learn_divisor(name, int(divisor))
        self._scope = jax.export.SymbolicScope((*_ranges(self.symbols), *constraints))
        self.ranges = self.declared_ranges
        self.unbacked: dict[str, Any] = {}  # sizes born from data, and their bounds
        self.counted: dict[Any, Any] = {}  # and what they were counted of
        self.facts: list[Condition] = []  # what is known of them without a guard
        self._sizes: dict[Any, Any] = {}
        self._known: dict[tuple[str, Any], bool] = {}
        self._guarded: list[Condition] = []  # the equalities about one size

    def close(self) -> None:
        """Ends the trace: no later question is decided by the sizes of one call."""
        self.unify = self.split = False
        self.is_closed = True
        self.counted.clear()
        self.symbols = {
            name: dataclasses.replace(symbol, hint=None)
            for name, symbol in self.symbols.items()
        }

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
            made = self._sizes[expression] = Size(expression, self)
        return made

    def extreme(self, kind: str, a: Any, b: Any) -> Any:
        """The "max" or "min" of two sizes, as a size."""
        if are_of_two_traces(a, b):
            a, b = self.operands(a, b, asker())
            return (larger if kind == "max" else smaller)(a, b)
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

    @property
    def declared_ranges(self) -> dict[str, tuple[int, int]]:
        """The values each named size may have, before anything was learned."""
        known = self.symbols.values()
        return {s.name: (s.low, s.high or LARGEST) for s in known}

    def range_of(self, size: Size) -> tuple[Any, Any]:
        """An interval that holds every value of a size, both ends inclusive."""
        return bounds(size, self.ranges)

    # --- questions --------------------------------------------------------------------

    def compare(self, a: Any, relation: str, b: Any, frame: FrameType) -> Any:
        """A comparison of sizes, asked from a frame: its truth or a condition.

        JAX's own code gets a truth value at once, everybody else when they need one.
        """
        if not self._owns(a) or not self._owns(b):
            return _compared_across(a, relation, b, frame)
        a = _with_positive_divisor(a, b)
        is_from_jax = is_inside(frame)
        before = self.decisions.get(comparison_key(a, relation, b, is_from_jax))
        if before is not None:
            return before.answer
        answer = self.proves(a, relation, b)
        condition = Condition(relation, (a, b), self)
        if answer is not None:
            self.record(condition, answer, frame)
            return answer
        if not is_from_jax:
            return condition
        if relation in ("==", "!="):
            is_about_nothing = b == 0 and not self.has_hints(condition)
            if is_about_nothing and may_call_nothing_something(frame):
                return relation == "!="
            if self._must_know(a, b, frame):
                return self.decide(condition, frame, may_collapse=True)
            if not self._is_to_decide(a, b):
                return relation == "!="
        if asks_whether_windows_fit(frame) and not self.has_hints(condition):
            return relation == ">="  # of too small an array nothing is read or written
        return self.decide(condition, frame)

    def refuse_zero(self, divisor: Size, frame: FrameType) -> None:
        """Raises where a program divides by a size that is 0 here; else a guard."""
        asked = self.compare(divisor, "==", 0, frame)
        if isinstance(asked, Condition):  # what only the device knows is taken for > 0
            is_zero = self.has_hints(asked) and self.decide(
                asked, frame, may_collapse=True
            )
        else:
            is_zero = asked
        if is_zero:
            raise ZeroDivisionError("integer division or modulo by zero")

    def is_divided(self, size: Size, divisor: int, frame: FrameType) -> bool:
        """Whether an integer divides a size: as is known, or JAX asks under a guard."""
        condition = Condition("==", (size % divisor, 0), self)
        answer = proven(condition)
        if answer is None and is_inside(frame) and self.has_hints(condition):
            answer = self.decide(condition, frame)
        return answer is True

    def _must_know(self, a: Any, b: Any, frame: FrameType) -> bool:
        """Whether JAX goes on otherwise where two sizes are equal, and is right to."""
        is_about_parity = is_remainder(a) or is_remainder(b)
        goes_on = is_about_parity or not may_call_equal_sizes_different(frame)
        goes_on = goes_on or compares_for_the_user(frame)
        return goes_on and not self.is_closed

    def _is_to_decide(self, a: Any, b: Any) -> bool:
        """Whether JAX may be told what two sizes are here: equal, or not."""
        if not self.unify or not self.has_hints(Condition("==", (a, b), self)):
            return False
        return self.split or evaluate(a, self.hints) == evaluate(b, self.hints)

    def proves(self, a: Any, relation: str, b: Any) -> bool | None:
        """The answer where it follows from what is known; no guard is made."""
        key, positive = self._question(a, relation, b)
        answer = self._is_zero(key[1]) if key[0] == "==" else self._at_least(key[1])
        return None if answer is None else answer == positive

    def decide(
        self, condition: Condition, frame: FrameType, *, may_collapse: bool = False
    ) -> bool:
        """The truth of a condition for the sizes at hand, which becomes a guard.

        Args:
            condition: the question.
            frame: who asks.
            may_collapse: whether the trace may be for one value of a declared size,
                as another trace will be for all others.
        """
        answer, decided = proven(condition), None
        if answer is None:
            decided = remaining(condition)
            self._require_hints(decided, frame)
            values = {"max": max, "min": min, **self.hints}
            answer = bool(eval(code(str(decided)), {"__builtins__": {}}, values))
            found = decided if answer else opposite(decided)
            place = user_place(frame)
            self._guard(found, place, "", may_collapse)
            if is_inside(frame) and not may_collapse:  # no branch of the user's
                self._refuse_multiples(found, place)
        self.record(condition, answer, frame, decided)
        return answer

    def require(self, condition: Condition, place: Place) -> bool:
        """Whether what an equation of the trace relies on holds; a guard if it may not.

        What only the device knows is taken for true.
        """
        answer = proven(condition)
        if answer is None and self.has_hints(condition):
            values = {"max": max, "min": min, **self.hints}
            answer = bool(eval(code(str(condition)), {"__builtins__": {}}, values))
            if answer:
                self._guard(condition, place, "")
                found = Decision(condition, answer, place, True, condition)
                self.decisions.setdefault(key_of(condition, True), found)
        return answer is not False

    def record(
        self,
        question: Condition,
        answer: bool,
        frame: FrameType,
        decided: Condition | None = None,
    ) -> None:
        """Keeps an answer that a frame goes on with, once for each question."""
        is_from_jax = is_inside(frame)
        key = key_of(question, is_from_jax)
        if key not in self.decisions:
            place = user_place(frame)
            found = Decision(question, answer, place, is_from_jax, decided)
            self.decisions[key] = found

    def has_hints(self, condition: Condition) -> bool:
        """Whether the sizes in a condition have values at hand."""
        return names_of(condition) <= self.hints.keys()

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
        if not self.multiples or not any(x in str(size) for x in ("//", "%")):
            return None
        scaled = {n: k * self.parse(n)[0] for n, k in self.multiples.items()}
        form = substitute(size, scaled)
        return form == 0 if isinstance(form, int) else None

    def _is_never_zero(self, difference: Any) -> bool:
        return self._compare(difference, 1) is True or (
            self._compare(-difference, 1) is True
        )

    def as_integer(self, size: Size, use: str, frame: FrameType) -> int:
        """The value of a size that the program needs as a Python integer."""
        if isinstance(value := self.value_afterwards(size, use, frame), int):
            return value
        is_unknown = bool(variables(size) - self.hints.keys())
        if is_inside(frame) and (self.is_closed or not is_unknown):
            raise TypeError(f"the size {size} has no value while it is traced")
        if is_unknown:
            raise UnknownIntegerError(
                f"{self.owner}: the program needs the value of {size} ({use}), but "
                f"{self._unknown(variables(size))}.\n  at {user_place(frame)}\n"
                "Use it as an array, jnp.asarray(size), or as a size of arrays."
            )
        value = evaluate(size, self.hints)
        condition = Condition("==", (size, value), self)
        self._guard(condition, user_place(frame), f"used {use}")
        self.record(condition, True, frame, condition)
        return value

    def value_afterwards(self, size: Size, use: str, frame: FrameType) -> Any:
        """What the user gets of a size after its trace: its value, or an error."""
        if not self.is_closed or not is_for_the_user(frame):
            return size
        if isinstance(value := value_of(size), Size):
            raise stray(size, 0, use, frame)
        return value

    def refuse_afterwards(self, condition: Condition, frame: FrameType) -> None:
        """Raises where the user asks about sizes whose trace is over."""
        if self.is_closed and is_for_the_user(frame):
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
        condition = Condition("<=", (size, most), self)
        if self.proves(size, "<=", most) or not self.has_hints(condition):
            return
        if not self.decide(condition, frame):
            raise OverflowError(
                f"{base} ** {size} is too large for int32, in which sizes run"
            )

    def fits_in(self, size: Size, dtype: Any, frame: FrameType) -> None:
        """Raises where an integer type does not hold a size; else a guard.

        Of a size that only the device knows its bound is asked.
        """
        limits = np.iinfo(dtype)
        ends = (">=", max(limits.min, -LARGEST)), ("<=", min(limits.max, LARGEST))
        most = size
        while str(most) in self.unbacked:
            most = self.unbacked[str(most)]
        for relation, end in ends:
            if abs(end) == LARGEST or self.proves(size, relation, end):
                continue
            bounded = Condition(relation, (most, end), self)
            if self.has_hints(bounded) and self.decide(bounded, frame):
                continue
            if variables(size) - self.hints.keys():
                raise UnknownSizeError(
                    f"{self.owner}: the program needs {size} as {dtype}, but "
                    f"{self._unknown(variables(size))}.\n  at {user_place(frame)}\n"
                    f"Convert what it meets to int32, or state px.check({size} "
                    f"{relation} {end})."
                )
            raise OverflowError(f"the size {size} is out of bounds for {dtype}")

    def hashed(self, size: Size, frame: FrameType) -> int | None:
        """The value of a size that user code looks up among integers, else None."""
        if asks_if_all_are_equal(frame):
            return _OF_EACH_SIZE
        if is_inside(frame) or hashes_harmlessly(frame):
            return None
        use = "by hash, in a call" if is_calling(frame) else "by hash"
        return self.as_integer(size, use, frame)

    @property
    def solved(self) -> dict[str, Any]:
        """Named sizes that a guard fixes, or ties to others: what they equal."""
        found: dict[str, Any] = {}
        for a, b in self.equalities:
            difference = substitute(a, found) - substitute(b, found)
            names = sorted(variables(difference), key=self._precedence, reverse=True)
            name = next((n for n in names if _slope(difference, n)), "")
            if name:
                (itself,) = self.parse(name)
                value = itself - _slope(difference, name) * difference
                found = {n: substitute(x, {name: value}) for n, x in found.items()}
                found[name] = value
        return found

    def _precedence(self, name: str) -> tuple[int, str]:
        """Sizes born from data come after those that calls bring, in their order."""
        return [*self.unbacked].index(name) + 1 if name in self.unbacked else 0, name

    def _owns(self, x: Any) -> bool:
        return not isinstance(x, Size) or x.assumptions is self

    def _narrow(self, positive: Any) -> None:
        """Learns a bound of one named size from an expression that is at least 0."""
        size = self.size(positive)
        names = variables(size)
        slope = _slope(size, next(iter(names))) if len(names) == 1 else 0
        if slope:
            (name,) = names
            offset = evaluate(size, {name: 0})
            low, high = self.ranges[name]
            low = max(low, -offset) if slope > 0 else low
            high = min(high, offset) if slope < 0 else high
            self.ranges[name] = low, high

    def _require_hints(self, condition: Condition, frame: FrameType) -> None:
        self.refuse_afterwards(condition, frame)
        if names_of(condition) - self.hints.keys():
            raise UnknownIntegerError(
                f"{self.owner}: the program branches on {condition}, but "
                f"{self._unknown(names_of(condition))}.\n"
                f"  at {user_place(frame)}\n"
                "Decide for all sizes with px.guard_or_false(…) or "
                "px.guard_or_true(…), or state what holds with px.check(…)."
            )

    def _unknown(self, names: frozenset[str]) -> str:
        name = min(names - self.hints.keys())
        if self.is_closed:
            return f"the trace that {name} belongs to is over"
        return f"only the device knows {name} ({self.symbols[name].origin})"

    def _guard(
        self,
        condition: Condition,
        place: Place,
        reason: str,
        may_collapse: bool = False,
    ) -> None:
        for part in _conjuncts(condition):
            self._learn(part, place, may_collapse, reason)
        if not may_collapse:
            self._refuse_one_value(condition, place)
        text = str(condition)
        if text not in self.guards:
            self.guards[text] = Guard(text, place, reason)
            guards_log.debug("%s: %s", self.owner, self.guards[text])

    def learn(self, condition: Condition, place: Place) -> None:
        """Takes a condition for true from now on; no guard is made."""
        self.facts.append(condition)
        for part in _conjuncts(condition):
            self._learn(part, place)

    def _learn(
        self,
        condition: Condition,
        place: Place,
        may_collapse: bool = False,
        reason: str = "",
    ) -> None:
        """What follows from a comparison that holds."""
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
            if not may_collapse:
                self._refuse_collapse(a, b, place, reason)
            self.equalities.append((a, b))

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
        self.multiples[name] = math.lcm(self.multiples.get(name, 1), divisor)

    def _refuse_collapse(self, a: Any, b: Any, place: Place, reason: str = "") -> None:
        """A strong size that must equal a constant, or another size, is an error."""
        names = sorted(variables(a) | variables(b))
        if not is_collapse(a, b):
            return
        symbols = [self.symbols[name] for name in names]
        if symbols and all(symbol.is_strong for symbol in symbols):
            needs = f"{a} == {b} ({reason})" if reason else f"{a} == {b}"
            self._violate(symbols, needs, fix_of(a, b, symbols), place)
        self.collapsed.append(f"{in_words(a, b, symbols)}\n  at {place}")
        dynamic_log.debug("%s: %s", self.owner, self.collapsed[-1])

    def _refuse_multiples(self, condition: Condition, place: Place) -> None:
        """Neither may a strong size be a multiple of another, if it must be one."""
        for part in _conjuncts(condition):
            if part.operation == "==":
                a, b = part.parts
                multiple = self._without_quotient(a, b)
                if multiple != (a, b):
                    self._refuse_collapse(*multiple, place)

    def _without_quotient(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Of t // 2 == s, where 2 divides t, the sides of t == 2 * s."""
        for quotient, other in ((a, b), (b, a)):
            if is_quotient(quotient):
                dividend, divisor = divided(quotient)
                if self.proves(dividend, "==", divisor * (dividend // divisor)):
                    return dividend, divisor * other
        return a, b

    def _refuse_one_value(self, condition: Condition, place: Place) -> None:
        """Refuses equalities that together leave a strong size one value.

        Those of `x.reshape(2, -1)[0] + y` are about t % 2 and t // 2.
        """
        if len(names := names_of(condition)) != 1:
            return
        (name,) = names
        if condition.operation != "==":  # a branch may be for one size alone
            return
        conditions = [c for c in self._guarded if names_of(c) == names]
        self._guarded.append(condition)
        symbol, (low, high) = self.symbols[name], self.declared_ranges[name]
        if not conditions or not symbol.is_strong:
            return
        value = only_value([*conditions, condition], name, low, high)
        if value is not None and value not in (low, high):
            needs = " and ".join(map(str, (*conditions, condition)))
            self._violate([symbol], needs, f"{name} = {value}", place)

    def _violate(
        self, symbols: Sequence[Symbol], needs: str, fix: str, place: Place
    ) -> None:
        self.violation = violation(self.owner, symbols, needs, fix, place)
        raise self.violation


_IS_MULTIPLE = r"^mod\((\w+), (\d+)\) == 0$"

_OF_EACH_SIZE = 3  # equal hashes: a set compares its elements, under guards

# Each order as "larger - smaller >= 0", and whether that is to be true.
_AT_LEAST = {
    ">=": ("a", "b", True),
    "<": ("a", "b", False),
    "<=": ("b", "a", True),
    ">": ("b", "a", False),
}


def _compared_across(a: Any, relation: str, b: Any, frame: FrameType) -> Any:
    """A comparison of sizes of two traces, which only caches may ask for."""
    x, y = value_of(a), value_of(b)
    if not are_of_two_traces(x, y):
        return COMPARISONS[relation](x, y)
    is_of_caches = is_inside(frame) or hashes_harmlessly(frame)
    if is_of_caches and relation in ("==", "!="):
        return relation == "!="
    raise stray(x, y, f"in {a} {relation} {b}", frame)


def _with_positive_divisor(a: Any, b: Any) -> Any:
    """Of `t % -3`, which JAX asks in a reshape, `t % 3`: 0 for the same sizes."""
    if not isinstance(b, int) or b != 0 or not is_remainder(a):
        return a
    dividend, divisor = divided(a)
    is_negative = isinstance(divisor, int) and divisor < 0
    return dividend % -divisor if is_negative else a


def _conjuncts(condition: Condition) -> list[Condition]:
    """The comparisons that hold where the condition does."""
    if condition.operation == "or":
        return []
    if condition.operation != "and":
        return [condition]
    return [c for part in condition.parts for c in _conjuncts(part)]


def _sizes_in(condition: Condition) -> tuple[Any, Any]:
    """The two sides of the first comparison in a condition."""
    while condition.operation in ("and", "or"):
        condition = condition.parts[0]
    a, b = condition.parts
    return a, b


def names_of(condition: Condition) -> frozenset[str]:
    """The named sizes that a condition is about."""
    if condition.operation in ("and", "or"):
        return frozenset().union(*(names_of(part) for part in condition.parts))
    a, b = condition.parts
    return variables(a) | variables(b)


def _slope(size: Any, name: str) -> int:
    """1 or -1 if a size grows or falls with a name, whatever the others are; else 0."""
    others = sorted(variables(size) - {name})
    values = [dict.fromkeys(others, n) for n in (5, 11)]
    slopes = {
        evaluate(size, {**v, name: n + 1}) - evaluate(size, {**v, name: n})
        for v in values
        for n in (3, 8, 64)
    }
    has_steps = any(mark in str(size) for mark in ("//", "%", "max", "min", "**"))
    slope = slopes.pop()
    return slope if not slopes and not has_steps and slope in (1, -1) else 0


def _expression(x: Any) -> Any:
    return x.expression if isinstance(x, Size) else int(x)


def _ranges(symbols: Mapping[str, Symbol]) -> list[str]:
    """What jax.export does not assume by itself: bounds other than at least 1."""
    lows = [f"{s.name} >= {s.low}" for s in symbols.values() if s.low > 1]
    highs = [f"{s.name} <= {s.high}" for s in symbols.values() if s.high is not None]
    return lows + highs
