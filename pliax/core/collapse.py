"""Sizes that a program fixes: whether conditions do, and what users are told.

    a condition that holds  ->  nothing, a note (weak sizes), or an error (strong ones)

A range is halved while intervals prove that one half satisfies no condition; what is
left is tried value by value.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .conditions import Condition, conjuncts, names_of
from .config import dynamic_log
from .dims import Size
from .known_sizes import KnownSizes
from .provenance import Place
from .size_expressions import bounds, code, divided, evaluate, is_quotient, variables
from .symbols import Symbol


_TRIED = 64  # values that are tried one by one


class ConstraintViolationError(ValueError):
    """A size that was declared dynamic turned out to be fixed by the program.

    Attributes:
        name: the size.
        value: what it must be; None where it is tied to another.
    """

    def __init__(self, text: str, name: str = "", value: int | None = None):
        super().__init__(text)
        self.name, self.value = name, value


class Collapses:
    """The sizes of one trace that its program fixes, each to one value or to another.

    Args:
        known: what is known of the sizes.
        owner: how errors name the function.

    Attributes:
        violation: the last error, which JAX may have swallowed.
        notes: the weak sizes that became constants, in words.
    """

    def __init__(self, known: KnownSizes, owner: str):
        self._known = known
        self._owner = owner
        self.violation: ConstraintViolationError | None = None
        self.notes: list[str] = []
        self._guarded: list[Condition] = []  # the equalities about one size

    def refuse(self, a: Any, b: Any, place: Place, reason: str = "") -> None:
        """A strong size that must equal a constant, or another size, is an error."""
        names = sorted(variables(a) | variables(b))
        if not names or not is_collapse(a, b):
            return
        symbols = [self._known.symbols[name] for name in names]
        if all(symbol.is_strong for symbol in symbols):
            needs = f"{a} == {b} ({reason})" if reason else f"{a} == {b}"
            self._violate(symbols, needs, fix_of(a, b, symbols), place)
        self.notes.append(f"{in_words(a, b, symbols)}\n  at {place}")
        dynamic_log.debug("%s: %s", self._owner, self.notes[-1])

    def refuse_multiples(self, condition: Condition, place: Place) -> None:
        """Neither may a strong size be a multiple of another, if it must be one."""
        for part in conjuncts(condition):
            if part.operation == "==":
                a, b = part.parts
                multiple = self._without_quotient(a, b)
                if multiple != (a, b):
                    self.refuse(*multiple, place)

    def _without_quotient(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Of t // 2 == s, where 2 divides t, the sides of t == 2 * s."""
        for quotient, other in ((a, b), (b, a)):
            if is_quotient(quotient):
                dividend, divisor = divided(quotient)
                if self._known.proves(dividend, "==", divisor * (dividend // divisor)):
                    return dividend, divisor * other
        return a, b

    def refuse_one_value(self, condition: Condition, place: Place) -> None:
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
        symbol = self._known.symbols[name]
        low, high = self._known.declared_ranges[name]
        if not conditions or not symbol.is_strong:
            return
        value = only_value([*conditions, condition], name, low, high)
        if value is not None and value not in (low, high):
            needs = " and ".join(map(str, (*conditions, condition)))
            self._violate([symbol], needs, f"{name} = {value}", place)

    def _violate(
        self, symbols: Sequence[Symbol], needs: str, fix: str, place: Place
    ) -> None:
        self.violation = violation(self._owner, symbols, needs, fix, place)
        raise self.violation


def is_collapse(a: Any, b: Any) -> bool:
    """Whether a == b leaves one value for a size, or ties it to another's."""
    names = variables(a) | variables(b)
    difference = a - b
    text = str(getattr(difference, "expression", difference))
    is_linear = not any(mark in text for mark in ("(", "^"))
    products = [term for term in text.split() if sum(term.count(n) for n in names) > 1]
    return is_linear and not products and len(names) <= 2


def violation(
    owner: str, symbols: Sequence[Symbol], needs: str, fix: str, place: Place
) -> ConstraintViolationError:
    """What a strong size gets that the program fixes.

    Args:
        owner: how errors name the function.
        symbols: the sizes that are fixed, alone or to each other.
        needs: what the program needs, "t == 12".
        fix: what to declare, "t = 12".
        place: who needs it.
    """
    symbol = symbols[0]
    what = f"({symbol.origin} = {symbol.hint}) was declared dynamic"
    remedy = f'declare "{fix}"'
    if not symbol.is_named:
        what = f"({symbol.origin} = {symbol.hint}) was marked as dynamic"
        remedy = "mark it with px.maybe_dynamic or px.static"
    return ConstraintViolationError(
        f"{owner}: {symbol.name!r} {what}, but the program needs {needs}.\n"
        f"  at {place}\n"
        f"Suggested fix: {remedy}, or let the program work for any {symbol.name}.",
        symbol.name,
        symbol.hint if len(symbols) == 1 else None,
    )


def fix_of(a: Any, b: Any, symbols: Sequence[Symbol]) -> str:
    """What to declare where a == b: "t = 12", "a = b"."""
    if len(symbols) == 1:
        return f"{symbols[0].name} = {symbols[0].hint}"
    return f"{a} = {b}" if isinstance(a, Size) else f"{b} = {a}"


def multiple_of(condition: str) -> tuple[str, int] | None:
    """The name and the number that must divide it, if that is what a condition says.

    So `t == 2 * (t // 2)` and `(t + 1) // 2 == t // 2` do, as far as is tried.
    """
    names = set(code(condition).co_names) - {"max", "min"}
    if len(names) != 1:
        return None
    (name,) = names
    try:
        found = [n for n in range(1, _PROBED) if holds(condition, {name: n})]
    except ZeroDivisionError:
        return None
    step = found[0] if len(found) > 2 else 1
    is_multiple = step > 1 and found == [*range(step, _PROBED, step)]
    return (name, step) if is_multiple else None


_PROBED = 512


def holds(condition: str, sizes: Mapping[str, int]) -> bool:
    """Whether a condition is true of sizes."""
    return bool(eval(code(condition), {"max": max, "min": min}, dict(sizes)))


def multiple_note(owner: str, condition: str, place: Place) -> str:
    """What to tell where a size fails that is no multiple; "" for other conditions."""
    found = multiple_of(condition)
    if found is None:
        return ""
    name, step = found
    fix = f"{step}*_{name}"
    return (
        f"{owner} served sizes before for which {condition}, as the program asks\n"
        f"  at {place}\n"
        f'Suggested fix: declare "{name} = {fix}": write {fix} for {name} in dims, or '
        f"Dim({name!r}, multiple_of={step})."
    )


def in_words(a: Any, b: Any, symbols: Sequence[Symbol]) -> str:
    """That a == b fixed a size which may give way."""
    weak = next(symbol for symbol in symbols if not symbol.is_strong)
    what = "a constant" if len(symbols) == 1 else "tied to another"
    value = f" = {weak.hint}" if ".shape[" in weak.origin else ""  # not n + 1
    origin = f"{weak.name} ({weak.origin}{value})"
    return f"{origin} became {what}: the program needs {a} == {b}"


def only_value(
    conditions: Sequence[Condition], name: str, low: int, high: int
) -> int | None:
    """The one value of a named size for which conditions hold, if there is just one.

    Args:
        conditions: about this size alone.
        name: what it is called.
        low: its smallest value.
        high: its largest.
    """

    def excludes(low: int, high: int) -> bool:
        return any(_fails(c, {name: (low, high)}) for c in conditions)

    while high - low >= _TRIED:
        middle = (low + high) // 2
        if excludes(middle + 1, high):
            high = middle
        elif excludes(low, middle):
            low = middle + 1
        else:
            return None
    values = (n for n in range(low, high + 1) if not excludes(n, n))
    first = next(values, None)
    return first if next(values, None) is None else None


def _fails(condition: Condition, ranges: dict[str, tuple[int, int]]) -> bool:
    """Whether a condition is false for all sizes in some ranges, as far as proven."""
    if condition.operation in ("and", "or"):
        join = any if condition.operation == "and" else all
        return join(_fails(part, ranges) for part in condition.parts)
    a, b = condition.parts
    is_point = all(low == high for low, high in ranges.values())
    if is_point:
        values = {name: low for name, (low, _) in ranges.items()}
        a, b = evaluate(a, values), evaluate(b, values)
    (a_low, a_high), (b_low, b_high) = bounds(a, ranges), bounds(b, ranges)
    return {
        "==": a_high < b_low or b_high < a_low,
        "!=": a_low == a_high == b_low == b_high,
        "<=": a_low > b_high,
        "<": a_low >= b_high,
        ">=": a_high < b_low,
        ">": a_high <= b_low,
    }[condition.operation]
