"""Which sizes of a call are symbols: declared ones, marked ones, those that changed.

Calls of one kind (structure, types, placement; everything but sizes) form a family. Its
sizes are the axes of its arrays and its Python integers. A size is a symbol if `dims`
names it, if it is marked, if `dynamic=True`, or if it has changed from call to call;
else it is a constant. Undeclared sizes that were equal in all calls share one symbol.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from pliax.core.dims import LARGEST, Size
from pliax.core.size_expressions import evaluate_text
from pliax.core.symbols import Symbol

from ._deciding import (
    OFFSETS,
    Decision,
    Declared as Declared,
    Position as Position,
    decide,
)
from ._shape_specs import names_in
from ._sizes import solution


# So few that they are soon compiled; the square of the third fits an int32.
_MAGNITUDES = (-1, 2**10, 2**15, 2**20, 2**25, 2**30)


def magnitudes(number: int) -> tuple[int, int]:
    """Two bounds of a number that is not negative: it is above the first of them."""
    pairs = itertools.pairwise(_MAGNITUDES)
    return next((low, high) for low, high in pairs if number <= high)


@dataclasses.dataclass(frozen=True)
class Reading:
    """What one trace takes each size of a call for.

    Attributes:
        positions: the sizes of a call.
        wanted: for each, its constant value or an expression of symbols.
        symbols: the symbols, with hints.
    """

    positions: tuple[Position, ...]
    wanted: tuple[int | str, ...]
    symbols: tuple[Symbol, ...]

    @property
    def run_time_integers(self) -> list[Position]:
        """The Python integers that are not constants."""
        pairs = zip(self.positions, self.wanted, strict=True)
        return [p for p, n in pairs if p.axis is None and isinstance(n, str)]

    def bind(self, sizes: Sequence[int]) -> dict[str, int] | None:
        """The symbols' values in a call; None if the call does not fit."""
        found: dict[str, int] = {}
        pairs = list(zip(self.wanted, sizes, strict=True))
        for wanted, size in pairs:
            if isinstance(wanted, int):
                if wanted != size:
                    return None
            elif wanted.isidentifier() and found.setdefault(wanted, size) != size:
                return None
        for wanted, size in pairs:
            is_plain = isinstance(wanted, int) or wanted.isidentifier()
            if not is_plain and not _fits(str(wanted), size, found):
                return None
        return found if self._are_in_range(found) else None

    def misfits(self, sizes: Sequence[int]) -> list[Position]:
        """The positions whose sizes in a call it does not take, guards aside."""
        known: dict[str, int] = {}
        limits = {s.name: (s.low, s.high or LARGEST) for s in self.symbols}

        def fits(wanted: int | str, size: int) -> bool:
            if isinstance(wanted, int) or not _fits(wanted, size, known):
                return wanted == size
            names = names_in(wanted)
            return all(limits[n][0] <= known[n] <= limits[n][1] for n in names)

        triples = zip(self.positions, self.wanted, sizes, strict=True)
        return [p for p, wanted, size in triples if not fits(wanted, size)]

    def _are_in_range(self, values: Mapping[str, int]) -> bool:
        return all(s.low <= values[s.name] <= (s.high or LARGEST) for s in self.symbols)

    def may_be_negative(self, name: str) -> bool:
        """Whether a name stands for a Python integer, moved by 2^30."""
        return f"{name} - {OFFSETS[True]}" in self.wanted

    def integers(self, values: Mapping[str, int]) -> dict[str, int]:
        """The Python integers that stand behind the values of some names."""
        offsets = {f"{n} - {k}": (n, k) for n in values for k in OFFSETS.values()}
        found = (offsets[w] for w in self.wanted if w in offsets)
        return {name: values[name] - offset for name, offset in found}

    @property
    def legend(self) -> list[str]:
        """What stands behind the names that no user gave: "s0: x.shape[0]"."""
        given = {s.name for s in self.symbols if s.is_named}
        found: dict[str, list[str]] = {}
        for position, wanted in zip(self.positions, self.wanted, strict=True):
            if isinstance(wanted, str) and not names_in(wanted) <= given:
                found.setdefault(wanted, []).append(position.name)
        return [f"{text}: {', '.join(names)}" for text, names in found.items()]

    def shape(self, leaf: int) -> tuple[int | str, ...]:
        """The sizes of one array."""
        pairs = zip(self.positions, self.wanted, strict=True)
        return tuple(w for p, w in pairs if p.leaf == leaf)


