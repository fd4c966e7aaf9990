"""What conditions on sizes say before any call: bounds, and that none satisfies them.

    ("t >= 8", "2*t <= 30")  ->  t from 8 to 15
    ("t <= 4", "t >= 8")     ->  a contradiction

Two searches find contradictions, and claim none that is not there: the conditions on
one size are tried on all sizes that could satisfy them, and linear ones on several
sizes are combined until no size is left in them (Fourier-Motzkin elimination).

References:
    A. Schrijver, Theory of Linear and Integer Programming, 1986, section 12.2.
"""

import math
import re
from collections.abc import Iterable, Sequence

from pliax.core.constraints import FUNCTIONS
from pliax.core.size_expressions import evaluate_text

from ._shape_specs import names_in


# A linear expression of sizes: the factor of each name, and of "" what is added.
_Line = dict[str, int]
_FAR = 2**31 - 1  # where no product of sizes is on the line of its first values
_MOST_TRIED = 4096  # sizes, and inequalities: some 20 ms of decoration
_PERIODIC = re.compile(r"mod\([^()]*, (\d+)\)")


def bounds_of(
    name: str, conditions: Iterable[str], *, least: int = 1
) -> tuple[int, int | None]:
    """What "t >= 16" and "2*t <= 4096" say of one size."""
    low, high = least, None
    for text in conditions:
        lines = _lines(text) if names_in(text) == {name} else []
        for line in lines:  # line[name] * n + line[""] <= 0
            slope, rest = line[name], line[""]
            if slope > 0:
                most = -rest // slope
                high = most if high is None else min(high, most)
            if slope < 0:
                low = max(low, -(rest // slope))
    return low, high


def contradiction(conditions: Sequence[str]) -> tuple[str, ...]:
    """Those of the conditions that no sizes satisfy at once; none if some may.

    Sizes are at least 0 here.
    """
    found = list(conditions)
    if not _is_contradictory(found):
        return ()
    for text in conditions:
        fewer = [c for c in found if c != text]
        if _is_contradictory(fewer):
            found = fewer
    return tuple(found)


def _is_contradictory(conditions: Sequence[str]) -> bool:
    names = sorted({name for text in conditions for name in names_in(text)})
    if _cancel_out(names, conditions):
        return True
    return any(
        _has_no_size(name, [c for c in conditions if names_in(c) <= {name}])
        for name in names
    )


def _cancel_out(names: Sequence[str], conditions: Sequence[str]) -> bool:
    """Whether sums of linear conditions, without any name in them, are false."""
    lines = [{name: -1, "": 0} for name in names]
    lines += [line for text in conditions for line in _lines(text)]
    for name in names:
        above = [line for line in lines if line.get(name, 0) > 0]
        below = [line for line in lines if line.get(name, 0) < 0]
        lines = [line for line in lines if not line.get(name, 0)]
        if len(lines) + len(above) * len(below) > _MOST_TRIED:
            return False
        lines += [
            {k: a.get(k, 0) * -b[name] + b.get(k, 0) * a[name] for k in (*names, "")}
            for a in above
            for b in below
        ]
    return any(line[""] > 0 for line in lines)


def _has_no_size(name: str, conditions: Sequence[str]) -> bool:
    """Whether conditions on one size are false of each that could satisfy them."""
    low, last = bounds_of(name, conditions, least=0)
    others = [text for text in conditions if not _lines(text)]
    if not any(names_in(_PERIODIC.sub("", text)) for text in others):
        divisors = [int(n) for text in others for n in _PERIODIC.findall(text)]
        repeated = low + math.lcm(*divisors) - 1
        last = repeated if last is None else min(last, repeated)
    if last is None or last - low >= _MOST_TRIED:
        return False
    return not any(
        all(evaluate_text(text, {name: size}) for text in conditions)
        for size in range(low, last + 1)
    )


def _lines(condition: str) -> list[_Line]:
    """What a linear condition says is at most 0; nothing of one that is not linear."""
    left, relation, right = re.split(r"([<>=]=)", condition)
    line = _line(f"{left} - ({right})")
    if line is None:
        return []
    negated = {name: -factor for name, factor in line.items()}
    return {"<=": [line], ">=": [negated], "==": [line, negated]}[relation]


def _line(expression: str) -> _Line | None:
    """The factors of a linear expression, and None of any other."""
    if any(f"{f}(" in expression for f in FUNCTIONS) or "^" in expression:
        return None
    names = sorted(names_in(expression))
    none = dict.fromkeys(names, 0)
    rest = evaluate_text(expression, none)
    line = {n: evaluate_text(expression, none | {n: 1}) - rest for n in names}
    for place in (2, 3, _FAR):
        sizes = {name: place + i for i, name in enumerate(names)}
        found = rest + sum(line[name] * size for name, size in sizes.items())
        if evaluate_text(expression, sizes) != found:
            return None
    return line | {"": rest}
