"""Manual mesh axes: what varies from device to device inside `jax.shard_map`.

JAX types every array in a `shard_map` by the mesh axes it varies over, and its
primitives want operands that vary alike. jnp inserts the casts between them; loops
that start from a constant, and programs that were traced outside, need these functions.
Outside a `shard_map` there are no such axes and nothing happens.
"""

from typing import Any

import jax


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
