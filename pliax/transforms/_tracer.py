"""Entries of a compiled function, made by tracing it with symbols in place of sizes.

Tracer : a kind of call, how its sizes are read  ->  Entry
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pliax.core.collapse import ConstraintViolationError
from pliax.core.guards import Assumptions

from ._declarations import Declarations
from ._entries import Entry
from ._families import Family, Position, Reading
from ._kinds import abstract, raise_as_jax, unmarked
from ._ledger import Ledger, Tally
from ._logs import tell_refusal, tell_sizes
from ._needed_integers import needed_integers
from ._shape_specs import names_in
from ._trace_errors import NotSymbolicError
from .padding import PaddingRefused
from .tracing import SymbolicTrace, trace


@dataclasses.dataclass(eq=False)
class Tracer:
    """Traces one function.

    Attributes:
        function: the user's function, which counts its traces.
        declarations: what the user says of its sizes.
        ledger: where traces are counted.
        needs_sizes: whether sizes are born from data in it, so that it is traced with
            symbols also where no size of a call is one.
    """

    function: Callable[..., Any]
    declarations: Declarations
    ledger: Ledger
    needs_sizes: bool = False

    def entry(
        self, family: Family, reading: Reading, args: tuple, kwargs: dict
    ) -> Entry:
        """A trace for calls of one kind, or the plain function where there is none."""
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
                entry = self.entry(family, fewer, args, kwargs)
                tally.add(**(entry.tally.read() if entry.tally else {}))
                entry.tally = tally
                return entry
            if self.declarations.options.padding == "require":
                raise_as_jax(function, args, kwargs)
                raise PaddingRefused("trace", error.reason, error.place) from error
            kind = "for this call alone" if error.is_about_one_call else "size by size"
            refusal = f"traced {kind}: {error}"
            tell_refusal(self._owner, refusal)
            if not error.is_about_one_call:
                family.refusal = refusal
                family.fixed.clear()  # it was not for them
            constant = family.constant(family.calls[-1])
            if self.needs_sizes:
                entry = self.entry(family, constant, args, kwargs)
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
        is_never = self.declarations.options.padding == "never"
        refusal = family.why_constant or ('padding="never"' if is_never else None)
        return Entry(reading, found, function, tree, refusal, tally=tally)

    @property
    def _owner(self) -> str:
        return self.declarations.parameters.owner

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
        constraints = [c for c in self.declarations.constraints if _mentions(c, names)]
        owner = self._owner
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
            return self.entry(family, reading, args, kwargs)
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
        tell_sizes(self._owner, told, family.decided, fewer, sizes)
        return fewer


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


def _mentions(constraint: str, names: set[str]) -> bool:
    """Whether a condition is about sizes that a trace has."""
    return names_in(constraint) <= names
