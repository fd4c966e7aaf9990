"""What a compiled function did: calls, traces, compilations, and the seconds in each.

The counters are the one mutable thing here. They are private, guarded by locks, and
read through :class:`Stats`, a snapshot.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class Groups(dict):
    """Statistics by size class, which nobody changes.

    A dictionary, as `dataclasses.asdict` and pickle take no view of one.
    """

    def __setitem__(self, name: Any, value: Any) -> None:
        raise TypeError("statistics are a snapshot: make a dict of them to change it")

    def __reduce__(self) -> tuple[Any, ...]:
        return Groups, (dict(self),)


@dataclasses.dataclass(frozen=True)
class Stats:
    """A snapshot of what a compiled function has done so far.

    Attributes:
        calls: calls that returned.
        traces: how often Python ran the function to trace it, inside and outside other
            transformations, whether or not the trace succeeded.
        compilations: executables built. Inside another transformation (jit, grad,
            vmap) the executable belongs to that transformation and is not counted here.
        call_seconds: seconds in calls, without the three below. JAX dispatches
            asynchronously: this is the time until control came back. Of calls of known
            sizes the 1st, 3rd, 5th, 9th, ... and then each 1024th is timed, and stands
            for those until the next.
        trace_seconds: seconds from Python to a jaxpr.
        lower_seconds: seconds from the jaxpr to StableHLO.
        compile_seconds: seconds in XLA.
        waste: the share of elements along dynamic sizes that were padding, over all
            calls: of an array with each dynamic size as one axis, how much of its
            bucket was not filled. 0 where nothing was padded.
        groups: the same statistics for each size class named by ``dims``.
    """

    calls: int = 0
    traces: int = 0
    compilations: int = 0
    call_seconds: float = 0.0
    trace_seconds: float = 0.0
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    waste: float = 0.0
    groups: Mapping[str, "Stats"] = dataclasses.field(default_factory=Groups)


_LONGEST_WAIT = 1023


@dataclasses.dataclass(slots=True)
class Calls:
    """The calls of one executable with arrays of the same sizes.

    Nothing locks them (0.15 us a call): Python's own changes threads at calls and in
    loops, and so not within an addition. Nor is each one timed: one in 64 cost 0.1 us
    a call and more. The dispatcher counts down to the next that is timed.

    Attributes:
        valid: elements along dynamic sizes in each call.
        held: elements of the bucket they lie in.
        untimed: an element for each that the dispatcher serves before it times one. It
            takes the last: a number it would have to look for here, and to write here.
        due: the number of that one, of those the dispatcher serves.
        long: calls that returned and that the dispatcher did not know.
        short_seconds: seconds in the short ones before the last that was timed.
        latest: that one's number, and its seconds.
        long_seconds: seconds in the long ones.
    """

    valid: int
    held: int
    untimed: list[None] = dataclasses.field(default_factory=list)
    due: int = 0
    long: int = 0
    short_seconds: float = 0.0
    latest: tuple[int, float] = (0, 0.0)
    long_seconds: float = 0.0

    @property
    def short(self) -> int:
        """Calls that returned, of those that the dispatcher serves."""
        return self.due - len(self.untimed)

    @property
    def are_many(self) -> bool:
        """Whether the dispatcher serves a thousand before it times the next."""
        return len(self.untimed) >= _LONGEST_WAIT

    @property
    def count(self) -> int:
        """Calls that returned."""
        return self.short + self.long

    def called(self, seconds: float) -> None:
        """Counts one call that returned, and that the dispatcher did not know."""
        self.long += 1
        self.long_seconds += seconds

    def timed_one(self, seconds: float) -> None:
        """Notes one that was timed: the 1st, 3rd, 5th, 9th, ..., then each 1024th."""
        self.short_seconds = self._seconds_until_now()
        self.latest = self.short, seconds
        wait = min(max(self.short - 1, 1), _LONGEST_WAIT)
        self.untimed.extend([None] * wait)
        self.due += wait + 1

    def _seconds_until_now(self) -> float:
        """Each that was timed stands for those until the next."""
        number, seconds = self.latest
        return self.short_seconds + (self.short - number) * seconds

    def read(self) -> dict[str, Any]:
        """What they add to a tally."""
        count, seconds = self.count, self.long_seconds + self._seconds_until_now()
        valid, held = count * self.valid, count * self.held
        return {"calls": count, "call_seconds": seconds, "valid": valid, "held": held}


@dataclasses.dataclass
class Tally:
    """Counters that several threads may advance."""

    calls: int = 0
    traces: int = 0
    compilations: int = 0
    call_seconds: float = 0.0
    trace_seconds: float = 0.0
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    valid: int = 0
    held: int = 0

    def __post_init__(self):
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, ...], Calls] = {}

    def part(self, shaped: tuple[int, ...], valid: int, held: int) -> Calls:
        """Calls of the same shapes, which count themselves and are summed when read.

        Those of different Python integers share it: there is no end of them.
        """
        with self._lock:
            return self._parts.setdefault(shaped, Calls(valid, held))

    def called(self, seconds: float) -> None:
        """Counts one call that no executable of ours served."""
        with self._lock:
            self.calls += 1
            self.call_seconds += seconds

    def add(self, **amounts: int | float) -> None:
        """Adds to the named counters."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def read(self) -> dict[str, Any]:
        """The counters at one moment."""
        with self._lock:
            found, parts = dataclasses.asdict(self), list(self._parts.values())
        for part in parts:
            for name, amount in part.read().items():
                found[name] += amount
        return found

    @property
    def waste(self) -> float:
        """The share of elements along dynamic sizes that were padding."""
        found = self.read()
        return 1 - found["valid"] / found["held"] if found["held"] else 0.0


