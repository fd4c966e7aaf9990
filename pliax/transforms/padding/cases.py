"""Cases of a size born from data: the rest of a program once for each.

    cases_of : bucket, equation  ->  Cases, where the user asked for some
    in_cases : bucket, Cases, rest : bucket -> results  ->  results

The device chooses. The rest of the program is in the branches of a `lax.switch`, in
each with arrays as long as the largest size of its case; results get the length they
have without cases. Within a case no other size has cases: there are as many more
programs as conditions, not the product over sizes.
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
from pliax.core.unbacked import count_p

from .layouts import Bucket, Padded


@dataclasses.dataclass(frozen=True)
class Cases:
    """What may be known of a size that only the device knows.

    Attributes:
        size: the size.
        ranges: the smallest and the largest value of each case; the values that meet no
            condition are the last.
        table: the number of the case of each value from 0 on.
    """

    size: Size
    ranges: tuple[tuple[int, int], ...]
    table: np.ndarray


def cases_of(bucket: Bucket, eqn: Any) -> Cases | None:
    """The cases that begin with an equation; the first condition that holds counts."""
    if eqn.primitive is not count_p or not bucket.has_cases:
        return None
    conditions, size = eqn.params["specialize_on"], eqn.params["size"]
    if not conditions:
        return None
    values = range(bucket.length(size) + 1)
    chosen = np.array([_first(conditions, n) for n in values])
    kinds, table = np.unique(chosen, return_inverse=True)
    if len(kinds) == 1:
        return None
    places = [np.flatnonzero(table == i) for i in range(len(kinds))]
    # of an empty array not everything can be asked that can be asked of a padded one
    ranges = tuple((int(p[0]), max(int(p[-1]), 1)) for p in places)
    return Cases(size, ranges, table.astype(np.int32))


def _first(conditions: Sequence[Callable[[int], Any]], value: int) -> int:
    numbered = enumerate(conditions)
    return next((i for i, c in numbered if c(value)), len(conditions))


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
        scope.has_cases = (low, high) == cases.ranges[-1]
        results = map(scope.simplified, rest(scope))
        checks = scope.checks or []
        texts[:] = [text for text, _ in checks]
        born = {n: v for n, v in scope.values.items() if n not in bucket.values}
        pairs = zip(results, shapes, strict=True)
        data = [_as_long(x, bucket.shape(sizes)) for x, sizes in pairs]
        return data, born, [held for _, held in checks]

    number = jnp.asarray(cases.table)[bucket.scalar(cases.size)]
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
