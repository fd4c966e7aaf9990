"""Manual mesh axes: what varies from device to device inside `jax.shard_map`.

JAX types every array in a `shard_map` by the mesh axes it varies over, and its
primitives want operands that vary alike. jnp inserts the casts between them; loops
that start from a constant, and programs that were traced outside, need these functions.
Outside a `shard_map` there are no such axes and nothing happens.

What `custom_partitioning` asks of each device has no such types; it says so itself.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax


_is_of_one_device = ContextVar("_is_of_one_device", default=False)


@contextlib.contextmanager
def program_of_one_device() -> Iterator[None]:
    """What is traced here runs on each device as it is: no compiler partitions it."""
    token = _is_of_one_device.set(True)
    try:
        yield
    finally:
        _is_of_one_device.reset(token)


def may_be_partitioned() -> bool:
    """Whether XLA may have to divide what is traced here among several devices."""
    return jax.device_count() > 1 and not _is_of_one_device.get()


def varying_axes(*trees: Any) -> frozenset[str]:
    """The mesh axes over which any leaf varies."""
    leaves = jax.tree.leaves(trees)
    return frozenset().union(*(jax.typeof(x).mat.varying for x in leaves))


def vary(tree: Any, axes: frozenset[str]) -> Any:
    """The same values, with the type of arrays which vary over `axes` as well."""
    if not axes:
        return tree
    return jax.tree.map(lambda x: _vary(x, axes), tree)


def _vary(x: Any, axes: frozenset[str]) -> Any:
    missing = tuple(sorted(axes - jax.typeof(x).mat.varying))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def sum_like(x: Any, primal: Any) -> Any:
    """A cotangent summed over the axes over which its primal does not vary."""
    extra = tuple(sorted(varying_axes(x) - varying_axes(primal)))
    return jax.lax.psum(x, extra) if extra else x
