"""Placements: which part of each array lives where."""

import math
from typing import Any

import jax
import numpy as np
from jax.core import Tracer


def distribute(tree: Any, mesh: jax.sharding.Mesh, spec: Any) -> Any:
    """Places every array of a pytree on a mesh.

    Leaves may be JAX arrays, NumPy arrays, Python numbers or PRNG keys; the result
    holds the same values as JAX arrays with a ``NamedSharding``. Inside a traced
    function the placement is a constraint for the compiler instead of a copy.

    With several processes each one calls this with the same values, as for
    ``jax.device_put``: a value is whole on each host, not that host's share of it.

    Args:
        tree: a pytree of arrays.
        mesh: where to, for example ``data_parallel_mesh()``.
        spec: one ``PartitionSpec`` for all leaves, or a pytree prefix of ``tree`` with
            a PartitionSpec, or None for replication, at each leaf.

    Returns:
        The pytree, placed.

    Raises:
        TypeError: if spec holds something other than a PartitionSpec or None, or tree
            holds something that is not an array.
        ValueError: if spec is no prefix of tree, is longer than the rank of an array,
            names an axis that the mesh does not have, or splits a dimension unevenly.

    Examples:
        >>> import numpy as np
        >>> from pliax.distributed import data_parallel_mesh, distribute
        >>> mesh = data_parallel_mesh()
        >>> batch = {"tokens": np.zeros((2 * mesh.size, 16), np.int32)}
        >>> placed = distribute(batch, mesh, jax.P("data"))
        >>> placed["tokens"].sharding.spec == jax.P("data")
        True
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    shardings = []
    for (path, leaf), leaf_spec in zip(paths, _spread(spec, tree), strict=True):
        _check_leaf(_name(path), leaf, mesh, leaf_spec)
        shardings.append(jax.sharding.NamedSharding(mesh, leaf_spec))
    leaves = [leaf for _, leaf in paths]
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        placed = [_constrain(x, s) for x, s in zip(leaves, shardings, strict=True)]
    else:
        placed = jax.device_put(leaves, shardings)
    return structure.unflatten(placed)


def _constrain(leaf: Any, sharding: jax.sharding.NamedSharding) -> Any:
    """Explicit axes are part of the type and are changed; Auto ones are advised."""
    if jax.sharding.AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(leaf, sharding)
    return jax.lax.with_sharding_constraint(leaf, sharding)


def _spread(spec: Any, tree: Any) -> list[jax.P]:
    """One PartitionSpec for each leaf of tree."""
    specs = jax.tree.map(_read_spec, spec, is_leaf=lambda x: x is None)
    is_spec = lambda x: isinstance(x, jax.P)  # noqa: E731
    try:
        full = jax.tree.broadcast(specs, tree, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(
            f"distribute: spec is not a pytree prefix of tree: {error}.\nPass one "
            "PartitionSpec for all leaves, or a tree of the same structure with a "
            "PartitionSpec or None where a subtree or leaf stands."
        ) from None
    return jax.tree.leaves(full, is_leaf=is_spec)


def _read_spec(spec: Any) -> jax.P:
    if spec is None:
        return jax.P()
    if isinstance(spec, jax.P):
        return spec
    raise TypeError(
        f"distribute: spec holds {spec!r} of type {type(spec).__name__}.\n"
        f"Write a PartitionSpec, jax.P({spec!r}), or None for replication."
    )


def _check_leaf(name: str, leaf: Any, mesh: jax.sharding.Mesh, spec: jax.P) -> None:
    try:
        described = f"{name}: {jax.typeof(leaf).str_short(short_dtypes=True)}"
    except TypeError as error:
        raise TypeError(
            f"distribute: {name} has type {type(leaf).__name__}, which is not an array "
            f"({error}).\nPass arrays, NumPy arrays of numbers or Python numbers."
        ) from None
    shape = np.shape(leaf)
    if len(spec) > len(shape):
        raise ValueError(
            f"distribute: {spec} has {len(spec)} entries but {described} has "
            f"{len(shape)} dimensions.\nShorten the spec, or pass a pytree of specs "
            "with jax.P() for this leaf."
        )
    for place, entry in enumerate(spec):
        _check_dimension(described, place, shape[place], entry, mesh)


def _check_dimension(
    described: str, place: int, size: int, entry: Any, mesh: jax.sharding.Mesh
) -> None:
    if entry is None or entry is jax.P.UNCONSTRAINED:
        return
    axes = entry if isinstance(entry, tuple) else (entry,)
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing:
        raise ValueError(
            f"distribute: spec names the mesh axis {missing[0]!r}, but the mesh has "
            f"{dict(mesh.shape)} ({described}).\nUse one of its axes, or make a mesh "
            "with that axis."
        )
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if size % parts:
        wanted = " x ".join(f"{axis!r}" for axis in axes)
        raise ValueError(
            f"distribute: dimension {place} of {described} has size {size}, which mesh "
            f"axis {wanted} of size {parts} does not divide.\nPad or crop it to "
            f"{parts * math.ceil(size / parts)} or {size // parts * parts}, use fewer "
            "devices, or leave this dimension unsplit (None)."
        )


def _name(path: tuple) -> str:
    return f"tree{jax.tree_util.keystr(path)}"
