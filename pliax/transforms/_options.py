"""What the user asked of ``px.compile``, read and checked."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from pliax.core.constraints import constraint, in_python

from ._shape_specs import names_in
from ._size_conditions import contradiction
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
    found: dict[str, str] = {}
    for text in (where,) if isinstance(where, str) else where:
        if not isinstance(text, str):
            raise TypeError(
                f"{owner}: where holds {text!r} of type {type(text).__name__}.\n"
                'Write each condition as a string, "t <= 4096".'
            )
        try:
            found[constraint(text)] = text
        except ValueError as error:
            raise ValueError(f"{owner}: where: {error}") from None
        unknown = sorted(names_in(text) - sizes.names)
        if unknown:
            raise ValueError(
                f"{owner}: where says {text!r}, but dims names no {unknown[0]!r}.\n"
                f"Its names are {', '.join(sorted(sizes.names)) or 'none'}."
            )
    _refuse_contradictions(found, sizes, owner)
    return tuple(found)


def _refuse_contradictions(found: dict[str, str], sizes: Sizes, owner: str) -> None:
    """Refuses conditions that no sizes satisfy, naming them as they were written."""
    by_dims: dict[str, str] = {}
    for name, dim in sizes.dims.items():
        said = [f"{name} >= {dim.min}", *dim.constraints]
        said += [] if dim.largest is None else [f"{name} <= {dim.largest}"]
        by_dims |= {text: f"{in_python(text)} (of Dim({name!r}))" for text in said}
    written = by_dims | found
    clash = contradiction(tuple(written))
    if clash:
        raise ValueError(
            f"{owner}: no sizes satisfy {' and '.join(written[c] for c in clash)}.\n"
            "Drop a condition, or widen a Dim."
        )


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