class _Current(threading.local):
    tally: Tally | None = None  # what a trace in this thread is counted for
    measuring: bool = False  # an outer trace already runs the clock
    traced_seconds: float = 0.0


class Ledger:
    """The tallies of one compiled function, by size class, and the running one."""

    def __init__(self):
        self._current = _Current()
        self._lock = threading.Lock()
        self._tallies: list[tuple[str, Tally]] = []
        self._uncached: dict[str, Tally] = {}

    @contextlib.contextmanager
    def building(self, group: str) -> Iterator[Tally]:
        """A tally for a new cache entry; what a failed one cost is still counted."""
        tally = Tally()
        try:
            yield tally
        except BaseException:
            self.uncached(group).add(**tally.read())
            raise
        with self._lock:
            self._tallies.append((group, tally))

    def uncached(self, group: str = "") -> Tally:
        """The tally of what has no cache entry: calls inside transformations."""
        if (tally := self._uncached.get(group)) is None:
            with self._lock:
                tally = self._uncached.setdefault(group, Tally())
        return tally

    @contextlib.contextmanager
    def tracing(self, tally: Tally | None = None) -> Iterator[Tally]:
        """Times a trace for tally; one inside another does not count twice."""
        current = self._current
        outer = current.tally, current.measuring
        tally = tally or current.tally or self.uncached()
        current.tally, current.measuring = tally, True
        start = time.perf_counter()
        try:
            yield tally
        finally:
            current.tally, current.measuring = outer
            if not current.measuring:
                seconds = time.perf_counter() - start
                current.traced_seconds += seconds
                tally.add(trace_seconds=seconds)

    @contextlib.contextmanager
    def calling(self, tally: Tally) -> Iterator[None]:
        """Counts a call and gives its traces to tally.

        A call inside a trace of the same function (recursion) is part of that trace:
        its seconds are counted there.
        """
        current = self._current
        outer, traced = current.tally, current.traced_seconds
        current.tally = tally
        start = time.perf_counter()
        try:
            yield
        finally:
            current.tally = outer
        seconds = time.perf_counter() - start - (current.traced_seconds - traced)
        tally.called(0.0 if current.measuring else seconds)

    def outside(self) -> Stats:
        """What has no cache entry, over all size classes."""
        return _total(list(self._uncached.values()))

    def read(self) -> Stats:
        """A snapshot of everything."""
        with self._lock:
            tallies = [*self._tallies, *self._uncached.items()]
        groups: dict[str, list[Tally]] = {}
        for group, tally in tallies:
            groups.setdefault(group, []).append(tally)
        named = {group: _total(members) for group, members in groups.items() if group}
        total = _total([tally for _, tally in tallies])
        return dataclasses.replace(total, groups=Groups(named))


def _total(tallies: Iterable[Tally]) -> Stats:
    total = Tally()
    for tally in tallies:
        total.add(**tally.read())
    counted = total.read()
    del counted["valid"], counted["held"]
    return Stats(**counted, waste=total.waste)
