"""Products: both sides are 0 beyond a contracted axis, since 0 times NaN is NaN."""

from collections.abc import Sequence
from typing import Any

from .layouts import Bucket, Padded
from .reductions import same_size, zero_of
from .rules import bind, rule, sizes_of


@rule("dot_general")
def dot_general(bucket: Bucket, eqn: Any, a: Padded, b: Padded) -> Padded:
    """Batch, then what is left of each side; free axes may hold anything."""
    (a_sum, b_sum), (a_batch, b_batch) = eqn.params["dimension_numbers"]
    a, b = _matched(bucket, a, b, (*a_sum, *a_batch), (*b_sum, *b_batch))
    if any(not same_size(bucket, a.axes[i]) for i in a_sum):
        a, b = bucket.filled(a, zero(a)), bucket.filled(b, zero(b))
    numbers = (
        (_places(a, a_sum), _places(b, b_sum)),
        (_places(a, a_batch), _places(b, b_batch)),
    )
    axes = [a.axes[i] for i in a_batch]
    axes += [x for i, x in enumerate(a.axes) if i not in (*a_sum, *a_batch)]
    axes += [x for i, x in enumerate(b.axes) if i not in (*b_sum, *b_batch)]
    return Padded(bind(eqn, a.data, b.data, dimension_numbers=numbers), tuple(axes))


@rule("ragged_dot_general")
def ragged_dot_general(bucket: Bucket, eqn: Any, *operands: Padded) -> Padded:
    """Rows in groups, one after the other: padding comes behind the last, and is 0.

    JAX itself wants the number of groups; in the padding of a batch all are empty.
    """
    xs = [bucket.simplified(x) for x in operands]
    data = bind(eqn, *(bucket.filled(x, zero(x)).data for x in xs))
    return bucket.simple(data, sizes_of(eqn.outvars[0]))


def zero(x: Padded) -> Any:
    """0 of the type that constants of its dtype have."""
    return zero_of(x.dtype)


def _places(x: Padded, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(place for axis in axes for place in x.places(axis))


def _matched(
    bucket: Bucket, a: Padded, b: Padded, of_a: Sequence[int], of_b: Sequence[int]
) -> tuple[Padded, Padded]:
    """Axes that meet get the same factors."""
    a_axes, b_axes = list(a.axes), list(b.axes)
    for i, j in zip(of_a, of_b, strict=True):
        a_axes[i] = b_axes[j] = bucket.common([a.axes[i], b.axes[j]])
    return bucket.arranged(a, a_axes), bucket.arranged(b, b_axes)
