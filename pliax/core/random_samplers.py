"""Where and how a stream becomes a value: placement, and the formulas that need care.

    sample(key, offset, sampler, operands, options, out_sharding) -> value

All formulas are `jax.random`'s, applied to the key `stream_at(key, offset)`. Two are
rearranged here. Bernoulli at high resolution takes its second uniform number from a
child stream, where `jax.random` reads on to word o + 2n. Permutations sort, and a sort
whose axis is sharded communicates: the sorted axis is cut off from the sharding of the
value by a gather that reads position i for element i (`_unsharded`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import index as as_index
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int, Key, Shaped, UInt32

from ._jax import is_symbolic_dim, is_tracing
from .random_stream import stream_at


def sample(
    key: UInt32[Array, "2"],
    offset: UInt32[Array, "2"],
    sampler: Callable,
    operands: dict[str, Any],
    options: dict[str, Any],
    out_sharding: Any,
) -> Shaped[Array, "..."]:
    """Draws from the stream at an offset, each device computing its own part.

    Args:
        key: the key of the stream.
        offset: the position of element 0.
        sampler: the formula, (key, **operands, **options) -> value.
        operands: its arrays.
        options: its static arguments.
        out_sharding: where the value shall live, a NamedSharding, or a PartitionSpec
            for the mesh of the context; None leaves it to the compiler.
    """
    sharding = _named_sharding(out_sharding)
    eager = not is_tracing()
    if sharding is not None and eager and isinstance(sharding.mesh, Mesh):
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
        key, offset = jax.device_put((key, offset), replicated)
    return _sample(key, offset, operands, sampler, tuple(options.items()), sharding)


@partial(jax.jit, static_argnames=("sampler", "options", "sharding"))
def _sample(
    key: UInt32[Array, "2"],
    offset: UInt32[Array, "2"],
    operands: dict[str, Any],
    sampler: Callable,
    options: tuple[tuple[str, Any], ...],
    sharding: NamedSharding | None,
) -> Shaped[Array, "..."]:
    def draw(key, offset, operands):
        return sampler(stream_at(key, offset), **operands, **dict(options))

    return _placed(draw, sharding)(key, offset, operands)


def _named_sharding(sharding: Any) -> NamedSharding | None:
    """Completes a PartitionSpec by the mesh of the context."""
    if sharding is None or isinstance(sharding, NamedSharding):
        return sharding
    if not isinstance(sharding, PartitionSpec):
        raise TypeError(
            "Generator: out_sharding must be a NamedSharding or a PartitionSpec, but "
            f"found {sharding!r}.\nName the axes of a mesh: NamedSharding(mesh, spec)."
        )
    eager = not is_tracing()
    mesh = jax.sharding.get_mesh() if eager else jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            f"Generator: out_sharding={sharding} names axes, but no mesh is set.\n"
            "Pass NamedSharding(mesh, spec), or draw under `with jax.set_mesh(mesh):`."
        )
    return NamedSharding(mesh, sharding)


def as_shape(shape: Any) -> tuple:
    """A tuple of sizes from an int or a sequence; symbolic sizes pass."""
    sizes = tuple(shape) if isinstance(shape, Sequence | np.ndarray) else (shape,)
    sizes = tuple(d if is_symbolic_dim(d) else as_index(d) for d in sizes)
    if any(not is_symbolic_dim(d) and d < 0 for d in sizes):
        raise ValueError(
            f"Generator: shape {sizes} was asked for; no size is negative."
        )
    return sizes


def bernoulli(
    key: Key[Array, ""], p: Shaped[Array, "..."], shape: tuple, mode: str
) -> Bool[Array, "..."]:
    """True with probability p: u < p, or at high resolution u + 2^-m v < p.

    u has m mantissa bits, v is the same word of the first child: 2m bits in all, and
    still one position per element.
    """
    p = jnp.broadcast_to(p, shape)
    value = jax.random.bernoulli(key, p, shape, mode)  # checks the arguments
    if mode == "low":
        return value
    same, parent = jax.random.clone(key), jax.random.clone(key)  # u is not new: u < p
    child = jax.random.split(parent, 1)[0]
    u, v = (jax.random.uniform(k, shape, p.dtype) for k in (same, child))
    resolution = jnp.asarray(2.0 ** -jnp.finfo(p.dtype).nmant, p.dtype)
    return v * resolution < p - u


def permuted_range(
    key: Key[Array, ""], n: Any, axis: int = 0, independent: bool = False
) -> Int[Array, " n"]:
    """The numbers 0, ..., n - 1 in random order; `independent` means nothing here."""
    del independent
    return _unsharded(jax.random.permutation(key, n, axis), 0)


def permutation(
    key: Key[Array, ""], x: Shaped[Array, "..."], axis: int, independent: bool
) -> Shaped[Array, "..."]:
    """The array with its axis in random order, or every vector in one of its own."""
    if independent:
        return _unsharded(jax.random.permutation(key, x, axis, True), axis)
    order = permuted_range(key, x.shape[axis])
    return jnp.take(x, order, axis, mode="clip", unique_indices=True)


def _unsharded(x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """The identity, through which no sharding of the axis reaches the producer of x.

    The partitioner carries the sharding of a gather's result to its indices, never to
    the axis gathered from. x is then computed whole on every device, which costs its
    memory and saves the all-to-all of a distributed sort.
    """
    index = jnp.arange(x.shape[axis], dtype=jnp.int32)
    return jnp.take(
        x, index, axis, mode="clip", unique_indices=True, indices_are_sorted=True
    )


def _placed(draw: Callable, sharding: NamedSharding | None) -> Callable:
    """Lets Auto axes constrain and Explicit axes type the value; Manual axes do none.

    Inside `auto_axes` every axis of the mesh is Auto, so that the constraint may name
    all of them; what leaves it is typed by the explicit ones.
    """
    if sharding is None:
        return draw
    explicit = sharding.mesh.explicit_axes
    if not explicit:
        return _constrained(draw, sharding)
    if set(explicit) == set(sharding.mesh.axis_names):
        return jax.sharding.auto_axes(draw, axes=explicit, out_sharding=sharding)
    typed = NamedSharding(sharding.mesh, _restricted(sharding.spec, explicit))
    constrained = _constrained(draw, sharding.spec)
    return jax.sharding.auto_axes(constrained, axes=explicit, out_sharding=typed)


def _constrained(draw: Callable, sharding: NamedSharding | PartitionSpec) -> Callable:
    def constrained(*args):
        value = draw(*args)
        if isinstance(sharding, NamedSharding):
            sharding.shard_shape(value.shape)  # raises where the shape does not divide
        return jax.lax.with_sharding_constraint(value, sharding)

    return constrained


def _restricted(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """Keeps the named axes of a specification."""

    def keep(entry: Any) -> Any:
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in names if name in axes) or None

    return PartitionSpec(*map(keep, spec))
