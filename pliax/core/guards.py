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
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

from ._jax import (
    asks_whether_windows_fit,
    may_call_equal_sizes_different,
    may_call_nothing_something,
)
from .callers import (
    compares_for_the_user,
    function_of_jax,
    hashes_harmlessly,
    is_inside,
)
from .collapse import Collapses, holds
from .conditions import Condition, conjuncts, names_of, opposite, proven, remaining
from .config import guards_log
from .constraints import FUNCTIONS
from .decisions import Decision, comparison_key, key_of
from .dims import Size
from .float_formulas import COMPARISONS
from .known_sizes import KnownSizes
from .other_traces import UnknownIntegerError, are_of_two_traces, stray, value_of
from .provenance import Place, user_place
from .size_expressions import code, divided, evaluate, is_remainder
from .size_values import SizeValues
from .symbols import Symbol


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

    @property
    def names(self) -> frozenset[str]:
        """The named sizes it is about."""
        return frozenset(code(self.condition).co_names).difference(FUNCTIONS)

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.condition}  # {self.place}{reason}"


_DECIDE = (
    "Decide for all sizes with px.guard_or_false(…) or px.guard_or_true(…), or state "
    "what holds with px.check(…)."
)
_STATE_BEFORE = (
    "State before this line what holds, px.check(y.shape[0] > 1, …) for example: what "
    "follows from it JAX is told."
)


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
        self.known = KnownSizes(symbols, constraints, self)
        self.values = SizeValues(self)
        self.collapses = Collapses(self.known, owner)
        self.unify = unify or split
        self.split = split
        self.is_closed = False
        self.owner = owner
        self.guards: dict[str, Guard] = {}
        self.decisions: dict[Hashable, Decision] = {}
        self.counted: dict[Any, Any] = {}  # what sizes born from data were counted of

    def close(self) -> None:
        """Ends the trace: no later question is decided by the sizes of one call."""
        self.unify = self.split = False
        self.is_closed = True
        self.counted.clear()
        self.known.forget_hints()

    def open_again(self) -> None:
        """Before more is traced with the same sizes: a derivative of the program."""
        self.is_closed = False

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
        answer = self.known.proves(a, relation, b)
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
        hints = self.known.hints
        return self.split or evaluate(a, hints) == evaluate(b, hints)

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
            values = {"max": max, "min": min, **self.known.hints}
            answer = bool(eval(code(str(decided)), {"__builtins__": {}}, values))
            found = decided if answer else opposite(decided)
            place = user_place(frame)
            self.guard(found, place, may_collapse=may_collapse)
            if is_inside(frame) and not may_collapse:  # no branch of the user's
                self.collapses.refuse_multiples(found, place)
        self.record(condition, answer, frame, decided)
        return answer

    def require(self, condition: Condition, place: Place) -> bool:
        """Whether what an equation of the trace relies on holds; a guard if it may not.

        What only the device knows is taken for true.
        """
        answer = proven(condition)
        if answer is None and self.has_hints(condition):
            values = {"max": max, "min": min, **self.known.hints}
            answer = bool(eval(code(str(condition)), {"__builtins__": {}}, values))
            if answer:
                self.guard(condition, place)
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
        return names_of(condition) <= self.known.hints.keys()

    def has_values(self, condition: Condition) -> bool:
        """Whether these values are those of a call, and no stand-ins for them."""
        symbols = self.known.symbols
        are_known = (not symbols[name].is_traced for name in names_of(condition))
        return self.has_hints(condition) and all(are_known)

    def _owns(self, x: Any) -> bool:
        return not isinstance(x, Size) or x.assumptions is self

    def _require_hints(self, condition: Condition, frame: FrameType) -> None:
        self.values.refuse_afterwards(condition, frame)
        if names_of(condition) - self.known.hints.keys():
            asking = function_of_jax(frame)
            who = f"JAX's {asking}" if asking else "the program"
            raise UnknownIntegerError(
                f"{self.owner}: {who} branches on {condition}, but "
                f"{self.unknown(names_of(condition))}.\n"
                f"  at {user_place(frame)}\n"
                f"{_STATE_BEFORE if asking else _DECIDE}"
            )

    def unknown(self, names: frozenset[str]) -> str:
        """Why some named sizes have no values, in words."""
        name = min(names - self.known.hints.keys())
        if self.is_closed:
            return f"the trace that {name} belongs to is over"
        return f"only the device knows {name} ({self.known.symbols[name].origin})"

    def guard(
        self,
        condition: Condition,
        place: Place,
        reason: str = "",
        may_collapse: bool = False,
    ) -> None:
        """Takes a condition for true, and the trace for no other sizes."""
        self._learn(condition, place, reason, may_collapse)
        if not may_collapse:
            self.collapses.refuse_one_value(condition, place)
        text = str(condition)
        if text not in self.guards:
            self.guards[text] = Guard(text, place, reason)
            guards_log.debug("%s: %s", self.owner, self.guards[text])

    def learn(self, condition: Condition, place: Place) -> None:
        """Takes a condition for true from now on; no guard is made."""
        self.known.facts.append(condition)
        self._learn(condition, place)

    def _learn(
        self,
        condition: Condition,
        place: Place,
        reason: str = "",
        may_collapse: bool = False,
    ) -> None:
        for part in conjuncts(condition):
            self.known.learn(part)
            a, b = part.parts
            if part.operation == "==" and not may_collapse:
                self.collapses.refuse(a, b, place, reason)


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
