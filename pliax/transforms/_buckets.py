"""The buckets of one function: where each size lies, and what that should waste."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from pliax.core.dims import LARGEST
from pliax.core.marks import Dim, is_special
from pliax.core.symbols import Symbol

from ._entries import Entry
from ._families import Reading
from ._logs import tell_bucket
from ._shape_specs import names_in
from .specialization import (
    Buckets,
    buckets_of,
    expected_waste,
    geometric,
    special_part,
)


_SPREAD = "its axis is divided by devices"


@dataclasses.dataclass(eq=False)
class Placement:
    """Which bucket a size runs in; each table of buckets is placed once.

    Attributes:
        dims: what the user says of named sizes.
        seen: how many calls of earlier runs had which sizes, by name.
        owner: the function that errors name.
    """

    dims: Mapping[str, Dim]
    seen: Mapping[str, Mapping[int, int]]
    owner: str
    _tables: dict[Any, Buckets] = dataclasses.field(default_factory=dict)

    def ranges(
        self, entry: Entry, values: dict[str, int], leaves: list[Any]
    ) -> tuple[dict[str, tuple[int, int]], tuple[str, int] | None]:
        """The sizes that share an executable with a call's, and what is special of it.

        That is a name and the number of its condition.

        Sizes along which an argument is spread over devices are exact: a bucket would
        be spread otherwise than what it holds.
        """
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
                tell_bucket(self.owner, name, value, value, why)
            else:
                placed.append(name)
        special = self.special({name: values[name] for name in placed})
        for name in placed:
            number = special[1] if special and special[0] == name else None
            value, symbol = values[name], symbols[name]
            ranges[name] = self.interval(symbol, value, number)
            why = functools.partial(self.why, symbol, number)
            tell_bucket(self.owner, name, value, ranges[name][1], why)
        return ranges, special

    def special(self, sizes: Mapping[str, int]) -> tuple[str, int] | None:
        """The first of all conditions that holds: of which size, and its number.

        One condition is enough for a call, so that those of several sizes are no
        cross product.
        """
        for name, size in sizes.items():
            number = self._condition(self.dims.get(name), size)
            if number is not None:
                return name, number
        return None

    def interval(
        self, symbol: Symbol, size: int, special: int | None
    ) -> tuple[int, int]:
        """The sizes that share an executable with this one.

        Args:
            symbol: the named size.
            size: its value.
            special: the number of the condition that the executable is for, if any.
        """
        name, dim = symbol.name, self.dims.get(symbol.name)
        key = name, symbol.low, symbol.high
        table = self._tables.get(key)
        if table is None:
            table = buckets_of(dim, symbol, self._smoothed(symbol), self.owner)
            self._tables[key] = table
        low, high = table.interval(size)
        low = max(low, symbol.low)
        if special is None or dim is None:
            return low, high
        return special_part(lambda n: _holds(dim, special, n), size, low, high)

    def why(self, symbol: Symbol, special: int | None) -> str:
        """What chose the bucket of a size, for the log."""
        dim = self.dims.get(symbol.name)
        if special is not None:
            return f"specialize_on[{special}] holds"
        if dim is not None and dim.buckets is None:
            return "buckets=None"
        if dim is not None and dim.buckets != "geometric":
            return "by the function" if callable(dim.buckets) else "of the list"
        if symbol.high is None:
            return "growing by a quarter, without a max"
        is_placed = bool(self._histogram(symbol.name))
        return "placed by the histogram" if is_placed else "geometric"

    def _condition(self, dim: Dim | None, size: int) -> int | None:
        """The number of the first condition that holds of one size."""
        numbers = range(len(dim.specialize_on)) if dim else ()
        return next((i for i in numbers if _holds(dim, i, size)), None)

    def _histogram(self, name: str) -> Mapping[int, int]:
        """How often each size occurs: the user's word, else that of earlier runs."""
        dim = self.dims.get(name)
        return (dim.histogram if dim else None) or self.seen.get(name, {})

    def _smoothed(self, symbol: Symbol) -> Mapping[int, int]:
        """The histogram that places buckets.

        To what earlier runs saw one call of each geometric length is added: few calls
        say little about sizes that did not occur in them.
        """
        dim, histogram = self.dims.get(symbol.name), self._histogram(symbol.name)
        if not histogram or symbol.high is None or (dim and dim.histogram):
            return histogram
        lengths = geometric(max(symbol.low, 1), symbol.high, None).lengths
        return Counter(histogram) + Counter(lengths)

    def expected(self, symbol: Symbol) -> str | None:
        """What buckets waste of a size that has a histogram, in words."""
        name, dim = symbol.name, self.dims.get(symbol.name)
        histogram = {
            n: count
            for n, count in self._histogram(name).items()
            if symbol.low <= n <= (n if symbol.high is None else symbol.high)
        }
        if not histogram:
            return None
        lengths = {
            n: self.interval(symbol, n, self._condition(dim, n))[1] for n in histogram
        }
        waste = expected_waste(Buckets((), lengths.__getitem__), histogram)
        count = len(set(lengths.values()))
        source = (
            "its histogram" if dim and dim.histogram else "the sizes of earlier runs"
        )
        buckets = "1 bucket" if count == 1 else f"{count} buckets"
        return f"expected waste of {name}: {waste:.1%} in {buckets}, over {source}"


def _holds(dim: Any, number: int, size: int) -> bool:
    """Whether one of the conditions of a Dim says that a size is special."""
    asked = f"specialize_on[{number}] of {dim.name}"
    return is_special(dim.specialize_on[number], size, asked)


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
