"""Which executable serves which sizes: buckets, and cases of their own."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pliax.core.dims import LARGEST
from pliax.core.marks import Dim, answer
from pliax.core.symbols import Symbol


_STEPS = 14  # buckets between a smallest and a largest size
_MOST_TRIED = 4096  # sizes from an end of a bucket, asked whether they are special
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


def geometric(
    low: int,
    high: int | None,
    histogram: Mapping[int, int] | None,
    *,
    steps: int = _STEPS,
) -> Buckets:
    """Lengths from `low` to `high`, at equal ratios or where sizes waste least.

    Args:
        low: the smallest size.
        high: the largest; without it, each length is a quarter longer than the last.
        histogram: how often each size occurs.
        steps: the most lengths there are between `low` and `high`.
    """
    if high is None:
        return Buckets((), _next_power)
    if histogram:
        return listed(_placed(low, high, histogram, steps))
    count = min(steps, high - low + 1)
    if count == 1:
        return listed((high,))
    ratio = (high / low) ** (1 / (count - 1))
    lengths = {max(low, math.ceil(low * ratio**i - 1e-9)) for i in range(count)}
    return listed(sorted({min(n, high) for n in lengths} | {high}))


def in_multiples(
    low: int, high: int | None, histogram: Mapping[int, int] | None, step: int
) -> Buckets:
    """Geometric lengths of sizes that are all multiples of one number."""
    if step == 1:
        return geometric(low, high, histogram)
    counts: dict[int, int] = {}
    for n, count in (histogram or {}).items():
        counts[-(-n // step)] = counts.get(-(-n // step), 0) + count
    most = None if high is None else high // step
    found = geometric(-(-low // step), most, counts)
    lengths = tuple(step * n for n in found.lengths)
    return Buckets(lengths, lambda size: step * found.choose(-(-size // step)))


def listed(lengths: Sequence[int]) -> Buckets:
    """Given lengths; a size takes the first that holds it."""
    lengths = tuple(sorted(set(lengths)))
    return Buckets(lengths, lambda size: lengths[bisect.bisect_left(lengths, size)])


def chosen(choose: Callable[[int], Any], name: str, owner: str) -> Buckets:
    """By a function of the user's."""

    def checked(size: int) -> int:
        length = answer(choose, size, f"the buckets of {name}")
        if not isinstance(length, int | np.integer) or length < size:
            raise ValueError(
                f"{owner}: the buckets of {name} gave {length!r} for {size}.\n"
                f"Return an integer of at least {size}."
            )
        return int(length)

    return Buckets((), checked)


EXACT = Buckets((), lambda size: size)


@functools.lru_cache(maxsize=4096)
def _next_power(size: int) -> int:
    """1, 2, 3, 4, 5, 7, 9, 12, …: each the last one times 1.25, rounded up."""
    length = 1
    while length < size:
        length = max(length + 1, math.ceil(length * _RATIO))
    return length


def _placed(low: int, high: int, histogram: Mapping[int, int], steps: int) -> list[int]:
    """The lengths of least expected waste, by dynamic programming over seen sizes.

    held[k][j] is the least number of elements in which the j smallest sizes lie with k
    lengths: the last length holds all sizes after the i-th, for the best i.
    """
    sizes = np.array(sorted({n for n in histogram if low <= n <= high} | {high}))
    total = np.cumsum([0, *(histogram.get(int(n), 0) for n in sizes)])
    held = np.concatenate([[0.0], np.full(len(sizes), np.inf)])
    best, last = [held], []
    for _ in range(steps):
        held, before = np.full_like(held, np.inf), np.zeros(len(held), int)
        held[0] = 0.0
        for j in range(1, len(held)):
            costs = best[-1][:j] + sizes[j - 1] * (total[j] - total[:j])
            before[j] = np.argmin(costs)
            held[j] = costs[before[j]]
        best.append(held)
        last.append(before)
    k = min(range(steps), key=lambda k: best[k + 1][-1])
    lengths, j = [], len(sizes)
    while j:
        lengths.append(int(sizes[j - 1]))
        k, j = k - 1, last[k][j]
    return lengths


def expected_waste(buckets: Buckets, histogram: Mapping[int, int]) -> float:
    """The share of elements that are padding, over a histogram of sizes."""
    used = sum(n * count for n, count in histogram.items())
    held = sum(buckets.choose(n) * count for n, count in histogram.items())
    return 1 - used / held if held else 0.0


def buckets_of(
    dim: Dim | None,
    symbol: Symbol,
    histogram: Mapping[int, int] | None,
    owner: str,
) -> Buckets:
    """The buckets of a named size; `histogram` places those that are geometric."""
    if dim is None or dim.buckets == "geometric":
        step = dim.multiple_of if dim else 1
        return in_multiples(max(symbol.low, 1), symbol.high, histogram, step)
    if dim.buckets is None:
        return EXACT
    given: Any = dim.buckets
    if callable(given):
        return chosen(given, symbol.name, owner)
    return listed(given)


def special_part(
    is_special: Callable[[int], Any], value: int, low: int, high: int
) -> tuple[int, int]:
    """The part of a bucket between its first and its last special size.

    A special size far from both ends of a long bucket is a part of its own where none
    is near the upper end.
    """
    near_high = range(high, max(high - _MOST_TRIED, value) - 1, -1)
    last = next(filter(is_special, near_high), None)
    if last is None:
        return value, value
    near_low = range(low, min(low + _MOST_TRIED, value) + 1)
    first = next(filter(is_special, near_low), None)
    if first is None:
        below = range(max(value - _MOST_TRIED, low), value)
        first = low if any(map(is_special, below)) else value
    return first, last


def range_text(ranges: Mapping[str, tuple[int, int]]) -> str:
    """The sizes an executable serves, "b=8, t<=64"."""
    texts = []
    for name, (low, high) in ranges.items():
        upper = f"{name}<={high}" if high < LARGEST else name
        texts.append(f"{name}={high}" if low == high else upper)
    return ", ".join(texts)
