"""Operations that move whole axes: broadcast, transpose, reshape, slice, pad, join."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core.dims import Size

from .layouts import Bucket, Factors, Padded, choose, product, same
from .rules import bind, explicit_sharding, refuse, rule, sizes_of


@rule("broadcast_in_dim")
def broadcast_in_dim(bucket: Bucket, eqn: Any, x: Padded, *sizes: Padded) -> Padded:
    """Existing axes keep their factors; new ones have one."""
    if sizes:
        raise refuse(eqn, "its shape is an array")
    shape = [bucket.size(n) for n in sizes_of(eqn.outvars[0])]
    axes: list[Factors] = [(n,) for n in shape]
    kept, dropped = [], []
    for axis, target in enumerate(eqn.params["broadcast_dimensions"]):
        size = product(x.axes[axis])
        if same(size, shape[target]) or (len(x.axes[axis]) > 1 and size != 1):
            axes[target] = x.axes[axis]
            kept.append(target)
        else:
            dropped += x.places(axis)
    ends = np.cumsum([0, *map(len, axes)])
    places = [p for target in kept for p in range(ends[target], ends[target + 1])]
    lengths = bucket.shape([f for axis in axes for f in axis])
    data = lax.squeeze(x.data, dropped) if dropped else x.data
    spread = explicit_sharding(eqn, eqn.params["sharding"], axes)
    data = lax.broadcast_in_dim(data, lengths, places, out_sharding=spread)
    fresh = [n for target, n in enumerate(shape) if target not in kept]
    is_whole = x.rank == 0 or not any(isinstance(n, Size) for n in fresh)
    return Padded(data, tuple(axes), x.fill if is_whole else None)


@rule("transpose")
def transpose(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """Logical axes in another order, each with its physical ones."""
    return permuted(x, eqn.params["permutation"])


def permuted(x: Padded, order: Sequence[int]) -> Padded:
    """The axes of an array in another order."""
    places = [place for axis in order for place in x.places(axis)]
    axes = tuple(x.axes[a] for a in order)
    return Padded(lax.transpose(x.data, places), axes, x.fill)


@rule("squeeze")
def squeeze(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """Without some axes of size 1."""
    gone = eqn.params["dimensions"]
    places = [place for axis in gone for place in x.places(axis)]
    axes = tuple(a for i, a in enumerate(x.axes) if i not in gone)
    return Padded(lax.squeeze(x.data, places), axes, x.fill)


@rule("rev")
def rev(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """The valid elements of each axis in reverse; a merged axis factor by factor."""
    places = {p for axis in eqn.params["dimensions"] for p in x.places(axis)}
    exact = [p for p in places if not isinstance(x.factors[p], Size)]
    data = lax.rev(x.data, exact) if exact else x.data
    for place in sorted(places.difference(exact)):
        count = lax.iota(jnp.int32, data.shape[place])
        index = bucket.scalar(x.factors[place]) - 1 - count
        data = jnp.take(data, index, axis=place, mode="clip")
    return Padded(data, x.axes, x.fill if len(exact) == len(places) else None)


# --- reshape --------------------------------------------------------------------------


@rule("reshape")
def reshape(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """Factors are dealt out anew; only where they do not fit is anything moved."""
    order = eqn.params["dimensions"]
    if order is not None:
        x = permuted(x, order)
    wanted = [bucket.size(n) for n in sizes_of(eqn.outvars[0])]
    x = Padded(x.data, tuple((f,) for f in x.factors), x.fill)  # all merges undone
    return regrouped(bucket, x, wanted)


def regrouped(bucket: Bucket, x: Padded, wanted: Sequence[Any]) -> Padded:
    """An array whose axes have one factor each, reshaped to the wanted sizes."""
    axes: list[Factors] = []
    for group, sizes in _groups(bucket, list(x.factors), list(wanted)):
        dealt = _deal(bucket, group, sizes)
        if dealt is None:
            x, dealt = _split_group(bucket, x, len(axes_of(axes)), group, sizes)
        axes += dealt
        flat = axes_of(axes)
        rest = x.factors[len(flat) :]
        x = Padded(x.data, tuple((f,) for f in (*flat, *rest)), x.fill)
    return _with_axes(x, axes)


def axes_of(axes: Sequence[Factors]) -> list[Any]:
    """All factors of some axes."""
    return [f for axis in axes for f in axis]


def _with_axes(x: Padded, axes: Sequence[Factors]) -> Padded:
    """The same factors under other axes; an axis of size 1 may need a place."""
    data, flat, place = x.data, [], 0
    for axis in axes:
        if axis == ():
            data = lax.expand_dims(data, [place])
            flat.append((1,))
            place += 1
        else:
            flat.append(axis)
            place += len(axis)
    return Padded(data, tuple(flat), x.fill)


def _groups(bucket: Bucket, have: list[Any], want: list[Any]) -> list[Any]:
    """Runs of factors and of sizes with equal products, as short as possible."""
    groups, i, j = [], 0, 0
    while i < len(have) or j < len(want):
        group, sizes = have[i : i + 1], want[j : j + 1]
        i, j = i + len(group), j + len(sizes)
        while not same(_size(bucket, group), _size(bucket, sizes)):
            if i == len(have) and j == len(want):
                break
            if (_takes_factor(bucket, group, sizes) and i < len(have)) or j == len(
                want
            ):
                group.append(have[i])
                i += 1
            else:
                sizes.append(want[j])
                j += 1
        groups.append((group, sizes))
    return groups


def _size(bucket: Bucket, sizes: Sequence[Any]) -> Any:
    return bucket.size(product(tuple(sizes)))


def _takes_factor(bucket: Bucket, group: Sequence[Any], sizes: Sequence[Any]) -> bool:
    """Which side of a group is behind; a guess that only decides how short it gets."""
    return bucket.length(_size(bucket, group)) <= bucket.length(_size(bucket, sizes))


def _deal(
    bucket: Bucket, group: Sequence[Any], sizes: Sequence[Any]
) -> list[Factors] | None:
    """Consecutive factors for each size, if they happen to fit."""
    left, dealt = list(group), []
    for n in sizes:
        axis: list[Any] = []
        while not same(_size(bucket, axis), n):
            if not left:
                return None
            axis.append(left.pop(0))
        dealt.append(axis)
    while left and same(left[0], 1) and dealt:
        dealt[-1].append(left.pop(0))
    return [tuple(axis) for axis in dealt] if not left else None


def _split_group(
    bucket: Bucket,
    x: Padded,
    start: int,
    group: Sequence[Any],
    sizes: Sequence[Any],
) -> tuple[Padded, list[Factors]]:
    """The factors of a group packed into one axis and split into the sizes."""
    before = tuple((f,) for f in x.factors[:start])
    after = tuple((f,) for f in x.factors[start + len(group) :])
    merged = Padded(x.data, (*before, tuple(group), *after), x.fill)
    axis = len(before)
    merged = bucket.packed(merged, axis)
    split = bucket.split(merged, axis, tuple(sizes))
    return split, [(bucket.size(n),) for n in sizes]


# --- new axes -------------------------------------------------------------------------


@rule("tile")
def tile(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """Each axis repeated as a whole: the number of times is one more factor."""
    counts = [bucket.size(n) for n in eqn.params["reps"]]
    axes, kept, place = [], [], 0
    for n, own in zip(counts, x.axes, strict=True):
        repeated = () if same(n, 1) else (n,)
        axes.append((*repeated, *own))
        place += len(repeated)
        kept += range(place, place + len(own))
        place += len(own)
    lengths = bucket.shape(axes_of(axes))
    fill = x.fill if all(isinstance(n, int) for n in counts) else None
    return Padded(lax.broadcast_in_dim(x.data, lengths, kept), tuple(axes), fill)


@rule("stack")
def stack(bucket: Bucket, eqn: Any, *xs: Padded) -> Padded:
    """Arrays of one shape along a new axis."""
    axis, aligned = eqn.params["axis"], bucket.aligned(xs)
    before = aligned[0].axes[:axis]
    place = len(axes_of(before))
    data = bind(eqn, *(x.data for x in aligned), axis=place)
    return Padded(data, (*before, (len(xs),), *aligned[0].axes[axis:]))


@rule("unstack")
def unstack(bucket: Bucket, eqn: Any, x: Padded) -> list[Padded]:
    """The slices along an axis of fixed size."""
    axis = eqn.params["axis"]
    x = bucket.packed(x, axis)
    axes = (*x.axes[:axis], *x.axes[axis + 1 :])
    (place,) = x.places(axis)
    return [Padded(data, axes, x.fill) for data in bind(eqn, x.data, axis=place)]


# --- slices ---------------------------------------------------------------------------


@rule("slice")
def slice_(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """Every axis from its start, in its steps."""
    starts = eqn.params["start_indices"]
    strides = eqn.params["strides"] or (1,) * x.rank
    sizes = sizes_of(eqn.outvars[0])
    for axis, (start, stride, size) in enumerate(
        zip(starts, strides, sizes, strict=True)
    ):
        x = sliced(bucket, x, axis, bucket.size(start), bucket.size(size), stride)
    return x


@rule("split")
def split(bucket: Bucket, eqn: Any, x: Padded) -> list[Padded]:
    """Consecutive slices of one axis."""
    axis, start, pieces = eqn.params["axis"], 0, []
    for size in eqn.params["sizes"]:
        pieces.append(sliced(bucket, x, axis, bucket.size(start), bucket.size(size), 1))
        start = size + start
    return pieces


def sliced(
    bucket: Bucket, x: Padded, axis: int, start: Any, size: Any, stride: Any
) -> Padded:
    """`size` elements of one axis from `start`, every `stride`-th."""
    stride = bucket.size(stride)
    if same(start, 0) and same(stride, 1) and same(size, product(x.axes[axis])):
        return x
    x = bucket.packed(x, axis)
    (place,), count = x.places(axis), bucket.length(size)
    axes = (*x.axes[:axis], (size,), *x.axes[axis + 1 :])
    if isinstance(start, int) and isinstance(stride, int):
        end = start + (count - 1) * stride + 1
        if count > 0 and end <= x.data.shape[place]:
            data = lax.slice_in_dim(x.data, start, end, stride, place)
            return Padded(data, axes)
    if count == 0:
        return Padded(lax.slice_in_dim(x.data, 0, 0, 1, place), axes)
    index = bucket.scalar(start) + lax.iota(jnp.int32, count) * bucket.scalar(stride)
    return Padded(jnp.take(x.data, index, axis=place, mode="clip"), axes)


@rule("pad")
def pad(bucket: Bucket, eqn: Any, x: Padded, value: Padded) -> Padded:
    """Each axis in turn; its own padding first holds the value that comes around it."""
    sizes = sizes_of(eqn.outvars[0])
    for axis, config in enumerate(eqn.params["padding_config"]):
        if any(not same(bucket.size(n), 0) for n in config):
            low, _, interior = (bucket.size(n) for n in config)
            size = bucket.size(sizes[axis])
            x = _padded_axis(bucket, x, value.data, axis, low, interior, size)
    return x


def _padded_axis(
    bucket: Bucket, x: Padded, value: Any, axis: int, low: Any, interior: Any, size: Any
) -> Padded:
    x = bucket.packed(x, axis)
    (place,), (count,) = x.places(axis), x.axes[axis]
    axes = (*x.axes[:axis], (size,), *x.axes[axis + 1 :])
    length = bucket.length(size)
    place_of = lax.iota(jnp.int32, length) - bucket.scalar(low)
    step = bucket.scalar(interior) + 1
    index = lax.div(place_of, jnp.full_like(place_of, step))
    is_taken = (place_of >= 0) & (index < bucket.scalar(count))
    is_taken &= lax.rem(place_of, jnp.full_like(place_of, step)) == 0
    shape = (*x.data.shape[:place], length, *x.data.shape[place + 1 :])
    if x.data.shape[place] == 0:
        return Padded(lax.broadcast(value, shape), axes)
    taken = jnp.take(x.data, index, axis=place, mode="clip")
    mask = lax.broadcast_in_dim(is_taken, shape, (place,))
    return Padded(choose(mask, taken, lax.full_like(taken, value)), axes)


@rule("concatenate")
def concatenate(bucket: Bucket, eqn: Any, *xs: Padded) -> Padded:
    """Each piece is written where the valid part of the one before ends."""
    axis = eqn.params["dimension"]
    pieces = [bucket.packed(x, axis) for x in xs]
    others = [
        axes for i, axes in enumerate(_common_axes(bucket, pieces, axis)) if i != axis
    ]
    pieces = [_arranged_around(bucket, x, axis, others) for x in pieces]
    size = bucket.size(sizes_of(eqn.outvars[0])[axis])
    first = pieces[0]
    (place,) = first.places(axis)
    axes = (*first.axes[:axis], (size,), *first.axes[axis + 1 :])
    data = lax.concatenate([x.data for x in pieces], place)
    if any(isinstance(x.axes[axis][0], Size) for x in pieces[:-1]):
        start: Any = 0
        for x in pieces:
            at = bucket.scalar(start)
            data = lax.dynamic_update_slice_in_dim(data, x.data, at, place)
            start = x.axes[axis][0] + start
    return Padded(_cut(data, place, bucket.length(size)), axes)


def _common_axes(bucket: Bucket, xs: Sequence[Padded], axis: int) -> list[Factors]:
    rest = [Padded(x.data, tuple(a for i, a in enumerate(x.axes))) for x in xs]
    return [
        x_axes if i == axis else bucket.common([x.axes[i] for x in rest])
        for i, x_axes in enumerate(rest[0].axes)
    ]


def _arranged_around(
    bucket: Bucket, x: Padded, axis: int, others: Sequence[Factors]
) -> Padded:
    axes = list(others)
    axes.insert(axis, x.axes[axis])
    return bucket.arranged(x, axes)


def _cut(data: Any, place: int, length: int) -> Any:
    """A physical axis made longer or shorter at its end."""
    missing = length - data.shape[place]
    if missing <= 0:
        return lax.slice_in_dim(data, 0, length, 1, place)
    widths = [(0, missing if i == place else 0, 0) for i in range(data.ndim)]
    return lax.pad(data, jnp.zeros((), data.dtype), widths)
