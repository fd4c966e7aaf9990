"""How the matrices of a whole tree are orthogonalised: singly, in stacks, by owners.

All three compute the same. They differ in how many products there are, of what size,
and in what travels between devices::

    per_matrix   one product after another: a CPU gains nothing from stacks
    stacked      matrices of one shape are one stack: few large products
    owner        each device of a mesh axis orthogonalises a share of each stack

"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array

from pliax.core.manual_axes import varying_axes

from .matrix_axes import MatrixAxes, matrices
from .newton_schulz import NewtonSchulz, squares
from .ownership import Local, by_owners
from .stacks import Stack, apply_to_stacks, cut, grouped, joined, portions


EXECUTIONS = ("auto", "per_matrix", "stacked", "owner")


@dataclasses.dataclass(frozen=True)
class Execution:
    """How matrices are orthogonalised.

    Attributes:
        name: what one device does with stacks of matrices: "per_matrix", "stacked", or
            "auto", which goes by the default backend.
        owners: the mesh axes whose devices own matrices; None where each device has
            its part in every product, or there is one.
    """

    name: str
    owners: tuple[str, ...] | None = None

    def __call__(
        self, leaves: Sequence[Array], axes: Sequence[MatrixAxes], how: NewtonSchulz
    ) -> list[Array]:
        """Each leaf orthogonalised, in the working dtype."""
        results: list[Any] = [None] * len(leaves)
        shardings = [jax.typeof(leaf).sharding for leaf in leaves]
        meshes = [s.mesh if s.mesh.explicit_axes else None for s in shardings]
        for numbers in grouped(meshes):
            run: Any = functools.partial(self._run, [axes[i] for i in numbers], how)
            if meshes[numbers[0]] is not None:
                # JAX refuses products over dimensions that Explicit axes shard.
                wanted = tuple(shardings[i] for i in numbers)
                run = jax.sharding.auto_axes(run, out_sharding=wanted)
            done = run(*(leaves[i] for i in numbers))
            for i, x in zip(numbers, done, strict=True):
                results[i] = x
        return results

    def _run(
        self, axes: Sequence[MatrixAxes], how: NewtonSchulz, *leaves: Array
    ) -> tuple[Array, ...]:
        rounded = [how.round(leaf) for leaf in leaves]
        if self.owners is not None:
            return by_owners(rounded, how, axes, self.owners, self._local)
        recipes = [matrices(a, x.shape) for a, x in zip(axes, leaves, strict=True)]
        return apply_to_stacks(recipes, rounded, lambda x: self._local(x, how))

    @property
    def _local(self) -> Local:
        on_cpu = self.name == "auto" and jax.default_backend() == "cpu"
        return one_by_one if on_cpu or self.name == "per_matrix" else in_stacks


def choose_execution(name: str, mesh: Any, axis: Any) -> Execution:
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
    if name == "owner" or (name == "auto" and mesh is not None):
        return Execution("auto", _owners(mesh, axis))
    if mesh is not None or axis is not None:
        raise ValueError(
            f"mesh and axis are for execution='owner', but execution is {name!r}. "
            "Leave them out, or name that."
        )
    return Execution(name)


def _owners(mesh: Any, axis: Any) -> tuple[str, ...]:
    if mesh is None:
        raise ValueError(
            "execution='owner' needs to know whose devices own matrices: pass mesh= "
            "and, if it has several axes, axis=."
        )
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise ValueError(
            f"mesh should be a jax.sharding.Mesh but is: {mesh!r}. Under "
            "optax.inject_hyperparams name it: static_args=('mesh',)."
        )
    names = tuple(mesh.axis_names)
    if axis is None and len(names) > 1:
        raise ValueError(
            f"mesh has the axes {names}: say with axis= over which of them matrices "
            "are owned, which is that over which parameters are sharded."
        )
    chosen = names if axis is None else axis
    chosen = tuple(chosen) if isinstance(chosen, tuple | list) else (chosen,)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"axis should name one or more of {names}, each once, but is: {axis!r}"
        )
    missing = [name for name in chosen if name not in names]
    if missing:
        raise ValueError(
            f"axis names {missing[0]!r}, but the mesh has the axes {names}."
        )
    return chosen


# --- on one device --------------------------------------------------------------------


def _what_stacks_together(x: Stack) -> tuple[Any, ...]:
    """The shape, and where, or over what, an array varies."""
    devices = None if isinstance(x, Tracer) else frozenset(x.devices())
    return *x.shape[1:], devices, varying_axes(x)


def one_by_one(stacks: Sequence[Stack], how: NewtonSchulz) -> list[Stack]:
    """Matrix after matrix: batched products are slow on a CPU, even those of one."""
    return [how(x[0])[None] if len(x) == 1 else lax.map(how, x) for x in stacks]


def in_stacks(stacks: Sequence[Stack], how: NewtonSchulz) -> list[Stack]:
    """Matrices of a shape together: few large products.

    Leaves of a shape make portions that each fill a device, one after the other, so
    that the intermediates of one portion of it are alive.
    """
    results: list[Any] = [None] * len(stacks)
    for numbers in grouped(map(_what_stacks_together, stacks)):
        done = None
        for portion in portions(numbers, [stacks[i].shape for i in numbers]):
            taken = [stacks[i] for i in portion]
            lengths = [len(x) for x in taken]
            sums = [squares(x) for x in taken]
            # Made by then, so that each reads its gradient and momentum once.
            taken, sums, done = lax.optimization_barrier((taken, sums, done))
            norms = cut(how.norms(jnp.concatenate(sums)), lengths)
            done = how.iterate(joined(list(map(how.normalised, taken, norms))))
            parts = cut(done, lengths)
            for i, part in zip(portion, parts, strict=True):
                results[i] = part
    return results
