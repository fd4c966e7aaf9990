"""Sizes that a program fixes: whether conditions do, and what users are told.

A range is halved while intervals prove that one half satisfies no condition; what is
left is tried value by value.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .conditions import Condition
from .dims import Size, bounds, code, evaluate, variables
from .provenance import Place


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


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A named size.

    Attributes:
        name: as it appears in expressions, "t".
        hint: its value in the call that is traced; None if only the device knows it.
        origin: what it was read off, "x.shape[0]".
        is_strong: whether it must not become a constant.
        is_named: whether the user gave it its name.
        low: its smallest value.
        high: its largest value, or None.
    """

    name: str
    hint: int | None
    origin: str
    is_strong: bool = False
    is_named: bool = True
    low: int = 1
    high: int | None = None


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
