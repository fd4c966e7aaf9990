"""Convolutions: windows whose elements are weighted by a kernel and summed.

Batch, filters and groups are free; channels and the kernel's places are summed over,
so both sides are 0 in their padding. A kernel of padded size needs more: its 0 meets
valid elements of the array, and 0 times infinity is NaN. So if the array holds anything
that is not finite, the sums are taken one window at a time, over its true size.

What XLA makes of a value that is not finite and a 0 that is only implied depends on the
backend, and so does whether the padded result equals the plain one in such a place:

- A kernel's infinity gives NaN here where it meets a 0 beyond the edge of the array or
  between its dilated elements; in XLA on GPUs, and on CPUs for float32, bfloat16 and
  float16. On CPUs, XLA skips such places for float64 and for dilated arrays.
- An array's infinity between the elements of a dilated kernel is skipped where the size
  of the kernel is symbolic; on GPUs, XLA gives NaN.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core.dims import Size

from .contractions import zero
from .layouts import Bucket, Factors, Padded, product, same
from .reductions import same_size
from .rules import bind, refuse, rule, sizes_of
from .sliding import Window, extremes, fit, seen


@rule("conv_general_dilated")
def conv_general_dilated(
    bucket: Bucket, eqn: Any, x: Padded, kernel: Padded
) -> Sequence[Padded]:
    """Groups are split off, padding is 0, and the sizes in memory are convolved."""
    of_x, of_kernel, of_result = numbers = eqn.params["dimension_numbers"]
    windows = [_window(bucket, eqn, i) for i in range(len(of_x) - 2)]
    for n, m in zip(of_x[2:], of_kernel[2:], strict=True):
        x, kernel = bucket.packed(x, n), bucket.packed(kernel, m)
    x, kernel, groups = _grouped(bucket, eqn, x, kernel)
    axes = _result_axes(x, kernel, windows, groups, numbers)
    for factors, size in zip(axes, sizes_of(eqn.outvars[0]), strict=True):
        if not same(bucket.size(product(factors)), bucket.size(size)):
            raise refuse(eqn, f"its result has {size} where groups leave {factors}")
    shape = tuple(math.prod(bucket.shape(factors)) for factors in axes)
    if 0 in shape:
        out = eqn.outvars[0].aval
        nothing = lax.full(bucket.shape(out.shape), 0, out.dtype)
        return [bucket.simple(nothing, out.shape)]
    x, kernel = _cleared(bucket, x, kernel, groups, numbers)
    wider = [_wider(bucket, window) for window in windows]
    data, windows, params = _fitted(bucket, x, [w for w, _ in wider], numbers)
    params |= {
        "feature_group_count": bucket.length(groups.of_channels),
        "batch_group_count": bucket.length(groups.of_batch),
    }
    result = _convolved(bucket, eqn, data, _merged(kernel), windows, params)
    for place, (_, start) in zip(of_result[2:], wider, strict=True):
        if start is not None:
            result = lax.dynamic_slice_in_dim(result, start, shape[place], place)
    lengths = bucket.shape([f for factors in axes for f in factors])
    return [Padded(lax.reshape(result, lengths), axes)]


def _window(bucket: Bucket, eqn: Any, i: int) -> Window:
    """The window along the i-th spatial axis."""
    p, (_, of_kernel, of_result) = eqn.params, eqn.params["dimension_numbers"]
    window = Window(
        sizes_of(eqn.invars[1])[of_kernel[2 + i]],
        p["window_strides"][i],
        p["padding"][i][0],
        p["lhs_dilation"][i],
        p["rhs_dilation"][i],
        sizes_of(eqn.outvars[0])[of_result[2 + i]],
    )
    window = Window(*map(bucket.size, window))
    if found := window._replace(size=0).symbolic:
        raise refuse(eqn, f"its window has {', '.join(found)}")
    return window


def _wider(bucket: Bucket, window: Window) -> tuple[Window, Any]:
    """More windows with the most low padding, and which of them is the true first one.

    So the array need not be spread out in memory where its dilation and a symbolic low
    padding meet: in the gradient of a convolution with strides and "SAME" padding.
    """
    if window.base == 1 or window.stride != 1 or not isinstance(window.low, Size):
        return window, None
    least, most = extremes(bucket, window.low)
    count = bucket.length(window.count) + most - least
    start = np.int32(most) - bucket.scalar(window.low)
    return window._replace(low=most, count=count), start


# --- axes -----------------------------------------------------------------------------


class Groups(NamedTuple):
    """How many independent convolutions are side by side, at most one of them not 1.

    Attributes:
        of_channels: each has its own channels of the array.
        of_batch: each has its own part of the batch.
    """

    of_channels: Any
    of_batch: Any


def _grouped(
    bucket: Bucket, eqn: Any, x: Padded, kernel: Padded
) -> tuple[Padded, Padded, Groups]:
    """Groups as a first factor wherever they are; channels that meet agree."""
    (batch, channels, *_), (filters, inputs, *_), _ = eqn.params["dimension_numbers"]
    names = "feature_group_count", "batch_group_count"
    groups = Groups(*(bucket.size(eqn.params[name]) for name in names))
    if not same(groups.of_channels, 1):
        kernel = _split_off(bucket, eqn, kernel, filters, groups.of_channels)
        factors = (groups.of_channels, *kernel.axes[inputs])
        return bucket.split(x, channels, factors), kernel, groups
    if not same(groups.of_batch, 1):
        kernel = _split_off(bucket, eqn, kernel, filters, groups.of_batch)
        x = _split_off(bucket, eqn, x, batch, groups.of_batch)
    common = bucket.common([x.axes[channels], kernel.axes[inputs]])
    x = bucket.arranged(x, _with(x.axes, channels, common))
    return x, bucket.arranged(kernel, _with(kernel.axes, inputs, common)), groups


def _split_off(bucket: Bucket, eqn: Any, x: Padded, axis: int, groups: Any) -> Padded:
    """The axis with the groups as its first factor."""
    factors = x.axes[axis]
    if len(factors) > 1 and same(factors[0], groups):
        return x
    x = bucket.packed(x, axis)
    (size,) = x.axes[axis]
    if not same(bucket.size(groups * (size // groups)), size):
        raise refuse(eqn, f"{groups} groups need a multiple of {groups}, not {size}")
    return bucket.split(x, axis, (groups, size // groups))


def _with(axes: Sequence[Factors], axis: int, factors: Factors) -> tuple[Factors, ...]:
    return (*axes[:axis], factors, *axes[axis + 1 :])


def _result_axes(
    x: Padded, kernel: Padded, windows: Sequence[Window], groups: Groups, numbers: Any
) -> tuple[Factors, ...]:
    (batch, *_), (filters, *_), of_result = numbers
    batches = x.axes[batch]
    if not same(groups.of_batch, 1):
        batches = batches[1:] or (1,)
    counts = [(window.count,) for window in windows]
    found = dict(zip(of_result, (batches, kernel.axes[filters], *counts), strict=True))
    return tuple(found[axis] for axis in range(len(found)))


def _cleared(
    bucket: Bucket, x: Padded, kernel: Padded, groups: Groups, numbers: Any
) -> tuple[Padded, Padded]:
    """Zeros in the padding of whatever is summed over.

    And wherever there are groups: XLA multiplies the kernels of other groups by 0 (on
    CPUs, those of groups of examples), so a NaN in one would come through.
    """
    (_, channels, *places), (_, inputs, *weights), _ = numbers
    summed = not all(same_size(bucket, kernel.axes[i]) for i in (inputs, *weights))
    if summed or not all(same(n, 1) for n in groups):
        kernel, x = bucket.filled(kernel, zero(kernel)), bucket.filled(x, zero(x))
    if not all(same_size(bucket, x.axes[i]) for i in (channels, *places)):
        x = bucket.filled(x, zero(x))
    return x, kernel


def _merged(x: Padded) -> Any:
    """The physical array with one axis for each logical one."""
    ends = np.cumsum([len(axis) for axis in x.axes])
    parts = np.split(np.asarray(x.data.shape, int), ends[:-1])
    return lax.reshape(x.data, [math.prod(map(int, part)) for part in parts])


# --- sums -----------------------------------------------------------------------------


def _fitted(
    bucket: Bucket, x: Padded, windows: Sequence[Window], numbers: Any
) -> tuple[Any, list[Window], dict[str, Any]]:
    """The array in memory, windows as they move over it, and these as parameters."""
    data, fitted, padding = _merged(x), [], []
    for place, window in zip(numbers[0][2:], windows, strict=True):
        length = bucket.length(window.size)
        data, ends, base = fit(bucket, data, place, window, length, zero(x))
        fitted.append(window._replace(low=ends[0], base=base))
        padding.append(ends)
    params = {
        "padding": tuple(padding),
        "lhs_dilation": tuple(w.base for w in fitted),
        "window_strides": tuple(w.stride for w in fitted),
        "rhs_dilation": tuple(w.dilation for w in fitted),
    }
    return data, fitted, params


def _convolved(
    bucket: Bucket,
    eqn: Any,
    x: Any,
    kernel: Any,
    windows: Sequence[Window],
    params: dict[str, Any],
) -> Any:
    """By XLA, unless a 0 in the padding of the kernel would meet an infinity."""
    is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    if not is_inexact or not any(isinstance(w.size, Size) for w in windows):
        return bind(eqn, x, kernel, **params)
    return lax.cond(
        jnp.all(lax.is_finite(jnp.abs(x))),
        lambda: bind(eqn, x, kernel, **params),
        lambda: _one_by_one(bucket, eqn, x, kernel, windows, params),
    )


def _one_by_one(
    bucket: Bucket,
    eqn: Any,
    x: Any,
    kernel: Any,
    windows: Sequence[Window],
    params: dict[str, Any],
) -> Any:
    """Each window is written out, cut to its true size, and multiplied."""
    of_x, of_kernel, of_result = eqn.params["dimension_numbers"]
    x, kernel = lax.transpose(x, of_x), lax.transpose(kernel, of_kernel)
    x, kernel = _group_first(x, kernel, params)
    counts = tuple(bucket.length(w.count) for w in windows)
    summed = tuple(range(2, x.ndim))
    numbers = ((summed, summed), ((0,), (0,)))

    def at(flat: Any) -> Any:
        part = x
        for i, first in enumerate(jnp.unravel_index(flat, counts)):
            length = kernel.shape[3 + i]
            part = _part(bucket, part, 3 + i, windows[i], first, length)
        return lax.dot_general(
            part,
            kernel,
            numbers,
            precision=eqn.params["precision"],
            preferred_element_type=eqn.outvars[0].aval.dtype,
        )

    found = lax.map(at, lax.iota(jnp.int32, math.prod(counts)))
    _, groups, batch, filters = found.shape
    found = lax.transpose(found, (2, 1, 3, 0))
    found = lax.reshape(found, (batch, groups * filters, *counts))
    return lax.transpose(found, tuple(map(int, np.argsort(of_result))))


def _group_first(x: Any, kernel: Any, params: dict[str, Any]) -> tuple[Any, Any]:
    """(group, batch, channel, …) and (group, filter, channel, …)."""
    by_channel, by_batch = params["feature_group_count"], params["batch_group_count"]
    (batch, _, *places), (filters, inputs, *rest) = x.shape, kernel.shape
    groups, batch = by_channel * by_batch, batch // by_batch
    x = lax.reshape(x, (by_batch, batch, by_channel, inputs, *places))
    x = jnp.moveaxis(x, 2, 0)
    x = lax.reshape(x, (groups, batch, inputs, *places))
    return x, lax.reshape(kernel, (groups, filters // groups, inputs, *rest))


def _part(
    bucket: Bucket, x: Any, place: int, window: Window, first: Any, length: int
) -> Any:
    """What one window sees along an axis, and 0 where it sees nothing."""
    firsts = lax.reshape(first, (1,))
    index, taken = seen(bucket, window, x.shape[place], firsts, length)
    part = jnp.take(x, index[0], axis=place, mode="clip")
    mask = lax.broadcast_in_dim(taken[0], part.shape, (place,))
    return lax.select(mask, part, lax.full_like(part, 0))