def _fits(wanted: str, size: int, known: dict[str, int]) -> bool:
    """Whether an expression has a size; learns the one name that may be missing."""
    unknown = names_in(wanted) - known.keys()
    for name in unknown:
        value = solution(wanted, name, size, known) if len(unknown) == 1 else None
        if value is None:
            return False
        known[name] = value
    return evaluate_text(wanted, known) == size


class Family:
    """The sizes seen in calls of one kind, and what they were taken for."""

    def __init__(
        self, positions: Sequence[Position], declared: Declared, kind: str = ""
    ):
        self.positions = tuple(positions)
        self.declared = declared
        self.kind = kind  # in words, as files of decisions name it
        self.calls: list[tuple[int, ...]] = []
        self.refusal: str | None = None  # why sizes cannot be symbols
        self.entries: list[Any] = []
        self.decided: dict[Position, Decision] = {}
        self.learned: set[Position] = set()  # those that calls have shown to change
        # Python integers that are constants, why, and since which call.
        self.fixed: dict[Position, tuple[str, tuple[int, ...]]] = {}
        self.tied: frozenset[Position] = frozenset()  # those that named sizes may equal

    def read(self, sizes: Sequence[int]) -> Reading:
        """A reading for a call that none of the earlier readings fits."""
        self.calls.append(tuple(sizes))
        return self._read(sizes)

    def with_constants(self, integers: Sequence[Position]) -> Reading:
        """A reading of the last call in which some Python integers are constants."""
        return self._read(self.calls[-1], frozenset(integers))

    def without_integers(self, needed: Mapping[Position, str]) -> Reading:
        """The same, from now on.

        Args:
            needed: Python integers whose values the program needs, and why.
        """
        call = self.calls[-1]
        self.fixed = {p: (why, call) for p, why in needed.items()} | self.fixed
        self.learned -= needed.keys()
        return self._read(call)

    def tie_integers(self) -> Reading | None:
        """A reading of the last call in which all Python integers are symbols.

        Of a program in which a named size would else have to equal one of them. None
        where there is no other.
        """
        found = {p for p, d in self.decided.items() if p.axis is None}
        found = {p for p in found - self.fixed.keys() if not self.decided[p].is_dynamic}
        if self.declared.everything is False or not found:
            return None
        self.tied |= found
        return self._read(self.calls[-1])

    def forget_call(self, sizes: tuple[int, ...]) -> None:
        """Drops a call that is wrong in itself, and what was learned of it."""
        self.calls.remove(sizes)
        fixed = self.fixed.items()
        self.fixed = {p: (why, call) for p, (why, call) in fixed if call != sizes}

    def _read(
        self, sizes: Sequence[int], constants: frozenset[Position] = frozenset()
    ) -> Reading:
        if self.refusal is not None or self._has_empty(sizes):
            return self.constant(sizes)
        histories = list(zip(*self.calls, strict=True))
        wanted: list[int | str] = []
        symbols = {
            name: dataclasses.replace(symbol, hint=None)
            for name, symbol in self.declared.symbols.items()
        }
        names: dict[Hashable, str] = {}
        pairs = list(zip(self.positions, histories, strict=True))
        self.decided = {p: self._decide(p, history) for p, history in pairs}
        self.learned |= {p for p, d in self.decided.items() if d.is_learned}
        for position, history in pairs:
            if position in constants or not self.decided[position].is_dynamic:
                wanted.append(history[-1])
            elif position in self.declared.names:
                wanted.append(self.declared.names[position])
            else:
                wanted.append(self._symbol(position, history, names, symbols))
        return self._with_hints(wanted, symbols, sizes)

    def _decide(self, position: Position, history: Sequence[int]) -> Decision:
        if position in self.fixed:
            why = f"the program needs its value: {self.fixed[position][0]}"
            return Decision(False, why)
        if position in self.tied and abs(history[-1]) < OFFSETS[True]:
            return Decision(True, "a size that dims names depends on it")
        return decide(self.declared, position, history)

    @property
    def why_constant(self) -> str | None:
        """Why no size of the last call is a symbol, where some might be."""
        if self.refusal is None and self._has_empty(self.calls[-1]):
            return "traced for this call alone: an axis that dims names is empty"
        return self.refusal

    def _has_empty(self, sizes: Sequence[int]) -> bool:
        """Whether an axis that `dims` names has no elements: a case of its own.

        So is a name that is 0 or less where an expression has a size: b of "b + 1".
        """
        names = self.declared.names
        pairs = list(zip(self.positions, sizes, strict=True))
        if any(n == 0 and p in names for p, n in pairs):
            return True
        wanted = tuple(names.get(p, n) for p, n in pairs)
        known = Reading(self.positions, wanted, ()).bind(sizes) or {}
        return any(n < 1 for n in known.values())

    def constant(self, sizes: Sequence[int]) -> Reading:
        """A reading that takes every size for a constant."""
        return Reading(self.positions, tuple(sizes), ())

    def new_values(self, sizes: Sequence[int]) -> str:
        """The Python integers for which alone no trace serves a call, in words."""
        misfits = min((e.reading.misfits(sizes) for e in self.entries), key=len)
        if not misfits or any(p.axis is not None for p in misfits):
            return ""
        changes = zip(self.positions, self.calls[-1], sizes, strict=True)
        texts = [f"`{p.name}`: {a} -> {b}" for p, a, b in changes if p in misfits]
        return f"new value: {', '.join(texts)}"

    def _symbol(
        self,
        position: Position,
        history: tuple[int, ...],
        names: dict[Hashable, str],
        symbols: dict[str, Symbol],
    ) -> str:
        offset = 0
        if position.axis is None:
            learned = self.declared.learned.get(position)
            smallest = min([*history, *(learned.seen if learned else ())])
            offset = OFFSETS[smallest < 0]
        key = self._together(position, history)
        if key not in names:
            name = names[key] = _fresh(symbols)
            is_strong = position in self.declared.strong
            found = Symbol(name, None, position.name, is_strong, is_named=False)
            symbols[name] = dataclasses.replace(found, offset=offset)
        return f"{names[key]} - {offset}" if offset else names[key]

    def _together(self, position: Position, history: tuple[int, ...]) -> Hashable:
        """What sizes that have been equal in all calls share."""
        learned = self.declared.learned.get(position)
        is_integer = position.axis is None
        return position if is_integer else (learned and learned.label, history)

    def labels(self) -> dict[Position, str]:
        """The sizes that were found to change; those equal in all calls share a label.

        Nothing is worth remembering where no size can be a symbol.
        """
        if self.refusal is not None:
            return {}
        found: dict[Hashable, str] = {}
        histories = zip(*self.calls, strict=True)
        pairs = zip(self.positions, histories, strict=True)
        keys = {p: self._together(p, h) for p, h in pairs if p in self.learned}
        return {p: found.setdefault(k, f"s{len(found)}") for p, k in keys.items()}

    def _origins(self, wanted: Sequence[int | str]) -> dict[str, str]:
        """What each named size is read off."""
        pairs = list(zip(self.positions, wanted, strict=True))
        return {w: p.name for p, w in reversed(pairs) if isinstance(w, str)}

    def _with_hints(
        self,
        wanted: Sequence[int | str],
        symbols: Mapping[str, Symbol],
        sizes: Sequence[int],
    ) -> Reading:
        reading = Reading(self.positions, tuple(wanted), ())
        values = reading.bind(sizes) or {}
        origins = self._origins(wanted)
        known = [
            dataclasses.replace(
                s, hint=values[s.name], origin=s.origin or origins.get(s.name, "")
            )
            for s in symbols.values()
            if s.name in values
        ]
        return dataclasses.replace(reading, symbols=tuple(known))


def _fresh(symbols: Mapping[str, Any]) -> str:
    count = len(symbols)
    while f"s{count}" in symbols:
        count += 1
    return f"s{count}"


def positions_of(names: Sequence[str], leaves: Sequence[Any]) -> list[Position]:
    """The sizes of a call: axes of arrays and values of Python integers."""
    found: list[Position] = []
    for i, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        if is_integer(leaf):
            found.append(Position(i, None, name))
        else:
            axes = range(np.ndim(leaf))
            found += [Position(i, a, f"{name}.shape[{a}]") for a in axes]
    return found


def sizes_of_leaves(leaves: Sequence[Any]) -> tuple[int, ...]:
    """The sizes of a call, in the order of its positions."""
    sizes: list[int] = []
    for leaf in leaves:
        sizes += [leaf] if is_integer(leaf) else np.shape(leaf)
    return tuple(sizes)


def is_integer(leaf: Any) -> bool:
    """Whether an argument is a Python integer, which is a size; a bool is an array."""
    return type(leaf) is int


def is_number(leaf: Any) -> bool:
    """Whether it is an integer to a program: Python's, or a size of an outer one."""
    return is_integer(leaf) or isinstance(leaf, Size)
