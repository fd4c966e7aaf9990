"""The entries of a compiled function: which trace serves which sizes, and why.

Catalog : kind of call, sizes  ->  Entry and the values of its symbols
"""

import dataclasses
import warnings
from collections.abc import Callable, Hashable
from typing import Any

from pliax.core.collapse import multiple_note, multiple_of
from pliax.core.marks import holds
from pliax.core.provenance import NOT_THE_USERS

from ._arguments import Parameters
from ._buckets import Placement
from ._decisions import Decisions, kind_text
from ._declarations import Declarations
from ._entries import Entry
from ._families import Family, Reading, positions_of
from ._kinds import unmarked
from ._ledger import Ledger
from ._logs import tell_refusal, tell_sizes, tell_trace
from ._options import Options
from ._reasons import explain_miss
from ._sizes import Sizes
from ._tracer import Tracer
from .padding import PaddingRefused


class RecompileLimitError(RuntimeError):
    """More traces of one function than its `recompile_limit` allows."""


@dataclasses.dataclass(eq=False)
class Catalog:
    """All entries of one function, by family.

    Attributes:
        parameters: its signature.
        sizes: the names of its sizes.
        options: what the user asked.
        ledger: where traces are counted.
        function: the user's function, which counts its traces.
        decisions: what earlier runs found.
        families: by everything of a call but its sizes.
        bears_sizes: whether results have such sizes, so that two calls in the trace of
            another function share no trace.
    """

    parameters: Parameters
    sizes: Sizes
    options: Options
    ledger: Ledger
    function: Callable[..., Any]
    decisions: Decisions = dataclasses.field(default_factory=Decisions)
    families: dict[Hashable, Family] = dataclasses.field(default_factory=dict)
    bears_sizes: bool = False

    def __post_init__(self):
        owner = self.parameters.owner
        self.buckets = Placement(self.sizes.dims, self.decisions.sizes, owner)
        self.declarations = Declarations(self.parameters, self.sizes, self.options)
        self.tracer = Tracer(self.function, self.declarations, self.ledger)

    @property
    def entries(self) -> list[Entry]:
        """All traces."""
        return [e for family in self._families() for e in family.entries]

    def _families(self) -> list[Family]:
        """A list of their own: other threads may find new ones meanwhile."""
        return list(self.families.values())

    def family(self, key: Hashable, args: tuple, kwargs: dict) -> Family:
        """The calls of one kind; `key` is everything but their sizes."""
        if (family := self.families.get(key)) is None:
            leaves = self.parameters.leaves(*unmarked(args, kwargs))
            names = [leaf.name for leaf in leaves]
            positions = positions_of(names, [leaf.value for leaf in leaves])
            declared = self.declarations.of(positions, leaves, args, kwargs)
            statics = self.parameters.statics(args, kwargs)
            text = kind_text(leaves, statics)
            known = self.decisions.of(text)
            learned = {p: known[p.name] for p in positions if p.name in known}
            declared = dataclasses.replace(declared, learned=learned)
            family = self.families[key] = Family(positions, declared, text)
        return family

    def entry(
        self,
        family: Family,
        sizes: tuple[int, ...],
        args: tuple,
        kwargs: dict,
        facts: Callable[[], tuple[Any, Any]],
    ) -> tuple[Entry, dict[str, int]]:
        """What serves a call, traced now if nothing does.

        Args:
            family: the kind of call.
            sizes: its sizes.
            args: its arguments.
            kwargs: those by name.
            facts: tell what explains a trace: those of this call, of earlier ones.
        """
        for entry in reversed(family.entries):
            values = entry.match(sizes)
            if values is not None:
                return entry, values
        reason = self._why(family, sizes, facts)
        self._limit(reason)
        owner = self.parameters.owner
        tell_trace(owner, len(self.entries) + 1, reason)
        told = family.decided
        reading = family.read(sizes)
        tell_sizes(owner, told, family.decided, reading, sizes)
        entry = self._by_hints(family, reading, sizes, args, kwargs)
        if entry is None:
            entry = self.tracer.entry(family, reading, args, kwargs)
        entry.reason = reason
        values = entry.match(sizes)
        if values is None:
            raise AssertionError("an entry does not serve the call it was traced for")
        family.entries.append(entry)
        return entry, values

    def _by_hints(
        self,
        family: Family,
        reading: Reading,
        sizes: tuple[int, ...],
        args: tuple,
        kwargs: dict,
    ) -> Entry | None:
        """A first trace that decides by the hints of Dims; None if others must."""
        hints = {name: dim.hint for name, dim in self.sizes.dims.items() if dim.hint}
        symbols = tuple(
            dataclasses.replace(s, hint=hints.get(s.name, s.hint))
            for s in reading.symbols
        )
        values = {s.name: s.hint for s in symbols if s.hint is not None}
        allowed = (holds(c, values) for c in self.declarations.constraints)
        if family.entries or symbols == reading.symbols or not all(allowed):
            return None
        hinted = dataclasses.replace(reading, symbols=symbols)
        try:
            entry = self.tracer.entry(family, hinted, args, kwargs)
        except PaddingRefused:  # padding="require": the call decides whether it holds
            return None
        if entry.trace is None:  # an error for the hint's sizes tells nothing of others
            family.refusal = None
            self.ledger.uncached().add(**(entry.tally.read() if entry.tally else {}))
            return None
        if entry.match(sizes) is not None:
            return entry
        entry.reason = "the hint of a Dim"
        family.entries.append(entry)
        return None

    def _why(self, family: Family, sizes: tuple[int, ...], facts: Any) -> str:
        if family.entries:
            failed = (entry.failed_guard(sizes) for entry in reversed(family.entries))
            guard = next(filter(None, failed), None)
            if (
                reason := f"guard failed: {guard}"
                if guard
                else family.new_values(sizes)
            ):
                return reason
        return explain_miss(*facts())

    def refuse(self, entry: Entry, refusal: PaddingRefused) -> None:
        """Notes that a trace is not padded, and why."""
        entry.refusal = str(refusal)
        tell_refusal(self.parameters.owner, f"not padded: {refusal}")

    def _limit(self, reason: str) -> None:
        count = len(self.entries)
        limit = self.options.recompile_limit
        if count < limit:
            return
        text = (
            f"{self.parameters.owner}: {count + 1} traces, more than recompile_limit="
            f"{limit}. The last was needed because of: {reason}\n"
            "Name sizes that change with dims, pass what is not static as an argument, "
            "change what .explain() says is traced size by size, or raise "
            "recompile_limit."
        )
        if self.options.on_limit == "raise":
            raise RecompileLimitError(text)
        if count == limit:
            warnings.warn(text, skip_file_prefixes=NOT_THE_USERS)

    @property
    def fixed(self) -> list[str]:
        """The Python integers whose values programs need, and where, in words."""
        names: dict[str, list[str]] = {}
        for family in self._families():
            for position, (why, _) in list(family.fixed.items()):
                names.setdefault(why, []).append(f"`{position.name}`")
        return [
            f"{', '.join(found)}: the program needs "
            f"{'their values' if found[1:] else 'its value'}: {why}"
            for why, found in names.items()
        ]

    def with_sizes(
        self, family: Family, entry: Entry, args: tuple, kwargs: dict
    ) -> Entry:
        """An entry with symbols in place of one in which sizes are born from data."""
        self.tracer.needs_sizes = True
        family.entries.remove(entry)
        traced = self.tracer.entry(family, entry.reading, args, kwargs)
        traced.reason = entry.reason
        family.entries.append(traced)
        return traced

    def give_up(self, family: Family, entry: Entry, sizes: tuple[int, ...]) -> Entry:
        """An entry for one call's sizes in place of one that no rule can run."""
        family.entries.remove(entry)
        family.refusal = f"traced size by size: {entry.refusal}"
        tell_refusal(self.parameters.owner, family.refusal)
        if family.calls[-1] != sizes:  # the entry has served other calls
            family.calls.append(sizes)
        constant = family.constant(sizes)
        given_up = Entry(constant, None, entry.function, entry.tree, family.refusal)
        given_up.reason, given_up.tally = entry.reason, entry.tally
        family.entries.append(given_up)
        return given_up

    def note_failed(
        self, family: Family, sizes: tuple[int, ...], error: Exception
    ) -> None:
        """Notes under an error that only multiples of a number have been served."""
        for entry in family.entries:
            guard = entry.failed_guard(sizes)
            others = [entry.failed_guard(c) for c in family.calls if c != sizes]
            if guard in others:
                continue
            if guard and (found := multiple_of(guard.condition)):
                symbols = {s.name: s for s in entry.reading.symbols}
                if symbols[found[0]].is_named and symbols[found[0]].is_strong:
                    owner = self.parameters.owner
                    error.add_note(multiple_note(owner, guard.condition, guard.place))
                    return

    def forget_failed(self, family: Family, sizes: tuple[int, ...]) -> None:
        """Drops the entry of one call whose program plain JAX cannot trace either.

        A call that is wrong in itself tells nothing about the sizes of others.
        """
        failed = [e for e in family.entries if e.trace is None and e.serves_only(sizes)]
        if not failed:
            return
        family.entries = [e for e in family.entries if e not in failed]
        family.forget_call(sizes)
        if all(e.refusal != family.refusal for e in family.entries):
            family.refusal = None

    def expected_waste(self) -> list[str]:
        """What the buckets of each size waste that has a histogram, in words."""
        found = map(self.buckets.expected, self.declarations.symbols)
        return [text for text in found if text is not None]
