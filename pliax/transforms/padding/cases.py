"""Cases of a size born from data: the rest of a program once for each.

    cases_of : bucket, count of a size, what follows  ->  Cases, where the user asked
    in_cases : bucket, Cases, rest : bucket -> results  ->  results

The device chooses. The rest of the program is in the branches of a `lax.switch`, in
each with arrays as long as the largest size of its case; results get the length they
have without cases. Only in the last case another size may have cases: there are as many
more programs as conditions, not the product over sizes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core.dims import Size
from pliax.core.marks import is_special
from pliax.core.unbacked import counted

from .layouts import Bucket, Padded


@dataclasses.dataclass(frozen=True)
class Cases:
    """What may be known of a size that only the device knows.

    Attributes:
        size: the size.
        ranges: the smallest and the largest value of each case; the values that meet no
            condition are the last.
        starts: the values where another case begins than that of the value before.
        numbers: the case of the smallest value, and the one that begins at each start.
    """

    size: Size
    ranges: tuple[tuple[int, int], ...]
    starts: np.ndarray
    numbers: np.ndarray

    def number(self, value: Any) -> Any:
        """The case of a value, an int32 scalar at run time."""
        place = jnp.sum(value >= jnp.asarray(self.starts), dtype=jnp.int32)
        return jnp.asarray(self.numbers)[place]


def cases_of(bucket: Bucket, eqn: Any, following: Sequence[Any]) -> Cases | None:
    """The cases that begin where a size is counted; the first condition that holds.

    A size that gets its value more than once has none: the second need not lie in the
    case of the first. That happens where JAX traces an inner program once for two calls
    and in the derivatives of `jax.checkpoint`.
    """
    conditions, size = eqn.params["specialize_on"], eqn.params["size"]
    if not conditions or not bucket.may_have_cases:
        return None
    name = str(size)
    is_fixed = str(bucket.size(size)) != name  # a check says what it is, or equals
    if is_fixed or name in bucket.again or name in counted(following):
        return None
    ranges, starts, numbers = _chosen(conditions, *bucket.ranges[name])
    return Cases(size, ranges, starts, numbers) if len(ranges) > 1 else None


@functools.lru_cache(maxsize=256)
def _chosen(conditions: tuple[Callable[[int], Any], ...], low: int, high: int) -> Any:
    """The ranges of all cases that occur, and where they begin."""
    first = [_first(conditions, n) for n in range(low, high + 1)]
    kinds, numbers = np.unique(np.array(first), return_inverse=True)
    places = [np.flatnonzero(numbers == i) + low for i in range(len(kinds))]
    ranges = tuple((int(p[0]), int(p[-1])) for p in places)
    changes = np.flatnonzero(np.diff(numbers)) + 1
    numbers = numbers[np.concatenate([[0], changes])]
    return ranges, (changes + low).astype(np.int32), numbers.astype(np.int32)


def _first(conditions: Sequence[Callable[[int], Any]], value: int) -> int:
    for i, condition in enumerate(conditions):
        if is_special(condition, value, f"specialize_on[{i}] of a size born from data"):
            return i
    return len(conditions)


def in_cases(
    bucket: Bucket,
    cases: Cases,
    rest: Callable[[Bucket], list[Padded]],
    shapes: Sequence[tuple[Any, ...]],
) -> list[Padded]:
    """The results of the rest of a program, of these shapes.

    What it checks and the sizes that are born in it are the bucket's.
    """
    texts: list[str] = []

    def branch(low: int, high: int) -> tuple[list[Any], dict[str, Any], list[Any]]:
        scope = bucket.case(cases.size, low, high)
        scope.may_have_cases = (low, high) == cases.ranges[-1]
        results = map(scope.simplified, rest(scope))
        checks = scope.checks or []
        texts[:] = [text for text, _ in checks]
        born = {n: v for n, v in scope.values.items() if v is not bucket.values.get(n)}
        pairs = zip(results, shapes, strict=True)
        data = [_as_long(x, bucket.shape(sizes)) for x, sizes in pairs]
        return data, born, [held for _, held in checks]

    number = cases.number(bucket.scalar(cases.size))
    branches = [functools.partial(branch, low, high) for low, high in cases.ranges]
    data, born, held = lax.switch(number, branches)
    for name, found in born.items():
        bucket.count(name, found)
    for text, holds in zip(texts, held, strict=True):
        bucket.check(text, holds)
    return [bucket.simple(x, sizes) for x, sizes in zip(data, shapes, strict=True)]


def _as_long(x: Padded, shape: tuple[int, ...]) -> Any:
    """The data of an array with one factor an axis, at the start of a longer one."""
    data = jnp.asarray(x.data)
    if data.shape == shape:
        return data
    if jnp.issubdtype(data.dtype, jax.dtypes.extended):  # keys know no zero
        for axis, n in enumerate(shape):
            index = np.minimum(np.arange(n), max(data.shape[axis] - 1, 0))
            data = jnp.take(data, index, axis=axis)
        return data
    widths = [(0, n - m, 0) for n, m in zip(shape, data.shape, strict=True)]
    return lax.pad(data, jnp.zeros((), data.dtype), widths)
