"""Whether conditions leave a size a single value.

A range is halved while intervals prove that one half satisfies no condition; what is
left is tried value by value.
"""

from collections.abc import Sequence

from .conditions import Condition
from .dims import bounds, evaluate


_TRIED = 64  # values that are tried one by one


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
