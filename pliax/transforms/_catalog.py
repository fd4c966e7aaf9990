"""The entries of a compiled function: which trace serves which sizes, and why.

Catalog : kind of call, sizes  ->  Entry and the values of its symbols
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from pliax.core.collapse import ConstraintViolationError, multiple_note, multiple_of
from pliax.core.constraints import in_python
from pliax.core.dims import LARGEST, Size
from pliax.core.guards import Assumptions
from pliax.core.marks import holds
from pliax.core.provenance import NOT_THE_USERS
from pliax.core.size_expressions import at_hand
from pliax.core.symbols import Symbol

from ._arguments import Leaf, Parameters
from ._buckets import Placement
from ._decisions import Decisions, kind_text
from ._execution import Entry
from ._families import (
    Declared,
    Family,
    Position,
    Reading,
    positions_of,
)
from ._kinds import abstract, marks, raise_as_jax, unmarked
from ._ledger import Ledger, Tally
from ._logs import tell_bucket, tell_refusal, tell_sizes, tell_trace
from ._needed_integers import needed_integers
from ._options import Options
from ._reasons import explain_miss
from ._shape_specs import names_in
from ._size_conditions import bounds_of
from ._sizes import Sizes
from ._trace_errors import NotSymbolicError
from .padding import PaddingRefused
from .tracing import SymbolicTrace, trace


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
        needs_sizes: whether sizes are born from data in it, so that it is traced with
            symbols also where no size of a call is one.
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
    needs_sizes: bool = False
    bears_sizes: bool = False

    def __post_init__(self):
        owner = self.parameters.owner
        self.buckets = Placement(self.sizes.dims, self.decisions.sizes, owner)

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
            declared = self._declared(positions, leaves, args, kwargs)
            statics = self.parameters.statics(args, kwargs)
            text = kind_text(leaves, statics)
            known = self.decisions.of(text)
            learned = {p: known[p.name] for p in positions if p.name in known}
            declared = dataclasses.replace(declared, learned=learned)
            family = self.families[key] = Family(positions, declared, text)
        return family

    def _declared(
        self, positions: list[Position], leaves: list[Leaf], args: tuple, kwargs: dict
    ) -> Declared:
        names: dict[Position, str] = {}
        is_dynamic = self.options.dynamic is not False
        shapes = self.sizes.shapes(leaves)
        for position in positions:
            if position.axis is not None:
                wanted = shapes[position.leaf][1][position.axis]
                if isinstance(wanted, str) and is_dynamic:
                    names[position] = wanted
        marked = marks(positions, args, kwargs)
        self._refuse_static(marked, names)
        used = {p: kind for p, kind in marked.items() if p not in names}
        symbols = {name: self._symbol(name) for name in sorted(self.sizes.names)}
        return Declared(
            names=names,
            symbols=symbols,
            constraints=self.options.constraints,
            dynamic=frozenset(p for p, k in used.items() if k != "static"),
            static=frozenset(p for p, k in used.items() if k == "static"),
            strong=frozenset(p for p, k in used.items() if k == "dynamic"),
            everything=self.options.dynamic,
        )

    def _refuse_static(
        self, marked: Mapping[Position, str], names: Mapping[Position, str]
    ) -> None:
        """A size cannot be a constant and have a name."""
        for position, kind in marked.items():
            if kind == "static" and position in names:
                raise ValueError(
                    f"{self.parameters.owner}: {position.name} is marked by px.static, "
                    f"but dims names it {names[position]!r}.\nTake one of them away."
                )

    def _symbol(self, name: str) -> Symbol:
        dim = self.sizes.dims.get(name)
        symbol = dim.symbol if dim else Symbol(name, None, "", is_strong=True)
        low, high = bounds_of(name, self.options.constraints)
        high = min((h for h in (symbol.high, high) if h is not None), default=None)
        return dataclasses.replace(symbol, low=max(symbol.low, low), high=high)

    def check_dims(self, found: Mapping[str, tuple[Any, str]]) -> None:
        """Refuses sizes that the user's Dims and conditions exclude.

        Args:
            found: the named sizes, each with the argument that it was read off. Those
                of an outer px.compile leave guards there.
        """
        sizes = {name: n for name, (n, _) in found.items() if isinstance(n, int | Size)}
        for name, size in sizes.items():
            dim = self.sizes.dims.get(name)
            if dim is not None and not dim.holds(size):
                raise ValueError(
                    f"{self.parameters.owner}: {name} is {at_hand(size)} in "
                    f"`{found[name][1]}`, but Dim({name!r}) says {dim.description}.\n"
                    "Pass another size, or widen the Dim."
                )
        for text in self.options.constraints:
            if not holds(text, sizes):
                values = (
                    f"{name} = {at_hand(size)} in `{found[name][1]}`"
                    for name, size in sorted(sizes.items())
                )
                raise ValueError(
                    f"{self.parameters.owner}: where says {in_python(text)}, but "
                    f"{', '.join(values)}.\nPass other sizes, or drop the condition."
                )

    def entry(
        self,
        family: Family,
        sizes: tuple[int, ...],
        args: tuple,
        kwargs: dict,
        facts: Any,
    ) -> tuple[Entry, dict[str, int]]:
        """What serves a call, traced now if nothing does.

        Args:
            family: the kind of call.
            sizes: its sizes.
            args: its arguments.
            kwargs: those by name.
            facts: what explains a trace: the facts of this call, of earlier ones.
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
            entry = self._trace(family, reading, args, kwargs)
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
        allowed = (holds(c, values) for c in self._constraints())
        if family.entries or symbols == reading.symbols or not all(allowed):
            return None
        hinted = dataclasses.replace(reading, symbols=symbols)
        try:
            entry = self._trace(family, hinted, args, kwargs)
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
        return explain_miss(*facts)

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

    def _trace(
        self, family: Family, reading: Reading, args: tuple, kwargs: dict
    ) -> Entry:
        function = self.function
        tree = jax.tree.structure(unmarked(args, kwargs))
        if not reading.symbols and not self.needs_sizes:
            return Entry(reading, None, function, tree, family.why_constant)
        tally = Tally()
        traced = functools.partial(self._traced, args=args, kwargs=kwargs, tally=tally)
        try:
            found = traced(reading)
        except NotSymbolicError as error:
            if not reading.symbols:  # sizes are born from data, and nothing else helps
                raise error.original from error.original.__cause__
            fewer = self._without_integers(family, reading, error, traced)
            if fewer is not None:
                entry = self._trace(family, fewer, args, kwargs)
                tally.add(**(entry.tally.read() if entry.tally else {}))
                entry.tally = tally
                return entry
            if self.options.padding == "require":
                raise_as_jax(function, args, kwargs)
                raise PaddingRefused("trace", error.reason, error.place) from error
            kind = "for this call alone" if error.is_about_one_call else "size by size"
            refusal = f"traced {kind}: {error}"
            tell_refusal(self.parameters.owner, refusal)
            if not error.is_about_one_call:
                family.refusal = refusal
                family.fixed.clear()  # it was not for them
            constant = family.constant(family.calls[-1])
            if self.needs_sizes:
                entry = self._trace(family, constant, args, kwargs)
                entry.refusal = refusal
                return entry
            return Entry(constant, None, function, tree, refusal, tally=tally)
        except BaseException as error:
            self.ledger.uncached().add(**tally.read())
            if isinstance(error, ConstraintViolationError):
                if entry := self._with_tied_integers(family, args, kwargs):
                    return entry
                _name_partners(error, reading)
            raise
        self.needs_sizes |= bool(found.assumptions.known.unbacked)
        is_never = self.options.padding == "never"
        refusal = family.why_constant or ('padding="never"' if is_never else None)
        return Entry(reading, found, function, tree, refusal, tally=tally)

    def _traced(
        self, reading: Reading, args: tuple, kwargs: dict, tally: Tally
    ) -> SymbolicTrace:
        """The program of a call, its sizes taken for what a reading says."""
        leaves = jax.tree.leaves((args, kwargs))
        tree = jax.tree.structure(unmarked(args, kwargs))

        def make(assumptions: Assumptions) -> Any:
            made = [abstract(reading, i, x, assumptions) for i, x in enumerate(leaves)]
            return jax.tree.unflatten(tree, made)

        names = {symbol.name for symbol in reading.symbols}
        constraints = [c for c in self._constraints() if _mentions(c, names)]
        owner = self.parameters.owner
        with self.ledger.tracing(tally):
            return trace(self.function, make, reading.symbols, constraints, owner=owner)

    def _with_tied_integers(
        self, family: Family, args: tuple, kwargs: dict
    ) -> Entry | None:
        """A trace with all Python integers at run time, where a named size is fixed.

        Of `x + jnp.arange(n)` the length is no constant, only that of `n` at first.
        """
        before = family.tied
        if (reading := family.tie_integers()) is None:
            return None
        try:
            return self._trace(family, reading, args, kwargs)
        except ConstraintViolationError:
            family.tied = before
            return None

    def _without_integers(
        self,
        family: Family,
        reading: Reading,
        error: NotSymbolicError,
        traced: Callable[[Reading], Any],
    ) -> Reading | None:
        """A reading with constants for Python integers that are axes or the like."""
        integers = reading.run_time_integers
        if error.is_about_one_call or not integers:
            return None

        def failure(left: Sequence[Position]) -> Exception | None:
            others = [p for p in integers if p not in left]
            try:
                traced(family.with_constants(others))
            except NotSymbolicError as reason:
                return reason
            except ConstraintViolationError as reason:  # one of the others is a length
                return error if left else reason

        needed = needed_integers(integers, failure, error)
        fewer = family.without_integers(needed)
        told, sizes = {}, family.calls[-1]
        tell_sizes(self.parameters.owner, told, family.decided, fewer, sizes)
        return fewer

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
        self.needs_sizes = True
        family.entries.remove(entry)
        traced = self._trace(family, entry.reading, args, kwargs)
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

    def _constraints(self) -> tuple[str, ...]:
        of_dims = (c for d in self.sizes.dims.values() for c in d.constraints)
        return (*self.options.constraints, *of_dims)

    def ranges(
        self, entry: Entry, values: dict[str, int], leaves: list[Any]
    ) -> tuple[dict[str, tuple[int, int]], tuple[str, int] | None]:
        """The sizes that share an executable with a call's, and what is special of it.

        That is a name and the number of its condition.

        Sizes along which an argument is spread over devices are exact: a bucket would
        be spread otherwise than what it holds.
        """
        owner = self.parameters.owner
        symbols = {s.name: s for s in entry.reading.symbols}
        spread = _spread(entry.reading, leaves)
        ranges: dict[str, tuple[int, int]] = {}
        placed: list[str] = []
        for name, value in values.items():
            symbol = symbols[name]
            ranges[name] = value, value  # in the order of all names
            if entry.trace is None or name in entry.unshaped:
                whole = symbol.low, symbol.high or LARGEST
                ranges[name] = entry.near(name, value, whole)
                if ranges[name] == (value, value) != whole:
                    entry.exact[name] = "what is computed of it may not fit an int32"
            elif entry.refusal is not None:
                continue
            elif name in spread or entry.reading.may_be_negative(name):
                why = _SPREAD if name in spread else "it may be negative"
                entry.exact[name] = why
                tell_bucket(owner, name, value, value, why)
            else:
                placed.append(name)
        special = self.buckets.special({name: values[name] for name in placed})
        for name in placed:
            number = special[1] if special and special[0] == name else None
            value, symbol = values[name], symbols[name]
            ranges[name] = self.buckets.interval(symbol, value, number)
            why = functools.partial(self.buckets.why, symbol, number)
            tell_bucket(owner, name, value, ranges[name][1], why)
        return ranges, special

    def expected_waste(self) -> list[str]:
        """What the buckets of each size waste that has a histogram, in words."""
        found = (
            self.buckets.expected(self._symbol(n)) for n in sorted(self.sizes.names)
        )
        return [text for text in found if text is not None]


def _name_partners(error: ConstraintViolationError, reading: Reading) -> None:
    """Adds the sizes that equal the one which was fixed, and have no name."""
    if error.value is None or error.name not in {s.name for s in reading.symbols}:
        return
    pairs = zip(reading.positions, reading.wanted, strict=True)
    alike = [p.name for p, n in pairs if n == error.value and p.axis is not None]
    if alike:
        error.args = (
            f"{error}\nAs long here, and without a name: {', '.join(alike)}. What is "
            f"always as long as {error.name} gets the same name.",
        )


_SPREAD = "its axis is divided by devices"


def _spread(reading: Reading, leaves: list[Any]) -> frozenset[str]:
    """The named sizes of axes that are divided among devices."""
    found: set[str] = set()
    for position, wanted in zip(reading.positions, reading.wanted, strict=True):
        x = leaves[position.leaf]
        if isinstance(wanted, str) and isinstance(x, jax.Array):
            assert position.axis is not None
            part = x.sharding.shard_shape(x.shape)
            if part[position.axis] != x.shape[position.axis]:
                found |= names_in(wanted)
    return frozenset(found)


def _mentions(constraint: str, names: set[str]) -> bool:
    """Whether a condition is about sizes that a trace has."""
    return names_in(constraint) <= names
