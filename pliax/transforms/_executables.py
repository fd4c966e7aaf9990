"""The executables of a compiled function: which one serves a call, built if none does.

Executables : a call  ->  Bound, an executable and what it takes to call it
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from time import perf_counter
from typing import Any

import jax

from pliax.core.unbacked import NeedsSizesError

from ._builds import builds
from ._catalog import Catalog
from ._donation import are_donated
from ._execution import Bound, Plan
from ._families import Family
from ._garbage import garbage_searched
from ._kinds import checked_leaves, unmarked
from ._logs import tell_executable
from ._reasons import CallFacts, explain_miss, read_facts
from .padding import PaddingRefused
from .specialization import range_text
from .tracing import validate_if_asked


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call that the short way does not know.

    Attributes:
        key: its structure and types, all but sizes.
        sizes: in the order of its flat arguments.
        args: as the user gave them, perhaps marked.
        kwargs: likewise.
        entry: the trace that serves it.
        values: the trace's named sizes in this call.
        facts: tells what explains why it was compiled.
    """

    key: Hashable
    sizes: tuple[int, ...]
    args: tuple
    kwargs: dict
    entry: Any = None
    values: dict[str, int] = dataclasses.field(default_factory=dict)
    facts: Callable[[], Any] = lambda: None


@dataclasses.dataclass(eq=False)
class Executables:
    """All executables of one function.

    Attributes:
        catalog: its traces.
        plain: the function as `jax.jit` has it.
        plans: those that were built here.
        noticed: those that JAX built for itself, for arguments that lie elsewhere.
    """

    catalog: Catalog
    plain: Callable[..., Any]
    plans: list[Plan] = dataclasses.field(default_factory=list)
    noticed: list[Plan] = dataclasses.field(default_factory=list)

    @property
    def all(self) -> list[Plan]:
        """Those that were built here, then those that JAX built."""
        return [*self.plans, *self.noticed]

    def notice(self, plan: Plan, args: tuple, kwargs: dict) -> None:
        """Counts one that JAX has just built for itself, for a call of a plan."""
        catalog, facts = self.catalog, self._facts(args, kwargs)
        with catalog.ledger.building(plan.group) as tally:
            tally.add(compilations=1, compile_seconds=builds.seconds)
        reason = explain_miss(facts, self._all_facts())
        tell_executable(catalog.parameters.owner, plan.group, reason)
        self.noticed.append(Plan(plan.entry, {}, plan.group, reason, facts, tally))

    def bind(self, call: Call) -> Bound:
        """What serves a call; traced and compiled now if nothing does."""
        catalog, arguments = self.catalog, (call.args, call.kwargs)
        catalog.declarations.check(
            checked_leaves(catalog.parameters, *unmarked(*arguments))
        )
        family = catalog.family(call.key, *arguments)
        # A size seldom takes a trace or an executable: only those want facts.
        facts = functools.cache(functools.partial(self._facts, *arguments))
        entry, values = catalog.entry(
            family, call.sizes, *arguments, lambda: (facts(), self._all_facts())
        )
        call = dataclasses.replace(call, entry=entry, values=values, facts=facts)
        try:
            return self._planned(family, call)
        except Exception as error:
            catalog.note_failed(family, call.sizes, error)
            catalog.forget_failed(family, call.sizes)
            raise

    def _facts(self, args: tuple, kwargs: dict) -> CallFacts:
        return read_facts(self.catalog.parameters, self.catalog.sizes, args, kwargs)

    def _all_facts(self) -> list[CallFacts]:
        return [plan.facts for plan in self.all]

    def _planned(self, family: Family, call: Call) -> Bound:
        """What serves a call of a known trace: padded, else exact, else JAX's own."""
        catalog, entry = self.catalog, call.entry
        try:
            return self._in_bucket(call)
        except NeedsSizesError:
            entry = catalog.with_sizes(family, entry, call.args, call.kwargs)
            return self._planned(family, dataclasses.replace(call, entry=entry))
        except PaddingRefused as refusal:
            if refusal.is_about_range and entry.narrow(call.values):
                return self._planned(family, call)
            if catalog.options.padding == "require":
                raise
            catalog.refuse(entry, refusal)
        try:
            return self._in_bucket(call)
        except PaddingRefused as refusal:  # not even at its exact sizes
            if entry.trace and entry.trace.born_from_data:  # JAX cannot trace it
                raise
            catalog.refuse(entry, refusal)
        entry = catalog.give_up(family, entry, call.sizes)
        return self._in_bucket(dataclasses.replace(call, entry=entry, values={}))

    def _in_bucket(self, call: Call) -> Bound:
        """The executable of an entry for the bucket of a call."""
        entry = call.entry
        leaves = jax.tree.leaves((call.args, call.kwargs))
        ranges, special = self.catalog.buckets.ranges(entry, call.values, leaves)
        plans = [plan for plan in self.plans if plan.entry is entry]
        for plan in plans:
            if plan.ranges == ranges:
                return self._bound(plan, call)
        reason = f"new bucket: {range_text(ranges)}" if plans else entry.reason
        group = _group(ranges, call.facts())
        if special is not None:
            name, number = special
            condition = f"specialize_on[{number}] of {name}"
            reason = f"{condition} holds; {reason}"
            low, high = ranges[name]
            group = f"{group} ({condition})" if low < high else group
        return self._built(Plan(entry, ranges, group, reason), call)

    def _built(self, plan: Plan, call: Call) -> Bound:
        """A new executable, which later calls find if nothing fails here."""
        catalog, entry = self.catalog, plan.entry
        plan.compile_as(catalog.function, catalog.options.donated, self.plain)
        with catalog.ledger.building(plan.group) as tally:
            plan.tally = tally
            bound = self._bound(plan, call)
            self._compile(plan, bound, call)
            if entry.tally is not None:
                tally.add(**entry.tally.read())
                entry.tally = None
        plan.facts = call.facts()
        self.plans.append(plan)
        return bound

    def _bound(self, plan: Plan, call: Call) -> Bound:
        bound = plan.bind(call.values, call.args, call.kwargs)
        donated = self.catalog.options.donated
        if bound.paddings and donated:
            parameters = self.catalog.parameters
            leaves = parameters.leaves(*unmarked(call.args, call.kwargs))
            given = are_donated(parameters, donated, leaves)
            bound.donated = tuple(p.leaf for p in bound.paddings if given[p.leaf])
        return bound

    def _compile(self, plan: Plan, bound: Bound, call: Call) -> None:
        """Builds the executable stage by stage, timed; the first call finds it."""
        args, kwargs = bound.pad(call.args, call.kwargs)
        with plan.vetted():
            with self.catalog.ledger.tracing(plan.tally):
                traced = plan.jitted.trace(bound.packed, *args, **kwargs)
            tell_executable(self.catalog.parameters.owner, plan.group, plan.reason)
            lowered, seconds = _timed(traced.lower)
            plan.tally.add(lower_seconds=seconds)
            with garbage_searched():
                _, seconds = _timed(lowered.compile)
            plan.name = builds.name
            plan.tally.add(compile_seconds=seconds, compilations=1)
        if plan.entry.trace:
            validate_if_asked(plan.entry.trace)  # the rules of padding have asked more


def _group(ranges: Mapping[str, tuple[int, int]], facts: Any) -> str:
    """The named sizes an executable is for, "b=8" or "t<=64"."""
    texts = []
    for name, (size, _) in facts.sizes.items():
        low, high = ranges.get(name, (size, size))
        texts.append(range_text({name: (low, high)}))
    return ", ".join(texts)


def _timed(stage: Callable[[], Any]) -> tuple[Any, float]:
    start = perf_counter()
    return stage(), perf_counter() - start
