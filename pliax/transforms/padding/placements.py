"""Equations that say where arrays are: on which devices, on the host, in a reference.

Arrays are placed in their buckets, which must divide among the devices as they are.
Where they would be handed out with their padding, the program is refused.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from pliax.core.dims import Size
from pliax.core.manual_axes import vary, varying_axes

from .formulas import by_formula
from .interpreter import HIGHER_ORDER, run_whole
from .layouts import Bucket, Padded
from .rules import bind, refuse, rule, sizes_of


HIGHER_ORDER |= {"shard_map"}


@rule("pure_callback", "io_callback", "debug_callback", "debug_print")
def callback(bucket: Bucket, eqn: Any, *operands: Padded) -> Padded:
    """Never: what the host is shown it sees whole."""
    raise refuse(eqn, "the host would see the padding")


@rule("sharding_constraint")
def sharding_constraint(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """Of the bucket, if it divides among the devices."""
    x = bucket.simplified(x)
    _require_divisible(eqn, x, eqn.params["sharding"])
    return Padded(bind(eqn, x.data), x.axes, x.fill)


@rule("reshard")
def reshard(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """Of the bucket, if it divides among the devices of an Explicit mesh."""
    x = bucket.simplified(x)
    _require_divisible(eqn, x, eqn.params["dst_sharding"])
    return Padded(bind(eqn, x.data), x.axes, x.fill)


def placed(
    bucket: Bucket, eqn: Any, xs: Sequence[Padded], shardings: Sequence[Any] | None
) -> Sequence[Padded]:
    """Arrays where a jitted function wants its arguments or its results."""
    given = shardings or [None] * len(xs)
    pairs = zip(xs, given, strict=True)
    return [
        _at(bucket, eqn, x, s) if isinstance(s, jax.sharding.Sharding) else x
        for x, s in pairs
    ]


def _at(bucket: Bucket, eqn: Any, x: Padded, sharding: Any) -> Padded:
    x = bucket.simplified(x)
    _require_divisible(eqn, x, sharding)
    return Padded(lax.with_sharding_constraint(x.data, sharding), x.axes, x.fill)


def _require_divisible(eqn: Any, x: Padded, sharding: Any) -> None:
    if not isinstance(sharding, jax.sharding.Sharding):
        return
    try:
        sharding.shard_shape(x.data.shape)
    except ValueError as error:
        reason = f"the bucket {x.data.shape} does not divide among the devices: {error}"
        raise refuse(eqn, reason) from error


@rule("shard_map")
def shard_map(bucket: Bucket, eqn: Any, *operands: Padded) -> list[Padded]:
    """Over axes without padding: each device pads its part as the whole is padded.

    The body gets the sizes as arguments.
    """
    params, body = eqn.params, eqn.params["jaxpr"]
    xs = [bucket.simplified(x) for x in operands]
    names = sorted(bucket.values)
    sizes = [sizes_of(v) for v in eqn.outvars]
    _require_whole(bucket, eqn, [x.factors for x in xs], params["in_specs"])
    _require_whole(bucket, eqn, sizes, params["out_specs"])

    def on_device(values: list[Any], arrays: list[Any]) -> list[Any]:
        own = Bucket(bucket.ranges, dict(zip(names, values, strict=True)), bucket.equal)
        own.checks = None
        pairs = zip(arrays, body.invars, strict=True)
        given = [own.simple(x, sizes_of(v)) for x, v in pairs]
        return run_whole(own, getattr(body, "jaxpr", body), body.consts, given)

    found = jax.shard_map(
        on_device,
        mesh=params["mesh"],
        in_specs=([P()] * len(names), list(params["in_specs"])),
        out_specs=list(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )([bucket.values[name] for name in names], [x.data for x in xs])
    if any(x.shape != bucket.shape(n) for x, n in zip(found, sizes, strict=True)):
        raise refuse(eqn, "its results have other lengths than the bucket")
    return [bucket.simple(x, n) for x, n in zip(found, sizes, strict=True)]


@rule("psum", "psum_invariant", "pmax", "pmin", "ppermute")
def between_devices(
    bucket: Bucket, eqn: Any, *operands: Padded
) -> Padded | Sequence[Padded]:
    """Of elements at the same place on each device, whose arrays lie alike.

    Numbers among its axes are those of jax.vmap: there it is a reduction.
    """
    axes = _axes_of(eqn)
    reduce = _REDUCTIONS.get(eqn.primitive.name)
    if reduce and all(isinstance(axis, int) for axis in axes):
        return by_formula(
            bucket, eqn, lambda *xs: [reduce(x, axes) for x in xs], *operands
        )
    if not all(isinstance(name, str) for name in axes):
        raise refuse(eqn, "it is over an axis of jax.vmap, which may be padded")
    results = bind(eqn, *(x.data for x in operands))
    if not eqn.primitive.multiple_results:
        return Padded(results, operands[0].axes)
    return [Padded(r, x.axes) for r, x in zip(results, operands, strict=True)]


_REDUCTIONS = {
    "psum": lax.reduce_sum,
    "psum_invariant": lax.reduce_sum,
    "pmax": lax.reduce_max,
    "pmin": lax.reduce_min,
}


def _axes_of(eqn: Any) -> tuple[Any, ...]:
    """The mesh axes of a collective; numbers are axes of arrays."""
    given = eqn.params.get("axes", eqn.params.get("axis_name"))
    return given if isinstance(given, tuple) else (given,)


@rule("pvary")
def varying(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """The identity."""
    (data,) = vary([x.data], varying_axes([x.data]) | set(eqn.params["axes"]))
    return Padded(data, x.axes, x.fill)


def _require_whole(
    bucket: Bucket, eqn: Any, shapes: Sequence[Sequence[Any]], specs: Sequence[Any]
) -> None:
    """No axis with padding is divided among devices."""
    for shape, spec in zip(shapes, specs, strict=True):
        for size, axes in zip(shape, (*spec, *(None,) * len(shape)), strict=False):
            if axes and isinstance(bucket.size(size), Size):
                raise refuse(eqn, f"the size {size} is divided among devices")


_REFUSED = {
    "custom_partitioning": "its partitioning has a say in the sizes",
    "run_state": "references to padded arrays may be written anywhere",
    "new_ref": "references to padded arrays may be written anywhere",
    "ref": "references to padded arrays may be written anywhere",
}


@rule(*_REFUSED)
def refused(bucket: Bucket, eqn: Any, *operands: Padded) -> Padded:
    """What is not looked into; without padding and symbolic sizes it is kept as is."""
    raise refuse(eqn, _REFUSED[eqn.primitive.name])
