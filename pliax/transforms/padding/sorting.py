"""Order: sorting and the k largest; the padding comes after every valid element."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core.dims import Size

from .layouts import Bucket, Padded, choose
from .reductions import highest, same_size
from .rules import bind, refuse, rule


@rule("sort")
def sort(bucket: Bucket, eqn: Any, *operands: Padded) -> list[Padded]:
    """All keys of the padding are the last there are, and a stable sort keeps it last.

    Padding stands behind all valid elements, so a valid key equal to the fill (the
    largest integer, NaN) stays ahead of it. An unstable sort is made stable, since it
    may exchange the two; of lone integers nobody can tell.
    """
    axis = eqn.params["dimension"]
    xs = bucket.aligned([bucket.packed(x, axis) for x in operands])
    (place,) = xs[0].places(axis)
    if same_size(bucket, xs[0].axes[axis]):
        results = bind(eqn, *(x.data for x in xs), dimension=place)
    else:
        keys = eqn.params["num_keys"]
        _refuse_short_floats(eqn, xs[:keys])
        xs = [bucket.filled(x, last(x.dtype)) for x in xs[:keys]] + xs[keys:]
        stable = eqn.params["is_stable"] or not _is_lone_integer(xs)
        data = (x.data for x in xs)
        results = bind(eqn, *data, dimension=place, is_stable=stable)
    return [Padded(r, x.axes, x.fill) for r, x in zip(results, xs, strict=True)]


def _refuse_short_floats(eqn: Any, keys: Sequence[Padded]) -> None:
    """Floats of 8 bits, of which some call -0 NaN and XLA has no order for all."""
    for x in keys:
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1:
            raise refuse(eqn, f"no value of {x.dtype} comes behind all others")


def _is_lone_integer(xs: Sequence[Padded]) -> bool:
    return len(xs) == 1 and not jnp.issubdtype(xs[0].dtype, jnp.inexact)


def last(dtype: Any) -> Any:
    """What JAX sorts after everything else of its kind: of floats, NaN."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return complex("nan+nanj")
    if jnp.issubdtype(dtype, jnp.floating):
        has_nan = np.isnan(np.asarray(np.nan, dtype))
        return float("nan") if has_nan else float(jnp.finfo(dtype).max)
    return highest(dtype)


@rule("top_k")
def top_k(bucket: Bucket, eqn: Any, x: Padded) -> list[Padded]:
    """Padding is below everything, and a stable choice takes a tied valid one first."""
    axis, k = eqn.params["axis"], bucket.size(eqn.params["k"])
    x = bucket.packed(x, axis)
    (place,) = x.places(axis)
    data, count, stable = x.data, bucket.length(k), eqn.params["is_stable"]
    if not same_size(bucket, x.axes[axis]):
        _refuse_short_floats(eqn, [x])
        mask, stable = bucket.valid(x.axes), True
        data = choose(mask, data, _lowest(data))
    if count > data.shape[place]:  # the bounds of k may be wider than those of t
        missing = count - data.shape[place]
        config = [(0, missing if i == place else 0, 0) for i in range(data.ndim)]
        data = lax.pad(data, _lowest(lax.full((), 0, data.dtype)), config)
    results = bind(eqn, data, axis=place, k=count, is_stable=stable)
    axes = (*x.axes[:axis], (k,), *x.axes[axis + 1 :])
    return [Padded(r, axes) for r in results]


def _lowest(x: Any) -> Any:
    """An array of what top_k takes last.

    XLA orders floats as IEEE's totalOrder does, in which the NaN with all bits set is
    below -inf and every other NaN with that sign.
    """
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = jnp.dtype(f"int{8 * x.dtype.itemsize}")
        ones = lax.full_like(x, -1, bits)
        return lax.bitcast_convert_type(ones, x.dtype)
    return lax.full_like(x, jnp.iinfo(x.dtype).min if x.dtype != jnp.bool_ else False)


@rule("approx_top_k")
def approx_top_k(bucket: Bucket, eqn: Any, x: Padded) -> list[Padded]:
    """Along an axis without padding; what it finds depends on how long the axis is."""
    axis = eqn.params["reduction_dimension"] % x.rank
    if not same_size(bucket, x.axes[axis]) or isinstance(eqn.params["k"], Size):
        raise refuse(
            eqn, "what it finds depends on the length of the axis, which is padded"
        )
    x = bucket.packed(x, axis)
    (place,) = x.places(axis)
    results = bind(eqn, x.data, reduction_dimension=place)
    return [
        Padded(r, (*x.axes[:axis], (r.shape[place],), *x.axes[axis + 1 :]))
        for r in results
    ]
