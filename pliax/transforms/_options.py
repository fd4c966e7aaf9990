"""What the user asked of ``px.compile``, read and checked."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from pliax.core.constraints import FUNCTIONS, constraint
from pliax.core.size_expressions import evaluate_text

from ._shape_specs import names_in
from ._sizes import Sizes


_PADDINGS = ("auto", "require", "never")
_ON_LIMIT = ("warn", "raise")


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked of :func:`compile`, checked.

    Attributes:
        dynamic: None, True or False.
        constraints: conditions on named sizes, in `jax.export`'s notation.
        padding: "auto", "require" or "never".
        recompile_limit: how many traces are normal.
        on_limit: "warn" or "raise".
        donated: positions of donated arguments.
    """

    dynamic: bool | None
    constraints: tuple[str, ...]
    padding: str
    recompile_limit: int
    on_limit: str
    donated: tuple[int, ...]


def read_where(where: Any, sizes: Sizes, owner: str) -> tuple[str, ...]:
    """The conditions on named sizes, in `jax.export`'s notation."""
    if where is None:
        return ()
    if not isinstance(where, Iterable):
        raise TypeError(
            f"{owner}: where is {where!r} of type {type(where).__name__}.\n"
            'Pass conditions as strings, ("t <= 4096", "b % 8 == 0").'
        )
    found = []
    for text in (where,) if isinstance(where, str) else where:
        if not isinstance(text, str):
            raise TypeError(
                f"{owner}: where holds {text!r} of type {type(text).__name__}.\n"
                'Write each condition as a string, "t <= 4096".'
            )
        try:
            found.append(constraint(text))
        except ValueError as error:
            raise ValueError(f"{owner}: where: {error}") from None
        unknown = sorted(names_in(text) - sizes.names)
        if unknown:
            raise ValueError(
                f"{owner}: where says {text!r}, but dims names no {unknown[0]!r}.\n"
                f"Its names are {', '.join(sorted(sizes.names)) or 'none'}."
            )
    return tuple(found)


def check_options(options: Options, owner: str) -> None:
    """Refuses what no option can be."""
    dynamic, limit = options.dynamic, options.recompile_limit
    if dynamic is not None and not isinstance(dynamic, bool):
        raise TypeError(
            f"{owner}: dynamic is {dynamic!r} of type {type(dynamic).__name__}.\n"
            "Pass None, True or False; name sizes with dims."
        )
    for name, value, known in (
        ("padding", options.padding, _PADDINGS),
        ("on_limit", options.on_limit, _ON_LIMIT),
    ):
        if value not in known:
            raise ValueError(
                f"{owner}: {name} is {value!r}.\nPass one of {', '.join(known)}."
            )
    if type(limit) is not int or limit < 1:
        raise ValueError(
            f"{owner}: recompile_limit is {limit!r}.\nPass an integer of at least 1."
        )


_FAR = 2**31 - 1  # where no product of sizes is on the line of its first values


def bounds_of(name: str, constraints: Iterable[str]) -> tuple[int, int | None]:
    """What "t >= 16" and "2*t <= 4096" say of one size."""
    low, high = 1, None
    for text in constraints:
        left, relation, right = re.split(r"([<>=]=)", text)
        if names_in(text) != {name} or any(f in text for f in (*FUNCTIONS, "^")):
            continue
        difference = f"{left} - ({right})"
        at = [evaluate_text(difference, {name: n}) for n in (0, 1, 2, _FAR)]
        slope = at[1] - at[0]
        if at[2:] != [at[0] + slope * n for n in (2, _FAR)]:
            continue  # no line
        if relation == ">=":
            at, slope = [-n for n in at], -slope
        if slope > 0 or (slope and relation == "=="):  # slope * n + at[0] <= 0
            most = -at[0] // slope
            high = most if high is None else min(high, most)
        if slope < 0:
            low = max(low, -(at[0] // slope))
    return low, high
