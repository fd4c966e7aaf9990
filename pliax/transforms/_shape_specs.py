"""The shapes that users give arrays by names: parsed, one entry a dimension.

"b, t, _", "2*b, ...", Dim("t"), {1: Dim("t"), -1: "s"}  ->  ShapeSpec
"""

import dataclasses
import re
from typing import Any

import jax

from pliax.core.constraints import FUNCTIONS, expression, is_name
from pliax.core.marks import Dim


_COMMA = re.compile(r",(?![^()]*\))")  # not those inside max(a, b)
_NAME = re.compile(r"[^\W\d]\w*")


@dataclasses.dataclass(frozen=True)
class ShapeSpec:
    """One parsed shape: a name, an integer or None (any) per dimension.

    Attributes:
        text: as the user wrote it.
        sizes: of the first dimensions.
        is_prefix: whether there may be more.
        last: of the last dimensions, where they are counted from the end.
    """

    text: str
    sizes: tuple[str | int | None, ...]
    is_prefix: bool
    last: tuple[str | int | None, ...] = ()

    def fits(self, rank: int) -> bool:
        """Whether an array of this rank can have such a shape."""
        if self.is_prefix:
            return rank >= max(len(self.sizes), len(self.last))
        return rank == len(self.sizes)

    def of(self, rank: int) -> tuple[str | int | None, ...]:
        """One entry for each dimension of an array."""
        front, back = self._both(rank)
        pairs = zip(front, back, strict=True)
        return tuple(b if a is None else a for a, b in pairs)

    def twice(self, rank: int) -> int | None:
        """The first dimension that is given from the front and from the end."""
        pairs = enumerate(zip(*self._both(rank), strict=True))
        return next((i for i, pair in pairs if None not in pair), None)

    def _both(self, rank: int) -> tuple[tuple, tuple]:
        front = (*self.sizes, *(None,) * (rank - len(self.sizes)))
        return front, (*(None,) * (rank - len(self.last)), *self.last)


def read_spec(given: Any, where: str) -> ShapeSpec:
    """A shape in text, a Dim for the first axis, or entries by axis."""
    if isinstance(given, Dim):
        given = f"{given.name}, ..."
    if not isinstance(given, dict):
        return _read_shape(given, where)
    for axis, entry in given.items():
        if type(axis) is not int:
            raise ValueError(
                f"{where} has the axis {axis!r}.\nCount axes from 0 at the front, or "
                "from -1 at the end."
            )
        if not isinstance(entry, Dim | str | int):
            raise TypeError(
                f"{where}[{axis}] is {entry!r} of type {type(entry).__name__}.\n"
                "Pass a Dim, a name or an integer."
            )
    texts = {a: e.name if isinstance(e, Dim) else str(e) for a, e in given.items()}
    for axis, text in texts.items():
        if text.strip() == "..." or len(_COMMA.split(text)) > 1:
            raise ValueError(
                f"{where}[{axis}] is {text!r}.\nGive each axis one entry: a Dim, a "
                "name or an integer."
            )
    first = [texts.get(axis, "_") for axis in range(max(given) + 1)]
    last = [texts.get(axis, "_") for axis in range(min(given), 0)]
    front = _read_shape(", ".join([*first, "..."]), where)
    back = _read_shape(", ".join(last), where).sizes if last else ()
    text = ", ".join([*first, "...", *last])
    return dataclasses.replace(front, text=text, last=back)


def _read_shape(text: Any, where: str) -> ShapeSpec:
    if not isinstance(text, str):
        raise TypeError(
            f"{where} is {text!r} of type {type(text).__name__}.\n"
            'Write the shape as a string such as "b, t, _" or "b, ...".'
        )
    inner = text.strip()
    inner = inner[1:-1] if inner.startswith("(") and inner.endswith(")") else inner
    entries = [entry.strip() for entry in _COMMA.split(inner)]
    entries = entries[:-1] if entries[-1] == "" else entries
    is_prefix = bool(entries) and entries[-1] == "..."
    entries = entries[:-1] if is_prefix else entries
    sizes = tuple(_read_size(entry, text, where) for entry in entries)
    return ShapeSpec(text, sizes, is_prefix)


def _read_size(entry: str, text: str, where: str) -> str | int | None:
    if entry == "_":
        return None
    if entry.isdecimal() and entry.isascii():
        return int(entry)
    if is_name(entry):
        return entry
    written = (entry, expression(entry) or "")
    found = next(filter(_is_read, written), None)
    if found is None or entry.isidentifier() or not names_in(entry):
        raise ValueError(
            f"{where} is {text!r}, where {entry!r} cannot be read.\nAn entry is a "
            f'name, an expression of names ("2*b", "t - 1"), an integer or "_" (any '
            f'size), and "..." may stand last.'
        )
    return found


def _is_read(text: str) -> bool:
    try:
        return len(jax.export.symbolic_shape(text)) == 1
    except ValueError:
        return False


def names_in(expression: str) -> frozenset[str]:
    """The names of sizes in one entry of a shape."""
    names = _NAME.findall(expression)
    return frozenset(names).difference(FUNCTIONS)
