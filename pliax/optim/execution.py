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
from jaxtyping import Array

from pliax.core.manual_axes import may_be_partitioned, varying_axes
from pliax.kernels._hopper import refused_counting, refused_device

from . import one_pass
from .matrix_axes import MatrixAxes, matrices
from .momentum import Momentum
from .newton_schulz import NewtonSchulz, squares
from .one_pass import Fresh, is_served
from .ownership import Local, Pair, by_owners
from .stacks import (
    Stack,
    apply_to_stacks,
    cut,
    devices,
    grouped,
    joined,
    portions,
    whole_pieces,
)


EXECUTIONS = ("auto", "per_matrix", "stacked", "owner")

type Given = tuple[Array, Array, MatrixAxes]  # a gradient, its momentum, what they are


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
        self,
        gradients: Sequence[Array],
        momenta: Sequence[Array],
        axes: Sequence[MatrixAxes],
        how: NewtonSchulz,
        rule: Momentum,
    ) -> tuple[list[Array], list[Array]]:
        """Each leaf's direction orthogonalised, in the working dtype; the momenta."""
        given = list(zip(gradients, momenta, axes, strict=True))
        is_one_pass = [self._is_one_pass(*x, how) for x in given]
        results: list[Any] = [None] * len(given)
        buffers = list(results)
        for is_one, run in ((True, in_one_pass), (False, self._in_two)):
            numbers = [i for i, x in enumerate(is_one_pass) if x is is_one]
            done = run([given[i] for i in numbers], how, rule)
            for i, x, buffer in zip(numbers, *done, strict=True):
                results[i], buffers[i] = x, buffer
        return results, buffers

    def _is_one_pass(self, G: Array, M: Array, axes: MatrixAxes, how: Any) -> bool:
        """Whether momentum, rounding and stacking are one kernel."""
        if self.owners is not None or self._local is not in_stacks:
            return False
        recipe = matrices(axes, G.shape)
        sides = recipe.stack_shape[1:]
        return is_served(G, M, recipe, how) and padded_sides(sides, how) == sides

    def _in_two(
        self, given: Sequence[Given], how: NewtonSchulz, rule: Momentum
    ) -> tuple[list[Array], list[Array]]:
        """Momentum leaf by leaf, then what it orthogonalises."""
        moved = [rule(G, M)[::-1] for G, M, _ in given]  # look-aheads, next momenta
        results: list[Any] = [None] * len(given)
        buffers = [buffer for _, buffer in moved]
        shardings = [[jax.typeof(x).sharding for x in two] for two in moved]
        meshes = [s.mesh if s.mesh.explicit_axes else None for s, _ in shardings]
        for numbers in grouped(meshes):
            axes = [given[i][2] for i in numbers]
            run: Any = functools.partial(self._run, how, rule, axes)
            if meshes[numbers[0]] is not None:
                # JAX refuses products over dimensions that Explicit axes shard.
                wanted = tuple(zip(*(shardings[i] for i in numbers), strict=True))
                run = jax.sharding.auto_axes(run, out_sharding=wanted)
            done = run([moved[i] for i in numbers], [given[i][:2] for i in numbers])
            for i, x, buffer in zip(numbers, *done, strict=True):
                results[i], buffers[i] = x, buffer
        return results, buffers

    def _run(
        self,
        how: NewtonSchulz,
        rule: Momentum,
        axes: Sequence[MatrixAxes],
        moved: Sequence[Pair],
        pairs: Sequence[Pair],
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Of look-aheads and next momenta; and of the pairs that these were made of.

        Devices that have their part of a pair may make both of it themselves.
        """
        ahead = [how.round(x) for x, _ in moved]
        buffers = tuple(buffer for _, buffer in moved)
        if self.owners is not None:
            moved = list(zip(ahead, buffers, strict=True))
            return by_owners(pairs, moved, how, rule, axes, self.owners, self._local)
        recipes = [matrices(a, x.shape) for a, x in zip(axes, ahead, strict=True)]
        return apply_to_stacks(recipes, ahead, lambda x: self._local(x, how)), buffers

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
    return *x.shape[1:], devices(x), varying_axes(x)


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
            lengths, sides = [len(x) for x in taken], taken[0].shape[1:]
            padded = padded_sides(sides, how)
            sums = [squares(x) for x in taken]
            # Made by then, so that each reads its gradient and momentum once.
            taken, sums, done = lax.optimization_barrier((taken, sums, done))
            if len(taken) == 1 and padded == sides:
                done = how.of_squares(taken[0], jnp.sum(sums[0], axis=1))
            else:
                norms = cut(how.norms(jnp.concatenate(sums)), lengths)
                normalised = list(map(how.normalised, taken, norms))
                done = how.iterate(joined(normalised, padded))
            parts = cut(done, lengths, *sides)
            for i, part in zip(portion, parts, strict=True):
                results[i] = part
    return results


def in_one_pass(
    given: Sequence[Given], how: NewtonSchulz, rule: Momentum
) -> tuple[list[Array], list[Array]]:
    """The same, where one kernel makes of gradients and momenta what is stacked."""
    recipes = [matrices(axes, G.shape) for G, _, axes in given]
    return one_pass.orthogonalised([Fresh(*x[:2], rule) for x in given], recipes, how)


def padded_sides(sides: tuple[int, ...], how: NewtonSchulz) -> tuple[int, ...]:
    """Of matrices in a stack, filled with zeros where products gain by that."""
    may_be_fused = how.bears_zeros and how.dtype == jnp.bfloat16
    if not may_be_fused or may_be_partitioned():
        return sides
    is_refused = refused_device() or refused_counting()
    return sides if is_refused else whole_pieces(sides)
