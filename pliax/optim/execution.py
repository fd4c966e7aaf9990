"""How the matrices of a whole tree are orthogonalised: singly, in stacks, by owners.

All three compute the same. They differ in how many products there are, of what size,
and in what travels between devices::

    per_matrix   one product after another: a CPU gains nothing from stacks
    stacked      matrices of one shape are one stack: few large products
    owner        each device of a mesh axis orthogonalises a share of each stack

"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .matrix_axes import MatrixAxes, matrices
from .newton_schulz import NewtonSchulz
from .ownership import Local, by_owners
from .stacks import Stack, apply_to_stacks, by_shape, cut, wide


EXECUTIONS = ("auto", "per_matrix", "stacked", "owner")


@dataclasses.dataclass(frozen=True)
class Execution:
    """How matrices are orthogonalised.

    Attributes:
        local: what one device does with stacks of matrices.
        owners: the mesh axes whose devices own matrices; None where each device has
            its part in every product, or there is one.
    """

    local: Local
    owners: tuple[str, ...] | None = None

    def __call__(
        self, leaves: Sequence[Array], axes: Sequence[MatrixAxes], how: NewtonSchulz
    ) -> list[Array]:
        """Each leaf orthogonalised, in the working dtype."""

        def run(*leaves: Array) -> tuple[Array, ...]:
            rounded = [how.round(leaf) for leaf in leaves]
            if self.owners is not None:
                return by_owners(rounded, how, axes, self.owners, self.local)
            recipes = [matrices(a, x.shape) for a, x in zip(axes, leaves, strict=True)]
            return apply_to_stacks(recipes, rounded, lambda x: self.local(x, how))

        shardings = tuple(jax.typeof(leaf).sharding for leaf in leaves)
        if not any(sharding.mesh.explicit_axes for sharding in shardings):
            return list(run(*leaves))
        # JAX refuses products over dimensions that Explicit axes shard.
        partitioned: Any = jax.sharding.auto_axes(run, out_sharding=shardings)
        return list(partitioned(*leaves))


def choose_execution(
    name: str, mesh: jax.sharding.Mesh | None, axis: str | tuple[str, ...] | None
) -> Execution:
    """The execution of that name; "auto" goes by the mesh and the default backend.

    Raises:
        ValueError: for another name, owners without a mesh, a mesh without owners, or
            an axis that the mesh does not have.
    """
    if name not in EXECUTIONS:
        raise ValueError(
            f"execution should be one of {', '.join(map(repr, EXECUTIONS))} but is: "
            f"{name!r}"
        )
    local = one_by_one if jax.default_backend() == "cpu" else in_stacks
    if name == "owner" or (name == "auto" and mesh is not None):
        return Execution(local, _owners(mesh, axis))
    if mesh is not None or axis is not None:
        raise ValueError(
            f"mesh and axis are for execution='owner', but execution is {name!r}. "
            "Leave them out, or name that."
        )
    return Execution({"per_matrix": one_by_one, "stacked": in_stacks}.get(name, local))


def _owners(
    mesh: jax.sharding.Mesh | None, axis: str | tuple[str, ...] | None
) -> tuple[str, ...]:
    if mesh is None:
        raise ValueError(
            "execution='owner' needs to know whose devices own matrices: pass mesh= "
            "and, if it has several axes, axis=."
        )
    names = tuple(mesh.axis_names)
    if axis is None and len(names) > 1:
        raise ValueError(
            f"mesh has the axes {names}: say with axis= over which of them matrices "
            "are owned, which is that over which parameters are sharded."
        )
    chosen = names if axis is None else (axis,) if isinstance(axis, str) else axis
    missing = [name for name in chosen if name not in names]
    if missing:
        raise ValueError(
            f"axis names {missing[0]!r}, but the mesh has the axes {names}."
        )
    return tuple(chosen)


# --- on one device --------------------------------------------------------------------


def one_by_one(stacks: Sequence[Stack], how: NewtonSchulz) -> list[Stack]:
    """Matrix after matrix: batched products are slow on a CPU, even those of one."""
    return [how(x[0])[None] if len(x) == 1 else lax.map(how, x) for x in stacks]


def in_stacks(stacks: Sequence[Stack], how: NewtonSchulz) -> list[Stack]:
    """All matrices of a shape, or of its transpose, at once."""
    results: list[Any] = [None] * len(stacks)
    for numbers in by_shape([x.shape[1:] for x in stacks]):
        done = how(jnp.concatenate([wide(stacks[i]) for i in numbers]))
        lengths = [len(stacks[i]) for i in numbers]
        for i, part in zip(numbers, cut(done, lengths), strict=True):
            results[i] = part if part.shape == stacks[i].shape else part.mT
    return results
