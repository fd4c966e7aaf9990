"""Which executable serves which sizes: buckets, and cases of their own."""

import bisect
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pliax.core.guards import LARGEST, Symbol
from pliax.core.marks import Dim


_STEPS = 14  # buckets between a smallest and a largest size
_MOST_ENUMERATED = 4096  # sizes of a bucket asked one by one whether they are special
_RATIO = 1.25  # between buckets where no largest size is known


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The lengths that arrays get along one named size.

    Attributes:
        lengths: ascending; empty where they go on for ever.
        choose: from a size to the length of its bucket.
    """

    lengths: tuple[int, ...]
    choose: Callable[[int], Any]

    def interval(self, size: int) -> tuple[int, int]:
        """The sizes that share a bucket with this one, as far as that is known."""
        length = self.choose(size)
        if self is EXACT:
            return size, size
        if not self.lengths:
            return 1, length
        place = bisect.bisect_left(self.lengths, length)
        return (self.lengths[place - 1] + 1 if place else 1), length


def geometric(low: int, high: int | None, histogram: Mapping[int, int] | None) -> Any:
    """At most 14 lengths from `low` to `high`; without `high`, a ratio of 1.25."""
    if high is None:
        return Buckets((), _next_power)
    if histogram:
        return listed(_placed(low, high, histogram))
    count = min(_STEPS, high - low + 1)
    if count == 1:
        return listed((high,))
    ratio = (high / low) ** (1 / (count - 1))
    steps = {max(low, math.ceil(low * ratio**i - 1e-9)) for i in range(count)}
    return listed(sorted({min(n, high) for n in steps} | {high}))


def listed(lengths: Sequence[int]) -> Buckets:
    """Given lengths; a size takes the first that holds it."""
    lengths = tuple(sorted(set(lengths)))

    def choose(size: int) -> int:
        place = bisect.bisect_left(lengths, size)
        if place == len(lengths):
            raise ValueError(
                f"the size {size} is larger than the largest bucket {lengths[-1]}"
            )
        return lengths[place]

    return Buckets(lengths, choose)


def chosen(choose: Callable[[int], Any]) -> Buckets:
    """By a function of the user's."""

    def checked(size: int) -> int:
        length = choose(size)
        if not isinstance(length, int) or length < size:
            raise ValueError(
                f"buckets({size}) is {length!r}, which does not hold {size} elements"
            )
        return length

    return Buckets((), checked)


EXACT = Buckets((), lambda size: size)


@functools.lru_cache(maxsize=4096)
def _next_power(size: int) -> int:
    """1, 2, 3, 4, 5, 7, 9, 12, …: each the last one times 1.25, rounded up."""
    length = 1
    while length < size:
        length = max(length + 1, math.ceil(length * _RATIO))
    return length


def _placed(low: int, high: int, histogram: Mapping[int, int]) -> list[int]:
    """The lengths of least expected waste, by dynamic programming over seen sizes."""
    sizes = sorted({n for n in histogram if low <= n <= high} | {high})
    counts = [histogram.get(n, 0) for n in sizes]
    total = [0]
    for count in counts:
        total.append(total[-1] + count)
    best = [[0.0] * (len(sizes) + 1)] + [
        [0.0, *[math.inf] * len(sizes)] for _ in range(_STEPS)
    ]
    best[0] = [0.0, *[math.inf] * len(sizes)]
    last = [[0] * (len(sizes) + 1) for _ in range(_STEPS + 1)]
    for k in range(1, _STEPS + 1):
        for j in range(1, len(sizes) + 1):
            for i in range(j):
                cost = best[k - 1][i] + sizes[j - 1] * (total[j] - total[i])
                if cost < best[k][j]:
                    best[k][j], last[k][j] = cost, i
    k = min(range(1, _STEPS + 1), key=lambda k: best[k][-1])
    lengths, j = [], len(sizes)
    while j:
        lengths.append(sizes[j - 1])
        k, j = k - 1, last[k][j]
    return lengths


def expected_waste(buckets: Buckets, histogram: Mapping[int, int]) -> float:
    """The share of elements that are padding, over a histogram of sizes."""
    used = sum(n * count for n, count in histogram.items())
    held = sum(buckets.choose(n) * count for n, count in histogram.items())
    return 1 - used / held if held else 0.0


def holds(constraint: str, sizes: Mapping[str, int]) -> bool:
    """Whether sizes satisfy a condition that `jax.export` reads; unknown names do."""
    functions = {"mod": operator.mod, "floordiv": operator.floordiv}
    names = {"__builtins__": {}, "max": max, "min": min, **functions, **sizes}
    try:
        return bool(eval(constraint, names))
    except NameError:
        return True


def buckets_of(dim: Dim | None, symbol: Symbol) -> Buckets:
    """The buckets of a named size."""
    if dim is None or dim.buckets == "geometric":
        histogram = dim.histogram if dim else None
        return geometric(max(symbol.low, 1), symbol.high, histogram)
    if dim.buckets is None:
        return EXACT
    given: Any = dim.buckets
    if callable(given):
        return chosen(given)
    return listed(given)


def special_part(
    condition: Callable[[int], Any], value: int, low: int, high: int
) -> tuple[int, int]:
    """The part of a bucket between its first and its last special size."""
    if high - low > _MOST_ENUMERATED:
        return value, value
    special = [n for n in range(low, high + 1) if condition(n)]
    return special[0], special[-1]


def range_text(ranges: Mapping[str, tuple[int, int]]) -> str:
    """The sizes an executable serves, "b=8, t<=64"."""
    texts = []
    for name, (low, high) in ranges.items():
        upper = f"{name}<={high}" if high < LARGEST else name
        texts.append(f"{name}={high}" if low == high else upper)
    return ", ".join(texts)
