"""Elementwise operations: each element depends on those at its own place."""

import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core.float_formulas import on_the_device
from pliax.core.primitives import ELEMENTWISE

from .layouts import Bucket, Factors, Padded, product, same
from .rules import bind, explicit_sharding, refuse, rule, sizes_of


# What is folded where all operands' padding is known; no others, since NaN is not 0.
_FOLDED = {"add": operator.add, "add_any": operator.add, "mul": operator.mul}
_FOLDED |= {"sub": operator.sub, "neg": operator.neg, "max": max, "min": min}
_KEPT = {
    "copy",
    "copy_p",
    "convert_element_type",
    "stop_gradient",
    "optimization_barrier",
}


# Lowered to one loop for all elements, which ends when the last has converged.
_ITERATED = {"igamma", "igamma_grad_a", "igammac", "random_gamma_grad"}
_ITERATED |= {"regularized_incomplete_beta"}


@rule(*ELEMENTWISE)
def at_each_place(bucket: Bucket, eqn: Any, *operands: Padded) -> Padded:
    """Same place, same operation; scalars and axes of size 1 stand for whole ones."""
    sizes = [bucket.size(n) for n in sizes_of(eqn.outvars[0])]
    if not sizes:
        return bucket.exact(bind(eqn, *(x.data for x in operands)))
    axes = [_factors(bucket, operands, i, n) for i, n in enumerate(sizes)]
    operands = tuple(_met(bucket, x, axes, sizes) if x.rank else x for x in operands)
    if (
        eqn.primitive.name in _ITERATED
    ):  # of padding, which may never: all are good at 1
        operands = tuple(bucket.filled(x, 1.0) for x in operands)
    data = bind(eqn, *(x.data for x in operands))
    return Padded(data, tuple(axes), _fold(eqn, operands, axes))


def _factors(
    bucket: Bucket, operands: Sequence[Padded], axis: int, size: Any
) -> Factors:
    """What the operands that have this axis agree on."""
    own = [x.axes[axis] for x in operands if x.rank]
    return bucket.common([a for a in own if same(bucket.size(product(a)), size)])


def _met(
    bucket: Bucket, x: Padded, axes: Sequence[Factors], sizes: Sequence[Any]
) -> Padded:
    """An operand in the factors of the result, or 1 where it stands for an axis."""
    wanted = [
        (1,) * len(factors) if bucket.size(product(own)) == 1 and n != 1 else factors
        for own, factors, n in zip(x.axes, axes, sizes, strict=True)
    ]
    return bucket.arranged(x, wanted)


def _fold(eqn: Any, operands: Sequence[Padded], axes: Sequence[Factors]) -> Any:
    """What the padding of the result holds, where that of all operands is known."""
    if any(x.rank and x.axes != tuple(axes) for x in operands):
        return None  # an axis of size 1 puts valid elements beside padding
    fills = [x.fill for x in operands]
    name = eqn.primitive.name
    if name in _KEPT:
        return _cast(fills[0], eqn.outvars[0].aval.dtype)
    operation = _FOLDED.get(name)
    if operation is None or not all(type(f) in (int, float) for f in fills):
        return None
    return _cast(operation(*fills), eqn.outvars[0].aval.dtype)


def _cast(fill: Any, dtype: Any) -> Any:
    """A fill in a dtype, where it is an integer that neither wraps nor is rounded."""
    if type(fill) not in (int, float) or not np.isfinite(fill) or fill != fill // 1:
        return None
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return int(fill) if limits.min <= fill <= limits.max else None
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    most = min(2 ** (jnp.finfo(dtype).nmant + 1), float(jnp.finfo(dtype).max))
    return float(fill) if abs(fill) <= most else None


@rule("bitcast_convert_type")
def bitcast(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """Elementwise, but for an axis of bytes that comes last and has a fixed size."""
    shape = sizes_of(eqn.outvars[0])
    data = bind(eqn, x.data)
    if len(shape) > x.rank:
        return Padded(data, (*x.axes, (shape[-1],)))
    return Padded(data, x.axes[: len(shape)])


@rule("optimization_barrier", "device_put")
def barrier(bucket: Bucket, eqn: Any, *operands: Padded) -> list[Padded]:
    """The identity on many arrays of any shapes."""
    values = bind(eqn, *(x.data for x in operands))
    pairs = zip(values, operands, strict=True)
    return [Padded(data, x.axes, x.fill) for data, x in pairs]


@rule("stage", "zeros_like")
def stage(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """A value as it is, or zeros of its shape."""
    return Padded(bind(eqn, x.data), x.axes)


@rule("tie")
def tie(bucket: Bucket, eqn: Any, x: Padded, y: Padded) -> Padded:
    """The second operand."""
    return y


@rule("empty")
def empty(bucket: Bucket, eqn: Any) -> Padded:
    """An array of any contents."""
    shape = sizes_of(eqn.outvars[0])
    zeros = lax.full(bucket.shape(shape), 0, eqn.outvars[0].aval.dtype)
    return bucket.simple(zeros, shape, 0)


@rule("dim_as_value")
def dim_as_value(bucket: Bucket, eqn: Any) -> Padded:
    """A size as a scalar."""
    dtype = eqn.outvars[0].aval.dtype
    of_dtype = bucket.wide if dtype == jnp.int64 else bucket.scalar
    scalar = of_dtype(eqn.params["dim"])
    if scalar.dtype == dtype:
        return Padded(scalar, ())
    return Padded(lax.convert_element_type(scalar, dtype), ())


@rule("real_of_sizes")
def real_of_sizes(bucket: Bucket, eqn: Any) -> Padded:
    """A float that Python would have computed from sizes."""
    how = dict(eqn.params)
    sizes = [bucket.wide(n) for n in how.pop("sizes")]
    return Padded(on_the_device(sizes=sizes, **how), ())


@rule("iota")
def iota(bucket: Bucket, eqn: Any, *sizes: Padded) -> Padded:
    """Counts along one axis, beyond the valid elements as well."""
    shape = eqn.params["shape"]
    if sizes:
        raise refuse(eqn, "its shape is an array")
    lengths, dtype = bucket.shape(shape), eqn.params["dtype"]
    axes = [(bucket.size(n),) for n in shape]
    spread = explicit_sharding(eqn, eqn.params["sharding"], axes)
    axis = eqn.params["dimension"]
    data = lax.broadcasted_iota(dtype, lengths, axis, out_sharding=spread)
    return bucket.simple(data, shape)
